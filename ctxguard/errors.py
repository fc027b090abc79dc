"""The error tree: every exception of ctxguard that callers may meet.

    CtxguardError
    ├── ConfigurationError      a setting or argument that cannot work            (ValueError)
    ├── DataError               a user's file that cannot be read: names file, line, value
    ├── IndexFolderError        a saved index that is incomplete, foreign or damaged
    ├── ProfileError            a profile that cannot be used
    │   ├── ProfileFormatError      not a profile, or of another schema
    │   └── ProfileMismatchError    made for another system: says what differs
    ├── StageError              a stage of the request path failed
    │   ├── StageUnavailableError   nothing is left that could answer
    │   │   └── StageRefusedError       a server refused this one request for its content
    │   ├── OverloadedError         refused: more requests at once than can be served
    │   └── FilterViolationError    a retriever returned what the request's filter forbids
    ├── QueryError              a query that cannot be searched (empty, too large)  (ValueError)
    ├── JudgeError              a judge gave no valid grade
    ├── RedactionError          a text could not be redacted, so it is not written
    ├── StoreError              an operation of the monitor's sample store failed
    │   ├── StoreUnavailableError   cannot be opened or reached
    │   ├── StoreFullError          its disk, or the space that it may take, is used up
    │   ├── StoreLockedError        other processes held it for too long
    │   ├── StoreReadOnlyError      cannot be written
    │   ├── StoreCorruptError       damaged; left where it is
    │   └── StoreSchemaError        written by another release, or by another program
    ├── CalibrationError        the labels do not suffice for a calibration or a report
    └── MissingExtraError       an optional library is not installed              (ImportError)

Every message says what is wrong, which value was seen, and how to fix it. Pure: imports nothing
from the package.
"""

from pathlib import Path


class CtxguardError(Exception):
    """Base of every error that ctxguard raises on purpose."""


class ConfigurationError(CtxguardError, ValueError):
    """A setting or an argument cannot work as given."""


class QueryError(CtxguardError, ValueError):
    """A query cannot be searched: it is empty, only white space, or over the size limit."""


class DataError(CtxguardError):
    """A user's data file cannot be used in its present form.

    Attributes:
        path: The file; None if the data did not come from a file.
        line: The 1-based line; None if the fault is not on one line.
    """

    def __init__(
        self, message: str, *, path: Path | str | None = None, line: int | None = None
    ) -> None:
        self.path = None if path is None else Path(path)
        self.line = line
        where = "" if path is None else f"{path}: " if line is None else f"{path}, line {line}: "
        super().__init__(where + message)


class IndexFolderError(CtxguardError):
    """A saved index is incomplete, damaged, or was not written by ctxguard."""


class ProfileError(CtxguardError):
    """A calibration profile cannot be used."""


class ProfileFormatError(ProfileError):
    """A file is not a profile, or its schema version is not one that this release reads."""


class ProfileMismatchError(ProfileError):
    """A profile was calibrated on a different system.

    Attributes:
        differences: What differs, one readable line each.
    """

    def __init__(self, differences: tuple[str, ...]) -> None:
        self.differences = differences
        super().__init__(
            "this profile was calibrated on another system: "
            + "; ".join(differences)
            + ". Calibrate again on this system, or turn strict mode off to serve the top k "
            "without the profile."
        )


class StageError(CtxguardError):
    """A stage of the request path failed.

    Attributes:
        stage: The stage's name, such as ``dense`` or ``rerank``.
    """

    def __init__(self, stage: str, message: str) -> None:
        self.stage = stage
        super().__init__(f"{stage}: {message}")


class StageUnavailableError(StageError):
    """No stage is left to answer: this is an outage, which must not look like an empty result."""


class StageRefusedError(StageUnavailableError):
    """A server refused one request because of its content; it may answer the next one."""


class OverloadedError(StageError):
    """A request was refused because too many are in progress; try again later."""


class FilterViolationError(StageError):
    """A retriever returned passages that the request's filter forbids; nothing was served."""


class JudgeError(CtxguardError):
    """A judge gave no valid grade in its first calls, so further calls would be wasted."""


class RedactionError(CtxguardError):
    """A text could not be redacted, so it must not be written.

    It never holds the text, nor the redactor's own message, which may quote the text.
    """


class StoreError(CtxguardError):
    """An operation of the monitor's sample store failed."""


class StoreUnavailableError(StoreError):
    """The store cannot be opened, or its server cannot be reached."""


class StoreFullError(StoreError):
    """The store's disk is full, or the store has reached its size limit."""


class StoreLockedError(StoreError):
    """Other processes held the store for too long."""


class StoreReadOnlyError(StoreError):
    """The store can only be read: its file, folder, role or server forbids writing."""


class StoreCorruptError(StoreError):
    """The store is damaged; it was left where it is."""


class StoreSchemaError(StoreError):
    """Another release or program wrote the tables, or some are missing; they were left untouched.

    Attributes:
        found: The schema version of the tables; None if they have none.
        known: The schema version that this release reads.
    """

    def __init__(self, message: str, *, found: int | None, known: int) -> None:
        self.found = found
        self.known = known
        super().__init__(message)


class CalibrationError(CtxguardError):
    """The labels or the recorded runs are not enough for their purpose."""


class MissingExtraError(CtxguardError, ImportError):
    """A required optional library is not installed.

    Args:
        library: The module that could not be imported.
        extra: The extra that installs it.
        install: The command that installs the extra.
    """

    def __init__(self, library: str, extra: str, install: str) -> None:
        super().__init__(f"{library} is not installed; it comes with the extra {extra}: {install}")
