"""Holds the rules that find secrets, one for each form, linear in the length of the text.

Linear by construction: an unbounded repeat is possessive, covers one class of characters, and
either nothing after it can fail, or it can begin only where a run of its class begins. So each
character is read at most a constant number of times. The rules for keys are in ``keys``. Pure: no
I/O, no clock, no logging.
"""

import ipaddress
import re
import unicodedata
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of secret a rule finds; its value in brackets replaces the secret."""

    KEY = "key"
    EMAIL = "e-mail"
    IBAN = "iban"
    CARD = "card"
    PHONE = "phone"
    IP = "ip"

    @property
    def placeholder(self) -> str:
        """The replacement for this kind of secret."""
        return f"[{self.value}]"


class Rule(NamedTuple):
    """One form of a secret.

    Attributes:
        pattern: Matches it, or a candidate for it.
        replace: The replacement of a match; the match itself if a check finds no secret in it.
        hints: Every lower-cased text with a match contains one of these, so that most texts need no
            search; empty if there are none.
        reach: How many characters before a hint a match may begin; None if that is unknown.
    """

    kind: Kind
    pattern: re.Pattern[str]
    replace: Callable[[re.Match[str]], str]
    hints: tuple[str, ...] = ()
    reach: int | None = None


_ZERO_WIDTH = r"\u00ad\u200b-\u200d\u2060\ufeff"
_SPACES = r" \u00a0\u2000-\u200a\u202f\u3000"
_HYPHENS = r"\-\u2010-\u2015\u2212\uff0d"
_SEPARATORS = rf"{_SPACES}{_HYPHENS}{_ZERO_WIDTH}."
_GAP = rf"[{_SEPARATORS}]"
_WIDE_GAP = rf"[{_SEPARATORS}()/]"

# Scripts up to here put spaces between words. Chinese, Japanese and Korean may not, and the
# words around an address are not part of it.
_SPACED = rf"A-Za-z0-9_\u00c0-\u1fff\-{_ZERO_WIDTH}"
# Vowel signs and accents, which \w leaves out and the domains of many scripts need.
_ANY = rf"\w\u0300-\u036f\u0900-\u0dff\-{_ZERO_WIDTH}"


def _email_pattern(letters: str) -> re.Pattern[str]:
    local = rf"[{letters}.+&]"
    return re.compile(
        rf"(?<!{local}){local}++(?:[@＠]|%40)(?=[{letters}]{{1,63}}[.．。])[{letters}.．。]++"
    )


def _email(match: re.Match[str]) -> str:
    address = match[0]
    labels = re.split("[.．。]", re.split("[@＠]|%40", address)[1])
    # The domain's end is a word; in ``library@1.2.3`` it is a number. ``git@host:a/b`` is a path.
    if not any(_is_top_level(label) for label in labels[1:]) or _PATH_AFTER.match(
        match.string, match.end()
    ):
        return address
    after = len(address.rstrip(".．。-"))
    return Kind.EMAIL.placeholder + address[after:]


_PATH_AFTER = re.compile(r":[\w.~\-]{1,64}/")


def _is_top_level(label: str) -> bool:
    return label.startswith("xn--") or (len(label) > 1 and not any(map(str.isdigit, label)))


# Wider than a phone's, because a card's digits prove themselves.
_CARD_SEPARATORS = rf"{_SEPARATORS}\t/_,:|*\"'\u00b7\u2022\u2018-\u201d"
_DIGIT_RUN = re.compile(rf"(?<![\d{_CARD_SEPARATORS}])[\d{_CARD_SEPARATORS}]{{13,}}+")
_DIGITS = re.compile(rf"\d[\d{_ZERO_WIDTH}]*+")
_CARD = re.compile(
    r"220[0-4]\d{12}|4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}"
    r"|3[47]\d{13}|3[0689]\d{12,17}|35\d{14,17}|6[0245]\d{14,17}|(?:50|5[6-9]|6[13679])\d{14,17}"
)
_LONGEST_GAP = 4
_SHORTEST_GROUP = 3
_LONGEST_CARD = 19


def _plain_digits(text: str) -> str:
    """Write the decimal digits of any script in a text as 0 to 9."""
    if text.isascii():
        return text
    return "".join([str(unicodedata.decimal(sign)) for sign in text if sign.isdecimal()])


def is_card(digits: str) -> bool:
    """Return whether digits are a payment card's: issuer range, length and Luhn check.

    >>> is_card("4111111111111111"), is_card("4111111111111112"), is_card("0000000000000000")
    (True, False, False)
    """
    if _CARD.fullmatch(digits) is None:
        return False
    doubled = [sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2]]
    return (sum(map(int, digits[::-2])) + sum(doubled)) % 10 == 0


def _cards(match: re.Match[str]) -> str:
    """Replace card numbers in a run of digits and separators: 4-4-4-4, 4-6-5, or one group."""
    run = match[0]
    groups = [(*found.span(), _plain_digits(found[0])) for found in _DIGITS.finditer(run)]
    pieces, written, index = [], 0, 0
    while index < len(groups):
        last = _last_group_of_card(groups, index)
        if last is None:
            index += 1
            continue
        pieces += [run[written : groups[index][0]], Kind.CARD.placeholder]
        written, index = groups[last][1], last + 1
    return "".join([*pieces, run[written:]])


def _last_group_of_card(groups: list[tuple[int, int, str]], first: int) -> int | None:
    digits, end, found = "", groups[first][0], None
    for index in range(first, len(groups)):
        start, next_end, group = groups[index]
        digits += group
        if (
            len(group) < _SHORTEST_GROUP
            or start - end > _LONGEST_GAP
            or len(digits) > _LONGEST_CARD
        ):
            break
        end = next_end
        if is_card(digits):
            found = index
    return found


_IBAN = re.compile(
    r"(?<![^\W_])(?:[A-Z]{2}|[a-z]{2})\d{2}"
    rf"(?:{_GAP}?[A-Za-z0-9]{{4}}){{2,7}}(?:{_GAP}?[A-Za-z0-9]{{1,3}})?(?![^\W_])"
)
_IBAN_GROUP = re.compile(r"[A-Za-z0-9]+")


def is_iban(text: str) -> bool:
    """Return whether a text has an IBAN's form and passes its check, ISO 7064 mod 97-10.

    >>> is_iban("DE89370400440532013000"), is_iban("DE88370400440532013000")
    (True, False)
    """
    if re.fullmatch("[A-Za-z]{2}[0-9]{2}[A-Za-z0-9]{11,30}", text) is None:
        return False
    return int("".join([str(int(sign, 36)) for sign in text[4:] + text[:4]])) % 97 == 1


def _iban(match: re.Match[str]) -> str:
    """Replace the IBAN in a match, which may include words of four letters around it."""
    text = match[0]
    spans = [found.span() for found in _IBAN_GROUP.finditer(text)]
    for first, (start, _) in enumerate(spans):
        for last in range(len(spans) - 1, first - 1, -1):
            groups = spans[first : last + 1]
            if is_iban("".join([text[begin:end] for begin, end in groups])):
                return text[:start] + Kind.IBAN.placeholder + text[groups[-1][1] :]
    return text


# Of one line's number: full stops stand in thousands and versions.
_LINE_GAP = rf"[{_SPACES}{_HYPHENS}{_ZERO_WIDTH}]"

_DATE = r"\d{1,2}[./\-]\d{1,2}[./\-](?:\d{4}|\d{2})(?![./\-]?\d)"
_INTERNATIONAL = re.compile(
    rf"(?<![\w+])(?:[+＋]{_WIDE_GAP}{{0,2}}|(?<!\d[.,])00)(?!0)\d(?:{_WIDE_GAP}{{0,3}}\d){{7,14}}(?!\d)"
)
_NATIONAL = re.compile(
    rf"(?<![\w.,/+\-])(?!{_DATE})(?:"
    # With the 0 that many countries dial first.
    rf"\(?0[1-9](?:{_WIDE_GAP}{{0,3}}\d){{7,10}}"
    # North America, 3-3-4.
    rf"|(?:1{_GAP}{{1,2}})?(?:\([2-9]\d\d\){_GAP}{{0,2}}|[2-9]\d\d{_GAP})\d{{3}}{_GAP}\d{{4}}"
    # An area code in brackets.
    rf"|\(\d{{2,3}}\){_GAP}{{0,2}}\d{{3,5}}{_GAP}(?:\d{{3,5}}|\d\d{_GAP}\d\d)"
    # Russia, 8-3-3-2-2, mobile numbers also without a gap.
    rf"|8{_LINE_GAP}{{0,2}}(?:\(\d{{3}}\){_LINE_GAP}{{0,2}}|\d{{3}}{_LINE_GAP})"
    rf"\d{{3}}{_LINE_GAP}?\d\d{_LINE_GAP}?\d\d|89\d{{9}}"
    # Poland and Spain: 2-3-2-2, 3-2-2-2, and 3-3-3 where mobile numbers begin so; no part of a
    # row of numbers.
    rf"|(?<!\d{_LINE_GAP})(?:[1-9]\d{_LINE_GAP}\d{{3}}{_LINE_GAP}\d\d{_LINE_GAP}\d\d"
    rf"|[6-9]\d\d{_LINE_GAP}\d\d{_LINE_GAP}\d\d{_LINE_GAP}\d\d"
    rf"|(?:[679]\d|45|5[0137]|8[018])\d{_LINE_GAP}\d{{3}}{_LINE_GAP}\d{{3}})(?!{_GAP}?\d)"
    r")(?!\w|[.,/:\-]\d)"
)
_LABELLED = re.compile(
    r"(?i)(?P<name>(?:(?<![^\W\d_])(?<!\.)(?:tel(?:ephone|efon)?|phone|mobile?|cell|fax|whatsapp|handy"
    r"|тел(?:ефон)?|t[eé]l[eé]phone|tel[eé]fono)|手机|手機|电话|電話|전화)"
    r"(?:[ \-](?:no|number))?[\"']?\.?\s{0,2}(?:[:：=]|is)?\s{0,2}[\"']?)"
    rf"\(?\d(?:{_WIDE_GAP}{{0,3}}\d){{5,14}}(?!\d)"
)


def _phone(_: re.Match[str]) -> str:
    return Kind.PHONE.placeholder


def _labelled_phone(match: re.Match[str]) -> str:
    return match["name"] + Kind.PHONE.placeholder


_QUAD = r"(?:\d{1,3}\.){3}\d{1,3}(?![\w.]{1,2}\d|-\w)"
_IP = re.compile(
    rf"(?i)(?<![\w.:])(?:{_QUAD}"
    rf"|(?:::|(?=[0-9a-f:]{{0,39}}\d)[0-9a-f]{{1,4}}:)(?:[0-9a-f]{{0,4}}:){{0,6}}"
    rf"(?:{_QUAD}|[0-9a-f]{{0,4}}(?![\w:])))"
)
_NOBODYS = {"0", "127", "255"}
"""First numbers of addresses that belong to no device: unspecified, loopback, masks."""
# A version has four numbers too; a word before it says so, or is a product's name.
_VERSIONED = re.compile(
    r"(?i:(?<!\w)v|version|(?<!\w)(?:ver|release|firmware|section|chapter|clause|figure|fig\.|table"
    r"|item|part|build|update|driver|kernel|oid|§|annex|article|rule|step))[\s(\"'=:]{0,3}\Z"
    r"|(?<![\w/\-])(?!(?:IP|From|To|By|At|Host|Server|Client|Address|Peer|Source|Remote|Ping|Node)\s)"
    r"(?P<product>[\w/\-]*[A-Z][\w/\-]*)\s\Z"
)
_LARGEST_OF_VERSION = 99
_LONGEST_WORD = 24


def _ip(match: re.Match[str]) -> str:
    address = match[0]
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 6:
        nobodys = found.is_loopback or found.is_unspecified
        return address if nobodys else Kind.IP.placeholder
    numbers = address.split(".")
    before = _VERSIONED.search(match.string[max(0, match.start() - _LONGEST_WORD) : match.start()])
    product = before is not None and before["product"] is not None
    versioned = numbers[3] == "0" or max(map(int, numbers)) <= _LARGEST_OF_VERSION
    if before and (versioned or not product):
        return address
    return address if numbers[0] in _NOBODYS else Kind.IP.placeholder


PERSONAL_RULES = (
    Rule(Kind.EMAIL, _email_pattern(_SPACED), _email, ("@", "＠", "%40")),
    Rule(Kind.EMAIL, _email_pattern(_ANY), _email, ("@", "＠", "%40")),
    Rule(Kind.IBAN, _IBAN, _iban),
    Rule(Kind.CARD, _DIGIT_RUN, _cards),
    Rule(Kind.IP, _IP, _ip),
    Rule(Kind.PHONE, _INTERNATIONAL, _phone),
    Rule(Kind.PHONE, _NATIONAL, _phone),
    Rule(
        Kind.PHONE,
        _LABELLED,
        _labelled_phone,
        ("tel", "phone", "mobil", "cell", "fax", "whatsapp", "handy", "тел", *"手电電전", "tél"),
        reach=0,
    ),
)
