"""``ctxguard evaluate``: what a profile, or a fixed k, achieves on labelled queries."""

from pathlib import Path
from typing import TYPE_CHECKING

from ctxguard._support.settings import key, optional, optional_key
from ctxguard.cli import _options
from ctxguard.cli._console import Output, check_writable
from ctxguard.cli._inputs import (
    DEFAULT_BASELINE,
    baseline_k,
    compared,
    fitted,
    read_labelled,
    seen_in_calibration,
)
from ctxguard.cli._pools import (
    beyond_index,
    check_score_kind,
    for_run,
    fusion_of,
    notes_on_pools,
    on_route,
    replayed,
    served_depth,
    served_route,
    write_pools,
)
from ctxguard.cli._results import by_metric
from ctxguard.cli._system import System
from ctxguard.core.types import DEFAULT_K, Route
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from calibration.evaluate import QueryMetrics
    from calibration.results import Results
    from ctxguard.core.policies import Policy
    from ctxguard.profile.schema import Profile

_WIDE = 100
_FIRST = ("recall", "mrr", "udcg_strict", "harm", "kept", "keyword_recall", "keyword_mrr")
"""The metrics that are shown unless all are asked for; the last two need keywords."""


class Evaluate(System):
    """Settings of ``ctxguard evaluate``."""

    data: _options.LabelledQueries
    profile: _options.ProfileFile = None
    k: int | None = optional(
        "Measure the first N passages. With --profile they stand beside it, in the order of "
        "its fusion.",
        "N",
        "--k",
        "-k",
        default=f"{DEFAULT_K} without a profile",
        ge=1,
    )
    route: _options.OneRoute = None
    write_run: Path | None = optional_key(
        "TREC run file to write the retrieved candidates to.", "FILE"
    )
    all_metrics: bool = key("Show every metric, not the first few.", "SWITCH", value=False)
    seed: _options.Seed = 0
    as_json: _options.AsJson = False


def evaluate(settings: Evaluate) -> None:
    """Measure a profile, or the first k passages, on labelled queries.

    The candidates come from an index, a retriever of your own (--retriever), a TREC run (--run)
    or lists that a server reranks (rerank-upstream in --system).
    Prints the mean of each metric with its bootstrap interval; with --profile and --k, both and
    their difference, paired by query. A profile that was calibrated on another system
    is refused.
    """
    from calibration.evaluate import measure
    from calibration.pool_labels import unlabelled_note
    from calibration.results import tabulate
    from ctxguard.core.metrics import DEFAULT_UTILITIES
    from ctxguard.profile.schema import Profile
    from ctxguard.retrieval.index.passages import searchable_text

    output = Output(as_json=settings.as_json)
    check_writable(settings.write_run, "write-run")
    loaded = None if settings.profile is None else Profile.load(settings.profile)
    utilities = settings.worth(DEFAULT_UTILITIES if loaded is None else loaded.utilities)
    labelled = for_run(read_labelled(settings.data, "test"), settings.run)
    with output.doing("opening the retriever"):
        source = settings.open(labelled.dataset.queries)
    source = source if loaded is None else fitted(loaded, source)
    labelled, counts = labelled.against(source)
    dataset, k, seed = labelled.dataset, settings.k, settings.seed
    route = served_route(source, loaded) if settings.route is None else settings.route
    policies, baseline = _policies(loaded, route, k)
    policy = policies[name := list(policies)[-1]]
    most = max(each.k for each in policies.values())
    depth = served_depth(settings.depth, most, loaded)
    if not dataset.answerable and not dataset.keywords:
        raise CalibrationError(
            f"{dataset.name}: none of the {len(dataset)} queries has a relevant passage or "
            "keywords, so there is nothing to measure"
        )
    pools = replayed(
        *(on_route(source, route), dataset, output),
        depth=depth,
        name=route.value,
        columns=() if loaded is None else loaded.signal_columns,
    )
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

        results = tabulate({each: measured(by) for each, by in policies.items()}, seed=seed)
    notes = [*labelled.notes, *notes_on_pools(pools, route, settings.run)]
    if loaded is not None:
        notes += (*seen_in_calibration(labelled, loaded), *compared(loaded, source).reservations)
    if dataset.answerable and results.of(name, "recall_at_depth").mean.value == 0.0:
        notes.append(
            "no relevant passage is among the candidates of any query: check that these labels "
            "belong to the corpus that is searched"
        )
    notes += beyond_index(source, most) + write_pools(pools, settings.write_run)
    profile_id = None if loaded is None else loaded.profile_id
    document = {
        "results": results,
        **counts,
        "measured_queries": len(pools),
        "data": dataset.name,
        "split": labelled.split,
        "dataset_digest": dataset.digest(),
        "profile_id": profile_id,
        "policy": describe_policy(policy),
        "k": policy.k,
        "route": route.value,
        "depth": depth,
        "baseline": baseline,
        "seed": seed,
        "utilities": utilities,
        "unlabelled": unlabelled_note(dataset, utilities),
        "fusion": fusion_of(source),
        "fingerprint": source.fingerprint(),
        "run": None if settings.write_run is None else str(settings.write_run),
    }

    def show() -> None:
        # Whoever changes what a metric is looks for that metric.
        show_all = settings.all_metrics or bool(settings.by_hand)
        baseline_size = baseline_k(baseline)
        relative_to = "whole pool" if baseline_size is None else f"first {baseline_size}"
        loss = [("recall loss", f"relative to the retriever's {relative_to}")]
        made_by = "" if profile_id is None else f" (profile {profile_id})"
        output.facts(
            [
                ("queries", labelled.described(counts)),
                ("route", f"{route.value}, {depth} candidates a query"),
                *[("fusion", each) for each in [source.fingerprint().get("fusion")] if each],
                ("keeps", describe_policy(policy) + made_by),
                *(loss if show_all else []),
                *([("utilities", settings.by_hand)] if settings.by_hand else []),
                ("unlabelled", unlabelled_note(dataset, utilities)),
            ]
        )
        _print(results, output, show_all=show_all)

    output.result(document, show, notes)


def _print(results: "Results", output: Output, *, show_all: bool) -> None:
    from calibration.evaluate import DESCRIPTIONS

    shown = results if show_all else results.only(metrics=_FIRST)
    explained = len(results.policies) == 1 and output.out.width >= _WIDE
    output.out.print(by_metric(shown, DESCRIPTIONS if explained else None))
    if not show_all:
        n_left = len(results.metrics) - len(shown.metrics)
        output.note(f"{n_left} more metrics: all-metrics = true in [evaluate] of a file --system")


def _policies(
    profile: "Profile | None", route: Route, k: int | None
) -> "tuple[dict[str, Policy], str]":
    """The policies to measure, the profile's last, and what recall loss is relative to.

    Raises:
        ConfigurationError: the profile has no policy for the route.
    """
    from ctxguard.core.policies import RatioPolicy

    first: dict[str, Policy] = {f"first {k}": RatioPolicy(k=k)} if k is not None else {}
    if profile is None:
        return first or {f"first {DEFAULT_K}": RatioPolicy(k=DEFAULT_K)}, DEFAULT_BASELINE
    calibrated = profile.routes.get(route)
    if calibrated is None:
        names = ", ".join(name.value for name in profile.routes)
        raise ConfigurationError(
            f"the profile has no policy for the route {route.value!r}; it has {names}"
        )
    certificate = calibrated.certificate
    baseline = DEFAULT_BASELINE if certificate is None else certificate.baseline
    return {**first, "profile": calibrated.policy}, baseline
