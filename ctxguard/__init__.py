"""ctxguard stands between a retriever and a language model and lets only clean context through.

A name is imported when it is first used, so ``import ctxguard`` alone imports none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxguard.core.assembly import Assembly as Assembly
    from ctxguard.core.context import Context as Context
    from ctxguard.core.corpus_sketch import CorpusSketch as CorpusSketch
    from ctxguard.core.corpus_sketch import passage_digest as passage_digest
    from ctxguard.core.decision import Decision as Decision
    from ctxguard.core.decision import decide as decide
    from ctxguard.core.fusion import Fusion as Fusion
    from ctxguard.core.metadata_filter import Where as Where
    from ctxguard.core.policies import ExpectedUtilityPolicy as ExpectedUtilityPolicy
    from ctxguard.core.policies import RatioPolicy as RatioPolicy
    from ctxguard.core.types import CandidateDecision as CandidateDecision
    from ctxguard.core.types import DropReason as DropReason
    from ctxguard.core.types import Flag as Flag
    from ctxguard.core.types import Hit as Hit
    from ctxguard.core.types import Leg as Leg
    from ctxguard.core.types import Mode as Mode
    from ctxguard.core.types import Passage as Passage
    from ctxguard.core.types import Ranking as Ranking
    from ctxguard.core.types import Route as Route
    from ctxguard.core.types import ScoreKind as ScoreKind
    from ctxguard.errors import CalibrationError as CalibrationError
    from ctxguard.errors import ConfigurationError as ConfigurationError
    from ctxguard.errors import CtxguardError as CtxguardError
    from ctxguard.errors import DataError as DataError
    from ctxguard.errors import FilterViolationError as FilterViolationError
    from ctxguard.errors import IndexFolderError as IndexFolderError
    from ctxguard.errors import MissingExtraError as MissingExtraError
    from ctxguard.errors import OverloadedError as OverloadedError
    from ctxguard.errors import ProfileError as ProfileError
    from ctxguard.errors import ProfileFormatError as ProfileFormatError
    from ctxguard.errors import ProfileMismatchError as ProfileMismatchError
    from ctxguard.errors import QueryError as QueryError
    from ctxguard.errors import StageError as StageError
    from ctxguard.errors import StageUnavailableError as StageUnavailableError
    from ctxguard.guard.context_guard import ContextGuard as ContextGuard
    from ctxguard.guard.reload import IndexWatcher as IndexWatcher
    from ctxguard.guard.reload import ProfileWatcher as ProfileWatcher
    from ctxguard.guard.with_text_signals import WithTextSignals as WithTextSignals
    from ctxguard.measure.worth import Utilities as Utilities
    from ctxguard.monitor.sampling.record import Privacy as Privacy
    from ctxguard.monitor.sampling.sampler import JudgingRates as JudgingRates
    from ctxguard.monitor.store.writer import sample_to as sample_to
    from ctxguard.profile.comparison import ProfileCheck as ProfileCheck
    from ctxguard.profile.schema import Profile as Profile
    from ctxguard.resilience.bounded_caller import RequestLimits as RequestLimits
    from ctxguard.resilience.deadlines import Deadlines as Deadlines
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever as HybridRetriever
    from ctxguard.retrieval.protocols import AsyncRetriever as AsyncRetriever
    from ctxguard.retrieval.protocols import FilteringRetriever as FilteringRetriever
    from ctxguard.retrieval.protocols import Retriever as Retriever
    from ctxguard.retrieval.protocols import RetrieverFunction as RetrieverFunction
    from ctxguard.retrieval.protocols import SwappingRetriever as SwappingRetriever
    from ctxguard.retrieval.text_signals import TextSignals as TextSignals

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
    "ctxguard.guard.context_guard": "ContextGuard",
    "ctxguard.guard.reload": "IndexWatcher ProfileWatcher",
    "ctxguard.monitor.sampling.record": "Privacy",
    "ctxguard.monitor.sampling.sampler": "JudgingRates",
    "ctxguard.monitor.store.writer": "sample_to",
    "ctxguard.profile.comparison": "ProfileCheck",
    "ctxguard.profile.schema": "Profile",
    "ctxguard.guard.with_text_signals": "WithTextSignals",
    "ctxguard.resilience.bounded_caller": "RequestLimits",
    "ctxguard.resilience.deadlines": "Deadlines",
    "ctxguard.retrieval.hybrid.retriever": "HybridRetriever",
    "ctxguard.retrieval.protocols": "AsyncRetriever FilteringRetriever Retriever RetrieverFunction "
    "SwappingRetriever",
    "ctxguard.retrieval.text_signals": "TextSignals",
}
"""The names that each module exports."""

# Type checkers take a module with ``__getattr__`` to have every name.
if not TYPE_CHECKING:
    _module_of = {name: module for module, names in _EXPORTS.items() for name in names.split()}
    # A star import must do without the one that needs the extra ``monitor``.
    __all__ = [name for name in _module_of if name != "sample_to"]
    __all__ += ["__version__"]

    def __getattr__(name):
        if name not in _module_of:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_module_of[name]), name)
        return value

    def __dir__():
        return sorted({*globals(), *_module_of})
