"""Are the passages that contradict each other told, and no others?

    python -m benchmarks.conflicts --data DIR … demo --check --json conflicts.json

**Wrong passages.** In a collection whose questions name their right and wrong answers
(``gold_answers`` and ``wrong_answers`` in ``metadata``), whose wrong passages are labelled
distractors and whose pools are given (RAMDocs), each pool is compared as one context, cut to the
most passages that are compared. A wrong passage counts as named if a conflict pairs it with a
relevant one, and a difference holds words of the wrong answer that the right one lacks in the wrong
passage, or the other way round. Two relevant passages have equal answers if the question has one
right answer, or both have the words of the same one and of no other. The settings were chosen on
the training half of the questions; the halves stand apart.

**Contexts.** The first 5 candidates of each question by reciprocal ranks, in every collection: how
many are flagged, and how long the comparison takes, the fastest of three.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._collection import Collection, default_cache
from benchmarks.policies import environment
from calibration.data.dataset import Dataset
from calibration.data.readers import read_beir, splits
from ctxguard.core.conflicts import MAX_PASSAGES, Conflict, find_conflicts
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Are the passages that contradict each other told, and no others?"
K = 5
REPEATS = 3
LEAST_NAMED = 0.5
MOST_EQUAL = 0.02
MOST_CONTEXTS = 0.03
MOST_MILLISECONDS = 0.3


@dataclass(frozen=True)
class Pairs:
    """Pools with wrong passages.

    Attributes:
        name: The collection and its split.
        wrong: Wrong passages.
        paired: Those that a conflict pairs with a relevant passage.
        named: Those of them with the answer in a difference.
        equal: Pairs of relevant passages with equal answers.
        equal_flagged: Those of them that are said to conflict.
    """

    name: str
    wrong: int = 0
    paired: int = 0
    named: int = 0
    equal: int = 0
    equal_flagged: int = 0

    @property
    def named_share(self) -> float:
        """Share of the wrong passages that is named."""
        return self.named / self.wrong

    @property
    def equal_share(self) -> float:
        """Share of the pairs of equal answers that is flagged."""
        return self.equal_flagged / self.equal


@dataclass(frozen=True)
class Contexts:
    """The contexts of one collection.

    Attributes:
        name: The collection.
        contexts: How many there are.
        flagged: How many hold a conflict.
        milliseconds: Time of one comparison, by percentile.
    """

    name: str
    contexts: int
    flagged: int
    milliseconds: Mapping[str, float]


def words(text: str) -> list[str]:
    """The words of a text, without case."""
    return re.findall(r"\w+", text.casefold())


def answers_in(text: str, answers: Sequence[str]) -> frozenset[int]:
    """Which answers a text holds word for word.

    >>> sorted(answers_in("It had 4,411 inhabitants.", ["4,411", "4,4"]))
    [0]
    """
    spaced = f" {' '.join(words(text))} "
    return frozenset(
        at for at, answer in enumerate(answers) if f" {' '.join(words(answer))} " in spaced
    )


def measure_pairs(folder: Path, split: str) -> Pairs:
    """Compare the pools of one split of a collection."""
    dataset = read_beir(folder, split)
    texts = {row["_id"]: row["text"] for row in _rows(folder / "corpus.jsonl")}
    answers = {row["_id"]: row["metadata"] for row in _rows(folder / "queries.jsonl")}
    pools = {row["query_id"]: row["passage_ids"] for row in _rows(folder / "pools.jsonl")}
    counts = {"wrong": 0, "paired": 0, "named": 0, "equal": 0, "equal_flagged": 0}
    for query in dataset.queries:
        ids = pools[query.query_id][:MAX_PASSAGES]
        found = find_conflicts(query.text, [texts[name] for name in ids])
        one = _pairs_of(dataset, query.query_id, ids, texts, answers[query.query_id], found)
        counts = {name: n + one[name] for name, n in counts.items()}
    return Pairs(f"{folder.name}, {split}", **counts)


def _pairs_of(  # noqa: PLR0917
    dataset: Dataset,
    query_id: str,
    ids: Sequence[str],
    texts: Mapping[str, str],
    answers: Mapping[str, Sequence[str]],
    found: Sequence[Conflict],
) -> dict[str, int]:
    right = dataset.relevant(query_id)
    wrong = {
        name for name, kind in dataset.distractors.get(query_id, {}).items() if kind == "distractor"
    }
    paired, named = set(), set()
    for conflict in found:
        pair = ids[conflict.first - 1], ids[conflict.second - 1]
        for at, other in ((0, 1), (1, 0)):
            if pair[at] in wrong and pair[other] in right:
                paired.add(pair[at])
                if _names_answer(conflict, at, answers):
                    named.add(pair[at])
    flagged = {(ids[each.first - 1], ids[each.second - 1]) for each in found}
    gold = answers["gold_answers"]
    equal = [
        (one, other)
        for one, other in combinations([name for name in ids if name in right], 2)
        if len(gold) == 1
        or (
            len(answers_in(texts[one], gold)) == 1
            and answers_in(texts[one], gold) == answers_in(texts[other], gold)
        )
    ]
    return {
        "wrong": len(wrong & set(ids)),
        "paired": len(paired),
        "named": len(named),
        "equal": len(equal),
        "equal_flagged": len(flagged & set(equal)),
    }


def _names_answer(conflict: Conflict, wrong: int, answers: Mapping[str, Sequence[str]]) -> bool:
    """Whether a difference holds words of the wrong answer, or of the right one beside it."""
    false = set(words(" ".join(answers["wrong_answers"])))
    true = set(words(" ".join(answers["gold_answers"])))
    return any(
        set(words(pair[wrong].text)) & (false - true)
        or set(words(pair[1 - wrong].text)) & (true - false)
        for pair in conflict.differences
    )


def measure_contexts(collection: Collection) -> Contexts:
    """Compare the first candidates of every question."""
    pools = collection.by_reciprocal_rank(with_signals=False).pools
    text_of = {query.query_id: query.text for query in collection.dataset.queries}
    flagged, seconds = 0, []
    for query_id, ids in zip(pools.query_ids, pools.passage_ids, strict=True):
        texts = [collection.retriever.passage(name).text for name in ids[:K]]
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            found = find_conflicts(text_of[query_id], texts)
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
        flagged += bool(found)
    milliseconds = {
        f"p{percent}": float(np.percentile(seconds, percent)) * 1e3 for percent in (50, 90, 99)
    }
    return Contexts(collection.name, len(seconds), flagged, milliseconds)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _has_wrong_answers(folder: Path) -> bool:
    file = folder / "queries.jsonl"
    return (folder / "pools.jsonl").exists() and "wrong_answers" in file.read_text(encoding="utf-8")


def _together(name: str, parts: Sequence[Pairs]) -> Pairs:
    counts = ("wrong", "paired", "named", "equal", "equal_flagged")
    return Pairs(name, **{each: sum(getattr(one, each) for one in parts) for each in counts})


def _show(pairs: Sequence[Pairs], contexts: Sequence[Contexts], console: Console) -> None:
    table = Table("pools", "wrong", "named", "share", "equal answers", "flagged", "share")
    for one in pairs:
        table.add_row(
            one.name,
            *(str(one.wrong), str(one.named), f"{one.named_share:.1%}"),
            *(str(one.equal), str(one.equal_flagged), f"{one.equal_share:.1%}"),
        )
    console.print(table)
    table = Table("contexts", "n", "flagged", "share", "p50 ms", "p90", "p99")
    for each in contexts:
        times = [f"{value:.2f}" for value in each.milliseconds.values()]
        share = f"{each.flagged / each.contexts:.1%}"
        table.add_row(each.name, str(each.contexts), str(each.flagged), share, *times)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both parts; with ``--check``, the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.conflicts", description=SUMMARY)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    console = Console(width=120)
    pairs: list[Pairs] = []
    for folder in options.data:
        if _has_wrong_answers(folder):
            parts = [measure_pairs(folder, split) for split in splits(folder)]
            pairs += [*parts, _together(f"{folder.name}, all", parts)]
    embedder = SentenceTransformerEmbedder()
    contexts = [
        measure_contexts(Collection(folder, options.cache, embedder)) for folder in options.data
    ]
    _show(pairs, contexts, console)
    without = [one for one in contexts if not any(pair.name.startswith(one.name) for pair in pairs)]
    whole = [one for one in pairs if one.name.endswith(", all")]
    bars = {
        f"at least {LEAST_NAMED:.0%} of wrong passages named": all(
            one.named_share >= LEAST_NAMED for one in whole
        ),
        f"at most {MOST_EQUAL:.0%} of equal answers flagged": all(
            one.equal_share <= MOST_EQUAL for one in whole
        ),
        f"at most {MOST_CONTEXTS:.0%} of other contexts flagged": (
            sum(one.flagged for one in without)
            <= MOST_CONTEXTS * sum(one.contexts for one in without)
        ),
        f"within {MOST_MILLISECONDS} ms at the median": all(
            one.milliseconds["p50"] <= MOST_MILLISECONDS for one in contexts
        ),
    }
    console.print(f"bars: {bars}")
    if options.json is not None:
        results: dict[str, Any] = {
            "environment": environment(),
            "pairs": [
                {**asdict(one), "named_share": one.named_share, "equal_share": one.equal_share}
                for one in pairs
            ],
            "contexts": [{**asdict(one), "share": one.flagged / one.contexts} for one in contexts],
            "bars": bars,
        }
        text = json.dumps(results, indent=2, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if all(bars.values()) or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
