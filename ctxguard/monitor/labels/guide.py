"""Writes the page that tells people how to grade a file of passages. Pure.

The grades mean what they mean to the language model that judges (``judges.prompt``), or the two
could not be compared.
"""

from textwrap import fill

from ctxguard.measure.worth import Negative
from ctxguard.monitor.labels.human import ALWAYS, IF_NONE_ABOVE

_WHOLE = "the whole answer, stated clearly"
_MOST = "most of the answer, or all of it among other matters"
_PART = "a small part of the answer, or a fact that the answer needs"
_NOTHING = "does not help, even where it is about the same subject or uses the same words"

_EXAMPLES = {
    _WHOLE: "“New employees get 25 days of paid vacation a year.”",
    _MOST: "“Employees get 20 days of vacation, in the fifth year 25.”",
    _PART: "“Vacation of new employees is counted from their first day.”",
    _NOTHING: "“Vacation is requested on the form V-2.”",
}


NEGATIVES = {
    Negative.HARD_NEGATIVE: "looks like an answer, and is not: it is about the same thing, or "
    "nearly, and does not answer the query (vacation of interns)",
    Negative.DISTRACTOR: "would lead to a wrong answer: it answers the query wrongly, or for "
    "another case without saying so (last year's rule, given as the present one)",
}
"""The ways in which a passage of grade 0 may mislead as well."""

EXAMPLE_QUERY = "How much vacation do new employees get?"


def meanings(max_grade: int) -> dict[int, str]:
    """Say what each grade up to the highest means, highest first.

    >>> list(meanings(1)), list(meanings(3))
    ([1, 0], [3, 2, 1, 0])
    """
    if max_grade == 1:
        return {1: f"{_WHOLE}, or {_PART}", 0: _NOTHING}
    between = range(max_grade - 1, 1, -1)
    return {max_grade: _WHOLE, **dict.fromkeys(between, _MOST), 1: _PART, 0: _NOTHING}


def words(max_grade: int) -> dict[int, str]:
    """Name each grade in a word or two, highest first.

    >>> words(3)
    {3: 'Whole answer', 2: 'Most of it', 1: 'A part', 0: 'No help'}
    """
    short = {_WHOLE: "Whole answer", _MOST: "Most of it", _PART: "A part", _NOTHING: "No help"}
    return {grade: short.get(text, "Helps") for grade, text in meanings(max_grade).items()}


def grading_guide(file_name: str, max_grade: int) -> str:
    """Write the guide of one file, as Markdown."""
    grades = meanings(max_grade)
    table = "\n".join(
        f"| {grade} | {'it' if grade == 0 else 'it holds'} {meaning} | {example(meaning)} |"
        for grade, meaning in grades.items()
    )
    negatives = "\n".join(
        fill(f"- `{kind.value}`: {meaning}.", 100, subsequent_indent="  ")
        for kind, meaning in NEGATIVES.items()
    )
    scale = "" if max_grade == 3 else f" --max-grade {max_grade}"
    return f"""\
# How to grade {file_name}

Each row is one passage that a search engine found for the query in its row. Put into the column
`grade` how much the passage helps somebody to answer that query. Go by what the passage says, not
by its style, its source or its place in the file.

| grade | the passage | for the query “{EXAMPLE_QUERY}” |
|---|---|---|
{table}

Any grade above 0 counts as relevant. Between two grades, take the lower one.

## Which rows

The rows of one query stand together; take them from top to bottom. The column `when` says:

- `{ALWAYS}`: grade it.
- `{IF_NONE_ABOVE}`: grade it only while every passage of this query above it has the grade 0. As
  soon as one has a higher grade, leave such rows of the query empty.

Finish a query before you begin the next. You may stop after any query: the queries are in random
order. Leave the grade empty only where you cannot tell, for example because the text is missing.

## `negative`

For grade 0 only, and only if it is clear; else leave it empty.

{negatives}

## Afterwards

Change no other column, keep the columns' names, and save in the same format (as CSV: with commas
and in UTF-8). Then:

    ctxguard label import {file_name} --store URL --annotator YOUR-NAME{scale}
"""


def example(meaning: str) -> str:
    """Return a passage that shows this meaning for ``EXAMPLE_QUERY``; empty if there is none."""
    found = [example for text, example in _EXAMPLES.items() if meaning.startswith(text)]
    return found[0] if found else ""
