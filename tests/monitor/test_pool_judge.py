"""A judge that has all passages of a sample judged in one call."""

import math
from collections.abc import Iterator

import pytest
from contexts import make_context
from watching import Watching

from ctxguard.cli._store import JudgeSettings
from ctxguard.core.types import Passage
from ctxguard.endpoints.assessors import ModelAssessor
from ctxguard.errors import ConfigurationError, StageUnavailableError
from ctxguard.monitor.estimation.metrics import Rows
from ctxguard.monitor.judges import InvalidReason, Judgment, PoolJudge, TokenPrices
from ctxguard.monitor.judges.protocol import verdicts_from_json, verdicts_to_json

pytest.importorskip("openai")

from tests.model_endpoint import Answer, ModelEndpoint
from tests.stored import all_judged

PASSAGES = [Passage(name, f"text of {name}") for name in ("good", "bad", "fair", "poor")]
CHANCES = {"good": 0.9, "bad": 0.05, "fair": 0.5, "poor": 0.3}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelEndpoint]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    served = ModelEndpoint()
    served.opinion = lambda text, _: CHANCES[text.split()[-1]]
    yield served
    served.close()


@pytest.fixture
def judge(endpoint: ModelEndpoint) -> Iterator[PoolJudge]:
    made = PoolJudge(
        ModelAssessor(
            "stand-in",
            questions=("relevant",),
            base_url=endpoint.url,
            api_key="none",
            prices=TokenPrices(1.0, 2.0),
        )
    )
    yield made
    made.close()


def test_one_call_judges_them_all_and_keeps_their_probabilities(
    judge: PoolJudge, endpoint: ModelEndpoint
) -> None:
    verdicts = [one for one in judge.judge("q", PASSAGES) if one is not None]
    assert len(endpoint.requests) == judge.ledger.accounts().calls == 1
    assert [one.passage_id for one in verdicts] == ["good", "bad", "fair", "poor"]
    assert [(one.grade, one.score) for one in verdicts] == [(1, 0.9), (0, 0.05), (1, 0.5), (0, 0.3)]
    assert judge.ledger.accounts().cost == pytest.approx((300 + 2 * 8) / 1e6)


def test_the_order_is_another_one_each_time(judge: PoolJudge, endpoint: ModelEndpoint) -> None:
    for _ in range(10):
        judge.judge("q", PASSAGES)
    assert len({repr(each) for each in endpoint.requests}) > 1


def test_a_reply_that_is_no_answer_is_no_verdict_and_an_outage_is_an_error(
    judge: PoolJudge, endpoint: ModelEndpoint
) -> None:
    endpoint.script.append(Answer("certainly relevant, all of them"))
    assert judge.judge("q", PASSAGES) == [None] * 4
    assert judge.ledger.accounts().invalid[InvalidReason.MALFORMED] == 1
    endpoint.script.append(Answer(status=503))
    with pytest.raises(StageUnavailableError):
        judge.judge("q", PASSAGES)


def test_a_sample_takes_one_call_where_something_relevant_was_served(
    judge: PoolJudge, endpoint: ModelEndpoint
) -> None:
    live = Watching(judge)
    live.watch(make_context(["good", "bad", "fair", "poor"], 2, query="q"))
    assert len(endpoint.requests) == 1
    [sample] = live.store.find(["r"])
    kept = verdicts_from_json(live.store.verdicts(live.monitor.series, [sample])[sample])
    assert {"good", "bad"} <= kept.keys()
    assert kept["good"].score == 0.9
    rows = Rows.read(all_judged(live.store, live.monitor.series).blocks)
    odds = [math.log(chance / (100 - chance)) for chance in (90, 5)]
    assert rows.passages["score"][:2] == pytest.approx(odds, rel=1e-5)


def test_scores_survive_the_store() -> None:
    verdicts = {
        "a": Judgment("a", 1, score=0.75),
        "b": Judgment("b", 0, judged=False),
        "c": Judgment("c", 2),
    }
    assert verdicts_from_json(verdicts_to_json(verdicts.values())) == verdicts


def test_an_assessor_that_is_not_asked_for_relevance_cannot_judge(endpoint: ModelEndpoint) -> None:
    assessor = ModelAssessor("m", questions=("answers",), base_url=endpoint.url, api_key="none")
    with pytest.raises(ConfigurationError, match="relevant"):
        PoolJudge(assessor)


@pytest.mark.parametrize(("form", "begins"), [("passage", "m-1 "), ("decisions", "decisions m-1 ")])
def test_settings_say_how_a_language_model_is_asked_and_which_revision_it_is(
    form: str, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    settings = JudgeSettings.model_construct(
        judge="llm",
        model="m-1",
        base_url="http://127.0.0.1:1/v1",
        prices=None,
        calls_per_second=None,
        judge_form=form,
        judge_revision="b",
    )
    judge = settings.model_judge("llm", None, settings.judge_form)
    assert judge.version.startswith(begins)
    assert judge.version.endswith(" revision b")
