"""A real PgBouncer before a PostgreSQL server, which lends its connections by the transaction."""

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
_START_SECONDS = 20.0

is_installed = _PROGRAM is not None


@contextmanager
def pgbouncer(server: str, n_connections: int = 2) -> Iterator[str]:
    """Yield the URL of a PgBouncer, without a database.

    It has so few connections that all its clients share them.

    Args:
        server: The URL of the server, on a socket of this machine.
        n_connections: To the server, of each database.
    """
    assert _PROGRAM is not None
    parts = urlsplit(server)
    host = parse_qs(parts.query)["host"][0]
    folder = Path(tempfile.mkdtemp(prefix="ctxguard-pgbouncer-"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.chmod(0o755)
    file = folder / "pgbouncer.ini"
    file.write_text(
        f"""[databases]
* = host={host} port={parts.port or 5432} user={parts.username}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {n_connections}
max_client_conn = 200
"""
    )
    # It refuses to be root, and the folder of the server's socket is its owner's alone.
    owner = Path(host).owner()
    user = [] if owner == getpass.getuser() else ["-u", owner]
    log = (folder / "log").open("wb")
    running = subprocess.Popen([_PROGRAM, *user, str(file)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                assert running.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield f"postgresql://{parts.username}@127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)
