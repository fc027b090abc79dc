"""Small pieces of the report's HTML: figures with their ranges, tables, charts, facts.

Functions that take text for people escape it; those that take HTML say so.
"""

import html
from collections.abc import Iterable, Sequence

from calibration.report.data import Direction, PolicySettings
from ctxguard.profile import Interval

NO_DATA = "no data"


def number(value: float | None, *, signed: bool = False) -> str:
    """Three decimals, or that there is none.

    >>> number(0.12345), number(-0.0001, signed=True), number(None)
    ('0.123', '0.000', 'no data')
    """
    if value is None:
        return NO_DATA
    rounded = round(value, 3) or 0.0
    return (f"{rounded:+.3f}" if signed and rounded else f"{rounded:.3f}").replace("-", "−")


def bounds(interval: Interval, *, signed: bool = False) -> str:
    """The bounds of an interval; empty where one value has no spread or there is none."""
    if interval.lower is None or interval.upper is None:
        return ""
    return f"[{number(interval.lower, signed=signed)}, {number(interval.upper, signed=signed)}]"


def value_with_range(interval: Interval, *, signed: bool = False) -> str:
    """A figure with its interval, as HTML."""
    return (
        f"{number(interval.value, signed=signed)} "
        f'<span class="range">{bounds(interval, signed=signed)}</span>'
    )


def verdict(difference: Interval, better_when: Direction | None) -> str | None:
    """``good`` or ``bad`` where the interval excludes 0 and a way is better; None elsewhere.

    >>> verdict(Interval(value=0.2, lower=0.1, upper=0.3, n=9), "lower")
    'bad'
    """
    if better_when is None or difference.lower is None or difference.upper is None:
        return None
    if difference.lower <= 0.0 <= difference.upper:
        return None
    return "good" if (difference.lower > 0.0) == (better_when == "higher") else "bad"


def difference(interval: Interval, better_when: Direction | None) -> str:
    """A difference with its interval as HTML, coloured and named where it is beyond the noise."""
    found = verdict(interval, better_when)
    text = value_with_range(interval, signed=True)
    if found is None:
        return text
    word = "better" if found == "good" else "worse"
    return (
        f'<span class="{found}">{number(interval.value, signed=True)}</span> '
        f'<span class="range">{bounds(interval, signed=True)} {word}</span>'
    )


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str,
    *,
    marked: int | None = None,
) -> str:
    """A table that scrolls by itself where it is too wide.

    Args:
        heads: Names of the columns; those that end in ``>`` hold figures.
        rows: Cells as HTML; the first of a row is its heading.
        caption: What the figures are.
        marked: The row to stand out, from 0.
    """
    figures = [name.endswith(">") for name in heads]
    marks = [' class="n"' if aligned else "" for aligned in figures]
    head = "".join(
        f'<th scope="col"{mark}>{html.escape(name.removesuffix(">"))}</th>'
        for name, mark in zip(heads, marks, strict=True)
    )
    body = []
    for index, row in enumerate(rows):
        cells = [f'<th scope="row"{marks[0]}>{row[0]}</th>']
        cells += [f"<td{mark}>{cell}</td>" for cell, mark in zip(row[1:], marks[1:], strict=True)]
        chosen = ' class="chosen"' if index == marked else ""
        body.append(f"<tr{chosen}>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll" role="region" aria-label="{html.escape(caption)}" tabindex="0">'
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>\n"
    )


def figure(chart: str, label: str, caption: str) -> str:
    """A chart, given as HTML, with what it shows for those who see it and those who do not."""
    return (
        f'<figure><div role="img" aria-label="{html.escape(label)}">{chart}</div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>\n"
    )


def definitions(facts: Iterable[tuple[str, str]]) -> str:
    """Names and what they are."""
    rows = "".join(f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd>" for a, b in facts)
    return f'<dl class="facts">{rows}</dl>\n'


def policy_words(policy: PolicySettings) -> str:
    """What a policy keeps, in words.

    >>> policy_words(PolicySettings(kind="ratio", k=4, threshold=0.7, min_keep=1, temperature=1.0))
    'at most 4 passages, each with at least 0.7 of the top score, and at least 1'
    """
    at_most = "passage" if policy.k == 1 else f"{policy.k} passages"
    at_least = "" if policy.min_keep in (0, policy.k) else f", and at least {policy.min_keep}"
    if policy.k == policy.min_keep or policy.threshold == 0.0:
        if policy.kind == "expected_utility":
            return f"the {at_most} likeliest to be relevant"
        return f"the first {at_most}"
    if policy.kind == "expected_utility":
        return (
            f"at most {at_most}, each relevant with probability at least "
            f"{policy.threshold:.3g}{at_least}"
        )
    if policy.temperature == 1.0:
        what = f"at least {policy.threshold:g} of the top score"
    else:
        what = f"a relative score of at least {policy.threshold:g} (T = {policy.temperature:g})"
    return f"at most {at_most}, each with {what}{at_least}"


def baseline_words(baseline: str) -> str:
    """What recall loss is relative to.

    >>> baseline_words("k=10")
    'the retriever’s first 10 passages'
    """
    if baseline == "pool":
        return "the retriever’s whole pool"
    return f"the retriever’s first {baseline.removeprefix('k=')} passages"
