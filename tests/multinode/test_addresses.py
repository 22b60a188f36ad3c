"""Where nodes are reached: overridden, IPv6, names that do not resolve; and real cuts of a network, in network namespaces."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multinode.cluster import Cluster
from tests.multinode.conftest import Make
from tests.store.etcd_server import EtcdServer


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_the_address_that_is_given_is_the_ranks_master(make: Make) -> None:
    job = make().start("n0", options=["--node-addr", "127.0.0.2"]).start("n1", options=["--node-addr", "127.0.0.3"])
    job.until_step(0)
    assert {x["master"] for x in job.life(0)} == {"127.0.0.2"}
    assert [(job.stored(f"nodes/{n}") or {})["address"].rpartition(":")[0] for n in ("n0", "n1")] == ["127.0.0.2", "127.0.0.3"]


def test_without_one_it_is_the_interface_towards_the_store(make: Make) -> None:
    job = make().start("n0", "n1")
    job.until_step(0)
    assert {x["master"] for x in job.life(0)} == {"127.0.0.1"}, "where the store is on this machine, too"


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
def test_ipv6(make: Make) -> None:
    job = make(ttl_s=20).start("n0", "n1", options=["--node-addr", "::1"])
    job.until_step(0)
    assert {x["master"] for x in job.life(0)} == {"::1"}
    assert (job.stored("nodes/n0") or {})["address"].startswith("[::1]:")
    job.add_spares("s0", options=["--node-addr", "::1"])
    job["n0"].power_off()
    assert job.until_step(1, within_s=15) == {"s0": [0], "n1": [1]}


def test_a_name_that_does_not_resolve_is_said_in_one_line(make: Make) -> None:
    job = make().start("n0", options=["--node-addr", "no-such-host.invalid"])
    assert job["n0"].wait() == 2
    (line,) = [x for x in job["n0"].said().splitlines() if x.strip()]
    assert "--node-addr" in line
    assert "no-such-host.invalid" in line


def test_a_fixed_port_survives_the_agent(make: Make) -> None:
    """The new agent of a node listens where the dead one did: it is not mistaken for it."""
    from tests.store.etcd_server import free_port

    port = free_port()
    job = make().start("n0").start("n1", options=["--node-addr", f"127.0.0.1:{port}"])
    before = job.until_step(0)
    job["n1"].power_off()
    job.start("n1", options=["--node-addr", f"127.0.0.1:{port}"])
    assert job.until_step(1) == before


# -- network namespaces ------------------------------------------------------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def can_have_namespaces() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    name = f"ftprobe{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class Lan:
    """A bridge in this namespace (10.77.x.1) and a namespace with an address of its own for each node."""

    made = 0

    def __init__(self) -> None:
        Lan.made += 1  # the kernel takes its time to remove what was deleted: names are not used again
        self._tag = f"{os.getpid() % 10000}{'abcdefgh'[Lan.made % 8]}"
        self.subnet = f"10.{77 + Lan.made}.{os.getpid() % 250}"
        self.bridge = f"ftb{self._tag}"
        self.spaces: dict[str, str] = {}
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.subnet}.1/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def join(self, node_id: str, two_interfaces: bool = False) -> list[str]:
        """Give a node its namespace; returns the words that run a command in it."""
        number = len(self.spaces) + 2
        space, outer = f"ftn{self._tag}-{number}", f"ftv{self._tag}-{number}"
        self.spaces[node_id] = space
        ip("netns", "add", space)
        ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", outer, "master", self.bridge)
        ip("link", "set", outer, "up")
        ip("-n", space, "link", "set", "lo", "up")
        if two_interfaces:  # a first one that leads nowhere
            ip("-n", space, "link", "add", "aaa0", "type", "bridge")
            ip("-n", space, "addr", "add", "10.99.0.1/16", "dev", "aaa0")
            ip("-n", space, "link", "set", "aaa0", "up")
        ip("-n", space, "addr", "add", self.address(node_id) + "/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        return ["ip", "netns", "exec", space]

    def address(self, node_id: str) -> str:
        return f"{self.subnet}.{list(self.spaces).index(node_id) + 2}"

    def unplug(self, node_id: str) -> None:
        ip("-n", self.spaces[node_id], "link", "set", "eth0", "down")

    def plug(self, node_id: str) -> None:
        ip("-n", self.spaces[node_id], "link", "set", "eth0", "up")

    def close(self) -> None:
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, capture_output=True)


needs_namespaces = pytest.mark.skipif(not can_have_namespaces(), reason="network namespaces need root and iproute2's `ip netns`")


@pytest.fixture
def lan() -> Iterator[Lan]:
    lan = Lan()
    try:
        yield lan
    finally:
        lan.close()


@pytest.fixture
def far_etcd(tmp_path: Path, lan: Lan) -> Iterator[EtcdServer]:
    """A server on the bridge's address."""
    server = EtcdServer(tmp_path, flags=[])
    server.flags = ("--listen-client-urls", f"http://127.0.0.1:{server.client},http://{lan.subnet}.1:{server.client}")
    try:
        yield server.start()
    finally:
        server.kill()


def on_lan(make: Make, lan: Lan, etcd: EtcdServer, **options: float) -> Cluster:
    return make([(f"{lan.subnet}.1", etcd.client)], **options)


@needs_namespaces
def test_a_cut_of_the_network_to_one_node_replaces_it(make: Make, lan: Lan, far_etcd: EtcdServer) -> None:
    job = on_lan(make, lan, far_etcd)
    try:
        for node in ("n0", "n1"):
            job.start(node, prefix=lan.join(node))
        job.until_step(0)
        job.add_spares("s0", prefix=lan.join("s0"))
        assert {x["master"] for x in job.life(0)} == {lan.address("n0")}
        ranks = job["n1"].ranks()
        lan.unplug("n1")
        assert job.until_step(1) == {"n0": [0], "s0": [1]}
        (decision,) = job.decisions()
        assert "does not answer" in decision["reason"]
        assert job.stored("job")["budgets"]["restarts"] == 0
        lan.plug("n1")
        job.until(lambda: not job["n1"].ranks(), "its ranks end once it learns", 20)
        assert ranks
        job.until(lambda: job.stored("nodes/n1"), "and it is a spare again")
        assert job.cycle() == 1
    finally:
        job.close()


@needs_namespaces
def test_of_several_interfaces_the_one_towards_the_store(make: Make, lan: Lan, far_etcd: EtcdServer) -> None:
    job = on_lan(make, lan, far_etcd)
    try:
        for node in ("n0", "n1"):
            job.start(node, prefix=lan.join(node, two_interfaces=True))
        job.until_step(0)
        assert {x["master"] for x in job.life(0)} == {lan.address("n0")}
    finally:
        job.close()
