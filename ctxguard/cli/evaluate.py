"""``ctxguard evaluate``: what a profile, or a fixed k, achieves on labelled queries."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ctxguard._support.settings import key, optional, optional_key
from ctxguard.cli import _options
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
from ctxguard.cli._results import by_metric
from ctxguard.cli._system import System
from ctxguard.core.types import DEFAULT_K, Route
from ctxguard.errors import CalibrationError, ConfigurationError, ProfileMismatchError
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from calibration.results import Results
    from ctxguard.core.policies import Policy
    from ctxguard.profile.schema import Profile

_FIRST = (
    *("recall", "pooled_recall", "mrr", "served_mrr", "udcg", "harm", "kept"),
    *("keyword_recall", "keyword_mrr"),
)
"""The metrics that are shown unless all are asked for; the last two need keywords."""


class EvaluateCommand(System):
    data: _options.LabelledQueries
    profile: _options.ProfileFile = None
    k: int | None = optional(
        "Measure the first N passages. With --profile they stand beside it, in the order of "
        "its fusion.",
        *("N", "--k", "-k"),
        default=f"{DEFAULT_K} without a profile",
        ge=1,
    )
    route: _options.OneRoute = None
    write_run: Path | None = optional_key(
        "TREC run file to write the retrieved candidates to.", "FILE", writes=True
    )
    all_metrics: bool = key("Show every metric, not the first few.", "SWITCH", value=False)

    def __call__(self, output: Output) -> None:
        """The candidates come from an index, a retriever of your own (--retriever), a TREC run
        (--run) or lists that a server reranks (rerank-upstream in --system).

        Prints the mean of each metric with its bootstrap interval; with --profile and --k, both and
        their difference, paired by query, unless the profile was calibrated on these queries. A
        profile that was calibrated on another system is refused.
        """
        from calibration.data.readers import write_trec_run
        from calibration.evaluate import measure
        from calibration.pool_labels import unlabelled_note
        from calibration.results import tabulate
        from ctxguard.core.metrics import READERS
        from ctxguard.profile.schema import Profile
        from ctxguard.retrieval.index.passages import searchable_text

        loaded = None if self.profile is None else Profile.load(self.profile)
        utilities = self.worth(READERS if loaded is None else loaded.utilities)
        labelled, counts, source = open_labelled(self, self.data, "test", output)
        source = source if loaded is None else fitted(loaded, source)
        dataset = labelled.dataset
        route = served_route(source, loaded) if self.route is None else self.route
        policies, baseline_k = _policies(loaded, route, self.k)
        policy = policies[name := list(policies)[-1]]
        most = max(each.k for each in policies.values())
        depth = served_depth(self.depth, most, loaded)
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
        notes = [*labelled.notes, *notes_on_pools(pools, route, self.run), *seen]
        if seen and len(policies) > 1:
            notes.append("no data for differences on queries that chose the policy: use others")
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
            # Whoever changes what a metric is looks for that metric.
            show_all = self.all_metrics or bool(self.by_hand)
            relative_to = f"the retriever's first {baseline_k}"
            made_by = "" if loaded is None else f" (profile {loaded.profile_id})"
            output.facts(
                ("queries", labelled.described(counts)),
                ("route", f"{route.value}, {depth} candidates a query"),
                ("fusion", source.fingerprint().get("fusion")),
                ("keeps", describe_policy(policy) + made_by),
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
    shown = results if show_all else results.only(metrics=_FIRST)
    output.out.print(by_metric(shown))
    if not show_all:
        n_left = len(results.metrics) - len(shown.metrics)
        output.note(f"{n_left} more metrics: all-metrics = true in [evaluate] of a file --system")


def _policies(
    profile: "Profile | None", route: Route, k: int | None
) -> "tuple[dict[str, Policy], int]":
    """Return the policies to measure, the profile's last, and the k that recall is compared with.

    Raises:
        ConfigurationError: the profile has no policy for the route.
    """
    from ctxguard.core.policies import RatioPolicy

    first: dict[str, Policy] = {f"first {k}": RatioPolicy(k=k)} if k is not None else {}
    if profile is None:
        return first or {f"first {DEFAULT_K}": RatioPolicy(k=DEFAULT_K)}, DEFAULT_K
    calibrated = profile.routes.get(route)
    if calibrated is None:
        names = ", ".join(name.value for name in profile.routes)
        raise ConfigurationError(
            f"the profile has no policy for the route {route.value!r}; it has {names}"
        )
    verdict = calibrated.verdict
    baseline_k = DEFAULT_K if verdict is None else verdict.serving_k
    return {**first, "profile": calibrated.policy}, baseline_k
