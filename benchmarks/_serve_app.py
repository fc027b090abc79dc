"""A server of the service's benchmark: the service with scores at hand, or an echo.

python -m benchmarks._serve_app service|attacked|echo

``attacked`` is a service with an index, a console and tokens.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute
from starlette.types import ASGIApp

from benchmarks._serve_attacks import TOKEN
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import feature_names
from ctxguard.core.types import FloatArray, Passage, Route, ScoreKind
from ctxguard.profile.schema import Profile, Provenance, RouteProfile
from ctxguard.server.app import create_app
from ctxguard.server.run import serve
from ctxguard.server.settings import Secrets, ServiceSettings
from ctxguard.testing import FaultyRetriever

FINGERPRINT = "scores at hand"


class ScoresAtHand:
    """Descending scores, computed beforehand."""

    fingerprint = FINGERPRINT

    def __init__(self) -> None:
        self._scores = np.linspace(0.9, 0.1, 1_000)

    async def ascore(
        self,
        query: str,  # noqa: ARG002
        documents: Sequence[str],
        *,
        model: str | None = None,  # noqa: ARG002
        max_tokens_per_doc: int | None = None,  # noqa: ARG002
    ) -> FloatArray:
        """One score per document."""
        return self._scores[: len(documents)]

    async def aclose(self) -> None:
        """Nothing to close."""


def profile() -> Profile:
    """A calibrated P(relevant) of the scores, made by hand; at most 10 passages are kept."""
    n = len(feature_names(("ranking",)))
    model = RelevanceModel(("ranking",), (1.0,) + (0.0,) * (n - 1), (0.0,) * n, (1.0,) * n, 0.0)
    policy = ExpectedUtilityPolicy(model, k=10)
    return Profile(
        routes={Route.EXTERNAL: RouteProfile(policy=policy, score_kind=ScoreKind.PROBABILITY)},
        fingerprint={"reranker": FINGERPRINT, "score_kind": "probability"},
        provenance=Provenance(
            ctxguard_version="0", seed=0, dataset="none", dataset_digest="0" * 64, depth=100
        ),
    )


async def _echo(request: Request) -> Response:
    return Response(await request.body(), media_type="application/json")


def _announce(url: str) -> None:
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


def main() -> None:
    """Serve on any free port, and print the URL."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        profile().save(file)
        settings = ServiceSettings(port=0, profile=file)
        app: ASGIApp
        if sys.argv[1] == "echo":
            app = Starlette(routes=[HttpRoute("/{path:path}", _echo, methods=["POST"])])
        elif sys.argv[1] == "service":
            app = create_app(settings, scorer=ScoresAtHand())
        else:
            settings = ServiceSettings(
                port=0,
                store=f"sqlite:///{folder}/samples.db",
                secrets=Secrets(token=TOKEN, console_token=TOKEN),
            )
            passages = [Passage(str(n), f"passage {n}", metadata={"n": n}) for n in range(1_000)]
            app = create_app(settings, retriever=FaultyRetriever(passages).retriever)
        serve(settings, _announce, app)


if __name__ == "__main__":
    main()
