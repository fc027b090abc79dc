"""Settings of the service: what it serves, where, and within which limits."""

import ipaddress
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from ctxguard.core.types import DEFAULT_K, Mode, ScoreKind
from ctxguard.errors import ConfigurationError

DEFAULT_PORT = 8765
ENVIRONMENT = "CTXGUARD_SERVE"
"""The settings but for the secrets, as JSON, for worker processes."""

_LEAST_TOKEN_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """Tokens and keys; never an option of a command, whose options others can read.

    Attributes:
        token: Needed by every request but those for metrics, console and health; None for none.
        metrics_token: Needed for metrics; None for ``token``.
        console_token: Needed to log in to the console; None for no console off this machine.
        upstream_key: Sent to the upstream reranker as a Bearer token; None for none.

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
        """The secrets that the environment holds; an empty one is none."""
        return cls(
            **{each.name: os.environ.get(variable_of(each.name)) or None for each in fields(cls)}
        )


def variable_of(secret: str) -> str:
    """The environment variable that holds a secret.

    >>> variable_of("metrics_token")
    'CTXGUARD_METRICS_TOKEN'
    """
    return f"CTXGUARD_{secret.upper()}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the service serves, where, and within which limits.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        workers: Processes that serve.
        rerank_upstream: URL of the reranker that scores; None for none.
        rerank_protocol: What it speaks.
        rerank_model: The model that it is asked for; None for the one that each request names.
        reranker: Cross-encoder that scores here: a model name or a folder; None for none. With
            ``index`` it reranks the index's candidates.
        index: Folder of an index to search; None for none.
        engine: URL of an index in an engine to search; None for none. May hold a password.
        score_kind: What the scores of the reranker, or of the candidates to filter, mean; None for
            logits of TEI and of a cross-encoder, else probabilities. See ``kind``.
        fingerprint: Identifies the system whose candidates are filtered, where there is neither a
            reranker nor an index.
        profile: File of the profile; it is loaded again when it changes. None without one.
        mode: What is done with the decision; see ``Mode``.
        k: How many passages of an index make a context while nothing is calibrated. A rerank
            answer drops nothing then, and its first k count as served in samples and metrics.
        store: URL of the store of sampled requests; None to sample nothing.
        sample_rate: The share of requests that is sampled, in [0, 1].
        opentelemetry: Whether requests are traced, by the providers that the process has.
        deadline_seconds: The longest that the reranker or the index may take.
        max_scoring: The most requests that may wait for the reranker at once; others are answered
            without it.
        max_in_flight: The most requests that one process answers at once; others are refused.
        max_body_bytes: The longest body.
        max_buffered_bytes: The most bytes of bodies that one process holds at once.
        max_documents: The most documents or candidates of one request.
        max_connections: The most open connections of one process; further ones are closed.
        receive_seconds: The longest that the head of a request may take to arrive, and its body.
        shutdown_seconds: The longest that requests under way may take after a signal to end.
        secrets: Tokens and keys.

    Raises:
        ConfigurationError: a setting is out of range, or two contradict each other.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    workers: int = 1
    rerank_upstream: str | None = None
    rerank_protocol: Literal["cohere", "tei"] = "cohere"
    rerank_model: str | None = None
    reranker: str | None = None
    index: Path | None = None
    engine: str | None = field(default=None, repr=False)
    score_kind: ScoreKind | None = None
    fingerprint: dict[str, str] = field(default_factory=dict)
    profile: Path | None = None
    mode: Mode = Mode.ENFORCE
    k: int = DEFAULT_K
    store: str | None = None
    sample_rate: float = 0.01
    opentelemetry: bool = False
    deadline_seconds: float = 5.0
    max_scoring: int = 256
    max_in_flight: int = 1_000
    max_body_bytes: int = 16 * 2**20
    max_buffered_bytes: int = 256 * 2**20
    max_documents: int = 10_000
    max_connections: int = 4_000
    receive_seconds: float = 10.0
    shutdown_seconds: float = 15.0
    secrets: Secrets = Secrets()

    def __post_init__(self) -> None:
        for name in (
            "workers",
            "k",
            "max_scoring",
            "max_in_flight",
            "max_body_bytes",
            "max_buffered_bytes",
            "max_documents",
            "max_connections",
        ):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} {getattr(self, name)!r} must be at least 1")
        for name in ("deadline_seconds", "receive_seconds", "shutdown_seconds"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigurationError(f"{name} {getattr(self, name)!r} must be > 0 and finite")
        if not 0 <= self.port < 2**16:
            raise ConfigurationError(f"port {self.port!r} must lie in [0, 65535]")
        if not 0.0 <= self.sample_rate <= 1.0:
            raise ConfigurationError(f"sample_rate {self.sample_rate!r} must lie in [0, 1]")
        self._check_sources()
        if self.secrets.token is None and not is_loopback(self.host):
            raise ConfigurationError(
                f"host {self.host!r} can be reached from other machines: set "
                f"{variable_of('token')} in the environment, which every request must then bring "
                "as its Bearer token, or listen on 127.0.0.1"
            )

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
        """Whether there is an index to search, in a folder or in an engine."""
        return self.index is not None or self.engine is not None

    @property
    def index_name(self) -> str:
        """What an index is called to clients: its folder's name, or its name in the engine."""
        if self.engine is not None:
            return self.engine.partition("#")[2] or "index"
        return "index" if self.index is None else self.index.resolve().name

    @property
    def kind(self) -> ScoreKind:
        """What scores mean."""
        if self.score_kind is not None:
            return self.score_kind
        is_logit = self.rerank_protocol == "tei" or self.reranker is not None
        return ScoreKind.LOGIT if is_logit else ScoreKind.PROBABILITY

    def to_environment(self) -> dict[str, str]:
        """The environment variable that tells a worker process these settings, but for secrets."""
        values = {name: value for name, value in asdict(self).items() if name != "secrets"}
        return {ENVIRONMENT: to_json(values).decode()}

    @classmethod
    def from_environment(cls) -> "Settings":
        """The settings that the environment holds, the defaults where it says nothing.

        Raises:
            ConfigurationError: they cannot be read, or cannot work.
        """
        text = os.environ.get(ENVIRONMENT, "{}")
        try:
            settings: Settings = TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, fault["loc"])) or ENVIRONMENT
            raise ConfigurationError(f"{ENVIRONMENT}: {where}: {fault['msg']}") from None
        return replace(settings, secrets=Secrets.from_environment())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; the name ``localhost`` is one.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
