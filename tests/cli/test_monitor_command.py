"""`ctxguard monitor`: judge what was sampled, say what it tells, ring where a promise is broken."""

import json
import re
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from chat_endpoint import Answer, ChatEndpoint
from household import read_rows, write_jsonl
from live_traffic import (
    BROKEN,
    DEPTH,
    EVERYTHING,
    ONLY_SERVED,
    Traffic,
    judge,
    mean_precision,
    profile_of,
    serve,
    states,
)
from prometheus_client import CollectorRegistry
from running import Result, Run, ok, read

from ctxguard.core.corpus_sketch import CorpusSketch, passage_digest
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.measure.metrics import Metric
from ctxguard.monitor.sampling.record import Privacy
from ctxguard.monitor.store import LabelRow, SampleStore, State
from ctxguard.monitor.store.writer import sample_to
from ctxguard.profile.schema import Profile
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from tests.stored import request_of

Once = Callable[..., Result]
"""Runs `ctxguard monitor --once` on some traffic."""


PRICE: dict[str, object] = {"price-per-million": 2.5}


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    pytest.importorskip("truststore")
    with closing(ChatEndpoint()) as serving:
        yield serving


@pytest.fixture
def once(run: Run) -> Once:
    return partial(judge, run)


def test_saved_tokens_show_their_price(once: Once, tmp_path: Path) -> None:
    traffic = serve(tmp_path, 20, profile=profile_of(RatioPolicy(k=2)))
    said = " ".join(ok(once(traffic, **PRICE)).stdout.split())
    found = read(once(traffic, "--json", **PRICE))["tokens"]["enforce"]
    assert 0 < found["kept"] < found["today"]
    saved = (found["today"] - found["kept"]) * 2.5e-6
    assert found["saved_cost"] == pytest.approx(saved)
    assert f"about {found['kept']:,.0f} tokens in place of today's {found['today']:,.0f}" in said
    assert "fewer: 0.00 saved at 2.5 per million" in said
    without = read(once(traffic, "--json"))["tokens"]["enforce"]
    assert without == {**found, "saved_cost": None}


def test_profile_of_another_system_is_told(once: Once, tmp_path: Path) -> None:
    other = profile_of(RatioPolicy(k=2)).model_copy(update={"fingerprint": {"embedder": "old"}})
    traffic = serve(tmp_path, 7, profile=other)
    found = ok(once(traffic, columns="80"))
    said = " ".join((found.stdout + found.stderr).split())
    assert "7 samples answered under a profile that was calibrated on another system" in said
    assert read(once(traffic, "--json"))["mismatched_samples"] == 7
    (own := tmp_path / "own").mkdir()
    own_traffic = serve(own, 7, profile=profile_of(RatioPolicy(k=2)))
    assert read(once(own_traffic, "--json"))["mismatched_samples"] == 0


class TestOnce:
    def test_known_labels_give_exact_figures(self, once: Once, tmp_path: Path) -> None:
        """A person reads what was taken, judged and found; few requests give no figure yet."""
        traffic = serve(tmp_path, 40)
        shown = ok(once(traffic)).stdout
        assert "40 taken, 40 stored, 0 lost" in shown
        assert "this run   40 judged" in shown
        # Windows that hold the same requests are one row; a metric stands above its parts.
        assert re.search(r"all windows +40 judged requests from .* UTC", shown)
        assert shown.index("UDCG") < shown.index("its gain")
        figure = r"precision +0\.\d\d \[0\.\d\d, 0\.\d\d\] +recent window +\d+"
        assert re.search(figure, shown)
        assert len(shown.splitlines()) <= 40
        assert "unlabelled passages count as not relevant" in " ".join(shown.split())
        found = read(once(traffic, "--json"))
        assert found["stored"] == found["sampled"] == 40
        assert found["waiting"] == 0
        for window in ("recent", "all_retained"):
            precision = found["estimates"][window]["precision"]
            assert precision["value"] == pytest.approx(mean_precision(traffic))
            assert precision["lower"] < precision["value"] < precision["upper"]
        assert found["judge_estimates"] == {}
        (folder := tmp_path / "few").mkdir()
        few = ok(once(serve(folder, 5)))
        assert re.search(r"precision +needs \d+ more requests +recent window\b", few.stdout)

    def test_full_labels_need_no_caveat(self, run: Run, tmp_path: Path) -> None:
        traffic = serve(tmp_path, 5)
        rows = [
            {
                "query_id": query,
                "query": query,
                "relevant": {f"d{n}-{at}": int(f"d{n}-{at}" in own) for at in range(DEPTH)},
            }
            for n, (query, own) in enumerate(traffic.relevant.items())
        ]
        labels = ("--labels", write_jsonl(tmp_path / "every.jsonl", rows))
        asked = ("monitor", "--store", traffic.url, "--judge", "labels", *labels, "--once")
        assert "unlabelled passages" not in run.ok(*asked).output

    def test_another_judge_begins_new_series(self, once: Once, tmp_path: Path) -> None:
        """Judging again finds nothing and another judge begins a series of its own."""
        traffic = serve(tmp_path, 40)
        first, second = (read(once(traffic, "--json")) for _ in range(2))
        assert first["estimates"] == second["estimates"]
        assert "nothing waited" in once(traffic).stdout
        with SampleStore.open(traffic.url) as store:
            request_id = request_of(store, 1)
            assert store.add_labels([LabelRow(request_id, "d0-0", 1, None, "ann", 1.0)])[0] == 1
        others = {query: frozenset[str]() for query in traffic.relevant}
        result = once(replace(traffic, relevant=others), "--json")
        assert "this store was judged by" in " ".join(result.stderr.split())
        assert read(result)["estimates"]["all_retained"]["precision"]["n"] == 0
        assert "has judged" not in ok(once(traffic)).stdout, "it goes on with its own"

    def test_unaccounted_samples_are_shown(self, once: Once, tmp_path: Path) -> None:
        traffic = serve(tmp_path, 20)
        assert json.loads(once(traffic, "--json").stdout)["unaccounted"] == 0
        with closing(sqlite3.connect(traffic.url.removeprefix("sqlite:///"))) as store, store:
            store.execute("UPDATE ctxguard_accounts SET sampled = sampled + 5, pending = 2")
        found = json.loads(once(traffic, "--json").stdout)
        assert (found["pending"], found["unaccounted"]) == (2, 3)
        assert "25 taken, 20 stored, 0 lost, 2 pending, 3 unaccounted for" in once(traffic).stdout

    def test_table_lines_are_unbroken(self, once: Once, tmp_path: Path) -> None:
        traffic = serve(tmp_path, 40, profile=profile_of(RatioPolicy(k=3)))
        profile_of(RatioPolicy(k=3)).save(tmp_path / "p.json")
        for columns in ("80", "100"):
            result = ok(once(traffic, "--profile", tmp_path / "p.json", columns=columns))
            lines = [line.strip() for line in result.stdout.splitlines()]
            heads = [place for place, line in enumerate(lines) if line.startswith("───")]
            rows = [lines[head + 1 : lines.index("", head)] for head in heads]
            assert [len(table) for table in rows] == [1, len(Metric)]

    def test_used_budget_is_said(self, once: Once, tmp_path: Path) -> None:
        """A budget that is used up is said and what waits stays."""
        traffic = serve(tmp_path, 10, rates=ONLY_SERVED)
        once(traffic, "--calls-per-day", "50")
        serve(tmp_path, 10, first=10, rates=ONLY_SERVED)
        result = once(traffic, "--calls-per-day", "4")
        assert "the judging budget is used up for now" in result.stdout
        assert "waiting    10 samples" in result.stdout
        assert "nothing judged" in result.stdout
        assert states(traffic)[State.PENDING] == 10


class TestLanguageModel:
    def judge(
        self, run: Run, endpoint: ChatEndpoint, traffic: Traffic, *options: object, **keys: object
    ) -> Result:
        return run(
            *("monitor", "--store", traffic.url, "--judge", "llm", "--model", "m-2026-01-01"),
            *("--once", *options),
            system={"monitor": {"base-url": endpoint.url, **keys}},
        )

    def test_own_word_is_named_so(self, run: Run, endpoint: ChatEndpoint, tmp_path: Path) -> None:
        traffic = serve(tmp_path, 32, rates=ONLY_SERVED)
        found = json.loads(self.judge(run, endpoint, traffic, "--json").stdout)
        assert found["outcomes"]["judged"] == 32
        assert found["judge"].startswith("llm m-2026-01-01 ")
        precision = found["judge_estimates"]["all_retained"]["precision"]["value"]
        assert precision == pytest.approx(mean_precision(traffic))
        assert all(one["value"] is None for one in found["estimates"]["all_retained"].values())
        assert endpoint.requests[0]["model"] == "m-2026-01-01"
        text = self.judge(run, endpoint, traffic).stdout
        assert "The judge's raw figures, not corrected" in text
        assert len(text.splitlines()) <= 40
        assert "people's labels on 0 requests correct" in text

    def test_cost_in_currency_bounds_days(
        self, run: Run, endpoint: ChatEndpoint, tmp_path: Path
    ) -> None:
        traffic = serve(tmp_path, 40, rates=ONLY_SERVED)
        keys = {"prices": [1000, 0], "cost-per-day": 15}
        found = read(self.judge(run, endpoint, traffic, "--json", **keys))
        # 300 tokens a call, at 0.3: about fifty calls, and one request more at most.
        assert 0 < len(endpoint.requests) <= 55
        assert found["outcomes"]["judged"] == len(endpoint.requests) / 5

    def test_judge_outage_sets_exit_code(
        self, run: Run, endpoint: ChatEndpoint, tmp_path: Path
    ) -> None:
        traffic = serve(tmp_path, 8, rates=ONLY_SERVED)
        for options in (("--json",), ()):
            endpoint.script.extend([Answer(status=401, body="no")] * 40)
            result = self.judge(run, endpoint, traffic, *options)
            endpoint.script.clear()
            assert result.exit_code == 1
            said = " ".join((result.stderr if options else result.stdout).split())
            assert "it does not accept the key" in said
            assert "8 samples still waiting" in said
            if options:
                assert json.loads(result.stdout)["outcomes"]["judge_failed"] == 5
            assert states(traffic) == {State.PENDING: 8}
        assert self.judge(run, endpoint, traffic).exit_code == 0
        assert states(traffic) == {State.JUDGED: 8}

    def test_losses_meet_their_learned_mean(
        self, run: Run, endpoint: ChatEndpoint, tmp_path: Path
    ) -> None:
        profile = profile_of(BROKEN)
        profile.save(tmp_path / "p.json")
        traffic = serve(
            tmp_path, 12, profile=profile, relevant_ranks=[4], rates=EVERYTHING, days_ago=2.0
        )
        options = ("--profile", tmp_path / "p.json")
        found = read(self.judge(run, endpoint, traffic, *options, "--json"))
        (promise,) = found["promises"]
        judged = promise["judged"]
        assert 0 < judged <= 12
        expected = {"reference": "baseline", "target": None, "needed": 400 - judged}
        assert expected.items() <= promise.items()
        assert (promise["at_most"], promise["e_value"]) == (0.12, None)
        text = self.judge(run, endpoint, traffic, *options).stdout
        assert f"after {400 - judged} more" in text
        (tmp_path / "served").mkdir()
        alone = serve(tmp_path / "served", 30, profile=profile, rates=ONLY_SERVED)
        said = " ".join(ok(self.judge(run, endpoint, alone, *options)).stdout.split())
        assert "the promise on recall loss cannot be monitored" in said
        assert "JudgingRates(baseline_k=5, baseline_rate=0.2)" in said


class TestAlarms:
    def serve_by(self, profile: Profile, file: Path) -> Traffic:
        profile.save(file)
        settings = {"relevant_ranks": [4], "rates": EVERYTHING, "days_ago": 2.0}
        return serve(file.parent, 60, profile=profile, **settings)

    def test_broken_promise_rings_until_replaced(self, once: Once, tmp_path: Path) -> None:
        broken, file = profile_of(BROKEN), tmp_path / "profile.json"
        traffic = self.serve_by(broken, file)
        result = once(traffic, "--profile", file, "--json")
        assert result.exit_code == 1
        found = json.loads(result.stdout)
        (alarm,) = found["alarms"]
        assert (alarm["kind"], alarm["route"]) == ("recall_loss", "external")
        assert (alarm["value"], alarm["target"]) == (1.0, 0.12)
        assert alarm["profile_id"] == broken.profile_id
        assert [one["quantity"] for one in found["promises"]] == ["recall_loss"]
        again = once(traffic, "--profile", file)
        assert again.exit_code == 1
        said = "judged recall loss against the retriever's first 5"
        assert said in " ".join(again.stdout.split())
        assert Profile.load(file) == broken, "nobody asked for a switch"
        profile_of(RatioPolicy(k=10)).save(file)
        result = ok(once(traffic, "--profile", file))
        assert "no whole day of requests served by this profile" in " ".join(result.stdout.split())

    def test_safe_policy_replaces_if_asked(self, once: Once, tmp_path: Path) -> None:
        file = tmp_path / "profile.json"
        traffic = self.serve_by(profile_of(BROKEN), file)
        assert once(traffic, "--profile", file, **{"switch-to-safe": True}).exit_code == 1
        assert Profile.load(file) == profile_of(BROKEN).safe()

    def test_holding_promise_shows_opposing_evidence(self, once: Once, tmp_path: Path) -> None:
        profile = profile_of(RatioPolicy(k=10, min_ratio=0.0))
        profile.save(tmp_path / "p.json")
        traffic = serve(tmp_path, 40, profile=profile, rates=EVERYTHING, days_ago=2.0)
        found = read(once(traffic, "--profile", tmp_path / "p.json", "--json"))
        assert found["alarms"] == []
        (promise,) = found["promises"]
        assert promise["at_most"] == 0.12
        assert 30 <= promise["judged"] <= 40
        assert promise["e_value"] < 1.0


@pytest.mark.model
def test_unstored_texts_come_from_index(
    run: Run, index: Path, collection: Path, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'samples.db'}"
    writer = sample_to(url, rate=1.0, privacy=Privacy(passages="omitted"), rates=EVERYTHING)
    telemetry = Telemetry(CollectorRegistry())
    retriever = HybridRetriever.load(index)
    guard = ContextGuard(retriever, depth=3, sampler=writer.sampler, telemetry=telemetry)
    texts = [row["text"] for row in read_rows(collection / "queries.jsonl")]
    test = [text for text in texts if "camera" in text]
    for question in test:
        guard.retrieve(question)
    writer.stop()
    writer.store.close()
    found = run.read(
        *("monitor", "--store", url, "--judge", "labels", "--labels", collection),
        *("--index", index, "--once"),
    )
    assert found["outcomes"]["judged"] == len(test) == 3
    assert found["grades"] == 9


class TestBadInput:
    def test_a_port_in_use_is_named(self, run: Run, tmp_path: Path) -> None:
        traffic = serve(tmp_path, 1)
        labels = traffic.write_labels(tmp_path / "labels.jsonl")
        asked = ("monitor", "--store", traffic.url, "--judge", "labels", "--labels", labels)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            mend = "another --host, or another port in the --system file"
            says = (f"cannot listen on 127.0.0.1:{port}", mend)
            run.refused(*asked, system={"monitor": {"port": port}}, says=says)
        assert states(traffic) == {State.PENDING: 1}

    def test_changed_corpus_warns_to_calibrate(self, run: Run, once: Once, tmp_path: Path) -> None:
        passages = [{"_id": f"p{n}", "text": f"text {n}"} for n in range(20)]
        corpus = write_jsonl(tmp_path / "corpus.jsonl", passages)
        run("index", corpus, "--out", tmp_path / "i")
        former = [passage_digest(Passage(f"p{n}", f"text {n}")) for n in range(10, 24)]
        profile = profile_of(RatioPolicy(k=3)).model_copy(
            update={"corpus": CorpusSketch.of(former)}
        )
        profile.save(tmp_path / "p.json")
        options = ("--profile", tmp_path / "p.json", "--index", tmp_path / "i")
        result = ok(once(serve(tmp_path, 2), *options))
        said = " ".join(result.stdout.split())
        assert f"50% of the corpus has changed since profile {profile.profile_id}" in said
        assert "Calibrate again" in said
