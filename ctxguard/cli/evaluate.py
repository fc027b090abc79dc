"""``ctxguard evaluate``: what a profile, or a fixed k, achieves on labelled queries."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ctxguard.cli._console import NO_DATA, Output, interval, number, print_json, table
from ctxguard.cli._inputs import (
    DEFAULT_BASELINE,
    baseline_k,
    fitted,
    open_index,
    read_labelled,
    seen_in_calibration,
)
from ctxguard.cli._words import policy_in_words
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.types import DEFAULT_DEPTH, DEFAULT_K, Route

if TYPE_CHECKING:
    from calibration.replay import Pools
    from ctxguard.cli._inputs import Labelled
    from ctxguard.policy import Policy
    from ctxguard.profile import Interval, Profile
    from ctxguard.retrieval.hybrid import HybridRetriever

_BEFORE_THE_FILTER = ("recall_at_depth", "ndcg_at_10")
_WIDE = 100


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("evaluate")(evaluate)


def evaluate(
    *,
    index: Annotated[Path, typer.Option(help="Folder that `ctxguard index` wrote.")],
    data: Annotated[Path, typer.Option(help="BEIR folder, or JSONL of labelled queries.")],
    split: Annotated[
        str | None, typer.Option(help="A name in the folder's qrels/. (default: test)")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Calibrated profile; refused where it does not fit.")
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", "-k", min=1, help="A fixed k, in place of a profile. (default: 5)"),
    ] = None,
    route: Annotated[
        Route | None, typer.Option(help="The stages that answer. (default: all there are)")
    ] = None,
    reranker: Annotated[str | None, typer.Option(help="CrossEncoder, by name or folder.")] = None,
    depth: Annotated[
        int | None,
        typer.Option(min=1, help="Candidates a query. (default: the profile's, else 100)"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a profile, or a fixed k, on labelled queries: means with bootstrap intervals."""
    if profile is not None and k is not None:
        raise typer.BadParameter("give --profile or --k, not both", param_hint="--k")
    from ctxguard.profile import Profile

    output = Output(as_json=as_json)
    loaded = None if profile is None else Profile.load(profile)
    labelled = read_labelled(data, split, "test")
    with output.doing("opening the index"):
        retriever = open_index(index, reranker)
    retriever = retriever if loaded is None else fitted(loaded, retriever)
    counts = labelled.counts(retriever)
    plan = _plan(loaded, k, retriever.route if route is None else route, depth, seed)
    pools, metrics = _measure(retriever, labelled, plan, output)
    notes = [*labelled.notes, *(f"left out: {line}" for line in pools.skipped)]
    if loaded is not None:
        notes += seen_in_calibration(labelled, loaded)
    if plan.policy.k > len(retriever):
        notes.append(f"k = {plan.policy.k} is more than the index's {len(retriever)} passages")
    if as_json:
        print_json(
            {
                "metrics": {name: estimate.model_dump() for name, estimate in metrics.items()},
                **counts,
                "measured_queries": len(pools),
                "data": labelled.dataset.name,
                "split": labelled.split,
                "dataset_digest": labelled.dataset.digest(),
                **plan.to_dict(),
                "fusion": asdict(retriever.fusion),
                "fingerprint": retriever.fingerprint(),
                "notes": notes,
            }
        )
    else:
        output.facts([("queries", labelled.described(counts)), *plan.facts()])
        _print(metrics, output)
    for note in notes:
        output.note(note)


@dataclass(frozen=True)
class _Plan:
    """What is measured."""

    profile: "Profile | None"
    policy: "Policy"
    route: Route
    depth: int
    baseline: str
    seed: int

    def to_dict(self) -> dict[str, object]:
        return {
            "profile_id": None if self.profile is None else self.profile.profile_id,
            "policy": policy_in_words(self.policy),
            "k": self.policy.k,
            "route": self.route.value,
            "depth": self.depth,
            "baseline": self.baseline,
            "seed": self.seed,
        }

    def facts(self) -> list[tuple[str, str]]:
        of = "" if self.profile is None else f" (profile {self.profile.profile_id})"
        relative = "whole pool" if self.baseline == "pool" else f"first {baseline_k(self.baseline)}"
        return [
            ("route", f"{self.route.value}, {self.depth} candidates a query"),
            ("keeps", policy_in_words(self.policy) + of),
            ("recall loss", f"relative to the retriever's {relative}"),
        ]


def _plan(
    profile: "Profile | None", k: int | None, route: Route, depth: int | None, seed: int
) -> _Plan:
    from ctxguard.policy import Policy, RatioPolicy

    baseline, deepest = DEFAULT_BASELINE, DEFAULT_DEPTH
    policy: Policy = RatioPolicy(k=DEFAULT_K if k is None else k)
    if profile is not None:
        calibrated = profile.routes.get(route)
        if calibrated is None:
            known = ", ".join(known.value for known in profile.routes)
            raise ConfigurationError(
                f"the profile has no policy for the route {route.value!r}; it has {known}"
            )
        policy, deepest = calibrated.policy, profile.provenance.depth
        if calibrated.certificate is not None:
            baseline = calibrated.certificate.baseline
    depth = max(policy.k, deepest) if depth is None else depth
    if depth < policy.k:
        raise ConfigurationError(f"--depth {depth} is less than k = {policy.k}")
    return _Plan(profile, policy, route, depth, baseline, seed)


def _measure(
    retriever: "HybridRetriever", labelled: "Labelled", plan: _Plan, output: Output
) -> "tuple[Pools, Mapping[str, Interval]]":
    from calibration.evaluate import per_query
    from calibration.losses import label
    from calibration.replay import replay
    from ctxguard.metrics import DEFAULT_UTILITIES

    dataset = labelled.dataset
    if not dataset.answerable:
        raise CalibrationError(
            f"{dataset.name}: none of the {len(dataset)} queries has a relevant passage, so there "
            "is no recall, MRR or nDCG to measure"
        )
    utilities = DEFAULT_UTILITIES if plan.profile is None else plan.profile.utilities
    with output.passes() as begin:
        pools = replay(
            retriever.on_route(plan.route),
            dataset.queries,
            depth=plan.depth,
            progress=begin(f"replaying {plan.route.value}", len(dataset)),
        )
    with output.doing("measuring"):
        labels = label(pools, dataset, utilities, baseline_k=baseline_k(plan.baseline))
        return pools, per_query(pools, labels, plan.policy, utilities).evidence(plan.seed).metrics


def _print(metrics: "Mapping[str, Interval]", output: Output) -> None:
    from calibration.evaluate import CONFIDENCE, DESCRIPTIONS

    wide = output.out.width >= _WIDE
    made = table("metric", "mean>", f"{CONFIDENCE:.0%} interval>", "n>", *["what it is"] * wide)
    after = [name for name in metrics if name not in _BEFORE_THE_FILTER]
    for name in (*after, *_BEFORE_THE_FILTER):
        estimate = metrics[name]
        made.add_row(
            name,
            Text(number(estimate.value), style="dim" if estimate.value is None else "bold"),
            interval(estimate) or NO_DATA,
            f"{estimate.n:,}",
            *[DESCRIPTIONS[name]] * wide,
            end_section=name == after[-1],
        )
    output.out.print(made)
