"""ctxguard stands between a retriever and a language model and lets only clean context through."""

from ctxguard.context import Assembly, Context
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
from ctxguard.fusion import Fusion
from ctxguard.guard import ContextGuard
from ctxguard.metrics import Utilities
from ctxguard.policy import Decision, ExpectedUtilityPolicy, RatioPolicy, decide
from ctxguard.profile import Profile
from ctxguard.reload import IndexWatcher, ProfileWatcher
from ctxguard.types import (
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
from ctxguard.where import Where

__version__ = "0.1.0"

__all__ = [
    "Assembly",
    "CalibrationError",
    "ConfigurationError",
    "Context",
    "ContextGuard",
    "CtxguardError",
    "DataError",
    "Decision",
    "DropReason",
    "ExpectedUtilityPolicy",
    "FilterViolationError",
    "Flag",
    "Fusion",
    "Hit",
    "IndexFolderError",
    "IndexWatcher",
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
    "Route",
    "ScoreKind",
    "StageError",
    "StageUnavailableError",
    "Utilities",
    "Verdict",
    "Where",
    "__version__",
    "decide",
]
