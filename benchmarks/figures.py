"""Fill measured figures into the pages that quote them.

    python -m benchmarks.figures            # rewrite README.md, docs/ and benchmarks/
    python -m benchmarks.figures --check    # exit with 1 where a page quotes something else

Every benchmark writes its report with ``--json``; the reports that the project publishes are in
``benchmarks/results/``. A passage that quotes figures is written as a template in
``benchmarks/pages/``. Its page names the template, and what stands up to the closing comment is
generated::

    <!-- figures: readme/what-was-measured -->

    takes 6.6 µs

    <!-- /figures -->

A figure of a template is ``{{overhead sizes/100/decide/p50 .1f}}``: ``results/overhead.json``, the
value at that path, and a format as of ``format()``. A path is keys with slashes between; in a list,
``name=value&name=value`` is the first item that has these values. ``A ÷ B`` as a path is the ratio
of two values of one report.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

TEMPLATES = ROOT / "benchmarks" / "pages"

_BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n\n)(.*?)(\n\n<!-- /figures -->)", re.DOTALL)
_FIGURE = re.compile(r"\{\{(\S+) (.+?) ([^\s}]+)\}\}")


class FigureError(Exception):
    """A page quotes a figure that no report holds."""


def value_at(report: Any, path: str) -> float | str:
    """The value at a path of a report.

    Raises:
        FigureError: there is none.

    >>> report = {"cases": [{"n": 1, "p50": 4.0}, {"n": 2, "p50": 8.0}]}
    >>> value_at(report, "cases/n=2/p50 ÷ cases/n=1/p50")
    2.0
    """
    if " ÷ " in path:
        above, below = (value_at(report, part) for part in path.split(" ÷ "))
        return float(above) / float(below)
    value = report
    for key in path.split("/"):
        try:
            value = _item(value, key) if isinstance(value, list) else value[key]
        except (KeyError, StopIteration, TypeError, ValueError):
            raise FigureError(f"no {key!r} of {path!r}") from None
    if not isinstance(value, int | float | str):
        raise FigureError(f"{path!r} is not a figure but a {type(value).__name__}")
    return value


def _item(items: list[Any], key: str) -> Any:
    wanted = dict(pair.split("=", 1) for pair in key.split("&"))
    return next(
        item for item in items if all(str(item[name]) == value for name, value in wanted.items())
    )


def with_figures(text: str, results: Path = RESULTS, templates: Path = TEMPLATES) -> str:
    """A page with every generated passage as its template and the reports have it.

    Raises:
        FigureError: a template, a report or a value in it is missing.
    """

    def figure(match: re.Match[str]) -> str:
        name, path, form = match.groups()
        file = results / f"{name}.json"
        if not file.is_file():
            raise FigureError(f"no report {file.name} in {results}")
        return f"{value_at(json.loads(file.read_text(encoding='utf-8')), path):{form}}"

    def passage(match: re.Match[str]) -> str:
        opening, name, _, closing = match.groups()
        file = templates / f"{name}.md"
        if not file.is_file():
            raise FigureError(f"no template {name}.md in {templates}")
        filled = _FIGURE.sub(figure, file.read_text(encoding="utf-8").rstrip("\n"))
        return f"{opening}{filled}{closing}"

    return _BLOCK.sub(passage, text)


def pages() -> list[Path]:
    """The pages that may quote figures."""
    return [
        ROOT / "README.md",
        ROOT / "benchmarks" / "README.md",
        *sorted(ROOT.glob("benchmarks/tables/*.md")),
        *sorted(ROOT.glob("docs/**/*.md")),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages, or say which differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 where a page differs"
    )
    options = parser.parse_args(arguments)
    differing = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        try:
            current = with_figures(text)
        except FigureError as error:
            sys.stderr.write(f"{page.relative_to(ROOT)}: {error}\n")
            return 2
        if current != text:
            differing.append(str(page.relative_to(ROOT)))
            if not options.check:
                page.write_text(current, encoding="utf-8")
    for name in differing:
        change = "differs from" if options.check else "updated from"
        sys.stdout.write(f"{name}: {change} benchmarks/results/\n")
    return 1 if options.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
