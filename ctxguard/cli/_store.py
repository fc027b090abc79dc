"""Holds what the commands on live and judged samples share: the store, the judge, and tables.

Opens the store, reads keys from the environment, loads or calls the model that judges, and waits
for the store.
"""

import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ctxguard._support.settings import SettingsModel, key, optional, optional_key
from ctxguard._support.words import count
from ctxguard.cli._console import Output
from ctxguard.cli._tables import TextTable, interval
from ctxguard.core.types import Mode
from ctxguard.endpoints.forms import RerankProtocol
from ctxguard.errors import ConfigurationError, DataError, JudgeError, StoreUnavailableError
from ctxguard.server.system import Prices

if TYPE_CHECKING:
    from calibration.data.dataset import Dataset
    from calibration.judged_requests import JudgedRequests
    from ctxguard.endpoints.chat import ChatSettings
    from ctxguard.monitor.judges import Judge, LabelJudge
    from ctxguard.monitor.service import Monitor
    from ctxguard.monitor.store import Counts, Limits, SampleStore

WAITS = "another monitor owns {store}: this one waits until the other ends"
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
"""Names of metrics in tables, if they differ from those in JSON; a metric stands above its
parts."""

RECALL_OF_JUDGED = "of the relevant passages among those judged, not of all relevant passages"

_TO_GRADE = 400
"""How many passages people are asked to grade at first."""


def tokens_in_words(counts: "Counts", price: float | None = None) -> Iterator[tuple[str, str]]:
    """Say how many tokens each mode saves, and their cost at a price per million."""
    from ctxguard.monitor.judging.counts import tokens_by_mode

    for mode, tokens in tokens_by_mode(counts).items():
        if mode is Mode.OFF or not tokens.today:
            continue
        share, cost = 1.0 - tokens.kept / tokens.today, tokens.saved_cost(price)
        words = f"about {tokens.kept:,} tokens in place of today's {tokens.today:,}, "
        words += f"{abs(share):.0%} {'more' if share < 0 else 'fewer'}"
        if cost is not None:
            words += f": {cost:,.2f} saved at {price:g} per million"
        if mode is Mode.ENFORCE:
            yield "tokens", words
        else:
            yield f"in {mode.value}", f"enforcing would serve {words}"


class ModelCalls(SettingsModel):
    """Settings for calling a language model behind an endpoint."""

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
        "Temperature of the replies; left out where the model takes none.", ge=0, value=0.0
    )
    prices: Prices | None = optional_key(
        "Prices of a million input and output tokens of a model behind an endpoint, such as [2, 8]."
    )
    calls_per_second: float | None = optional_key(
        "Most calls of a model behind an endpoint a second, retries included.", gt=0
    )

    def connection(self, url: str | None) -> "ChatSettings":
        """Return the settings for calling the model behind an endpoint."""
        return {
            "base_url": url,
            "timeout_seconds": self.timeout_seconds,
            "max_reply_tokens": self.max_reply_tokens,
            "temperature": self.temperature,
            "max_calls_per_second": self.calls_per_second,
        }


class JudgeModel(ModelCalls):
    """Settings of the model that judges."""

    model: str | None = optional("Dated name of the judging model, or its folder.", "MODEL")
    base_url: str | None = optional_key(
        "Endpoint of --judge llm or reranker; its key is read from OPENAI_API_KEY, or for a "
        "reranker from CTXGUARD_JUDGE_KEY."
    )
    judge_protocol: RerankProtocol = key(
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
        """Build the judge of a kind, which must not be the guard's own reranker."""
        from ctxguard.monitor.judges import CrossEncoderJudge, LLMJudge, RerankJudge

        judge: RerankJudge | LLMJudge
        if kind == "reranker":
            if self.base_url is None:
                raise ConfigurationError(
                    "--judge reranker requires a server: set base-url in the --system file"
                )
            judge = RerankJudge(
                self.base_url,
                model=self.model,
                protocol=self.judge_protocol,
                key=os.environ.get("CTXGUARD_JUDGE_KEY") or None,
                min_score=self.min_score,
                max_calls_per_second=self.calls_per_second,
                timeout_seconds=self.timeout_seconds,
            )
        elif self.model is None:
            raise ConfigurationError(
                f"--judge {kind} needs --model: "
                + ("as the endpoint names it" if kind == "llm" else "a folder or a hub name")
            )
        elif kind == "cross-encoder":
            from ctxguard.retrieval.models.reranker import CrossEncoderReranker

            return CrossEncoderJudge(
                self.model,
                min_score=self.min_score or 0.0,
                reranker=None if reranker is None else CrossEncoderReranker(reranker),
            )
        else:
            connection = self.connection(self.base_url)
            judge = LLMJudge(self.model, prices=self.prices, **connection)
        if self.judge_revision is not None:
            judge.version += f" revision {self.judge_revision}"
        return judge


def open_store(url: str, limits: "Limits | None" = None) -> "SampleStore":
    """Open an existing sample store.

    A missing SQLite file is not created: its name is most likely mistyped.
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
            "processes write to, or create it, with `sample_to` where you serve or with `ctxguard "
            "judge`"
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
    """Return the series of judgments to use: the one named, or else the only one."""
    all_series = store.series()
    if named is not None and named in all_series:
        return named
    if named is None and len(all_series) == 1:
        return all_series[0]
    if not all_series:
        raise DataError(
            "the store holds no judgments yet: run `ctxguard monitor`, or have people grade "
            "without a judge, with `ctxguard label export --out FILE` or in the console"
        )
    problem = (
        "the store holds several judges" if named is None else f"the store has no judge {named!r}"
    )
    raise DataError(f"{problem}; name one as judge: {', '.join(map(repr, all_series))}")


def label_judge(dataset: "Dataset", texts: "Mapping[str, str] | None" = None) -> "LabelJudge":
    """Build a judge that knows the labels of these questions, and some passages' texts by id."""
    from ctxguard.monitor.judges import LabelJudge

    grades, misleading = [], []
    for query in dataset.queries:
        kinds = dataset.distractors.get(query.query_id, {})
        if dataset.is_labelled(query.query_id):
            own = dataset.qrels.get(query.query_id, dict.fromkeys(kinds, 0))
            grades.append((query.text, own))
        misled = [name for name, kind in kinds.items() if kind == "distractor"]
        misleading.append((query.text, misled))
    return LabelJudge(grades, misleading, texts=texts, version=dataset.digest()[:12])


def by_k(found: "JudgedRequests") -> tuple[dict[str, object], TextTable]:
    """Tabulate the first k passages of judged requests, as a document and for a terminal."""
    from calibration.judged_requests import table_by_k

    rows = table_by_k(found)
    document = {
        "requests": len(found.pools),
        "grades": int(found.is_graded.sum()),
        "failed": found.n_failed,
        "by_k": {
            "in_words": found.in_words,
            "is_corrected": found.is_corrected,
            "rows": [{"k": k, **row} for k, row in rows.items()],
        },
    }
    cells = [[str(k), *map(interval, row.values())] for k, row in rows.items()]
    columns = ["k>", "precision>", "MRR>", "UDCG>", "recall>"]
    return document, TextTable(columns, cells, found.in_words)


def next_step(found: "JudgedRequests") -> list[str]:
    """Say what people should grade next, or that a profile can now be made."""
    if not found.lacking:
        return ["`ctxguard calibrate --store` makes a profile from these samples"]
    if found.is_exact:
        lacking = count(found.lacking, "passage")
        return [f"it needs labels of about {lacking} more, including dropped ones"]
    n = min(_TO_GRADE, found.n_judged)
    grade = (
        f"a judge makes errors: have people grade {count(n, 'passage')} of these, with `ctxguard "
        f"label export -n {n}` or in the console; then `ctxguard calibrate --store` makes a profile"
    )
    return [grade]
