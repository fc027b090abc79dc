"""Shared by the commands on live samples: the store, the judge, and tables of estimates."""

import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ctxguard._support.settings import SettingsModel, key, optional, optional_key
from ctxguard.cli._console import Output
from ctxguard.core.types import Mode
from ctxguard.endpoints.forms import Protocol
from ctxguard.errors import ConfigurationError, DataError, JudgeError, StoreUnavailableError
from ctxguard.server.system import Prices

if TYPE_CHECKING:
    from calibration.data.dataset import Dataset
    from ctxguard.endpoints.chat import ChatSettings
    from ctxguard.monitor.judges import Judge, LabelJudge
    from ctxguard.monitor.service import Monitor
    from ctxguard.monitor.store import Counts, Limits, SampleStore

WAITS = "another monitor owns {store}: this one waits until that ends"
_WAIT_SECONDS = 0.5

IN_WORDS = {
    "recall": "recall, whole pools",
    "pooled_recall": "pooled recall",
    "served_mrr": "MRR of the served",
    "udcg": "UDCG",
    "gain": "  its gain",
    "harm": "  its harm",
    "precision": "precision",
    "recall_loss": "recall loss, first few",
}


def tokens_in_words(counts: "Counts", price: float | None = None) -> Iterator[tuple[str, str]]:
    """Say how many tokens each mode saves, and their cost at a price per million."""
    from ctxguard.monitor.judging.sample_judge import tokens_by_mode

    for mode, tokens in tokens_by_mode(counts).items():
        if mode is not Mode.OFF and tokens.today:
            share, cost = 1.0 - tokens.kept / tokens.today, tokens.saved_cost(price)
            yield (
                "tokens" if mode is Mode.ENFORCE else f"in {mode.value}",
                ("" if mode is Mode.ENFORCE else "enforcing would serve ")
                + f"about {tokens.kept:,} tokens in place of today's {tokens.today:,}, "
                f"{abs(share):.0%} {'more' if share < 0 else 'fewer'}"
                + ("" if cost is None else f": {cost:,.2f} saved at {price:g} per million"),
            )


class ModelCalls(SettingsModel):
    """How to call a language model behind an endpoint."""

    timeout_seconds: float = key(
        "Longest wait for one reply of a model behind an endpoint.", gt=0, value=30.0
    )
    max_reply_tokens: int = key(
        "Most tokens of a reply; a model that spends all of them on thoughts is given 16 times as "
        "many, once.",
        ge=1,
        value=256,
    )
    temperature: float = key(
        "Temperature of the replies; left out where the model takes none.",
        ge=0,
        value=0.0,
    )

    def model_calls(self) -> "ChatSettings":
        """Return them as the client's settings."""
        return {
            "timeout_seconds": self.timeout_seconds,
            "max_reply_tokens": self.max_reply_tokens,
            "temperature": self.temperature,
        }


class JudgeModel(ModelCalls):
    """The model that judges."""

    model: str | None = optional(
        "Dated name of the judging model, or its folder.",
        "MODEL",
    )
    base_url: str | None = optional_key(
        "Endpoint of --judge llm or reranker; its key is read from OPENAI_API_KEY, or for a "
        "reranker from CTXGUARD_JUDGE_KEY."
    )
    prices: Prices | None = optional_key(
        "Prices of a million input and output tokens of --judge llm, such as [2, 8]."
    )
    calls_per_second: float | None = optional_key(
        "Most calls of --judge llm or reranker a second, retries included.", gt=0
    )
    judge_protocol: Protocol = key(
        "Form in which --judge reranker is asked, as rerank-protocol.", value="cohere"
    )
    min_score: float | None = optional_key(
        "Score from which --judge reranker or cross-encoder calls a passage relevant.",
        default="a probability of one half",
    )
    judge_revision: str | None = optional_key(
        "Any text, to be changed where --judge llm or reranker has changed behind the same name: "
        "the judge begins anew, and judges again what people graded."
    )

    def model_judge(self, kind: str, reranker: str | None) -> "Judge":
        """Build the judge that the settings describe.

        Args:
            kind: ``llm``, ``cross-encoder`` or ``reranker``.
            reranker: The guard's, which a cross-encoder that judges must not be.

        Raises:
            ConfigurationError: no model is named, or no reranker's server.
        """
        if kind == "reranker":
            from ctxguard.monitor.judges import RerankJudge

            if self.base_url is None:
                raise ConfigurationError(
                    "--judge reranker needs its server: name it as base-url in a file --system"
                )
            reranks = RerankJudge(
                self.base_url,
                model=self.model,
                protocol=self.judge_protocol,
                key=os.environ.get("CTXGUARD_JUDGE_KEY") or None,
                min_score=self.min_score,
                max_calls_per_second=self.calls_per_second,
                timeout_seconds=self.timeout_seconds,
            )
            reranks.version += self._revision
            return reranks
        if self.model is None:
            raise ConfigurationError(
                f"--judge {kind} needs --model: "
                + ("as the endpoint names it" if kind == "llm" else "a folder or a hub name")
            )
        if kind == "cross-encoder":
            from ctxguard.monitor.judges import CrossEncoderJudge
            from ctxguard.retrieval.models.reranker import CrossEncoderReranker

            return CrossEncoderJudge(
                self.model,
                min_score=self.min_score or 0.0,
                reranker=None if reranker is None else CrossEncoderReranker(reranker),
            )
        from ctxguard.monitor.judges import LLMJudge

        connection: ChatSettings = {
            **self.model_calls(),
            "base_url": self.base_url,
            "max_calls_per_second": self.calls_per_second,
            "retries": 3,
        }
        judge = LLMJudge(self.model, prices=self.prices, **connection)
        judge.version += self._revision
        return judge

    @property
    def _revision(self) -> str:
        return "" if self.judge_revision is None else f" revision {self.judge_revision}"


def open_store(url: str, limits: "Limits | None" = None) -> "SampleStore":
    """Open an existing sample store.

    A missing SQLite file is not created: its name is most likely mistyped.

    Raises:
        ConfigurationError: a URL that cannot be used.
        StoreError: there is no such store, or it cannot be opened.
    """
    from ctxguard.monitor.store import Limits, SampleStore

    store = SampleStore(url, limits=Limits() if limits is None else limits)
    if store.is_sqlite and store.file is None:
        raise ConfigurationError(
            "a store in memory holds only its own process's samples: name a file, such as "
            "sqlite:///samples.db"
        )
    if store.file is not None and not store.file.exists():
        raise StoreUnavailableError(
            f"there is no sample store {store.file.absolute()}: name the file that the serving "
            "processes write to, or make it: by `sample_to` where you serve, or by `ctxguard judge`"
        )
    store.check()
    return store


def wait_to_own(running: "Monitor", output: Output) -> None:
    """Wait until no other monitor owns the store, and say so."""
    if running.own():
        return
    output.note(WAITS.format(store=running.store.name))
    while not running.own():
        time.sleep(_WAIT_SECONDS)


def judge_waiting(running: "Monitor", output: Output, at_once: int = 100) -> str | None:
    """Judge the waiting samples; return why judging stopped early, None if it did not."""
    from ctxguard.monitor.store import State

    waiting = running.store.states().get(State.PENDING, 0)
    with output.passes() as begin:
        step = begin("judging samples", waiting) if waiting else lambda _: None
        try:
            while done := running.step(at_once):
                step(done)
        except JudgeError as error:
            return str(error)
    return None


def named_series(store: "SampleStore", named: str | None) -> str:
    """Return the series of judgments to use: the one named, or the only one.

    Raises:
        DataError: there is no series, or several and `name` is None.
    """
    all_series = store.series()
    if named is not None and named in all_series:
        return named
    if named is None and len(all_series) == 1:
        return all_series[0]
    if not all_series:
        raise DataError(
            "the store holds no judgments yet: run `ctxguard monitor`, or have people grade alone "
            "with `ctxguard label export --out FILE` or in the console"
        )
    problem = (
        "the store holds several judges" if named is None else f"the store has no judge {named!r}"
    )
    raise DataError(f"{problem}; name one as judge: {', '.join(map(repr, all_series))}")


def label_judge(dataset: "Dataset", texts: "Mapping[str, str] | None" = None) -> "LabelJudge":
    """Build a judge that knows the labels of these questions.

    Args:
        texts: The texts of labelled passages by id, as far as they are known.
    """
    from ctxguard.monitor.judges import LabelJudge

    return LabelJudge(
        [
            (
                query.text,
                dataset.qrels.get(
                    query.query_id, dict.fromkeys(dataset.distractors.get(query.query_id, ()), 0)
                ),
            )
            for query in dataset.queries
            if dataset.is_labelled(query.query_id)
        ],
        [
            (
                query.text,
                [
                    passage_id
                    for passage_id, kind in dataset.distractors.get(query.query_id, {}).items()
                    if kind == "distractor"
                ],
            )
            for query in dataset.queries
        ],
        texts=texts,
        version=dataset.digest()[:12],
    )
