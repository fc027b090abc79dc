"""How many inputs are tried, and how a valid file becomes a damaged one."""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("CTXGUARD_FUZZ", "60"))
"""Inputs for each test; ``make fuzz`` raises it."""

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    # The short form tries the same inputs on every machine; a search for new ones is `make fuzz`.
    derandomize="CTXGUARD_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

_TOKENS = (
    *(
        b"null",
        b"true",
        b"-1",
        b"1e999",
        b"NaN",
        b"9" * 400,
        b'""',
        b"[]",
        b"{}",
        b'"\\ud800"',
        b"[1]",
    ),
    *(
        b"[" * 3000,
        b'{"a":' * 3000,
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\n",
        b"\t",
        b",",
        b'"',
        b"1" * 5000,
    ),
    *(b"\xe2\x80\x8d", b"0", b"2", b"0.5", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"PK\x03\x04"),
)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file after a few changes: values replaced, bytes flipped, parts cut, moved or repeated."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.sampled_from((0, 1, 2, 4, 8, 40, len(content)))))
        change = draw(
            st.sampled_from(("token", "token", "bytes", "cut", "repeat", "flip", "value"))
        )
        if change == "value":
            content = _with_value(
                content, draw(st.integers(0, 200)), draw(st.sampled_from(_TOKENS))
            )
        else:
            part = content[start:end]
            if change == "token":
                new = draw(st.sampled_from(_TOKENS))
            elif change == "bytes":
                new = draw(st.binary(max_size=20))
            elif change == "flip":
                bit = 1 << draw(st.integers(0, 7))
                new = bytes([byte ^ bit for byte in part[:4]])
            else:
                new = b"" if change == "cut" else part * 2
            content = content[:start] + new + content[end:]
    return content


def _with_value(content: bytes, number: int, token: bytes) -> bytes:
    """The value after the n-th colon or comma replaced: mostly still JSON, of another type."""
    ends = [at for at, byte in enumerate(content) if byte in b":,[\t "]
    if not ends:
        return token
    start = ends[number % len(ends)] + 1
    stops = [at for at in range(start, len(content)) if content[at] in b",}]\n\t"]
    return content[:start] + token + content[stops[0] if stops else len(content) :]
