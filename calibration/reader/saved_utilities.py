"""The utilities of one reader as a file, which ``fit utilities`` writes and ``calibrate`` reads."""

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasPath, BaseModel, ConfigDict, Field

from calibration.data.text_files import read_model
from calibration.reader.utilities import RULES, ReaderFit
from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.errors import CalibrationError, DataError

FORMAT = "ctxguard utilities 1"

_MAX_BYTES = 16 * 2**20


class _File(BaseModel):
    """The fields that are read from the file; the others are for people."""

    model_config = ConfigDict(frozen=True)

    format: Literal["ctxguard utilities 1"]
    reader: str
    utilities: Utilities | None
    fitted: tuple[str, ...]
    n_answers: Annotated[int, Field(ge=0, validation_alias=AliasPath("fit", "n_answers"))]
    n_queries: Annotated[int, Field(ge=0, validation_alias=AliasPath("fit", "n_queries"))]


def utilities_document(fit: ReaderFit, reader: str) -> dict[str, object]:
    """Return a fit as JSON, which ``load_utilities`` reads back.

    Args:
        fit: The fit.
        reader: Name of the reader; empty if unknown.
    """
    return {
        "format": FORMAT,
        "reader": reader,
        "utilities": asdict(fit.utilities()) if fit.identified_costs else None,
        "fitted": list(fit.identified_costs),
        "fit": asdict(fit)
        | {"pooled": [asdict(each) | {"sentence": each.sentence} for each in fit.pooled]},
        "rules": list(RULES),
    }


def load_utilities(path: Path | str) -> tuple[Utilities, str]:
    """Read utilities that ``ctxguard fit utilities`` wrote.

    Returns:
        The utilities of passages, a relevant one having 1; and the reader whose answers they were
        fitted to, in words, with the file's digest.

    Raises:
        DataError: the file cannot be read, has another format, or gives a relevant passage another
            utility than 1, so that its values have another unit.
        CalibrationError: the answers identified no cost.
    """
    saved = read_model(_File, path, _MAX_BYTES, "what `ctxguard fit utilities --out` writes")
    reader = f"reader {saved.reader}" if saved.reader else "a reader without a name"
    if saved.utilities is None:
        raise CalibrationError(
            f"{path}: the answers of {reader} identified no cost, so there are no utilities; leave "
            "utilities out to use the preset"
        )
    if saved.utilities.relevant != DEFAULT_UTILITIES.relevant:
        raise DataError(
            f"gives a relevant passage the utility {saved.utilities.relevant:g}, and every utility "
            "is a share of that of a relevant passage, which is 1; divide all of them by it",
            path=path,
        )
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return saved.utilities, (
        f"fitted to {saved.n_answers:,} answers of {reader} to {saved.n_queries:,} questions "
        f"({', '.join(saved.fitted)}; file {digest[:12]})"
    )
