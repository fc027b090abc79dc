"""``ctxguard query``: show the kept and dropped candidates of one query, with reasons.

Reads the profile, and calls the retriever and the assessor; writes nothing.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import ctxguard
from ctxguard._support.settings import optional, optional_key, setting
from ctxguard._support.words import count
from ctxguard.cli import _options
from ctxguard.cli._console import Output
from ctxguard.cli._inputs import on_route
from ctxguard.cli._system import Source, System, open_assessor
from ctxguard.cli._tables import facts, heading
from ctxguard.core.render import one_line
from ctxguard.core.types import DEFAULT_DEPTH, DEFAULT_K, CandidateDecision, Mode, Passage
from ctxguard.errors import ConfigurationError
from ctxguard.profile.describe import FLAGS, REASONS, describe_policy, threshold_in_words
from ctxguard.server.system import AssessorSettings

if TYPE_CHECKING:
    from ctxguard import Context

_DROPPED_SHOWN = 3
_KEPT_LINES = 2
_RANK_WIDTH = 3
_LINE_END = 8
_MOST_CHARACTERS = 2_000


class QueryCommand(System, AssessorSettings):
    question: str = setting("The query text.", "QUESTION", argument=True)
    profile: _options.ProfileFile = None
    k: int | None = optional(
        "Passages to keep where no calibrated policy applies.",
        *("N", "--k", "-k"),
        default="5, or as many as the profile was compared with",
        ge=1,
    )
    mode: Mode | None = optional_key(
        "Serve the kept passages (enforce), or the first k of the retriever with the decision "
        "only recorded (shadow) or not made (off).",
        default="the profile's verdict",
    )
    route: _options.OneRoute = None
    show_all: _options.ShowAll = False
    as_text: bool = setting(
        "Print only the context, as the model would get it.", None, "--text", value=False
    )

    def __call__(self, output: Output) -> None:
        """Each candidate is shown with its score, its score relative to the best (r) where scores
        can be compared, its calibrated probability of relevance (P) where a model gives one, and
        the beginning of its text.

        Without a profile it keeps the retriever's first k passages.
        """
        if self.as_text and output.as_json:
            raise ConfigurationError("give --text or --json, not both")

        output = Output(as_json=True) if self.as_text else output  # notes to standard error
        loaded = None if self.profile is None else ctxguard.Profile.load(self.profile)
        depth = self.depth or (DEFAULT_DEPTH if loaded is None else loaded.provenance.depth)
        with output.doing("opening the retriever"):
            source = self.open()
        with open_assessor(self) as assessor, output.doing("searching"):
            guard = ctxguard.ContextGuard(
                source if self.route is None else on_route(source, self.route),
                profile=loaded,
                k=self.k,
                mode=self.mode,
                depth=max(self.k or DEFAULT_K, depth),
                assessor=assessor,
            )
            context = guard.retrieve(self.question)
        comparison = guard.comparison
        notes = [f"{flag.value}: {FLAGS[flag]}" for flag in context.flags]
        notes += [f"{failure.stage} failed: {failure.cause}" for failure in context.failures]
        notes += [f"the profile: {line}" for line in comparison.reservations]
        if self.as_text:
            output.text(context.text)
            output.note(*notes)
        else:
            document = {**context.to_dict(), "differences": list(comparison.differences)}
            output.result(document, self._shown(context, source, output.out.width), notes)
        output.findings(
            f"the profile does not fit this index: {each}" for each in comparison.mismatches
        )

    def _shown(self, context: "Context", source: "Source", width: int) -> Iterator[RenderableType]:
        kept = [candidate for candidate in context.decisions if candidate.kept]
        dropped = [candidate for candidate in context.decisions if not candidate.kept]
        shown = dropped if self.show_all else dropped[:_DROPPED_SHOWN]
        sufficient = in_mode = None
        if context.p_sufficient is not None:
            said = {True: "yes", False: "no", None: "no threshold"}[context.sufficient]
            p = f"P(the best kept passage is relevant) = {context.p_sufficient:.3g}"
            sufficient = f"{said}: {p}"
        if context.mode is not Mode.ENFORCE:
            served = f"the model gets the retriever's first {len(context)} instead"
            in_mode = f"{context.mode.value}: {served}"
        yield facts(
            ("query", context.query),
            ("route", context.route.value),
            ("keeps", describe_policy(context.decision.policy)),
            ("kept", f"{len(kept)} of {count(context.candidates, 'candidate')}"),
            ("sufficient", sufficient),
            ("mode", in_mode),
        )
        for title, candidates, lines in (("kept", kept, _KEPT_LINES), ("dropped", shown, 1)):
            if candidates:
                yield heading(title)
            for candidate in candidates:
                passage = source.passage(candidate.passage_id)
                yield _candidate(candidate, passage, width, lines)
        if len(shown) < len(dropped):
            yield f"{len(dropped) - len(shown)} more dropped; --all shows them"


def _candidate(candidate: CandidateDecision, passage: Passage, width: int, lines: int) -> Table:
    """Lay out one candidate: rank, id and title; figures, and why it was dropped; text."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", width=_RANK_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    name = Text(one_line(candidate.passage_id), style="bold" if candidate.kept else "")
    title = Text(one_line(passage.title))
    title.truncate(width // 2, overflow="ellipsis")
    grid.add_row(
        "" if candidate.rank is None else str(candidate.rank),
        Text("  ").join([part for part in (name, title) if part.plain]),
    )
    grid.add_row("", Text(" · ", style="dim").join(_figures(candidate)))
    text = Text(one_line(passage.text[:_MOST_CHARACTERS]), style="dim")
    text.truncate(lines * (width - _RANK_WIDTH - 1) - _LINE_END, overflow="ellipsis")
    if text.plain:
        grid.add_row("", text)
    return grid


def _figures(candidate: CandidateDecision) -> list[Text]:
    compared = {"score": candidate.score, "r": candidate.relative_score, "P": candidate.probability}
    parts = [Text(f"{name} {value:.3g}") for name, value in compared.items() if value is not None]
    if candidate.reason is None:
        return parts
    reason = Text(REASONS[candidate.reason], style="red")
    if candidate.kept_if:
        settings = " and ".join(threshold_in_words(threshold) for threshold in candidate.kept_if)
        reason.append(f"; kept if {settings}", style="dim")
    return [*parts, reason]
