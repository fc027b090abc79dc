"""ctxguard stands between a retriever and a language model and lets only clean context through."""

from ctxguard.context import Assembly, Context
from ctxguard.errors import (
    CalibrationError,
    ConfigurationError,
    CtxguardError,
    DataError,
    IndexFolderError,
    MissingExtraError,
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
    "Flag",
    "Fusion",
    "Hit",
    "IndexFolderError",
    "Leg",
    "MissingExtraError",
    "Mode",
    "Passage",
    "Profile",
    "ProfileError",
    "ProfileFormatError",
    "ProfileMismatchError",
    "QueryError",
    "Ranking",
    "RatioPolicy",
    "Route",
    "ScoreKind",
    "StageError",
    "StageUnavailableError",
    "Utilities",
    "Verdict",
    "__version__",
    "decide",
]
