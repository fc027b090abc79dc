"""Where a command's candidates come from.

An index, a retriever of the user's own, a run, or lists that a reranker scores.
"""

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ctxguard.cli._console import check_writable
from ctxguard.cli._inputs import Labelled, open_index
from ctxguard.core.types import Route, ScoreKind
from ctxguard.errors import ConfigurationError, DataError, ProfileMismatchError
from ctxguard.retrieval.analysers.words import words

if TYPE_CHECKING:
    from calibration.data.dataset import Query
    from calibration.replay import Pools
    from calibration.retrievers import WrappedRetriever
    from ctxguard.cli._inputs import Source
    from ctxguard.integrations.engines.retriever import EngineRetriever
    from ctxguard.profile.schema import Profile


_UPSTREAM_KEY = "CTXGUARD_UPSTREAM_KEY"
_UPSTREAM_SECONDS = 60.0
"""For one list: nobody waits for the answer."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server with a reranker, and what it is to score.

    Attributes:
        url: Its base, or its endpoint.
        candidates: JSONL file of queries and documents.
        protocol: The form of requests.
        model: The model that it is asked for; None for its own choice.
    """

    url: str
    candidates: Path
    protocol: Literal["cohere", "tei"]
    model: str | None


def upstream_of(
    url: str | None,
    candidates: Path | None,
    protocol: Literal["cohere", "tei"],
    model: str | None,
) -> Upstream | None:
    """The server that the options name; None if they name none.

    Raises:
        ConfigurationError: one of the two is missing.
    """
    if url is None and candidates is None:
        return None
    if url is None or candidates is None:
        raise ConfigurationError(
            "a reranker at --rerank-upstream URL scores the documents of --candidates FILE: give "
            "both"
        )
    return Upstream(url, candidates, protocol, model)


def open_retriever(
    *,
    index: Path | None,
    engine: str | None = None,
    retriever: str | None,
    run: Path | None = None,
    upstream: Upstream | None = None,
    reranker: str | None = None,
    ranker: Path | None = None,
    score_kind: ScoreKind | None = None,
    fingerprint: Sequence[str] | None = None,
    queries: "Sequence[Query]" = (),
) -> "Source":
    """The retriever that the options name.

    Args:
        index: Folder of an index.
        engine: URL of an index in an engine.
        retriever: ``MODULE:OBJECT``.
        run: TREC run file.
        upstream: Server that scores lists of candidates.
        reranker: Model that reranks the candidates of an index.
        ranker: File with the weights that order them.
        score_kind: What the scores of plain hits, a run or a server mean; None for rank, or for
            what the server's protocol says.
        fingerprint: ``KEY=VALUE`` each.
        queries: The queries of a run, or of lists of candidates.

    Raises:
        ConfigurationError: not one of the five is named, or an option does not go with it.
        DataError: the run or the candidates cannot be read.
    """
    named = {
        "--index": index,
        "--engine": engine,
        "--retriever": retriever,
        "--run": run,
        "--rerank-upstream": upstream,
    }
    given = [option for option, value in named.items() if value is not None]
    if len(given) != 1:
        raise ConfigurationError(
            f"{' and '.join(given) or 'nothing'} says where candidates come from: give one of "
            "--index FOLDER, --engine URL, --retriever MODULE:OBJECT, --run FILE and "
            "--rerank-upstream URL"
        )
    if index is not None:
        _refuse(given[0], {"--score-kind": score_kind, "--fingerprint": fingerprint})
        return open_index(index, reranker=reranker, ranker=ranker)
    _refuse(given[0], {"--reranker": reranker, "--ranker": ranker})
    if engine is not None:
        _refuse(given[0], {"--score-kind": score_kind, "--fingerprint": fingerprint})
        return open_engine(engine)
    if upstream is not None:
        _refuse(given[0], {"--fingerprint": fingerprint})
        return open_candidates(upstream, queries, score_kind)
    identity = None if not fingerprint else pairs(fingerprint)
    if run is not None:
        return open_run(run, queries, score_kind, identity)
    return load_retriever(str(retriever), score_kind, identity)


def open_engine(url: str) -> "EngineRetriever":
    """An index in an engine, closed when the process ends.

    Raises:
        ConfigurationError: the URL is wrong, or there is no such index.
        StageUnavailableError: the engine cannot be reached.
    """
    from ctxguard.integrations.engines.retriever import EngineRetriever

    retriever = EngineRetriever.open(url)
    atexit.register(retriever.close)
    return retriever


def _refuse(source: str, options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value:
            raise ConfigurationError(f"{option} has no effect with {source}: leave it out")


def pairs(fingerprint: Sequence[str]) -> dict[str, str]:
    """The entries of a fingerprint from options ``KEY=VALUE``.

    Raises:
        ConfigurationError: one is none.
    """
    entries = {}
    for item in fingerprint:
        key, equals, value = item.partition("=")
        if not key or not equals or not value:
            raise ConfigurationError(
                f"--fingerprint {item!r} is not KEY=VALUE, such as engine=opensearch-3"
            )
        entries[key] = value
    return entries


def open_run(
    file: Path,
    queries: "Sequence[Query]",
    score_kind: ScoreKind | None,
    fingerprint: Mapping[str, str] | None = None,
) -> "WrappedRetriever":
    """The rankings of a TREC run file as a retriever.

    Raises:
        DataError: a line cannot be read; the message names it.
    """
    from calibration.data.readers import read_trec_run
    from calibration.retrievers import RecordedRankings, WrappedRetriever

    kind = ScoreKind.RANK if score_kind is None else score_kind
    recorded = RecordedRankings.of_run(read_trec_run(file), queries, kind)
    return WrappedRetriever(recorded, fingerprint=fingerprint)


def open_candidates(
    upstream: Upstream, queries: "Sequence[Query]", score_kind: ScoreKind | None
) -> "WrappedRetriever":
    """Lists of candidates, scored by a server, as a retriever.

    Raises:
        DataError: a line cannot be read, or none has one of the queries.
        ConfigurationError: the URL or the key cannot be used.
    """
    from calibration.reranked_candidates import RerankedCandidates, read_candidates
    from calibration.retrievers import WrappedRetriever
    from ctxguard.retrieval.rerank_client import RerankClient

    client = RerankClient(
        upstream.url,
        protocol=upstream.protocol,
        key=os.environ.get(_UPSTREAM_KEY) or None,
        model=upstream.model,
        timeout_seconds=_UPSTREAM_SECONDS,
    )
    candidates = read_candidates(upstream.candidates)
    if queries and not any(query.text in candidates for query in queries):
        raise DataError(
            f"has none of the {len(queries):,} labelled queries, the first of which is "
            f"{queries[0].text!r}; queries must have the text of the labels",
            path=upstream.candidates,
        )
    logits = upstream.protocol == "tei"
    kind = score_kind or (ScoreKind.LOGIT if logits else ScoreKind.PROBABILITY)
    return WrappedRetriever(RerankedCandidates(candidates, client, kind), keep_passages=True)


def load_retriever(
    name: str, score_kind: ScoreKind | None, fingerprint: Mapping[str, str] | None = None
) -> "WrappedRetriever":
    """Import the retriever that ``MODULE:OBJECT`` names, also from the current folder.

    Raises:
        ConfigurationError: it cannot be imported, or is no retriever; the message names it.
    """
    from calibration.retrievers import WrappedRetriever

    loaded: Any = _imported(name)
    try:
        return WrappedRetriever(
            loaded,
            score_kind=score_kind,
            fingerprint=fingerprint,
            keep_passages=True,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"--retriever {name}: {error}") from None


def _imported(name: str) -> object:
    module, colon, path = name.partition(":")
    if not module or not colon or not path:
        raise ConfigurationError(
            f"--retriever {name!r} is not MODULE:OBJECT, such as app.search:retriever"
        )
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        # Standard output holds the result alone.
        with redirect_stdout(sys.stderr):
            loaded = import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"--retriever {name}: the module {module!r} cannot be imported "
            f"({type(error).__name__}: {error}); run the command in the folder that holds it, or "
            "install it"
        ) from error
    try:
        found: object = reduce(getattr, path.split("."), loaded)
    except AttributeError as error:
        raise ConfigurationError(f"--retriever {name}: {error}") from None
    return found


def on_route(retriever: "Source", route: Route) -> "Source":
    """An index with these stages; a wrapped retriever as it is, since it has none to choose."""
    view: Source = retriever.on_route(route) if hasattr(retriever, "on_route") else retriever
    return view


def served_route(retriever: "Source", profile: "Profile | None") -> Route:
    """The stages that answer; of a wrapped retriever, those that the profile was made for."""
    if profile is None or retriever.route is not Route.EXTERNAL or len(profile.routes) != 1:
        return retriever.route
    return next(iter(profile.routes))


def fusion_of(retriever: "Source") -> dict[str, object] | None:
    """How an index fuses its legs, as JSON; None for a wrapped retriever."""
    fusion = getattr(retriever, "fusion", None)
    return None if fusion is None else asdict(fusion)


def beyond_index(retriever: "Source", k: int) -> list[str]:
    """A note if k is more than the passages of an index; a wrapped retriever's are not known."""
    n = len(retriever) if hasattr(retriever, "__len__") else k
    return [f"k = {k} is more than the index's {n} passages"] if k > n else []


def terms_of(
    retriever: "Source",
) -> Callable[[str], Sequence[str]]:
    """Splits a text into the terms that an index matches; a wrapped retriever's are not known."""
    analyser = getattr(retriever, "analyser", None)
    return words if analyser is None else analyser.analyse


def for_run(labelled: Labelled, run: Path | None) -> Labelled:
    """The labels; for a run without keywords, which are looked for in texts, and it has none."""
    dataset = labelled.dataset
    if run is None or not dataset.keywords:
        return labelled
    return replace(
        labelled,
        dataset=replace(dataset, keywords={}),
        notes=(*labelled.notes, "keywords are left out: a run has no texts to look for them in"),
    )


def check_score_kind(pools: "Pools", route: Route, profile: "Profile | None") -> None:
    """Refuse scores of another kind than the profile's policy of the route was calibrated on.

    Raises:
        ProfileMismatchError: they are.
    """
    calibrated = None if profile is None else profile.routes.get(route)
    if calibrated is not None and calibrated.score_kind is not pools.kind:
        was = calibrated.score_kind.value
        raise ProfileMismatchError((f"score_kind is {pools.kind.value!r}, was {was!r}",))


def notes_on_pools(pools: "Pools", route: Route, run: Path | None) -> list[str]:
    """Notes on queries that were left out or not in the run, and on stages that answered instead.

    Args:
        pools: What was retrieved.
        route: The stages whose policy applies.
        run: The run that it comes from; None for another retriever.
    """
    notes = [f"left out: {line}" for line in pools.skipped]
    if pools.route is not route:
        notes.append(
            f"the retriever answered by {pools.route.value}, and what is measured is the policy of "
            f"{route.value}; name the route with --route"
        )
    missing = [name for name, n in zip(pools.query_ids, pools.lengths, strict=True) if not n]
    if missing and run is not None:
        notes.append(
            f"the run has no candidate of {len(missing):,} queries, first {missing[0]!r}: they "
            "count as answered with nothing"
        )
    return notes


def check_run(file: Path | None) -> None:
    """Refuse a run file that cannot be written, before the work."""
    if file is not None:
        check_writable(file, "--write-run")


def write_pools(pools: "Pools", file: Path | None) -> list[str]:
    """Write what was retrieved as a TREC run, if a file is named, with a note that it is there."""
    from calibration.data.readers import write_trec_run

    if file is None:
        return []
    write_trec_run(file, pools.run())
    return [f"the candidates are in {file}, as a TREC run"]
