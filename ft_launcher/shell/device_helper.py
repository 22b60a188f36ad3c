"""The process that asks the driver, so that nobody else has to: a few megabytes, one thread, killable.

`names` prints the UUIDs of all GPUs. `look UUID...` keeps NVML open and answers each line on its standard input with one line of JSON: for every device the bytes in use and who uses them,
or what the driver said instead. It ends with its standard input. It imports next to nothing, for it is started while people wait.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence

from ft_launcher.shell import linux
from ft_launcher.shell.device_nvml import NOT_SUPPORTED, Nvml, NvmlError


def main(arguments: Sequence[str]) -> None:
    """See the module. Exit status 1 where there is no NVML that works."""
    linux.die_with_parent(signal.SIGKILL, os.getppid())  # should it be inside the driver when the agent ends
    try:
        nvml = Nvml()
    except NvmlError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
    if arguments[0] == "names":
        sys.stdout.write("".join(f"{uuid}\n" for uuid in nvml.uuids()))
        return
    for _ in sys.stdin:
        sys.stdout.write(json.dumps({uuid: look(nvml, uuid) for uuid in arguments[1:]}) + "\n")
        sys.stdout.flush()


def look(nvml: Nvml, uuid: str) -> dict[str, object]:
    """One device now: `used` (None where it cannot tell) and `users`, or `error`."""
    try:
        used = nvml.memory(uuid).used
    except NvmlError as error:
        return {"used": None, "users": {}} if error.code == NOT_SUPPORTED else {"error": str(error)}
    try:
        users = nvml.users(uuid)
    except NvmlError:
        users = {}
    return {"used": used, "users": users}
