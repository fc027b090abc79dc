"""``ctxguard serve``: the rerank protocol, decisions and the console over HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from ctxguard.cli import _options
from ctxguard.cli._console import Output
from ctxguard.core.types import Mode, ScoreKind
from ctxguard._support.extras import require


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("serve")(serve)
