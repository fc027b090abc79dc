"""Count which forms of secrets the redactor catches, and how many ordinary lines it changes.

    python -m benchmarks.redaction --json redaction.json --check

A form is a line with secrets in it; it is caught if no six characters in a row of any of them are
left. An ordinary line holds none, and must stay as it is. The tables were committed before the
rules were widened, and split by a seed (``_redaction_forms``): one half was read while they were
written, the other counted once, then read too, and a second table was committed and counted once.
``FIRST_LOOK`` has what the rules of that day did to lines that they were not written by, which says
what to expect of others; the counts of today say only that nothing was lost. One person wrote
tables and rules: expect less of forms that neither thought of. The bars: at least 90% of the forms
caught, at most 3% of the ordinary lines changed. With ``--text`` the lines of files of your
own are counted as ordinary besides, in the first half.
"""

import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._command import CONSOLE, command, ended, figures
from benchmarks._redaction_forms import SEED, Form, Half, halves, later
from ctxguard.monitor.redaction import redact

LEAST_CAUGHT = 0.90
MOST_CHANGED = 0.03
FIRST_LOOK = {
    name: {
        "forms": forms,
        "caught": caught,
        "caught_share": caught / forms,
        "ordinary": ordinary,
        "changed": changed,
        "changed_share": changed / ordinary,
    }
    for name, forms, caught, ordinary, changed in (
        ("before", 281, 197, 199, 18),
        ("counted", 281, 251, 199, 2),
        ("later", 110, 103, 64, 4),
    )
}
"""What was counted before the lines were read; ``before``: by the rules before they were widened,
on the first of the two tables."""
LONGEST_LEFT = 5
"""The characters of a secret that may be left in a row: a word that it shares with its line."""

_ZERO_WIDTH = re.compile("[\u00ad\u200b-\u200d\u2060\ufeff]")


def is_left(secret: str, clean: str) -> bool:
    """Whether a part of a secret is left that would help to guess it."""
    secret, clean = _ZERO_WIDTH.sub("", secret), _ZERO_WIDTH.sub("", clean)
    size = min(len(secret), LONGEST_LEFT + 1)
    return any(secret[at : at + size] in clean for at in range(len(secret) - size + 1))


@dataclass(frozen=True, slots=True)
class Counts:
    """What a redactor did to one half of the tables.

    Attributes:
        missed: The forms of which something is left.
        half: The half.
        changed: Ordinary lines that changed, with what became of them.
    """

    missed: tuple[Form, ...]
    half: Half
    changed: tuple[tuple[str, str], ...]

    @property
    def caught_share(self) -> float:
        """The share of the forms that was caught."""
        return 1 - len(self.missed) / len(self.half.forms)

    @property
    def changed_share(self) -> float:
        """The share of the ordinary lines that changed."""
        return len(self.changed) / len(self.half.ordinary)

    @property
    def holds(self) -> bool:
        """Whether both bars are held."""
        return self.caught_share >= LEAST_CAUGHT and self.changed_share <= MOST_CHANGED

    def report(self) -> dict[str, Any]:
        """The counts as the published report has them, without the lines."""

        def part(chosen: Collection[Form]) -> dict[str, Any]:
            missed = sum(form in chosen for form in self.missed)
            caught = len(chosen) - missed
            return {"forms": len(chosen), "caught": caught, "caught_share": caught / len(chosen)}

        forms = self.half.forms
        kinds = list(dict.fromkeys(form.kind for form in forms))
        return {
            **part(forms),
            "by_vendors": part([form for form in forms if form.by_vendor]),
            "by_people": part([form for form in forms if not form.by_vendor]),
            "kinds": {kind: part([form for form in forms if form.kind == kind]) for kind in kinds},
            "ordinary": len(self.half.ordinary),
            "changed": len(self.changed),
            "changed_share": self.changed_share,
        }


def measure(half: Half, redactor: Callable[[str], str] = redact) -> Counts:
    """Redact every line of one half of the tables."""
    missed = tuple(
        form
        for form in half.forms
        for clean in [redactor(form.line)]
        if any(is_left(secret, clean) for secret in form.secrets)
    )
    cleaned = [(line, redactor(line)) for line in half.ordinary]
    return Counts(missed, half, tuple(pair for pair in cleaned if pair[0] != pair[1]))


def microseconds_per_kilobyte(redactor: Callable[[str], str], lines: Sequence[str]) -> float:
    """The time to redact ordinary lines in texts of about 1,000 characters; the best of five."""
    text = "\n".join(lines)
    texts = [text[start : start + 1000] for start in range(0, len(text), 1000)]
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for piece in texts:
            redactor(piece)
        best = min(best, time.process_time() - start)
    return best * 1e6 / (len(text.encode()) / 1000)


def main(given: Sequence[str] | None = None) -> int:
    """Count, print and write; the exit status is 1 where a bar that was checked is missed."""
    parser = command("Count the forms that the redactor catches, and ordinary lines it changes.")
    parser.add_argument("--text", type=Path, nargs="*", default=(), help="files of ordinary lines")
    arguments = parser.parse_args(given)
    more = [line for file in arguments.text for line in file.read_text("utf-8").splitlines()]
    read, counted = halves()
    tables = {
        "read": replace(read, ordinary=(*read.ordinary, *more)),
        "counted": counted,
        "later": later(),
    }
    table = figures("lines", ("lines",), ("forms", "by vendors", "by people", "ordinary"))
    cost = microseconds_per_kilobyte(redact, read.ordinary)
    result: dict[str, Any] = {"microseconds_per_kilobyte": cost}
    ours = [measure(half) for half in tables.values()]
    for title, counts in zip(tables, ours, strict=True):
        result[title] = part = counts.report()
        table.add_row(
            title,
            *(
                f"{row['caught']} of {row['forms']}: {row['caught_share']:.1%}"
                for row in (part, part["by_vendors"], part["by_people"])
            ),
            f"{part['changed']} of {part['ordinary']} changed: {part['changed_share']:.1%}",
        )
    report = {"seed": SEED, "first_look": FIRST_LOOK, "redactors": {"ctxguard": result}}
    for form in (form for counts in ours for form in counts.missed):
        CONSOLE.print(
            f"missed  {form.kind}: {form.line!r}\n        {redact(form.line)!r}", markup=False
        )
    for line, clean in (pair for counts in ours for pair in counts.changed):
        CONSOLE.print(f"changed {line!r}\n        {clean!r}", markup=False)
    CONSOLE.print(table)
    missed = [name for name, counts in zip(tables, ours, strict=True) if not counts.holds]
    return ended(arguments, report, missed)


if __name__ == "__main__":
    sys.exit(main())
