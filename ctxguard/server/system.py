"""Describes the system that supplies candidates, as groups of settings that commands combine.

Reads keys from the environment, and opens the index, the models and the clients that the settings
name, each imported where it is opened.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from pydantic import NonNegativeFloat

from ctxguard._support.settings import SettingsModel, key, optional, optional_key, setting
from ctxguard.core.types import ScoreKind
from ctxguard.core.value_of_information import DEFAULT_PER_SECOND, DEFAULT_QUESTIONS
from ctxguard.endpoints.forms import RerankProtocol
from ctxguard.errors import ConfigurationError

if TYPE_CHECKING:
    from ctxguard.endpoints.rerank import RerankClient
    from ctxguard.guard.assess import AssessorStage
    from ctxguard.resilience.deadlines import Deadlines
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever
    from ctxguard.retrieval.protocols import Assessor

_PATIENT_SECONDS, _PATIENT_PER_SECOND = 60.0, 1e6

RERANK_UPSTREAM = (
    "Server with a reranker, such as http://localhost:8080 or https://api.jina.ai/v1; its key is "
    "read from CTXGUARD_UPSTREAM_KEY."
)
RERANK_MODEL = "Model that the server is asked for."
THEIR_MODEL = "the one that a request names, or the server's own choice"
"""The settings of a reranker's server are keys in commands' files, and options of `ctxguard
serve`."""


class IndexSystem(SettingsModel):
    """An index, with the models that order its candidates."""

    index: Path | None = optional("Index folder that `ctxguard index` wrote.", "FOLDER")
    reranker: str | None = optional_key(
        "Cross-encoder that reranks the candidates of the index, or that scores documents in "
        "this process: a model name, or a folder."
    )

    def open_index(self, deadlines: "Deadlines | None" = None) -> "HybridRetriever":
        """Load the index with its embedder, and the reranker if one is named."""
        from ctxguard.retrieval.hybrid.retriever import HybridRetriever
        from ctxguard.retrieval.models.reranker import CrossEncoderReranker

        if self.index is None:
            raise ConfigurationError("give --index FOLDER, or a --system file with the key index")
        return HybridRetriever.load(
            self.index,
            reranker=None if self.reranker is None else CrossEncoderReranker(self.reranker),
            deadlines=deadlines,
        )


AllMetrics = Annotated[
    bool,
    setting(
        "Export all metrics, and print all alerts and panels; by default those that somebody acts "
        "on.",
        key=True,
    ),
]
Prices = tuple[NonNegativeFloat, NonNegativeFloat]
"""Prices of a million input and output tokens."""


class RankedSystem(IndexSystem):
    """A system described by its settings: an index, an engine, or a server with a reranker."""

    engine: str | None = optional(
        "Index in an engine: postgresql://…, qdrant://… or milvus://…, with the index's name after "
        "#. The key of its API is read from CTXGUARD_ENGINE_KEY.",
        "URL",
        repr=False,
    )
    score_kind: ScoreKind | None = optional_key(
        "Meaning of the scores of your own system: ratio, cosine, inner_product, logit, "
        "distance, probability or rank.",
        default="what the reranker or retriever gives, else rank",
    )
    fingerprint: dict[str, str] = key(
        "Table that identifies your own system, where it has no fingerprint() of its own; a "
        "profile holds for equal fingerprints.",
        value={},
    )
    rerank_upstream: str | None = optional_key(RERANK_UPSTREAM)
    rerank_protocol: RerankProtocol = key(
        "Protocol of the server: cohere (Cohere, Jina, vLLM and others), voyage, tei (Text "
        "Embeddings Inference), or score (vLLM's scores of pairs).",
        value="cohere",
    )
    rerank_model: str | None = optional_key(RERANK_MODEL, default=THEIR_MODEL)
    rerank_documents: int | None = optional_key(
        "Most documents that the server takes in one call.",
        default="learned from its answers",
        ge=1,
    )

    def upstream(
        self, url: str, key: str | None, seconds: float, model: str | None
    ) -> "RerankClient":
        """Make the client of a server with a reranker, for this system's protocol."""
        from ctxguard.endpoints.rerank import RerankClient

        return RerankClient(
            url,
            protocol=self.rerank_protocol,
            key=key,
            model=model,
            timeout_seconds=seconds,
            most_documents=self.rerank_documents,
        )


Asked = tuple[str, str | None, str | None]
"""A model to ask about candidates: its kind, its name or folder, and its endpoint's URL."""


class AssessorSettings(RankedSystem):
    """The assessor, whose server speaks the same protocol as the reranker's."""

    ask: str | None = optional(
        "Ask a model that reads about candidates, where that pays: openai:MODEL, rerank:URL or "
        "cross-encoder:FOLDER; the keys assessor… say more.",
        "MODEL",
    )
    assessor: Literal["chat", "decisions", "systemone", "reranker", "cross-encoder"] | None = (
        optional_key(
            "Asked about candidates where that pays: a model behind chat completions (chat) or an "
            "endpoint of decisions (decisions, systemone), a reranker at a server, or a model in "
            "this process (cross-encoder)."
        )
    )
    assessor_model: str | None = optional_key(
        "The assessor's model: as its endpoint names it, or a folder."
    )
    assessor_url: str | None = optional_key(
        "The assessor's endpoint; its key is read from CTXGUARD_ASSESSOR_KEY, else from "
        "OPENAI_API_KEY."
    )
    assessor_questions: list[str] = key(
        "What a model is asked about each candidate: relevant, answers, contradicts, outdated.",
        value=list(DEFAULT_QUESTIONS),
    )
    assessor_prices: Prices | None = optional_key(
        "Prices of a million of the assessor's input and output tokens, such as [0.1, 0]."
    )
    assessor_seconds: float = key(
        "Longest wait for the assessor; the answer is then decided without it.", gt=0, value=2.0
    )
    assessor_reply_tokens: int = key("Most tokens of the assessor's reply.", ge=1, value=8_192)
    assessor_temperature: float = key(
        "Temperature of the assessor; left out where it takes none.", ge=0, value=0.0
    )
    assessor_per_second: float = key(
        "Most candidates that a process asks the assessor about a second.",
        gt=0,
        value=DEFAULT_PER_SECOND,
    )

    @property
    def asked(self) -> Asked | None:
        """The model to ask, from the option or the keys."""
        if self.ask is None:
            named = self.assessor
            return named and (named, self.assessor_model, self.assessor_url)
        if self.assessor is not None:
            raise ConfigurationError("--ask and the key assessor both name a model: leave one out")
        kind, _, what = self.ask.partition(":")
        if what and kind == "openai":
            return "chat", what, self.assessor_url
        if what and kind == "rerank":
            return "reranker", self.assessor_model, what
        if what and kind == "cross-encoder":
            return "cross-encoder", what, None
        raise ConfigurationError(
            f"--ask {self.ask!r} must be openai:MODEL, rerank:URL or cross-encoder:FOLDER"
        )

    def assessor_stage(self, *, patient: bool = False) -> "AssessorStage | None":
        """Make the stage that asks the assessor, if one is named.

        A ``patient`` one waits a minute for each answer and does not limit the rate: calibration
        asks about each labelled query once, as fast as the answers come.
        """
        from ctxguard.guard.assess import AssessorStage
        from ctxguard.monitor.redaction import redact

        asked = self.asked
        if asked is None:
            return None
        seconds = _PATIENT_SECONDS if patient else self.assessor_seconds
        return AssessorStage(
            self._assessor(asked, seconds),
            deadline_seconds=seconds,
            max_per_second=_PATIENT_PER_SECOND if patient else self.assessor_per_second,
            # Only texts that leave the process.
            redact=None if asked[0] == "cross-encoder" else redact,
        )

    def _assessor(self, asked: Asked, seconds: float) -> "Assessor":
        from ctxguard.endpoints import assessors
        from ctxguard.retrieval.models.reranker import CrossEncoderReranker

        own_key = os.environ.get("CTXGUARD_ASSESSOR_KEY") or None
        kind, model, url = asked
        if kind == "reranker":
            if url is None:
                raise ConfigurationError(
                    "the assessor reranker requires a server: set assessor-url"
                )
            return assessors.ScoreAssessor(self.upstream(url, own_key, seconds, model))
        if model is None:
            raise ConfigurationError(f"the assessor {kind} needs assessor-model")
        if kind == "cross-encoder":
            return assessors.ScoreAssessor(CrossEncoderReranker(model))
        return assessors.ModelAssessor(
            model,
            form=cast(assessors.Form, kind),
            questions=self.assessor_questions,
            prices=self.assessor_prices,
            base_url=url,
            api_key=own_key,
            timeout_seconds=seconds,
            max_reply_tokens=self.assessor_reply_tokens,
            temperature=self.assessor_temperature,
        )
