"""Judges, which grade how well a passage answers a query: one protocol and its implementations.

Importing this package loads no optional library: the client library (extra ``judge``) and the
cross-encoder (extra ``embedded``) are imported when their judge is constructed.
"""

from ctxguard.monitor.judges.known_labels import (
    PEOPLE_ALONE,
    LabelJudge,
    PeopleAlone,
)
from ctxguard.monitor.judges.llm import LLMJudge
from ctxguard.monitor.judges.protocol import Judge, Judgment
from ctxguard.monitor.judges.scores import CrossEncoderJudge, RerankJudge
from ctxguard.retrieval.chat import TokenPrices
from ctxguard.retrieval.usage import InvalidReason, JudgeAccounts, Ledger, RejectedReply

__all__ = [
    "PEOPLE_ALONE",
    "CrossEncoderJudge",
    "InvalidReason",
    "Judge",
    "JudgeAccounts",
    "Judgment",
    "LLMJudge",
    "LabelJudge",
    "Ledger",
    "PeopleAlone",
    "RejectedReply",
    "RerankJudge",
    "TokenPrices",
]
