"""Whatever a text holds: what is rendered keeps its blocks, what is redacted stays redacted."""

from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.assembly import Assembly
from ctxguard.core.render import sanitise
from ctxguard.core.types import Passage
from ctxguard.monitor.judges.prompt import messages
from ctxguard.redaction import redact
from tests.fuzz.mutations import fuzzed

PARTS = st.sampled_from(
    [
        *(
            "<",
            "/",
            "passage",
            "pass",
            "age",
            ">",
            "query",
            " ",
            "\n",
            "\r",
            "a",
            "1",
            "م",
            "क",
            "्",
        ),
        *(
            "\u200c",
            "\u200d",
            "\ufe0f",
            "\U000e0101",
            "\U000e0061",
            "\u3164",
            "\u1160",
            "\u115f",
            "ㄱ",
        ),
        *(
            "\U0001f3f4",
            "👩",
            "❤",
            "\u20e3",
            "\ud800",
            "\x00",
            "\u202e",
            "ᠠ",
            "\u180e",
            "\u034f",
            "ק",
        ),
        *(
            "password: ",
            "8 (495) ",
            "123-45-67",
            "4111",
            "|",
            "=",
            "81.2.69.142",
            "?key=",
            "Cookie: a=",
        ),
    ]
)
TEXTS = st.lists(PARTS | st.characters(), max_size=40).map("".join)


@fuzzed
@given(TEXTS)
def test_sanitising_twice_changes_nothing(text: str) -> None:
    once = sanitise(text)
    assert sanitise(once) == once
    once.encode()


@fuzzed
@given(st.lists(st.builds(Passage, TEXTS, TEXTS, TEXTS), max_size=3))
def test_no_passage_opens_or_closes_a_block(passages: list[Passage]) -> None:
    text = Assembly().render(passages).lower()
    assert text.count("<passage") == text.count("</passage") == len(passages)


@fuzzed
@given(TEXTS, TEXTS)
def test_no_passage_leaves_its_block_in_the_judges_prompt(query: str, text: str) -> None:
    content = messages(query, text)[1]["content"].lower()
    for tag in ("<query", "</query", "<passage", "</passage"):
        assert content.count(tag) == 1


@fuzzed
@given(TEXTS)
def test_redacting_twice_changes_nothing(text: str) -> None:
    once = redact(text)
    assert redact(once) == once
