"""``ctxguard compare``: ways to rank and to cut side by side, and against a saved comparison."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ctxguard._support.atomic_write import atomic_write
from ctxguard.cli import _options
from ctxguard.cli._comparison import document, print_checks, print_comparison
from ctxguard.cli._console import FINDING, Output, check_writable, one_line, print_json
from ctxguard.cli._inputs import (
    fitted,
    open_index,
    read_labelled,
    seen_in_calibration,
    with_utilities,
)
from ctxguard.cli._retriever import Upstream, open_retriever, upstream_of
from ctxguard.core.types import DEFAULT_DEPTH, DEFAULT_K, Route
from ctxguard.errors import ConfigurationError

if TYPE_CHECKING:
    from calibration.compare.candidates import Candidate
    from calibration.compare.comparison import Comparison
    from ctxguard.cli._inputs import Labelled, Source
    from ctxguard.core.metrics import Utilities
    from ctxguard.profile.schema import Profile
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever

_LEXICAL = (Route.LEXICAL, Route.LEXICAL_RERANK)


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("compare")(compare)


def compare(
    *,
    index: _options.SourceIndex = None,
    retriever: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:OBJECT",
            help="Retriever of your own to compare as well, or instead of an index: a Python "
            "object with retrieve(query, *, depth), or a function. Repeatable.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="TREC run file to compare as well, or instead of an index. Repeatable.",
            show_default=False,
        ),
    ] = None,
    rerank_upstream: _options.RerankUpstream = None,
    candidates_file: _options.Candidates = None,
    rerank_protocol: _options.RerankProtocol = "cohere",
    rerank_model: _options.RerankModel = None,
    score_kind: _options.ScoresMean = None,
    fingerprint: _options.Fingerprint = None,
    data: _options.LabelledQueries,
    split: Annotated[str | None, _options.split("test")] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SPEC",
            help="Candidate to compare, as comma-separated settings: a route (lexical, dense, "
            "hybrid, or one of them with +rerank), reciprocal_rank[:CONSTANT] or "
            "convex[:DENSE_SHARE], k=N, min_ratio=R, rerank=MODEL; without an index k and "
            "min_ratio. Repeatable.",
            show_default="each leg alone, and both fused in both ways",
        ),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Calibrated profile to compare as well. Repeatable."),
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option(
            "--k",
            "-k",
            metavar="N",
            min=1,
            help="Passages to keep, for candidates without k=N. Repeatable.",
            show_default=str(DEFAULT_K),
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Candidate that differences are taken from.",
            show_default="the first",
        ),
    ] = None,
    reranker: _options.Reranker = None,
    ranker: _options.RankerFile = None,
    depth: Annotated[
        int, typer.Option(metavar="N", min=1, help="Candidates to retrieve for each query.")
    ] = DEFAULT_DEPTH,
    safe: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Largest share of harm that is called SAFE, beyond noise."
        ),
    ] = 0.33,
    dangerous: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Smallest share of harm that is called DANGEROUS, beyond noise."
        ),
    ] = 0.5,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSON file to save the comparison to, for a later --against."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Saved comparison to check against; exit code 1 if a candidate is worse than the "
            "saved one of its name, beyond noise.",
        ),
    ] = None,
    regression_metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC",
            help="Metric that --against checks. Repeatable.",
            show_default="udcg_strict and recall",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            metavar="LOSS", min=0.0, help="Loss that --against accepts, in the metric's unit."
        ),
    ] = 0.0,
    utility: _options.Utility = None,
    seed: _options.Seed = 0,
    as_json: _options.AsJson = False,
) -> None:
    """Compare ways to rank and to cut on the same labelled queries, with paired intervals.

    They rank an index, or are retrievers of your own (--retriever), TREC runs (--run) or lists
    that a server reranks (--rerank-upstream).
    Save a comparison with --out (or --json > FILE), and check a later one against it with
    --against FILE.
    """
    from calibration.compare.comparison import check_candidates
    from calibration.compare.comparison import compare as compare_all
    from calibration.compare.saved_comparison import (
        SavedComparison,
        check_metrics,
        check_regressions,
    )
    from calibration.compare.verdict import VerdictRule
    from calibration.replay import encode_queries
    from ctxguard.profile.schema import Profile

    output = Output(as_json=as_json)
    rule, metrics = VerdictRule(safe, dangerous), check_metrics(regression_metric or [])
    saved = None if against is None else SavedComparison.load(against)
    _check_out(out, against)
    profiles = {name: Profile.load(path) for name, path in _by_name(profile or []).items()}
    sources = _sources(
        retriever or [],
        run or [],
        upstream_of(rerank_upstream, candidates_file, rerank_protocol, rerank_model),
        indexed=index is not None,
    )
    candidates = _candidates(
        candidate or [],
        profiles,
        k or [],
        reranked=reranker is not None,
        sources=tuple(sources),
        indexed=index is not None,
    )
    check_candidates(candidates, baseline, depth)
    utilities = with_utilities(_utilities(profiles), utility)
    labelled = read_labelled(data, split, "test")
    with output.doing("opening the retrievers"):
        external = {
            name: open_retriever(
                index=None,
                **source,
                score_kind=score_kind,
                fingerprint=fingerprint,
                queries=labelled.dataset.queries,
            )
            for name, source in sources.items()
        }
        opened = None if index is None else open_index(index, ranker=ranker)
        views = _Views(opened, reranker, external)
        candidates = candidates if candidate else _possible(candidates, opened)
        views.check(profiles.values(), candidates)
    labelled, counts = labelled.against(views.first)
    dataset = labelled.dataset
    with output.passes() as begin:
        vectors = None
        if opened and any(each.route not in _LEXICAL for each in candidates):
            progress = begin("encoding queries", len(dataset))
            vectors = encode_queries(opened, dataset.queries, progress)
        comparison = compare_all(
            candidates,
            views.view,
            dataset,
            baseline=baseline,
            utilities=utilities,
            rule=rule,
            depth=depth,
            vectors=vectors,
            seed=seed,
            passes=begin,
        )
    digest = dataset.digest()
    checks = (
        ()
        if saved is None
        else check_regressions(
            comparison, saved, digest, metrics=metrics, tolerance=tolerance, seed=seed
        )
    )
    notes = _notes(comparison, labelled, profiles)
    about = {
        "data": dataset.name,
        "split": labelled.split,
        "dataset_digest": digest,
        **counts,
        "depth": depth,
        "seed": seed,
    }
    content = document(comparison, checks, about, notes)
    facts = [
        ("queries", labelled.described(counts)),
        ("measured on", f"{len(comparison.query_ids):,} queries that every candidate answered"),
        ("unlabelled", comparison.unlabelled),
    ]
    if out is not None:
        facts.append(("saved to", _saved(content, out)))
    if as_json:
        print_json(content)
    else:
        print_comparison(comparison, facts, output)
        print_checks(checks, output)
    for note in notes:
        output.note(note)
    worse = [check.candidate for check in checks if check.regressed]
    if worse:
        names = one_line(", ".join(worse))
        output.err.print(Text(f"finding: worse than the saved comparison, beyond noise: {names}"))
        raise typer.Exit(FINDING)


def _saved(content: Mapping[str, object], out: Path) -> str:
    """Write a comparison, and return the name of its file."""
    with atomic_write(out) as stream:
        stream.write((json.dumps(content, allow_nan=False) + "\n").encode())
    return str(out)


def _check_out(out: Path | None, against: Path | None) -> None:
    """Refuse a file that cannot be written, or one that the next check would be made against."""
    if out is None:
        return
    check_writable(out, "--out")
    if against is not None and out.resolve() == against.resolve():
        raise typer.BadParameter("name another file than --against", param_hint="--out")


def _by_name(paths: Sequence[Path]) -> dict[str, Path]:
    """Profiles by the stem of their file name, or by their path if two share it."""
    stems = Counter(path.stem for path in paths)
    return {path.stem if stems[path.stem] == 1 else str(path): path for path in paths}


def _sources(
    retrievers: Sequence[str], runs: Sequence[Path], upstream: Upstream | None, *, indexed: bool
) -> dict[str, dict[str, Any]]:
    """The others by the names of their candidates, as ``open_retriever`` takes them."""
    if not (indexed or retrievers or runs or upstream):
        raise typer.BadParameter(
            "give --index, --retriever, --run or --rerank-upstream", param_hint="--index"
        )
    sources: dict[str, dict[str, Any]] = {}
    for name in retrievers:
        sources[name.rpartition(":")[2]] = {"retriever": name}
    for name, file in _by_name(runs).items():
        sources[name] = {"retriever": None, "run": file}
    if upstream is not None:
        sources["reranked"] = {"retriever": None, "upstream": upstream}
    if len(sources) < len(retrievers) + len(runs) + (upstream is not None):
        raise ConfigurationError(
            "two of --retriever, --run and --rerank-upstream (reranked) have one name; rename an "
            "object or a file"
        )
    return sources


def _candidates(
    specs: Sequence[str],
    profiles: "dict[str, Profile]",
    ks: Sequence[int],
    *,
    reranked: bool,
    sources: tuple[str, ...],
    indexed: bool,
) -> "list[Candidate]":
    """Ways to cut an index's rankings or, without one, the first source's; each source as it is."""
    from calibration.compare.candidates import (
        at_each_k,
        default_candidates,
        from_profile,
        of_source,
        parse_candidates,
    )

    ks = tuple(dict.fromkeys(ks)) or (DEFAULT_K,)
    own = None if indexed else sources[0]
    candidates = [each for spec in specs for each in parse_candidates(spec, ks, own)]
    if not specs and indexed:
        candidates = list(at_each_k(default_candidates(reranked=reranked), ks))
    candidates += at_each_k([of_source(name) for name in sources], ks)
    return candidates + [from_profile(name, loaded, own) for name, loaded in profiles.items()]


def _possible(candidates: "list[Candidate]", index: "HybridRetriever | None") -> "list[Candidate]":
    """The usual candidates without the ranker where an index has no signals."""
    if index is None or index.has_signals:
        return candidates
    return [each for each in candidates if each.fusion.method != "ranker"]


def _utilities(profiles: "dict[str, Profile]") -> "Utilities":
    """The utilities of the profiles, which must be the same: one table has one unit."""
    from ctxguard.core.metrics import DEFAULT_UTILITIES

    utilities = [loaded.utilities for loaded in profiles.values()]
    if any(other != utilities[0] for other in utilities):
        raise ConfigurationError(
            f"the profiles {', '.join(profiles)} were made with different utilities, so their "
            "figures have no common unit; compare those made with the same ones"
        )
    return utilities[0] if utilities else DEFAULT_UTILITIES


class _Views:
    """One index under each candidate's stages, and the retrievers and runs beside it."""

    def __init__(
        self,
        retriever: "HybridRetriever | None",
        reranker: str | None,
        external: "Mapping[str, Source]",
    ) -> None:
        self._retriever = retriever
        self._external = external
        self._reranker = reranker
        self._reranked: dict[str, HybridRetriever] = {}

    def view(self, candidate: "Candidate") -> "Source":
        """The retriever of a candidate.

        Raises:
            ConfigurationError: it reranks, and no reranker was given, or there is no index.
        """
        route, fusion, reranker, source = candidate.stages
        if source is not None:
            return self._external[source]
        base = self._index
        if route.value.endswith("+rerank"):
            base = self._with_reranker(reranker, candidate.name)
        return base.with_fusion(fusion).on_route(route)

    @property
    def first(self) -> "Source":
        """The index, or without one the first of the others."""
        return next(iter(self._external.values())) if self._retriever is None else self._retriever

    def check(self, profiles: "Iterable[Profile]", candidates: "Iterable[Candidate]") -> None:
        """Check that every profile was calibrated on what is compared, and every candidate can be.

        Raises:
            ProfileMismatchError: one was calibrated on another system.
            ConfigurationError: a candidate has no retriever.
        """
        for profile in profiles:
            if self._retriever is None or profile.fingerprint.get("reranker", "none") == "none":
                fitted(profile, self.first)
            else:
                fitted(profile, self._with_reranker(None, "the profile"))
        for candidate in candidates:
            self.view(candidate)

    @property
    def _index(self) -> "HybridRetriever":
        """The index without a reranker."""
        if self._retriever is None:
            raise ConfigurationError(
                "a retriever of your own and a run have no stages to choose: compare them by k and "
                "min_ratio, or give --index"
            )
        return self._retriever

    def _with_reranker(self, model: str | None, who: str) -> "HybridRetriever":
        from ctxguard.retrieval.models.reranker import CrossEncoderReranker

        model = self._reranker if model is None else model
        if model is None:
            raise ConfigurationError(
                f"{who} reranks, and no reranker was given; name one with --reranker, or with "
                "rerank=MODEL in the candidate"
            )
        if model not in self._reranked:
            self._reranked[model] = self._index.with_reranker(CrossEncoderReranker(model))
        return self._reranked[model]


def _notes(
    comparison: "Comparison", labelled: "Labelled", profiles: "dict[str, Profile]"
) -> list[str]:
    """What a reader of the figures should know."""
    from ctxguard.core.scores import is_relative

    notes = [*labelled.notes, *(f"left out: {line}" for line in comparison.skipped)]
    for name, loaded in profiles.items():
        notes += [f"{name}: {line}" for line in seen_in_calibration(labelled, loaded)]
    if len({is_relative(each.kind) for each in comparison.candidates}) > 1:
        notes.append(
            "udcg, distractor_rate and harm_undiscounted find suspected distractors by score, or "
            "by rank where scores carry rank only: between such candidates compare precision, "
            "udcg_strict and harm"
        )
    if len(comparison.query_ids) < comparison.rule.fewest:
        notes.append(
            f"with fewer than {comparison.rule.fewest} queries, bootstrap intervals are too narrow"
        )
    return notes
