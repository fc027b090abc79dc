"""Judges: who says whether a passage answers a query. One protocol, three judges, one contract.

``ctxguard.testing.JudgeContract`` is the contract as a test suite. Importing this package is
cheap: the client library comes with the extra ``judge``, the cross-encoder with ``embedded``, and
each is imported when its judge is made.
"""

from ctxguard.monitor.judges.accounts import InvalidReason, JudgeAccounts, RejectedReply
from ctxguard.monitor.judges.cross_encoder import CrossEncoderJudge
from ctxguard.monitor.judges.labels import LabelJudge, Unjudged
from ctxguard.monitor.judges.llm import LLMJudge, TokenPrices
from ctxguard.monitor.judges.protocol import Judge, Judgment

__all__ = [
    "CrossEncoderJudge",
    "InvalidReason",
    "Judge",
    "JudgeAccounts",
    "Judgment",
    "LLMJudge",
    "LabelJudge",
    "RejectedReply",
    "TokenPrices",
    "Unjudged",
]
