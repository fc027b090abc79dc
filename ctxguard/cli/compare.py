"""``ctxguard compare``: ranking profiles side by side, and against the runs of earlier days."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ctxguard.cli import _comparison as shown
from ctxguard.cli._console import FINDING, Output, check_writable, one_line, print_json
from ctxguard.cli._inputs import fitted, open_index, read_labelled, seen_in_calibration
from ctxguard.errors import ConfigurationError, QueryError
from ctxguard.types import DEFAULT_DEPTH, DEFAULT_K, Route

if TYPE_CHECKING:
    from calibration.comparing.candidates import Candidate
    from calibration.comparing.compare import Comparison
    from calibration.comparing.runstore import Run, RunStore
    from calibration.comparing.verdict import VerdictRule
    from ctxguard.cli._inputs import Labelled
    from ctxguard.metrics import Utilities
    from ctxguard.profile import Profile
    from ctxguard.retrieval.hybrid import HybridRetriever

_STORE = ".ctxguard/runs.sqlite"
_LEXICAL = (Route.LEXICAL, Route.LEXICAL_RERANK)


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("compare")(compare)


def compare(
    *,
    index: Annotated[Path | None, typer.Option(help="Folder that `ctxguard index` wrote.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="BEIR folder, or JSONL of labelled queries.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="A name in the folder's qrels/. (default: test)")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SPEC",
            help="What to compare: a route (lexical, dense, hybrid, …+rerank), "
            "reciprocal_rank[:CONSTANT] or convex[:DENSE_SHARE], k=N, min_ratio=R, rerank=MODEL, "
            "with commas between. Repeatable. (default: both legs, and fused in both ways)",
        ),
    ] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(help="Calibrated profile to compare. Repeatable.")
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option("--k", "-k", min=1, help="Where a spec has none. Repeatable. (default: 5)"),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What differences are taken from. (default: the first)"),
    ] = None,
    reranker: Annotated[str | None, typer.Option(help="CrossEncoder, by name or folder.")] = None,
    depth: Annotated[int, typer.Option(min=1, help="Candidates a query.")] = DEFAULT_DEPTH,
    safe: Annotated[
        float, typer.Option(help="SAFE: the share of harm is at most this, beyond noise.")
    ] = 0.33,
    dangerous: Annotated[
        float, typer.Option(help="DANGEROUS: the share of harm is at least this, beyond noise.")
    ] = 0.5,
    store: Annotated[
        Path, typer.Option(help="SQLite file of runs, or the folder it lies in.")
    ] = Path(_STORE),
    keep: Annotated[bool, typer.Option(help="Whether these runs are kept in the store.")] = True,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Compare with the runs of this id or commit. (default: each one's last)",
        ),
    ] = None,
    fail_on_regression: Annotated[
        bool,
        typer.Option(
            "--fail-on-regression", help="Exit 1 where a candidate is worse beyond noise."
        ),
    ] = False,
    regression_metric: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC", help="Repeatable. (default: udcg_strict, recall)"),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="A loss up to this, in the metric's unit, is accepted.")
    ] = 0.0,
    list_runs: Annotated[bool, typer.Option("--list", help="Show the runs of the store.")] = False,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="RUN_A RUN_B", help="Show what the second run changed, paired."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare ways to rank and to cut on the same labelled queries, with paired intervals.

    Runs are kept, so that a later one can be compared with them: --list, --diff, --against,
    --fail-on-regression.
    """
    from calibration.comparing.runstore import RunStore

    output, runs = Output(as_json=as_json), RunStore(store)
    if list_runs or diff is not None:
        return _show(runs, diff, output, both=list_runs, seed=seed, as_json=as_json)
    if index is None or data is None:
        raise typer.BadParameter("is needed to compare", param_hint="--index and --data")
    from calibration.comparing.compare import check_candidates
    from calibration.comparing.regression import Check, earlier_run, watched_metrics
    from calibration.comparing.verdict import VerdictRule
    from ctxguard.profile import Profile

    watched, rule = watched_metrics(regression_metric or []), VerdictRule(safe, dangerous)
    references = None if against is None else runs.find(against)
    if keep:
        check_writable(runs.path, "--store")
    profiles = {name: Profile.load(path) for name, path in _by_name(profile or []).items()}
    candidates = _candidates(candidate or [], profiles, k or [], reranked=reranker is not None)
    check_candidates(candidates, baseline, depth)
    utilities = _utilities(profiles)
    labelled = read_labelled(data, split, "test")
    with output.doing("opening the index"):
        views = _Views(open_index(index, None), reranker)
        for loaded in profiles.values():
            views.check(loaded)
        for each in candidates:
            views.view(each)
    counts = labelled.counts(views.retriever)
    settings = _Settings(baseline, utilities, rule, depth, seed)
    found = _measure(candidates, views, labelled, settings, output)
    made = _runs(found, views, labelled, settings)
    checks = []
    if fail_on_regression or references is not None:
        checks = [
            Check(each, earlier_run(each, runs, references), watched, tolerance, seed)
            for each in made
        ]
    worse = [check.run.candidate for check in checks if check.regressed]
    if keep:
        # A run that fails the check must not become what the next one is measured against.
        failed = worse if fail_on_regression else []
        runs.keep([replace(each, regressed=each.candidate in failed) for each in made])
    notes = _notes(found, labelled, profiles)
    about = {
        "data": labelled.dataset.name,
        "split": labelled.split,
        "dataset_digest": labelled.dataset.digest(),
        **counts,
        "depth": depth,
        "seed": seed,
        "store": str(runs.path) if keep else None,
    }
    facts = [
        ("queries", labelled.described(counts)),
        ("measured on", f"{len(found.query_ids):,} queries that every candidate answered"),
        ("runs kept in", f"{runs.path}, at commit {shown.commit(made[0])}" if keep else "no store"),
    ]
    if as_json:
        print_json(shown.document(found, made, checks, about, notes))
    else:
        shown.print_comparison(found, facts, output)
        if checks:
            shown.print_checks(checks, output)
    for note in notes:
        output.note(note)
    if fail_on_regression and worse:
        names = one_line(", ".join(worse))
        output.err.print(Text(f"finding: worse than the earlier run, beyond noise: {names}"))
        raise typer.Exit(FINDING)
    return None


def _show(
    runs: "RunStore",
    diff: tuple[str, str] | None,
    output: Output,
    *,
    both: bool,
    seed: int,
    as_json: bool,
) -> None:
    """The runs that are kept, or what changed between two of them."""
    if diff is None:
        shown.list_runs(runs, output, as_json=as_json)
    elif both:
        raise typer.BadParameter("give --list or --diff, not both", param_hint="--diff")
    else:
        older, newer = (runs.one(reference) for reference in diff)
        shown.diff_runs(older, newer, output, seed=seed, as_json=as_json)


@dataclass(frozen=True)
class _Settings:
    """What is the same for every candidate."""

    baseline: str | None
    utilities: "Utilities"
    rule: "VerdictRule"
    depth: int
    seed: int


def _measure(
    candidates: "Sequence[Candidate]",
    views: "_Views",
    labelled: "Labelled",
    settings: _Settings,
    output: Output,
) -> "Comparison":
    from calibration.comparing.compare import compare as run

    queries = labelled.dataset.queries
    with output.passes() as begin:
        vectors = {}
        if any(candidate.route not in _LEXICAL for candidate in candidates):
            advance = begin("encoding queries", len(queries))
            for query in queries:
                # A query that is refused here is met again by the replay, which records why.
                with suppress(QueryError):
                    vectors[query.query_id] = views.retriever.encode_query(query.text)
                advance(1)
        return run(
            candidates,
            views.view,
            labelled.dataset,
            baseline=settings.baseline,
            utilities=settings.utilities,
            rule=settings.rule,
            depth=settings.depth,
            vectors=vectors,
            seed=settings.seed,
            passes=begin,
        )


def _by_name(paths: Sequence[Path]) -> dict[str, Path]:
    """Profiles by the name of their file, or by their whole path where two share it."""
    stems = Counter(path.stem for path in paths)
    return {path.stem if stems[path.stem] == 1 else str(path): path for path in paths}


def _candidates(
    specs: Sequence[str], profiles: "dict[str, Profile]", ks: Sequence[int], *, reranked: bool
) -> "list[Candidate]":
    from calibration.comparing.candidates import (
        at_each_k,
        default_candidates,
        from_profile,
        parse_candidates,
    )

    ks = tuple(dict.fromkeys(ks)) or (DEFAULT_K,)
    if specs:
        found = [each for spec in specs for each in parse_candidates(spec, ks)]
    else:
        found = list(at_each_k(default_candidates(reranked=reranked), ks))
    return found + [from_profile(name, loaded) for name, loaded in profiles.items()]


def _utilities(profiles: "dict[str, Profile]") -> "Utilities":
    """What a passage is worth: as the profiles have it, since one table has one unit."""
    from ctxguard.metrics import DEFAULT_UTILITIES

    found = [loaded.utilities for loaded in profiles.values()]
    if any(other != found[0] for other in found):
        raise ConfigurationError(
            f"the profiles {', '.join(profiles)} were made with different utilities, so their "
            "figures have no common unit; compare those made with the same ones"
        )
    return found[0] if found else DEFAULT_UTILITIES


class _Views:
    """One index under each candidate's stages.

    Attributes:
        retriever: The index without a reranker.
    """

    def __init__(self, retriever: "HybridRetriever", reranker: str | None) -> None:
        self.retriever = retriever
        self._reranker = reranker
        self._reranked: dict[str, HybridRetriever] = {}

    def view(self, candidate: "Candidate") -> "HybridRetriever":
        """The retriever of a candidate.

        Raises:
            ConfigurationError: it reranks, and no reranker was given.
        """
        route, fusion, reranker = candidate.stages
        base = self.retriever
        if route.value.endswith("+rerank"):
            base = self._with_reranker(reranker, candidate.name)
        return base.with_fusion(fusion).on_route(route)

    def check(self, profile: "Profile") -> None:
        """Refuse a profile of another system.

        Raises:
            ProfileMismatchError: what differs.
        """
        has_none = profile.fingerprint.get("reranker", "none") == "none"
        fitted(profile, self.retriever if has_none else self._with_reranker(None, "the profile"))

    def _with_reranker(self, model: str | None, who: str) -> "HybridRetriever":
        from ctxguard.retrieval.reranker import CrossEncoderReranker

        model = self._reranker if model is None else model
        if model is None:
            raise ConfigurationError(
                f"{who} reranks, and no reranker was given; name one with --reranker, or with "
                "rerank=MODEL in the candidate"
            )
        if model not in self._reranked:
            self._reranked[model] = self.retriever.with_reranker(CrossEncoderReranker(model))
        return self._reranked[model]


def _runs(
    found: "Comparison", views: _Views, labelled: "Labelled", settings: _Settings
) -> "list[Run]":
    from calibration.comparing.runstore import Run, commit_of

    commit, digest = commit_of(Path.cwd()), labelled.dataset.digest()
    return [
        Run(
            candidate=each.candidate.name,
            profile=each.candidate.key(views.view(each.candidate).fingerprint()),
            commit=commit,
            data=labelled.dataset.name,
            data_digest=digest,
            utilities=settings.utilities,
            settings={**each.candidate.describe(), "depth": settings.depth},
            latency_ms=each.latency_ms,
            metrics=each.per_query,
        )
        for each in found.candidates
    ]


def _notes(found: "Comparison", labelled: "Labelled", profiles: "dict[str, Profile]") -> list[str]:
    """What a reader of the figures should know."""
    from ctxguard.scores import is_relative

    notes = [*labelled.notes, *(f"left out: {line}" for line in found.skipped)]
    for name, loaded in profiles.items():
        notes += [f"{name}: {line}" for line in seen_in_calibration(labelled, loaded)]
    if len({is_relative(each.kind) for each in found.candidates}) > 1:
        notes.append(
            "udcg and distractor_rate suspect passages by score, and where scores carry rank only "
            "by rank alone: between such candidates compare precision, udcg_strict and harm"
        )
    if len(found.query_ids) < found.rule.fewest:
        notes.append(
            f"with fewer than {found.rule.fewest} queries, bootstrap intervals are narrower than "
            "they claim"
        )
    return notes
