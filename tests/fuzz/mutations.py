"""How many inputs are tried, how files are damaged, and what reading one of them may take."""

import os
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random

from hypothesis import HealthCheck, settings

from ctxguard.errors import CtxguardError

_IS_LONG = "CTXGUARD_FUZZ" in os.environ
EXAMPLES = int(os.environ.get("CTXGUARD_FUZZ", "60"))
"""Inputs for each test; ``make fuzz`` raises it."""

_MOST_SECONDS = 1.0
_MOST_MEMORY, _FREE_MEMORY = 10, 4 * 2**20
"""Bytes of memory for each byte of input, and what every input may take whatever its size."""
_MEASURED = 50
"""The memory of inputs is measured whose size this divides: that makes reading them slower."""

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    # The short form tries the same inputs on every machine; a search for new ones is `make fuzz`.
    derandomize=not _IS_LONG,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@contextmanager
def handled(content: bytes) -> Iterator[None]:
    """Read an input here: an error of ctxguard's own is an answer, and any other names the input.

    In the long form, at most a second of processor time and memory in proportion to the input. The
    short form measures nothing: a busy machine is no failure.
    """
    measures = _IS_LONG and len(content) % _MEASURED == 0
    if measures:
        tracemalloc.start()
    began = time.thread_time()
    try:
        with suppress(CtxguardError):
            yield
        took = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1] if measures else 0
        assert not _IS_LONG or measures or took <= _MOST_SECONDS, f"took {took:.1f} s"
        assert peak <= _MOST_MEMORY * len(content) + _FREE_MEMORY, f"took {peak:,} bytes of memory"
    except BaseException as error:
        error.add_note(f"input of {len(content)} bytes: {content!r}")
        raise
    finally:
        tracemalloc.stop()


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


_CHANGES = ("token", "token", "bytes", "cut", "repeat", "flip", "value", "value")


def damaged(content: bytes) -> Iterator[bytes]:
    """Files after a few changes: values replaced, bytes flipped, parts cut, moved or repeated."""
    random = Random() if _IS_LONG else Random(len(content))
    for _ in range(EXAMPLES):
        yield _changed(content, random)


def _changed(content: bytes, random: Random) -> bytes:
    for _ in range(random.randint(1, 4)):
        start = random.randint(0, len(content))
        end = min(len(content), start + random.choice((0, 1, 2, 4, 8, 40, len(content))))
        part = content[start:end]
        change = random.choice(
            ("token", "token", "bytes", "cut", "repeat", "flip", "value", "value")
        )
        if change == "value":
            content = _with_value(content, random)
            continue
        new = b""
        if change == "token":
            new = random.choice(_TOKENS)
        elif change == "bytes":
            new = random.randbytes(random.randint(0, 20))
        elif change == "flip":
            bit = 1 << random.randint(0, 7)
            new = bytes([byte ^ bit for byte in part[:4]])
        elif change == "repeat":
            new = part * 2
        content = content[:start] + new + content[end:]
    return content


def _with_value(content: bytes, random: Random) -> bytes:
    """The value after a colon or comma replaced: mostly still JSON, of another type."""
    ends = [at for at, byte in enumerate(content) if byte in b":,[\t "]
    token = random.choice(_TOKENS)
    if not ends:
        return token
    start = random.choice(ends) + 1
    stops = [at for at in range(start, len(content)) if content[at] in b",}]\n\t"]
    return content[:start] + token + content[stops[0] if stops else len(content) :]
