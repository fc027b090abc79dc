"""Texts in encodings that nobody names: read as they were written, or not at all."""

import pytest

from calibration.data.documents.encodings import UnreadableError, decode

RUSSIAN = "Чайник нужно чистить уксусом раз в месяц."
CHINESE = "水壶需要每月用醋清洗一次，然后用清水冲洗。"
JAPANESE = "やかんは月に一度、酢で洗ってください。"
ENGLISH = "A line of English, which is plain.\n" * 2_000
FRENCH = "Le café est fermé l’été ; la façade coûte 500 €."


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "koi8_r"),
        (RUSSIAN, "cp866"),
        (RUSSIAN, "iso8859_5"),
        ("Чайник слід чистити оцтом щомісяця.", "koi8_u"),
        (CHINESE, "gbk"),
        (CHINESE, "gb18030"),
        ("水壺需要每月用醋清洗一次，然後用清水沖洗。", "big5"),
        (JAPANESE, "shift_jis"),
        (JAPANESE, "euc_jp"),
        (JAPANESE, "iso2022_jp"),
        ("주전자는 한 달에 한 번 식초로 씻어야 합니다.", "euc_kr"),
        (FRENCH, "cp1252"),
        ("Die Größe beträgt 5 µm für 20 €.", "cp1252"),
        ("Żółty czajnik należy czyścić octem raz w miesiącu, bo się zakamieni.", "cp1250"),
        ("Ο βραστήρας καθαρίζεται με ξίδι.", "cp1253"),
        ("יש לנקות את הקומקום בחומץ פעם בחודש.", "cp1255"),
        ("ควรล้างกาต้มน้ำด้วยน้ำส้มสายชู", "cp874"),
        *[
            (text, encoding)
            for text in ("Plain words.", RUSSIAN, CHINESE, JAPANESE, FRENCH)
            for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")
        ],
    ],
)
def test_texts_are_read_as_written(text: str, encoding: str) -> None:
    assert decode(text.encode(encoding)) == text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (ENGLISH.encode() + FRENCH.encode("cp1252"), ENGLISH + FRENCH),
        ("é".encode() * 200 + b"\xff", "é" * 200 + "\ufffd"),
        *[
            ("\ufeffone\n\ufefftwo".encode(encoding), "one\ntwo")
            for encoding in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le")
        ],
    ],
)
def test_odd_texts_are_read(raw: bytes, text: str) -> None:
    """One foreign line, a stray byte, and marks of byte order wherever they stand."""
    assert decode(raw) == text


@pytest.mark.parametrize(
    "raw",
    [
        "é".encode("cp1252"),  # as well another letter elsewhere
        bytes(range(256)) * 20,
        b"\0" * 100,
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\0",
        RUSSIAN.encode("utf-16")[:-1],
        b"\xef\xbb\xbfcaf\xe9",
        b"\xff\xfeplain text",
    ],
)
def test_undecidable_is_no_text(raw: bytes) -> None:
    with pytest.raises(UnreadableError, match="save it as UTF-8"):
        decode(raw)


@pytest.mark.parametrize(
    "head", [b'<meta charset="koi8-r">', b'<?xml version="1.0" encoding="KOI8-R"?>']
)
def test_a_page_names_its_encoding(head: bytes) -> None:
    raw = head + "А".encode("koi8_r")
    assert decode(raw, declares=True).endswith("А")


def test_wrong_encoding_name_is_disbelieved() -> None:
    raw = b'<meta charset="ascii7">' + RUSSIAN.encode("cp1251")
    assert decode(raw, declares=True).endswith(RUSSIAN)
