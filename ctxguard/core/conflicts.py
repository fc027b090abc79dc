"""Finds passages that contradict each other: the same words with another number, name or date.

Which of two such passages is right cannot be told from their texts, so nothing is dropped for it.
Every size is bounded. Pure: no I/O, no clock, no logging.
"""

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from itertools import combinations, islice, pairwise
from typing import NamedTuple

MAX_PASSAGES = 20
"""Passages that are compared, the first of a context."""

MAX_CHARS = 2_000
"""Characters of a passage that are compared, its first."""

MAX_ALIGNED = 20
"""Pairs of passages that are aligned word by word, the first in the order of the context."""

MAX_DIFFERENCES = 5
"""Differences that are named for a pair."""

_LEAST_ALIKE = 0.45
"""Share of distinct words, of the passage with fewer, from which two passages are aligned."""

_AROUND = 22
"""Equal words before and after a difference, at least, that make it one."""

_NEAR_COPY = 0.85
"""Share of the shorter passage's words that both have in order, from which names count too."""

_MOST_WORDS = 8
"""Words of a difference, at most."""

_MOST_PLAIN_WORDS = 4
"""Words of a difference in neither a number nor a name, at most."""

_SAME_NAME = 0.75
"""Similarity of the letters from which two names are spellings of one."""

_MOST_COMPARED_CHARS = 80

_MAX_TERMS = 12
"""Words of the query that are looked for, the first."""

_LEAST_LETTERS = 4
"""Letters of a word that says what a query is about."""

_COVERED = 0.75
"""Share of those words, but for the ones that no passage has, from which a passage is on topic."""

_REACH = 16
"""Characters between a word of the query and the number that a passage states for it."""

_MOST_STATEMENTS = 3
"""Places of a word in a passage that are read."""

_NUMBER = re.compile(r"\d+(?:[.,:/\u2013-]\d+)*")
_WORD = re.compile(rf"{_NUMBER.pattern}|[^\W\d_]+")
_AMOUNT = re.compile(r"\d+(?:\.\d+)?")
_YEAR = re.compile(r"\d{4}")
_VERSION = re.compile(r"\d+(?:\.\d+){2,}")
_LIST_NUMBER = re.compile(r"[ \t]*[.)](?!\d)")
_END_OF_CLAUSE = re.compile(r"[.!?;](?=\s|$)|[\n|]")
_ENDS_SENTENCE = ("\n", ".", "!", "?", ":", ";", "\u2022", "|", '"', "\u201c")
_BEFORE_STATED = frozenset(" (:$\u20ac\u00a3~")

_OF_THE_PAGE = frozenset(
    [
        *("accessed", "archived", "copyright", "edited", "modified", "posted", "published"),
        *("release", "released", "retrieved", "updated", "version", "versions", "viewed"),
    ]
)
"""Words before a date or number that is about the page and not about its subject."""

_WORDS_BEFORE = 6
"""Words before a number among which those are looked for."""


class Span(NamedTuple):
    """Characters of a passage's text.

    Attributes:
        start: Position of the first, from 0.
        end: Position after the last.
        text: The characters.
    """

    start: int
    end: int
    text: str


class Disagreement(NamedTuple):
    """A place where two passages differ.

    Attributes:
        first: What the one that stands first says.
        second: What the other says.
    """

    first: Span
    second: Span


class Conflict(NamedTuple):
    """Two passages that contradict each other.

    Attributes:
        first: 1-based place of one in the context.
        second: Place of the other, higher than ``first``.
        differences: Where they differ, in the order of the first one's text; at most
            ``MAX_DIFFERENCES``.
    """

    first: int
    second: int
    differences: tuple[Disagreement, ...]

    @property
    def in_words(self) -> str:
        """What both say, such as "1856 and 1900; Kalamazoo and Lansing"."""
        return "; ".join(
            f"{_cut(one.text)} and {_cut(other.text)}" for one, other in self.differences
        )


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_COMPARED_CHARS else f"{text[:_MOST_COMPARED_CHARS]}\u2026"


def find_conflicts(query: str, texts: Sequence[str]) -> tuple[Conflict, ...]:
    """Find the pairs of texts that contradict each other.

    Two texts do if 22 words in a row are equal but for a number or date among them; in a near copy
    names count too, and where both have most of the query's words, others as well. They also do if
    both have most of the query's words, and each gives, right after the same one of them, a number
    that the other does not have. Numbers of versions, lists and footnotes, dates on which a page
    was edited, numbers that are equal when rounded, and spellings of one name do not count.

    Args:
        query: The query.
        texts: The texts of the context's passages, in presentation order.

    >>> page = "Pilzno is a town in the county of Debica, on the left bank of the river Wisloka; "
    >>> page += "at the census of 2006 its population was {}, most of them employed in the town."
    >>> texts = [page.format("4,411"), "Its mayor is Ewa Golebiowska.", page.format("9,650")]
    >>> [conflict] = find_conflicts("How many people live in Pilzno?", texts)
    >>> conflict.first, conflict.second, conflict.in_words
    (1, 3, '4,411 and 9,650')
    """
    words = [word for word in _WORD.findall(query.casefold()) if len(word) >= _LEAST_LETTERS]
    terms = tuple(islice(dict.fromkeys(words), _MAX_TERMS))
    passages = [_Passage(text[:MAX_CHARS], terms) for text in texts[:MAX_PASSAGES]]
    # Words such as "when" are mostly in no passage, and say nothing of any.
    found = len(frozenset[str]().union(*[passage.terms for passage in passages]))
    least = max(_COVERED * found, 2)
    conflicts = []
    aligned = 0
    for (first, one), (second, other) in combinations(enumerate(passages, start=1), 2):
        on_topic = min(len(one.terms), len(other.terms)) >= least
        differences: tuple[Disagreement, ...] = ()
        if aligned < MAX_ALIGNED and one.is_like(other):
            aligned += 1
            differences = tuple(islice(_altered(one, other, on_topic=on_topic), MAX_DIFFERENCES))
        if on_topic and not differences:
            differences = tuple(islice(_stated_otherwise(one, other), 1))
        if differences:
            conflicts.append(Conflict(first, second, differences))
    return tuple(conflicts)


class _Passage:
    """A text, read as far as the comparison with others takes."""

    def __init__(self, text: str, terms: tuple[str, ...]) -> None:
        self.text = text
        # Letter by letter, so that positions stay those of the text.
        lower = text.lower()
        self._lower = lower if len(lower) == len(text) else text
        # White space splits text in a few passes in C, and tells whether more is worth while.
        self._distinct = set(self._lower.split())
        self.terms = [term for term in terms if term in self._lower]

    def is_like(self, other: "_Passage") -> bool:
        fewer = min(len(self._distinct), len(other._distinct))
        return len(self._distinct & other._distinct) >= max(_LEAST_ALIKE * fewer, 1)

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """The position of each word's first character, and that after its last."""
        return [match.span() for match in _WORD.finditer(self.text)]

    @cached_property
    def words(self) -> list[str]:
        found = _WORD.findall(self.text)
        return "\0".join(found).casefold().split("\0") if found else []

    @cached_property
    def triples(self) -> dict[tuple[str, str, str], int]:
        """The position of each three words in a row; -1 for those that occur again."""
        positions: dict[tuple[str, str, str], int] = {}
        words = self.words
        for at, triple in enumerate(zip(words, words[1:], words[2:], strict=False)):
            positions[triple] = -1 if triple in positions else at
        return positions

    def span(self, words: range) -> Span:
        start, end = self.places[words[0]][0], self.places[words[-1]][1]
        return Span(start, end, self.text[start:end])

    @cached_property
    def numbers(self) -> frozenset[str]:
        return frozenset(map(_plain_number, _NUMBER.findall(self.text)))

    @cached_property
    def stated(self) -> dict[str, list[Span]]:
        """The numbers right after each word of the query."""
        return {term: spans for term in self.terms if (spans := list(self._stated(term)))}

    def _stated(self, term: str) -> Iterator[Span]:
        text, at = self._lower, -1
        for _ in range(_MOST_STATEMENTS):
            at = text.find(term, at + 1)
            if at < 0:
                return
            end = at + len(term)
            if text[at - 1 : at].isalnum() or text[end : end + 1].isalnum():
                continue
            clause = _END_OF_CLAUSE.search(text, end, end + _REACH)
            limit = clause.start() if clause else end + _REACH
            for match in _NUMBER.finditer(self.text, end):
                if match.start() >= limit:
                    break
                if _states(self.text, end, match):
                    yield Span(*match.span(), match[0])


def _states(text: str, end_of_term: int, match: re.Match[str]) -> bool:
    """Whether a number after a word of the query is a quantity or a date: no part of a name."""
    start, end = match.span()
    if (
        text[start - 1] not in _BEFORE_STATED
        or text[end : end + 1].isalnum()
        or text[end : end + 1] in ("-", "%")
        or ":" in match[0]
        or _VERSION.fullmatch(match[0])
        or not _OF_THE_PAGE.isdisjoint(text[end_of_term:start].lower().split())
    ):
        return False
    # One or two digits are the day of a date that names its month, or too common to say anything.
    month = text[end : end + 2].strip() or text[end_of_term:start].split()[-1:]
    return len(match[0]) > 2 or (bool(month) and month[0][:1].isupper())


def _stated_otherwise(one: _Passage, other: _Passage) -> Iterator[Disagreement]:
    """Yield numbers that both state for the same word, each of which the other does not have."""
    for term, spans in one.stated.items():
        for span in spans:
            for another in other.stated.get(term, ()):
                number, its_number = _plain_number(span.text), _plain_number(another.text)
                if (
                    bool(_YEAR.fullmatch(number)) is bool(_YEAR.fullmatch(its_number))
                    and bool(_AMOUNT.fullmatch(number)) is bool(_AMOUNT.fullmatch(its_number))
                    and number not in other.numbers
                    and its_number not in one.numbers
                    and not _rounded(number, its_number)
                ):
                    yield Disagreement(span, another)


def _shared_runs(one: _Passage, other: _Passage) -> Iterator[tuple[int, int, int]]:
    """Yield the words that two passages share in a row: the first's position in each, and how many.

    In the order of both, each around three words that both have once.
    """
    words, others = one.words, other.words
    end = end_other = 0
    both = one.triples.keys() & other.triples.keys()
    for first, second in sorted([(one.triples[each], other.triples[each]) for each in both]):
        if first < end or second < end_other:
            continue
        back = 0
        while first - back > end and second - back > end_other:
            if words[first - back - 1] != others[second - back - 1]:
                break
            back += 1
        length = 3
        most = min(len(words) - first, len(others) - second)
        while length < most and words[first + length] == others[second + length]:
            length += 1
        end, end_other = first + length, second + length
        yield first - back, second - back, back + length


def _altered(one: _Passage, other: _Passage, *, on_topic: bool) -> Iterator[Disagreement]:
    """Yield where two passages that repeat each other's words contradict each other."""
    runs = list(_shared_runs(one, other))
    shared = sum(length for _, _, length in runs)
    is_near_copy = shared >= _NEAR_COPY * min(len(one.words), len(other.words))
    for (first, second, length), (next_first, next_second, next_length) in pairwise(runs):
        own = range(first + length, next_first)
        others = range(second + length, next_second)
        if (
            length + next_length >= _AROUND
            and 0 < len(own) <= _MOST_WORDS
            and 0 < len(others) <= _MOST_WORDS
            and _contradict(
                *(_WordKinds(one, own), _WordKinds(other, others)),
                is_near_copy=is_near_copy,
                on_topic=on_topic,
            )
        ):
            yield Disagreement(one.span(own), other.span(others))


class _WordKinds:
    """Words of a passage: numbers, names and others, without case."""

    def __init__(self, passage: _Passage, at: range) -> None:
        self.numbers: set[str] = set()
        self.names: set[str] = set()
        self.others: set[str] = set()
        self.is_of_the_page = False
        for index in at:
            word, start = passage.words[index], passage.places[index][0]
            if word[0].isdecimal():
                if _is_of_the_page(passage, index):
                    self.is_of_the_page = True
                else:
                    self.numbers.add(_plain_number(word))
            elif passage.text[start].isupper() and not _begins_sentence(passage.text, start):
                self.names.add(word)
            else:
                self.others.add(word)
        self.all = self.numbers | self.names | self.others


def _contradict(one: _WordKinds, other: _WordKinds, *, is_near_copy: bool, on_topic: bool) -> bool:
    if one.numbers or other.numbers:
        own = {n for n in one.numbers if not any(_rounded(n, m) for m in other.numbers)}
        others = {n for n in other.numbers if not any(_rounded(n, m) for m in one.numbers)}
        reworded = max(len(one.others - other.all), len(other.others - one.all))
        return bool(own and others) and reworded <= 1
    if not is_near_copy or one.is_of_the_page or other.is_of_the_page:
        return False
    names, other_names = one.names - other.all, other.names - one.all
    if names and other_names:
        return not _same(names, other_names)
    if not on_topic or one.all & other.all:
        return False
    if max(len(one.all), len(other.all)) > _MOST_PLAIN_WORDS:
        return False
    long, other_long = ({w for w in each.all if len(w) >= _LEAST_LETTERS} for each in (one, other))
    return bool(long and other_long) and not _same(long, other_long)


def _same(names: set[str], others: set[str]) -> bool:
    """Whether two names are spellings of one."""
    one, other = (" ".join(sorted(each))[:_MOST_COMPARED_CHARS] for each in (names, others))
    return SequenceMatcher(None, one, other).ratio() >= _SAME_NAME


def _plain_number(number: str) -> str:
    return number.replace(",", "")


def _rounded(one: str, other: str) -> bool:
    """Whether two numbers are equal, or one of them is the other rounded to fewer decimals.

    >>> _rounded("20.4", "20"), _rounded("4411", "4400")
    (True, False)
    """
    if one == other:
        return True
    if not (_AMOUNT.fullmatch(one) and _AMOUNT.fullmatch(other)):
        return False
    decimals = min(len(number.partition(".")[2]) for number in (one, other))
    return round(float(one), decimals) == round(float(other), decimals)


def _is_of_the_page(passage: _Passage, index: int) -> bool:
    """Whether a number counts versions, items of a list or footnotes, or dates the page."""
    start, end = passage.places[index]
    before = passage.text[max(start - 2, 0) : start].strip(" \t")
    return (
        before.endswith(("[", "v", "V"))
        or _VERSION.fullmatch(passage.words[index]) is not None
        or (before in ("", "\n") and _LIST_NUMBER.match(passage.text, end) is not None)
        or not _OF_THE_PAGE.isdisjoint(passage.words[max(index - _WORDS_BEFORE, 0) : index])
    )


def _begins_sentence(text: str, start: int) -> bool:
    before = text[max(start - 3, 0) : start].rstrip(" \t")
    return not before or before.endswith(_ENDS_SENTENCE)
