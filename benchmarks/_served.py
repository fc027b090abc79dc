"""Calibrate on some queries of recorded rankings, and measure what the others are served then.

Retrieval and signals are recorded once for a collection. A split then costs one calibration, by
``calibrate`` as people call it, and a request to the guard for every other query.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._timing import environment
from calibration.asking import DEFAULT_PRICE, FIRST, Asking
from calibration.calibrate import Calibration, calibrate
from calibration.data.dataset import Dataset
from calibration.pools import Pools, label
from calibration.retrievers import RecordedRankings
from calibration.settings import Settings
from ctxguard.core.scores import discounts
from ctxguard.core.types import DEFAULT_K, FloatArray, ModeName, Passage, PassagesBy
from ctxguard.guard.assess import AssessorStage
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.measure.metrics import share
from ctxguard.measure.rows import IntArray
from ctxguard.profile.comparison import ProfileCheck
from ctxguard.profile.schema import Profile, RouteProfile

PACKAGES = ("ctxguard-rag", "numpy", "scikit-learn", "sentence-transformers")
"""Whose versions a report names."""

TRUTH_SHARE, FEWEST_TRUE = 0.2, 10
"""Of the answerable queries, a fifth and ten at least stay unlabelled, to be the truth."""

Bars = dict[str, tuple[str, bool]]
"""What must hold in words, with the figure in words and whether it does."""

MOST_OFF = 0.2
"""Of a forecast from the truth, as a share of it."""

_SYSTEM = {"retriever": "recorded"}


class Served(NamedTuple):
    """What some queries are served, shape (n_q,) each.

    Attributes:
        udcg: UDCG.
        recall: Share of all relevant passages of the query; NaN where it has none.
        kept: How many passages.
        tokens: Their tokens; passages where tokens are unknown.
        misleading: How many of them are labelled hard negative or distractor.
        asked: How many candidates an assessor was asked about.
        paid: Of these, those of queries whose answers count, and are not only recorded.
    """

    udcg: FloatArray
    recall: FloatArray
    kept: FloatArray
    tokens: FloatArray
    misleading: FloatArray
    asked: FloatArray
    paid: FloatArray

    def less(self, today: "Served") -> dict[str, float]:
        """Compare with today's contexts of the same queries.

        Returns:
            Recall and UDCG less today's, tokens and misleading passages less today's as a share of
            them (of one passage where today's contexts have none that misleads), and passages kept.
        """
        of_today = max(float(today.misleading.sum()), 1.0)
        return {
            "recall": float(np.nanmean(self.recall - today.recall)),
            "udcg": float((self.udcg - today.udcg).mean()),
            "tokens": float(self.tokens.sum() / today.tokens.sum()) - 1.0,
            "misleading": float((self.misleading - today.misleading).sum()) / of_today,
            "kept": float(self.kept.mean()),
        }


class Answers:
    """An assessor whose answers are known beforehand; a passage's text is its id.

    Args:
        name: Tells it from others.
        answers: By query text, then by passage id; it refuses what is not there.
    """

    def __init__(self, name: str, answers: Mapping[str, Mapping[str, float]]) -> None:
        self.fingerprint, self.names = name, (name,)
        self._answers = answers

    def assess(self, query: str, texts: Sequence[str]) -> dict[str, FloatArray]:
        """Answer about passages by their ids."""
        known = self._answers.get(query, {})
        return {self.fingerprint: np.array([known.get(text, np.nan) for text in texts])}

    def stage(self) -> AssessorStage:
        """The stage that asks it, without a limit that could leave anything out."""
        return AssessorStage(self, deadline_seconds=60.0, max_per_second=1e9)


class Broken(Answers):
    """An assessor of that name which never answers."""

    def assess(self, query: str, texts: Sequence[str]) -> dict[str, FloatArray]:
        """Raise an error."""
        del query, texts
        raise ConnectionError("it is down")


class Recorded:
    """The rankings of all queries of a data set, with their labels.

    Args:
        name: For people.
        dataset: All queries and labels: the truth.
        pools: The candidates of every query, in the retriever's order.
    """

    def __init__(self, name: str, dataset: Dataset, pools: Pools) -> None:
        self.name, self.dataset, self.pools = name, dataset, label(pools, dataset)
        texts = {query.query_id: query.text for query in dataset.queries}
        self.texts = [texts[query_id] for query_id in pools.query_ids]
        rankings = [
            replace(each, passages=PassagesBy(partial(_of_id, each.passage_ids)))
            for each in pools.rankings()
        ]
        self._retriever = RecordedRankings(dict(zip(self.texts, rankings, strict=True)))
        self._columns = [
            {passage_id: column for column, passage_id in enumerate(ids)}
            for ids in pools.passage_ids
        ]

    def sizes(self, wanted: Iterable[int]) -> list[int]:
        """The numbers of labels that leave enough answerable queries for the truth."""
        return [n for n in wanted if n <= self.most_labels]

    @property
    def most_labels(self) -> int:
        """The most answerable queries that may be labelled."""
        total = len(self.dataset.answerable)
        return total - max(FEWEST_TRUE, round(TRUTH_SHARE * total))

    def others(self, labelled: Dataset) -> IntArray:
        """Rows of the queries that are not labelled, nor asked in the same words."""
        known = {query.text for query in labelled.queries}
        return np.flatnonzero([text not in known for text in self.texts])

    def calibrated(
        self, labelled: Dataset, settings: Settings, assessor: Answers | None = None
    ) -> Calibration:
        """Calibrate on the labelled queries, as ``ctxguard calibrate`` does."""
        asking = None
        if assessor is not None:
            asking = Asking(assessor.stage(), lambda name: Passage(name, name), DEFAULT_PRICE)
        return calibrate(self._retriever, labelled, settings, fingerprint=_SYSTEM, asking=asking)

    def served(
        self,
        profile: Profile,
        rows: IntArray,
        *,
        mode: ModeName | None = None,
        assessor: Answers | None = None,
    ) -> Served:
        """What a guard serves to some queries, by the profile's verdict unless a mode is given."""
        guard = ContextGuard(
            self._retriever,
            profile=profile,
            check=ProfileCheck(_SYSTEM),
            mode=mode,
            depth=self.pools.scores.shape[1],
            assessor=None if assessor is None else assessor.stage(),
        )
        contexts, (asked, paid) = [], np.zeros((2, rows.size))
        for place, row in enumerate(rows.tolist()):
            found = guard.retrieve(self.texts[row], request_id=self.pools.query_ids[row])
            contexts.append([self._columns[row][each.passage_id] for each in found.passages])
            if found.assessment is not None:
                asked[place] = found.assessment.asked
                paid[place] = found.assessment.asked * found.assessment.applied
        return self.measured(rows, contexts)._replace(asked=asked, paid=paid)

    def first(self, rows: IntArray, k: int | IntArray = DEFAULT_K) -> Served:
        """The retriever's first k, or as many as are given for each query."""
        kept = np.minimum(k, self.pools.lengths[rows])
        return self.measured(rows, [range(n) for n in kept.tolist()])

    def measured(self, rows: IntArray, contexts: Sequence[Sequence[int]]) -> Served:
        """Contexts of some queries, as columns of the pools, best first."""
        labels, discount = self.pools.rows(rows), discounts(self.pools.scores.shape[1])
        kept = np.array([len(own) for own in contexts], dtype=np.float64)
        udcg, found, tokens, misleading = np.zeros((4, rows.size))
        sizes = self.pools.tokens
        costs = np.ones(labels.grades.shape) if sizes is None else np.nan_to_num(sizes[rows])
        for place, own in enumerate(map(list, contexts)):
            udcg[place] = labels.utilities[place, own] @ discount[: len(own)]
            found[place] = labels.relevant[place, own].sum()
            tokens[place], misleading[place] = (
                costs[place, own].sum(),
                labels.misleading[place, own].sum(),
            )
        return Served(
            udcg,
            share(found, labels.n_relevant),
            kept,
            tokens,
            misleading,
            *np.zeros((2, rows.size)),
        )

    def recall_at(self, rows: IntArray, tokens: float) -> float:
        """Mean recall of the retriever's own order cut where it costs so many tokens on the mean.

        Between two sizes of context it is interpolated.
        """
        labels, sizes = self.pools.rows(rows), self.pools.tokens
        costs = labels.retrieved * 1.0 if sizes is None else np.nan_to_num(sizes[rows])
        some = labels.n_relevant > 0
        found = labels.relevant[some].cumsum(axis=1) / labels.n_relevant[some, None]
        at, recall = (np.pad(each.mean(axis=0), (1, 0)) for each in (costs.cumsum(axis=1), found))
        return float(np.interp(tokens, at, recall))


def only_route(profile: Profile) -> RouteProfile:
    """The part of the one route that recorded rankings have."""
    (route,) = profile.routes.values()
    return route


def decision_of(profile: Profile) -> str:
    """The verdict: ``enforce``, ``shadow`` or ``keep``."""
    verdict = only_route(profile).verdict
    return "keep" if verdict is None else verdict.decision


def few_labels(dataset: Dataset, n: int, seed: int) -> Dataset:
    """Queries drawn at random until ``n`` of them are answerable."""
    order = np.random.default_rng([seed, n]).permutation(len(dataset))
    answerable = set(dataset.answerable)
    drawn: list[str] = []
    found = 0
    for row in order.tolist():
        query_id = dataset.queries[row].query_id
        drawn.append(query_id)
        found += query_id in answerable
        if found == n:
            break
    return dataset.subset(drawn)


def asking_figures(
    recorded: Recorded, labelled: Dataset, settings: Settings, assessor: Answers
) -> dict[str, float]:
    """What is served where an assessor is asked, on the other queries.

    Returns:
        The figures of `Served.less` than today's first 5. ``gain`` is UDCG less that of the same
        calibration without an assessor, ``net`` less the price of every candidate whose answer
        counts. ``share`` is that of the first 20 candidates, asked for the record alone too;
        ``forecast`` is the profile's figure of the net gain, NaN where nobody is asked and where it
        is not known. ``unlike`` counts the queries which are served something else than without an
        assessor where it is down.
    """
    rows = recorded.others(labelled)
    without = recorded.served(recorded.calibrated(labelled, settings).profile, rows)
    profile = recorded.calibrated(labelled, settings, assessor).profile
    having = recorded.served(profile, rows, assessor=assessor)
    failing = recorded.served(profile, rows, assessor=Broken(assessor.fingerprint, {}))
    part = only_route(profile).assessor
    forecast = None if part is None else part.forecast
    gain = float((having.udcg - without.udcg).mean())
    return {
        **having.less(recorded.first(rows)),
        "gain": gain,
        "net": gain - DEFAULT_PRICE * float(having.paid.mean()),
        "share": float(having.asked.sum() / np.minimum(recorded.pools.lengths[rows], FIRST).sum()),
        "forecast": np.nan if forecast is None else forecast,
        "enforced": float(part is not None and part.decision == "enforce"),
        "unlike": float((failing.udcg != without.udcg).sum()),
    }


def mean_figures(runs: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Means over runs of `asking_figures`, each over those that have it.

    ``asking`` is the share of runs that asked at all; ``enforced_net`` and ``enforced_forecast``
    are means over the ``n_forecast`` of the ``n_enforced`` runs whose answers are applied and whose
    gain is forecast.
    """

    def mean(name: str, own: Sequence[Mapping[str, float]]) -> float | None:
        values = [run[name] for run in own if not np.isnan(run[name])]
        return float(np.mean(values)) if values else None

    enforced = [run for run in runs if run["enforced"]]
    told = [run for run in enforced if not np.isnan(run["forecast"])]
    return {
        "runs": len(runs),
        **{name: mean(name, runs) for name in runs[0]},
        "asking": float(np.mean([run["share"] > 0.0 for run in runs])),
        "n_enforced": len(enforced),
        "n_forecast": len(told),
        **{f"enforced_{name}": mean(name, told) for name in ("net", "forecast")},
    }


def plain_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """A table without lines, which fits into 80 columns."""
    found = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in left:
        found.add_column(column, no_wrap=True)
    for column in right:
        found.add_column(column, justify="right", no_wrap=True)
    return found


def asking_table(title: str, rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """A row for each assessor and set, of `mean_figures`.

    Recall is less that of today's first 5, tokens and misleading passages are against theirs;
    ``on`` is the share of runs that apply the answers; of these with a forecast are the net gain
    in UDCG in truth and by that forecast.
    """
    columns = ("recall", "tokens", "misleading", "asked", "on", "truth", "forecast")
    found = plain_table(title, ("assessor", "set"), columns)
    for assessor, by_set in rows.items():
        for name, own in by_set.items():
            gains = [own[f"enforced_{which}"] for which in ("net", "forecast")]
            found.add_row(
                assessor,
                name[:14],
                f"{own['recall']:+.3f}",
                *(f"{own[which]:+.0%}" for which in ("tokens", "misleading")),
                *(f"{own[which]:.0%}" for which in ("share", "enforced")),
                *("" if gain is None else f"{gain:+.2f}" for gain in gains),
            )
    return found


def asking_bars(rows: Sequence[Mapping[str, Any]]) -> Bars:
    """The forecast against the truth, where answers are applied; and what a failure serves."""
    own = [row for row in rows if row["n_forecast"]]
    n = sum(row["n_forecast"] for row in own)
    truth, forecast = (
        sum(row["n_forecast"] * row[f"enforced_{name}"] for row in own) / max(n, 1)
        for name in ("net", "forecast")
    )
    unlike = sum(row["runs"] * row["unlike"] for row in rows)
    return {
        f"asking: forecast within {MOST_OFF:.0%} of the truth on the mean": (
            f"{forecast:+.3f}, truth {truth:+.3f}, {n} enforced with a forecast",
            n > 0 and abs(forecast - truth) <= MOST_OFF * abs(truth),
        ),
        "asking: a failure serves what there is without": (
            f"{unlike:.0f} queries are served something else",
            unlike == 0.0,
        ),
    }


def print_bars(bars: Bars, console: Console) -> None:
    """A line for each bar."""
    for words, (figure, holds) in bars.items():
        console.print(f"{'holds ' if holds else 'MISSED'} {words}: {figure}", highlight=False)


def write_report(file: Path | None, bars: Bars, report: Mapping[str, Any]) -> None:
    """Write the figures, with what they depend on, if there is a file."""
    if file is None:
        return
    found = {
        "environment": environment(PACKAGES),
        **report,
        "bars": {words: {"figure": at, "holds": holds} for words, (at, holds) in bars.items()},
    }
    file.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _of_id(ids: Sequence[str], position: int) -> Passage:
    return Passage(ids[position], ids[position])
