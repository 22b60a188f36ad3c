"""`ft-launch selftest`: does this machine, with this Python, detect and survive each kind of fault?

A small real job (four ranks, no torch needed) is run under the launcher and hurt in every way the launcher claims to handle; a table says what was decided, and how many
seconds detection and recovery took here.
"""

from ft_launcher.selftest.main import run

__all__ = ["run"]
