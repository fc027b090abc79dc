"""``ctxguard evaluate``: measure a profile or a fixed k on labelled queries, or compare several."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ctxguard._support.settings import key, optional, optional_key, setting
from ctxguard.cli import _options
from ctxguard.cli._comparison import compare_systems
from ctxguard.cli._console import Output
from ctxguard.cli._inputs import (
    compared,
    fitted,
    notes_on_pools,
    on_route,
    open_labelled,
    replayed,
    seen_in_calibration,
    served_depth,
    served_route,
)
from ctxguard.cli._results import by_metric, define
from ctxguard.cli._settings import read_file
from ctxguard.cli._system import SOURCES, LabelledSystem, by_name
from ctxguard.core.types import DEFAULT_K, Route
from ctxguard.errors import CalibrationError, ConfigurationError, ProfileMismatchError
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
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
            compare_systems(self, systems, output)
        else:
            self._measure(next(iter(systems.values())), output)

    def _systems(self) -> dict[str, LabelledSystem]:
        """Return the systems described by files, by name, and the one described by options."""
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

    def _measure(self, system: LabelledSystem, output: Output) -> None:
        """Measure a profile, the first k passages, or both."""
        from calibration.data.readers import write_trec_run
        from calibration.evaluate import measure
        from calibration.pools import unlabelled_note
        from calibration.results import tabulate
        from ctxguard.measure.worth import READERS
        from ctxguard.profile.schema import Profile
        from ctxguard.retrieval.index.passages import searchable_text

        in_files = [each for file in self.system if (each := read_file(file)[0].get("profile"))]
        named = (self.profile or in_files)[:1]
        loaded = Profile.load(named[0]) if named else None
        utilities = self.worth(READERS if loaded is None else loaded.utilities)
        labelled, counts, source = open_labelled(system, self.data, "test", output)
        source = source if loaded is None else fitted(loaded, source)
        dataset = labelled.dataset
        route = served_route(source, loaded) if self.route is None else self.route
        policies, baseline_k = _policies(loaded, route, next(iter(self.k), None))
        policy = policies[name := list(policies)[-1]]
        most = max(each.k for each in policies.values())
        depth = served_depth(system.depth, most, loaded)
        if not dataset.answerable and not dataset.keywords:
            raise CalibrationError(
                f"{dataset.name}: none of the {len(dataset)} queries has a relevant passage or "
                "keywords, so there is nothing to measure"
            )
        pools = replayed(
            on_route(source, route),
            dataset,
            output,
            depth=depth,
            name=route.value,
            columns=() if loaded is None else loaded.signal_columns,
        )
        calibrated = None if loaded is None else loaded.routes[route].score_kind
        if calibrated not in {None, pools.kind}:
            was = f"score_kind is {pools.kind.value!r}, was {calibrated.value!r}"
            raise ProfileMismatchError((was,))
        seen = () if loaded is None else seen_in_calibration(labelled, loaded)
        with output.doing("measuring"):
            measured = {
                each: measure(
                    pools,
                    dataset,
                    by,
                    utilities,
                    baseline_k=baseline_k,
                    text_of=lambda passage_id: searchable_text(source.passage(passage_id)),
                )
                for each, by in policies.items()
            }
            results = tabulate(measured)
            results = _without_luck(results) if seen else results
        if seen and len(policies) > 1:
            seen = (f"{seen[0]}, and differences are not shown: measure on others",)
        notes = [*labelled.notes, *notes_on_pools(pools, route, system.run), *seen]
        if loaded is not None:
            notes += compared(loaded, source).reservations
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
            **counts,
            "measured_queries": len(pools),
            **labelled.document,
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

        def show() -> None:
            # Someone who changes a metric's definition looks for that metric.
            show_all = self.show_all or bool(self.by_hand)
            relative_to = f"the retriever's first {baseline_k}"
            made_by = "" if loaded is None else f" (profile {loaded.profile_id})"
            output.facts(
                ("queries", labelled.described(counts)),
                ("route", f"{route.value}, {depth} candidates a query"),
                ("fusion", source.fingerprint().get("fusion")),
                ("keeps", describe_policy(policy) + made_by),
                ("today", f"the first {baseline_k} passages" if loaded is not None else None),
                ("recall loss", f"relative to {relative_to}" if show_all else None),
                ("utilities", self.by_hand or None),
                ("unlabelled", unlabelled_note(dataset, utilities)),
            )
            _print(results, output, show_all=show_all)

        output.result(document, show, notes)


def _without_luck(results: "Results") -> "Results":
    """Leave out the differences: on queries that chose the policy, a gain is luck."""
    rows = [
        replace(
            row,
            difference=row.difference
            and replace(row.difference, value=None, lower=None, upper=None, outcome="no data"),
        )
        for row in results.rows
    ]
    return replace(results, rows=tuple(rows))


def _print(results: "Results", output: Output, *, show_all: bool) -> None:
    shown = results
    if not show_all:
        shown = results.only(metrics=[name for name in _FIRST if results.has_data(name)])
    output.out.print(by_metric(shown))
    if not show_all:
        define(shown, output)
        n_left = len(results.metrics) - len(shown.metrics)
        output.note(f"{n_left} more metrics; --all shows them")


def _policies(
    profile: "Profile | None", route: Route, k: int | None
) -> "tuple[dict[str, Policy], int]":
    """Return the policies to measure, the profile's last, and the k to compare recall with.

    Raises:
        ConfigurationError: the profile has no policy for the route.
    """
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
