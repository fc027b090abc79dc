"""Counts the values in JSON before anything is built from it. Pure."""

MOST_VALUES = 100_000
"""The most values in other people's JSON; building objects from more blocks an event loop too
long."""

_NO_MARKS = bytes(set(range(256)) - set(b'",[{'))


def has_more_values(document: bytes | bytearray, most: int = MOST_VALUES) -> bool:
    r"""Return whether JSON has more values than a limit.

    Counts commas and opening brackets outside strings; there are at least as many as values, less
    one.

    >>> has_more_values(b'["many, many, [commas] in \" a text", []]' + b" " * MOST_VALUES)
    False
    """
    if len(document) <= most or sum(map(document.count, (b",", b"[", b"{"))) < most:
        return False
    marks = document.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    # A value is at most one text, and its name another.
    return marks.count(b'"') > 4 * most or sum(map(len, marks.split(b'"')[::2])) >= most
