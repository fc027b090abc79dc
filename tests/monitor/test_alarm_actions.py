"""What is done about an alarm: log, webhook against a real server, switch to the safe policy."""

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ctxguard.errors import ConfigurationError, ProfileError, ProfileFormatError
from ctxguard.monitor.alarms import (
    Alarm,
    AlarmActions,
    AlarmKind,
    Severity,
    SwitchOutcome,
    Webhook,
    switch_to_safe,
)
from ctxguard.monitor.alarms.webhook import WebhookAccounts
from ctxguard.policy import RatioPolicy
from ctxguard.profile import Profile, RouteProfile
from ctxguard.types import Route, ScoreKind
from tests.profiles import profile_with

PROFILE = profile_with(
    {
        Route.HYBRID: RouteProfile(
            policy=RatioPolicy(k=3, min_ratio=0.8),
            score_kind=ScoreKind.RATIO,
            safe_policy=RatioPolicy(k=10),
        )
    },
)
OTHER = PROFILE.model_copy(update={"fingerprint": {"embedder": "another"}})
RECALL = Alarm(
    kind=AlarmKind.RECALL_LOSS,
    severity=Severity.ALARM,
    message="judged recall loss was about 0.2",
    time_seconds=1e9,
    route=Route.HYBRID,
    value=0.2,
    target=0.12,
    n=300,
    profile_id=PROFILE.profile_id,
)
HARM = Alarm(AlarmKind.HARM, Severity.ALARM, "harm", 1e9, Route.HYBRID)


class Endpoint:
    """A real HTTP server that answers with the statuses it is given, then with 204.

    A status of 0 keeps the caller waiting until the test ends.
    """

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.received: list[dict[str, object]] = []
        self.methods: list[str] = []
        self.released = threading.Event()
        self.reached = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                endpoint.received.append(json.loads(body))
                endpoint.methods.append("POST")
                status = endpoint.statuses.pop(0) if endpoint.statuses else 204
                endpoint.reached.set()
                if status == 0:
                    endpoint.released.wait(30)
                    return
                self.send_response(status)
                if status in (301, 302, 307):
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                endpoint.methods.append("GET")
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/hooks/s3cret"

    def stop(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = Endpoint()
    yield running
    running.stop()


def webhook_to(url: str, **settings: float) -> Webhook:
    return Webhook(url, **{"backoff_seconds": 0.0, **settings})  # type: ignore[arg-type]


class TestWebhook:
    def test_an_alarm_arrives_as_json(self, endpoint: Endpoint) -> None:
        webhook = webhook_to(endpoint.url)
        assert webhook.send(RECALL.to_json())
        assert webhook.close(20.0)
        (received,) = endpoint.received
        assert received["kind"] == "recall_loss"
        assert received["route"] == "hybrid"
        assert received["message"] == RECALL.message
        assert Alarm.from_json(received) == RECALL
        assert webhook.accounts() == WebhookAccounts(1, 0, 0, 0)

    def test_several_arrive_oldest_first(self, endpoint: Endpoint) -> None:
        webhook = webhook_to(endpoint.url)
        for number in range(5):
            webhook.send({"number": number})
        webhook.close(20.0)
        assert [each["number"] for each in endpoint.received] == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("status", [500, 503, 429, 408])
    def test_a_passing_failure_is_tried_again(self, endpoint: Endpoint, status: int) -> None:
        endpoint.statuses = [status, status]
        webhook = webhook_to(endpoint.url, attempts=3)
        webhook.send({})
        assert webhook.close(20.0)
        assert len(endpoint.received) == 3
        assert webhook.accounts().delivered == 1

    def test_a_lasting_failure_is_given_up_and_counted(self, endpoint: Endpoint) -> None:
        endpoint.statuses = [500] * 3
        webhook = webhook_to(endpoint.url, attempts=3)
        webhook.send({})
        assert webhook.close(20.0)
        assert webhook.accounts() == WebhookAccounts(0, 1, 0, 0)

    @pytest.mark.parametrize("status", [400, 401, 404, 410])
    def test_a_refusal_is_final(self, endpoint: Endpoint, status: int) -> None:
        endpoint.statuses = [status]
        webhook = webhook_to(endpoint.url)
        webhook.send({})
        webhook.close(20.0)
        assert len(endpoint.received) == 1
        assert webhook.accounts().failed == 1

    @pytest.mark.parametrize("status", [301, 302, 307])
    def test_a_redirect_is_not_followed_for_it_would_lose_the_alarm(
        self, endpoint: Endpoint, status: int
    ) -> None:
        endpoint.statuses = [status]
        webhook = webhook_to(endpoint.url)
        webhook.send({})
        webhook.close(20.0)
        assert endpoint.methods == ["POST"]
        assert webhook.accounts().failed == 1

    def test_a_server_that_hangs_holds_nobody_up(self, endpoint: Endpoint) -> None:
        endpoint.statuses = [0]
        webhook = webhook_to(endpoint.url, timeout_seconds=30.0)
        webhook.send({"number": 0})
        assert endpoint.reached.wait(20)
        # The server still keeps the first one waiting.
        assert webhook.send({"number": 1})
        assert webhook.accounts().pending == 2
        assert not webhook.close(0.0)
        assert webhook.accounts().pending == 2

    def test_a_server_that_hangs_is_tried_again_after_the_timeout(self, endpoint: Endpoint) -> None:
        endpoint.statuses = [0]
        webhook = webhook_to(endpoint.url, timeout_seconds=0.1)
        webhook.send({})
        assert webhook.close(20.0)
        assert len(endpoint.received) == 2
        assert webhook.accounts().delivered == 1

    def test_a_dead_server_is_a_counted_failure_and_the_log_keeps_the_secret(
        self, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}/hooks/s3cret"
        webhook = webhook_to(url, attempts=2)
        webhook.send({})
        assert webhook.close(20.0)
        assert webhook.accounts() == WebhookAccounts(0, 1, 0, 0)
        assert "not delivered after 2 attempts: URLError" in caplog.text
        assert "s3cret" not in caplog.text

    def test_more_than_may_wait_are_dropped_and_counted(self, endpoint: Endpoint) -> None:
        endpoint.statuses = [0]
        webhook = webhook_to(endpoint.url, capacity=2, timeout_seconds=30.0)
        webhook.send({})
        assert endpoint.reached.wait(20)
        assert [webhook.send({}) for _ in range(4)] == [True, True, False, False]
        assert webhook.accounts() == WebhookAccounts(0, 0, 2, 3)

    def test_closed_it_takes_nothing_more(self, endpoint: Endpoint) -> None:
        webhook = webhook_to(endpoint.url)
        assert webhook.close()
        assert not webhook.send({})
        assert webhook.accounts() == WebhookAccounts(0, 0, 1, 0)

    def test_closing_does_not_wait_for_the_pause_before_the_next_attempt(
        self, endpoint: Endpoint
    ) -> None:
        endpoint.statuses = [500]
        webhook = webhook_to(endpoint.url, backoff_seconds=3_600.0)
        webhook.send({})
        assert endpoint.reached.wait(20)
        assert webhook.close(20.0)
        assert webhook.accounts().delivered == 1

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_a_forked_child_delivers_its_own_and_leaves_the_parents_to_it(
        self, endpoint: Endpoint
    ) -> None:
        endpoint.statuses = [0]
        webhook = webhook_to(endpoint.url, timeout_seconds=30.0)
        webhook.send({"by": "parent"})
        assert endpoint.reached.wait(20)
        # Held over the fork, as the sending thread might hold it.
        with webhook._changed:
            child = os.fork()
            if child == 0:
                webhook.send({"by": "child"})
                closed = webhook.close(20.0) and webhook.accounts().delivered == 1
                os._exit(0 if closed else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert [each["by"] for each in endpoint.received] == ["parent", "child"]
        assert webhook.accounts().pending == 1

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "hooks.example.org/x",
            "file:///etc/passwd",
            "ftp://example.org",
            "http://",
            "http://user:word@example.org/",
            "http://example.org:port/",
            "http://exa mple.org/",
            "http://example.org/\r\nX: y",
        ],
    )
    def test_a_url_that_is_no_web_address_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match="webhook's URL"):
            Webhook(url)

    @pytest.mark.parametrize(
        "settings",
        [{"timeout_seconds": 0.0}, {"attempts": 0}, {"backoff_seconds": -1.0}, {"capacity": 0}],
    )
    def test_a_number_out_of_range_is_refused(self, settings: dict[str, float]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(settings))):
            Webhook("http://localhost/", **settings)  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    return path


class TestSwitching:
    def test_the_safe_policy_takes_the_files_place_and_the_former_lies_beside_it(
        self, file: Path
    ) -> None:
        before = file.read_bytes()
        assert switch_to_safe(file, PROFILE)
        assert Profile.load(file) == PROFILE.safe()
        assert Profile.load(file).routes[Route.HYBRID].policy == RatioPolicy(k=10)
        assert file.with_name("profile.json.before-alarm").read_bytes() == before
        assert len(list(file.parent.iterdir())) == 2

    def test_a_second_alarm_changes_nothing(self, file: Path) -> None:
        switch_to_safe(file, PROFILE)
        assert not switch_to_safe(file, PROFILE)
        assert Profile.load(file.with_name("profile.json.before-alarm")) == PROFILE

    def test_a_profile_that_was_promoted_meanwhile_is_left_alone(self, file: Path) -> None:
        OTHER.save(file)
        with pytest.raises(ProfileError, match=f"{OTHER.profile_id} by now.*{PROFILE.profile_id}"):
            switch_to_safe(file, PROFILE)
        assert Profile.load(file) == OTHER
        assert list(file.parent.iterdir()) == [file]

    def test_a_profile_without_safe_policies_is_left_alone(self, file: Path) -> None:
        route = PROFILE.routes[Route.HYBRID].model_copy(update={"safe_policy": None})
        old = PROFILE.model_copy(update={"routes": {Route.HYBRID: route}})
        old.save(file)
        with pytest.raises(ProfileError, match="names no safe policy for hybrid"):
            switch_to_safe(file, old)
        assert Profile.load(file) == old

    def test_a_file_that_is_gone_is_not_made_again(self, file: Path) -> None:
        file.unlink()
        with pytest.raises(ProfileFormatError, match="cannot be read"):
            switch_to_safe(file, PROFILE)
        assert not file.exists()

    def test_a_disk_that_is_full_leaves_the_profile_in_force(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full_disk(_descriptor: int) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(os, "fsync", full_disk)
        assert AlarmActions(switch_path=file)(RECALL, PROFILE) is SwitchOutcome.REFUSED
        assert Profile.load(file) == PROFILE
        assert list(file.parent.iterdir()) == [file]


class TestActions:
    def test_an_alarm_is_logged_by_ids_and_numbers(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            AlarmActions()(RECALL, PROFILE)
        assert caplog.messages == [
            "alarm recall_loss route=hybrid signal=None value=0.2 target=0.12 n=300 profile="
            + PROFILE.profile_id
        ]

    def test_recall_loss_switches_where_that_was_asked_for(self, file: Path) -> None:
        actions = AlarmActions(switch_path=file)
        assert actions(RECALL, PROFILE) is SwitchOutcome.SWITCHED
        assert actions(RECALL, PROFILE) is SwitchOutcome.ALREADY_SAFE
        assert Profile.load(file) == PROFILE.safe()
        assert actions.switches[SwitchOutcome.SWITCHED] == 1

    def test_without_being_asked_for_there_is_no_switch(self, file: Path) -> None:
        assert AlarmActions()(RECALL, PROFILE) is SwitchOutcome.NOT_MEANT
        assert Profile.load(file) == PROFILE

    @pytest.mark.parametrize(
        "alarm",
        [
            HARM,
            Alarm(AlarmKind.DRIFT, Severity.WARNING, "moved", 1.0, Route.HYBRID, "top_score"),
            Alarm(AlarmKind.JUDGE_DOWN, Severity.ALARM, "down", 1.0),
        ],
        ids=lambda alarm: alarm.kind.value,
    )
    def test_alarms_of_other_kinds_never_switch(self, file: Path, alarm: Alarm) -> None:
        assert AlarmActions(switch_path=file)(alarm, PROFILE) is SwitchOutcome.NOT_MEANT
        assert Profile.load(file) == PROFILE

    def test_a_refused_switch_is_logged_with_the_reason_and_raises_nothing(
        self, file: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        OTHER.save(file)
        actions = AlarmActions(switch_path=file)
        assert actions(RECALL, PROFILE) is SwitchOutcome.REFUSED
        assert "the alarm is about" in caplog.text

    def test_the_webhook_is_told_what_became_of_the_switch(
        self, endpoint: Endpoint, file: Path
    ) -> None:
        webhook = webhook_to(endpoint.url)
        AlarmActions(webhook=webhook, switch_path=file)(RECALL, PROFILE)
        webhook.close(20.0)
        assert [each["safe_policy"] for each in endpoint.received] == ["switched"]
