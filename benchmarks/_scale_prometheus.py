"""What a time series costs a Prometheus in memory, measured on a server of its own."""

import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks._processes import resident_bytes

SERIES = 50_000
_CONFIG = """\
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: scale, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""
_SCRAPES = 10
_DEADLINE_SECONDS = 60.0


def series_bytes() -> float | None:
    """Resident bytes of an active series after ten scrapes; None without the binary.

    The server's memory with one series is subtracted.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        return None
    few, many = (_resident(binary, n) for n in (1, SERIES))
    return (many - few) / (SERIES - 1)


def _resident(binary: str, series: int) -> int:
    with _target(series) as (port, scraped), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "prometheus.yml"
        config.write_text(_CONFIG.format(port=port), encoding="utf-8")
        command = [
            binary,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ]
        process = subprocess.Popen(  # noqa: S603 - the path that was found, and our own file
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
        )
        try:
            if not scraped.wait(_DEADLINE_SECONDS):
                raise RuntimeError("Prometheus did not scrape ten times in a minute")
            time.sleep(1.0)
            return resident_bytes(process.pid, folder)
        finally:
            process.terminate()
            process.wait()


@contextmanager
def _target(series: int) -> Iterator[tuple[int, threading.Event]]:
    """A process that exports so many series, and an event of its tenth scrape."""
    scraped, lock = threading.Event(), threading.Lock()
    scrapes = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal scrapes
            with lock:
                scrapes += 1
                value = scrapes
            body = "".join(
                f'ctxguard_scale_total{{worker="{n // 50}",route="hybrid",le="{n % 50}"}} {value}\n'
                for n in range(series)
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)
            if value > _SCRAPES:
                scraped.set()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port, scraped
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
