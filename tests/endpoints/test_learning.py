"""What an endpoint refuses is learned from its answer; its replies are read in any usual form."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from ctxguard.core.types import Passage
from ctxguard.errors import StageUnavailableError
from ctxguard.monitor.judges import InvalidReason, Judgment, LLMJudge
from tests.monitor.chat_endpoint import Answer, ChatEndpoint

PASSAGE = Passage("p", "A red fox.")
OTHER = Passage("other", "A blue fox.")
Refuse = Callable[[dict[str, Any]], "str | dict[str, Any] | None"]


class PickyEndpoint(ChatEndpoint):
    """Refuses requests by ``refuse``, which returns an error's message or its whole body."""

    refuse: Refuse = staticmethod(lambda _: None)
    status = 400
    transform: Callable[[str], Answer] = staticmethod(Answer)

    def answer(self, path: str, request: dict[str, Any]) -> Answer:
        refused = self.refuse(request)
        if refused is None:
            data = request["messages"][-1]["content"].rpartition("<query>")[2]
            request = {**request, "messages": [{"content": f"<query>{data}"}]}
            graded = super().answer(path, request)
            return self.transform(graded.content) if type(graded.content) is str else graded
        body = {"error": {"message": refused}} if isinstance(refused, str) else refused
        return Answer(status=self.status, body=json.dumps(body))


STAND_IN = PickyEndpoint


@pytest.fixture
def judge(endpoint: PickyEndpoint) -> Iterator[LLMJudge]:
    made = LLMJudge("m", base_url=endpoint.url, api_key="secret-key", retries=0, concurrency=1)
    with closing(made):
        yield made


GRADED = [Judgment("p", 2), Judgment("other", 1)]


def unsupported(*names: str, param: bool = True) -> Refuse:
    def refuse(request: dict[str, Any]) -> dict[str, Any] | None:
        for name in names:
            if name in request:
                said = f"Unsupported parameter: '{name}' is not supported with this model."
                return {"error": {"message": said} | ({"param": name} if param else {})}
        return None

    return refuse


def saying(said: str | dict[str, Any], refuses: Callable[[dict[str, Any]], bool]) -> Refuse:
    return lambda request: said if refuses(request) else None


def has_system(request: dict[str, Any]) -> bool:
    return "system" in {each["role"] for each in request["messages"]}


def has_schema(request: dict[str, Any]) -> bool:
    return request.get("response_format", {}).get("type") == "json_schema"


def asks_more_than(most: int) -> Callable[[dict[str, Any]], bool]:
    return lambda request: request["max_tokens"] > most


def of_fastapi(request: dict[str, Any]) -> dict[str, Any] | None:
    if "response_format" not in request:
        return None
    fault = {"type": "extra_forbidden", "loc": ["body", "response_format"], "msg": "Extra inputs"}
    return {"detail": [fault | {"input": request}]}


OF_ROLE = {
    "message": "Unsupported value: 'messages[0].role' does not support 'system'.",
    "param": "messages[0].role",
}


@pytest.mark.parametrize(
    "refuse",
    [
        unsupported("max_tokens"),
        unsupported("max_tokens", "temperature"),
        unsupported("max_tokens", "temperature", param=False),
        unsupported("max_tokens", "max_completion_tokens"),
        unsupported("response_format"),
        saying(
            "Unsupported value: 'temperature' does not support 0 with this model.",
            lambda request: request.get("temperature") == 0,
        ),
        saying("System role not supported", has_system),
        saying({"error": OF_ROLE}, has_system),
        saying("Invalid response_format type: json_schema", has_schema),
        of_fastapi,
        saying(
            "max_tokens is too large: this model supports at most 100 completion tokens",
            asks_more_than(100),
        ),
        saying(
            "max_tokens must be less than or equal to `100`, less than the `context_window`",
            asks_more_than(100),
        ),
        saying(
            "'max_tokens' is too large: 256. This model's maximum context length is 300 tokens",
            asks_more_than(200),
        ),
    ],
)
@pytest.mark.parametrize("status", [400, 422])
def test_refused_fields_are_left_out_once(
    endpoint: PickyEndpoint, judge: LLMJudge, refuse: Refuse, status: int
) -> None:
    """The first passage teaches what to leave out; later calls are right at once."""
    endpoint.refuse, endpoint.status = refuse, status
    assert judge.judge("red fox", [PASSAGE, OTHER]) == GRADED
    n_calls = len(endpoint.requests)
    assert judge.judge("red fox", [PASSAGE, OTHER]) == GRADED
    assert len(endpoint.requests) == n_calls + 2
    assert n_calls <= 2 + 3


def test_a_long_passage_teaches_nothing(endpoint: PickyEndpoint, judge: LLMJudge) -> None:
    """A refusal of one passage's length changes no later request, and is not a grade."""
    endpoint.refuse = saying(
        "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens "
        "(8744 in the messages, 256 in the completion). Please reduce max_tokens or the messages.",
        lambda request: "long" in json.dumps(request),
    )
    assert judge.judge("red fox", [Passage("q", "long"), OTHER]) == [None, GRADED[1]]
    assert judge.ledger.accounts().invalid[InvalidReason.REJECTED] == 1
    assert all(request["max_tokens"] == 256 for request in endpoint.requests)
    assert len(endpoint.requests) == 2


def test_a_refusal_of_everything_ends(endpoint: PickyEndpoint, judge: LLMJudge) -> None:
    """An endpoint that always blames something is asked a bounded number of times."""
    endpoint.refuse = lambda request: f"unsupported: {', '.join(request)}, stream, system role"
    assert judge.judge("red fox", [PASSAGE]) == [None]
    assert len(endpoint.requests) <= 13


def streamed(content: str) -> Answer:
    events = [{"choices": [{"delta": {"content": part}}]} for part in (content[:4], content[4:])]
    events[-1]["choices"][0]["finish_reason"] = "stop"  # type: ignore[assignment]
    events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})  # type: ignore[dict-item]
    lines = [f"data: {json.dumps(each)}\n\n" for each in events]
    return Answer(body="".join([": hello\n\n", *lines, "data: [DONE]\n\n"]))


def test_a_streaming_endpoint_is_read(endpoint: PickyEndpoint, judge: LLMJudge) -> None:
    endpoint.transform = streamed
    endpoint.refuse = saying(
        "This model only supports streaming: set stream=true.",
        lambda request: not request.get("stream"),
    )
    assert judge.judge("red fox", [PASSAGE, OTHER]) == GRADED
    accounts = judge.ledger.accounts()
    assert (accounts.input_tokens, accounts.output_tokens, accounts.calls) == (14, 6, 3)


@pytest.mark.parametrize(
    "body",
    [
        'data: {"choices": [{"delta": {"content": "{\\"grade\\": 1}"}}]}\n\n',
        'data: {"choices": [{"delta": {"content": "{\\"gra"}}]}\n\ndata: [DONE]\n\n',
        'data: {"choices": [{"de\n\n',
        'data: {"error": {"message": "overloaded", "code": 503}}\n\n',
        "data: [DONE]\n\n",
    ],
)
def test_a_broken_stream_is_no_grade(endpoint: PickyEndpoint, judge: LLMJudge, body: str) -> None:
    endpoint.script.append(Answer(body=body))
    assert judge.judge("red fox", [PASSAGE, OTHER]) == [None, GRADED[1]]


@pytest.mark.parametrize(
    "content",
    [
        '```json\n{"grade": 3}\n```',
        '```\n{"grade": 3}```',
        'Sure! Here it is:\n\n{"grade": 3}\n\nAnything else?',
        '<think>Is it {"grade": 1}? No.</think>\n{"grade": 3}',
        'Perhaps a 2.</think>{"grade": 3}',
        '<thinking>hm</thinking>```json\n{"grade": 3}\n```',
        '{"grade": "3"}',
        '{"grade": 3.0}',
        '{"grade": " 3.0"}',
        '{"grade": 3, "why": "it says so"}',
        [{"type": "text", "text": '{"grade": 3}'}],
        [{"type": "reasoning", "text": '{"grade": 1}'}, {"type": "text", "text": '{"grade": 3}'}],
        [{"text": '{"gra'}, {"text": 'de": 3}'}],
    ],
)
def test_grade_reads_in_usual_forms(
    endpoint: PickyEndpoint, judge: LLMJudge, content: object
) -> None:
    endpoint.script.append(Answer(content))
    assert judge.judge("red fox", [PASSAGE]) == [Judgment("p", 3)]


@pytest.mark.parametrize("content", ["", None, "<think>The passage says"])
def test_thoughts_alone_get_more_tokens_once(
    endpoint: PickyEndpoint, judge: LLMJudge, content: object
) -> None:
    endpoint.script.append(Answer(content, finish_reason="length"))
    assert judge.judge("red fox", [PASSAGE, OTHER]) == GRADED
    assert [each["max_tokens"] for each in endpoint.requests] == [256, 4096, 4096]


def test_endless_thoughts_are_said(endpoint: PickyEndpoint, judge: LLMJudge) -> None:
    endpoint.script.extend([Answer("", finish_reason="length")] * 4)
    (reply,) = judge.questions([PASSAGE])
    assert reply.answer is InvalidReason.TRUNCATED
    assert "spent all of its 4,096 tokens on thoughts" in reply.why
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ({"message": "Provider returned error", "code": 502}, "server_error"),
        ({"message": "slow down", "code": "429"}, "rate_limited"),
        ({"message": "no", "type": "invalid_api_key"}, "denied"),
        ("overloaded", "server_error"),
    ],
)
def test_error_in_success_is_error(
    endpoint: PickyEndpoint, judge: LLMJudge, error: object, reason: str
) -> None:
    bodies = [{"error": error}, {"choices": [{"error": error, "message": {"content": ""}}]}]
    for body in bodies:
        endpoint.script.append(Answer(body=json.dumps(body)))
        with pytest.raises(StageUnavailableError):
            judge.judge("red fox", [PASSAGE])
    assert judge.ledger.accounts().invalid[InvalidReason(reason)] == 2


@pytest.mark.parametrize("tokens", ["1" + "0" * 400, "-1", "NaN", '"300"', "true", "1e3", "null"])
def test_impossible_token_counts_are_not_counted(
    endpoint: PickyEndpoint, judge: LLMJudge, tokens: str
) -> None:
    body = Answer('{"grade": 1}', usage={"prompt_tokens": 0}).text()
    usage = f'{{"prompt_tokens": {tokens}, "completion_tokens": {tokens}}}'
    endpoint.script.append(Answer(body=body.replace('{"prompt_tokens": 0}', usage)))
    assert judge.judge("red fox", [PASSAGE]) == [Judgment("p", 1)]
    accounts = judge.ledger.accounts()
    assert (accounts.input_tokens, accounts.output_tokens) == (0, 0)


@pytest.mark.parametrize("charset", ["klingon", "utf-16", "latin-1", "utf-7"])
def test_odd_charset_is_no_client_fault(
    endpoint: PickyEndpoint, judge: LLMJudge, charset: str
) -> None:
    """JSON is UTF-8 whatever the header says; what is not is malformed."""
    named = {"Content-Type": f"application/json; charset={charset}"}
    endpoint.script.append(Answer(headers=named))
    odd = Answer().text().replace("stand-in", "é").encode("latin-1") + b"\xff"
    endpoint.script.append(Answer(packed=odd, headers=named))
    assert judge.judge("red fox", [PASSAGE, OTHER]) == [Judgment("p", 1), None]
    assert judge.ledger.accounts().invalid[InvalidReason.MALFORMED] == 1
