"""``ctxguard judge``: have the questions in a log judged, as samples in a store.

Reads the log, calls the retriever and the model that judges, and writes the store; without --judge
it only says what that would cost.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, cast
from uuid import uuid4

from pydantic import model_validator

from ctxguard._support.settings import key, optional
from ctxguard._support.words import count
from ctxguard.cli import _options
from ctxguard.cli._console import Output
from ctxguard.cli._inputs import in_first_order
from ctxguard.cli._store import JudgeModel, by_k, judge_waiting, next_step, wait_to_own
from ctxguard.cli._system import System
from ctxguard.core.types import DEFAULT_DEPTH, DEFAULT_K
from ctxguard.errors import ConfigurationError, QueryError
from ctxguard.measure.worth import READERS

if TYPE_CHECKING:
    from ctxguard import HybridRetriever
    from ctxguard.cli._console import Passes
    from ctxguard.endpoints.replies import Reply
    from ctxguard.monitor.judges import Judge, LLMJudge
    from ctxguard.monitor.store import SampleStore

_REPLY_TOKENS = 10
_AT_ONCE = 20

_Questions: TypeAlias = list[tuple[str, str, int]]
"""Request id, text, and how often it was asked."""


class JudgeCommand(JudgeModel, System):
    queries: Path | None = optional(
        "Questions, as JSONL or CSV with a column query, such as a log; one that repeats counts as "
        "often.",
        "FILE",
        default="those of candidates with rerank-upstream",
    )
    store: _options.StoreUrl
    judge: Literal["llm", "cross-encoder", "reranker"] | None = optional(
        "Grades the first 20 passages of each question: llm, cross-encoder or reranker.",
        "JUDGE",
        default="none: only say what judging takes",
    )
    questions: int | None = optional(
        "Have --judge llm write so many questions from passages of --index, in place of --queries.",
        "N",
        ge=1,
    )
    serving_k: int = key(
        "Passages that you serve today: the first of each question.", ge=1, value=DEFAULT_K
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.questions is not None and (self.judge != "llm" or self.index is None):
            raise ConfigurationError(
                "--questions needs --judge llm, which writes them, and --index"
            )
        if (self.questions is None) is (self.queries is None) and self.candidates is None:
            raise ConfigurationError(
                "give either --queries (a log) or --questions (how many to write from passages)"
            )
        if self.judge == "reranker" and self.base_url == self.rerank_upstream is not None:
            raise ConfigurationError("the reranker being calibrated cannot judge itself")
        return self

    def __call__(self, output: Output) -> None:
        """Each question is retrieved as it is served, and its first 20 passages are
        judged, with whatever else waits in the store. A question that the store
        holds is not judged again, so that a run may be interrupted; a passage
        on which a call of the judge failed is asked about again.

        Prints precision, MRR, UDCG and recall of the first 1, 3, 5, 10 and 20
        passages, as the judge sees them. A judge errs: have people grade a part
        of the passages, and the figures are corrected.
        """
        from calibration.from_store import judged_store
        from ctxguard.endpoints.chat import why_failed
        from ctxguard.guard.wrapped_retriever import call_if
        from ctxguard.monitor.service import JudgingOutcome, Monitor
        from ctxguard.monitor.store import SampleStore, State

        with ExitStack() as stack:
            judge = None
            if self.judge is not None:
                judge = self.model_judge(self.judge, self.reranker)
                stack.callback(call_if, judge, "close")
            file = SampleStore(self.store).file
            # An estimate of the cost creates no store.
            there = judge is not None or file is None or file.exists()
            store = stack.enter_context(SampleStore.open(self.store if there else "sqlite://"))
            waited = store.states().get(State.PENDING, 0)
            series = "" if judge is None else f"{judge.name} {judge.version}"
            lacking = store.n_failed(series) if series else (0, 0)
            failed: list[Reply[str]] = []
            with output.passes() as begin:
                added = self._write(store, judge, begin, failed)
            if failed:
                output.note(
                    f"{count(len(failed), 'passage')} got no question: "
                    f"{why_failed(failed, cast('LLMJudge', judge).ledger)}; the next run asks again"
                )
            output.note(self._in_words(added, waited, lacking))
            if judge is None:
                return
            running = Monitor(store, judge)
            wait_to_own(running, output)
            fault = judge_waiting(running, output, _AT_ONCE)
            report = running.report()
            if report.waiting and report.outcomes[JudgingOutcome.JUDGE_FAILED]:
                waiting = count(report.waiting, "sample")
                fault = f"{running.why_judge_failed}; {waiting} still waiting"
            if series not in store.series():
                output.findings([fault or "no sample is waiting, and this judge has judged none"])
            found = judged_store(store, series, READERS)
        figures, table = by_k(found)
        notes = [*found.questions.notes, *next_step(found), *([fault] if fault else [])]
        output.result({"judge": series, **figures}, [table], notes, found=bool(fault))

    def _write(
        self,
        store: "SampleStore",
        judge: "Judge | None",
        begin: "Passes",
        failed: "list[Reply[str]]",
    ) -> Counter[str]:
        """Write the samples that the store lacks; without a judge, only estimate their cost."""
        from calibration.asked_questions import JUDGED_DEPTH, sample_of, tokens_to_judge
        from ctxguard import ContextGuard
        from ctxguard.monitor.store import Batch

        source = cast("HybridRetriever", self.open())
        retriever = cast("HybridRetriever", in_first_order(source))
        depth = max(self.depth or DEFAULT_DEPTH, self.serving_k, JUDGED_DEPTH)
        guard = ContextGuard(retriever, k=self.serving_k, mode="off", depth=depth)
        system = {**retriever.fingerprint(), "k": str(self.serving_k), "depth": str(depth)}
        worker, added = uuid4().hex, Counter[str]()
        for asked in (
            self._asked(system, store, begin)
            if self.questions is None
            else self._written(source, system, store, judge, begin, failed=failed)
        ):
            records = []
            for request_id, text, times in asked:
                with suppress(QueryError):
                    records.append(sample_of(guard, text, request_id, times))
            added.update(questions=len(records), refused=len(asked) - len(records))
            for n_passages, n_tokens in map(tokens_to_judge, records):
                added.update(passages=n_passages, tokens=n_tokens)
            if judge is not None:
                for hour, some in groupby(records, lambda one: int(one.time_seconds // 3600)):
                    samples = [(record, record.to_bytes()) for record in some]
                    store.append(worker, Batch(samples, len(samples), hour=hour))
        return added

    def _asked(
        self, system: Mapping[str, str], store: "SampleStore", begin: "Passes"
    ) -> Iterator[_Questions]:
        """Yield the questions in the log that the store lacks."""
        from calibration.asked_questions import asked_questions, request_id_of
        from calibration.reranked_candidates import read_candidates

        log = (
            dict.fromkeys(read_candidates(cast(Path, self.candidates)), 1)
            if self.queries is None
            else asked_questions(self.queries)
        )
        asked = [(request_id_of(text, system), text, n) for text, n in log.items()]
        new = [each for each in asked if not store.find([each[0]])]
        step = begin("searching", len(new))
        for first in range(0, len(new), _AT_ONCE):
            some = new[first : first + _AT_ONCE]
            yield some
            step(len(some))

    def _written(
        self,
        index: "HybridRetriever",
        system: Mapping[str, str],
        store: "SampleStore",
        judge: "Judge | None",
        begin: "Passes",
        *,
        failed: "list[Reply[str]]",
    ) -> Iterator[_Questions]:
        """Yield questions that the model writes; add replies without a question to ``failed``."""
        from calibration.asked_questions import (
            passages_to_ask_about,
            request_id_of,
            written_questions,
        )
        from ctxguard.endpoints.failures import InvalidReason

        drawn = passages_to_ask_about(index.passage_ids, self.questions or 0)
        ids = {name: request_id_of(name, system, is_written=True) for name in drawn}
        passages = [index.passage(name) for name in drawn if not store.find([ids[name]])]
        step = begin("writing questions", len(passages))
        for written in written_questions(passages, cast("LLMJudge", judge)):
            questions = []
            for passage, reply in written:
                if isinstance(reply.answer, InvalidReason):
                    failed.append(reply)
                else:
                    questions.append((ids[passage.passage_id], reply.answer, 1))
            yield questions
            step(len(written))

    def _in_words(self, added: Counter[str], waited: int, failed: tuple[int, int]) -> str:
        """Say how many samples are left to judge, and their cost."""
        from ctxguard.monitor.judges.prompt import INSTRUCTIONS

        questions, passages = count(added["questions"], "question"), added["passages"]
        n_refused = added["refused"]
        refused = f"; {count(n_refused, 'question')} found no passage" if n_refused else ""
        if failed[1]:
            refused += f"; {count(failed[1], 'passage')} of {count(failed[0], 'question')} got no "
            refused += "grade because calls failed, and will be asked about again"
        if not added["questions"]:
            waits = f"; {count(waited, 'sample')} waited for a judge" if waited else ""
            none = "the store already holds every question: none is new"
            if n_refused:
                none = "no question was added"
            return f"{none}{waits}{refused}"
        one_at_a_time = self.judge not in ("cross-encoder", "reranker")
        calls = passages if one_at_a_time else 2 * added["questions"]
        line = f"judging {count(passages, 'passage')} of {questions} takes {count(calls, 'call')}"
        if one_at_a_time:
            read = added["tokens"] + calls * len(INSTRUCTIONS) // 4
            line += f" and reads about {float(f'{read:.2g}'):,.0f} tokens, instructions included"
            if self.prices is not None:
                reading, writing = self.prices
                cost = (read * reading + calls * _REPLY_TOKENS * writing) / 1e6
                line += f", about {cost:.2g} at the prices given"
        if waited:
            line += f"; {count(waited, 'sample')} that the store holds already wait too"
        if self.judge is None:
            line += "; add --judge llm, cross-encoder or reranker, and --model, to do it"
        return line + refused
