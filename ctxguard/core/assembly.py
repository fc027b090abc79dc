"""Assembly: chooses which kept passages are served, and in which order (DESIGN.md §7).

It runs on every request: texts are neither copied, hashed nor rendered unless there is a token
budget. Pure: no I/O of its own, no clock, no logging.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ctxguard._support.checks import check_at_least
from ctxguard.core.decision import Decision
from ctxguard.core.passages import STAGE, ReadPassages, estimate_tokens, read_passages
from ctxguard.core.render import DEFAULT_SEPARATOR, DEFAULT_TEMPLATE, Template
from ctxguard.core.types import (
    AssemblyDrop,
    DropReason,
    Flag,
    Passage,
    Ranking,
    StageFailure,
    Threshold,
)
from ctxguard.errors import ConfigurationError, StageUnavailableError

DEFAULT_MAX_PASSAGE_CHARS = 100_000

_CHARACTERS_PER_TOKEN = 4

_CUT_STEPS = 64

# A full stop after one or two letters mostly ends an abbreviation.
_SENTENCE_END = re.compile(r"""(?:(?<=\w{3})\.|[!?…])["'”’»)\]]*(?=\s)|[。！？｡]|\n(?=\s*\n)""")


@dataclass(frozen=True)
class Assembly:
    """Settings that turn kept passages into a context.

    Attributes:
        order: ``rank`` is best first; ``edges`` puts the best at both ends and the worst in the
            middle (1, 3, 5, …, 6, 4, 2), where models read least.
        max_tokens: Limit of the rendered text in tokens, separators included; None disables it.
            With a limit, passages are rendered on the request path.
        count_tokens: Counts the tokens of a text; pass the model's own tokenizer if the budget is
            tight. If it raises, `estimate_tokens` is used for that text. The budget is compared
            with the sum over passages, which is never below the count of the whole text for
            `estimate_tokens`, nor in practice for a model's tokenizer.
        max_passage_chars: A passage whose title and text are longer is left out even within the
            budget: it is a file that slipped into the corpus, or an attack.
        truncate: If no passage is within the limits, cut the best one at the end of a sentence
            (else at white space) and flag the answer ``truncated``. If False, the context is then
            empty and flagged ``over_budget``.
        drop_duplicates: Keep only the best of the passages whose texts are equal but for Unicode
            form, case and white space; the others take no place among the k. Passages without text
            are never duplicates.
        sanitise: Remove hidden characters and escape delimiters when rendering.
        template: See ``ctxguard.core.render.Template``.
        insufficient_text: Text that comes first, word for word, if ``Context.sufficient`` is False
            or no passage is served; None disables it. ``max_tokens`` does not count it.
        abstain: Serve no passage if ``Context.sufficient`` is False.

    Raises:
        ConfigurationError: at construction, for a setting that cannot work.
    """

    order: Literal["rank", "edges"] = "rank"
    max_tokens: int | None = None
    count_tokens: Callable[[str], int] = estimate_tokens
    max_passage_chars: int = DEFAULT_MAX_PASSAGE_CHARS
    truncate: bool = True
    drop_duplicates: bool = True
    sanitise: bool = True
    template: str = DEFAULT_TEMPLATE
    separator: str = DEFAULT_SEPARATOR
    insufficient_text: str | None = None
    abstain: bool = False
    compiled: Template = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.order not in ("rank", "edges"):
            raise ConfigurationError(f"order {self.order!r} is unknown; use 'rank' or 'edges'")
        check_at_least(1, max_tokens=self.max_tokens, max_passage_chars=self.max_passage_chars)
        if not callable(self.count_tokens):
            raise ConfigurationError(
                f"count_tokens {self.count_tokens!r} must be a function that takes text and "
                "returns a number"
            )
        # Through object.__setattr__, because the settings are frozen and compiled only once.
        object.__setattr__(self, "compiled", Template(self.template, self.separator))

    def render(self, passages: Sequence[Passage], *, insufficient: bool = False) -> str:
        """Render these passages as text, in the order given.

        Args:
            passages: In presentation order.
            insufficient: Put ``insufficient_text`` before them.
        """
        parts = [self.compiled.render(passages, clean=self.sanitise)] if passages else []
        if insufficient and self.insufficient_text is not None:
            parts.insert(0, self.insufficient_text)
        return self.separator.join(parts)


DEFAULT_ASSEMBLY = Assembly()


Assembled = tuple[
    tuple[Passage, ...], tuple[AssemblyDrop, ...], tuple[StageFailure, ...], tuple[Flag, ...]
]
"""The served passages, in presentation order; the dropped ones, best first within a reason; the
failures to read or count passages, stage ``assembly``; and ``truncated``, ``over_budget`` or no
flag."""


def assemble(
    decision: Decision,
    assembly: Assembly = DEFAULT_ASSEMBLY,
    *,
    insufficient: bool = False,
    read: ReadPassages | None = None,
) -> Assembled:
    """Choose and order the served passages from those that the decision kept.

    Takes them best first; one that does not fit the remaining budget is skipped for the next that
    does. If none fits the whole budget, the best is cut if ``truncate`` is set. Otherwise, or if
    the template alone exceeds the budget, nothing is served and the answer is flagged.

    Args:
        insufficient: Whether the kept passages were judged insufficient; ``abstain`` then leaves
            out every passage.
        read: The passages that the decision kept; None to read them.
    """
    if insufficient and assembly.abstain:
        switch = (Threshold("abstain", 0.0),)
        left_out = [AssemblyDrop(at, DropReason.INSUFFICIENT, switch) for at in decision.kept]
        return (), tuple(left_out), (), ()
    if read is None:
        kept = decision.order[: decision.n_kept]
        read = read_passages(decision.ranking.passages, kept, assembly.max_passage_chars)
    positions, passages, _, dropped, failures = read
    flag: Flag | None = None
    too_large: list[AssemblyDrop] = []
    if not passages and dropped:
        too_large = [drop for drop in dropped if drop.reason is DropReason.OVER_BUDGET]
    if too_large:
        source, flag = decision.ranking.passages, Flag.OVER_BUDGET
        for drop in too_large if assembly.truncate else ():
            passage = source[drop.position]
            room = assembly.max_passage_chars - len(str(passage.title or ""))
            if text := _whole_sentences(passage.text, max(room, 0)):
                dropped = [other for other in dropped if other is not drop]
                positions, passages = [drop.position], [replace(passage, text=text)]
                flag = Flag.TRUNCATED
                break
    if assembly.max_tokens is not None:
        candidates, most = passages, assembly.max_tokens
        passages, over, uncounted = _within_budget(positions, candidates, assembly, most)
        failures = failures + uncounted
        if over and not passages:
            flag = Flag.OVER_BUDGET
            for index, passage in enumerate(candidates if assembly.truncate else ()):
                size = _fitting(passage, most, assembly)
                if text := _whole_sentences(passage.text, size):
                    del over[index]
                    passages, flag = [replace(passage, text=text)], Flag.TRUNCATED
                    break
        dropped = dropped + over
    if assembly.order == "edges":
        passages = passages[::2] + passages[1::2][::-1]
    flags = () if flag is None else (flag,)
    return tuple(passages), tuple(dropped), tuple(failures), flags


def bare_passages(ranking: Ranking, k: int) -> tuple[Passage, ...]:
    """Return the retriever's first k passages in its own order, for the modes that serve them.

    Passages that cannot be read are left out; if none of the first k can be read, the next
    readable one is served.

    Raises:
        StageUnavailableError: there are candidates, but none can be read.
    """
    n = len(ranking)
    read = read_passages(ranking.passages, range(min(k, n)))
    passages = read.passages
    if not passages and n:
        position = first_readable(ranking, range(k, n))
        if position is None:
            raise nothing_readable(read.failures)
        passages = [ranking.passages[position]]
    return tuple(passages)


def first_readable(ranking: Ranking, positions: Iterable[int]) -> int | None:
    """Return the first of these positions whose passage can be read; None if none can be."""
    for position in positions:
        if read_passages(ranking.passages, [position]).passages:
            return position
    return None


def nothing_readable(failures: Sequence[StageFailure]) -> StageUnavailableError:
    """Build the error for a ranking without a readable passage, which must not look empty."""
    return StageUnavailableError(STAGE, f"no candidate can be read; the first: {failures[0].cause}")


def _within_budget(
    positions: Sequence[int], passages: Sequence[Passage], assembly: Assembly, max_tokens: int
) -> tuple[list[Passage], list[AssemblyDrop], list[StageFailure]]:
    """Split the passages into those that fit the budget, taken best first, and the others.

    Once nothing more can fit, a passage that is longer than the whole budget is left out uncounted.
    """
    failures: list[StageFailure] = []
    count = partial(_tokens_of, assembly=assembly, failures=failures)
    between = _counted(assembly.separator, assembly, failures) if assembly.separator else 0
    least = between + count(Passage("", ""), len(passages))
    kept: list[Passage] = []
    over: list[AssemblyDrop] = []
    total = 0
    # The budget that would surely have kept this passage and all better ones.
    needed: int | None = 0
    for rank, (position, passage) in enumerate(zip(positions, passages, strict=True), start=1):
        is_long = len(passage.text) > max_tokens * _CHARACTERS_PER_TOKEN
        if needed is None or (is_long and kept and total + least > max_tokens):
            needed = None
            over.append(AssemblyDrop(position, DropReason.OVER_BUDGET))
            continue
        tokens = count(passage, rank)
        needed += tokens + (between if rank > 1 else 0)
        extended = total + tokens + (between if kept else 0)
        if extended <= max_tokens:
            kept.append(passage)
            total = extended
        else:
            over.append(
                AssemblyDrop(position, DropReason.OVER_BUDGET, (Threshold("max_tokens", needed),))
            )
    return kept, over, failures


def _tokens_of(
    passage: Passage, rank: int, assembly: Assembly, failures: list[StageFailure]
) -> int:
    text = assembly.compiled.render_one(passage, rank, clean=assembly.sanitise)
    return _counted(text, assembly, failures)


def _counted(text: str, assembly: Assembly, failures: list[StageFailure]) -> int:
    """Count tokens with the user's function; if it fails, estimate, and add the first failure."""
    try:
        tokens = assembly.count_tokens(text)
        if tokens >= 0:  # false for NaN; a value that is not a number raises
            return tokens
        cause = "not a number of tokens"
    except Exception as error:
        cause = type(error).__name__
    if not failures:
        failures.append(StageFailure(STAGE, f"count_tokens: {cause}; estimated"))
    return estimate_tokens(text)


def _fitting(passage: Passage, budget: int, assembly: Assembly) -> int:
    """Return how many characters of a passage's text fit the budget as the only passage."""

    def fits(size: int) -> bool:
        cut = replace(passage, text=passage.text[:size])
        return _tokens_of(cut, 1, assembly, []) <= budget

    # Doubled from below, since a text may be many times the budget, and counting it all is slow.
    longest, too_long = 0, min(budget, len(passage.text))
    while too_long < len(passage.text) and fits(too_long):
        longest, too_long = too_long, min(2 * too_long, len(passage.text))
    # To 1 in 64, which is finer than sentences: each step counts the whole text again.
    while too_long - longest > 1 + longest // _CUT_STEPS:
        middle = (longest + too_long) // 2
        longest, too_long = (middle, too_long) if fits(middle) else (longest, middle)
    return longest


def _whole_sentences(text: str, size: int) -> str:
    """Return the first ``size`` characters of a text, up to the last sentence end in them.

    If no sentence ends there, cut at the last white space; if there is none, keep all of them.

    >>> _whole_sentences("Take one a day. Do not take two. Ask Dr. Low.", 40)
    'Take one a day. Do not take two.'
    """
    if size >= len(text):
        return text
    # One character more, which tells whether a word or a sentence ends at the last one.
    ends = [match.end() for match in _SENTENCE_END.finditer(text, 0, size + 1)]
    ends = [end for end in ends if end <= size] or [
        match.start() for match in re.finditer(r"\s", text[: size + 1])
    ]
    return text[: ends[-1] if ends else size].rstrip()
