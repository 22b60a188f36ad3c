"""The sockets: who may talk, what a broken or hostile client can do (nothing but lose its own monitoring), and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.errors import PlatformError
from ft_launcher.shell import nvrx_endpoint
from ft_launcher.shell.nvrx_server import ENV_LAUNCHER, ENV_MONITOR, NvrxServer, Told
from ft_launcher.shell.private_folder import PREFIX, PrivateFolder, sweep
from monitors import nvrx_wire as wire
from monitors.detect import Limits
from monitors.page import PageSample
from tests.nvrx import frames
from tests.nvrx.frames import SectionAction, WorkloadAction, framed

LIMITS = Limits({"setup": 60.0, "step": 20.0}, 30.0)
PATIENCE_S = 30.0


class Site:
    """A server in this process, whose two ranks are both this process, and what it said."""

    def __init__(self, places: Path, pids: tuple[int, int]) -> None:
        self.said: list[str] = []
        self.requests: list[tuple[int, wire.WorkloadControlRequest]] = []
        self.timeouts: list[tuple[int, wire.UpdateConfigMsg]] = []
        told = Told(self.said.append, lambda r, q: self.requests.append((r, q)), lambda r, t: self.timeouts.append((r, t)))
        self.server = NvrxServer(LIMITS, told, [str(places)])
        self.paths = {rank: env[ENV_MONITOR] for rank, env in self.server.open(0, [3, 4]).items()}
        for rank, pid in zip((3, 4), pids, strict=True):
            self.server.started(rank, pid)

    def sample(self, rank: int) -> PageSample:
        return self.server.sample(rank, PageSample())

    async def connect(self, rank: int = 3) -> Client:
        reader, writer = await asyncio.open_unix_connection(self.paths[rank])
        return Client(reader, writer)

    async def client(self, rank: int = 3, **init: Any) -> Client:
        """One that has introduced itself."""
        client = await self.connect(rank)
        assert await client.ask(frames.authkey()) == wire.OK
        assert b"FaultToleranceConfig" in await client.ask(frames.init(rank, **init))
        return client


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, value: Any) -> bytes:
        self.writer.write(framed(value))
        return await self.answer()

    async def answer(self) -> bytes:
        head = await asyncio.wait_for(self.reader.readexactly(4), PATIENCE_S)
        return head + await asyncio.wait_for(self.reader.readexactly(int.from_bytes(head, "big")), PATIENCE_S)

    async def dropped(self) -> bool:
        """The other side has hung up."""
        try:
            while await asyncio.wait_for(self.reader.read(4096), PATIENCE_S):
                pass
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        self.writer.close()


async def until(what: Callable[[], Any], why: str = "it") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, f"{why} did not come"
        await asyncio.sleep(0.005)


def with_site(tmp_path: Path, play: Callable[[Site], Coroutine[Any, Any, None]], pids: tuple[int, int] | None = None) -> Site:
    """Plays, then closes: whatever was played, no file, no descriptor and no reader may be left."""
    places = Path("/tmp") / f"nvrx-test-{os.getpid()}-{time.time_ns() % 10**9}"
    places.mkdir()
    found: list[Site] = []

    async def main() -> None:
        site = Site(places, pids or (os.getpid(), os.getpid()))
        found.append(site)
        try:
            await play(site)
        finally:
            site.server.close()
            await asyncio.sleep(0)

    before = len(os.listdir("/proc/self/fd"))
    try:
        asyncio.run(main(), debug=False)
        assert list(places.iterdir()) == []
    finally:
        for rest in sorted(places.rglob("*"), reverse=True):
            rest.unlink() if not rest.is_dir() else rest.rmdir()
        places.rmdir()
    assert len(os.listdir("/proc/self/fd")) <= before
    return found[0]


def test_the_variables_and_their_places(tmp_path: Path) -> None:
    async def play(site: Site) -> None:
        env = site.server.open(1, [3, 4])
        assert set(env[3]) == {ENV_MONITOR, ENV_LAUNCHER}
        assert env[3][ENV_MONITOR] != env[4][ENV_MONITOR]
        folder = Path(env[3][ENV_MONITOR]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert sorted(p.name for p in folder.iterdir()) == ["c1r3", "c1r4", "lock"], "those of the cycle before are gone"

    with_site(tmp_path, play)


def test_a_client_is_seen(tmp_path: Path) -> None:
    async def play(site: Site) -> None:
        client = await site.client()
        assert await client.ask(frames.section("step", SectionAction.OPEN)) == wire.OK
        assert [o.name for o in site.sample(3).open] == ["step"]
        assert not site.sample(4).attached
        assert await client.ask(frames.update(frames.section_timeouts({"step": 7.0}))) == wire.OK
        assert site.timeouts == [(3, wire.UpdateConfigMsg({"step": 7.0}))]
        assert await client.ask(frames.update(frames.section_timeouts({"step": 7.0}))) == wire.OK
        assert len(site.timeouts) == 1, "the same again is no news"
        client.close()

    assert with_site(tmp_path, play).said == []


def test_what_a_rank_had_said_before_it_ended_is_heard(tmp_path: Path) -> None:
    async def play(site: Site) -> None:
        client = await site.client(iteration=None, num_warmup_iters=None)
        client.writer.write(framed(frames.section("step", SectionAction.OPEN)) + framed(frames.section("step", SectionAction.CLOSE)))
        site.server.ended(3)
        assert site.sample(3).steps == 1
        client.close()

    assert with_site(tmp_path, play).said == []


def test_requests_are_passed_on_and_answered(tmp_path: Path) -> None:
    async def play(site: Site) -> None:
        client = await site.connect()
        assert await client.ask(frames.request(WorkloadAction.ExcludeThisNode, "ECC")) == wire.REQUEST_OK
        assert await client.dropped()
        assert site.requests == [(3, wire.WorkloadControlRequest(3, wire.WorkloadAction.ExcludeThisNode, "ECC"))]
        client.close()

    with_site(tmp_path, play)


def test_who_connects_before_the_rank_is_known_waits(tmp_path: Path) -> None:
    async def play(site: Site) -> None:
        paths = site.server.open(1, [3])
        site.paths = {3: paths[3][ENV_MONITOR]}
        waiting = asyncio.create_task(site.client())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        site.server.started(3, os.getpid())
        (await waiting).close()

    with_site(tmp_path, play)


def test_a_stranger_is_refused(tmp_path: Path) -> None:
    """The rank is another process than this one, so this one is the stranger."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as rank:

        async def play(site: Site) -> None:
            for _ in range(3):
                stranger = await site.connect()
                assert await stranger.dropped()
                stranger.close()
            (await site.client(4)).close()

        site = with_site(tmp_path, play, (rank.pid, os.getpid()))
        assert rank.stdin is not None
        rank.stdin.close()
    (said,) = site.said
    assert f"process {os.getpid()} is neither the rank's ({rank.pid}) nor below it" in said
    assert not site.sample(3).attached


def test_a_child_of_the_rank_may_talk_for_it(tmp_path: Path) -> None:
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.send(bytes.fromhex(sys.argv[2])); sys.exit(s.recv(4) != bytes.fromhex(sys.argv[3]))"

    async def play(site: Site) -> None:
        for extra in ({}, {"start_new_session": True}):
            args = [site.paths[3], framed(frames.authkey()).hex(), wire.OK[:4].hex()]
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *args, **extra)
            assert await asyncio.wait_for(child.wait(), PATIENCE_S) == 0

    assert with_site(tmp_path, play).said == []


BAD = {
    "garbage": b"\x00\x00\x00\x05hello",
    "http": b"GET / HTTP/1.0\r\n\r\n",
    "a huge length": b"\xff\xff\xff\xff" + b"x" * 1000,
    "a gadget": wire.frame(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."),
    "a memo bomb": wire.frame(b"\x80\x04Nr\xff\xff\xff\x7f."),
    "an order that is none": framed(frames.heartbeat()),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_whoever_breaks_the_protocol_is_dropped_and_named_once(tmp_path: Path, data: bytes) -> None:
    async def play(site: Site) -> None:
        neighbour = await site.client(4)
        for _ in range(20):
            bad = await site.connect()
            bad.writer.write(data)
            assert await bad.dropped()
            bad.close()
        assert await neighbour.ask(frames.section("step", SectionAction.OPEN)) == wire.OK
        good = await site.client(3)
        assert await good.ask(frames.section("step", SectionAction.OPEN)) == wire.OK
        neighbour.close()
        good.close()

    site = with_site(tmp_path, play)
    assert len(site.said) == 1
    assert site.said[0].startswith("rank 3: NVRx's socket: its client")


def test_garbage_after_an_introduction_ends_the_monitoring_and_says_so(tmp_path: Path) -> None:
    async def play(site: Site) -> None:
        client = await site.client()
        await client.ask(frames.section("step", SectionAction.OPEN))
        client.writer.write(b"\x00\x00\x00\x05hello")
        assert await client.dropped()
        assert "hangs of this rank are not found until its client connects again" in site.said[0]
        assert set(site.server.limits(3, LIMITS).sections.values()) == {float("inf")}, "nobody can tell us of the step's end now"
        client.close()

    with_site(tmp_path, play)


def test_the_rest_of_a_message_never_comes(tmp_path: Path) -> None:
    async def play(site: Site) -> None:
        client = await site.client()
        client.writer.write(framed(frames.section("step", SectionAction.OPEN))[:50])
        await client.writer.drain()
        client.close()
        await until(lambda: site.said, "a line")
        assert "ended within a message (50 bytes of it had come)" in site.said[0]
        again = await site.client()
        again.close()

    with_site(tmp_path, play)


def test_a_connection_closed_with_sections_open_is_said_when_its_rank_lives_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrx_endpoint, "GOODBYE_S", 0.01)

    async def play(site: Site) -> None:
        for rank in (3, 4):
            client = await site.client(rank)
            await client.ask(frames.section("step", SectionAction.OPEN))
            if rank == 4:
                site.server.ended(4)
            client.close()
        await until(lambda: site.said, "a line")
        await asyncio.sleep(0.05)

    (said,) = with_site(tmp_path, play).said
    assert said.startswith("rank 3: NVRx's socket: its client's connection was closed with sections open (step)")


def test_a_client_that_does_not_read_its_answers_is_dropped(tmp_path: Path) -> None:
    async def play(site: Site) -> None:
        await site.client()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.connect(site.paths[3])
        sock.setblocking(False)
        deadline = time.monotonic() + PATIENCE_S
        while not any("does not read its answers" in s for s in site.said):
            assert time.monotonic() < deadline
            try:
                sock.send(framed(frames.authkey()) * 50)
            except BlockingIOError:
                pass
            except OSError:
                break
            await asyncio.sleep(0)
        await until(lambda: any("does not read its answers" in s for s in site.said), "the line")
        sock.close()
        (await site.client(4)).close()

    with_site(tmp_path, play)


def test_ten_thousand_connections_cost_a_line_and_a_share_of_the_loop(tmp_path: Path) -> None:
    """The flood comes from a child; meanwhile the loop turns and another rank is served."""
    code = """
import socket, sys
kept = []
for i in range(10_000):
    s = socket.socket(socket.AF_UNIX)
    try:
        s.connect(sys.argv[1])
    except OSError:
        continue
    kept.append(s)
    del kept[:-500]
"""

    async def play(site: Site) -> None:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, site.paths[3])
        done = asyncio.create_task(child.wait())
        turns, most = 0, 0
        neighbour = await site.client(4)
        while not done.done():
            assert await neighbour.ask(frames.heartbeat()) == wire.OK
            most = max(most, len(os.listdir("/proc/self/fd")))
            turns += 1
            await asyncio.sleep(0)
        assert await done == 0
        assert turns > 20
        assert most < 60
        neighbour.close()
        (await site.client(3)).close()

    site = with_site(tmp_path, play)
    assert len(site.said) <= 2, site.said
    assert "more than 4 connections at once" in site.said[0]


def test_a_flood_of_messages_is_slowed_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrx_endpoint, "FLOOD_WINDOWS", 2)

    async def play(site: Site) -> None:
        flood = await site.client(3, iteration=None, num_warmup_iters=None)
        neighbour = await site.client(4)

        async def pour() -> None:
            for i in range(100_000):
                flood.writer.write(framed_section(i))
                await flood.writer.drain()

        pouring = asyncio.create_task(pour())
        for _ in range(20):
            assert await neighbour.ask(frames.heartbeat()) == wire.OK
        await until(lambda: site.said, "the line")
        pouring.cancel()
        assert "it is slowed down" in site.said[0]
        flood.close()
        neighbour.close()

    with_site(tmp_path, play)


_HEAD, _TAIL = framed(frames.section("step", SectionAction.OPEN, iteration=0x01020304)).split((0x01020304).to_bytes(4, "little"))


def framed_section(iteration: int) -> bytes:
    """A different one each time, so that nothing is remembered."""
    return _HEAD + iteration.to_bytes(4, "little") + _TAIL


def test_the_newest_connection_takes_over(tmp_path: Path) -> None:
    async def play(site: Site) -> None:
        old = await site.client()
        new = await site.client()
        assert await old.dropped()
        assert await new.ask(frames.section("step", SectionAction.OPEN)) == wire.OK
        old.close()
        new.close()

    assert with_site(tmp_path, play).said == []


# -- the folder -------------------------------------------------------------------------------------------------------------------------------------------


def test_a_long_tmpdir_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    folder = PrivateFolder()
    assert folder.path.startswith("/tmp/" + PREFIX)
    folder.close()
    assert not os.path.exists(folder.path)


def test_no_place_at_all_is_said_once_and_harms_nothing(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match="set TMPDIR"):
        PrivateFolder([str(tmp_path / "nowhere")])

    async def main() -> list[str]:
        said: list[str] = []
        server = NvrxServer(LIMITS, Told(said.append, lambda r, q: None, lambda r, t: None), [str(tmp_path / "nowhere")])
        assert server.open(0, [0, 1]) == {0: {}, 1: {}}
        page = PageSample()
        assert server.sample(0, page) is page
        assert server.limits(0, LIMITS) is LIMITS
        server.started(0, os.getpid())
        server.ended(0)
        server.close()
        return said

    (said,) = asyncio.run(main())
    assert said.startswith("NVRx's clients cannot be served: no folder")


def test_what_a_killed_owner_left_is_swept_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    code = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from ft_launcher.shell.private_folder import PrivateFolder
folder = PrivateFolder([sys.argv[1]])
open(folder.path + "/c0r0", "w").close()
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    place = Path("/tmp") / f"nvrx-sweep-{os.getpid()}"
    place.mkdir()
    try:
        living = PrivateFolder([str(place)])
        root = str(Path(__file__).resolve().parents[2])
        done = subprocess.run([sys.executable, "-c", code, str(place), root], capture_output=True, text=True, check=False)
        left = Path(done.stdout.strip())
        assert left.is_dir(), done.stderr
        (place / (PREFIX + "fresh")).mkdir()
        (place / (PREFIX + "link")).symlink_to("/etc")
        (place / "other").mkdir()
        sweep(str(place))
        assert sorted(p.name for p in place.iterdir()) == sorted([Path(living.path).name, PREFIX + "fresh", PREFIX + "link", "other"])
        assert Path("/etc").is_dir()
        living.close()
    finally:
        for rest in sorted(place.rglob("*"), reverse=True):
            rest.rmdir() if rest.is_dir() and not rest.is_symlink() else rest.unlink()
        place.rmdir()
