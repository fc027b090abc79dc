"""Who may see the console, and what other sites cannot do with it."""

from collections.abc import Iterator

import pytest
from httpx2 import Response
from judged_store import SAME_SITE, application, visitor
from starlette.testclient import TestClient

from ctxguard.monitor.store import SampleStore
from ctxguard.server.console import sessions

TOKEN = "a token of the console ü"  # noqa: S105 - opens nothing


@pytest.fixture
def store() -> Iterator[SampleStore]:
    with SampleStore.open("sqlite://") as opened:
        yield opened


@pytest.fixture
def client(store: SampleStore) -> TestClient:
    return visitor(store, token=TOKEN)


def sign_in(client: TestClient, page: str = "") -> Response:
    form = {"token": TOKEN, "next": page}
    return client.post("/console/sign-in", data=form, follow_redirects=False)


@pytest.mark.parametrize(
    "page",
    ["/console/", "/console/decisions", "/console/request?id=x", "/console/label", "/console/no"],
)
def test_every_page_asks_for_the_token(client: TestClient, page: str) -> None:
    answer = client.get(page)
    assert answer.status_code == 401
    assert "Token of the console" in answer.text
    assert client.post("/console/label/grade", data={}).status_code == 401


def test_token_leads_to_requested_page(client: TestClient) -> None:
    """The token lets in and leads to the page that was asked for."""
    answer = sign_in(client, page="/console/request?id=7")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/request?id=7")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/console" in cookie
    assert TOKEN not in cookie
    assert client.get("/console/decisions").status_code == 200
    assert client.post("/console/sign-out").status_code == 401
    assert client.get("/console/decisions").status_code == 401


@pytest.mark.parametrize("wrong", ["", "another", TOKEN[:-1], TOKEN + "\0", "\udcff"])
def test_a_wrong_token_is_refused(client: TestClient, wrong: str) -> None:
    body = b"token=" + wrong.encode("utf-8", "surrogateescape").replace(b"\xff", b"%ff")
    answer = client.post("/console/sign-in", content=body, follow_redirects=False)
    assert answer.status_code in (400, 401)
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "page",
    ["//evil.example", "https://evil.example", "/console\\@evil.example", "/other", "/\\evil"],
)
def test_signing_in_leads_nowhere_else(client: TestClient, page: str) -> None:
    assert sign_in(client, page=page).headers["location"] == "/console/"


@pytest.mark.parametrize(
    "forge",
    [
        lambda value: "9" + value,
        lambda value: value[:-1] + ("0" if value[-1] != "0" else "1"),
        lambda value: value.partition(".")[0],
        lambda value: "99999999999.",
        lambda value: "x.y",
        lambda value: "²." + value.partition(".")[2],
    ],
)
def test_a_forged_cookie_is_refused(client: TestClient, forge) -> None:  # type: ignore[no-untyped-def]
    sign_in(client)
    value = client.cookies["ctxguard_console"]
    client.cookies.clear()
    headers = {"cookie": f"ctxguard_console={forge(value)}".encode()}
    assert client.get("/console/decisions", headers=headers).status_code == 401


def test_signing_out_ends_every_process(store: SampleStore) -> None:
    one, another = visitor(store, token=TOKEN), visitor(store, token=TOKEN)
    for client in (one, another):
        sign_in(client)
    stolen = {"cookie": f"ctxguard_console={one.cookies['ctxguard_console']}"}
    with TestClient(application(store, token=TOKEN)) as thief:
        assert thief.get("/console/decisions", headers=stolen).status_code == 200
        one.post("/console/sign-out")
        assert thief.get("/console/decisions", headers=stolen).status_code == 401
    assert another.get("/console/decisions").status_code == 200


def test_ended_sessions_are_not_remembered(store: SampleStore) -> None:
    now = [0.0]
    client = visitor(store, token=TOKEN, clock=lambda: now[0])
    for _ in range(3):
        sign_in(client)
        client.post("/console/sign-out")
        now[0] += sessions.LASTS_SECONDS
    assert len((store.get_state(sessions._ENDED_KEY) or "").split()) == 1


def test_sign_in_attempts_are_limited(store: SampleStore, caplog: pytest.LogCaptureFixture) -> None:
    """An address may try to sign in a few times a minute."""
    now = [0.0]
    client = visitor(store, token=TOKEN, clock=lambda: now[0])
    for _ in range(sessions.MOST_ATTEMPTS):
        answer = client.post("/console/sign-in", data={"token": "wrong"})
        assert answer.status_code == 401
    assert sign_in(client).status_code == 429
    wrong = [record for record in caplog.records if "a wrong token from" in record.message]
    assert len(wrong) == sessions.MOST_ATTEMPTS
    assert "wrong" not in caplog.records[-1].args
    now[0] += 61.0
    assert sign_in(client).status_code == 303


def test_a_session_ends(store: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LASTS_SECONDS", 0)
    client = visitor(store, token=TOKEN)
    answer = sign_in(client)
    value = answer.headers["set-cookie"].partition(";")[0]
    assert client.get("/console/decisions", headers={"cookie": value}).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "none"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://testserver", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://testserver"}, 400),
        (SAME_SITE, 400),
    ],
)
def test_other_sites_form_is_refused(
    store: SampleStore, headers: dict[str, str], status: int
) -> None:
    answer = TestClient(application(store)).post("/console/label/pick", headers=headers)
    assert answer.status_code == status


def test_oversized_or_missing_form_is_refused(store: SampleStore) -> None:
    client = visitor(store)
    assert client.post("/console/label/pick", content=b"a" * 70_000).status_code == 413
    assert client.post("/console/label/pick", content=b"a=%ff&b=\xff").status_code == 400
    assert client.post("/console/label/pick", content=b"a=1&" * 50).status_code == 400


@pytest.mark.parametrize("page", ["/console/decisions", "/console/no", "/console/sign-in"])
def test_pages_forbid_what_they_need_not(client: TestClient, page: str) -> None:
    headers = client.get(page).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")


def test_pages_name_files_by_content(store: SampleStore) -> None:
    client = visitor(store)
    page = client.get("/console/decisions").text
    for name in ("console.css", "console.js"):
        address = page.partition(f"/console/static/{name}?v=")[2].partition('"')[0]
        assert len(address) == 12
        assert client.get(f"/console/static/{name}?v={address}").status_code == 200
    assert "//" not in page.replace("<!doctype", "").replace("http://testserver", "")
    assert "style=" not in page
