"""Settings of the service: the system it serves, its address and its limits.

Reads the environment.
"""

import ipaddress
import os
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from ctxguard._support.settings import key, optional, optional_key, setting
from ctxguard.core.types import Mode, ScoreKind
from ctxguard.endpoints.forms import FORMS
from ctxguard.errors import ConfigurationError
from ctxguard.server.system import (
    RERANK_MODEL,
    RERANK_UPSTREAM,
    THEIR_MODEL,
    AllMetrics,
    AssessorSettings,
)

_LEAST_TOKEN_CHARS = 16


def _secret(variable: str, description: str) -> Any:
    """Describe a token or key; it is read only from the environment, as others can see options."""
    return Field(
        default_factory=lambda: os.environ.get(variable) or None,
        description=description,
        exclude=True,
        repr=False,
    )


class ServiceSettings(AssessorSettings):
    """Settings of the service: the system it serves, its address and its limits."""

    token: str | None = _secret(
        "CTXGUARD_TOKEN", "Required by every request except for metrics, console and health."
    )
    metrics_token: str | None = _secret(
        "CTXGUARD_METRICS_TOKEN", "Required for metrics; if None, ``token`` is required."
    )
    console_token: str | None = _secret(
        "CTXGUARD_CONSOLE_TOKEN",
        "Required to sign in to the console; None limits the console to this machine.",
    )
    upstream_key: str | None = _secret(
        "CTXGUARD_UPSTREAM_KEY", "Sent to the upstream reranker as a Bearer token."
    )

    all_metrics: AllMetrics = False
    rerank_upstream: str | None = optional(RERANK_UPSTREAM, "URL")
    rerank_model: str | None = optional(RERANK_MODEL, "MODEL", default=THEIR_MODEL)
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
    workers: int = key("Processes that serve.", ge=1, value=1)
    opentelemetry: bool = key(
        "Trace requests as OpenTelemetry spans, through the providers that "
        "`opentelemetry-instrument ctxguard serve` configures.",
        value=False,
    )
    k: int | None = optional_key(
        "Passages of the index that make a context where no calibrated policy applies or is "
        "enforced; of a rerank answer, which drops nothing then, the first k count as served.",
        default="5, or as many as the profile was compared with",
        ge=1,
    )
    deadline_seconds: float = key(
        "Longest wait for the reranker, after which the documents are answered in their order, "
        "or for the index.",
        gt=0,
        value=5.0,
    )
    probe_seconds: float = key(
        "Time between two comparisons of the reranker's or embedder's scores of a few fixed texts "
        "with those at calibration.",
        gt=0,
        value=3_600.0,
    )
    max_scoring: int = key(
        "Most requests that wait for the reranker at once; others are answered without it.",
        ge=1,
        value=256,
    )
    max_in_flight: int = key("Most requests that a process answers at once.", ge=1, value=1_000)
    max_body_bytes: int = key("Longest body of a request.", ge=1, value=16 * 2**20)
    max_buffered_bytes: int = key(
        "Most bytes of bodies that a process holds at once.", ge=1, value=256 * 2**20
    )
    max_documents: int = key("Most documents or candidates of a request.", ge=1, value=10_000)
    trusted_proxies: list[str] = key(
        "Addresses or networks of proxies, whose X-Forwarded-For and X-Forwarded-Proto are "
        "believed; nobody else's are.",
        value=[],
    )
    max_connections: int = key(
        "Most open connections of a process; further ones are closed.", ge=1, value=4_000
    )
    receive_seconds: float = key(
        "Longest that a request's head may take, and its body.", gt=0, value=10.0
    )
    shutdown_seconds: float = key(
        "Longest that requests under way may take after a signal to end.", gt=0, value=15.0
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_sources()
        for name in ("token", "metrics_token", "console_token"):
            value = getattr(self, name)
            if value is not None and not (
                len(value) >= _LEAST_TOKEN_CHARS and value.isascii() and value.isprintable()
            ):
                raise ConfigurationError(
                    f"CTXGUARD_{name.upper()} must have at least {_LEAST_TOKEN_CHARS} printable "
                    "ASCII characters, such as `openssl rand -hex 16` prints"
                )
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                raise ConfigurationError(
                    f"trusted-proxies {proxy!r} must be an address or a network, such as 10.0.0.7 "
                    "or 10.0.0.0/24"
                ) from None
        if self.token is None and not is_loopback(self.host):
            raise ConfigurationError(
                f"host {self.host!r} can be reached from other machines: set CTXGUARD_TOKEN in the "
                "environment, which every request must then send as a Bearer token, or listen on "
                "127.0.0.1"
            )
        return self

    def _check_sources(self) -> None:
        if self.rerank_upstream is not None and (self.searches or self.reranker is not None):
            raise ConfigurationError(
                f"rerank_upstream and {'index' if self.searches else 'reranker'} are two systems, "
                "and a profile covers only one: start a service for each"
            )
        if self.engine is not None and (self.index is not None or self.reranker is not None):
            raise ConfigurationError("an engine is searched on its own: remove index and reranker")
        if self.fingerprint and (self.rerank_upstream or self.reranker or self.searches):
            raise ConfigurationError(
                "fingerprint identifies a system of your own: leave it out if there is a reranker "
                "or an index, since these identify themselves"
            )

    @property
    def searches(self) -> bool:
        """Whether there is an index to search, in a folder or in an engine."""
        return self.index is not None or self.engine is not None

    @property
    def index_name(self) -> str:
        """The index's name for clients: its folder's, or the engine's."""
        if self.engine is not None:
            return self.engine.partition("#")[2] or "index"
        return "index" if self.index is None else self.index.resolve().name

    @property
    def kind(self) -> ScoreKind:
        """The kind of the scores."""
        if self.score_kind is not None:
            return self.score_kind
        if self.reranker is not None:
            return ScoreKind.LOGIT
        return FORMS[self.rerank_protocol].kind


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address, such as ``localhost``.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
