"""The names that ``ctxguard`` exports: adding or removing one is a decision, made here too."""

import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import calibration
import ctxguard

NAMES = [
    "Assembly",
    "AsyncRetriever",
    "CalibrationError",
    "ConfigurationError",
    "Context",
    "ContextGuard",
    "CorpusSketch",
    "CtxguardError",
    "DataError",
    "Deadlines",
    "Decision",
    "DropReason",
    "ExpectedUtilityPolicy",
    "FilterViolationError",
    "FilteringRetriever",
    "Flag",
    "Fusion",
    "Hit",
    "HybridRetriever",
    "IndexFolderError",
    "IndexWatcher",
    "JudgingRates",
    "Leg",
    "MissingExtraError",
    "Mode",
    "OverloadedError",
    "Passage",
    "Privacy",
    "Profile",
    "ProfileCheck",
    "ProfileError",
    "ProfileFormatError",
    "ProfileMismatchError",
    "ProfileWatcher",
    "QueryError",
    "Ranking",
    "RatioPolicy",
    "RequestLimits",
    "Retriever",
    "RetrieverFunction",
    "Route",
    "ScoreKind",
    "StageError",
    "StageUnavailableError",
    "SwappingRetriever",
    "TextSignals",
    "Utilities",
    "CandidateDecision",
    "Where",
    "WithTextSignals",
    "__version__",
    "decide",
    "passage_digest",
]
NEEDING_AN_EXTRA = ["sample_to"]


def run(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_exported_names_are_these() -> None:
    assert sorted(ctxguard.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", [*NAMES, *NEEDING_AN_EXTRA])
def test_every_name_is_there_and_listed(name: str) -> None:
    assert getattr(ctxguard, name) is not None
    assert name in dir(ctxguard)


def test_no_two_classes_share_a_name() -> None:
    folders = [Path(package.__path__[0]) for package in (ctxguard, calibration)]
    sources = [file.read_text("utf-8") for folder in folders for file in folder.rglob("*.py")]
    names = Counter(name for text in sources for name in re.findall(r"(?m)^ *class (\w+)", text))
    assert [name for name, count in names.items() if count > 1] == []


def test_absent_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Retriver'"):
        _ = ctxguard.Retriver


def test_importing_it_imports_nothing_more() -> None:
    run(
        "import sys, ctxguard\n"
        "assert not {'numpy', 'pydantic', 'asyncio'} & set(sys.modules)\n"
        "ours = {name for name in sys.modules if name.startswith('ctxguard')}\n"
        "assert ours == {'ctxguard'}, ours\n"
    )


def test_guard_imports_no_retrieval_or_monitor() -> None:
    run(
        "import sys, ctxguard\n"
        "ctxguard.ContextGuard\n"
        "heavy = {'ctxguard.retrieval', 'ctxguard.monitor', 'sqlalchemy', 'faiss', 'torch'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert ctxguard.HybridRetriever.__module__ in sys.modules\n"
    )


def test_bare_install_names_the_needed_extra() -> None:
    absent = ["sqlalchemy", "faiss", "bm25s", "sentence_transformers", "torch", "scipy"]
    run(
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({absent}))\n"
        "from ctxguard import *\n"
        "import ctxguard\n"
        "assert HybridRetriever and ContextGuard\n"
        "try:\n"
        "    ctxguard.sample_to\n"
        "except ctxguard.MissingExtraError as error:\n"
        "    assert '[monitor]' in str(error)\n"
        "else:\n"
        "    raise AssertionError('sample_to needs sqlalchemy')\n"
    )


@pytest.mark.parametrize(
    "taking", ["ctxguard.guard.context_guard:ContextGuard", "ctxguard.monitor.service:Monitor"]
)
def test_constructors_take_at_most_14_arguments(taking: str) -> None:
    module, name = taking.split(":")
    kind = getattr(importlib.import_module(module), name)
    assert len(inspect.signature(kind).parameters) <= 14
