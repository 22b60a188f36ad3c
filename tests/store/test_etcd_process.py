"""What the client means for the process it lives in: memory, threads, forks, other users of protobuf. Each in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

from tests.store.etcd_server import TREE, EtcdServer

PRELUDE = """
import asyncio, os, sys, threading
from ft_launcher.config import StoreOptions
from ft_launcher.errors import BugError
options = lambda: StoreOptions(kind="etcd", endpoints=(("127.0.0.1", int(sys.argv[1])),), timeout_s=60.0)
"""


def python(server: EtcdServer, script: str) -> str:
    """The output of a script in an interpreter of its own, which must end well and say nothing on stderr."""
    command = [sys.executable, "-c", PRELUDE + script, str(server.client)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=TREE)
    complaints = [
        line for line in done.stderr.splitlines() if "fork_posix.cc" not in line
    ]  # gRPC's own word on an os.fork, which a test does
    assert (done.returncode, complaints) == (0, []), done.stderr[-3000:]
    return done.stdout.strip()


def test_a_forked_child_may_not_use_it_and_the_parent_still_can(shared_server: EtcdServer) -> None:
    said = python(
        shared_server,
        """
from ft_launcher.shell.etcd import EtcdStore
async def main():
    store = EtcdStore(options())
    await store.put("/ft/v1/fork", "1")
    pid = os.fork()
    if pid == 0:
        try:
            store.get("/ft/v1/fork").send(None)
        except BugError as error:
            os._exit(42 if "fork" in str(error) else 1)
        os._exit(2)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), (await store.get("/ft/v1/fork")).value)
    await store.close()
asyncio.run(main())
""",
    )
    assert said.split("\n")[-1] == "42 1"


def test_no_thread_of_ours_is_left_after_close(shared_server: EtcdServer) -> None:
    said = python(
        shared_server,
        """
import gc
from ft_launcher.shell.etcd import EtcdStore
async def main():
    store = EtcdStore(options())
    start = await store.put("/ft/v1/threads", "1")
    async for changes in store.watch("/ft/v1/threads", start):
        await store.close()
asyncio.run(main())
gc.collect()
print([thread.name for thread in threading.enumerate()])
""",
    )
    assert said == "['MainThread']"


def test_stores_in_several_loops_one_after_the_other(shared_server: EtcdServer) -> None:
    said = python(
        shared_server,
        """
from ft_launcher.shell.etcd import EtcdStore
async def main(n):
    store = EtcdStore(options())
    await store.put("/ft/v1/loops", str(n))
    print((await store.get("/ft/v1/loops")).value)
    await store.close()
for n in range(3):
    asyncio.run(main(n))
""",
    )
    assert said.split() == ["0", "1", "2"]


def test_the_agent_stays_small_and_free_of_what_it_must_not_import(shared_server: EtcdServer) -> None:
    """The agent's rooms and the store, connected and watching: less than the 60 MB of docs/design.md section 11, and no torch."""
    said = python(
        shared_server,
        """
import ft_launcher.cli, ft_launcher.shell.main
from ft_launcher.shell.etcd import EtcdStore
async def main():
    store = EtcdStore(options())
    start = await store.put("/ft/v1/memory", "x" * 262144)
    async for changes in store.watch("/ft/v1/memory", start):
        break
    pss = next(line for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:"))
    print(int(pss.split()[1]) // 1024, "torch" in sys.modules, "numpy" in sys.modules)
    await store.close()
asyncio.run(main())
""",
    )
    size_mb, *imported = said.split()
    assert int(size_mb) < 60 and imported == ["False", "False"], said


def test_the_messages_are_private(shared_server: EtcdServer) -> None:
    """Another copy of etcd's API in protobuf's default pool, as other libraries bring one, does not clash; nor is the environment touched."""
    said = python(
        shared_server,
        """
before = dict(os.environ)
from google.protobuf import descriptor_pb2, descriptor_pool
for name in ("rpc.proto", "ft_launcher/etcd.proto"):
    other = descriptor_pb2.FileDescriptorProto(name=name, package="etcdserverpb" if name == "rpc.proto" else "ft_launcher.etcd", syntax="proto3")
    other.message_type.add(name="RangeRequest")
    descriptor_pool.Default().AddSerializedFile(other.SerializeToString())
from ft_launcher.shell.etcd_proto import pb
assert pb.RangeRequest.FromString(pb.RangeRequest(key=b"k", limit=1).SerializeToString()).key == b"k"
import etcd3
print(etcd3.__version__, dict(os.environ) == before)
""",
    )
    assert said == "0.12.0 True"
