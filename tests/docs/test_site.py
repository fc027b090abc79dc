"""The pages of the documentation site, as they are collected; `make docs` builds it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ctxguard
from tools.docs import REFERENCE, ROOT, main, public_names

_OURS = r"ctxguard|calibration|haystack_integrations\.components\.rankers\.ctxguard"
_IMPORT = rf"^from ((?:{_OURS})(?:\.[\w.]+)?) import ([\w, ]+)$"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    main(folder)
    return folder


@pytest.fixture(scope="module")
def config(built: Path) -> dict[str, Any]:
    return json.loads((built / "mkdocs.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pages(built: Path) -> dict[str, str]:
    folder = built / "docs"
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.glob("**/*.md")
    }


def test_nav_has_every_page_once(config: dict[str, Any], pages: dict[str, str]) -> None:
    listed = [
        name
        for section in config["nav"]
        for entries in section.values()
        for entry in entries
        for name in entry.values()
    ]
    assert sorted(listed) == sorted(pages)
    assert len(pages) > len(list(ROOT.glob("docs/**/*.md")))


def test_llms_txt_describes_every_page(config: dict[str, Any], pages: dict[str, str]) -> None:
    sections = config["plugins"]["llmstxt"]["sections"]
    described = {
        name: text for each in sections.values() for row in each for name, text in row.items()
    }
    assert described.keys() == pages.keys()
    for text in described.values():
        assert re.fullmatch(r"[^\n]{10,250}\.", text), text


def test_links_lead_to_site_files(built: Path, pages: dict[str, str]) -> None:
    for name, text in pages.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", prose):
            assert (built / "docs" / name).parent.joinpath(target).is_file(), (name, target)


def test_figures_have_no_marks(pages: dict[str, str]) -> None:
    assert [name for name, text in pages.items() if "<!--" in text] == []


def test_the_reference_has_every_public_name(pages: dict[str, str]) -> None:
    page = pages["reference/ctxguard.md"]
    names = {*ctxguard.__all__, "sample_to"} - {"__version__"}
    assert set(re.findall(r"^::: ctxguard\.(\w+)$", page, re.MULTILINE)) == names
    for modules in (modules for _, modules in REFERENCE.values()):
        for module in modules:
            assert public_names(module), module


def test_the_reference_has_what_pages_import(pages: dict[str, str]) -> None:
    reference = "\n".join(text for name, text in pages.items() if name.startswith("reference/"))
    listed = set(re.findall(r"^::: ([\w.]+)$", reference, re.MULTILINE))
    for name, text in pages.items():
        for module, names in re.findall(_IMPORT, text, re.MULTILINE):
            for each in names.split(", "):
                assert f"{module}.{each}" in listed, (name, module, each)
