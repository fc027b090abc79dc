"""Settings of the service: the system it serves, its address and its limits."""

import ipaddress
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, cast

from pydantic import Field, model_validator

from ctxguard._support.settings import SettingsModel, key, optional, optional_key, setting
from ctxguard.core.types import Mode, ScoreKind
from ctxguard.core.value_of_information import DEFAULT_PER_SECOND, DEFAULT_QUESTIONS
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.rerank_forms import FORMS, Protocol

if TYPE_CHECKING:
    from ctxguard.guard.assess import AssessorStage
    from ctxguard.resilience import Deadlines
    from ctxguard.retrieval import HybridRetriever
    from ctxguard.retrieval.protocols import Assessor
    from ctxguard.retrieval.rerank_client import RerankClient

ENVIRONMENT = "CTXGUARD_SERVE"
"""The settings but for the secrets, as JSON, for worker processes."""

_LEAST_TOKEN_CHARS = 16

_PATIENT_SECONDS = 60.0
_PATIENT_PER_SECOND = 1e6
"""Calibration asks about each labelled query once, as fast as the answers come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """Tokens and keys; never an option of a command, whose options others can read.

    Attributes:
        token: Needed by every request but those for metrics, console and health; None disables it.
        metrics_token: Needed for metrics; if None, ``token`` is.
        console_token: Needed to log in to the console; None for no console off this machine.
        upstream_key: Sent to the upstream reranker as a Bearer token; None sends none.

    Raises:
        ConfigurationError: a token is too short, or cannot be sent.
    """

    token: str | None = field(default=None, repr=False)
    metrics_token: str | None = field(default=None, repr=False)
    console_token: str | None = field(default=None, repr=False)
    upstream_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("token", "metrics_token", "console_token"):
            value = getattr(self, name)
            if value is not None and (
                len(value) < _LEAST_TOKEN_CHARS or not (value.isascii() and value.isprintable())
            ):
                raise ConfigurationError(
                    f"{variable_of(name)} must have at least {_LEAST_TOKEN_CHARS} printable ASCII "
                    "characters, such as `openssl rand -hex 16` prints"
                )

    @classmethod
    def from_environment(cls) -> "Secrets":
        """Read the secrets that the environment holds; an empty one is none."""
        return cls(
            **{each.name: os.environ.get(variable_of(each.name)) or None for each in fields(cls)}
        )


def variable_of(secret: str) -> str:
    """Name the environment variable that holds a secret.

    >>> variable_of("metrics_token")
    'CTXGUARD_METRICS_TOKEN'
    """
    return f"CTXGUARD_{secret.upper()}"


IndexFolder = Annotated[Path | None, setting("Index folder that `ctxguard index` wrote.", "FOLDER")]


class IndexSystem(SettingsModel):
    """An index with the models that order its candidates."""

    index: IndexFolder = None
    reranker: str | None = optional_key(
        "Cross-encoder that reranks the candidates of the index, or that scores documents in "
        "this process: a model name, or a folder.",
        "MODEL",
    )

    def open_index(self, deadlines: "Deadlines | None" = None) -> "HybridRetriever":
        """Load the index with its embedder, and the reranker if named.

        Raises:
            ConfigurationError: no index is named.
        """
        from ctxguard.retrieval import HybridRetriever
        from ctxguard.retrieval.models.reranker import CrossEncoderReranker

        if self.index is None:
            raise ConfigurationError("give --index FOLDER, or a file --system with the key index")
        return HybridRetriever.load(
            self.index,
            reranker=None if self.reranker is None else CrossEncoderReranker(self.reranker),
            deadlines=deadlines,
        )


class ServedSystem(IndexSystem):
    """The system that a service stands for: an index, a reranker, or one of the caller's own."""

    engine: str | None = optional(
        "Index in an engine: postgresql://…, qdrant://… or milvus://…, with the index's name after "
        "#. The key of its API is read from CTXGUARD_ENGINE_KEY.",
        "URL",
        repr=False,
    )
    rerank_upstream: str | None = optional_key(
        "Server with a reranker, such as http://localhost:8080 or https://api.jina.ai/v1; its "
        "key is read from CTXGUARD_UPSTREAM_KEY.",
        "URL",
    )
    rerank_protocol: Protocol = key(
        "Protocol of the server: cohere (Cohere, Jina, vLLM and others), voyage, tei (Text "
        "Embeddings Inference), or score (vLLM's scores of pairs).",
        "PROTOCOL",
        value="cohere",
    )
    rerank_model: str | None = optional_key(
        "Model that the server is asked for.",
        "MODEL",
        default="the one that a request names, or the server's own choice",
    )
    assessor: Literal["chat", "decisions", "systemone", "reranker", "cross-encoder"] | None = (
        optional_key(
            "Asked about candidates where that pays: a model behind chat completions (chat) or an "
            "endpoint of decisions (decisions, systemone), a reranker at a server, or a model in "
            "this process (cross-encoder).",
            "KIND",
        )
    )
    assessor_model: str | None = optional_key(
        "The assessor's model: as its endpoint names it, or a folder.", "MODEL"
    )
    assessor_url: str | None = optional_key(
        "The assessor's endpoint; its key is read from CTXGUARD_ASSESSOR_KEY, else from "
        "OPENAI_API_KEY.",
        "URL",
    )
    assessor_questions: list[str] = key(
        "What a model is asked about each candidate: relevant, answers, contradicts, outdated.",
        "LIST",
        factory=lambda: list(DEFAULT_QUESTIONS),
    )
    assessor_prices: tuple[float, float] | None = optional_key(
        "Prices of a million of the assessor's input and output tokens, such as [0.1, 0].", "LIST"
    )
    assessor_seconds: float = key(
        "Longest wait for the assessor; the answer is then decided without it.",
        "SECONDS",
        gt=0,
        value=2.0,
    )
    assessor_per_second: float = key(
        "Most candidates that a process asks the assessor about a second.",
        "N",
        gt=0,
        value=DEFAULT_PER_SECOND,
    )
    score_kind: ScoreKind | None = optional_key(
        "Meaning of the scores that are no index's: ratio, cosine, inner_product, logit, "
        "distance, probability or rank.",
        "KIND",
        default="what the reranker or retriever gives, else rank",
    )
    fingerprint: dict[str, str] = key(
        "Table that identifies your own system, where it has no fingerprint() of its own; a "
        "profile holds for equal fingerprints.",
        "TABLE",
        factory=dict,
    )

    def upstream(
        self, url: str, key: str | None, seconds: float, model: str | None
    ) -> "RerankClient":
        """Make the client of a server with a reranker, by this system's protocol."""
        from ctxguard.retrieval.rerank_client import RerankClient

        return RerankClient(
            url, protocol=self.rerank_protocol, key=key, model=model, timeout_seconds=seconds
        )

    def assessor_stage(self, *, patient: bool = False) -> "AssessorStage | None":
        """Make the stage that asks the assessor; None without one.

        Args:
            patient: Wait a minute for each answer, however many a second, as calibration does.

        Raises:
            ConfigurationError: the assessor lacks a model or an endpoint.
            MissingExtraError: the extra of its client is not installed.
        """
        from ctxguard.guard.assess import AssessorStage
        from ctxguard.monitor.redaction import redact

        if self.assessor is None:
            return None
        seconds = _PATIENT_SECONDS if patient else self.assessor_seconds
        return AssessorStage(
            self._assessor(seconds),
            deadline_seconds=seconds,
            max_per_second=_PATIENT_PER_SECOND if patient else self.assessor_per_second,
            # Only texts that leave the process.
            redact=None if self.assessor == "cross-encoder" else redact,
        )

    def _assessor(self, seconds: float) -> "Assessor":
        from ctxguard.retrieval import assessors
        from ctxguard.retrieval.chat import TokenPrices
        from ctxguard.retrieval.models.reranker import CrossEncoderReranker

        own_key = os.environ.get("CTXGUARD_ASSESSOR_KEY") or None
        model, url = self.assessor_model, self.assessor_url
        if self.assessor == "reranker":
            if url is None:
                raise ConfigurationError("the assessor reranker needs its server: assessor-url")
            return assessors.ScoreAssessor(self.upstream(url, own_key, seconds, model))
        if model is None:
            raise ConfigurationError(f"the assessor {self.assessor} needs assessor-model")
        if self.assessor == "cross-encoder":
            return assessors.ScoreAssessor(CrossEncoderReranker(model))
        key_of_endpoint = own_key or os.environ.get("OPENAI_API_KEY") or None
        return assessors.ModelAssessor(
            model,
            form=cast(assessors.Form, self.assessor),
            questions=self.assessor_questions,
            prices=None if self.assessor_prices is None else TokenPrices(*self.assessor_prices),
            base_url=url,
            api_key=key_of_endpoint or ("none" if url else None),
            timeout_seconds=seconds,
        )


class ServiceSettings(ServedSystem):
    """Settings of the service: the system it serves, its address and its limits."""

    profile: Path | None = optional(
        "Profile that `ctxguard calibrate` wrote; loaded again when it changes.", "FILE"
    )
    mode: Mode | None = optional(
        "Answer with the decision (enforce), or without it, only recorded (shadow) or not made "
        "(off).",
        "MODE",
        default="the profile's verdict",
    )
    store: str | None = optional(
        "Store of sampled requests: sqlite:///samples.db, or postgresql://user@host/database.",
        "URL",
        env="CTXGUARD_STORE",
    )
    sample_rate: float = setting(
        "Share of requests that is sampled to --store.", "SHARE", ge=0, le=1, value=0.01
    )
    host: str = setting(
        "Address to listen on; one that other machines reach needs CTXGUARD_TOKEN.",
        "ADDRESS",
        value="127.0.0.1",
    )
    port: int = setting("Port to listen on; 0 for any.", "PORT", ge=0, le=65535, value=8765)
    workers: int = setting("Processes that serve.", "N", ge=1, value=1)
    opentelemetry: bool = key(
        "Trace requests as OpenTelemetry spans, through the providers that "
        "`opentelemetry-instrument ctxguard serve` configures.",
        value=False,
    )
    k: int | None = optional_key(
        "Passages of the index that make a context where no calibrated policy applies or is "
        "enforced; of a rerank answer, which drops nothing then, the first k count as served.",
        "N",
        default="5, or as many as the profile was compared with",
        ge=1,
    )
    deadline_seconds: float = key(
        "Longest wait for the reranker, after which the documents are answered in their order, "
        "or for the index.",
        "SECONDS",
        gt=0,
        value=5.0,
    )
    probe_seconds: float = key(
        "Time between two comparisons of the reranker's scores of a few fixed texts with those "
        "at calibration.",
        "SECONDS",
        gt=0,
        value=3_600.0,
    )
    max_scoring: int = key(
        "Most requests that wait for the reranker at once; others are answered without it.",
        "N",
        ge=1,
        value=256,
    )
    max_in_flight: int = key(
        "Most requests that a process answers at once.", "N", ge=1, value=1_000
    )
    max_body_bytes: int = key("Longest body of a request.", "N", ge=1, value=16 * 2**20)
    max_buffered_bytes: int = key(
        "Most bytes of bodies that a process holds at once.", "N", ge=1, value=256 * 2**20
    )
    max_documents: int = key("Most documents or candidates of a request.", "N", ge=1, value=10_000)
    trusted_proxies: list[str] = key(
        "Addresses or networks of proxies, whose X-Forwarded-For and X-Forwarded-Proto are "
        "believed; nobody else's are.",
        "LIST",
        factory=list,
    )
    max_connections: int = key(
        "Most open connections of a process; further ones are closed.", "N", ge=1, value=4_000
    )
    receive_seconds: float = key(
        "Longest that a request's head may take, and its body.", "SECONDS", gt=0, value=10.0
    )
    shutdown_seconds: float = key(
        "Longest that requests under way may take after a signal to end.",
        "SECONDS",
        gt=0,
        value=15.0,
    )
    secrets: Annotated[
        Secrets, Field(description="Tokens and keys; by default the environment's.", exclude=True)
    ] = Field(default_factory=Secrets.from_environment)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_sources()
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                raise ConfigurationError(
                    f"trusted-proxies {proxy!r} is no address and no network, such as 10.0.0.7 or "
                    "10.0.0.0/24"
                ) from None
        if self.secrets.token is None and not is_loopback(self.host):
            raise ConfigurationError(
                f"host {self.host!r} can be reached from other machines: set "
                f"{variable_of('token')} in the environment, which every request must then bring "
                "as its Bearer token, or listen on 127.0.0.1"
            )
        return self

    def _check_sources(self) -> None:
        if self.rerank_upstream is not None and (self.searches or self.reranker is not None):
            raise ConfigurationError(
                f"rerank_upstream and {'index' if self.searches else 'reranker'} are two systems, "
                "and a profile is of one: start a service for each"
            )
        if self.engine is not None and (self.index is not None or self.reranker is not None):
            raise ConfigurationError("engine is searched alone: give no index, and no reranker")
        if self.fingerprint and (self.rerank_upstream or self.reranker or self.searches):
            raise ConfigurationError(
                "fingerprint is for candidates of a system of your own: a reranker and an index "
                "identify themselves"
            )

    @property
    def searches(self) -> bool:
        """Tell whether there is an index to search, in a folder or in an engine."""
        return self.index is not None or self.engine is not None

    @property
    def index_name(self) -> str:
        """Name the index to clients: by its folder, or as the engine does."""
        if self.engine is not None:
            return self.engine.partition("#")[2] or "index"
        return "index" if self.index is None else self.index.resolve().name

    @property
    def kind(self) -> ScoreKind:
        """Tell the kind of the scores."""
        if self.score_kind is not None:
            return self.score_kind
        if self.reranker is not None:
            return ScoreKind.LOGIT
        return FORMS[self.rerank_protocol].kind

    def to_environment(self) -> dict[str, str]:
        """Write the environment variable that tells a worker these settings, but for secrets."""
        return {ENVIRONMENT: self.model_dump_json()}

    @classmethod
    def from_environment(cls) -> "ServiceSettings":
        """Read the settings that the environment holds, the defaults where it says nothing.

        Raises:
            ConfigurationError: they cannot be read, or cannot work.
        """
        try:
            values = json.loads(os.environ.get(ENVIRONMENT, "{}"))
        except ValueError:
            raise ConfigurationError(f"{ENVIRONMENT} is no JSON") from None
        return cls(**values)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address; the name ``localhost`` is one.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
