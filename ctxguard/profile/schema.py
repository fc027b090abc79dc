"""Defines the profile: a calibration's decisions, their evidence, and the system they apply to.

One frozen JSON file (DESIGN.md §6); its JSON Schema is committed as ``profile.schema.json``
beside this module. Reading one executes nothing and needs no library but pydantic. Reads and writes
that file.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, with_config

from ctxguard._support.atomic_write import SHARED, atomic_write
from ctxguard._support.error_text import first_fault
from ctxguard._support.json_values import MOST_VALUES, has_more_values
from ctxguard._support.regular_file import read_regular
from ctxguard._support.rows import distinct_keys
from ctxguard._support.words import count, signed
from ctxguard.core.columns import MOST_COLUMNS, SignalColumn
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.types import Mode, Route, ScoreKind
from ctxguard.core.value_of_information import AnswerModel
from ctxguard.errors import ProfileError, ProfileFormatError
from ctxguard.measure.interval import Interval
from ctxguard.measure.worth import Utilities

SCHEMA_VERSION = 1

WIDEST_BOUND = 0.5
"""A certificate that allows a larger loss of recall promises nothing."""

_MAX_PROFILE_BYTES = 4 * 2**20
"""The largest profile to read, many times as large as calibration writes."""
_MOST_ERRORS = 100
"""With more errors, only their number is reported: describing them takes longer than finding
them."""


_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

# The core's data classes know nothing of pydantic, whose defaults would let a misspelt setting
# of a policy pass unread.
for _core in (
    AnswerModel,
    RatioPolicy,
    ExpectedUtilityPolicy,
    RelevanceModel,
    Fusion,
    Interval,
    Utilities,
    CorpusSketch,
):
    with_config(_STRICT)(_core)

AnyPolicy = Annotated[RatioPolicy | ExpectedUtilityPolicy, Field(discriminator="kind")]


class Frozen(BaseModel):
    """A record in a file: frozen, with only known fields and finite numbers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class RouteEvidence(Frozen):
    """The figures of a policy on labelled queries.

    Attributes:
        queries: Their number.
        metrics: Means with intervals, by metric.
        shown_by: ``folds``: each fifth of the queries was measured by the choice of the others.
            ``held_out``: they took no part in anything.
        most_recall_loss: Upper bound on the mean recall loss, by Student's t with half a lost
            query added: approximately 90%. None where recall loss is undefined.
    """

    queries: Annotated[int, Field(ge=0)]
    metrics: dict[str, Interval]
    shown_by: Literal["folds", "held_out"] = "folds"
    most_recall_loss: float | None = None


class Certificate(Frozen):
    """A proved promise of one route's policy, and the probability that it is false.

    With probability at least 1 − delta over the queries of the test, the policy's mean recall
    loss is at most alpha. It is averaged over queries whose baseline holds a relevant passage;
    elsewhere it is undefined. Each route is certified by itself, and so is the difference in
    recall.

    Attributes:
        baseline_k: Recall loss is relative to this many of the retriever's first passages.
        recall_loss: The mean observed on the test queries.
        n_recall: Test queries on which recall loss is defined.
        recall_difference: Mean recall less that of the baseline, gains included, as observed on
            the ``n`` test queries with a relevant passage, and its proved lower bound, false with
            probability delta; nothing bounds it above. None where only the loss was bounded.
    """

    alpha: float
    delta: float
    baseline_k: Annotated[int, Field(ge=1)]
    test: str
    recall_loss: float
    n_recall: Annotated[int, Field(ge=1)]
    recall_difference: Interval | None = None

    @property
    def promises_nothing(self) -> bool:
        """Whether the bound is too wide to rely on: more than half of the recall may be lost."""
        least = None if self.recall_difference is None else self.recall_difference.lower
        return max(self.alpha, -(least or 0.0)) > WIDEST_BOUND

    @property
    def statement(self) -> str:
        """The certificate in words."""
        said = f"For this route by itself, with probability at least {1 - self.delta:g}: over"
        found, first = self.recall_difference, f"the retriever's first {self.baseline_k}"
        if found is None or found.lower is None or found.value is None:
            return (
                f"{said} queries for which {first} hold a relevant passage, mean recall loss is at "
                f"most {self.alpha:g} ({self.test}; {count(self.n_recall, 'such test query')}, "
                f"observed {self.recall_loss:.3f})."
            )
        # In full: rounded to nearest, the words could claim more than the bound.
        least = f"at most {abs(found.lower):.3g} below"
        if found.lower > 0.0:
            least = f"at least {found.lower:.3g} above"
        return (
            f"{said} queries that have a relevant passage, mean recall is {least} that of {first} "
            f"({self.test}; {count(found.n, 'such test query')}, observed {signed(found.value)})."
        )


class RouteVerdict(Frozen):
    """States whether labels show that a route's policy may be served.

    ``enforce``: it is safe, and a gain is shown. ``shadow``: not shown to be safe; it decides and
    is recorded, and the first ``serving_k`` passages are served. ``keep``: no gain is shown, or the
    labels refute what was chosen; the first ``serving_k`` are the route's policy.

    Attributes:
        n: Queries, or judged requests, with a relevant passage.
        recall: Their mean recall less that of the first ``serving_k``; None where nothing was
            tested. Its lower bound is Student's t with half a lost query added, approximately 90%;
            the upper one is the plain t.
        udcg: Likewise for UDCG, over all queries.
        tokens: Tokens less those of the first ``serving_k``, as a share of them, with plain bounds
            of 90%; passages where tokens are unknown.
        serving_k: How many passages are served today.
        tolerance: ``enforce`` needs mean recall of at most this below today's.
        max_loss: ``enforce`` needs lower bounds on recall and UDCG of at most this below today's.
        shown_by: ``folds``: each fifth of the labelled queries was measured by what the others
            chose. ``held_out`` queries took no part in anything. ``grades``: so were judged
            requests, of which people graded n in part.
        extends: Whether the policy serves the first ``serving_k`` in their order and goes on from
            there, so that recall cannot fall; it is enforced for its gain.
        n_needed: About how many queries with a relevant passage would decide, if they are like
            these; None where the verdict is ``enforce``, or no number would as far as is known.
    """

    decision: Literal["enforce", "shadow", "keep"]
    n: Annotated[int, Field(ge=0)]
    recall: Interval | None = None
    udcg: Interval | None = None
    tokens: Interval | None = None
    serving_k: Annotated[int, Field(ge=1)]
    tolerance: float
    max_loss: float
    shown_by: Literal["folds", "held_out", "grades"] = "folds"
    extends: bool = False
    n_needed: Annotated[int, Field(ge=1)] | None = None

    @property
    def mode(self) -> Mode:
        """The route's mode in a guard without a mode of its own."""
        return Mode.SHADOW if self.decision == "shadow" else Mode.ENFORCE

    @property
    def short(self) -> str:
        """The decision and its reason, without the figures."""
        first = f"the first {self.serving_k}"
        if self.decision == "enforce":
            if self.extends:
                return f"enforce: {first} stay and more follow, so that recall cannot fall"
            return f"enforce: safe, with {' and '.join(self.gains)} than {first}"
        if self.decision == "shadow":
            few = f"{self._few} too few to show anything"
            return f"shadow: {few if self._is_untested else 'not shown to be safe yet'}"
        if self._is_untested:
            return f"keep: no other policy is shown to be better than {first}, which stay"
        if self._is_safe:
            return "keep: safe, but no gain is shown"
        return f"keep: worse than {first}, which stay"

    @property
    def gains(self) -> tuple[str, ...]:
        """The gains over today's context that a policy is shown to have, in words."""
        tokens, recall, udcg = (
            each or Interval.undefined() for each in (self.tokens, self.recall, self.udcg)
        )
        shown = [
            *["higher recall"] * ((recall.lower or 0.0) > 0.0),
            *["fewer tokens"] * ((tokens.upper or 0.0) < 0.0),
        ]
        if shown:
            return tuple(shown)
        # The lower bounds that are stored are more careful than those that show a gain.
        has_utility = (udcg.lower or 0.0) > 0.0 or (recall.value or 0.0) <= 0.0
        return ("higher UDCG",) if has_utility else ("higher recall",)

    @property
    def statement(self) -> str:
        """The verdict in words, with its figures."""
        records = f"the guard decides and records, and serves the first {self.serving_k}"
        if self._is_untested:
            if self.decision == "shadow":
                return f"{self.short}; {records}{self._needed}"
            few = "" if self.n_needed is None else f"; {self._few} few{self._needed}"
            return f"{self.short}{few}"
        differences = []
        if self.tokens is not None and self.tokens.value is not None:
            differences.append(f"tokens differ by {self.tokens.value:+.0%}")
        for name, each in (("recall", self.recall), ("UDCG", self.udcg)):
            if each is not None and each.value is not None:
                ends = "" if each.bounds is None else " [{}, {}]".format(*map(signed, each.bounds))
                differences.append(f"{name} by {signed(each.value)}{ends}")
        noun, rest = {
            "folds": ("labelled query", ", each measured with the choice made on the others"),
            "held_out": ("held-out query", ""),
            "grades": ("judged request", " that people graded in part"),
        }[self.shown_by]
        said = f"{self.short}: {', '.join(differences)}, on {count(self.n, noun)}{rest}"
        if self.decision == "shadow":
            return (
                f"{said}; at most {self.tolerance:g} of recall may be lost on the mean, and "
                f"{self.max_loss:g} at the lower bounds; {records}{self._needed}"
            )
        if self.decision == "keep" and self._is_safe:
            return f"{said}, so the first {self.serving_k} stay{self._needed}"
        return said

    @property
    def _few(self) -> str:
        queries = count(self.n, "labelled query")
        return f"{queries} with a relevant passage {'is' if self.n == 1 else 'are'}"

    @property
    def _is_untested(self) -> bool:
        return self.recall is None or self.recall.value is None

    @property
    def _is_safe(self) -> bool:
        """Whether the figures show no loss beyond the limits."""
        found = self.recall or Interval.undefined()
        return (found.value or 0.0) >= -self.tolerance and (found.lower or 0.0) >= -self.max_loss

    @property
    def _needed(self) -> str:
        if self.n_needed is None:
            return "; more queries like these would not change that"
        if self._is_untested:
            return f"; it takes {self.n_needed} or more"
        return f"; about {count(self.n_needed, 'such query')} would probably decide"


class SufficiencyProfile(Frozen):
    """How a route detects that nothing relevant was kept, and how often it is wrong.

    With probability at least 1 − delta over the queries, of contexts that hold a relevant passage
    at most a share alpha is called insufficient. Each route is certified by itself. The statement
    is approximate where ``shown_by`` is ``folds``, as in ``RouteEvidence``.

    Attributes:
        threshold: A context is called insufficient if P(relevant) of its best kept passage is
            below it, in [0, 1]; None if no threshold could be certified.
        model: P(relevant), for a policy without probabilities; None if the policy has its own, or
            no model was fitted.
        n_sufficient: Contexts of queries without a part in the choice that hold a relevant passage.
        n_insufficient: Such contexts that hold no relevant passage.
        false_alarms: How many of the sufficient contexts fall below the threshold; None without
            one.
        detected: Likewise of the insufficient ones.
        auroc: AUROC of the probability on these contexts; None if they are of one kind.
        needed: The fewest contexts with a relevant passage that give a threshold.
    """

    threshold: Annotated[float, Field(ge=0, le=1)] | None
    model: RelevanceModel | None = None
    alpha: float
    delta: float
    n_sufficient: Annotated[int, Field(ge=0)]
    n_insufficient: Annotated[int, Field(ge=0)]
    false_alarms: int | None
    detected: int | None
    auroc: float | None
    needed: Annotated[int, Field(ge=1)]
    shown_by: Literal["folds", "held_out"] = "folds"

    @property
    def statement(self) -> str:
        """The certificate in words, or why there is none."""
        queries = "labelled" if self.shown_by == "folds" else "held-out"
        if self.threshold is None:
            return (
                f"No context is called insufficient: a threshold needs {self.needed} {queries} "
                f"queries whose context holds a relevant passage, and there were "
                f"{self.n_sufficient}."
            )
        return (
            f"For this route by itself, with probability at least {1 - self.delta:g}: of contexts "
            f"that hold a relevant passage, at most {self.alpha:.3g} are called insufficient "
            f"(exact binomial; {self.false_alarms} of {self.n_sufficient} were). Of "
            f"{self.n_insufficient} that hold none, {self.detected} were."
        )


class AssessorProfile(Frozen):
    """An assessor of one route: when it is asked, and the policy that uses its answers.

    As in the verdict, figures come from queries that had no part in the choice they measure.

    Attributes:
        fingerprint: Identifies the assessor; any other is not asked.
        name: The answer that counts: the one that adds most to P.
        policy: Applied to P after the answers; k and threshold were chosen with them. Without any
            answer, the route serves as it would without an assessor.
        price: The value that asking about one candidate must have, in UDCG.
        first: Only this many candidates of highest P are asked about.
        decision: ``enforce`` applies the answers; ``shadow`` only asks and records them.
        verdict: On the policy with the answers; None where nobody judged it.
        gain: UDCG of a request with the answers, less that of what is served without and
            less the price of what is asked; bounds by Student's t, 90% each. None without a
            verdict.
        forecast: The gain to expect on other queries: ``gain``, corrected for having been selected
            as shown; None where that is not known.
        share: Share of the first candidates that are asked about.
        calls: How many of 1,000 requests ask.
        cost: Cost of 1,000 requests, in the currency of the assessor's prices; None without prices.
    """

    fingerprint: str
    name: str
    model: AnswerModel
    policy: ExpectedUtilityPolicy
    price: Annotated[float, Field(ge=0)]
    first: Annotated[int, Field(ge=1, le=100)]
    decision: Literal["enforce", "shadow"]
    verdict: RouteVerdict | None = None
    gain: Interval | None = None
    forecast: float | None = None
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    calls: Annotated[float, Field(ge=0, le=1_000)] = 0.0
    cost: float | None = None

    @property
    def statement(self) -> str:
        """The gain from asking, and why the answers are not applied if they are not."""
        words = f"{self.decision}: {self.name} has d′ {self.model.distance:.2f} beside P"
        gain, verdict = self.gain, self.verdict
        if gain is None or gain.value is None or gain.lower is None or verdict is None:
            return words
        seen = None if verdict.recall is None else verdict.recall.value
        recall = "" if seen is None else f", recall by {signed(seen)} from today's"
        change = "by how much is not known"
        if self.forecast is not None:
            change = f"by about {signed(self.forecast)}"
        words += (
            f"; asked about {self.share:.0%} of the first {self.first}, its answers change "
            f"UDCG net of the price {self.price:.3g}, {change} "
            f"({signed(gain.lower)} at least, 90%){recall}"
        )
        if self.decision == "enforce":
            return words
        lacking = "recall is" if gain.lower > 0.0 else "the gain is"
        return f"{words}. They are recorded, not applied: {lacking} not shown to hold"


class RouteProfile(Frozen):
    """The policy of one route, with its evidence.

    Attributes:
        policy: The guard applies it when exactly this route answered.
        score_kind: The kind of the route's scores; a ranking of another kind is a mismatch.
        why: Why this kind of policy was chosen, in words.
        verdict: Whether the policy may be served; None where nobody judged it, as in a profile of
            safe policies: it is served then.
        certificate: The proved promise of the policy; None where nothing was proved.
        evidence: The choice's figures on queries that had no part in it; None where nothing was
            measured.
        safe_policy: Gives up the least recall against the certificate's baseline; served
            when that certificate no longer holds; None where nothing was calibrated.
        sufficiency: How to tell that the policy kept nothing relevant; None where that could not
            be fitted.
        assessor: The assessor asked about candidates once the policy has decided; None for nobody.
        unasked: Why nobody is asked although an assessor was calibrated, in words.
    """

    policy: AnyPolicy
    score_kind: ScoreKind
    why: str = ""
    verdict: RouteVerdict | None = None
    certificate: Certificate | None = None
    evidence: RouteEvidence | None = None
    safe_policy: AnyPolicy | None = None
    sufficiency: SufficiencyProfile | None = None
    assessor: AssessorProfile | None = None
    unasked: str = ""

    @property
    def recall_promise(self) -> tuple[float, int, str] | None:
        """The mean recall loss, in [0, 1], that the policy promises; None if nothing bounds it.

        With it, how many of the retriever's first passages it is relative to, and its source:
        ``certificate``, or ``evidence of calibration``, which is approximate.
        """
        if self.certificate is not None:
            return self.certificate.alpha, self.certificate.baseline_k, "certificate"
        if self.evidence is None or self.evidence.most_recall_loss is None or self.verdict is None:
            return None
        most, k = self.evidence.most_recall_loss, self.verdict.serving_k
        return most, k, "evidence of calibration"

    @property
    def asking(self) -> str:
        """The assessor's gain, or why it is not asked, in words; empty without an assessor."""
        return self.unasked if self.assessor is None else self.assessor.statement


class Provenance(Frozen):
    """How a profile was made.

    Attributes:
        utilities_source: The reader whose answers the utilities were fitted to, or those set by
            hand, in words; None for the preset.
    """

    ctxguard_version: str
    seed: int
    dataset: str
    dataset_digest: str
    depth: Annotated[int, Field(ge=1)]
    versions: dict[str, str] = Field(default_factory=dict)
    notes: Annotated[tuple[str, ...], FailFast()] = ()
    utilities_source: str | None = None


class Profile(Frozen):
    """A calibration: one policy per route, valid only for the system it was made on.

    Attributes:
        routes: The policy and its evidence for each calibrated route.
        fusion: How the legs were fused; the guard sets it on a retriever that can.
        utilities: The assumed worth of a passage.
        fingerprint: Identifies the system by embedder, analyser, reranker, corpus, … Empty for
            a retriever that gave none: the profile is then unverified.
        corpus: A sketch of the searched passages, to measure how much of them has changed; None if
            the retriever gave none.
        provenance: How it was made; no date, so that the same labels give the same bytes.
        signal_columns: The columns of the passages' metadata from which signals are computed.
    """

    schema_version: Literal[1] = 1
    routes: dict[Route, RouteProfile]
    fusion: Fusion = Fusion()
    utilities: Utilities = Utilities()
    fingerprint: dict[str, str] = Field(default_factory=dict)
    corpus: CorpusSketch | None = None
    provenance: Provenance
    signal_columns: Annotated[
        tuple[SignalColumn, ...], FailFast(), Field(max_length=MOST_COLUMNS)
    ] = ()

    @property
    def profile_id(self) -> str:
        """The first 12 hexadecimal digits of the digest of the profile's canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    @property
    def verdict(self) -> RouteVerdict | None:
        """The verdict on the route that answers if every stage works."""
        main = next((route for route in Route if route in self.routes), None)
        return None if main is None else self.routes[main].verdict

    @property
    def unverified(self) -> bool:
        """Whether nothing identifies the system that the profile was calibrated on."""
        return not self.fingerprint

    def to_json(self) -> str:
        """Write canonical JSON: the same profile gives the same bytes."""
        data = self.model_dump(mode="json")
        return json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"

    def safe(self) -> "Profile":
        """Return the profile with each route's safe policy, to be used if a certificate fails.

        Nothing is certified, and evidence that belongs to the former policies is left out.

        Raises:
            ProfileError: a route names no safe policy.
        """
        lacking = sorted(route.value for route, own in self.routes.items() if not own.safe_policy)
        if lacking:
            raise ProfileError(
                f"profile {self.profile_id} names no safe policy for {', '.join(lacking)}; "
                "calibrate again with this release"
            )
        why = f"the safe policy of profile {self.profile_id}: it gives up the least recall"
        routes = {
            route: RouteProfile(
                policy=own.safe_policy,
                score_kind=own.score_kind,
                why=why,
                safe_policy=own.safe_policy,
            )
            for route, own in self.routes.items()
            if own.safe_policy is not None
        }
        note = f"safe policies of profile {self.profile_id}, uncertified"
        notes = (*self.provenance.notes, note)
        provenance = self.provenance.model_copy(update={"notes": notes})
        return self.model_copy(update={"routes": routes, "provenance": provenance})

    def save(self, path: Path | str) -> None:
        """Write atomically: a reader sees the old profile or the new one, never half of it.

        Raises:
            ProfileError: it cannot be written, as on a full disk.
        """
        try:
            with atomic_write(Path(path), mode=SHARED) as stream:
                stream.write(self.to_json().encode())
        except OSError as error:
            raise ProfileError(
                f"{path}: the profile cannot be written ({error.strerror or error}): make room, or "
                "name a file in a folder that you may write to; the former file is unchanged"
            ) from error

    @classmethod
    def load(cls, path: Path | str) -> "Profile":
        """Read a profile.

        Raises:
            ProfileFormatError: the file is absent, is not JSON, or is not a profile of this
                schema; the message names the field.
        """
        path = Path(path)
        try:
            content = read_regular(path, _MAX_PROFILE_BYTES)
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            cause = getattr(error, "strerror", None) or error
            raise ProfileFormatError(
                f"{path}: cannot be read as a profile ({cause}); `ctxguard calibrate` writes one"
            ) from error
        # Each value that does not fit costs a microsecond and 500 bytes.
        if has_more_values(content):
            raise ProfileFormatError(
                f"{path}: not a profile, since it has over {MOST_VALUES:,} values"
            )
        try:
            data = json.loads(
                text,
                parse_constant=_refuse_constant,
                parse_int=_whole_number,
                object_pairs_hook=distinct_keys,
            )
        except (ValueError, RecursionError) as error:
            raise ProfileFormatError(f"{path}: not JSON ({error})") from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise ProfileFormatError(
                f"{path}: schema_version is {version!r:.80}, but this release reads "
                f"{SCHEMA_VERSION}; calibrate again with this release"
            )
        try:
            # Read as JSON, an array is a tuple and a string an enumeration's member; but neither
            # true nor "1" is a number.
            return cls.model_validate_json(content, strict=True)
        except ValidationError as error:
            n_errors = error.error_count()
            if n_errors <= _MOST_ERRORS:
                raise ProfileFormatError(f"{path}: {first_fault(error)}") from error
        # Raised outside the handler, or this error would keep that one and everything it found.
        raise ProfileFormatError(f"{path}: {n_errors:,} fields do not match the schema")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _whole_number(digits: str) -> int:
    """Read an integer of at most 64 bits, because later arithmetic has no more."""
    number = int(digits)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{digits:.40} has over 64 bits")
    return number


if __name__ == "__main__":
    print(json.dumps(Profile.model_json_schema(), indent=2, sort_keys=True))  # noqa: T201  it is a command
