"""The page's example of a system file, taken by each command that it names."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from household import write_jsonl
from running import Run

from ctxguard import sample_to
from ctxguard.profile.schema import Profile
from ctxguard.server.settings import ServiceSettings
from tests.monitor.chat_endpoint import ChatEndpoint
from tests.rerank_endpoint import RerankEndpoint, share_of_words

pytest.importorskip("httpx2")

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's folder: the page's file, and those that it names."""

    def rows(name: str) -> list[Any]:
        lines = (collection / name).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    texts = {each["_id"]: each["text"] for each in rows("corpus.jsonl")}
    relevant: dict[str, list[str]] = {}
    for line in (collection / "qrels" / "train.tsv").read_text().splitlines()[1:]:
        query_id, passage_id, grade = line.split("\t")
        relevant.setdefault(query_id, []).extend([passage_id] * (int(grade) > 0))
    asked = {each["_id"]: each["text"] for each in rows("queries.jsonl")}
    write_jsonl(
        tmp_path / "labels.jsonl",
        (
            {"query_id": name, "text": asked[name], "relevant": found}
            for name, found in relevant.items()
        ),
    )
    documents = [{"id": name, "text": text} for name, text in texts.items()]
    candidates = ({"query": asked[name], "documents": documents} for name in relevant)
    write_jsonl(tmp_path / "candidates.jsonl", candidates)
    with closing(RerankEndpoint(share_of_words)) as reranker:
        [example] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
        file = tmp_path / "system.toml"
        file.write_text(example.replace("http://localhost:8080", reranker.url), encoding="utf-8")
        yield tmp_path


def test_each_command_of_the_page_takes_the_file(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = re.findall(r"^ctxguard (\w+) --system system\.toml$", PAGE, re.MULTILINE)
    assert shown == ["calibrate", "serve", "monitor"]

    run.ok("calibrate", "--system", "system.toml")
    made_for = Profile.load(folder / "profile.json").fingerprint["reranker"]
    assert made_for == "tei bge-reranker-v2-m3"

    served: list[ServiceSettings] = []
    monkeypatch.setattr(
        "ctxguard.server.run.serve", lambda settings, *_, **__: served.append(settings)
    )
    run.ok("serve", "--system", "system.toml")
    [settings] = served
    assert (settings.rerank_model, settings.max_documents) == ("bge-reranker-v2-m3", 200)
    assert settings.profile is not None
    assert settings.profile.resolve() == folder / "profile.json"
    assert settings.store == "sqlite:///samples.db"

    writer = sample_to(settings.store, rate=1.0)
    writer.stop()
    writer.store.close()
    with closing(ChatEndpoint()) as chat:
        monkeypatch.setenv("OPENAI_BASE_URL", chat.url)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        run.ok("monitor", "--system", "system.toml", "--once")
