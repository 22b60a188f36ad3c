"""Who may ask: where the server listens, the bearer token, and the Host header.

The page shows script arguments, host names and stacks, so the default is this machine alone, and beyond it only with a token, unless somebody says that none is needed. On loopback
without a token, a Host header that names another machine is refused: that is how a web page elsewhere would make a browser ask for it (DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ft_launcher.errors import ConfigError

TOKEN_ENV = "FT_STATE_TOKEN"
_MIN_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Gate:
    """`token` None: nobody is asked for one. `loopback`: only this machine can connect."""

    token: str | None
    loopback: bool

    def host_is_fine(self, host: str | None) -> bool:
        """Whether a request with this Host header may be answered."""
        if self.token is not None or not self.loopback:
            return True
        name = (host or "").strip().lower()
        bare = name[1 : name.find("]")] if name.startswith("[") else name.rpartition(":")[0] or name
        return bare == "localhost" or bare.endswith(".localhost") or _is_loopback_address(bare)

    def admits(self, authorization: str | None) -> bool:
        """Whether the Authorization header carries the token; compared in a time that does not tell how much of it was right."""
        if self.token is None:
            return True
        scheme, _, given = (authorization or "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("utf-8", "replace"), self.token.encode())


def read_token(file: Path | None, no_token: bool, env: Mapping[str, str]) -> str | None:
    """The token to ask for: of the file, else of the environment, else none. Raises `ConfigError` for one that is unreadable or unfit."""
    if no_token:
        if file is not None:
            raise ConfigError(f"--no-token with --token-file {file}: say one of them")
        return None
    if file is None:
        return _checked(env[TOKEN_ENV], TOKEN_ENV) if env.get(TOKEN_ENV) else None
    try:
        with open(file, "rb") as opened:
            content = opened.read(4096).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"--token-file {file}: unreadable ({error.strerror or error})") from error
    return _checked(content, f"--token-file {file}")


def is_loopback(host: str) -> bool:
    """Whether every address that `host` stands for is this machine's own. Raises `ConfigError` for a name without address."""
    return all(_is_loopback_address(address) for _, address in addresses(host))


def addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """What `host` resolves to. Raises `ConfigError` where it does not."""
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(f"--host {host!a}: not an address of this machine ({getattr(error, 'strerror', None) or error})") from error
    return [(family, str(address[0])) for family, _, _, _, address in found]


def opened_for(host: str, token: str | None, no_token: bool) -> Gate:
    """The gate of a server that listens on `host`. Raises `ConfigError` where it would let in anybody without that having been said."""
    loopback = is_loopback(host)
    if not loopback and token is None and not no_token:
        raise ConfigError(
            f"--host {host}: others could read the run's state; give --token-file FILE (or {TOKEN_ENV}), or say --no-token where the network is trusted"
        )
    return Gate(token, loopback)


def _checked(content: str, where: str) -> str:
    token = content.strip()
    if len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{where}: a token is one line of at least {_MIN_TOKEN} printable ASCII characters without blanks, such as `openssl rand -hex 24` prints"
        )
    return token


def _is_loopback_address(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False
