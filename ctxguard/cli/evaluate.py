"""``ctxguard evaluate``: what a profile, or a fixed k, achieves on labelled queries."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ctxguard.cli import _options
from ctxguard.cli._comparison import difference_in_words
from ctxguard.cli._console import (
    NO_DATA,
    Output,
    interval,
    number,
    print_json,
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
from ctxguard.cli._retriever import (
    beyond_index,
    check_run,
    check_score_kind,
    for_run,
    fusion_of,
    notes_on_pools,
    on_route,
    open_retriever,
    served_route,
    upstream_of,
    write_pools,
)
from ctxguard.cli._tables import Rows
from ctxguard.core.types import DEFAULT_DEPTH, DEFAULT_K, Route
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from calibration.compare.paired_differences import Difference
    from calibration.evaluate import QueryMetrics
    from ctxguard.cli._inputs import Labelled, Source
    from ctxguard.core.policies import Policy
    from ctxguard.profile.schema import Interval, Profile

_BEFORE_THE_POLICY = ("recall_at_depth", "ndcg_at_10")
_WIDE = 100


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("evaluate")(evaluate)


def evaluate(
    *,
    index: _options.SourceIndex = None,
    engine: _options.SourceEngine = None,
    retriever: _options.SourceRetriever = None,
    run: _options.SourceRun = None,
    rerank_upstream: _options.RerankUpstream = None,
    candidates: _options.Candidates = None,
    rerank_protocol: _options.RerankProtocol = "cohere",
    rerank_model: _options.RerankModel = None,
    score_kind: _options.ScoresMean = None,
    fingerprint: _options.Fingerprint = None,
    data: _options.LabelledQueries,
    split: Annotated[str | None, _options.split("test")] = None,
    profile: _options.ProfileFile = None,
    k: Annotated[
        int | None,
        typer.Option(
            "--k",
            "-k",
            metavar="N",
            min=1,
            help="Measure the first N passages. With --profile they stand beside it, in the order "
            "of its fusion.",
            show_default=f"{DEFAULT_K} without a profile",
        ),
    ] = None,
    route: _options.OneRoute = None,
    reranker: _options.Reranker = None,
    ranker: _options.RankerFile = None,
    depth: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Candidates to retrieve for each query.",
            show_default=f"the profile's, or {DEFAULT_DEPTH}",
        ),
    ] = None,
    write_run: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TREC run file to write the retrieved candidates to.",
            show_default=False,
        ),
    ] = None,
    utility: _options.Utility = None,
    seed: _options.Seed = 0,
    as_json: _options.AsJson = False,
) -> None:
    """Measure a profile, or the first k passages, on labelled queries.

    The candidates come from an index, a retriever of your own (--retriever), a TREC run (--run)
    or lists that a server reranks (--rerank-upstream).
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

    output = Output(as_json=as_json)
    check_run(write_run)
    loaded = None if profile is None else Profile.load(profile)
    utilities = with_utilities(DEFAULT_UTILITIES if loaded is None else loaded.utilities, utility)
    labelled = for_run(read_labelled(data, split, "test"), run)
    with output.doing("opening the retriever"):
        source = open_retriever(
            index=index,
            engine=engine,
            retriever=retriever,
            run=run,
            upstream=upstream_of(rerank_upstream, candidates, rerank_protocol, rerank_model),
            reranker=reranker,
            ranker=ranker,
            score_kind=score_kind,
            fingerprint=fingerprint,
            queries=labelled.dataset.queries,
        )
    source = source if loaded is None else fitted(loaded, source)
    labelled, counts = labelled.against(source)
    dataset = labelled.dataset
    route = served_route(source, loaded) if route is None else route
    policy, baseline = _policy(loaded, route, k)
    most = max(policy.k, k or 0)
    depth = _depth(depth, most, loaded)
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
        *notes_on_pools(pools, route, run),
        *_reservations(loaded, labelled, source),
    ]
    notes += _notes(metrics) + beyond_index(source, most) + write_pools(pools, write_run)
    profile_id = None if loaded is None else loaded.profile_id
    if as_json:
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
                "run": None if write_run is None else str(write_run),
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
    for note in notes:
        output.note(note)


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


def _depth(depth: int | None, k: int, profile: "Profile | None") -> int:
    """Candidates to retrieve: as many as were asked for, else the profile's."""
    if depth is None:
        return max(k, DEFAULT_DEPTH if profile is None else profile.provenance.depth)
    if depth < k:
        raise ConfigurationError(f"--depth {depth} is less than k = {k}")
    return depth


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
            f"{number(estimate.value)} {interval(estimate)}".rstrip(),
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
