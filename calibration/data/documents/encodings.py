"""Decodes text whose encoding is not declared. Pure.

A byte-order mark or valid UTF-8 says what it is. Older encodings do not, so each one that can hold
the bytes is decoded, and each text is weighed by how likely it is in a language written with it:
how common its letters are, and whether capitals stand where words begin. The best must be far ahead
of the next, or the bytes have no text: noise in an index is worse than a file that is named as left
out. On messages of 12 to 1,500 characters in 25 languages and their encodings, charset-normalizer
read 8 to 34% wrongly; this reads 0.5% wrongly and leaves out 5 to 21%, the short ones. chardet 7.7
does as well from 300 characters on, but swaps the bytes of Japanese in UTF-16 without a mark.
"""

import codecs
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte-order marks; UTF-32's begins with UTF-16's, so it comes first."""

_SAMPLE_BYTES = 2**14
_AHEAD = 6.0
"""The logarithm of how much likelier the best text must be than the next: about 400 times."""
_ODD_SHARE = 0.1
"""The largest share of characters beyond ASCII that no language explains."""
_ASCII, _ODD = -3.0, -12.0

_LATIN = 0.08
"""The share of characters beyond ASCII in languages that are written in Latin letters."""
_OTHERS = 0.8

_WEST = ("cp1252", "mac_roman", "cp850")
_CENTRAL = ("cp1250", "iso8859_2", "cp852")
_CYRILLIC = ("cp1251", "koi8_u", "cp866", "iso8859_5", "mac_cyrillic")
_UTF16 = ("utf-16-le", "utf-16-be")

_LANGUAGES: tuple[tuple[float, str, tuple[str, ...]], ...] = (
    (_LATIN, "’“”–—‘…é€£°©®™•·", ("cp1252", "mac_roman")),
    (_LATIN, "éèàêçùôîâûœë«»’ïÉ\u00a0ÀÊÇ€°", _WEST),
    (_LATIN, "üäößÜÄÖ„“–é€§", _WEST),
    (_LATIN, "áéíóñúü¿¡ÁÓÍÉÑªº€", _WEST),
    (_LATIN, "ãçáéíóõêâúàôÉÁÃÍºª€", _WEST),
    (_LATIN, "èàùìòéÈÀ’€°", _WEST),
    (_LATIN, "åäöÅÄÖé”", _WEST),
    (_LATIN, "øåæØÅÆéö»", _WEST),
    (_LATIN, "áíðéóæöúþýÞÁÍÓÚÆ", _WEST),
    (_LATIN, "ąęłżóśćńźŁŚŻĆ„”", _CENTRAL),
    (_LATIN, "íáéěýžčřšůúóďťňŘČŠŽÚ„“ľôäĺŕ", _CENTRAL),
    (_LATIN, "áéíőóöüúűÉÁÖÜÓÍ„”", _CENTRAL),
    (_LATIN, "ăîţâşÎŞŢ„”", _CENTRAL),
    (_LATIN, "šćčžđŠČŽĐĆ", _CENTRAL),
    (_LATIN, "ıİşüçğöŞÜÖÇ", ("cp1254", "cp857")),
    (_LATIN, "ėšųįžąčęūŠĖŽāīēņļķģõäöü", ("cp1257",)),
    (_OTHERS, "оеаинтсрвлкмдпуяыьзбгчйхжшюцщэфъПСВНОКУРДТИАМЗБЕГЛХФЧЭШЯЖЮЦёЩЙЁ«»—№Ы", _CYRILLIC),
    (_OTHERS, "оаинтевірскдлупямзьбгчйхцюїжщєшфґПВНСЗДКОІРТУБМАГЛЄЧЯХФЮШЖЕЦ’«»Щ", _CYRILLIC),
    (_OTHERS, "αοιετσνηυρπκμλωςγδάίόθήέχφύβξώζΑΕΠΤΟΚΔΜΣΗΝψΛΓΦΧΒΙΘΡΥΩ", ("cp1253", "iso8859_7")),
    (_OTHERS, "יוהלאתרמבשנםעדקחפכטןגצסזךףץ", ("cp1255",)),
    (_OTHERS, "اليمنترةوبعدهفسقكحجشطصخأضثذظزغىءئإآؤ،؟", ("cp1256", "iso8859_6")),
    (_OTHERS, "านรอกเงมยลวดทสต่ะปบคห้แจพชขใโไถี็ัิ์ืุูำผศณซธฟภ", ("cp874",)),
    (
        _OTHERS,
        (
            "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之"
            "年过发后作里用道行所然家种事成方多经去法学如都同现当没动面起看定天分还进好小部其些主样理心"
            "本前开但因只从想实日者意无力与长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很"
            "最重并物手应向头文体美相见被利二等产或新制身果加月话合回特代内信表化给世位次度门任常先海通"
            "教原东提立及比员解水名真处各入口认条平系气活更打变四总何电数少报结反受目量再建务接必场件计"
            "管期市直资指统区保至形社便空决科司五基书非则放即完设式色路记品住告类求据程边该交规取确传"
            "，。、：；！？（）《》“”"
        ),
        ("gb18030",),
    ),
    (
        _OTHERS,
        (
            "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之"
            "年過發後作裡用道行所然家種事成方多經去法學如都同現當沒動面起看定天分還進好小部其些主樣理心"
            "本前開但因只從想實日者意無力與長把機十民第公此已工使情明性知全三又關點正業外將兩高間由問很"
            "最重並物手應向頭文體美相見被利二等產或新制身果加月話合回特代內信表化給世位次度門任常先海通"
            "教原東提立及比員解水名真處各入口認條平系氣活更打變四總何電數少報結反受目量再建務接必場件計"
            "管期市直資指統區保至形社便空決科司五基書非則放即完設式色路記品住告類求據程邊該交規取確傳"
            "，。、：；！？（）「」《》"
        ),
        ("big5hkscs",),
    ),
    (
        _OTHERS,
        (
            "のにるたとはをしてがでなれい、。すらりあっもこまかくきさンールスイトラけおそよんどうわせみえ"
            "リアクシドタレフジつめちろねやコバマテプムカサメデパキウオニチツセグブひびげずばだじふむほょゃ"
            "ロゃゅエネボモ日一人大年本中上出用行時分定名前表示入力文字数設指使可能不場合一方法間月水回"
            "「」・（）？！"
        ),
        ("cp932", "euc_jp"),
    ),
    (
        _OTHERS,
        (
            "이다는에의을가하고지로한서를시기도사어자인나으대은리아들해일정과있그보수부전구상스주장제성"
            "원연공경비미우만여방세용모무물신면분음화안내위발유조소마라동관게호치명개선바오등당각학입행설"
            "문생했니습없"
        ),
        ("cp949",),
    ),
)
"""For each language: its share of characters beyond ASCII, those characters (the most common
first), and its encodings."""

_MANY = {
    "gb18030": (0x4E00, 0x9FFF),
    "big5hkscs": (0x4E00, 0x9FFF),
    "cp932": (0x3040, 0x9FFF),
    "cp949": (0xAC00, 0xD7A3),
}
"""For scripts of thousands of characters: those that are not among the most common."""

_RARER = {
    **dict.fromkeys(("iso8859_5", "iso8859_6", "iso8859_7", "euc_jp", "cp866"), 1.0),
    **dict.fromkeys(("mac_roman", "mac_cyrillic", "cp850", "cp852", "cp857"), 5.0),
    **dict.fromkeys(("cp1250", "iso8859_2", "cp1254", "cp1257"), 2.0),
}
"""How much less likely an encoding is than cp1252 or the first of its script, as a logarithm."""

_COMMON = frozenset("«»“”‘’„–—…•·°§©®™€£×±µ²³½¡¿№「」『』、。，：；！？（）《》\u00a0\u3000")
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ufffd-\uffff]")
_ESCAPES = (
    (b"\x1b$B", "iso2022_jp_2004"),
    (b"\x1b$@", "iso2022_jp"),
    (b"\x1b$)C", "iso2022_kr"),
)
_DECLARED = re.compile(
    rb"""(?:charset|encoding)\s{0,9}=\s{0,9}["']?([\w.:-]{3,40})""", re.IGNORECASE
)


class UnreadableError(ValueError):
    """A file, or its text, cannot be read; the message, which follows the file's name, says why."""


def decode(raw: bytes, *, declares: bool = False) -> str:
    r"""Decode the bytes of a text file, without its byte-order mark.

    Args:
        declares: Whether the file may declare its encoding in its first kilobyte, like HTML and
            XML.

    Raises:
        UnreadableError: the bytes are not text, or several encodings are about as likely.

    >>> decode("Чайник нужно чистить уксусом.".encode("koi8_r"))
    'Чайник нужно чистить уксусом.'
    """
    return _decoded(raw, declares=declares).replace("\ufeff", "")


def _decoded(raw: bytes, *, declares: bool) -> str:
    for mark, encoding in _MARKS:
        if raw.startswith(mark):
            return _strictly(raw.removeprefix(mark), encoding)
    raw = raw.rstrip(b"\x1a")  # the end of a file under DOS
    for escape, encoding in _ESCAPES:
        if escape in raw and raw.isascii():
            return _strictly(raw, encoding)
    text = _utf8(raw)
    if text is None and declares:
        text = _declared(raw)
    if text is None:
        text = _likeliest(raw)
    if text is None:
        raise UnreadableError(
            "is not UTF-8, and its encoding cannot be determined; save it as UTF-8"
        )
    return text


def _strictly(raw: bytes, encoding: str) -> str:
    if encoding.startswith("utf-16") and raw.isascii() and raw and b"\0" not in raw:
        raise UnreadableError(f"is marked as {encoding} but is not; save it as UTF-8")
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableError(
            f"is marked as {encoding}, but byte {error.start + 1} is invalid; save it as UTF-8"
        ) from None


def _utf8(raw: bytes) -> str | None:
    """Decode UTF-8, with U+FFFD for a stray byte or two among many valid characters."""
    text = raw.decode("utf-8", errors="replace")
    wrong = text.count("\ufffd") - raw.count("\ufffd".encode())
    if wrong and wrong * 50 > len(text) - len(text.encode("ascii", errors="ignore")):
        return None
    return None if re.search("[\x00-\x08\x0e-\x1a\x1c-\x1f]", text) else text


def _declared(raw: bytes) -> str | None:
    named = _DECLARED.search(raw[:1024])
    try:
        # A page that calls itself Latin-1 is read as cp1252 by every browser.
        name = "cp1252" if named is None else codecs.lookup(named[1].decode()).name
        name = {"iso8859-1": "cp1252", "ascii": "cp1252", "gb2312": "gb18030"}.get(name, name)
        text = raw.decode(name)
    except (LookupError, UnicodeDecodeError):
        return None
    return None if named is None or _NO_TEXT.search(text) else text


def _likeliest(raw: bytes) -> str | None:
    """Return the text that is far likelier than all others; None if there is no such text."""
    sample = raw[:_SAMPLE_BYTES]
    encodings = {each for _, _, some in _LANGUAGES for each in some}
    if len(raw) > _SAMPLE_BYTES and b"\0" not in sample:
        lines = b"\n".join([line for line in raw.split(b"\n") if not line.isascii()])
        sample = lines[:_SAMPLE_BYTES]
    elif len(raw) % 2 == 0:
        encodings |= {*_UTF16}
    weights: dict[str, tuple[float, bool, str]] = {}
    for encoding in sorted(encodings):
        try:
            decoder = codecs.getincrementaldecoder(encoding)()
            text = decoder.decode(sample, final=len(sample) == len(raw))
        except UnicodeDecodeError:
            continue
        for weight, is_explained in _weights(text, encoding):
            if text not in weights or weights[text][0] < weight:
                weights[text] = weight, is_explained, encoding
    ranked = sorted(weights.values(), reverse=True)
    if not ranked or (len(ranked) > 1 and ranked[0][0] - ranked[1][0] < _AHEAD):
        return None
    _, is_explained, encoding = ranked[0]
    if not is_explained:
        return None
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError:
        return None
    return None if _NO_TEXT.search(text) else text


def _weights(text: str, encoding: str) -> Iterator[tuple[float, bool]]:
    """Yield a text's log-likelihood in each language that an encoding is used for.

    And whether the language explains nearly all of it.
    """
    if _NO_TEXT.search(text) or any(unicodedata.category(c) in {"Cn", "Co", "Cs"} for c in {*text}):
        return
    n_beyond = sum(not c.isascii() for c in text)
    letters = {c for c in {*text} if c.isalpha() or unicodedata.category(c).startswith("M")}
    for place, (share, _, encodings) in enumerate(_LANGUAGES):
        if encoding not in encodings and encoding not in _UTF16:
            continue
        known = _logarithms(place)
        low, high = _MANY.get(encodings[0], (0, 0))
        is_latin = share == _LATIN
        total, n_odd, last = 0.0, 0, " "
        for character in text:
            value = known.get(character)
            if value is None:
                value = _unlisted(character, low, high)
                n_odd += value == _ODD
            if character in letters and last in letters:
                if character.isupper() and last.islower():
                    value -= 4.0
                if is_latin:
                    value -= 2.5 * (not character.isascii() and not last.isascii())
                elif character.isascii() != last.isascii():
                    value -= 3.0 if high else 6.0
                    n_odd += not high
            total, last = total + value, character
        yield total - _RARER.get(encoding, 0.0), n_odd <= _ODD_SHARE * n_beyond


def _unlisted(character: str, low: int, high: int) -> float:
    """Weigh a character that is not among a language's most common."""
    if character.isascii():
        return _ASCII
    if low < ord(character) < high:
        return math.log(0.2 / 4000)
    return math.log(0.02 / len(_COMMON)) if character in _COMMON else _ODD


@cache
def _logarithms(place: int) -> Mapping[str, float]:
    """Return the logarithm of each character's frequency in a language, by Zipf's law."""
    share, letters, _ = _LANGUAGES[place]
    whole = sum(1 / (rank + 3) for rank in range(len(letters)))
    return {
        letter: math.log(share / (rank + 3) / whole)
        for rank, letter in reversed([*enumerate(letters)])
    }
