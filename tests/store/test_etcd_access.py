"""Who may use the store: users and passwords, tokens that expire, certificates; and whose fault it is said to be."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_launcher.errors import ConfigError, PlatformError
from ft_launcher.shell.etcd import EtcdStore
from tests.store.etcd_server import EtcdServer, Tls
from tests.store.observe import Recorder, options, run_etcd, tls_options

OURS, THEIRS = "/ft/v1/", "/ft/v2/"
USER, PASSWORD = "launcher", "correct horse"


def _gateway(server: EtcdServer, path: str, token: str = "", **body: object) -> dict[str, str]:
    """etcd's JSON gateway: for what the store never asks."""
    headers = {"Authorization": token} if token else {}
    request = urllib.request.Request(f"http://127.0.0.1:{server.client}/v3/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, str] = json.load(answer)
        return found


def _add_users(server: EtcdServer) -> None:
    """Root, and a launcher that may use its own prefix only; then authentication is switched on."""
    for name in ("root", USER):
        _gateway(server, "auth/user/add", name=name, password=PASSWORD)
    _gateway(server, "auth/role/add", name="root")
    _gateway(server, "auth/role/add", name="ft")
    key, end = (base64.b64encode(text.encode()).decode() for text in (OURS, THEIRS))
    _gateway(server, "auth/role/grant", name="ft", perm={"permType": "READWRITE", "key": key, "range_end": end})
    _gateway(server, "auth/user/grant", user="root", role="root")
    _gateway(server, "auth/user/grant", user=USER, role="ft")
    _gateway(server, "auth/enable")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server that asks for user and password, and forgets idle tokens quickly. Cheap hashes: the tests' machine is small."""
    server = EtcdServer(tmp_path, flags=["--auth-token-ttl", "1", "--bcrypt-cost", "4"])
    try:
        server.start()
        _add_users(server)
        yield server
    finally:
        server.kill()


def test_a_token_that_expired_or_was_lost_is_replaced(guarded: EtcdServer, prefix: str) -> None:
    """Idle for longer than the token lives; then a restart, which forgets all tokens; the watch goes on all the while."""

    async def body(store: EtcdStore) -> None:
        start = (await store.list(prefix)).revision
        async with Recorder(store, prefix, start + 1) as watch:
            await store.put(prefix + "k", "0")
            await watch.until(lambda w: len(w.seen) == 1)
            first = store._calls._token
            assert first
            store._calls._token = "none.1"  # as an expired one: nobody knows it
            await store.put(prefix + "k", "1")
            await watch.until(lambda w: len(w.seen) == 2)
            await asyncio.to_thread(guarded.kill)
            await asyncio.to_thread(guarded.start)
            await store.put(prefix + "k", "2")
            await watch.until(lambda w: len(w.seen) == 3)
            lease = await store.grant(30.0)
            assert await store.keep_alive(lease) is not None
            await store.revoke(lease)
        assert watch.values == ["0", "1", "2"]

    run_etcd(options([guarded], user=USER, password=PASSWORD), body)


def test_a_token_expires_while_the_store_is_idle(guarded: EtcdServer, prefix: str) -> None:
    async def body(store: EtcdStore) -> None:
        await store.put(prefix + "k", "0")
        first = store._calls._token
        await asyncio.sleep(3.5)  # the server looks for expired tokens each second
        async with Recorder(store, prefix, 1) as watch:  # etcd reports an old token of a watch as "permission denied"
            await watch.until(lambda w: len(w.seen) == 1)
        assert store._calls._token != first
        await store.put(prefix + "k", "1")

    run_etcd(options([guarded], user=USER, password=PASSWORD), body)


def test_users_and_roles_that_change_are_no_end(guarded: EtcdServer, prefix: str) -> None:
    """Each change makes older tokens invalid."""

    async def body(store: EtcdStore) -> None:
        await store.put(prefix + "k", "0")
        root = _gateway(guarded, "auth/authenticate", name="root", password=PASSWORD)["token"]
        _gateway(guarded, "auth/role/add", root, name="another")
        await store.put(prefix + "k", "1")

    run_etcd(options([guarded], user=USER, password=PASSWORD), body)


def test_many_calls_at_once_log_in_once(guarded: EtcdServer, prefix: str) -> None:
    async def body(store: EtcdStore) -> None:
        await asyncio.gather(*(store.put(f"{prefix}{n}", "") for n in range(20)))
        assert len((await store.list(prefix)).entries) == 20

    run_etcd(options([guarded], user=USER, password=PASSWORD), body)


@pytest.mark.parametrize(
    ("user", "password", "key", "said"),
    [
        (None, None, OURS, "give --store-user"),
        (USER, "wrong", OURS, "wrong user or password"),
        ("nobody", PASSWORD, OURS, "wrong user or password"),
        (USER, PASSWORD, "/elsewhere/", "may not read and write"),
    ],
)
def test_who_may_not_is_told_at_once(guarded: EtcdServer, user: str | None, password: str | None, key: str, said: str) -> None:
    async def body(store: EtcdStore) -> None:
        with pytest.raises(ConfigError, match=said) as failure:
            await store.put(key + "k", "1")
        assert "\n" not in str(failure.value) and PASSWORD not in str(failure.value)
        with pytest.raises(ConfigError, match=said):
            await store.list(key)
        async with Recorder(store, key, 1) as watch:
            await watch.until(lambda w: w.ended)
        assert isinstance(watch.error, ConfigError)

    run_etcd(options([guarded], user=user, password=password), body)


def test_a_password_where_none_is_asked_for(shared_server: EtcdServer, prefix: str) -> None:
    async def body(store: EtcdStore) -> None:
        await store.put(prefix + "k", "1")
        assert len((await store.list(prefix)).entries) == 1

    run_etcd(options([shared_server], user=USER, password=PASSWORD), body)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def _authority(folder: Path, name: str) -> tuple[Path, Path]:
    """(certificate, key) of an authority of its own."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl("req", "-x509", *curve, "-keyout", str(key), "-out", str(cert), "-subj", f"/CN={name}", "-days", "2")
    return cert, key


def _certificate(folder: Path, name: str, authority: tuple[Path, Path], alt: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """(certificate, key) signed by the authority, for servers and clients."""
    cert, key, request, extra = (folder / f"{name}.{end}" for end in ("pem", "key", "csr", "ext"))
    extra.write_text(f"subjectAltName={alt}\nextendedKeyUsage=serverAuth,clientAuth\n")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl("req", *curve, "-keyout", str(key), "-out", str(request), "-subj", f"/CN={name}")
    signed = ["-CA", str(authority[0]), "-CAkey", str(authority[1]), "-CAcreateserial", "-days", "2"]
    _openssl("x509", "-req", "-in", str(request), *signed, "-out", str(cert), "-extfile", str(extra))
    return cert, key


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _authority(tmp_path_factory.mktemp("ca"), "ca")


@pytest.fixture
def secure(tmp_path: Path, authority: tuple[Path, Path]) -> Iterator[tuple[EtcdServer, Tls]]:
    """A server that speaks TLS and asks for a client certificate."""
    cert, key = _certificate(tmp_path, "server", authority)
    tls = Tls(authority[0], cert, key, clients=True)
    server = EtcdServer(tmp_path, tls=tls)
    try:
        yield server.start(), tls
    finally:
        server.kill()


def test_tls_with_a_client_certificate(secure: tuple[EtcdServer, Tls], prefix: str) -> None:
    server, tls = secure

    async def body(store: EtcdStore) -> None:
        start = (await store.list(prefix)).revision
        async with Recorder(store, prefix, start + 1) as watch:
            await store.put(prefix + "k", "0")
            await watch.until(lambda w: len(w.seen) == 1)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await store.put(prefix + "k", "1")
            await watch.until(lambda w: len(w.seen) == 2)
        assert watch.values == ["0", "1"]

    run_etcd(tls_options(server, tls), body)


def test_tls_refuses_the_wrong_authority_and_strangers(secure: tuple[EtcdServer, Tls], tmp_path: Path, prefix: str) -> None:
    server, tls = secure
    other = _authority(tmp_path, "other")
    stranger = _certificate(tmp_path, "stranger", other)
    for ca, cert, key in ((other[0], tls.cert, tls.key), (tls.ca, *stranger), (tls.ca, None, None), (None, None, None)):

        async def body(store: EtcdStore) -> None:
            with pytest.raises(PlatformError, match="no answer for") as failure:
                await store.put(prefix + "k", "1")
            assert failure.value.exit_code == 69 and "\n" not in str(failure.value)

        run_etcd(options([server], 0.5, ca=ca, cert=cert, key=key), body)


def test_a_server_with_a_certificate_for_another_name_is_refused(tmp_path: Path, authority: tuple[Path, Path], prefix: str) -> None:
    cert, key = _certificate(tmp_path, "server", authority, alt="DNS:etcd.example")
    server = EtcdServer(tmp_path, tls=Tls(authority[0], cert, key))

    async def body(store: EtcdStore) -> None:
        with pytest.raises(PlatformError, match="no answer for") as failure:
            await store.put(prefix + "k", "1")
        assert failure.value.exit_code == 69

    try:
        run_etcd(options([server.start()], 0.5, ca=authority[0]), body)
    finally:
        server.kill()


def test_a_certificate_file_that_is_gone_is_named(shared_server: EtcdServer, tmp_path: Path, prefix: str) -> None:
    async def body(store: EtcdStore) -> None:
        with pytest.raises(ConfigError, match=r"--store-ca .*/gone\.pem: cannot be read"):
            await store.get(prefix)

    run_etcd(options([shared_server], ca=tmp_path / "gone.pem"), body)
