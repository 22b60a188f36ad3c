"""Tests of the store against real etcd servers; one server is shared by all that do not hurt it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.etcd_server import EtcdServer, cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("serial")


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A server that no test may stop, freeze or compact."""
    server = EtcdServer(tmp_path_factory.mktemp("shared"))
    try:
        yield server.start()
    finally:
        server.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server of the test's own."""
    server = EtcdServer(tmp_path)
    try:
        yield server.start()
    finally:
        server.kill()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[EtcdServer]]:
    """A cluster of three of the test's own."""
    found: list[EtcdServer] = []
    try:
        yield cluster(tmp_path, into=found)
    finally:
        for server in found:
            server.kill()


@pytest.fixture
def prefix() -> str:
    """Where the test's keys are."""
    return f"/ft/v1/{uuid.uuid4().hex}/"
