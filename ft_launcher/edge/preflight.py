"""Whether this machine can carry out what was asked: the script, the files, the ports, the log directory.

Everything here looks without changing anything, but for the last check: a log directory is proven by creating it with a probe file in it,
because permission bits tell little (root, read-only mounts, full disks, quotas). What was created for a check that failed is taken away
again. No process is started.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

import ft_launcher
from ft_launcher.config import Config, StoreOptions
from ft_launcher.core.command import Command
from ft_launcher.edge.values import show
from ft_launcher.errors import ConfigError

HOME = Path(ft_launcher.__file__).resolve().parent.parent


def check(config: Config, keep_disk: bool) -> None:
    """All checks, cheap ones first. With `keep_disk` (a dry run) nothing is created, not even for a moment. Raises ConfigError."""
    check_packages()
    check_command(config.command)
    check_store(config.store)
    check_port(config.node_addr)
    check_file_places(config)
    if keep_disk:
        could_create(config.log_dir)
    else:
        prove_writable(config.log_dir)


def importable(name: str, folder: str | None = None) -> bool:
    """Whether a top-level module can be imported, without importing it; `folder` is looked at first."""
    if folder is not None and PathFinder.find_spec(name, [folder]) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return name in sys.modules


def check_packages(find: Callable[[str], str | None] | None = None) -> None:
    """PyPI's rerun-sdk and this project both install a top-level `rerun`.

    `find` gives the place of a top-level package, None where there is none.
    """
    find = find or _place
    _check_monitors(find)
    rerun = find("rerun")
    theirs = find("rerun_sdk") or (None if rerun is None or Path(rerun).resolve().is_relative_to(HOME / "rerun") else rerun)
    if theirs is not None:
        raise ConfigError(
            f"the Python package at {theirs} also calls itself 'rerun' (as PyPI's rerun-sdk does) and cannot share an environment with "
            "ft-launcher's own: uninstall it, or use another environment"
        )


def _check_monitors(find: Callable[[str], str | None]) -> None:
    found = find("monitors")
    if found is not None and not Path(found).resolve().is_relative_to(HOME / "monitors"):
        raise ConfigError(
            f"the Python module at {found} hides ft-launcher's own package 'monitors': rename it, or take its folder out of PYTHONPATH (a module of that "
            "name beside the script does no harm)"
        )


def _place(name: str) -> str | None:
    """The file or folder that `import name` would take, without importing it."""
    spec = importlib.util.find_spec(name)
    return None if spec is None else (spec.origin or next(iter(spec.submodule_search_locations or ()), name))


def check_command(command: Command) -> None:
    """That there is a script, or a module's package, to run."""
    if command.module is not None:
        _check_module(command.module)
    else:
        _check_script(str(command.script))


def _check_module(module: str) -> None:
    if not all(word.isidentifier() for word in module.split(".")):
        raise ConfigError(f"-m {show(module)}: is no module name, as in -m package.train")
    if not importable(module.partition(".")[0], None if sys.flags.safe_path else str(Path.cwd())):
        raise ConfigError(
            f"-m {module}: there is no module or package {module.partition('.')[0]} in {Path.cwd()} or among the installed ones"
        )


def _check_script(script: str) -> None:
    path = Path(script)
    try:
        if path.is_dir():
            problem = None if (path / "__main__.py").is_file() else "is a directory without a __main__.py"
        elif not path.exists():
            problem = f"does not exist (looked in {Path.cwd()}); name a Python script, or -m MODULE"
        elif not path.is_file():
            problem = "is not a regular file; every rank reads it anew"
        else:
            problem = None if os.access(path, os.R_OK) else "cannot be read: permission denied"
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {_reason(error)}"
    if problem is not None:
        raise ConfigError(f"script {show(script)} {problem}")


ETCD_PACKAGES = {"etcd3": "etcd3", "grpc": "grpcio", "google.protobuf": "protobuf"}
"""What the etcd client imports, and what it is called where packages come from."""


def check_store(store: StoreOptions, there: Callable[[str], bool] | None = None) -> None:
    """That the store's client is installed and its TLS files can be read. `there`: whether a module can be imported."""
    missing = [package for module, package in ETCD_PACKAGES.items() if store.kind == "etcd" and not (there or importable)(module)]
    if missing:
        raise ConfigError(
            f"--store etcd://...: needs the package{'s' if len(missing) > 1 else ''} {', '.join(missing)}: pip install 'ft-launcher[etcd]'"
        )
    for name, path in (("ca", store.ca), ("cert", store.cert), ("key", store.key)):
        if path is None:
            continue
        try:
            with path.open("rb") as file:
                file.read(1)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--store-{name} {show(str(path))}: cannot be read: {_reason(error)}") from None


def check_port(node_addr: str | None) -> None:
    """That a fixed channel port (`--node-addr HOST:PORT`) is free and the host has an address. The kernel chooses every other port."""
    if node_addr is None:
        return
    host, port = split_address(node_addr)
    try:
        found = socket.getaddrinfo(host, port or None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--node-addr {show(node_addr)}: the host has no address: {_reason(error)}") from None
    for family, kind, protocol, _, address in found if port else ():
        try:
            probe = socket.socket(family, kind, protocol)
        except OSError:
            continue  # the name has an address of a family that this machine does not speak
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _bind(probe, address, f"--node-addr {show(node_addr)}")


def split_address(node_addr: str) -> tuple[str, int]:
    """(host, port) of `HOST`, `HOST:PORT`, a bare IPv6 address or `[IPv6]:PORT`; port 0 where none is given."""
    host, colon, port = node_addr.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        return node_addr, 0
    return host.strip("[]"), int(port)


def _bind(probe: socket.socket, address: object, where: str) -> None:
    """Binds, to every local address where this one is not the machine's own (an address that is translated on the way)."""
    try:
        probe.bind(address)  # type: ignore[arg-type]
    except OSError as error:
        port = probe_port(address)
        if error.errno == errno.EADDRNOTAVAIL:
            _bind(probe, ("", port) if probe.family == socket.AF_INET else ("::", port), where)
        elif error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{where}: port {port} is in use; choose another, or leave the port out and the kernel chooses one") from None
        else:
            raise ConfigError(f"{where}: port {port} cannot be used: {_reason(error)}") from None


def probe_port(address: object) -> int:
    """The port in a socket address of either family."""
    return int(address[1]) if isinstance(address, tuple) else 0


def check_file_places(config: Config) -> None:
    """That no directory stands where a file is to be. (An ft_state that cannot be written never stops a job.)"""
    for name, path in (("ft-state", config.ft_state), ("progress-file", config.progress_file)):
        if path is not None and _is_dir(path):
            raise ConfigError(f"--{name} {show(str(path))}: is a directory; name a file")


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def could_create(log_dir: Path) -> None:
    """That the log directory is there or could be made, as far as one can tell without making anything."""

    def look() -> None:
        """Raises OSError where it could not."""
        nearest = next(path for path in (log_dir, *log_dir.parents) if path.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
        if os.statvfs(nearest).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(nearest))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))

    _guarded(log_dir, look)


def prove_writable(log_dir: Path) -> None:
    """Creates the log directory and a probe file in it; takes the probe away, and on failure the directories that it made."""
    made: list[Path] = []

    def probe() -> None:
        """Raises OSError where it fails; `made` knows what to take away."""
        for path in (*reversed(log_dir.parents), log_dir):
            if _make(path):
                made.append(path)
        file = log_dir / f".probe.{os.getpid()}"
        try:
            file.write_bytes(b"ft-launch can write here\n")
        finally:
            file.unlink(missing_ok=True)

    try:
        _guarded(log_dir, probe)
    except ConfigError:
        for path in reversed(made):
            _remove(path)
        raise


def _make(path: Path) -> bool:
    """Whether the directory was made here; agents of other nodes may be making the same one at this moment."""
    if path.is_dir():
        return False
    try:
        path.mkdir()
    except FileExistsError:
        if path.is_dir():
            return False
        raise
    return True


def _remove(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        pass  # somebody else uses it by now: theirs


def _guarded(log_dir: Path, look: Callable[[], None]) -> None:
    try:
        look()
    except (OSError, ValueError) as error:
        at = getattr(error, "filename", None) or log_dir
        raise ConfigError(
            f"--log-dir {show(str(log_dir))}: cannot be written: {_reason(error)} ({show(str(at))}); name another directory"
        ) from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
