"""Where the store cannot be reached or a request cannot be served: one line that says why, and what is merely large goes through."""

from __future__ import annotations

import pytest

from ft_launcher.errors import ConfigError, PlatformError
from ft_launcher.shell.etcd import EtcdStore
from tests.store.etcd_server import EtcdServer, free_port
from tests.store.observe import Recorder, calls_of, options, run_etcd


def test_nobody_there_is_one_line_and_69(prefix: str) -> None:
    port, other = free_port(), free_port()

    async def body(store: EtcdStore) -> None:
        with pytest.raises(PlatformError) as failure:
            await store.get(prefix)
        assert failure.value.exit_code == 69
        text = str(failure.value)
        assert f"etcd://127.0.0.1:{port},127.0.0.1:{other}" in text and "1 s (--store-timeout)" in text and "\n" not in text
        assert "refused" in text
        async with Recorder(store, prefix, 1) as watch:
            await watch.until(lambda w: w.ended)
        assert isinstance(watch.error, PlatformError) and watch.error.exit_code == 69

    run_etcd(options([("127.0.0.1", port), ("127.0.0.1", other)], timeout_s=1.0), body)


def test_a_frozen_server_is_one_line_and_69(server: EtcdServer, prefix: str) -> None:
    async def body(store: EtcdStore) -> None:
        await store.put(prefix + "k", "1")
        server.pause()
        with pytest.raises(PlatformError, match="no answer within the deadline") as failure:
            await store.put(prefix + "k", "2")
        assert failure.value.exit_code == 69
        server.resume()
        await store.put(prefix + "k", "3")

    run_etcd(options([server], timeout_s=1.0), body)


def test_a_host_name_that_does_not_resolve_is_named(prefix: str) -> None:
    async def body(store: EtcdStore) -> None:
        with pytest.raises(PlatformError, match=r"nowhere\.invalid") as failure:
            await store.get(prefix)
        assert failure.value.exit_code == 69

    run_etcd(options([("nowhere.invalid", 2379)], timeout_s=0.5), body)


def test_a_host_name_resolves(shared_server: EtcdServer, prefix: str) -> None:
    async def body(store: EtcdStore) -> None:
        await store.put(prefix + "k", "1")

    run_etcd(options([("localhost", shared_server.client)]), body)


def test_endpoints_of_two_clusters_are_refused(shared_server: EtcdServer, server: EtcdServer, prefix: str) -> None:
    async def body(store: EtcdStore) -> None:
        calls = calls_of(store)
        with pytest.raises(ConfigError, match="another etcd cluster"):
            for _ in range(2):
                await store.put(prefix + "k", "1")
                calls.failed(calls.endpoint, 0.0, timed_out=False)

    run_etcd(options([shared_server, server]), body)


@pytest.mark.parametrize("size", [1_800_000, 8_000_000])
def test_a_value_too_large_for_etcd_is_refused_at_once(shared_server: EtcdServer, prefix: str, size: int) -> None:
    async def body(store: EtcdStore) -> None:
        with pytest.raises(PlatformError, match=r"refuses the request: .*larg"):
            await store.put(prefix + "k", "x" * size)
        await store.put(prefix + "k", "small")

    run_etcd(options([shared_server]), body)


def test_more_than_grpc_carries_by_default_is_listed_and_watched(shared_server: EtcdServer, prefix: str) -> None:
    """Thousands of reports make a list of more than 4 MiB, and a watch that was away has as much to catch up with."""

    async def body(store: EtcdStore) -> None:
        start = (await store.list(prefix)).revision
        for n in range(6):
            await store.put(f"{prefix}{n}", str(n) * 1_000_000)
        assert [len(e.value) for e in (await store.list(prefix)).entries] == [1_000_000] * 6
        async with Recorder(store, prefix, start + 1) as watch:
            await watch.until(lambda w: len(w.seen) == 6)

    run_etcd(options([shared_server]), body)
