"""Renders passages for the model: free of hidden characters, each inside its own block.

Nothing here runs on the request path unless a token budget is set: ``Context.text`` renders when
it is read. Pure: no I/O, no clock, no logging.
"""

import html
import re
from collections.abc import Iterable, Sequence
from string import Formatter
from typing import NamedTuple

from ctxguard.core.types import Passage
from ctxguard.errors import ConfigurationError

DEFAULT_TEMPLATE = '<passage rank="{rank}" id="{passage_id}">\n{title}\n{text}\n</passage>'
DEFAULT_SEPARATOR = "\n"

FIELDS = ("rank", "passage_id", "title", "text")

_SHORTEST_FENCE = 3
"""The shortest closing literal to count as a delimiter; a bracket, say, is too common in text."""

# Unicode's Default_Ignorable_Code_Point in two parts: characters that no script needs, which are
# removed everywhere (with the annotation marks, which are ignorable but in name) …
_NEVER_SHOWN = (
    "\u00ad\u061c\u17b4\u17b5\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0080-\U000e00ff\U000e01f0-\U000e0fff"
)
# … and characters that some writing needs: joiners, selectors, fillers, tags of flags.
_SELECTORS = "\ufe00-\ufe0f\U000e0100-\U000e01ef"
_JOINERS = "\u200c\u200d"
_HIDDEN = (
    f"[{_JOINERS}{_SELECTORS}\u034f\u115f\u1160\u180b-\u180f\u3164\uffa0\U000e0000-\U000e007f]"
)

_REMOVED = re.compile(f"[\\x00-\\x08\\x0e-\\x1b\\x1f\\x7f-\\x84\\x86-\\x9f{_NEVER_SHOWN}]+")
_BREAK = re.compile(r"[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

_SYMBOLS = (
    "\u00a9\u00ae\u203c\u2049\u2122\u2139\u2190-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff"
)
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Arabic, Syriac, N'Ko and Mandaic; the scripts of India; Tibetan, Myanmar, Khmer and Mongolian; the
# scripts that were encoded beside them later.
_JOINED = (
    "\u0600-\u0604\u0610-\u061b\u061d-\u08ff\u0900-\u0dff\u0f00-\u109f\u1780-\u180a\u1820-\u18aa"
    "\u1a20-\u1aad\u1b00-\u1c4f\ua840-\ua8ff\ua980-\uaaff\uabc0-\uabff\ufb50-\ufdff\ufe70-\ufefc"
    "\U00010a00-\U00010aff\U00011000-\U000114ff\U0001e900-\U0001e95f"
)
_JAMO, _COMPATIBLE, _HALF_WIDTH = "\u1100-\u115e", "\u3131-\u3163\u3165-\u318e", "\uffa1-\uffdc"
_VOWELS, _FINALS = "\u1161-\u11a7\ud7b0-\ud7c6", "\u11a8-\u11ff\ud7cb-\ud7fb"
_HEBREW = "\u0591-\u05f4"
# The three subdivision flags that Unicode recommends (England, Scotland, Wales) are spelled in
# tag characters; any other use of them is invisible text.
_FLAGS = [
    "\U0001f3f4" + "".join(chr(0xE0000 + ord(letter)) for letter in flag) + "\U000e007f"
    for flag in ("gbeng", "gbsct", "gbwls")
]
_NEEDED = (
    # A picture's style, an ideograph's form (Unicode's database of those has 32 at most: with more,
    # each could carry a letter), a keycap, pictures joined to one.
    f"(?<=[{_SYMBOLS}][\ufe00\ufe0e\ufe0f])",
    f"(?<=[{_HAN}][\ufe00-\ufe02\U000e0100-\U000e011f])",
    "(?<=[\u3001\u3002\uff01-\uff1f][\ufe00\ufe01])",
    "(?<=[0-9#*]\ufe0f)(?=\u20e3)",
    f"(?:(?<=[{_SYMBOLS}]\u200d)|(?<=[{_SYMBOLS}]\ufe0f\u200d))(?=[{_SYMBOLS}])",
    *[f"(?<={flag[:end]})(?={flag[end:]})" for flag in _FLAGS for end in range(2, len(flag) + 1)],
    # Whether letters join; also at a word's end, as in Malayalam and in Persian abbreviations.
    f"(?<=[{_JOINED}][{_JOINERS}])(?!{_HIDDEN}*+[A-Za-z0-9])",
    # Mongolian letters' forms, and a Hebrew text's order of points.
    "(?<=[\u1820-\u18aa][\u180b-\u180d\u180f])|(?<=[\u1820-\u18aa]\u180e)(?=[\u1820-\u18aa])",
    f"(?<=[{_HEBREW}]\u034f)(?=[{_HEBREW}])",
    # The missing letters of a Korean syllable.
    f"(?<=\u115f)(?=[{_VOWELS}]|\u1160[{_FINALS}])",
    f"(?<=[{_JAMO}]\u1160)|(?<=\u115f\u1160)(?=[{_FINALS}])",
    f"(?<=\u3164)(?=[{_COMPATIBLE}])|(?<=[{_COMPATIBLE}]\u3164)",
    f"(?<=\uffa0)(?=[{_HALF_WIDTH}])|(?<=[{_HALF_WIDTH}]\uffa0)",
)
_UNNEEDED = re.compile(f"{_HIDDEN}(?!{'|'.join(_NEEDED)})")

_UNNEEDED_RUN = re.compile(f"(?:{_UNNEEDED.pattern})+")

# A model reads "< /passage" like "</passage": characters that may stand between and still close,
# and those that may stand inside a name, where a space would end it.
_BLANK = "\u2800"
_GAP = rf"(?:[\s{_BLANK}]|{_HIDDEN})*+"
_INSIDE = rf"(?:[\n\t{_BLANK}]|{_HIDDEN})*+"
_TAG = re.compile(r"</?([A-Za-z][\w:.-]*)")
_OPEN_TAG = re.compile(r"</?[A-Za-z][^<>]*\Z")


def sanitise(text: str) -> str:
    """Remove the characters that a person cannot see but a model can.

    Removed: control characters except newline and tab, and all that Unicode calls Default_Ignorable
    (bidirectional marks, zero-width and filling characters, joiners, variation selectors, tag
    characters, ...), except a single one where writing needs it: between the pictures of an emoji
    and after one, in the flags of England, Scotland and Wales, between or after letters of scripts
    that join them (Arabic, Persian, the scripts of India, ...), after an ideograph, in Korean,
    Mongolian and Hebrew. Other line breaks (carriage return, form feed, U+2028, ...) become a
    newline, and a lone surrogate, which no encoding can carry, becomes U+FFFD. Idempotent, and
    linear in the length of the text.

    >>> sanitise("ab\\u202ec\\x00d\\r\\ne")
    'abcd\\ne'
    """
    if text.isascii() and text.isprintable():
        return text
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    text = _BREAK.sub("\n", _REMOVED.sub("", text))
    if text.isascii():
        return text
    return _UNNEEDED.sub("", LONE_SURROGATE.sub("\ufffd", text))


def one_line(text: str) -> str:
    """Sanitise a text and join its lines with spaces, for instance for a terminal.

    >>> one_line("a\\x1b[31mb\\n  c")
    'a[31mb c'
    """
    return " ".join(sanitise(text).split())


def reveal(text: str) -> str:
    """Mark the characters that ``sanitise`` removes, for a person to inspect.

    >>> reveal("ab\\u202ec"), reveal("d\\U000e0061\\U000e0062")
    ('ab⟨U+202E⟩c', 'd⟨2 hidden characters⟩')
    """
    marked = _BREAK.sub("\n", _REMOVED.sub(_mark, text.replace("\r\n", "\n")))
    return _UNNEEDED_RUN.sub(_mark, LONE_SURROGATE.sub("\ufffd", marked))


def _mark(run: re.Match[str]) -> str:
    hidden = run[0]
    return f"⟨{len(hidden)} hidden characters⟩" if len(hidden) > 1 else f"⟨U+{ord(hidden):04X}⟩"


class _Value(NamedTuple):
    """A template field to be filled in."""

    name: str
    in_tag: bool


# A delimiter stands in the output as written; what lies between two is escaped as a whole, so
# that a title and a text cannot make a delimiter together.
_Span = tuple["str | _Value", ...]


class Template:
    """The rendering of a passage: literal text with named fields.

    The fields are ``{rank}``, ``{passage_id}``, ``{title}`` and ``{text}``, in exactly this form:
    no attributes, indices, conversions or formats. ``{rank}`` is the 1-based place in
    the context as presented, so that a citation of passage 3 is ``context.passages[2]``. Write
    braces as ``{{`` and ``}}``. A line whose only field is ``{title}`` is left out if a passage has
    no title.

    The delimiters are the template's markup tags (``<passage``, ``</passage``). In a template that
    closes its block otherwise, as with ``[[END]]``, they are the literals before the first field
    and after the last one, and the separator, where they have three characters or more. No value
    can contain a delimiter: ``<`` before a tag's name is written ``&lt;``, and another delimiter is
    broken by a backslash after its first character. A template that closes nothing has nothing to
    protect. Fields inside a tag are escaped as attributes.

    Args:
        template: The text with fields; ``{text}`` must be among them.
        separator: The text between two passages.

    Raises:
        ConfigurationError: at construction, for a template that cannot work; it says why.

    >>> Template("[{rank}] {text}").render([Passage("a", "one"), Passage("b", "two")])
    '[1] one\\n[2] two'
    """

    def __init__(
        self, template: str = DEFAULT_TEMPLATE, separator: str = DEFAULT_SEPARATOR
    ) -> None:
        parts = _parse(template)
        if not any(isinstance(part, _Value) and part.name == "text" for part in parts):
            raise ConfigurationError(
                f"the template {template!r} has no {{text}} field, so no passage's text "
                "would reach the model"
            )
        # A space between two literals, so that they do not read as one tag's name.
        literals = " ".join([part for part in parts if isinstance(part, str)])
        tags = sorted({name.lower() for name in _TAG.findall(literals)})
        fences = [] if tags else _fences(parts, separator)
        for fence in fences:
            if "\\" in fence:
                raise ConfigurationError(
                    f"the delimiter {fence!r} of the template holds a backslash, which "
                    "escapes delimiters inside passages; use another delimiter"
                )
        untitled = _parse(
            "".join(
                line
                for line in template.splitlines(keepends=True)
                if [part.name for part in _parse(line) if isinstance(part, _Value)] != ["title"]
            )
        )
        delimiter = re.compile(
            "|".join([f"</?{re.escape(tag)}" for tag in tags] + [re.escape(f) for f in fences])
            or r"(?!)",
            re.IGNORECASE if tags else 0,
        )
        names_pattern = "|".join(map(_spelled, tags))
        self.template, self._separator = template, separator
        self._titled, self._untitled = _spans(parts, delimiter), _spans(untitled, delimiter)
        self._tags = self._fences = None
        if tags:
            self._tags = re.compile(f"<(?={_GAP}/?+{_GAP}(?:{names_pattern}))", re.IGNORECASE)
        if fences:
            self._fences = re.compile(
                "|".join(f"{re.escape(f[0])}(?={_INSIDE}{_spelled(f[1:])})" for f in fences)
            )

    def render(self, passages: Iterable[Passage], *, clean: bool = True) -> str:
        """Render passages in the order given, with the separator between them.

        ``clean`` sanitises the values and escapes delimiters; disable it for trusted text only.
        """
        return self._separator.join(
            [
                self.render_one(passage, rank, clean=clean)
                for rank, passage in enumerate(passages, start=1)
            ]
        )

    def render_one(self, passage: Passage, rank: int, *, clean: bool = True) -> str:
        """Render one passage at 1-based place ``rank``, without separator."""
        # str(): an id or a title of another type must not cost the reader the passage.
        values = {
            "rank": str(rank),
            "passage_id": str(passage.passage_id),
            "title": str(passage.title or ""),
            "text": passage.text,
        }
        if clean:
            values = {name: sanitise(value) for name, value in values.items()}
        pieces = []
        for part in self._titled if values["title"] else self._untitled:
            if isinstance(part, str):
                pieces.append(part)
                continue
            span = "".join(
                [
                    piece
                    if isinstance(piece, str)
                    else _attribute(values[piece.name])
                    if clean and piece.in_tag
                    else values[piece.name]
                    for piece in part
                ]
            )
            pieces.append(self._escaped(span) if clean else span)
        return "".join(pieces)

    def _escaped(self, span: str) -> str:
        if self._tags is not None:
            span = self._tags.sub("&lt;", span)
        if self._fences is not None:
            span = self._fences.sub(lambda match: match[0] + "\\", span)
        return span


def _parse(template: str) -> list[str | _Value]:
    if not isinstance(template, str):
        raise ConfigurationError(f"the template {template!r} must be text with fields")
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigurationError(
            f"the template {template!r} cannot be read: {error}; write a brace as {{{{ or }}}}"
        ) from None
    parts: list[str | _Value] = []
    before = ""
    for literal, name, spec, conversion in parsed:
        if literal:
            before += literal
            if parts and isinstance(parts[-1], str):  # a literal is split at doubled braces
                parts[-1] += literal
            else:
                parts.append(literal)
        if name is None:
            continue
        if name not in FIELDS or spec or conversion:
            written = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ConfigurationError(
                f"the template's field {{{written}}} is unknown; use "
                + ", ".join(f"{{{known}}}" for known in FIELDS)
                + ", without attributes, conversions or formats"
            )
        in_tag = _OPEN_TAG.search(before) is not None
        parts.append(_Value(name, in_tag))
    return parts


def _fences(parts: Sequence[str | _Value], separator: str) -> list[str]:
    """Return the literals that open and close a block without tags; empty if none closes it."""
    opening = parts[0].strip() if isinstance(parts[0], str) else ""
    closing = parts[-1].strip() if isinstance(parts[-1], str) else ""
    between = separator.strip()
    if len(closing) < _SHORTEST_FENCE and len(between) < _SHORTEST_FENCE:
        return []
    return sorted({f for f in (opening, closing, between) if len(f) >= _SHORTEST_FENCE})


def _spelled(delimiter: str) -> str:
    """Return a pattern that matches a delimiter even with invisible characters inside."""
    return _INSIDE.join(map(re.escape, re.sub(f"[\n\t{_BLANK}]", "", delimiter)))


def _spans(parts: Sequence[str | _Value], delimiter: re.Pattern[str]) -> tuple[str | _Span, ...]:
    """Split the template into delimiters (strings) and the spans between them."""
    spans: list[str | _Span] = []
    current: list[str | _Value] = []
    for part in parts:
        if isinstance(part, _Value):
            current.append(part)
            continue
        end = 0
        for match in delimiter.finditer(part):
            current.append(part[end : match.start()])
            spans += [tuple(current), match[0]]
            current, end = [], match.end()
        current.append(part[end:])
    return (*spans, tuple(current))


def _attribute(value: str) -> str:
    return html.escape(" ".join(value.split()), quote=True)
