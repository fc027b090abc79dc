"""Judges, which grade how well a passage answers a query: one protocol and its implementations.

Importing this package loads no optional library: the parser of HTTP (extra ``judge``) and the
cross-encoder (extra ``embedded``) are imported when their judge is constructed.
"""

from ctxguard.endpoints.failures import InvalidReason
from ctxguard.endpoints.usage import JudgeAccounts, Ledger
from ctxguard.monitor.judges.known_labels import PEOPLE_ALONE, LabelJudge, PeopleAlone
from ctxguard.monitor.judges.llm import LLMJudge
from ctxguard.monitor.judges.protocol import Judge
from ctxguard.monitor.judges.scores import CrossEncoderJudge, RerankJudge
from ctxguard.monitor.sampling.record import Judgment

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
    "RerankJudge",
]
