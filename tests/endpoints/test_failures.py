"""Why a call failed is said in words: the cause and its mend, never the key."""

import json
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

from ctxguard.core.types import Passage
from ctxguard.endpoints.rerank import RerankClient
from ctxguard.errors import ConfigurationError, StageError
from ctxguard.monitor.judges import LLMJudge
from tests.monitor.chat_endpoint import Answer, ChatEndpoint
from tests.raw_server import sending

KEY = "secret-key"
Call = Callable[[str], None]


def judge(url: str, key: str = KEY, seconds: float = 5.0) -> None:
    made = LLMJudge("m-1", base_url=url, api_key=key, retries=0, timeout_seconds=seconds)
    with closing(made):
        (reply,) = made.questions([Passage("p", "fox")])
    if reply.why:
        raise StageError("judge", reply.why)


def rerank(url: str, key: str = KEY, seconds: float = 5.0) -> None:
    with closing(RerankClient(url, key=key, model="m-1", timeout_seconds=seconds)) as client:
        client.score("fox", ["fox"])


every_client = pytest.mark.parametrize("call", [judge, rerank])


STAND_IN = ChatEndpoint


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def said_by(call: Call, url: str) -> str:
    with pytest.raises((StageError, ConfigurationError)) as raised:
        call(url)
    assert KEY not in str(raised.value)
    return str(raised.value)


@every_client
def test_no_server_is_named(call: Call) -> None:
    for host in ("127.0.0.1", "localhost"):
        assert f"{host}:" in (said := said_by(call, f"http://{host}:{free_port()}/v1"))
        assert "refuses connections: check that the server runs" in said


@every_client
def test_an_unknown_host_is_named(call: Call) -> None:
    said = said_by(call, "http://no-such-host.invalid/v1")
    assert "no-such-host.invalid cannot be found, since no address is known for it (DNS)" in said


@every_client
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_dead_proxy_is_named(call: Call, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv(f"{scheme}_proxy", f"http://user:{KEY}@127.0.0.1:{port}")
    said = said_by(call, f"{scheme}://api.example.invalid/v1")
    assert f"the proxy 127.0.0.1:{port} of api.example.invalid refuses connections" in said


@every_client
def test_proxy_refusing_tunnel_is_named(
    call: Call, endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", endpoint.url.removesuffix("/v1"))
    said = said_by(call, "https://api.example.invalid/v1")
    assert "of api.example.invalid answered 501" in said


@every_client
@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize(
    "proxy", ["socks5://127.0.0.1:1", "socks5h://h:1", "socks4://h", "ftp://h"]
)
def test_other_proxies_are_refused(
    call: Call, variable: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, proxy)
    assert "to http://HOST:PORT" in said_by(call, "http://host/v1")


UNKNOWN_MODEL = {"error": {"message": "The model `m-1` does not exist", "code": "model_not_found"}}
WRONG_KEY = {"error": {"message": f"Incorrect API key provided: {KEY}"}}


@every_client
@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, json.dumps(UNKNOWN_MODEL), "does not know the model 'm-1': check its name"),
        (404, "<html>Not Found</html>", "the URL, which ends in /v1 on most servers"),
        (404, '{"detail": "Not Found"}', "the URL, which ends in /v1 on most servers"),
        (200, "<!doctype html><title>Welcome</title>", "the URL, which ends in /v1"),
        (200, "\n <html>", "the URL, which ends in /v1 on most servers"),
        (401, json.dumps(WRONG_KEY), "does not accept the key"),
        (402, json.dumps(WRONG_KEY), "requires payment"),
        (429, json.dumps(WRONG_KEY), "or the quota"),
    ],
)
def test_refusal_says_its_mend(
    call: Call, endpoint: ChatEndpoint, status: int, body: str, says: str
) -> None:
    endpoint.script.append(Answer(status=status, body=body))
    assert says in said_by(call, endpoint.url)


@every_client
def test_a_slow_answer_is_no_outage(call: Call, endpoint: ChatEndpoint) -> None:
    """A time-out says how long was waited."""
    endpoint.hanging_on = "fox"
    said = said_by(partial(call, seconds=0.05), endpoint.url)
    assert "no complete answer from 127.0.0.1" in said
    assert "within 0.05 s" in said


@every_client
@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ("\r\nX: y", "a line break"),
        ("\n", "a line break"),
        ("”", "a curly quote"),
        ("é", "U+00E9"),
        ("\u200b", "U+200B"),
        ("\t", "U+0009"),
    ],
)
def test_an_unsendable_key_is_refused(call: Call, ending: str, says: str) -> None:
    assert says in said_by(partial(call, key=KEY + ending), "http://host")


OK = b"HTTP/1.1 200 OK\r\n"
GOOD = (
    b'{"choices": [{"message": {"content": "{\\"question\\": \\"why?\\"}"}}], '
    b'"results": [{"index": 0, "relevance_score": 0.5}]}'
)


@every_client
@pytest.mark.parametrize(
    ("start", "endless", "says"),
    [
        *[
            (b"", interim * 999, "bytes outside any answer")
            for interim in (
                b"HTTP/1.1 100 Continue\r\n\r\n",
                b"\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n",
            )
        ],
        (b"", b"HTTP/1.1 100\n\n" * 999, ""),
        (OK, b"A: b\r\n" * 999, "bytes outside any answer"),
        (OK + b"A: ", b"b" * 9999, "bytes outside any answer"),
        (OK + b"\r\n", b" " * 99_999, "an answer of more than"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 9999, "answer of more than"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n" * 9999, "outside any answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", b"", "the answer is not HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", b"", ""),
        (OK + b"Content-Length: 10\r\n\r\n[", b"", "before its answer was complete"),
        (b"", b"", "before its answer was complete"),
    ],
)
def test_a_hostile_server_is_broken_off(
    call: Call, start: bytes, endless: bytes, says: str
) -> None:
    """No answer holds more than a bounded memory, or the loop beyond a slice."""
    with sending(start, endless=endless) as url:
        assert says in said_by(call, url)


@every_client
def test_answer_may_end_with_connection(call: Call) -> None:
    with sending(OK + b"\r\n" + GOOD) as url:
        call(url)


@every_client
def test_deep_nesting_is_no_answer(call: Call, endpoint: ChatEndpoint) -> None:
    for body in ("[" * 900_000, '{"choices":' * 90_000, "[" + "[]," * 200_000 + "[]]"):
        endpoint.script.append(Answer(body=body))
        with suppress(StageError):
            call(endpoint.url)
    assert len(endpoint.requests) == 3


def test_environment_names_of_openai_hold(
    endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("OPENAI_BASE_URL", endpoint.url),
        ("OPENAI_API_KEY", KEY),
        ("OPENAI_ORG_ID", "org"),
        ("OPENAI_PROJECT_ID", "project"),
    ):
        monkeypatch.setenv(name, value)
    with closing(LLMJudge("m")) as made:
        made.judge("fox", [Passage("p", "fox")])
    sent = endpoint.headers[0]
    assert sent["Authorization"] == f"Bearer {KEY}"
    assert (sent["OpenAI-Organization"], sent["OpenAI-Project"]) == ("org", "project")


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/chat/completions", "/v1?a=b"])
def test_base_url_may_name_endpoint(endpoint: ChatEndpoint, path: str) -> None:
    with suppress(StageError):  # the stand-in knows no query
        judge(endpoint.url.removesuffix("/v1") + path)
    assert endpoint.paths == ["/v1/chat/completions" + ("?a=b" if "?" in path else "")]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """A certificate for localhost that nobody trusts, and a server's context with it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    file, key = folder / "certificate.pem", folder / "key.pem"
    of_localhost = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *of_localhost)
    subprocess.run([openssl, *made, "-keyout", key, "-out", file], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    return file, context


@every_client
@pytest.mark.skipif(sys.platform != "linux", reason="others keep certificates elsewhere")
def test_a_certificate_is_trusted_or_named(
    call: Call, certificate: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, context = certificate
    with sending(OK + b"\r\n" + GOOD, tls=context) as address:
        url = address.replace("127.0.0.1", "localhost")
        said = said_by(call, url)
        assert "has a certificate that is not trusted (self-signed certificate)" in said
        assert "name its file in SSL_CERT_FILE" in said
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        call(url)
