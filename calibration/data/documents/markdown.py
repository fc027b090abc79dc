"""Cuts Markdown at its headings, as a person reads it: without invisible markup. Pure.

Each step takes time in proportion to the text. No regular expression here has two adjacent parts
that can match the same characters.
"""

import html
import re
from collections import Counter
from collections.abc import Iterator, Sequence

_MAX_HEADING = 1_000

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]|$)")
_UNDERLINE = re.compile(r" {0,3}(=+|--+)[ \t]*")
_NO_TITLE = re.compile(r"[ \t]*(?:[-*+>|#]|\d{1,9}[.)]\s|$)")
_KEY = re.compile(r"([\w.-]+)[ \t]*[:=](?:[ \t]|$)")
_NOTE = re.compile(r" {0,3}\[//\]: ?#")

_MARK = re.compile(r"^( {0,3})(?=#|`{3}|~{3}|=+[ \t]*$|--+[ \t]*$)", re.MULTILINE)
_GUARD = re.compile(r"^( {0,3})\\(?=[#`~=-])")

_TICKS = re.compile(r"(`+)")
_LATEX = re.compile(r"\\[A-Za-z]")
_ESCAPE = re.compile(r"\\([!#*+.<>\[\]_~-])")
_ANY_ESCAPE = re.compile(r"\\([!-/:-@\[-`{-~])")
_ENTITY = re.compile(r"&(?:[A-Za-z][A-Za-z0-9]{1,30}|#\d{1,7}|#[xX][0-9A-Fa-f]{1,6});")

_LINK = re.compile(r"!?\[([^\[\]]*)\]\((?:[^()]|\([^()]*\))*\)")
_ANCHOR = re.compile(r"[ \t]\{#[\w:.-]+\}$")
_TAG = re.compile(
    r"</?(?:a|abbr|b|br|code|del|em|font|i|img|ins|kbd|mark|s|samp|small|span|strong|sub|sup|u|var)"
    r"(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)
_STRONG = re.compile(r"(?<![\\*])(\*{1,3})(?=[^\s*])([^*]*[^\s*])\1(?!\*)")
_UNDERSCORED = re.compile(r"(?<![\w\\])(_{1,3})(?=[^\s_])([^_]*[^\s_])\1(?!\w)")
_DUNDER = re.compile(r"__\w+__")

_DATA = re.compile(r"data:[\w/+.-]{0,80};base64,[A-Za-z0-9+/=%]*")
_LONG = re.compile(r"[A-Za-z0-9+/=_-]{40,}")
_HEX_DUMP = re.compile(
    r"\s*(?:[0-9A-Fa-f]{4,16}:?\s+)?(?:(?:0x)?[0-9A-Fa-f]{2,4}[ ,]+){8,}(?:\S*|\|.*\||[^\w\s].*)"
)
_PLAIN_TOKEN, _HASH = 80, 128
"""The longest runs that are kept, in characters: of base64, and of hexadecimal digits (SHA-512)."""


Section = tuple[tuple[str, ...], str]
"""The headings that lead to a section, outermost first, and the text up to the next heading.

There are no headings before the first."""


def read_markdown(markdown: str, *, is_source: bool = True) -> tuple[str, list[Section]]:
    r"""Cut Markdown at its headings; a heading without text of its own makes no section.

    Args:
        is_source: Whether a person wrote it, with front matter, comments and escapes.

    Returns:
        The title of its front matter, empty if there is none; and its sections.

    >>> read_markdown("---\ntitle: Care\n---\n# Kettle\n## Cleaning\nUse MAX\\_HEAT.")
    ('Care', [(('Kettle', 'Cleaning'), 'Use MAX_HEAT.')])
    """
    text = markdown.replace("\r\n", "\n").replace("\r", "\n")
    title, lines = _without_front_matter(text) if is_source else ("", text.split("\n"))
    found: list[Section] = []
    above: list[tuple[int, str]] = []
    own: list[str] = []

    def close() -> None:
        text = "\n".join(own).strip("\n").rstrip()
        if text.strip():
            found.append((tuple([name for _, name in above if name]), text))
        own.clear()

    def open_section(level: int, heading: str) -> None:
        close()
        while above and above[-1][0] >= level:
            above.pop()
        above.append((level, _plain(heading)))

    for line, is_code in _shown_lines(lines, comments=not is_source):
        if is_code:
            own.append(line)
            continue
        heading = _HEADING.match(line)
        underline = _UNDERLINE.fullmatch(line)
        if heading:
            open_section(len(heading[1]), _closed(line[heading.end() :]))
        elif underline and own and not _NO_TITLE.match(own[-1]):
            open_section(1 if underline[1][0] == "=" else 2, own.pop())
        else:
            own.append(_unescaped(line) if is_source else _GUARD.sub(r"\1", line))
    close()
    return title, found


def table(rows: Sequence[Sequence[str]]) -> str:
    """Write rows as a Markdown table whose first row is the header; "" if there are no rows."""
    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    lines[1:1] = ["|" + " --- |" * len(rows[0])] if lines else []
    return "\n".join(lines)


def cell(text: str) -> str:
    """Write a string as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def guarded(text: str) -> str:
    """Escape lines of plain text that Markdown would read as headings or fences."""
    return _MARK.sub(r"\1\\", text)


def without_data(text: str, counts: Counter[str]) -> str:
    """Replace encoded data (base64, hexadecimal) with an ellipsis, and count its lines."""
    kept: list[str] = []
    lines = text.split("\n")
    is_data = [_is_data_line(line) for line in lines]
    for at, line in enumerate(lines):
        beside = (at and is_data[at - 1]) or (at + 1 < len(lines) and is_data[at + 1])
        shown = _HIDDEN if is_data[at] and beside else _shortened(line)
        if shown != line:
            counts["lines of encoded data left out"] += 1
        if shown != _HIDDEN or not kept or kept[-1] != _HIDDEN:
            kept.append(shown)
    return "\n".join(kept)


_HIDDEN = "…"


def _shortened(line: str) -> str:
    if len(line) < _PLAIN_TOKEN:
        return line
    line = _DATA.sub(_HIDDEN, line) if "base64," in line else line
    return _LONG.sub(
        lambda found: _HIDDEN if _is_encoded(found[0], _PLAIN_TOKEN) else found[0], line
    )


def _is_data_line(line: str) -> bool:
    """Return whether a line among similar lines is encoded data."""
    bare = line.strip()
    if _LONG.fullmatch(bare):
        return _is_encoded(bare, 0)
    return bool(_HEX_DUMP.fullmatch(line)) and any(c in "abcdefABCDEF" for c in line)


def _is_encoded(token: str, longest: int) -> bool:
    digits = sum(c.isdigit() for c in token)
    letters = {*token} - {*"0123456789"}
    if letters <= {*"abcdef"} or letters <= {*"ABCDEF"}:
        return bool(letters) and digits > 0 and len(token) > (longest and _HASH)
    upper = sum(c.isupper() for c in token)
    lower = sum(c.islower() for c in token)
    enough = min(upper, lower) > len(token) / 5 and digits > len(token) / 25
    return enough and len(token) > longest


def _without_front_matter(text: str) -> tuple[str, list[str]]:
    """Return the title in the front matter (YAML or TOML), and the lines after it."""
    lines = text.split("\n")
    mark = lines[0].rstrip()
    if mark not in {"---", "+++"}:
        return "", lines
    ends = {mark, "..."} if mark == "---" else {mark}
    end = next((at for at, line in enumerate(lines[1:], start=1) if line.rstrip() in ends), 0)
    about = lines[1:end]
    if not end or not all(_is_about(line) for line in about):  # a rule, and text after it
        return "", lines
    title = ""
    for at, line in enumerate(about):
        key = _KEY.match(line)
        if key and key[1].casefold() == "title":
            value = line[key.end() :].strip()
            if value[:1] in {"", ">", "|"}:
                rest = about[at + 1 :]
                end_at = next((n for n, each in enumerate(rest) if each[:1].strip()), len(rest))
                value = " ".join([each.strip() for each in rest[:end_at]])
            title = " ".join(_unquoted(value).split())
            break
    return title[:_MAX_HEADING], lines[end + 1 :]


def _is_about(line: str) -> bool:
    return not line.strip() or line[0] in " \t#-[]}" or _KEY.match(line) is not None


def _unquoted(value: str) -> str:
    for quote, escaped in (('"', '\\"'), ("'", "''")):
        if len(value) > 1 and value[0] == quote:
            end = value.replace(escaped, "  ").find(quote, 1)
            if end > 0:
                return value[1:end].replace(escaped, quote)
    return value.partition(" #")[0]


def _shown_lines(lines: list[str], *, comments: bool) -> Iterator[tuple[str, bool]]:
    """Yield lines, and whether each is fenced code; comments only if they are text."""
    fence, hidden = "", False
    # A comment that is never closed is not a comment.
    last = next((at for at in range(len(lines) - 1, -1, -1) if "-->" in lines[at]), -1)
    for at, line in enumerate(lines):
        opened = None if hidden else _FENCE.match(line)
        if fence:
            yield line, True
            if opened and opened[1].startswith(fence) and not opened[2].strip():
                fence = ""
        elif opened and not ("`" in opened[1] and "`" in opened[2]):
            fence = opened[1]
            yield line, True
        elif comments:
            yield line, False
        elif hidden or ("<!--" in line and at <= last):
            shown, hidden = _outside(line, hidden, ends_later=at < last)
            if shown.strip():
                yield shown, False
        elif not _NOTE.match(line):
            yield line, False


def _outside(line: str, hidden: bool, *, ends_later: bool) -> tuple[str, bool]:
    """Return the part of a line outside comments, and whether a comment continues after it.

    One may have begun before (``hidden``), and one may end in a later line.
    """
    shown: list[str] = []
    at = n_ticks = 0
    last_end = line.rfind("-->")
    while at < len(line):
        if hidden:
            end = line.find("-->", at)
            if end < 0:
                break
            hidden, at = False, end + 3
            continue
        start = line.find("<!--", at)
        if start < 0 or not (ends_later or last_end > start):
            shown.append(line[at:])
            break
        n_ticks += line.count("`", at, start)
        is_code = n_ticks % 2 == 1
        shown.append(line[at : start + 4 * is_code])
        hidden, at = not is_code, start + 4
    return "".join(shown), hidden


def _closed(heading: str) -> str:
    """Strip a heading's closing signs, which follow a space: ``C# ##`` is C#."""
    heading = heading.strip()
    bare = heading.rstrip("#")
    return bare.rstrip() if not bare or bare[-1] in " \t" else heading


def _parts(line: str) -> Iterator[tuple[str, str]]:
    """Split a line into text and code spans, each with its marks, which are empty for text."""
    pieces = _TICKS.split(line)
    left = Counter(pieces[1::2])
    opened = ""
    span: list[str] = []
    for at, piece in enumerate(pieces):
        if at % 2:
            left[piece] -= 1
        if opened:
            if piece == opened:
                yield "".join(span), opened
                opened = ""
                span.clear()
            else:
                span.append(piece)
        elif at % 2 and left[piece]:
            opened = piece
        else:
            yield piece, ""


def _unescaped(line: str) -> str:
    """Resolve escapes and entities outside code; a line with LaTeX stays as it is."""
    if "\\" not in line and "&" not in line:
        return line
    if line.startswith(("    ", "\t")) or _LATEX.search(line):
        return line
    return "".join(
        [
            f"{marks}{text}{marks}" if marks else _ENTITY.sub(_resolved, _ESCAPE.sub(r"\1", text))
            for text, marks in _parts(line)
        ]
    )


def _resolved(entity: re.Match[str]) -> str:
    return html.unescape(entity[0]).replace("\u00a0", " ").replace("\u00ad", "")


def _plain(heading: str) -> str:
    """Return a heading's words without markup; code keeps its underscores."""
    heading = _ANCHOR.sub("", heading.strip()[:_MAX_HEADING])
    if _DUNDER.fullmatch(heading):
        return heading
    words: list[str] = []
    for text, marks in _parts(_LINK.sub(r"\1", heading)):
        if marks:
            words.append(text)
            continue
        bare = _TAG.sub("", text)
        for mark in (_STRONG, _UNDERSCORED):
            bare = mark.sub(r"\2", mark.sub(r"\2", bare))
        words.append(_ENTITY.sub(_resolved, _ANY_ESCAPE.sub(r"\1", bare)))
    return " ".join("".join(words).split())
