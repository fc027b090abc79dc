"""Collect the pages of the documentation site, for Zensical to build.

    python -m tools.docs build

writes, from the README, docs/ and the names that the packages make public, ``build/docs`` and the
configuration ``build/mkdocs.yml``: that of zensical.toml with every page in its nav, and in its
llms.txt. Pages of the API reference name what Zensical renders from docstrings. Nothing of the
packages is imported.
"""

import ast
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

REFERENCE = {
    "ctxguard": ("The package", ["ctxguard"]),
    "calibration": (
        "From labelled queries to a profile",
        [
            "calibration.calibrate",
            "calibration.calibrate_route",
            "calibration.data.dataset",
            "calibration.data.readers",
        ],
    ),
    "assessors": (
        "Models that are asked about candidates",
        ["ctxguard.guard.assess", "ctxguard.endpoints.assessors"],
    ),
    "integrations": (
        "Frameworks, engines and traces",
        [
            "ctxguard.integrations.langchain",
            "ctxguard.integrations.langchain_agents",
            "ctxguard.integrations.llamaindex",
            "haystack_integrations.components.rankers.ctxguard",
            "ctxguard.integrations.opentelemetry",
            "ctxguard.integrations.separate_legs",
            "ctxguard.integrations.engines.retriever",
            "ctxguard.retrieval.models.embedder",
        ],
    ),
    "monitor": (
        "Watching live traffic",
        [
            "ctxguard.monitor.estimation.live",
            "ctxguard.monitor.judges.protocol",
            "ctxguard.monitor.service",
            "ctxguard.monitor.store",
            "ctxguard.server.console.routes",
        ],
    ),
    "testing": ("The contract of a retriever", ["ctxguard.testing"]),
}
"""The pages of the API reference: what each is about, and whose public names it has."""

_LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)((?:#[^)\s]*)?\))")
_FIGURE = re.compile(r"<!-- (?:figures: \S+|/figures) -->\n\n?")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def main(target: Path) -> None:
    """Write the pages and the configuration into a folder."""
    config = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    pages = site_pages()
    folder = target / config["docs_dir"]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.md"))
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    nav = expanded(config["nav"], pages)
    config["nav"] = [
        {section: [{title_of(pages[name]): name} for name in names]}
        for section, names in nav.items()
    ]
    config["plugins"]["llmstxt"] = {
        "markdown_description": "Each page is there as Markdown.",
        "sections": {
            section: [{name: summary_of(pages[name])} for name in names]
            for section, names in nav.items()
        },
    }
    # JSON is YAML, which is the form that Zensical reads besides TOML.
    (target / "mkdocs.yml").write_text(json.dumps(config, indent=1), encoding="utf-8")


def site_pages() -> dict[str, str]:
    """The Markdown of every page by its path in the site."""
    sources = {
        "README.md": "index.md",
        "benchmarks/README.md": "project/benchmarks.md",
        "CONTRIBUTING.md": "project/contributing.md",
        "SECURITY.md": "project/security.md",
    }
    for path in sorted((ROOT / "benchmarks" / "tables").glob("*.md")):
        sources[str(path.relative_to(ROOT))] = f"project/{path.name}"
    for path in sorted((ROOT / "docs").glob("**/*.md")):
        sources[str(path.relative_to(ROOT))] = str(path.relative_to(ROOT / "docs"))
    pages = {page: _of_the_site(source, page, sources) for source, page in sources.items()}
    for name in REFERENCE:
        pages[f"reference/{name}.md"] = reference_page(name)
    return pages


def _of_the_site(source: str, page: str, sources: Mapping[str, str]) -> str:
    """A page of the repository with the links of the site, and without the marks of its figures."""

    def link(match: re.Match[str]) -> str:
        opening, target, closing = match.groups()
        path = os.path.normpath(Path(source).parent / target)
        path = sources.get(path, path.removeprefix("docs/"))
        return f"{opening}{os.path.relpath(path, Path(page).parent)}{closing}"

    text = (ROOT / source).read_text(encoding="utf-8")
    return _LINK.sub(link, _FIGURE.sub("", text))


def expanded(nav: list[dict[str, list[str]]], pages: Mapping[str, str]) -> dict[str, list[str]]:
    """The pages of each section, every page once: at the first entry that names it alone, or else
    at the first pattern that fits."""
    entries = [entry for section in nav for names in section.values() for entry in names]
    placed = {entry for entry in entries if "*" not in entry}
    sections: dict[str, list[str]] = {}
    for section in nav:
        for title, names in section.items():
            sections[title] = []
            for entry in names:
                found = (
                    [entry]
                    if entry in pages
                    else [
                        page
                        for page in sorted(pages, key=str.lower)
                        if fnmatchcase(page, entry)
                        and page.count("/") == entry.count("/")
                        and page not in placed
                    ]
                )
                placed.update(found)
                sections[title] += found
    return sections


def title_of(page: str) -> str:
    """The heading of a page."""
    return page.partition("\n")[0].removeprefix("# ")


def summary_of(page: str) -> str:
    """The first sentence of a page, without its links and emphasis."""
    paragraphs = _FENCE.sub("", page).split("\n\n")[1:]
    first = next(p for p in paragraphs if p.strip() and p.strip()[0] not in "#|<!-")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(first.split())).replace("*", "")
    return re.split(r"(?<=[.:])\s", plain)[0].rstrip(".:") + "."


def reference_page(name: str) -> str:
    """A page that Zensical completes by the docstrings of the names on it."""
    summary, modules = REFERENCE[name]
    blocks = [f"# Reference: {name}", f"{summary}: the public names and their docstrings."]
    blocks += [f"::: {module}.{each}" for module in modules for each in public_names(module)]
    return "\n\n".join(blocks) + "\n"


def public_names(module: str) -> list[str]:
    """The names that a module exports; without a list of them, the functions and classes that it
    defines, but for those with a leading underscore."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    defined = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                return sorted(ast.literal_eval(node.value))
            case ast.Assign(targets=[ast.Name(id="_EXPORTS")]):
                return sorted(" ".join(ast.literal_eval(node.value).values()).split())
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                defined.append(node.name)
    return [name for name in defined if not name.startswith("_")]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
