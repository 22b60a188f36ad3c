"""The sockets under `ft-state serve`: Python's own HTTP server, made fit for a port that others can reach.

Why not a framework: five small read-only answers for a handful of readers do not justify a web stack in every training environment. What the standard library leaves open is closed
here: idle and slow clients are cut off, the number of connections is bounded, every answer (errors too) carries the security headers, only GET and HEAD exist, a request with a body
ends its connection, and nothing is logged that a client chose.

Knows HTTP; must never know what is served (`answers`).
"""

from __future__ import annotations

import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ft_launcher.dashboard import gate
from ft_launcher.dashboard.answers import HEADERS, Answer, Answers, text
from ft_launcher.errors import ConfigError

SILENT_S = 15.0
"""A connection on which nothing moves for so long is closed."""
CONNECTIONS = 64
_METHODS = ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT")
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "ft-state"
    sys_version = ""
    timeout = SILENT_S
    server: StateServer

    def do_GET(self) -> None:
        """Answers; HEAD is the same without the body."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            self.close_connection = True
        self._send(self.server.answer(self.path, headers))

    do_HEAD = do_GET  # noqa: N815

    def refuse(self) -> None:
        """Everything here is read-only."""
        self.close_connection = True
        self._send(text(405, "GET and HEAD only", Allow="GET, HEAD"))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses by itself (malformed requests): plain, with our headers, and the connection ends."""
        self.close_connection = True
        self._send(text(code, HTTPStatus(code).phrase))

    def _send(self, answer: Answer) -> None:
        self.request_version = "HTTP/1.1"  # also where the request was none: the library would leave out all headers
        self.send_response_only(answer.status)
        self.send_header("Date", self.date_time_string())
        for name, value in {**HEADERS, **answer.headers}.items():
            self.send_header(name, value)
        if answer.status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if getattr(self, "command", None) != "HEAD" and answer.status != HTTPStatus.NOT_MODIFIED:
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Silent: the console is the operator's."""


for _method in _METHODS:
    setattr(Handler, f"do_{_method}", Handler.refuse)


class StateServer(ThreadingHTTPServer):
    """Listens at once; `serve_forever` answers. `url` is where."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS

    def __init__(self, host: str, port: int, answers: Answers) -> None:
        self._answers = answers
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        self.address_family, address = gate.addresses(host)[0]
        try:
            super().__init__((address, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--host {host} --port {port}: cannot listen there ({getattr(error, 'strerror', None) or error}); choose another, or --port 0 for any free one"
            ) from error

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"http://{name}:{port}/"

    def server_bind(self) -> None:
        """Without the name look-up of the standard library's, which can take a resolver's timeout."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def answer(self, target: str, headers: dict[str, str]) -> Answer:
        """The answer, whatever happens on the way to it."""
        try:
            return self._answers.answer(target, headers)
        except Exception as error:  # noqa: BLE001 - the boundary of the loop: one bad answer must not end the others
            sys.stderr.write(f"ft-state: {type(error).__name__} while answering {target[:80]!a}: {str(error)[:300]!a}\n")
            return text(500, "this answer could not be made; the server's own output says why")

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread a connection, `CONNECTIONS` at most; who is beyond is told to come again."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        try:
            request.settimeout(1.0)
            request.sendall(_BUSY)
        except OSError:
            pass
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Gives its place back whatever happens."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; anything else is one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            sys.stderr.write(f"ft-state: {type(error).__name__} in a connection: {str(error)[:300]!a}\n")
