"""What a rank runs: a script or a module, and the arguments that are the script's own.

Both ends speak of it: the command line that was given, and the rank that is started. It knows how Python spells such a command and nothing of processes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """`script args...` or `-m module args...`: exactly one of `module` and `script` is set, as the user wrote it (no path made absolute).

    Raises ValueError when both or neither are given.
    """

    module: str | None = None
    script: str | None = None
    args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.module is None) == (self.script is None):
            raise ValueError(f"a command is a script or a module, not both and not neither: {self.module!r}, {self.script!r}")

    @property
    def target(self) -> tuple[str, ...]:
        """What stands on Python's command line before the arguments: `("-m", module)` or `(script,)`."""
        return (self.script,) if self.script is not None else ("-m", str(self.module))

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command as Python takes it behind its own flags."""
        return (*self.target, *self.args)
