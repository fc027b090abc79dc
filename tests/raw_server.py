"""A server that answers with given bytes, which need not be HTTP."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def sending(
    *pieces: bytes,
    endless: bytes = b"",
    stays_open: bool = False,
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """The URL of a server that answers with the pieces, and then ``endless`` again and again.

    With ``stays_open`` it answers each request of a connection so, else one.
    """
    over = threading.Event()

    def serve(listening: socket.socket) -> None:
        while not over.is_set():
            with (
                suppress(OSError),
                listening.accept()[0] as plain,
                plain if tls is None else tls.wrap_socket(plain, server_side=True) as sent,
            ):
                sent.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while sent.recv(2**16):
                    for piece in pieces:
                        sent.sendall(piece)
                    while endless and not over.is_set():
                        sent.sendall(endless)
                    if not stays_open:
                        break

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        port = listening.getsockname()[1]
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        over.set()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            pass
        thread.join()
