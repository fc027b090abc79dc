"""Turns questions from a log, or written from passages, into samples for a store.

They look like samples of live traffic, and wait for a judge in the same queue. Reads the log and
the clock, and calls the guard or the model that writes questions; writes nothing.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.data.dataset import folded
from calibration.data.text_files import read_csv, read_records, shown
from ctxguard.core.passages import estimate_tokens, passage_tokens
from ctxguard.core.types import Passage
from ctxguard.errors import DataError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.monitor.sampling.record import DEFAULT_PRIVACY, SampleRecord, record_of
from ctxguard.monitor.sampling.sampler import JudgingRates

if TYPE_CHECKING:
    from ctxguard.endpoints.replies import Reply
    from ctxguard.monitor.judges import LLMJudge

ASKED, WRITTEN = "asked-", "written-"
"""Prefixes of request ids: for questions people asked, and for those a model wrote."""
JUDGED_DEPTH = 20
"""How many candidates of each question are judged. Five are too few; 30 add nothing."""
RATES = JudgingRates(0.0, 0.0, 0.0, 1.0, JUDGED_DEPTH)
"""The first candidates are judged with certainty, and no others."""
_BATCH = 20


def asked_questions(path: Path) -> dict[str, int]:
    """Read the distinct questions in a JSONL or CSV log, and how often each was asked.

    Questions that differ only in case and white space are one. A row holds its text in ``query``,
    and in ``count`` how often it was asked, 1 if absent.

    Raises:
        DataError: a row cannot be read, or the file contains no questions.
    """
    asked: dict[str, tuple[str, int]] = {}
    read = read_csv if path.suffix.lower() == ".csv" else read_records
    for record in read(path, Counter()):
        if record.fields.keys().isdisjoint(("query", "text")):
            there = ", ".join(record.fields) or "none"
            raise record.error(
                f"has no question: put it into a field named query; its fields are {there}"
            )
        text = record.text("query", "text", default="").strip()
        given = record.fields.get("count") or 1
        if not text:
            continue
        try:
            n = int(str(given))
        except ValueError:
            n = 0
        if n < 1:
            raise record.error(f"count {shown(given)} must be a whole number ≥ 1")
        first, before = asked.get(folded(text), (text, 0))
        asked[folded(text)] = first, before + n
    if not asked:
        raise DataError("contains no questions", path=path)
    return dict(asked.values())


def passages_to_ask_about(passage_ids: Sequence[str], n: int) -> list[str]:
    """Draw the ids of passages from which to write questions, in the order of their hashes."""
    return sorted(passage_ids, key=_digest)[:n]


def written_questions(
    passages: Sequence[Passage], model: "LLMJudge"
) -> "Iterator[list[tuple[Passage, Reply[str]]]]":
    """Have a language model write a question from each passage, in batches of twenty.

    They are easier than people's: the corpus answers them, in words close to theirs.

    Raises:
        StageUnavailableError: the endpoint answered for none of a batch.
    """
    for first in range(0, len(passages), _BATCH):
        batch = passages[first : first + _BATCH]
        yield list(zip(batch, model.questions(batch), strict=True))


def request_id_of(question: str, system: Mapping[str, str], *, is_written: bool = False) -> str:
    """Return the request id for a question's sample; it is equal in every run on one system.

    A question that a model writes goes by the id of its passage.
    """
    text = json.dumps([folded(question), dict(system)], sort_keys=True)
    return f"{WRITTEN if is_written else ASKED}{_digest(text).hex()[:32]}"


def sample_of(guard: ContextGuard, question: str, request_id: str, times: int = 1) -> SampleRecord:
    """Ask a guard without a sampler a question, and make its record for a store.

    Raises:
        CtxguardError: as the retriever raises.
    """
    context = guard.retrieve(question, request_id=request_id)
    return DEFAULT_PRIVACY.apply(record_of(context, 1.0 / times, time.time(), RATES))


def tokens_to_judge(record: SampleRecord) -> tuple[int, int]:
    """Estimate the calls and tokens needed to judge a sample; each call repeats the question."""
    passages = [record.passage(one) for one in record.to_judge({})]
    question = estimate_tokens(record.query or "")
    return len(passages), sum([question + passage_tokens(one) for one in passages])


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()
