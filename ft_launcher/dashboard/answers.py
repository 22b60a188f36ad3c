"""What each address is answered with: (path, headers) in, an `Answer` out, over one `Source`; sockets are elsewhere (`server`).

| path | content | token |
|---|---|---|
| `/`, `/page.css`, `/*.js` | the page: fixed files of this package, nothing of the run | no |
| `/healthz` | the server answers | no |
| `/metrics` | Prometheus | yes |
| `/api/state` | the document and what is derived from it, with an ETag | yes |
| `/api/incident/N` | one incident, stacks grouped | yes |

No path ever becomes a file name: the page's files are read once, at start, and N is compared with the folders that exist. Nothing here writes.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

from prometheus_client.exposition import choose_encoder

from ft_launcher.dashboard import api, incident_view
from ft_launcher.dashboard.gate import Gate
from ft_launcher.dashboard.metrics import registry_of
from ft_launcher.dashboard.source import Snapshot, Source
from ft_launcher.state.reading import signature_of

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_JSON = "application/json"
_INCIDENT = re.compile(r"/api/incident/([0-9]{1,9})")
_COMPRESS_FROM = 1400
_INCIDENTS_KEPT = 8

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Sent with every answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, body and the headers beyond `HEADERS`."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def text(status: int, said: str, **headers: str) -> Answer:
    """A line of plain text."""
    return Answer(status, "text/plain; charset=utf-8", f"{said}\n".encode(), headers)


class Answers:
    """Everything that can be asked. Safe to use from any thread."""

    def __init__(self, source: Source, gate: Gate) -> None:
        self._source = source
        self._gate = gate
        self._registry = registry_of(source)
        self._page = _page_files()
        self._state: tuple[Snapshot, bytes, str] | None = None
        self._incidents: dict[object, Answer] = {}
        self._lock = threading.Lock()
        self._incident_lock = threading.Lock()  # its own: grouping the stacks of ten thousand ranks takes seconds

    def answer(self, target: str, headers: Mapping[str, str]) -> Answer:
        """The answer to GET `target`; of the headers Host, Authorization, Accept, Accept-Encoding and If-None-Match matter, by their lower-case names."""
        if not self._gate.host_is_fine(headers.get("host")):
            return text(421, "this server answers for localhost only; with a token (--token-file) it answers under any name")
        path = target.partition("?")[0]
        if path in self._page:
            return self._page[path]
        if path == "/healthz":
            return text(200, "ok")
        if path not in ("/metrics", "/api/state") and not _INCIDENT.fullmatch(path):
            return text(404, "nothing here; there are /, /metrics, /api/state, /api/incident/N and /healthz")
        if not self._gate.admits(headers.get("authorization")):
            return Answer(
                401, _JSON, _error("a bearer token is needed: Authorization: Bearer TOKEN"), {"WWW-Authenticate": 'Bearer realm="ft-state"'}
            )
        return _compressed(self._guarded(path, headers), headers)

    def _guarded(self, path: str, headers: Mapping[str, str]) -> Answer:
        if path == "/metrics":
            encoder, content_type = choose_encoder(headers.get("accept", ""))
            return Answer(200, content_type, encoder(self._registry))
        if path == "/api/state":
            return self._answer_state(headers)
        found = _INCIDENT.fullmatch(path)
        return self._answer_incident(int(found[1])) if found else text(404, "nothing here")

    def _answer_state(self, headers: Mapping[str, str]) -> Answer:
        snapshot = self._source.look()
        with self._lock:
            if self._state is None or self._state[0] is not snapshot:
                self._state = (snapshot, *api.body(snapshot))
            _, data, tag = self._state
        known = [one.strip().removeprefix("W/") for one in headers.get("if-none-match", "").split(",")]
        if tag in known or "*" in known:
            return Answer(304, _JSON, b"", {"ETag": tag})
        return Answer(200, _JSON, data, {"ETag": tag})

    def _answer_incident(self, number: int) -> Answer:
        snapshot = self._source.look()
        folder = incident_view.folder_of(snapshot.run_folder, number)
        if folder is None:
            return Answer(404, _JSON, _error(f"no incident {number} in this run's folder"))
        version = (folder, *(signature_of(folder / name) for name in ("summary.json", "stacks", "stacks/summary.txt")))
        with self._incident_lock:
            if version in self._incidents:
                return self._incidents[version]
            topology = api.topology_of(snapshot.document) if snapshot.document is not None else None
            seen = incident_view.view(folder, topology)
            if seen is None:
                return Answer(503, _JSON, _error(f"incident {number} is being written; ask again"), {"Retry-After": "1"})
            made = Answer(200, _JSON, json.dumps(seen, allow_nan=False, separators=(",", ":"), default=str).encode("ascii"))
            self._incidents[version] = made
            for old in list(self._incidents)[:-_INCIDENTS_KEPT]:
                del self._incidents[old]
            return made


def _page_files() -> dict[str, Answer]:
    """The page's files by path."""
    found: dict[str, Answer] = {}
    for file in resources.files("ft_launcher.dashboard").joinpath("page").iterdir():
        content_type = _TYPES.get("." + file.name.rpartition(".")[2])
        if content_type is not None:
            found["/" if file.name == "index.html" else f"/{file.name}"] = Answer(200, content_type, file.read_bytes())
    return found


def _compressed(answer: Answer, headers: Mapping[str, str]) -> Answer:
    if "gzip" not in headers.get("accept-encoding", "") or len(answer.body) < _COMPRESS_FROM:
        return answer
    more: dict[str, str] = {**answer.headers, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return Answer(answer.status, answer.content_type, gzip.compress(answer.body, 1), more)


def _error(said: str) -> bytes:
    return json.dumps({"error": said}).encode()
