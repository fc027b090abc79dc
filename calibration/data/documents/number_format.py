"""Formats a number as its spreadsheet cell shows it.

Pure. Covers the format codes of ECMA-376 (Part 1, 18.8.31) for digits, dates, durations,
percentages, exponents, fractions, text, sections and conditions. Names of days and months are
English. A code that cannot be parsed leaves the number as it is.
"""

import re
from datetime import date, datetime, time, timedelta
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from functools import cache
from itertools import takewhile
from operator import eq, ge, gt, le, lt, ne

_ISO_DATE = "yyyy-mm-dd"

# The codes of consecutive numbers, by the first of them.
_RUNS = {
    1: ("0", "0.00", "#,##0", "#,##0.00"),
    5: ("$#,##0_);($#,##0)",) * 2 + ("$#,##0.00_);($#,##0.00)",) * 2,
    9: ("0%", "0.00%", "0.00E+00", "# ?/?", "# ??/??"),
    # Excel shows each country's own order of day and month; this one nobody can misread.
    14: (_ISO_DATE, "d-mmm-yy", "d-mmm", "mmm-yy"),
    18: ("h:mm AM/PM", "h:mm:ss AM/PM", "h:mm", "h:mm:ss", f"{_ISO_DATE} hh:mm"),
    27: (_ISO_DATE,) * 5 + ("h:mm", "h:mm:ss") + (_ISO_DATE,) * 3,
    37: ("#,##0_);(#,##0)",) * 2 + ("#,##0.00_);(#,##0.00)",) * 2,
    41: ("#,##0_);(#,##0);-", "$#,##0_);($#,##0);-"),
    43: ("#,##0.00_);(#,##0.00);-", "$#,##0.00_);($#,##0.00);-"),
    45: ("mm:ss", "[h]:mm:ss", "mm:ss.0", "##0.0E+0", "@"),
    50: (_ISO_DATE,) * 9,
}
BUILT_IN = {first + at: code for first, codes in _RUNS.items() for at, code in enumerate(codes)}
"""The codes of the built-in format numbers; any other number means General."""

_TOKEN = re.compile(
    r'"[^"]*"|\\.|_.|\*.|\[[^\]]*\]|General|AM/PM|A/P|[yY]+|[mM]+|[dD]+|[hH]+|[sS]+|\.0+(?=[^0#?]|$)'
    r"|[eE][+-]|.",
    re.DOTALL | re.IGNORECASE,
)
_CONDITION = re.compile(r"\[(<=|>=|<>|<|>|=)(-?[\d.]{1,30})\]")
_ELAPSED = re.compile(r"\[(h+|m+|s+)\]", re.IGNORECASE)
_MAX_DAY = 2_958_466
_MAX_CODE = 255
_PLACES = frozenset("0#?")

_STYLES = {
    "y": ("%y", "%y", "%Y"),
    "month": ("%-m", "%m", "%b", "%B"),
    "d": ("%-d", "%d", "%a", "%A"),
    "h": ("%-H", "%H"),
    "hour of twelve": ("%-I", "%I"),
    "m": ("%-M", "%M"),
    "s": ("%-S", "%S"),
}
"""The ``strftime`` codes for parts of a date, by the number of letters in the format code."""
_ELAPSED_SECONDS = {"h": 3600, "m": 60, "s": 1}

_COMPARE = {"<": lt, "<=": le, ">": gt, ">=": ge, "=": eq, "<>": ne}


def general(value: float) -> str:
    """Write a number without a format: whole numbers in full, others in ten digits.

    >>> general(1067.0), general(0.1 + 0.2), general(4.7e-11)
    ('1067', '0.3', '4.7E-11')
    """
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.10g}".upper()


def shown(value: float, code: str, *, from_1904: bool = False) -> str:
    """Write a number in a format; a date is given as days since the end of 1899, or since 1904.

    >>> shown(1.1, "0.00"), shown(45366, "dd.mm.yyyy"), shown(-1234.5, '#,##0.00" €"')
    ('1.10', '15.03.2024', '-1,234.50 €')
    """
    if code == "General" or len(code) > _MAX_CODE:
        return general(value)
    try:
        tokens, number = _section(value, _sections(code))
        if any(_is_date(each) for each in tokens):
            return _date(number, tokens, from_1904=from_1904)
        return _number(number, tokens)
    except (ArithmeticError, ValueError):
        return general(value)


def shown_text(text: str, code: str) -> str:
    """Write a string unchanged, unless the format hides it or puts words around it."""
    parts = _sections(code) if len(code) <= _MAX_CODE else []
    if len(parts) < 4 or text == "":
        return text
    return "".join([text if each == "@" else _literal(each) for each in parts[3]])


@cache
def _sections(code: str) -> list[list[str]]:
    sections: list[list[str]] = [[]]
    for part in _TOKEN.findall(code):
        if part == ";":
            sections.append([])
        else:
            sections[-1].append(part)
    return sections


def _section(value: float, sections: list[list[str]]) -> tuple[list[str], float]:
    """Choose the section for a number; the one for negative numbers drops their sign."""
    conditions = [_CONDITION.fullmatch(each[0]) if each else None for each in sections]
    if any(conditions):
        for tokens, condition in zip(sections, conditions, strict=True):
            if condition is None or _COMPARE[condition[1]](value, float(condition[2])):
                return tokens, abs(value) if condition and value < 0 else value
        return sections[-1], value
    if value < 0 and len(sections) > 1:
        return sections[1], -value
    if value == 0 and len(sections) > 2:
        return sections[2], value
    return sections[0], value


def _literal(token: str) -> str:
    """Return the text of a literal token."""
    if token[0] == '"':
        return token[1:-1]
    if token[0] == "\\":
        return token[1:]
    if token[0] == "[":
        return token[2:-1].partition("-")[0] if token.startswith("[$") else ""
    return "" if token[0] in "_*" and len(token) > 1 else token


def _is_date(token: str) -> bool:
    return token[0] in "yYmMdDhHsS" or token in {"AM/PM", "A/P"} or bool(_ELAPSED.fullmatch(token))


def _date(value: float, tokens: list[str], *, from_1904: bool) -> str:
    if not 0 <= value < _MAX_DAY:
        raise ValueError(value)
    places = max([len(each) - 1 for each in tokens if each.startswith(".0")], default=0)
    seconds = float(round(value * 86400, min(places, 3)))
    # The first spreadsheets believed in a 29th of February 1900.
    first = date(1904, 1, 1) if from_1904 else date(1899, 12, 30 if value >= 60 else 31)
    when = datetime.combine(first, time()) + timedelta(seconds=seconds)
    kinds = [each.strip("[")[0].lower() if _is_date(each) else "" for each in tokens]
    out: list[str] = []
    for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if not kind:
            is_part = token.startswith(".0")
            out.append(f"{seconds % 1:.{places}f}"[1:] if is_part else _literal(token))
        elif token[0] == "[":
            out.append(f"{int(seconds // _ELAPSED_SECONDS[kind]):0{len(token) - 2}}")
        elif kind == "a":
            half = "AM" if when.hour < 12 else "PM"
            out.append(half if len(token) == 5 else half[0])
        else:
            before = next(filter(None, reversed(kinds[:at])), "")
            after = next(filter(None, kinds[at + 1 :]), "")
            part = kind
            if kind == "m" and before != "h" and after != "s":
                part = "month"
            elif kind == "h" and "a" in kinds:
                part = "hour of twelve"
            styles = _STYLES[part]
            text = when.strftime(styles[min(len(token), len(styles)) - 1])
            out.append(text[0] if part == "month" and len(token) == 5 else text)
    return "".join(out).strip()


def _number(value: float, tokens: list[str]) -> str:
    if any(each.casefold() == "general" for each in tokens):
        body = "".join(
            [general(abs(value)) if t.casefold() == "general" else _literal(t) for t in tokens]
        )
        return ("-" if value < 0 else "") + body.strip()
    digits = [at for at, each in enumerate(tokens) if each[0] in "0#?" or each.startswith(".0")]
    if not digits:
        return "".join([general(value) if t == "@" else _literal(t) for t in tokens]).strip()
    size = abs(Decimal(repr(value))) * 100 ** tokens.count("%")
    sign = "-" if value < 0 else ""
    if "/" in tokens:
        return sign + _fraction(size, tokens)
    for at, each in enumerate(tokens):
        if each.upper() in {"E+", "E-"}:
            return sign + _exponent(size, tokens, at)
    flat = _flat(tokens)
    last = max(at for at, each in enumerate(flat) if each in _PLACES)
    scale = sum(1 for _ in takewhile(",".__eq__, flat[last + 1 :]))
    shown = _filled(size / 1000**scale, flat)
    return (sign if re.search("[1-9]", shown) else "") + shown.strip()


def _flat(tokens: list[str]) -> list[str]:
    """Return digits, points and commas one by one, and literals as the marked text they show."""
    out: list[str] = []
    for token in tokens:
        if token.startswith(".0"):
            out.extend(token)
        elif token in {"0", "#", "?", ".", ","}:
            out.append(token)
        else:
            out.append("=" + _literal(token))
    return out


def _filled(size: Decimal, flat: list[str]) -> str:
    """Fill the places of a pattern with the digits of a number."""
    point = flat.index(".") if "." in flat else len(flat)
    whole, part = flat[:point], flat[point + 1 :]
    n_places = sum(each in _PLACES for each in part)
    rounded = size.quantize(Decimal(1).scaleb(-n_places), ROUND_HALF_UP)
    left, _, right = f"{rounded:f}".partition(".")
    left = left.lstrip("0")
    places = [at for at, each in enumerate(whole) if each in _PLACES]
    grouped = any(each == "," for each in whole[places[0] : places[-1] + 1]) if places else False
    out: list[str] = []
    used, first = 0, places[0] if places else -1
    for at in range(len(whole) - 1, -1, -1):
        each = whole[at]
        if each[0] == "=":
            out.append(each[1:])
        elif each in _PLACES:
            rest = left[: len(left) - used] if at == first else left[: len(left) - used][-1:]
            for digit in reversed(rest or ("0" if each == "0" else "")):
                if grouped and used and used % 3 == 0:
                    out.append(",")
                out.append(digit)
                used += 1
    text = "".join(reversed(out)) if places else left + "".join(reversed(out))
    if point == len(flat):
        return text
    digits, shown, tail = iter(right), [], ""
    for each in part:
        if each in _PLACES:
            digit = next(digits)
            tail += digit
            if each == "0" or digit != "0":
                shown.append(tail)
                tail = ""
        elif each[0] == "=":
            shown.append(each[1:])
    return f"{text}.{''.join(shown)}" if shown else f"{text}."


def _exponent(size: Decimal, tokens: list[str], at: int) -> str:
    mantissa, after = _flat(tokens[:at]), tokens[at + 1 :]
    point = mantissa.index(".") if "." in mantissa else len(mantissa)
    step = max(1, sum(each in _PLACES for each in mantissa[:point]))
    power = (size.adjusted() // step) * step if size else 0
    width = sum(each == "0" for each in after)
    sign = "-" if power < 0 else "+" if tokens[at][1] == "+" else ""
    return f"{_filled(size.scaleb(-power), mantissa).strip()}E{sign}{abs(power):0{width}}"


def _fraction(size: Decimal, tokens: list[str]) -> str:
    bar = tokens.index("/")
    below = "".join([each for each in tokens[bar + 1 :] if each in "0#?123456789"])
    whole_shown = " " in tokens[:bar]
    if below.isdigit() and below.strip("0"):
        bottom = int(below)
        exact = Fraction(round(size * bottom), bottom)
    else:
        exact = Fraction(size).limit_denominator(10 ** max(1, min(len(below), 4)) - 1)
        bottom = exact.denominator
    whole = int(exact) if whole_shown else 0
    top = int((exact - whole) * bottom)
    if not top and whole_shown:
        return str(whole)
    return f"{whole} {top}/{bottom}" if whole else f"{top}/{bottom}"
