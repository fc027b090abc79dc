"""ctxguard stands between a retriever and a language model and lets only clean context through.

Names whose modules are slow to import, or need an extra, are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctxguard.core.context import Assembly, Context
from ctxguard.core.corpus_sketch import CorpusSketch, passage_digest
from ctxguard.core.decision import Decision, decide
from ctxguard.core.fusion import Fusion
from ctxguard.core.metadata_filter import Where
from ctxguard.core.metrics import Utilities
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.types import (
    DropReason,
    Flag,
    Hit,
    Leg,
    Mode,
    Passage,
    Ranking,
    Route,
    ScoreKind,
    Verdict,
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
from ctxguard.profile.schema import Profile
from ctxguard.resilience import Deadlines

if TYPE_CHECKING:
    from ctxguard.monitor.sampling.inclusion import JudgingRates as JudgingRates
    from ctxguard.monitor.sampling.privacy import Privacy as Privacy
    from ctxguard.monitor.sampling.writer import sample_to as sample_to
    from ctxguard.request.with_text_signals import WithTextSignals
    from ctxguard.retrieval import (
        AsyncRetriever,
        FilteringRetriever,
        HybridRetriever,
        Retriever,
        RetrieverFunction,
        SwappingRetriever,
    )
    from ctxguard.retrieval.text_signals import TextSignals

__version__ = "0.1.0"

_LAZY_MODULES = {
    "AsyncRetriever": "ctxguard.retrieval",
    "FilteringRetriever": "ctxguard.retrieval",
    "HybridRetriever": "ctxguard.retrieval",
    "JudgingRates": "ctxguard.monitor.sampling.inclusion",
    "Privacy": "ctxguard.monitor.sampling.privacy",
    "Retriever": "ctxguard.retrieval",
    "RetrieverFunction": "ctxguard.retrieval",
    "SwappingRetriever": "ctxguard.retrieval",
    "TextSignals": "ctxguard.retrieval.text_signals",
    "WithTextSignals": "ctxguard.request.with_text_signals",
    "sample_to": "ctxguard.monitor.sampling.writer",
}

# Without Privacy and sample_to, which a star import could not have without the extra ``monitor``.

__all__ = [
    "Assembly",
    "AsyncRetriever",
    "CalibrationError",
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
    "ProfileError",
    "ProfileFormatError",
    "ProfileMismatchError",
    "ProfileWatcher",
    "QueryError",
    "Ranking",
    "RatioPolicy",
    "Retriever",
    "RetrieverFunction",
    "Route",
    "ScoreKind",
    "StageError",
    "StageUnavailableError",
    "SwappingRetriever",
    "TextSignals",
    "Utilities",
    "Verdict",
    "Where",
    "WithTextSignals",
    "__version__",
    "decide",
    "passage_digest",
]


# Type checkers take a module with ``__getattr__`` to have every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LAZY_MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_LAZY_MODULES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY_MODULES})
