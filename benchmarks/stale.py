"""Does a column that says when a passage was written keep the wrong release out of the context?

    python -m benchmarks.stale --check --json stale.json

**Corpus.** The docstrings of two releases of the same packages, indexed together, as documentation
is that nobody takes down. The wheels come from PyPI by ``pip download``, once. Each passage has its
package, version and date of release as metadata.

**Questions.** Functions that both releases document and that changed: two thirds ask of the newer
release and do not name it, a third of the older by its version. The function's passage of the
release that is asked of is relevant, that of the other release a distractor.

**Measured.** In every repeat 40 random questions are labelled and calibrate a policy, with the
signal columns and without, and the contexts of all other questions are compared: the share of their
passages that are of the release that was not asked of, and recall. Beside the policy of highest
utility stand the 5 passages that it calls most probable, which are as many as today's. *At random*,
the columns' signals are dealt to other candidates, so that they say nothing.
"""

import ast
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from benchmarks._collection import default_cache, indexed_passages
from benchmarks._command import CONSOLE, command, ended, figures
from benchmarks._gains import environment
from calibration.calibrate_route import calibrate_route
from calibration.data.dataset import Dataset, DistractorKind, Query
from calibration.pools import LabelledPools, Pools, label
from calibration.replay import replay
from calibration.retrievers import wrapped
from calibration.settings import Settings
from calibration.signal_columns import read_columns, without
from ctxguard.core.columns import with_columns
from ctxguard.core.decision import decide
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.types import DEFAULT_K, Passage, Route
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

LABELS = 40
DEPTH = 50
FUNCTIONS = 60
"""Functions of each package, those that changed first."""

QUESTIONS = 30
"""Questions about each package."""

TODAY = f"first {DEFAULT_K}"
COLUMNS = ("updated_at", "version", "package")
MOST_RECALL_LOST = 0.01
MOST_WRONG = 0.5
_MOST_CHARS = 1_200
_FEWEST_CHARS = 80
_ALIKE = (0.3, 0.97)


@dataclass(frozen=True)
class Release:
    """A release of a package on PyPI, and its date."""

    package: str
    version: str
    released: str


RELEASES = [
    (Release("click", "7.0", "2018-09-25"), Release("click", "8.1.7", "2023-08-17")),
    (Release("flask", "1.1.1", "2019-07-08"), Release("flask", "3.0.0", "2023-09-30")),
    (Release("werkzeug", "0.16.0", "2019-09-19"), Release("werkzeug", "3.0.1", "2023-10-24")),
    (Release("jinja2", "2.10.1", "2019-04-06"), Release("jinja2", "3.1.2", "2022-04-28")),
    (Release("rich", "5.0.0", "2020-08-02"), Release("rich", "13.7.0", "2023-11-15")),
    (Release("attrs", "18.2.0", "2018-09-01"), Release("attrs", "23.1.0", "2023-04-16")),
    (Release("networkx", "2.4", "2019-10-16"), Release("networkx", "3.2.1", "2023-10-28")),
    (Release("httpx", "0.13.0", "2020-05-22"), Release("httpx", "0.25.2", "2023-11-24")),
]


def wheel(release: Release, folder: Path) -> Path:
    """The release's wheel, downloaded unless it is there."""
    pattern = f"{release.package}-{release.version}-*.whl"
    found = sorted(each for each in folder.glob("*.whl") if _matches(each, pattern))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        wanted = f"{release.package}=={release.version}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        subprocess.run(  # noqa: S603  nothing of it comes from outside
            [*command, "--only-binary=:all:", "-d", str(folder), wanted], check=True
        )
        found = sorted(each for each in folder.glob("*.whl") if _matches(each, pattern))
    return found[0]


def _matches(file: Path, pattern: str) -> bool:
    return Path(file.name.lower()).match(pattern)


def documented(file: Path) -> dict[str, str]:
    """Signature and docstring of every public function of a wheel, by its full name."""
    found: dict[str, str] = {}
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py") and not any(
                part.startswith("test") for part in Path(name).with_suffix("").parts
            ):
                module = ".".join(Path(name).with_suffix("").parts)
                tree = ast.parse(archive.read(name))
                found |= dict(_functions(tree, module))
    return found


def _functions(tree: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        own = f"{name}.{node.name}"
        text = ast.get_docstring(node) or ""
        if len(text) >= _FEWEST_CHARS:
            signature = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
            yield own, f"{own}{signature}\n\n{text}"[:_MOST_CHARS]
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, own)


@dataclass(frozen=True)
class Documentation:
    """Both releases of all packages, and questions about them.

    Attributes:
        passages: Of both releases.
        dataset: The questions with their labels.
        asked: The release that each question is about: ``old`` or ``new``.
        release_of: The release of each passage.
    """

    passages: tuple[Passage, ...]
    dataset: Dataset
    asked: Mapping[str, str]
    release_of: Mapping[str, str]


def documentation(
    pairs: Sequence[tuple[Release, Release]], folder: Path, seed: int = 0
) -> Documentation:
    """Make the corpus and the questions from wheels."""
    luck = random.Random(seed)
    passages, queries, release_of, asked = [], [], {}, {}
    qrels: dict[str, dict[str, int]] = {}
    distractors: dict[str, dict[str, DistractorKind]] = {}
    for old, new in pairs:
        texts = {"old": documented(wheel(old, folder)), "new": documented(wheel(new, folder))}
        both = sorted(texts["old"].keys() & texts["new"].keys())
        luck.shuffle(both)
        changed = [name for name in both if _changed(texts["old"][name], texts["new"][name])]
        taken = [*changed, *[name for name in both if name not in set(changed)]][:FUNCTIONS]
        for which, release in (("old", old), ("new", new)):
            for name in taken:
                passage_id = f"{name}@{release.version}"
                release_of[passage_id] = which
                metadata = {
                    "package": release.package,
                    "version": release.version,
                    "updated_at": release.released,
                }
                passages.append(Passage(passage_id, texts[which][name], name, metadata))
        for number, name in enumerate(changed[:QUESTIONS]):
            is_old = number % 3 == 2
            right, wrong = (old, new) if is_old else (new, old)
            package = f"{old.package} {old.version}" if is_old else old.package
            short = ".".join(name.split(".")[-2:])
            query_id = f"{name}@{right.version}"
            text = f"What does {short} of {package} do, and which arguments does it take?"
            queries.append(Query(query_id, text))
            asked[query_id] = "old" if is_old else "new"
            qrels[query_id] = {f"{name}@{right.version}": 1, f"{name}@{wrong.version}": 0}
            distractors[query_id] = {f"{name}@{wrong.version}": "distractor"}
    dataset = Dataset("stale", tuple(queries), qrels, distractors=distractors)
    return Documentation(tuple(passages), dataset, asked, release_of)


def _changed(one: str, other: str) -> bool:
    return _ALIKE[0] <= SequenceMatcher(None, one, other, autojunk=False).ratio() <= _ALIKE[1]


def served(
    pools: Pools, policy: Policy, documents: Documentation, query_ids: Sequence[str]
) -> dict[str, float]:
    """The wrong release's share of the contexts, by who is asked of, and recall."""
    wrong: dict[str, list[bool]] = {"old": [], "new": []}
    hits, sizes = [], []
    own = pools.subset(query_ids)
    for query_id, ranking in zip(own.query_ids, own.rankings(), strict=True):
        decision = decide(ranking, policy)
        ids = [ranking.passage_ids[at] for at in decision.kept]
        asked = documents.asked[query_id]
        wrong[asked] += [documents.release_of[name] != asked for name in ids]
        hits.append(any(documents.dataset.qrels[query_id].get(name, 0) > 0 for name in ids))
        sizes.append(len(ids))
    return {
        "wrong": float(np.mean([*wrong["old"], *wrong["new"]])),
        "wrong_asked_old": float(np.mean(wrong["old"])),
        "wrong_asked_new": float(np.mean(wrong["new"])),
        "recall": float(np.mean(hits)),
        "passages": float(np.mean(sizes)),
    }


def measure(
    documents: Documentation, retriever: HybridRetriever, repeats: int, seed: int
) -> dict[str, list[dict[str, float]]]:
    """Calibrate and measure in random parts of the questions, by policy."""
    queries = documents.dataset.queries
    view = wrapped(retriever.with_fusion(Fusion("ranker")).on_route(Route.HYBRID))
    columns = read_columns(view, queries, COLUMNS, DEPTH)
    replayed = replay(view, queries, depth=DEPTH, columns=columns)
    whole = label(replayed, documents.dataset, baseline_k=DEFAULT_K)
    versions = {
        "without columns": without(whole, columns),
        "updated_at, version": without(whole, columns[2:]),
        "updated_at, version, package": whole,
        "columns at random": _at_random(without(whole, columns[2:]), seed),
    }
    first = RatioPolicy(k=DEFAULT_K)
    found: dict[str, list[dict[str, float]]] = {TODAY: []}
    settings = Settings(depth=DEPTH, held_out=0.0, context="utility", policy="expected_utility")
    for repeat in range(repeats):
        ids = [query.query_id for query in queries]
        random.Random(seed + repeat).shuffle(ids)
        labelled, others = ids[:LABELS], ids[LABELS:]
        chosen_on = documents.dataset.subset(labelled)
        found[TODAY].append(served(whole, first, documents, others))
        for name, pools in versions.items():
            own = pools.subset(labelled)
            chosen = calibrate_route(own, chosen_on, None, settings).profile.policy
            policies = {f"{name}, highest utility": chosen}
            if isinstance(chosen, ExpectedUtilityPolicy):
                policies[f"{name}, {DEFAULT_K} most probable"] = replace(
                    chosen, k=DEFAULT_K, cost=0.0
                )
            for policy, each in policies.items():
                found.setdefault(policy, []).append(served(pools, each, documents, others))
    return found


def costs(documents: Documentation, retriever: HybridRetriever) -> float:
    """Milliseconds that the guard takes for the signals of 100 candidates, at the median."""
    view = wrapped(retriever.on_route(Route.LEXICAL))
    queries = documents.dataset.queries[:50]
    columns = read_columns(view, queries, COLUMNS, 100)
    seconds = []
    for query in queries:
        ranking = view.retrieve(query.text, depth=100)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            with_columns(ranking, columns, query.text)
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
    return float(np.median(seconds)) * 1e3


def _at_random(pools: LabelledPools, seed: int) -> LabelledPools:
    """The same with the columns' signals dealt to other candidates of the list."""
    luck = np.random.default_rng(seed)
    signals = dict(pools.signals)
    for name in [name for name in signals if ":" in name]:
        signals[name] = signals[name].copy()
        for row, n in enumerate(pools.lengths.tolist()):
            signals[name][row, :n] = luck.permutation(signals[name][row, :n])
    return replace(pools, signals=signals)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, calibrate and measure; with ``--check``, exit with 1 where a bar is missed."""
    parser = command("Measure whether a column of dates keeps the wrong release out.", seed=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    options = parser.parse_args(arguments)
    documents = documentation(RELEASES, options.cache / "stale", options.seed)
    embedder = SentenceTransformerEmbedder()
    retriever = indexed_passages(documents.passages, options.cache, embedder)
    found = measure(documents, retriever, options.repeats, options.seed)
    names = ("wrong", "wrong_asked_new", "wrong_asked_old", "recall", "passages")
    means = {
        policy: {name: float(np.mean([each[name] for each in runs])) for name in names}
        for policy, runs in found.items()
    }
    columns = ("wrong release", "asked of newer", "of older", "recall", "passages")
    table = figures("contexts of other questions", ("policy",), columns)
    for policy, one in means.items():
        table.add_row(policy, *(f"{one[name]:.3f}" for name in names))
    CONSOLE.print(table)
    best = means[f"updated_at, version, {DEFAULT_K} most probable"]
    plain, chosen = (
        means[f"{name}, highest utility"] for name in ("without columns", "updated_at, version")
    )
    today = means[TODAY]
    bars = {
        "wrong release at least halved, of as many passages": (
            best["wrong"] <= MOST_WRONG * today["wrong"]
        ),
        "their recall loss at most 0.01": best["recall"] >= today["recall"] - MOST_RECALL_LOST,
        "wrong release at least halved by the policy of highest utility": (
            chosen["wrong"] <= MOST_WRONG * plain["wrong"]
        ),
        "its recall loss at most 0.01": chosen["recall"] >= plain["recall"] - MOST_RECALL_LOST,
    }
    CONSOLE.print(f"{len(documents.passages)} passages, {len(documents.dataset)} questions")
    milliseconds = costs(documents, retriever)
    CONSOLE.print(f"signals of {len(COLUMNS)} columns, 100 candidates: {milliseconds:.2f} ms")
    report = {
        "environment": environment(),
        "passages": len(documents.passages),
        "questions": len(documents.dataset),
        "labels": LABELS,
        "repeats": options.repeats,
        "policies": means,
        "milliseconds": milliseconds,
        "bars": bars,
    }
    return ended(options, report, [bar for bar, met in bars.items() if not met])


if __name__ == "__main__":
    sys.exit(main())
