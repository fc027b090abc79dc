"""``ctxguard serve``: the rerank protocol, decisions and the console over HTTP.

Serves HTTP, reads the environment, and opens and calls what its settings name: index, engine,
profile, store and reranker. Needs the extra `serve`.
"""

from ctxguard._support.extras import require
from ctxguard.cli._console import Output
from ctxguard.server.settings import ServiceSettings


class ServeCommand(ServiceSettings):
    def __call__(self, output: Output) -> None:
        """Point any client of a rerank API (Cohere, Jina, vLLM, TEI) at POST /rerank.

        Documents are scored by --rerank-upstream, or by a cross-encoder in this process (reranker),
        and the profile is applied. With --index or --engine it searches, at POST /v1/context. POST
        /v1/filter decides on candidates that the caller has. /openapi.json describes it all.

        Tokens are read from the environment: CTXGUARD_TOKEN for requests,
        CTXGUARD_METRICS_TOKEN for /metrics, CTXGUARD_CONSOLE_TOKEN for /console.
        """
        require("uvicorn", "serve")
        from ctxguard.server.run import serve as run

        run(self, lambda url: output.out.print(f"serving on {url}"))
