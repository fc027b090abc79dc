"""What the guard takes, calibration takes: callables, objects, asynchronous ones, hits, runs."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from calibration.calibrate import Calibration, calibrate
from calibration.compare.candidates import Candidate
from calibration.compare.comparison import compare
from calibration.data.dataset import Dataset, Query
from calibration.data.readers import read_trec_run
from calibration.replay import replay
from calibration.report import report
from calibration.retrievers import RankingSource, RecordedRankings, wrapped
from calibration.settings import Settings
from ctxguard.core.decision import decide
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Passage, Ranking, Route, ScoreKind
from ctxguard.errors import (
    CalibrationError,
    ConfigurationError,
    DataError,
    QueryError,
    StageUnavailableError,
)
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.measure.worth import STRICT

N = 40
DATASET = Dataset(
    "numbers",
    tuple(Query(f"q{n}", f"question {n}") for n in range(N)),
    {f"q{n}": {f"{n}-1": 1} for n in range(N)},
)


def search(query: str, *, depth: int) -> list[Hit]:
    """Five passages, of which the first answers."""
    number = query.rsplit(maxsplit=1)[-1]
    hits = [Hit(f"{number}-{rank}", 1.0 / rank, f"text {rank}") for rank in range(1, 6)]
    return hits[:depth]


async def asearch(query: str, depth: int) -> list[Hit]:
    await asyncio.sleep(0)
    return search(query, depth=depth)


class Plain:
    def retrieve(self, query: str, *, depth: int) -> list[Hit]:
        return search(query, depth=depth)


class AsyncOnly:
    """Like a client of a real engine, it belongs to the loop that it was first used on."""

    loop: asyncio.AbstractEventLoop | None = None

    async def aretrieve(self, query: str, *, depth: int) -> list[Hit]:
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()
        return search(query, depth=depth)


class Both(Plain, AsyncOnly):
    """The plain call needs no loop."""


class Called:
    async def __call__(self, query: str, *, depth: int) -> list[Hit]:
        return search(query, depth=depth)


class Rankings:
    def retrieve(self, query: str, *, depth: int) -> Ranking:
        return Ranking.from_hits(search(query, depth=depth), "ratio")


def generated(query: str, *, depth: int) -> Iterator[Hit]:
    yield from search(query, depth=depth)


def awaitable(query: str, depth: int) -> object:
    return asearch(query, depth)


def without_scores(query: str, *, depth: int) -> list[Hit]:
    return [Hit(hit.passage_id, text=hit.text) for hit in search(query, depth=depth)]


ANYTHING: dict[str, Callable[[], object]] = {
    "function": lambda: search,
    "async function": lambda: asearch,
    "plain function of an awaitable": lambda: awaitable,
    "object": Plain,
    "async only": AsyncOnly,
    "both": Both,
    "async call": Called,
    "rankings": Rankings,
    "generator": lambda: generated,
}


def calibrated(retriever: object, kind: str | None = "ratio") -> Calibration:
    return calibrate(retriever, DATASET, Settings(depth=5, held_out=0.5), score_kind=kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ANYTHING)
def test_guards_inputs_are_all_calibrated(name: str) -> None:
    retriever = ANYTHING[name]()
    calibration = calibrated(retriever)
    route = calibration.profile.routes[Route.EXTERNAL]
    assert route.score_kind is ScoreKind.RATIO
    assert route.evidence.metrics["recall"].value == 1.0
    fixed = Candidate("first 2", RatioPolicy(k=2), Route.EXTERNAL)
    comparison = compare(
        [fixed], lambda _: wrapped(retriever, score_kind="ratio"), DATASET, depth=5
    )  # type: ignore[arg-type,return-value]
    assert comparison.results.of("first 2", "kept").mean.value == 2.0
    assert report(calibration, None) is not None
    guard = ContextGuard(ANYTHING[name](), score_kind="ratio", profile=calibration.profile)  # type: ignore[arg-type]
    assert asyncio.run(guard.aretrieve("question 3")).kept_ids[0] == "3-1"


def test_runs_beside_a_running_loop() -> None:
    async def main() -> Calibration:
        return calibrated(asearch)

    assert asyncio.run(main()).profile.routes


@pytest.mark.parametrize("kind", ["rank", ScoreKind.RANK, None])
def test_scoreless_chooses_only_k(kind: str | None) -> None:
    profile = calibrated(without_scores, kind).profile
    route = profile.routes[Route.EXTERNAL]
    assert route.score_kind is ScoreKind.RANK
    assert route.policy.kind == "ratio"
    assert route.policy.min_ratio == 0.0
    context = ContextGuard(without_scores, score_kind=kind, profile=profile).retrieve("question 7")  # type: ignore[arg-type]
    assert context.kept_ids == tuple(f"7-{rank}" for rank in range(1, route.policy.k + 1))
    assert context.text


def test_kindless_scores_list_the_kinds() -> None:
    with pytest.raises(ConfigurationError, match="plain hits require score_kind"):
        calibrated(search, None)


def test_raised_error_is_quoted() -> None:
    def broken(query: str, *, depth: int) -> list[Hit]:
        raise OSError("engine.example: connection refused")

    with pytest.raises(CalibrationError, match=r"q0: retriever: OSError: engine\.example"):
        calibrated(broken)
    with pytest.raises(StageUnavailableError, match="OSError"):
        RankingSource(broken).retrieve("a query")


@pytest.mark.parametrize(
    ("retriever", "message"),
    [
        (Plain, "Plain is a class, not a retriever: give an instance of it"),
        (lambda query, *, depth: ["a text"], "holds str; make each item a ctxguard.Hit"),
        (lambda query, *, depth: [("a", 0.5)], "holds tuple; make each item a ctxguard.Hit"),
        (lambda query, *, depth: None, "expected a Ranking or a list of Hits, got a NoneType"),
    ],
)
def test_non_retriever_is_refused_first(retriever: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        calibrated(retriever)


def test_uncallable_signature_is_refused() -> None:
    """A signature that no request can call is refused when the guard is made."""
    with pytest.raises(ConfigurationError, match="cannot be called"):
        ContextGuard(lambda query, limit: [], score_kind="ratio")  # type: ignore[arg-type,misc]


def test_fingerprint_is_given_or_own() -> None:
    class Named(Plain):
        def fingerprint(self) -> dict[str, str]:
            return {"engine": "1"}

    assert calibrated(Named()).profile.fingerprint == {"engine": "1"}
    given = calibrate(
        Named(), DATASET, Settings(depth=5), score_kind="ratio", fingerprint={"engine": "2"}
    )
    assert given.profile.fingerprint == {"engine": "2"}
    assert RankingSource(search).fingerprint() == {}


def test_passages_are_found_again() -> None:
    retriever = RankingSource(search, score_kind="ratio", keep_passages=True)
    replay(retriever, DATASET.queries[:1])
    assert retriever.passage("0-2") == Passage("0-2", "text 2")
    with pytest.raises(KeyError):
        RankingSource(search).passage("0-2")


class TestRecordedRankings:
    def test_trec_run_calibrates_alone(self, tmp_path: Path) -> None:
        run = tmp_path / "run.trec"
        lines = [
            f"q{number} Q0 p{number}-{rank} {rank} {10.0 / rank:.4f} tag"
            for number in range(40)
            for rank in range(1, 11)
        ]
        run.write_text("\n".join(lines))
        queries = tuple(Query(f"q{number}", f"question {number}") for number in range(40))
        qrels = {f"q{number}": {f"p{number}-1": 1} for number in range(40)}
        dataset = Dataset("trec", queries, qrels)
        recorded = RecordedRankings.of_run(read_trec_run(run), queries, ScoreKind.RATIO)
        asked = Settings(depth=10, context="utility", utilities=STRICT, held_out=0.5)
        route = calibrate(recorded, dataset, asked).profile.routes[Route.EXTERNAL]
        assert route.policy.k == 1
        assert route.evidence.metrics["udcg"].value == 1.0

    def test_omitted_query_has_no_candidates(self) -> None:
        recorded = RecordedRankings.of_run({}, (Query("q", "left out"),), ScoreKind.RATIO)
        assert len(recorded.retrieve("left out")) == 0
        with pytest.raises(QueryError, match="not among the recorded ones"):
            recorded.retrieve("unknown")

    def test_foreign_run_is_refused(self) -> None:
        run = {"301": (Hit("p", 1.0, rank=1),)}
        with pytest.raises(DataError, match=r"contains none of the 40 queries.*'301'.*'q0'"):
            RecordedRankings.of_run(run, DATASET.queries)

    def test_equal_texts_share_one_ranking(self) -> None:
        queries = (Query("a", "same"), Query("b", "same"))
        run = {"a": (Hit("p", 1.0, rank=1),), "b": (Hit("p", 1.0, rank=1),)}
        assert len(RecordedRankings.of_run(run, queries).retrieve("same")) == 1
        with pytest.raises(DataError, match="'a' and 'b' have the same text"):
            RecordedRankings.of_run({**run, "b": (Hit("x", 1.0, rank=1),)}, queries)


class TestDirection:
    """Scores that the order of most lists contradicts are refused, with the kind that fits."""

    @staticmethod
    def opposed(share: float, *, ranked: bool = False) -> Callable[..., list[Hit]]:
        """Distances on this share of the questions, and similarities on the others."""

        def distances(query: str, *, depth: int) -> list[Hit]:
            number = int(query.rsplit(maxsplit=1)[-1])
            sign = 1.0 if number < share * N else -1.0
            return [
                replace(hit, score=1.0 + sign * at / 10, rank=at if ranked else None)
                for at, hit in enumerate(search(query, depth=depth), start=1)
            ]

        return distances

    @pytest.mark.parametrize("ranked", [False, True])
    @pytest.mark.parametrize("kind", ["cosine", "inner_product", "ratio", "logit", "probability"])
    def test_distances_are_refused_by_name(self, kind: str, *, ranked: bool) -> None:
        with pytest.raises(ConfigurationError, match=r"40 of 40 lists .*score_kind='distance'"):
            calibrate(self.opposed(1.0, ranked=ranked), DATASET, score_kind=kind)

    def test_most_lists_decide(self) -> None:
        with pytest.raises(ConfigurationError, match="24 of 40 lists"):
            replay(wrapped(self.opposed(0.6), score_kind="ratio"), DATASET.queries)
        pools = replay(wrapped(self.opposed(0.4), score_kind="ratio"), DATASET.queries)
        # The order of the engine stands where it contradicts the scores.
        assert all(ids[0] == f"{at}-1" for at, ids in enumerate(pools.passage_ids))
        decided = [decide(ranking, RatioPolicy(k=2)).kept_ids for ranking in pools.rankings()]
        assert decided == [ids[:2] for ids in pools.passage_ids]

    def test_negated_distances_are_taken(self) -> None:
        def negated(query: str, *, depth: int) -> list[Hit]:
            hits = self.opposed(1.0)(query, depth=depth)
            return [replace(hit, score=-hit.score) for hit in hits]

        pools = replay(wrapped(negated, score_kind="distance"), DATASET.queries)
        assert pools.passage_ids[0][0] == "0-1"

    @pytest.mark.parametrize("first_rank", [0, 1])
    def test_opposing_ranks_are_refused(self, tmp_path: Path, first_rank: int) -> None:
        lines = [
            f"q{n} Q0 {n}-{at} {at + first_rank} {0.1 + at / 10} tag"
            for n in range(N)
            for at in range(5)
        ]
        (tmp_path / "run.txt").write_text("\n".join(lines))
        run = read_trec_run(tmp_path / "run.txt")
        assert [hit.rank for hit in run["q0"]] == [1, 2, 3, 4, 5]
        recorded = RecordedRankings.of_run(run, DATASET.queries, "cosine")
        with pytest.raises(ConfigurationError, match="score_kind='distance'"):
            replay(recorded, DATASET.queries)
