"""Runs the command line in the process of the tests."""

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

from ctxguard.cli import main


@dataclass(frozen=True)
class Invoked:
    """What a finished command left."""

    exit_code: int
    stdout: str
    stderr: str
    exception: Exception | None = None

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(arguments: Sequence[object], columns: str = "100") -> Invoked:
    """Run the command line with these arguments."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    exit_code, exception = 0, None
    environment = mock.patch.dict(os.environ, {"COLUMNS": columns})
    with environment, redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(each) for each in arguments])
        except SystemExit as ended:
            exit_code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception as error:
            exit_code, exception = 1, error
    read = []
    for stream in (out, err):
        stream.flush()
        read.append(stream.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]
    return Invoked(exit_code, *read, exception)
