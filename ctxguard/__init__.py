"""ctxguard stands between a retriever and a language model and lets only clean context through.

A name is imported when it is first used, so ``import ctxguard`` alone imports none of them.
"""

from typing import TYPE_CHECKING

from ctxguard._support.lazy_names import lazy_names

if TYPE_CHECKING:
    from ctxguard.core.assembly import Assembly
    from ctxguard.core.context import Context
    from ctxguard.core.corpus_sketch import CorpusSketch, passage_digest
    from ctxguard.core.decision import Decision, decide
    from ctxguard.core.fusion import Fusion
    from ctxguard.core.metadata_filter import Where
    from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
    from ctxguard.core.types import (
        CandidateDecision,
        DropReason,
        Flag,
        Hit,
        Leg,
        Mode,
        Passage,
        Ranking,
        Route,
        ScoreKind,
    )
    from ctxguard.errors import (
        CalibrationError,
        ConfigurationError,
        CtxguardError,
        DataError,
        FilterViolationError,
        IndexFolderError,
        MissingExtraError,
        OverloadedError,
        ProfileError,
        ProfileFormatError,
        ProfileMismatchError,
        QueryError,
        StageError,
        StageUnavailableError,
    )
    from ctxguard.guard import ContextGuard
    from ctxguard.guard.reload import IndexWatcher, ProfileWatcher
    from ctxguard.guard.with_text_signals import WithTextSignals
    from ctxguard.measure.worth import Utilities
    from ctxguard.monitor.sampling.sampler import JudgingRates
    from ctxguard.monitor.store.writer import Privacy as Privacy
    from ctxguard.monitor.store.writer import sample_to as sample_to
    from ctxguard.profile.comparison import ProfileCheck
    from ctxguard.profile.schema import Profile
    from ctxguard.resilience import Deadlines, RequestLimits
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever
    from ctxguard.retrieval.protocols import (
        AsyncRetriever,
        FilteringRetriever,
        Retriever,
        RetrieverFunction,
        SwappingRetriever,
    )
    from ctxguard.retrieval.text_signals import TextSignals

__version__ = "0.1.0"

_EXPORTS = {
    "ctxguard.core.assembly": "Assembly",
    "ctxguard.core.context": "Context",
    "ctxguard.core.corpus_sketch": "CorpusSketch passage_digest",
    "ctxguard.core.decision": "Decision decide",
    "ctxguard.core.fusion": "Fusion",
    "ctxguard.core.metadata_filter": "Where",
    "ctxguard.measure.worth": "Utilities",
    "ctxguard.core.policies": "ExpectedUtilityPolicy RatioPolicy",
    "ctxguard.core.types": "CandidateDecision DropReason Flag Hit Leg Mode Passage Ranking Route "
    "ScoreKind",
    "ctxguard.errors": "CalibrationError ConfigurationError CtxguardError DataError "
    "FilterViolationError IndexFolderError MissingExtraError OverloadedError ProfileError "
    "ProfileFormatError ProfileMismatchError QueryError StageError StageUnavailableError",
    "ctxguard.guard": "ContextGuard",
    "ctxguard.guard.reload": "IndexWatcher ProfileWatcher",
    "ctxguard.monitor.sampling.sampler": "JudgingRates",
    "ctxguard.monitor.store.writer": "Privacy sample_to",
    "ctxguard.profile.comparison": "ProfileCheck",
    "ctxguard.profile.schema": "Profile",
    "ctxguard.guard.with_text_signals": "WithTextSignals",
    "ctxguard.resilience": "Deadlines RequestLimits",
    "ctxguard.retrieval.hybrid.retriever": "HybridRetriever",
    "ctxguard.retrieval.protocols": "AsyncRetriever FilteringRetriever Retriever RetrieverFunction "
    "SwappingRetriever",
    "ctxguard.retrieval.text_signals": "TextSignals",
}
"""The names that each module exports."""

# Without Privacy and sample_to, which a star import could not have without the extra ``monitor``.

__all__ = [
    "Assembly",
    "AsyncRetriever",
    "CalibrationError",
    "CandidateDecision",
    "ConfigurationError",
    "Context",
    "ContextGuard",
    "CorpusSketch",
    "CtxguardError",
    "DataError",
    "Deadlines",
    "Decision",
    "DropReason",
    "ExpectedUtilityPolicy",
    "FilterViolationError",
    "FilteringRetriever",
    "Flag",
    "Fusion",
    "Hit",
    "HybridRetriever",
    "IndexFolderError",
    "IndexWatcher",
    "JudgingRates",
    "Leg",
    "MissingExtraError",
    "Mode",
    "OverloadedError",
    "Passage",
    "Profile",
    "ProfileCheck",
    "ProfileError",
    "ProfileFormatError",
    "ProfileMismatchError",
    "ProfileWatcher",
    "QueryError",
    "Ranking",
    "RatioPolicy",
    "RequestLimits",
    "Retriever",
    "RetrieverFunction",
    "Route",
    "ScoreKind",
    "StageError",
    "StageUnavailableError",
    "SwappingRetriever",
    "TextSignals",
    "Utilities",
    "Where",
    "WithTextSignals",
    "__version__",
    "decide",
    "passage_digest",
]


# Type checkers take a module with ``__getattr__`` to have every name.
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, globals(), _EXPORTS)
