"""``ctxguard fit ranker``, and the other commands with its file."""

import json
from pathlib import Path

import pytest
from running import Run

from calibration.data.readers import read_corpus
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.signals.ranker import Ranker

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def fitted(
    run: Run, index: Path, collection: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A ranker that was fitted on the split train."""
    out = tmp_path_factory.mktemp("ranker") / "new" / "ranker.json"
    run.ok("fit", "ranker", "--index", index, "--data", collection, "--out", out)
    return out


def test_it_shows_the_three_orders_and_says_which_to_serve(
    run: Run, index: Path, collection: Path
) -> None:
    result = run.ok("fit", "ranker", "--index", index, "--data", collection)
    for words in ("reciprocal ranks", "shipped ranker", "fitted ranker", "nDCG@10", "verdict"):
        assert words in result.stdout
    assert "keep the shipped one" in " ".join(result.stdout.split())


def test_json_has_every_order_with_its_interval_and_the_differences(
    run: Run, index: Path, collection: Path, tmp_path: Path
) -> None:
    out = tmp_path / "ranker.json"
    document = run.read(
        "fit", "ranker", "--index", index, "--data", collection, "--out", out, "--json"
    )
    assert set(document["ndcg_at_10"]) == {"reciprocal_rank", "shipped", "fitted"}
    assert document["ndcg_at_10"]["fitted"]["n"] == 24
    assert set(document["differences"]["fitted"]) == {"reciprocal_rank", "shipped"}
    assert document["differences"]["fitted"]["shipped"]["outcome"] in {"within noise", "no data"}
    assert document["levels"] == ["full", "text"]
    assert Ranker.load(out).digest() == document["ranker"]


def test_equal_labels_give_equal_bytes(
    run: Run, index: Path, collection: Path, fitted: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again.json"
    run("fit", "ranker", "--index", index, "--data", collection, "--out", again)
    assert again.read_bytes() == fitted.read_bytes()


def test_the_fitted_ranker_names_what_it_was_fitted_to(fitted: Path) -> None:
    assert Ranker.load(fitted).trained_on == (*Ranker.default().trained_on, "household/train")


def test_a_search_with_it_is_another_system(
    run: Run, index: Path, collection: Path, fitted: Path
) -> None:
    def fusion(**described: str) -> str:
        result = run.ok(
            *("evaluate", "--index", index, "--data", collection, "--json"), system=described
        )
        found: str = json.loads(result.stdout)["fingerprint"]["fusion"]
        return found

    assert Ranker.default().digest() in fusion()
    assert Ranker.load(fitted).digest() in fusion(ranker=str(fitted))


def test_an_index_without_signals_is_told(run: Run, collection: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    HybridRetriever.build(read_corpus(collection), signals="none").save(folder)
    run.refused("fit", "ranker", "--index", folder, "--data", collection, says="has no signals")
