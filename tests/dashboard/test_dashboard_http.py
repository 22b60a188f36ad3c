"""The server over real HTTP: who is answered, with what, and what it makes of files that change under it."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from ft_launcher.dashboard import server, source
from ft_launcher.dashboard.answers import HEADERS, Answers
from ft_launcher.dashboard.gate import Gate, opened_for, read_token
from ft_launcher.dashboard.server import StateServer
from ft_launcher.dashboard.source import Source
from ft_launcher.errors import ConfigError
from tests.dashboard.runs import Run, storied

TOKEN = "k3-" + "x" * 24


class Site:
    """A server in this process, and requests to it."""

    def __init__(self, path: Path, gate: Gate) -> None:
        self.server = StateServer("127.0.0.1", 0, Answers(Source(path), gate))
        self.port = self.server.server_port
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def ask(self, target: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, target, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, target: str) -> dict[str, Any]:
        status, _, body = self.ask(target)
        assert status == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def raw(self, data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while more := connection.recv(65536):
                answer += more
            return answer

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture(autouse=True)
def _every_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "AGAIN_S", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return storied(tmp_path / "logs")


@pytest.fixture
def site(run: Run) -> Iterator[Site]:
    made = Site(run.log_dir, Gate(None, loopback=True))
    yield made
    made.close()


@pytest.fixture
def guarded(run: Run) -> Iterator[Site]:
    made = Site(run.log_dir, Gate(TOKEN, loopback=False))
    yield made
    made.close()


def test_everything_that_can_be_asked(site: Site) -> None:
    status, headers, body = site.ask("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    for name in re.findall(r'(?:src|href)="([a-z]+\.[a-z]+)"', body.decode()):
        assert site.ask(f"/{name}")[0] == 200, name
    assert site.ask("/main.js")[1]["content-type"].startswith("text/javascript")
    assert site.ask("/healthz")[2] == b"ok\n"
    status, headers, body = site.ask("/metrics")
    assert headers["content-type"].startswith("text/plain; version=")
    assert any(family.name == "ft_cycles" for family in parse(body.decode()))
    assert "openmetrics" in site.ask("/metrics", Accept="application/openmetrics-text; version=1.0.0")[1]["content-type"]
    state = site.json("/api/state?x=1")
    assert (state["run"]["id"], state["derived"]["states"], state["derived"]["latest"]["incident"]) == ("gpt-8b", "rrrrrrrr", "0002")
    one = site.json("/api/incident/2")
    assert [(group["said"], group["outlier"]) for group in one["stacks"]["groups"]] == [("ranks 0-4,6-7", False), ("rank 5", True)]
    assert one["stacks"]["groups"][1]["frames"][0] == {"file": "train/data.py", "line": 132, "function": "read_shard"}
    assert one["stacks"]["outliers"] == "rank 5"
    assert one["last_lines"][-1] == "opening shard 00412 <b>&amp;</b>"
    assert one["ranks"][0]["rank"] == 5
    assert site.json("/api/incident/0001")["stacks"]["groups"] == []


def test_every_answer_carries_the_security_headers(site: Site) -> None:
    for target in ("/", "/api/state", "/metrics", "/healthz", "/nothing", "/api/incident/99"):
        _, headers, _ = site.ask(target)
        for name, value in HEADERS.items():
            assert headers[name.lower()] == value, (target, name)
        assert "server" not in headers
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert site.raw(b"NONSENSE\r\n\r\n").count(b"Content-Security-Policy") == 1


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_it_is_read_only(site: Site, method: str) -> None:
    status, headers, _ = site.ask("/api/state", method)
    assert (status, headers["allow"], headers["connection"]) == (405, "GET, HEAD", "close")


def test_head_is_get_without_body(site: Site) -> None:
    got, head = site.ask("/api/state"), site.ask("/api/state", "HEAD")
    assert (head[0], head[2]) == (200, b"")
    assert head[1]["content-length"] == str(len(got[2]))


TRAVERSALS = [
    "/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/page/../main.js", "//etc/passwd", "/main.js/", "/.ft_state.json", "/ft_state.json", "/index.html",
    "/api/incident/../2", "/api/incident/2/../../verdict.json", "/api/incident/-1", "/api/incident/2%00", "/api/incident/99999999999", "/api/incident/",
    "/api/incident/2e0", "/api/incident/٢", "/api/", "/\\..\\x", "http://other/api/state/x",
]  # fmt: skip


@pytest.mark.parametrize("target", TRAVERSALS)
def test_no_path_leads_anywhere_else(site: Site, target: str) -> None:
    answer = site.raw(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert answer.split(b" ", 2)[1] in (b"404", b"400"), answer
    assert b"root:" not in answer


def test_a_token_guards_what_is_of_the_run_and_nothing_else(guarded: Site) -> None:
    for target in ("/api/state", "/metrics", "/api/incident/2", "/api/incident/77"):
        for authorization in (None, f"Bearer {TOKEN}x", "Bearer", f"Basic {TOKEN}", TOKEN, "Bearer é"):
            headers = {} if authorization is None else {"Authorization": authorization}
            status, answered, body = guarded.ask(target, **headers)
            assert (status, answered["www-authenticate"]) == (401, 'Bearer realm="ft-state"')
            assert b"gpt-8b" not in body
    assert guarded.ask("/api/state", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert guarded.ask("/metrics", Authorization=f"bearer {TOKEN}")[0] == 200
    for target in ("/", "/main.js", "/healthz"):
        status, _, body = guarded.ask(target)
        assert status == 200
        assert b"gpt-8b" not in body


HOSTS = {
    200: ["localhost:1", "127.0.0.1", "127.8.9.1:99", "[::1]:80", "job.localhost"],
    421: ["evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", ""],
}


@pytest.mark.parametrize(("host", "status"), [(host, status) for status, hosts in HOSTS.items() for host in hosts])
def test_a_page_elsewhere_cannot_make_a_browser_read_it(site: Site, host: str, status: int) -> None:
    assert site.ask("/api/state", Host=host)[0] == status


def test_under_another_name_with_a_token(guarded: Site) -> None:
    assert guarded.ask("/api/state", Host="dash.example", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_nothing_new_is_said_without_a_body(site: Site, run: Run) -> None:
    tag = site.ask("/api/state")[1]["etag"]
    status, headers, body = site.ask("/api/state", If_None_Match=tag)
    assert (status, headers["etag"], body) == (304, tag, b"")
    assert site.ask("/api/state", If_None_Match='"other"')[0] == 200
    run.find("suspect", 3, 6.0, 9.0)
    status, headers, body = site.ask("/api/state", If_None_Match=tag)
    assert (status, json.loads(body)["derived"]["states"]) == (200, "rrrqrrrr")


def test_large_answers_are_compressed_for_who_can_read_that(site: Site) -> None:
    plain = site.ask("/api/state")[2]
    status, headers, body = site.ask("/api/state", Accept_Encoding="gzip, br")
    assert (status, headers["content-encoding"]) == (200, "gzip")
    assert gzip.decompress(body) == plain


def test_a_file_that_is_torn_missing_rewritten_and_back(site: Site, run: Run) -> None:
    path = run.log_dir / "ft_state.json"
    good = path.read_bytes()
    path.write_bytes(good[:100])
    torn = site.json("/api/state")
    assert (torn["derived"]["up"], torn["run"]["id"]) == (True, "gpt-8b"), "from the last good copy"
    assert "last good copy" in " ".join(torn["derived"]["notes"])
    backup = path.with_name(path.name + ".bak")
    backup.unlink()
    worse = site.json("/api/state")
    assert (worse["derived"]["up"], worse["run"]["id"]) == (False, "gpt-8b")
    path.unlink()
    assert site.json("/api/state")["derived"]["up"] is False
    path.write_bytes(good)
    back = site.json("/api/state")
    assert (back["derived"]["up"], back["derived"]["notes"]) == (True, [])
    path.write_text('{"current_timeouts": {"section": {"section": {"step": 4.25}, "out_of_section": null}}}')
    assert site.json("/api/state")["derived"]["up"] is True
    for _ in range(50):
        path.write_bytes(good)
        assert site.json("/api/state")["run"]["id"] == "gpt-8b"
    assert site.ask("/metrics")[0] == 200


def test_the_whole_folder_goes_and_another_run_comes(site: Site, run: Run, tmp_path: Path) -> None:
    assert site.json("/api/state")["derived"]["incident_count"] == 2
    run.log_dir.rename(tmp_path / "gone")
    gone = site.json("/api/state")
    assert (gone["derived"]["up"], gone["derived"]["run_folder"]) == (False, None)
    other = Run(run.log_dir, run_id="other", tp=1, dp=4, pp=1)
    other.start_cycle(iteration=0)
    other.save()
    now = site.json("/api/state")
    assert (now["run"]["id"], now["derived"]["states"], now["derived"]["incident_count"], now["derived"]["latest"]) == (
        "other",
        "rrrr",
        0,
        None,
    )
    assert site.ask("/api/incident/2")[0] == 404


def test_a_finished_run(site: Site, run: Run) -> None:
    run.end_cycle("finished", None, "all ranks finished", decision="finish")
    run.conclude("finished", 0, "all ranks finished")
    run.save()
    found = site.json("/api/state")["derived"]
    assert (found["phase"], found["outcome"], found["states"], found["verdict"]["exit_code"]) == ("done", "finished", "ffffffff", 0)
    assert found["latest"]["culprit"]["rank"] == 5


def test_an_incident_that_is_being_written(site: Site, run: Run) -> None:
    (run.folder.path / "incidents" / "0003").mkdir()
    status, headers, body = site.ask("/api/incident/3")
    assert (status, headers["retry-after"]) == (503, "1")
    assert b"being written" in body


def test_it_never_writes(site: Site, run: Run) -> None:
    (run.log_dir / "ft_state.json").write_text("torn")
    before = sorted((str(p), p.stat().st_mtime_ns) for p in run.log_dir.rglob("*"))
    for target in ("/api/state", "/metrics", "/api/incident/2", "/api/incident/1"):
        site.ask(target)
    assert sorted((str(p), p.stat().st_mtime_ns) for p in run.log_dir.rglob("*")) == before


def test_rude_clients(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.Handler, "timeout", 0.2)
    assert site.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nGET /").count(b"HTTP/1.1") == 1
    assert b" 414 " in site.raw(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n")
    assert b" 431 " in site.raw(b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(200)) + b"\r\n")
    with socket.create_connection(("127.0.0.1", site.port), timeout=30) as slow:
        slow.sendall(b"GET /healthz HTT")
        assert slow.recv(100) == b"", "who stops in the middle is cut off"
    assert site.ask("/healthz")[0] == 200


def test_no_more_connections_than_it_has_places_for(site: Site) -> None:
    held = [socket.create_connection(("127.0.0.1", site.port), timeout=30) for _ in range(server.CONNECTIONS)]
    try:
        answer = site.raw(b"")
        assert answer.startswith(b"HTTP/1.1 503")
    finally:
        for connection in held:
            connection.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if site.ask("/healthz")[0] == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.02)
    raise AssertionError("the places were not given back")


def test_an_error_inside_is_one_line_and_the_server_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Source, "look", lambda self: 1 / 0)
    status, headers, body = site.ask("/api/state")
    assert (status, b"could not be made" in body) == (500, True)
    assert headers["x-content-type-options"] == "nosniff"
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "ZeroDivisionError" in said
    assert site.ask("/healthz")[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", ""])
def test_beyond_this_machine_only_with_a_token_or_the_word_for_it(host: str) -> None:
    with pytest.raises(ConfigError, match="--no-token"):
        opened_for(host, None, no_token=False)
    assert opened_for(host, None, no_token=True) == Gate(None, loopback=False)
    assert opened_for(host, TOKEN, no_token=False) == Gate(TOKEN, loopback=False)


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(file, False, {"FT_STATE_TOKEN": "y" * 20}) == TOKEN
    assert read_token(None, False, {"FT_STATE_TOKEN": "y" * 20}) == "y" * 20
    assert read_token(None, True, {"FT_STATE_TOKEN": "y" * 20}) is None
    assert read_token(None, False, {"FT_STATE_TOKEN": ""}) is None
    for bad in ("", "short", "two words of a token", "ünïcödé-token-token", "a\nb" * 10):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="openssl rand"):
            read_token(file, False, {})
    with pytest.raises(ConfigError, match="unreadable"):
        read_token(tmp_path, False, {})
    with pytest.raises(ConfigError, match="say one of them"):
        read_token(file, True, {})


BAD_USAGE = [("--host", "0.0.0.0"), ("--host", "no such host"), ("--port", "70000"), ("--token-file", "/no/such"), ("--bad",), ("a", "b")]


def serve(*args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ft_launcher.dashboard.cli", "serve", *map(str, args)]
    env = {key: value for key, value in os.environ.items() if key != "FT_STATE_TOKEN"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.serial
@pytest.mark.parametrize("args", BAD_USAGE)
def test_bad_usage_is_one_line_and_exit_2(args: tuple[str, ...]) -> None:
    child = serve(*args)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (2, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.serial
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_waits_for_the_file_and_ends_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    child = serve(tmp_path)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        found = re.fullmatch(rf"serving {re.escape(str(tmp_path))}/ft_state.json on http://127.0.0.1:(\d+)/\n", line)
        assert found, line
        storied(tmp_path)
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
        deadline, up = time.monotonic() + 30, False
        while not up and time.monotonic() < deadline:
            connection.request("GET", "/api/state")
            up = json.loads(connection.getresponse().read())["derived"]["up"]
        assert up
        taken = serve(tmp_path, "--port", found[1])
        _, said = taken.communicate(timeout=60)
        assert taken.returncode == 2
        assert "cannot listen there" in said
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
        assert child.returncode == 0
        assert err.splitlines() == [f"ft-state: {tmp_path}/ft_state.json: no such file yet"]
        connection.close()
    finally:
        child.kill()
        child.wait()
