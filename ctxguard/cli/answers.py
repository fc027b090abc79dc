"""``ctxguard answers``: test whether the guard's contexts give your own reader better answers.

Reads labels and a profile, calls the retriever, the assessor, the reader and the model that marks,
and reads and writes the file of answers.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import RenderableType

import ctxguard
from ctxguard._support.settings import key, optional, optional_key, setting
from ctxguard._support.words import count
from ctxguard.cli import _options
from ctxguard.cli._console import Output
from ctxguard.cli._inputs import open_labelled
from ctxguard.cli._results import by_metric
from ctxguard.cli._store import ModelCalls
from ctxguard.cli._system import Source, System, open_assessor
from ctxguard.cli._tables import facts
from ctxguard.core.types import Mode
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.measure.worth import READERS
from ctxguard.server.system import AssessorSettings

if TYPE_CHECKING:
    from calibration.answers import AnswerFile, ToAnswer
    from calibration.data.dataset import Dataset
    from calibration.results import Results
    from ctxguard import ContextGuard, Profile
    from ctxguard.endpoints.chat import ChatClient
    from ctxguard.guard.assess import AssessorStage
    from ctxguard.measure.interval import Interval


class AnswersCommand(ModelCalls, System, AssessorSettings):
    file: Path = setting(
        "JSONL file of the answers; made by the first run, and a later one goes on where it ends.",
        "FILE",
        argument=True,
        writes=True,
    )
    data: _options.LabelledQueries
    profile: Path = setting("Profile whose contexts are compared with today's.", "FILE")
    reader: str | None = optional(
        "Endpoint of the reader, with the chat completions protocol; its key is read from "
        "OPENAI_API_KEY. Without one, what asking takes is only said.",
        "URL",
    )
    model: str = setting("Dated name of the reader, as its endpoint names it.", "MODEL")
    mark_by: Literal["contains", "judge"] = key(
        "How answers are marked: by whether they contain one of the known answers in a question's "
        "metadata (answers, and none of wrong_answers); judge asks a model, which is given the "
        "known answers or else the relevant passages.",
        value="contains",
    )
    judge_model: str | None = optional_key(
        "Model that marks with mark-by judge.", default="the reader's"
    )
    judge_url: str | None = optional_key("Endpoint of judge-model.", default="the reader's")
    mark: str = key(
        "Column of the file to compare by, such as one that another tool has added: faithfulness.",
        value="correct",
    )

    def __call__(self, output: Output) -> None:
        """The answers are marked, and their paired difference is shown with tokens, cost and
        seconds. Today's context is the retriever's first few, as shadow serves them.
        """
        from calibration.answers import (
            AnswerFile,
            ask_reader,
            compare_answers,
            estimate,
            price_of_passages,
            questions_with_contexts,
        )
        from ctxguard.endpoints.chat import why_failed

        profile = ctxguard.Profile.load(self.profile)
        labelled, source = open_labelled(self, self.data, "test", output)
        notes = [*labelled.notes, *labelled.seen_by(profile)]
        dataset = labelled.dataset
        with open_assessor(self) as assessor, output.passes() as begin:
            asked = questions_with_contexts(
                dataset.queries,
                _guards(source, profile, assessor),
                begin("retrieving contexts", len(dataset)),
            )
        file = AnswerFile(self.file, self.model)
        n_calls, tokens, cost = estimate(file.waiting(asked), self.prices)
        line = f"{count(n_calls, 'answer')} to ask for: about {tokens:,} tokens to read"
        if cost is not None:
            line += f", about {cost:.2g} at the prices given"
        if n_calls and self.reader is None:
            line += "; add --reader URL to ask"
        output.note(line)
        with ExitStack() as stack, output.passes() as begin:
            if n_calls and self.reader is not None:
                client = self._client(self.reader, self.model, stack)
                progress = begin("asking the reader", n_calls)
                if failed := ask_reader(asked, client, file, progress):
                    notes.append(
                        f"{count(len(failed), 'context')} got no valid answer: "
                        f"{why_failed(failed, client.ledger)}; the next run asks again"
                    )
            if self.mark == "correct":
                notes += self._mark(asked, file, dataset, source, stack)
        if n_calls and self.reader is None:
            return
        try:
            results = compare_answers(asked, file, column=self.mark, prices=self.prices)
        except CalibrationError:
            output.note(*notes)  # why the judge marked none
            raise
        if n_left_out := len(dataset) - results.of("guard", self.mark).mean.n:
            notes.append(f"{count(n_left_out, 'question')} left out: an answer has no mark")
        utility = price_of_passages(asked, file, dataset, self.mark)
        document = {"reader": self.model, "results": results, "irrelevant": utility}
        output.result(document, self._shown(results, utility), notes)

    def _client(self, url: str, model: str, stack: ExitStack) -> "ChatClient":
        from ctxguard.endpoints.chat import ChatClient
        from ctxguard.endpoints.usage import Ledger
        from ctxguard.monitor.redaction import redact

        ledger = Ledger(self.prices, redact=redact)
        client = ChatClient(model, ledger, **self.connection(url))
        stack.callback(client.close)
        return client

    def _mark(
        self,
        asked: "list[ToAnswer]",
        file: "AnswerFile",
        dataset: "Dataset",
        source: Source,
        stack: ExitStack,
    ) -> list[str]:
        """Mark the unmarked answers, and report those that could not be marked."""
        from calibration.answers import mark_answers, references
        from ctxguard.endpoints.chat import why_failed

        judge, texts = None, {}
        if self.mark_by == "judge":
            url = self.judge_url or self.reader
            if url is None:
                raise ConfigurationError(
                    "mark-by judge needs an endpoint: give --reader or judge-url"
                )
            judge = self._client(url, self.judge_model or self.model, stack)
            texts = references(dataset, source.passage)
        n_unmarked, failed = mark_answers(asked, file, judge, texts)
        if not n_unmarked:
            return []
        if judge is not None:
            why = why_failed(failed, judge.ledger)
            return [f"{count(n_unmarked, 'answer')} got no valid mark from the judge: {why}"]
        unknown = f"{count(n_unmarked, 'answer')} without a known answer in the question's metadata"
        return [f"{unknown}: give answers there, or set mark-by = judge"]

    def _shown(self, results: "Results", utility: "Interval") -> Iterator[RenderableType]:
        yield facts(("reader", self.model), ("answers", str(self.file)))
        yield by_metric(results)
        difference = results.of("guard", self.mark).difference
        if difference is not None and difference.bounds is not None:
            words = {"better": "better answers", "worse": "worse answers"}
            outcome = words.get(difference.outcome, "no difference beyond noise")
            yield f"the guard's contexts give {outcome} on this reader"
        yield facts(("a passage that is not relevant", _price_in_words(utility)))


def _price_in_words(utility: "Interval") -> str:
    """Say what an irrelevant passage is worth, and whether to change the settings.

    >>> from ctxguard.measure.interval import Interval
    >>> _price_in_words(Interval(-0.05, -0.15, 0.05, 100))
    "-0.05 (-0.15 to 0.05, 95%) where a relevant one is worth 1; the preset's -0.02 is within \
that, so leave it"
    >>> _price_in_words(Interval(-0.2, -0.3, -0.1, 400))[-46:]
    'in the settings: utility = {irrelevant = -0.2}'
    """
    if utility.value is None or utility.bounds is None:
        return f"not known by {count(utility.n, 'question')} with two marked answers"
    lower, upper = utility.bounds
    worth = f"{utility.value:.2g} ({lower:.2g} to {upper:.2g}, 95%) where a relevant one is worth 1"
    if lower <= READERS.irrelevant <= upper:
        return f"{worth}; the preset's {READERS.irrelevant:g} is within that, so leave it"
    least = max(min(utility.value, 0.0), -1.0)
    return f"{worth}; in the settings: utility = {{irrelevant = {least:.2g}}}"


def _guards(
    source: Source, profile: "Profile", assessor: "AssessorStage | None"
) -> "dict[str, ContextGuard]":
    from calibration.answers import PIPELINES

    depth = profile.provenance.depth
    guard = ctxguard.ContextGuard
    log = logging.getLogger(guard.__module__)
    log.disabled = True  # both modes are set here, so neither is news to the user
    try:
        return {
            name: guard(source, profile=profile, mode=mode, depth=depth, assessor=assessor)
            for name, mode in zip(PIPELINES, (Mode.SHADOW, Mode.ENFORCE), strict=True)
        }
    finally:
        log.disabled = False
