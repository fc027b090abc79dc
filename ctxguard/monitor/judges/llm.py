"""Uses a language model as judge, behind any endpoint that speaks chat completions.

Each call has one passage. In a list, a grade depends on the other passages, so recall, which
compares served passages with dropped ones, would be biased; one passage could influence another's
grade; and one bad reply would lose every grade of the list. The prompt is sent once per passage,
and endpoints cache it. Touches the network, the clock and the environment, through
``endpoints.chat``.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar, Unpack

from ctxguard._support.checks import check_at_least
from ctxguard.core.types import Passage
from ctxguard.endpoints.chat import ChatClient, ChatSettings, Conversation, why_failed
from ctxguard.endpoints.failures import UNAVAILABLE, InvalidReason
from ctxguard.endpoints.replies import Reply
from ctxguard.endpoints.usage import Ledger
from ctxguard.errors import StageUnavailableError
from ctxguard.monitor.judges.prompt import (
    GRADE_FORM,
    MAX_GRADE,
    QUESTION_FORM,
    messages,
    prompt_digest,
    question_messages,
    read_grade,
    read_question,
)
from ctxguard.monitor.redaction import redact
from ctxguard.monitor.sampling.record import Judgment
from ctxguard.retrieval.index.passages import searchable_text

T = TypeVar("T")


class LLMJudge:
    """Grades 0 to 3 by a language model's structured output.

    Passages are sent to the endpoint: redact them first if they must not leave this machine. They
    are sent as data, with hidden characters removed and delimiters escaped, and the model is told
    to follow no instruction in them. A passage therefore cannot change the protocol. It may still
    persuade the model, which only a comparison with human labels shows.

    A reply that is malformed, refused, truncated, off the schema or out of range is not a grade:
    it is counted by reason, kept redacted for inspection, and never imputed. Threads may share a
    judge. A forked child starts with its own connections and counts (``ledger``).

    Args:
        model: Name of the model at the endpoint. Use a dated version: an alias may change its
            model without notice.
        max_passage_chars: Longer titles and texts are truncated.
        prices: Prices of a million input and output tokens; None counts no cost.
        **connection: As ``ChatClient``'s.

    Raises:
        ConfigurationError: a setting is out of its range, or there is no API key.
        MissingExtraError: the extra ``judge`` is not installed.
    """

    name = "llm"
    max_grade = MAX_GRADE

    def __init__(
        self,
        model: str,
        *,
        max_passage_chars: int = 8000,
        prices: tuple[float, float] | None = None,
        **connection: Unpack[ChatSettings],
    ) -> None:
        check_at_least(1, max_passage_chars=max_passage_chars)
        self.model = model
        self.ledger = Ledger(prices, redact=redact)
        self._max_passage_chars = max_passage_chars
        self._client = ChatClient(model, self.ledger, **connection)
        digest = prompt_digest(
            max_passage_chars, self._client.max_reply_tokens, self._client.temperature
        )
        self.version = f"{model} {digest}"

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        """Return one grade per passage, in their order; None if there is no valid grade.

        Raises:
            StageUnavailableError: the endpoint answered for none of them after all retries: an
                outage, which must not be counted as invalid replies.
        """
        replies = self._ask_about(
            passages, lambda text: messages(query, text), GRADE_FORM, read_grade
        )
        return [
            None
            if isinstance(reply.answer, InvalidReason)
            else Judgment(passage.passage_id, reply.answer)
            for passage, reply in zip(passages, replies, strict=True)
        ]

    def questions(self, passages: Sequence[Passage]) -> list[Reply[str]]:
        """Write a question that each passage answers, or say why not; raises as ``judge``."""
        return self._ask_about(passages, question_messages, QUESTION_FORM, read_question)

    def _ask_about(
        self,
        passages: Sequence[Passage],
        conversation: Callable[[str], Conversation],
        form: dict[str, object],
        read: Callable[[str], T | InvalidReason],
    ) -> list[Reply[T]]:
        """Send one call for each passage; raise StageUnavailableError if none is answered."""
        if not passages:
            return []

        most = self._max_passage_chars
        conversations = [conversation(searchable_text(passage)[:most]) for passage in passages]
        replies = self._client.complete(conversations, form, read)
        for passage, reply in zip(passages, replies, strict=True):
            if isinstance(reply.answer, InvalidReason):
                self.ledger.add_invalid(passage.passage_id, reply.answer, reply.body)
        if all(reply.answer in UNAVAILABLE for reply in replies):
            raise StageUnavailableError(
                "judge",
                f"{self.model} at {self._client.host} graded none of {len(passages)} "
                f"passages: {why_failed(replies, self.ledger)}",
            )
        return replies

    def close(self) -> None:
        """Close the connections; judging again opens new ones."""
        self._client.close()
