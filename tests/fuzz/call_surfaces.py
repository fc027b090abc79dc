"""Texts that are rendered, cut and read, and functions that a program calls."""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from calibration.calibrate import calibrate
from calibration.data.dataset import Dataset, Query
from calibration.fit import fit_fusion, fit_relevance, fit_temperature, out_of_fold
from calibration.pools import label
from calibration.replay import replay
from calibration.retrievers import RecordedRankings
from calibration.settings import Settings as Choice
from ctxguard.core.assembly import Assembly, assemble
from ctxguard.core.decision import decide
from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.render import Template, sanitise
from ctxguard.core.types import Hit, Leg, Passage, Ranking, ScoreKind
from ctxguard.endpoints.replies import read_reply
from ctxguard.errors import CtxguardError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.measure import metrics, worth
from ctxguard.measure.risk import betting_p_value, betting_upper_bound, fixed_sequence
from ctxguard.monitor.judges.prompt import messages, read_grade
from ctxguard.monitor.redaction import redact
from ctxguard.retrieval.chunks import PassageWindow, chunked
from tests.fuzz.inputs import altered, changed, number, text, value
from tests.fuzz.surface import Input, Make, answered, called, stateless, surface


def _render(passages: list[Passage], query: str, template: str) -> None:
    rendered = Assembly().render(passages).lower()
    assert rendered.count("<passage") == rendered.count("</passage") == len(passages)
    for passage in passages:
        once = sanitise(passage.text)
        assert sanitise(once) == once
        once.encode()
    content = messages(query, passages[0].text if passages else "")[1]["content"].lower()
    for tag in ("<query", "</query", "<passage", "</passage"):
        assert content.count(tag) == 1
    Template(template).render(passages)


@stateless("text: rendering")
def _rendering(random: Random) -> Input:
    passages = [
        Passage(text(random), text(random), text(random)) for _ in range(random.randint(0, 3))
    ]
    # Short: a template is a setting of the program, compiled once.
    template = text(random, 6)[:60] + "{text}" + text(random, 6).replace("{", "")[:60]
    return called(_render, passages, text(random), template)


@stateless("text: assembly")
def _assembly(random: Random) -> Input:
    hits = [
        Hit(f"p{n}", 1.0 / (n + 1), text(random), text(random)) for n in range(random.randint(0, 6))
    ]
    settings: dict[str, Any] = {
        "order": random.choice(["rank", "edges", "edges", "odd"]),
        "max_tokens": random.choice([None, None, -1, 0, 1, 20, 300, 10**30]),
        "max_passage_chars": random.choice([100_000, 100_000, 0, 10]),
        "truncate": random.random() < 0.5,
        "separator": random.choice(["\n", "", text(random, 4)]),
    }

    def run() -> None:
        ranking = Ranking.from_hits(hits, ScoreKind.RATIO)
        assembly = Assembly(**settings)
        served, *_ = assemble(decide(ranking, RatioPolicy(k=4)), assembly)
        assembly.render(served)

    return Input((hits, settings), len(repr(hits)), run)


def _redact(given: str) -> None:
    once = redact(given)
    assert redact(once) == once


@stateless("text: redaction")
def _redaction(random: Random) -> Input:
    return called(_redact, text(random))


@surface("text: chunking")
def _chunking(folder: Path, closing: ExitStack) -> Make:
    letters = [chr(code) for code in range(33, 500)]
    names = ["[UNK]", *letters, *[f"##{letter}" for letter in letters]]
    tokenizer = Tokenizer(
        models.WordPiece({name: n for n, name in enumerate(names)}, unk_token="[UNK]")  # noqa: S106
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    window = PassageWindow(tokenizer.to_str(), 64)

    def make(random: Random) -> Input:
        passage = Passage(text(random, 3), text(random), text(random, 5))
        return called(lambda given: list(chunked([given], window)), passage)

    return make


@stateless("text: reply of a judge")
def _reply(random: Random) -> Input:
    content = b'{"choices": [{"message": {"content": "{\\"grade\\": 2}"}}], "usage": {}}'
    return called(answered, changed(content, random), lambda each: read_reply(each, read_grade))


def _run_where(conditions: Any, metadata: object) -> None:
    where = Where(conditions)
    where.allows(metadata)
    assert where.digest
    assert repr(where)


@stateless("call: Where")
def _where(random: Random) -> Input:
    known = {"tenant": "a", "groups": ["staff", 1, True], text(random, 2): value(random, 1)}
    conditions = value(random) if random.random() < 0.2 else altered(known, random)
    return called(_run_where, conditions, altered(known, random))


def _numbers(random: Random, most: int = 6) -> list[float]:
    n = random.randint(0, most) if random.random() < 0.95 else random.randint(500, 3000)
    return [number(random) for _ in range(n)]


def _grades(random: Random) -> list[int]:
    n = random.randint(0, 8) if random.random() < 0.95 else random.randint(500, 3000)
    return [random.choice([0, 0, 1, 2, 3, -1, 10**6, True]) for _ in range(n)]


def _worth(given: Mapping[str, float], graded: list[int], judged: list[bool]) -> None:
    utilities = worth.Utilities(**given)  # type: ignore[arg-type]
    worths = [
        utilities.of(grade, top_grade=3, is_judged=each)
        for grade, each in zip(graded, judged, strict=True)
    ]
    metrics.udcg(np.array([worths]))


@stateless("call: metrics")
def _metrics(random: Random) -> Input:
    graded = _grades(random)
    given = {"relevant": number(random), "distractor": -number(random)}
    call, *arguments = random.choice(
        [
            (metrics.keyword_first_ranks, [text(random, 5)], [text(random), text(random)]),
            (_worth, given, graded, [random.random() < 0.5 for _ in graded]),
        ]
    )
    return called(call, *arguments)


def _run_decision(hits: list[Hit], kind: Any, policy: Mapping[str, Any]) -> None:
    ranking = Ranking.from_hits(hits, kind)
    decision = decide(ranking, RatioPolicy(**policy))
    assert (decision.kept_ids, decision.decisions, repr(decision)) is not None


@stateless("call: decision")
def _decision(random: Random) -> Input:
    policy = {
        "k": random.choice([1, 3, 10**9, 0, -1]),
        "min_ratio": random.choice([0.0, 0.5, 1.0, number(random)]),
        "temperature": random.choice([1.0, 0.0, number(random)]),
        "min_keep": random.choice([0, 1, 5, -1]),
    }
    hits = [
        Hit(f"p{n // random.choice([1, 1, 2])}", random.choice([score, score, None]))
        for n, score in enumerate(_numbers(random))
    ]
    return called(_run_decision, hits, random.choice(list(ScoreKind)), policy)


def _guarded(returned: Callable[[], object]) -> None:
    guard = ContextGuard(lambda query, depth: returned(), score_kind=ScoreKind.RATIO, k=3)
    context = guard.retrieve("q")
    json.dumps(context.to_dict(), allow_nan=False)
    assert isinstance(context.text, str)


@stateless("call: hits and rankings of a retriever")
def _hits(random: Random) -> Input:
    def odd() -> Any:
        return value(random, 1) if random.random() < 0.3 else text(random, 4)

    hits: Any = [
        (odd(), random.choice([1.0, value(random, 0)]), odd(), odd())
        for _ in range(random.randint(0, 6))
    ]
    if random.random() < 0.5:
        made = lambda: [Hit(*each) for each in hits]  # noqa: E731
        return Input(hits, len(repr(hits)), lambda: _guarded(made))
    ids: Any = tuple(odd() for _ in range(random.randint(0, 4)))
    scores: Any = random.choice([np.array(_numbers(random)), _numbers(random), value(random)])
    kind: Any = random.choice([*ScoreKind, odd()])
    legs: Any = random.choice([None, value(random)])
    passages = [Passage("p", "text") for _ in ids]
    return Input(
        (ids, scores, kind, legs),
        len(repr((ids, scores, legs))),
        lambda: _guarded(lambda: Ranking(ids, scores, kind, passages, legs=legs)),
    )


@stateless("call: risk")
def _risk(random: Random) -> Input:
    losses = [random.choice([0.0, 1.0, random.random()]) for _ in range(random.randint(0, 50))]
    if random.random() < 0.3:
        losses += _numbers(random)
    level = random.choice([0.1, 0.5, random.uniform(1e-6, 1.0 - 1e-6)])
    call = random.choice([betting_p_value, betting_upper_bound, fixed_sequence])
    return called(call, losses, level)


def _pool(random: Random) -> tuple[Any, Dataset]:
    """A retriever that answers a few queries, mostly with the scores of two legs, and labels."""
    rankings, queries, qrels = {}, [], {}
    for at in range(random.randint(1, 14)):
        n = random.randint(0, 8)
        scores = sorted((random.random() for _ in range(n)), reverse=True)
        if random.random() < 0.1:
            scores = [number(random) for _ in range(n)]
        ranking = Ranking.from_hits(
            [Hit(f"p{at}-{i}", score) for i, score in enumerate(scores)], ScoreKind.RATIO
        )
        legs = {}
        if random.random() < 0.9:
            legs = {
                "dense": Leg(np.array([random.random() for _ in range(n)]), ScoreKind.COSINE),
                "lexical": Leg(np.array([random.random() for _ in range(n)]), ScoreKind.RATIO),
            }
        object.__setattr__(ranking, "legs", legs)
        query = Query(f"q{at}", f"question {at}")
        rankings[query.text] = ranking
        queries.append(query)
        qrels[query.query_id] = {f"p{at}-{i}": random.choice([0, 0, 1, 2]) for i in range(n)}

    return RecordedRankings(rankings), Dataset("fuzzed", tuple(queries), qrels)


def _run_fit(retriever: Any, dataset: Dataset) -> None:
    pools = label(replay(retriever, dataset.queries, depth=8), dataset)
    for call in (
        lambda: fit_fusion(pools) if pools.legs else None,
        lambda: fit_temperature(pools),
        lambda: fit_relevance(pools),
        lambda: out_of_fold(pools, fit_relevance(pools)),
    ):
        with suppress(CtxguardError):
            call()


@stateless("call: fit on a tiny pool", is_slow=True)
def _fit(random: Random) -> Input:
    retriever, dataset = _pool(random)
    return Input(dataset, len(repr(dataset)), lambda: _run_fit(retriever, dataset))


@stateless("call: calibrate on a tiny pool", is_slow=True)
def _calibrate(random: Random) -> Input:
    retriever, dataset = _pool(random)
    settings: dict[str, Any] = {
        "policy": random.choice(["auto", "ratio", "expected_utility", "odd"]),
        "serving_k": random.choice([1, 3, 0, 10**6]),
        "held_out": random.choice([None, 0.0, 0.5, 1.0]),
        "depth": random.choice([1, 8, 0]),
        "seed": random.choice([0, 1, -1]),
    }
    return Input(
        (dataset, settings),
        len(repr(dataset)),
        lambda: calibrate(retriever, dataset, Choice(**settings), score_kind=ScoreKind.RATIO),
    )
