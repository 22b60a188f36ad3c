"""Fixtures: clusters of agents over etcd servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multinode.cluster import Cluster, Detour
from tests.store.etcd_server import EtcdServer

Make = Callable[..., Cluster]


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A server that no test may stop or freeze; runs have names of their own."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    try:
        yield server.start()
    finally:
        server.kill()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server of the test's own."""
    server = EtcdServer(tmp_path)
    try:
        yield server.start()
    finally:
        server.kill()


@pytest.fixture
def make(tmp_path: Path, shared_etcd: EtcdServer) -> Iterator[Make]:
    """`make(endpoints=..., nnodes=2, ...)`: a cluster, checked against what always holds and taken down afterwards."""
    made: list[Cluster] = []

    def build(endpoints: list[tuple[str, int]] | None = None, **options: Any) -> Cluster:
        folder = tmp_path / f"cluster{len(made)}"
        folder.mkdir(exist_ok=True)
        run_id = options.pop("run_id", f"{tmp_path.parent.name}-{tmp_path.name}-{len(made)}")
        made.append(Cluster(folder, endpoints or [shared_etcd.endpoint], run_id, **options))
        return made[-1]

    yield build
    for cluster in made:
        cluster.close()
    for cluster in made:
        cluster.check()


@pytest.fixture
def detour() -> Iterator[Callable[[tuple[str, int]], Detour]]:
    """`detour(endpoint)`: a way to the store that can be cut."""
    made: list[Detour] = []

    def build(target: tuple[str, int]) -> Detour:
        made.append(Detour(target))
        return made[-1]

    yield build
    for way in made:
        way.close()
