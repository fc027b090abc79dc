"""``ctxguard evaluate``: what a profile, or a fixed k, achieves on labelled queries."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from ctxguard._support.settings import setting
from ctxguard.cli import _options
from ctxguard.cli._comparison import difference_in_words
from ctxguard.cli._console import (
    NO_DATA,
    Output,
    check_writable,
    interval,
    number,
    print_json,
    short_interval,
    table,
)
from ctxguard.cli._inputs import (
    DEFAULT_BASELINE,
    baseline_k,
    compared,
    fitted,
    read_labelled,
    seen_in_calibration,
    with_utilities,
)
from ctxguard.cli._pools import (
    beyond_index,
    check_score_kind,
    for_run,
    fusion_of,
    notes_on_pools,
    on_route,
    served_depth,
    served_route,
    write_pools,
)
from ctxguard.cli._system import System
from ctxguard.cli._tables import Rows
from ctxguard.core.types import DEFAULT_K, Route
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from calibration.compare.paired_differences import Difference
    from calibration.evaluate import QueryMetrics
    from ctxguard.cli._inputs import Labelled
    from ctxguard.cli._system import Source
    from ctxguard.core.policies import Policy
    from ctxguard.profile.schema import Interval, Profile

_BEFORE_THE_POLICY = ("recall_at_depth", "ndcg_at_10")
_WIDE = 100


class Evaluate(System):
    """Settings of ``ctxguard evaluate``."""

    data: _options.LabelledQueries
    profile: _options.ProfileFile = None
    k: Annotated[
        int | None,
        setting(
            "Measure the first N passages. With --profile they stand beside it, in the order of "
            "its fusion.",
            "N",
            "--k",
            "-k",
            default=f"{DEFAULT_K} without a profile",
            ge=1,
        ),
    ] = None
    route: _options.OneRoute = None
    write_run: Annotated[
        Path | None, setting("TREC run file to write the retrieved candidates to.", "FILE")
    ] = None
    seed: _options.Seed = 0
    as_json: _options.AsJson = False


def evaluate(settings: Evaluate) -> None:
    """Measure a profile, or the first k passages, on labelled queries.

    The candidates come from an index, a retriever of your own (--retriever), a TREC run (--run)
    or lists that a server reranks (rerank-upstream in --system).
    Prints the mean of each metric with its bootstrap interval; with --profile and --k, also the
    differences between the two, paired by query. A profile that was calibrated on another system
    is refused.
    """
    from calibration.evaluate import measure
    from calibration.pool_labels import unlabelled_note
    from calibration.replay import replay
    from ctxguard.core.metrics import DEFAULT_UTILITIES
    from ctxguard.core.policies import RatioPolicy
    from ctxguard.profile.schema import Profile
    from ctxguard.retrieval.index.passages import searchable_text

    output = Output(as_json=settings.as_json)
    if settings.write_run is not None:
        check_writable(settings.write_run, "--write-run")
    loaded = None if settings.profile is None else Profile.load(settings.profile)
    utilities = with_utilities(
        DEFAULT_UTILITIES if loaded is None else loaded.utilities, settings.utility
    )
    labelled = for_run(read_labelled(settings.data, "test"), settings.run)
    with output.doing("opening the retriever"):
        source = settings.open(labelled.dataset.queries)
    source = source if loaded is None else fitted(loaded, source)
    labelled, counts = labelled.against(source)
    dataset, k, seed = labelled.dataset, settings.k, settings.seed
    route = served_route(source, loaded) if settings.route is None else settings.route
    policy, baseline = _policy(loaded, route, k)
    most = max(policy.k, k or 0)
    depth = served_depth(settings.depth, most, loaded)
    if not dataset.answerable and not dataset.keywords:
        raise CalibrationError(
            f"{dataset.name}: none of the {len(dataset)} queries has a relevant passage or "
            "keywords, so there is nothing to measure"
        )
    with output.passes() as begin:
        progress = begin(f"replaying {route.value}", len(dataset))
        pools = replay(on_route(source, route), dataset.queries, depth=depth, progress=progress)
    check_score_kind(pools, route, loaded)
    with output.doing("measuring"):

        def measured(by: "Policy") -> "QueryMetrics":
            return measure(
                pools,
                dataset,
                by,
                utilities,
                baseline_k=baseline_k(baseline),
                text_of=lambda passage_id: searchable_text(source.passage(passage_id)),
            )

        of_policy = measured(policy)
        metrics = of_policy.evidence(seed).metrics
        first_k = None
        if loaded is not None and k is not None:
            first_k = _first_k(k, of_policy, measured(RatioPolicy(k=k)), seed)
    notes = [
        *labelled.notes,
        *notes_on_pools(pools, route, settings.run),
        *_reservations(loaded, labelled, source),
    ]
    notes += _notes(metrics) + beyond_index(source, most) + write_pools(pools, settings.write_run)
    profile_id = None if loaded is None else loaded.profile_id
    if settings.as_json:
        print_json(
            {
                "metrics": {name: estimate.model_dump() for name, estimate in metrics.items()},
                **counts,
                "measured_queries": len(pools),
                "data": dataset.name,
                "split": labelled.split,
                "dataset_digest": dataset.digest(),
                "profile_id": profile_id,
                "policy": describe_policy(policy),
                "k": policy.k,
                "first_k": None if first_k is None else first_k.to_dict(),
                "route": route.value,
                "depth": depth,
                "baseline": baseline,
                "seed": seed,
                "utilities": asdict(utilities),
                "unlabelled": unlabelled_note(dataset, utilities),
                "fusion": fusion_of(source),
                "fingerprint": source.fingerprint(),
                "run": None if settings.write_run is None else str(settings.write_run),
                "notes": notes,
            }
        )
    else:
        made_by = "" if profile_id is None else f" (profile {profile_id})"
        baseline_size = baseline_k(baseline)
        relative_to = "whole pool" if baseline_size is None else f"first {baseline_size}"
        output.facts(
            [
                ("queries", labelled.described(counts)),
                ("route", f"{route.value}, {depth} candidates a query"),
                *[("fusion", each) for each in [source.fingerprint().get("fusion")] if each],
                ("keeps", describe_policy(policy) + made_by),
                ("recall loss", f"relative to the retriever's {relative_to}"),
                ("unlabelled", unlabelled_note(dataset, utilities)),
            ]
        )
        _print(metrics, first_k, output)
    output.notes(notes)


@dataclass(frozen=True)
class _FirstK:
    """The first k passages of the same pools, beside the policy.

    Attributes:
        differences: Of the policy less the first k, paired by query.
    """

    k: int
    metrics: "Mapping[str, Interval]"
    differences: "Mapping[str, Difference]"

    def to_dict(self) -> dict[str, object]:
        return {
            "k": self.k,
            "metrics": {name: estimate.model_dump() for name, estimate in self.metrics.items()},
            "differences": {name: asdict(each) for name, each in self.differences.items()},
        }


def _reservations(
    profile: "Profile | None",
    labelled: "Labelled",
    retriever: "Source",
) -> tuple[str, ...]:
    """Why the figures of a profile may not be what they will be in production."""
    if profile is None:
        return ()
    return (*seen_in_calibration(labelled, profile), *compared(profile, retriever).reservations)


def _first_k(k: int, of_policy: "QueryMetrics", of_first: "QueryMetrics", seed: int) -> _FirstK:
    from calibration.compare.paired_differences import differences

    means = of_first.evidence(seed).metrics
    return _FirstK(k, means, differences(of_policy, of_first, seed=seed))


def _notes(metrics: "Mapping[str, Interval]") -> list[str]:
    found = metrics.get("recall_at_depth")
    if found is None or found.value != 0.0:
        return []
    note = (
        "no relevant passage is among the candidates of any query: check that these labels belong "
        "to the corpus that is searched"
    )
    return [note]


def _policy(profile: "Profile | None", route: Route, k: int | None) -> "tuple[Policy, str]":
    """The policy to measure, and what its recall loss is relative to.

    Raises:
        ConfigurationError: the profile has no policy for the route.
    """
    from ctxguard.core.policies import RatioPolicy

    if profile is None:
        return RatioPolicy(k=DEFAULT_K if k is None else k), DEFAULT_BASELINE
    calibrated = profile.routes.get(route)
    if calibrated is None:
        names = ", ".join(name.value for name in profile.routes)
        raise ConfigurationError(
            f"the profile has no policy for the route {route.value!r}; it has {names}"
        )
    certificate = calibrated.certificate
    return calibrated.policy, DEFAULT_BASELINE if certificate is None else certificate.baseline


def _print(metrics: "Mapping[str, Interval]", first_k: _FirstK | None, output: Output) -> None:
    output.out.print(_alone(metrics, output) if first_k is None else _beside(metrics, first_k))


def _alone(metrics: "Mapping[str, Interval]", output: Output) -> Rows:
    from calibration.evaluate import CONFIDENCE, DESCRIPTIONS

    wide = output.out.width >= _WIDE
    rows = table("metric", "mean>", f"{CONFIDENCE:.0%} interval>", "n>", *["meaning"] * wide)
    for name, last in _in_order(metrics):
        estimate = metrics[name]
        rows.add_row(
            name,
            Text(number(estimate.value), style="dim" if estimate.value is None else "bold"),
            interval(estimate) or NO_DATA,
            f"{estimate.n:,}",
            *[DESCRIPTIONS[name]] * wide,
            end_section=last,
        )
    return rows


def _beside(metrics: "Mapping[str, Interval]", first_k: _FirstK) -> Rows:
    rows = table("metric", "profile>", f"first {first_k.k}>", "difference>", "n>")
    for name, last in _in_order(metrics):
        estimate, difference = metrics[name], first_k.differences.get(name)
        rows.add_row(
            name,
            short_interval(estimate),
            number(first_k.metrics[name].value),
            "" if difference is None else difference_in_words(difference),
            f"{estimate.n:,}",
            end_section=last,
        )
    return rows


def _in_order(metrics: "Mapping[str, Interval]") -> list[tuple[str, bool]]:
    """The names, those of the retriever's own order last; and whether a name ends its section."""
    after = [name for name in metrics if name not in _BEFORE_THE_POLICY]
    before = [name for name in _BEFORE_THE_POLICY if name in metrics]
    return [(name, name == after[-1]) for name in (*after, *before)]
