"""Names that become file names: run ids and node ids, both given by users and schedulers.

This room knows what is safe as one component of a path on any file system a cluster uses, and nothing else. It never repairs a name: two
different ids must not end up in the same folder, so a bad one is refused with a line that says what is allowed. Schedulers' own ids
(`12345`, `12345_7`, `12345[7].pbs01`) all pass.
"""

from __future__ import annotations

import re

from ft_launcher.errors import ConfigError

NAME_MAX_CHARS = 128  # leaves room for `.<generation>`, `journal.` and temporary suffixes within the usual 255 bytes
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@:\[\]-]*", re.ASCII)
_ALLOWED = f"1 to {NAME_MAX_CHARS} of A-Z a-z 0-9 . _ + = @ : [ ] -, the first a letter or a digit"


def checked_name(option: str, name: str) -> str:
    """`name`, unchanged. Raises `ConfigError` (naming `option`, the value and what is allowed) where it cannot be one component of a
    path.
    """
    if not isinstance(name, str) or len(name) > NAME_MAX_CHARS or not _NAME.fullmatch(name):
        shown = ascii(name) if len(str(name)) <= 60 else f"{str(name)[:57]!a}... ({len(str(name))} characters)"
        raise ConfigError(f"{option} {shown}: allowed are {_ALLOWED}; it names files below --log-dir, choose another")
    return name


def checked_run_id(run_id: str) -> str:
    """The run id, unchanged; `ConfigError` where it is unfit."""
    return checked_name("--run-id", run_id)


def checked_node_id(node_id: str) -> str:
    """The node id, unchanged; `ConfigError` where it is unfit."""
    return checked_name("--node-id", node_id)
