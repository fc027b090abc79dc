"""``golden coverage`` asks for labels of the passages that are served, in the order of serving."""

import json
from pathlib import Path
from typing import Any

import pytest
from running import Run

from calibration.data.readers import read_beir
from ctxguard import ContextGuard
from ctxguard.core.fusion import Fusion
from ctxguard.profile.schema import Profile
from ctxguard.retrieval import HybridRetriever

K = 5

pytestmark = pytest.mark.model


def coverage(run: Run, index: Path, data: Path, *more: object, **keys: object) -> dict[str, Any]:
    result = run.ok(
        *("golden", "coverage", "--index", index, "--data", data, "--json", *more),
        system={"coverage": {"k": [K], "limit": 10_000, **keys}},
    )
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


class TestAskedForIsServed:
    def test_the_passages_to_label_are_the_unlabelled_ones_that_a_guard_serves(
        self, index: Path, collection: Path, tmp_path: Path, run: Run
    ) -> None:
        coverage(run, index, collection, "--out", tmp_path / "todo.jsonl")
        rows = rows_of(tmp_path / "todo.jsonl")
        asked = {(row["query_id"], row["passage_id"], row["rank"]) for row in rows}
        coverage(run, index, collection, "--out", tmp_path / "part.jsonl", limit=3)
        assert rows_of(tmp_path / "part.jsonl") == rows[:3]
        retriever = HybridRetriever.load(index)
        assert all(row["text"] == retriever.passage(row["passage_id"]).text for row in rows)
        guard = ContextGuard(retriever, k=K)
        dataset = read_beir(collection, split="test")
        served = {
            (query.query_id, passage.passage_id, rank)
            for query in dataset.queries
            for rank, passage in enumerate(guard.retrieve(query.text).passages, start=1)
            if passage.passage_id not in dataset.qrels[query.query_id]
        }
        assert asked == served

    def test_with_a_profile_the_order_is_that_of_its_fusion(
        self, index: Path, collection: Path, profile: Path, tmp_path: Path, run: Run
    ) -> None:
        other = tmp_path / "convex.json"
        retriever = HybridRetriever.load(index).with_fusion(Fusion("convex"))
        loaded = Profile.load(profile)
        convex = {"fusion": retriever.fusion, "fingerprint": dict(retriever.fingerprint())}
        loaded.model_copy(update=convex).save(other)
        document = coverage(
            run, index, collection, "--out", tmp_path / "todo.jsonl", profile=str(other)
        )
        assert document["fusion"]["method"] == "convex"
        dataset, asked = read_beir(collection, split="test"), rows_of(tmp_path / "todo.jsonl")
        for query in dataset.queries:
            ranking = retriever.retrieve(query.text, depth=loaded.provenance.depth)
            of_query = {row["passage_id"] for row in asked if row["query_id"] == query.query_id}
            labelled = dataset.qrels[query.query_id].keys()
            assert of_query == set(ranking.passage_ids[:K]) - labelled

    def test_calibrate_finds_the_same_share_labelled(
        self, index: Path, collection: Path, tmp_path: Path, run: Run
    ) -> None:
        freeze = ("golden", "freeze", collection, "--source", "human", "--split", "train")
        assert run(*freeze, "--out", tmp_path / "set").exit_code == 0
        todo, grown = tmp_path / "todo.jsonl", tmp_path / "grown"
        before = coverage(run, index, tmp_path / "set", "--out", todo)
        graded = [{**row, "grade": 0, "annotator": "ann"} for row in rows_of(todo)]
        assert before["unjudged"] == len(graded) > 0
        todo.write_text("".join(json.dumps(row) + "\n" for row in graded), encoding="utf-8")
        run.ok("golden", "freeze", tmp_path / "set", todo, "--out", grown)
        (row,) = coverage(run, index, grown)["coverage"]
        document = run.read(
            *("calibrate", "--index", index, "--data", grown, "--out", tmp_path / "profile.json"),
            "--json",
            system={
                "calibrate": {"serving-k": K, "held-out": 0.0, "cache": str(tmp_path / "cache")}
            },
        )
        assert document["fusion"]["method"] == "ranker"
        judged = document["routes"]["hybrid"]["summary"]["judged"]["value"]
        assert row["judged"]["value"] == judged == 1.0
