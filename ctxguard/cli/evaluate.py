"""``ctxguard evaluate``: measure a profile or a fixed k on labelled queries, or compare several.

Reads labels and profiles, calls the retriever, and writes the run or the comparison asked for.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ctxguard._support.settings import key, optional, optional_key, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output
from ctxguard.cli._inputs import fitted, notes_on_pools, on_route, open_labelled, replayed
from ctxguard.cli._results import by_metric, definitions
from ctxguard.cli._settings import read_file
from ctxguard.cli._system import SOURCES, LabelledSystem, by_name
from ctxguard.cli._tables import facts, remark
from ctxguard.core.types import DEFAULT_DEPTH, DEFAULT_K, Route
from ctxguard.errors import CalibrationError, ConfigurationError, ProfileMismatchError
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from calibration.evaluate import Measured
    from calibration.results import Results
    from ctxguard.core.policies import Policy
    from ctxguard.profile.schema import Profile

_FIRST = (
    *("recall", "pooled_recall", "mrr", "served_mrr", "udcg", "harm", "misleading"),
    *("kept", "tokens", "keyword_recall", "keyword_mrr"),
)
"""The metrics shown if they have data, unless all are asked for."""

_OF_COMPARISONS = ("candidate", "out", "against", "baseline", "regression_metrics", "tolerance")


class EvaluateCommand(LabelledSystem):
    system: list[Path] = setting(
        "TOML file of a system, as other commands read it, whose candidates are measured; several "
        "are compared, each under the name of its file. Keys of [evaluate] may stand in it too; "
        "`ctxguard keys evaluate` prints them all. Repeatable.",
        "FILE",
        value=[],
    )
    data: _options.LabelledQueries
    profile: list[Path] = setting(
        "Calibrated profile to measure; several are compared. Repeatable.", "FILE", value=[]
    )
    k: list[Annotated[int, Field(ge=1)]] = setting(
        "Measure the first N passages. With --profile they stand beside it, in the order of its "
        "fusion; several are compared, for candidates without k=N. Repeatable.",
        *("N", "--k", "-k"),
        default=f"as many as today: {DEFAULT_K}, or as the profile was calibrated beside",
        value=[],
    )
    candidate: list[str] = setting(
        "Candidate to compare, as comma-separated settings: a route (lexical, dense, hybrid, "
        "or one of them with +rerank), reciprocal_rank[:CONSTANT] or convex[:DENSE_SHARE], "
        "k=N, min_ratio=R, rerank=MODEL; without an index k and min_ratio; or all: each leg alone, "
        "and both fused in each way. Repeatable.",
        "NAME=SPEC",
        default="all of an index, where others are compared",
        value=[],
    )
    out: Path | None = optional(
        "JSON file to save a comparison to, for a later --against.", "FILE", writes=True
    )
    against: Path | None = optional(
        "Saved comparison to check against; exit code 1 if a candidate is worse than the saved "
        "one of its name, beyond noise.",
        "FILE",
    )
    show_all: _options.ShowAll = False
    route: _options.OneRoute = None
    write_run: Path | None = optional_key(
        "TREC run file to write the retrieved candidates of one system to.", writes=True
    )
    baseline: str | None = optional_key(
        "Candidate that differences are taken from.", default="the first"
    )
    regression_metrics: list[str] = key(
        "List of metrics that --against checks.", default="udcg and recall", value=[]
    )
    tolerance: float = key("Loss that --against accepts, in the metric's unit.", ge=0, value=0.0)

    def __call__(self, output: Output) -> None:
        """The candidates come from an index, a retriever of your own (--retriever), a TREC run
        (--run) or lists that a server reranks (rerank-upstream in --system).

        Prints the mean of each metric with its bootstrap interval; with --profile today's first
        passages stand beside it, or --k, with the difference paired by query, unless the profile
        was calibrated on these queries. A profile that was calibrated on another system is refused.

        Several systems, profiles or --candidate are compared side by side. Save a comparison with
        --out (or --json > FILE), and check a later one against it with --against FILE.
        """
        systems = self._systems()
        counts = [len(each) for each in (systems, self.profile, self.k)]
        if max(counts) > 1 or any(getattr(self, name) for name in _OF_COMPARISONS):
            from ctxguard.cli._comparison import compare_systems

            compare_systems(self, systems, output)
        else:
            self._measure(next(iter(systems.values())), output)

    def _systems(self) -> dict[str, LabelledSystem]:
        """Return the systems that files describe, by name, and the one that options describe."""
        fields = LabelledSystem.model_fields
        own = {name: getattr(self, name) for name in self.model_fields_set & fields.keys()}
        systems = {}
        for name, file in by_name(self.system).items():
            values = {each: value for each, value in read_file(file)[0].items() if each in fields}
            if values.keys() & SOURCES:
                systems[name] = LabelledSystem(**values)
            else:  # a file without a source describes the system that an option names
                own = values | own
        named = [name for name in SOURCES if own.get(name) is not None]
        if named or not systems:
            systems[named[0] if named else ""] = LabelledSystem(**own)
        for system in systems.values():
            system.check_source()
        return systems

    def _profile(self) -> "Profile | None":
        """Load the profile that an option names, or else the one that a file names."""
        from ctxguard.profile.schema import Profile

        in_files = [each for file in self.system if (each := read_file(file)[0].get("profile"))]
        named = self.profile or in_files
        return Profile.load(named[0]) if named else None

    def _measure(self, system: LabelledSystem, output: Output) -> None:
        """Measure a profile, the first k passages, or both."""
        from calibration.data.readers import write_trec_run
        from calibration.evaluate import measure
        from calibration.pools import unlabelled_note
        from calibration.results import tabulate
        from ctxguard.measure.worth import READERS
        from ctxguard.retrieval.index.passages import searchable_text

        loaded = self._profile()
        utilities = self.worth(READERS if loaded is None else loaded.utilities)
        labelled, source = open_labelled(system, self.data, "test", output)
        dataset = labelled.dataset
        if not dataset.answerable and not dataset.keywords:
            raise CalibrationError(
                f"{dataset.name}: none of the {len(dataset)} queries has a relevant passage or "
                "keywords, so there is nothing to measure"
            )
        source, reservations = fitted(loaded, source)
        route = source.route if self.route is None else self.route
        if self.route is None and route is Route.EXTERNAL and loaded and len(loaded.routes) == 1:
            [route] = loaded.routes  # a wrapped retriever does not know its stages
        policies, baseline_k = _policies(loaded, route, next(iter(self.k), None))
        policy = policies[name := list(policies)[-1]]
        depth = _depth(system.depth, max(each.k for each in policies.values()), loaded)
        columns = () if loaded is None else loaded.signal_columns
        view = on_route(source, route)
        pools = replayed(view, dataset, output, depth=depth, name=route.value, columns=columns)
        calibrated = None if loaded is None else loaded.routes[route].score_kind
        if calibrated not in {None, pools.kind}:
            was = f"score_kind is {pools.kind.value!r}, was {calibrated.value!r}"
            raise ProfileMismatchError((was,))
        seen = [] if loaded is None else labelled.seen_by(loaded)
        with output.doing("measuring"):
            measured = {
                each: measure(
                    pools,
                    dataset,
                    own,
                    utilities,
                    baseline_k=baseline_k,
                    text_of=lambda passage_id: searchable_text(source.passage(passage_id)),
                )
                for each, own in policies.items()
            }
            results = tabulate(measured)
            results = _without_luck(results) if seen else results
        if seen and len(policies) > 1:
            seen = [f"{seen[0]}, and differences are not shown: measure on other queries"]
        notes = [*labelled.notes, *notes_on_pools(pools, route, system.run), *seen, *reservations]
        if dataset.answerable and results.of(name, "recall_at_depth").mean.value == 0.0:
            notes.append(
                "no relevant passage is among the candidates of any query: check that these labels "
                "belong to the corpus that is searched"
            )
        if self.write_run is not None:
            write_trec_run(self.write_run, pools.run())
            notes.append(f"the candidates are in {self.write_run}, as a TREC run")
        document = {
            "results": results,
            **labelled.document,
            "measured_queries": len(pools),
            "profile_id": None if loaded is None else loaded.profile_id,
            "policy": describe_policy(policy),
            "k": policy.k,
            "route": route,
            "depth": depth,
            "baseline_k": baseline_k,
            "utilities": utilities,
            "unlabelled": unlabelled_note(dataset, utilities),
            "fusion": getattr(source, "fusion", None),
            "fingerprint": source.fingerprint(),
            "run": self.write_run,
        }
        # Someone who changes a metric's definition looks for that metric.
        show_all = self.show_all or bool(self.by_hand)
        first = f"first {baseline_k} passages"
        named = f" (profile {loaded.profile_id})" if loaded else ""
        about = facts(
            ("queries", labelled.in_words),
            ("route", f"{route.value}, {depth} candidates a query"),
            ("fusion", source.fingerprint().get("fusion")),
            ("keeps", describe_policy(policy) + named),
            ("today", f"the {first}" if loaded else None),
            ("recall loss", f"relative to the retriever's {first}" if show_all else None),
            ("utilities", self.by_hand or None),
            ("unlabelled", unlabelled_note(dataset, utilities)),
        )
        shown = results if show_all else results.only(metrics=_first(results, measured))
        n_left = len(results.metrics) - len(shown.metrics)
        more = [*definitions(shown), remark(f"{n_left} more metrics; --all shows them")]
        output.result(document, [about, by_metric(shown), *([] if show_all else more)], notes)


def _depth(asked: int | None, k: int, profile: "Profile | None") -> int:
    """Return the depth used in serving, because scores are relative to the other candidates."""
    if asked is None:
        return max(k, DEFAULT_DEPTH if profile is None else profile.provenance.depth)
    if asked < k:
        raise ConfigurationError(f"depth {asked} is less than k = {k}")
    return asked


def _without_luck(results: "Results") -> "Results":
    """Leave out the differences: on the queries that chose the policy, gains may be mere luck."""
    from calibration.results import Difference

    rows = [
        replace(
            row,
            difference=row.difference and Difference(None, None, None, row.difference.n, "no data"),
        )
        for row in results.rows
    ]
    return replace(results, rows=tuple(rows))


def _first(results: "Results", measured: "Mapping[str, Measured]") -> list[str]:
    """Name the metrics shown first; pooled recall only if it differs from recall on some query."""
    import numpy as np

    wanted = [name for name in _FIRST if results.has_data(name)]
    pairs = [(of["recall"], of["pooled_recall"]) for of in measured.values() if "recall" in of]
    if all(np.array_equal(*pair, equal_nan=True) for pair in pairs):
        return [name for name in wanted if name != "pooled_recall"]
    return wanted


def _policies(
    profile: "Profile | None", route: Route, k: int | None
) -> "tuple[dict[str, Policy], int]":
    """Return the policies to measure (the profile's last), and the k to compare recall with."""
    from ctxguard.core.policies import RatioPolicy

    if profile is None:
        k = DEFAULT_K if k is None else k
        return {f"first {k}": RatioPolicy(k=k)}, DEFAULT_K
    calibrated = profile.routes.get(route)
    if calibrated is None:
        names = ", ".join(name.value for name in profile.routes)
        raise ConfigurationError(
            f"the profile has no policy for the route {route.value!r}; it has {names}"
        )
    verdict = calibrated.verdict
    baseline_k = DEFAULT_K if verdict is None else verdict.serving_k
    today = f"first {baseline_k}, as today"
    first, name = (baseline_k, today) if k is None else (k, f"first {k}")
    return {name: RatioPolicy(k=first), "profile": calibrated.policy}, baseline_k
