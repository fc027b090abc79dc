"""Draws the lines on which redaction is measured from the templates of ``redaction.toml``.

The first tables are split by a seed, kind by kind, into a half that was read while the rules were
written, and one that was first counted.
"""

import random
import re
import string
import tomllib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

SEED = 20261123

_CLASSES = {
    "alnum": string.ascii_letters + string.digits,
    "letters": string.ascii_letters,
    "lower": string.ascii_lowercase + string.digits,
    "upper": string.ascii_uppercase + string.digits,
    "digits": string.digits,
    "hex": "0123456789abcdef",
    "base32": string.ascii_uppercase + "234567",
    "lower32": string.ascii_lowercase + "234567",
    "bech32": "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
    "url64": string.ascii_letters + string.digits + "-_",
    "base64": string.ascii_letters + string.digits + "+/",
}
_CARRIERS = (
    "{}",
    "Use {} for the deploy.",
    "I pasted {} into the chat by mistake",
    "the value is `{}`",
    "it said: '{}' was rejected by the server",
    "({})",
)
_Row = TypeVar("_Row")

_PK = "PRIVATE KEY"  # Scanners of sources would otherwise report the tables.


@dataclass(frozen=True, slots=True)
class Form:
    """A line with secrets.

    Attributes:
        line: The line.
        secrets: The parts that must be gone.
        kind: The heading in the tables.
        by_vendor: Whether a vendor publishes the format.
    """

    line: str
    secrets: tuple[str, ...]
    kind: str
    by_vendor: bool


@dataclass(frozen=True, slots=True)
class Half:
    """Half of the tables."""

    forms: tuple[Form, ...]
    ordinary: tuple[str, ...]


def halves() -> tuple[Half, Half]:
    """Return the half that was read while the rules were written, and the one counted first."""
    tables = _tables()
    forms: tuple[list[Form], list[Form]] = ([], [])
    ordinary: tuple[list[str], list[str]] = ([], [])
    for name in ("vendors", "people"):
        for kind, text in tables[name].items():
            _deal(_forms(text, kind, by_vendor=name == "vendors"), kind, forms)
    for kind, text in tables["ordinary"].items():
        _deal(text.splitlines(), kind, ordinary)
    for text in tables["former"].values():
        forms[0].extend(_forms(text, "before"))
    ordinary[0].extend(tables["former_ordinary"]["ordinary"].splitlines())
    seen, counted = (Half(tuple(forms[at]), tuple(ordinary[at])) for at in (0, 1))
    return seen, counted


def later() -> Half:
    """Return the second table."""
    table = _tables()["later"]
    vendors = _forms(table["vendors"], "later", by_vendor=True)
    people = _forms(table["people"], "later")
    return Half((*vendors, *people), tuple(table["ordinary"].splitlines()))


def _deal(rows: list[_Row], kind: str, to: tuple[list[_Row], list[_Row]]) -> None:
    """Deal the rows of a kind to both halves, shuffled by the seed."""
    shuffled = random.Random(f"{SEED} {kind}").sample(rows, len(rows))
    to[0].extend(shuffled[::2])
    to[1].extend(shuffled[1::2])


def _tables() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(Path(__file__).with_name("redaction.toml").read_text(encoding="utf-8"))


def _forms(text: str, kind: str, *, by_vendor: bool = False) -> list[Form]:
    return [_form(template, kind, by_vendor) for template in text.splitlines()]


def _form(template: str, kind: str, by_vendor: bool) -> Form:
    rng = random.Random(f"{SEED} {template}")
    if "⟦" not in template:
        template = rng.choice(_CARRIERS).format(f"⟦{template}⟧")
    drawn = _draw(template, rng)
    secrets = re.findall(r"⟦([^⟧]*)⟧", drawn)
    return Form(re.sub("[⟦⟧]", "", drawn), tuple(secrets), kind, by_vendor)


def _draw(template: str, rng: random.Random) -> str:
    def one(match: re.Match[str]) -> str:
        if match[1] is not None:
            return "".join(rng.choices(_CLASSES[match[2]], k=int(match[1])))
        return str(uuid.UUID(int=rng.getrandbits(128), version=4)) if match[0] == "<uuid>" else _PK

    return re.sub(r"<(?:(\d+) (\w+)|uuid|pk)>", one, template).replace("\\n", "\n")
