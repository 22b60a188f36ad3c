"""What the machine is asked: log directories, ports, packages."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ft_launcher.config import StoreOptions
from ft_launcher.edge import preflight
from ft_launcher.errors import ConfigError


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_the_log_directory_is_made_and_the_probe_taken_away(tmp_path: Path) -> None:
    preflight.prove_writable(tmp_path / "a" / "b")
    assert tree(tmp_path) == ["a", "a/b"]
    preflight.prove_writable(tmp_path / "a" / "b")
    assert tree(tmp_path) == ["a", "a/b"]


@pytest.mark.parametrize("check", [preflight.prove_writable, preflight.could_create])
def test_a_file_in_the_way(tmp_path: Path, check: object) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / "file" / "x" / "y"):
        with pytest.raises(ConfigError, match="cannot be written"):
            check(bad)  # type: ignore[operator]
    assert tree(tmp_path) == ["file"]


@pytest.mark.parametrize("bad", ["/proc/xyz", "/proc/self/fdinfo/x/y", "/dev/null/x"])
def test_places_that_take_no_directory(bad: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        preflight.prove_writable(Path(bad))


def test_a_dangling_link_and_a_name_too_long(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for bad in (tmp_path / "link", tmp_path / "made" / ("x" * 300)):
        with pytest.raises(ConfigError, match="cannot be written"):
            preflight.prove_writable(bad)
    assert tree(tmp_path) == ["link"]


def test_a_directory_that_takes_no_file_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or a quota: the directories can be made, the file cannot be written."""

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="No space left"):
        preflight.prove_writable(tmp_path / "there" / "a" / "b")
    assert tree(tmp_path) == ["there"]


def test_a_dry_run_only_looks(tmp_path: Path) -> None:
    preflight.could_create(tmp_path / "a" / "b")
    assert tree(tmp_path) == []


def test_a_directory_without_permission(tmp_path: Path) -> None:
    """Root is bound by no permission bits, so as root it is nobody who looks."""
    tmp_path.chmod(0o500)
    as_root = os.geteuid() == 0
    if as_root:
        os.seteuid(65534)
    try:
        for check in (preflight.prove_writable, preflight.could_create):
            with pytest.raises(ConfigError, match="Permission denied"):
                check(tmp_path / "a")
    finally:
        if as_root:
            os.seteuid(0)
        tmp_path.chmod(0o700)


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--node-addr '127.0.0.1:{port}': port {port} is in use"):
            preflight.check_port(f"127.0.0.1:{port}")
    preflight.check_port(f"127.0.0.1:{port}")


def test_a_name_with_several_addresses_is_checked_at_each() -> None:
    """`localhost` is ::1 and 127.0.0.1; the port may be taken at one of them only."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="is in use"):
            preflight.check_port(f"localhost:{taken.getsockname()[1]}")


def test_agents_of_several_nodes_make_the_same_log_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another agent makes the directory between our look and our mkdir."""
    real = Path.mkdir

    def late(self: Path) -> None:
        real(self)
        real(self)

    monkeypatch.setattr(Path, "mkdir", late)
    preflight.prove_writable(tmp_path / "shared" / "logs")
    assert tree(tmp_path) == ["shared", "shared/logs"]


def test_an_address_that_is_not_this_machines_own_is_checked_by_its_port() -> None:
    """192.0.2.1 is reserved for documentation: nobody's own. Behind an address translation such an address is right."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="is in use"):
            preflight.check_port(f"192.0.2.1:{taken.getsockname()[1]}")
    preflight.check_port("192.0.2.1")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a", ("a", 0)),
        ("a:5", ("a", 5)),
        ("::1", ("::1", 0)),
        ("[::1]:5", ("::1", 5)),
        ("fe80::1:2", ("fe80::1:2", 0)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
    ],
)
def test_split_address(text: str, parts: tuple[str, int]) -> None:
    assert preflight.split_address(text) == parts


def test_another_package_called_rerun() -> None:
    preflight.check_packages()
    preflight.check_packages({"rerun": str(preflight.HOME / "rerun" / "__init__.py")}.get)
    preflight.check_packages({}.get)
    for places in (
        {"rerun": "/site/rerun_sdk/rerun/__init__.py"},
        {"rerun": str(preflight.HOME / "rerun" / "__init__.py"), "rerun_sdk": "/site/rerun_sdk"},
    ):
        with pytest.raises(ConfigError, match=r"at /site/rerun_sdk.* cannot share an environment"):
            preflight.check_packages(places.get)


def test_looking_for_a_module_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "beside_the_script.py").write_text("raise SystemExit('imported')\n")
    assert preflight.importable("beside_the_script", str(tmp_path))
    assert not preflight.importable("beside_the_script")
    assert preflight.importable("json")
    assert not preflight.importable("no_such_module_anywhere", str(tmp_path))
    assert preflight.importable("__main__")


def test_etcd_without_its_client_is_one_line_that_says_what_to_install() -> None:
    etcd = StoreOptions(kind="etcd", endpoints=(("h", 1),))
    preflight.check_store(etcd, lambda module: True)
    preflight.check_store(StoreOptions(), lambda module: False)
    with pytest.raises(ConfigError, match=r"needs the packages etcd3, grpcio, protobuf: pip install 'ft-launcher\[etcd\]'"):
        preflight.check_store(etcd, lambda module: False)
    with pytest.raises(ConfigError, match="needs the package grpcio:"):
        preflight.check_store(etcd, lambda module: module != "grpc")
