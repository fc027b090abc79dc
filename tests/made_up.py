"""Collections, losses and wheels that tests make up."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._served import Recorded
from benchmarks.stale import Release
from calibration.data.dataset import Dataset, Query
from calibration.pools import Pools
from ctxguard.core.types import FloatArray, Route, ScoreKind


def recorded_of(
    relevant: np.ndarray,
    scores: FloatArray,
    tokens: FloatArray,
    *,
    route: Route = Route.EXTERNAL,
    kind: ScoreKind = ScoreKind.PROBABILITY,
    legs: dict[str, ScoreKind] | None = None,
    **pools: Any,
) -> Recorded:
    """Lists of passages ``p{query}-{rank}``, all of them labelled; each leg has the scores too."""
    ids = tuple(
        tuple(f"p{row}-{column}" for column in range(scores.shape[1])) for row in range(len(scores))
    )
    queries = tuple(Query(f"q{row}", f"question q{row}") for row in range(len(scores)))
    qrels = {
        query.query_id: dict(zip(own, map(int, known), strict=True))
        for query, own, known in zip(queries, ids, relevant, strict=True)
    }
    legs = legs or {}
    lists = Pools(
        route,
        kind,
        tuple(qrels),
        ids,
        scores,
        dict.fromkeys(legs, scores),
        legs,
        tokens=tokens,
        **pools,
    )
    return Recorded("made up", Dataset("made up", queries, qrels), lists)


def write_wheel(folder: Path, release: Release, file: str, source: str) -> None:
    """Write the wheel of a release with a file, and a test that is no documentation."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{release.package}-{release.version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(f"{release.package}/{file}", source)
        archive.writestr(f"{release.package}/tests/test_{file}", source)


def fractional_losses(
    rng: np.random.Generator, shape: tuple[int, ...], mean: float, certain: float
) -> FloatArray:
    """Losses with the mean given: 0 or 1 with probability ``certain``, else from a Beta."""
    between = rng.beta(2.0 * mean, 2.0 * (1.0 - mean), shape)
    ends = (rng.random(shape) < mean).astype(float)
    return np.where(rng.random(shape) < certain, ends, between)
