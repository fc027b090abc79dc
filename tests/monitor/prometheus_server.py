"""A Prometheus server on the files of a folder, and processes beside it."""

import json
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.timing import PATIENCE_SECONDS, until


@dataclass(frozen=True)
class Server:
    """The HTTP API of a Prometheus server."""

    url: str

    def get(self, path: str, **arguments: object) -> Any:
        address = f"{self.url}/api/v1/{path}?{urlencode(arguments)}"
        with urlopen(address, timeout=PATIENCE_SECONDS) as reply:  # noqa: S310  it is ours
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def value(self, expression: str) -> float | None:
        """Of an expression that gives one series; None where it gives none."""
        result = self.get("query", query=expression)["result"]
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else None

    def is_ready(self) -> bool:
        with suppress(URLError, OSError), urlopen(f"{self.url}/-/ready", timeout=5) as reply:  # noqa: S310
            return bool(reply.status == 200)
        return False


@contextmanager
def running(arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the folder of its log that is ended, if need be by force."""
    with log.open("wb") as written:
        process = subprocess.Popen(arguments, stdout=written, stderr=written, cwd=log.parent)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.returncode == 0, log.read_text(encoding="utf-8")


@contextmanager
def prometheus_in(folder: Path) -> Iterator[Server]:
    """A server on the ``prometheus.yml`` and ``data`` of a folder."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    arguments = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with running([*arguments, f"--web.listen-address={address}"], folder / "prometheus.log"):
        server = Server(f"http://{address}")
        until(server.is_ready, "Prometheus")
        yield server
