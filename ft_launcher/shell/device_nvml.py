"""NVML, the driver's own library, through ctypes: names of devices, their memory, who uses it.

A dozen calls, each either a value or an `NvmlError` with the library's own words; no CUDA is initialised and nothing is set. The library can block (a device that fell off the bus takes
its callers along into the kernel), so only the device helper, a process that can be killed, may hold one open. It knows devices; it must never know ranks, cycles or what is to be done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96
_TOO_SMALL = 7
NOT_SUPPORTED = 3
"""NVML's word for a device that has no such thing, as where CPU and GPU share their memory."""
_MOST_PROCESSES = 256

Load = Callable[[str], Any]


class NvmlError(Exception):
    """What NVML said, in one line; `code` is its own number, 0 where there is no NVML to ask."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device."""

    total: int
    used: int


class Nvml:
    """An initialised NVML, until `close`. Raises NvmlError where there is none or it does not work (no driver, a version mismatch)."""

    def __init__(self, load: Load = ctypes.CDLL) -> None:
        try:
            self._library = load(LIBRARY)
        except OSError as error:
            raise NvmlError(f"no NVML on this machine ({error})") from None
        self._call("nvmlInit_v2")

    def close(self) -> None:
        """Let go of the device files."""
        self._library.nvmlShutdown()

    def uuids(self) -> tuple[str, ...]:
        """Every GPU that this process may use, in NVML's order (by PCI bus)."""
        count = ctypes.c_uint(0)
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return tuple(self._uuid(index) for index in range(count.value))

    def _uuid(self, index: int) -> str:
        handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(_TEXT)
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        self._call("nvmlDeviceGetUUID", handle, text, ctypes.c_uint(_TEXT))
        return text.value.decode(errors="replace")

    def memory(self, uuid: str) -> Memory:
        """How much of a device's memory is in use, by whomever."""
        found = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._handle(uuid), ctypes.byref(found))
        return Memory(found.total, found.used)

    def users(self, uuid: str) -> dict[int, int]:
        """Processes that compute on a device, pid -> bytes; 0 where the driver does not tell how much. The numbers are the driver's: another pid namespace may not know them."""
        count, found = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        code = self._library.nvmlDeviceGetComputeRunningProcesses_v3(self._handle(uuid), ctypes.byref(count), found)
        if code not in (0, _TOO_SMALL):
            raise NvmlError(f"nvmlDeviceGetComputeRunningProcesses_v3: {self._words(code)}", code)
        unknown = ctypes.c_ulonglong(-1).value
        return {p.pid: 0 if p.used == unknown else p.used for p in found[: min(count.value, _MOST_PROCESSES)]}

    def _handle(self, uuid: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid.encode()), ctypes.byref(handle))
        return handle

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NvmlError(f"this driver's NVML has no {name}") from None
        code = function(*arguments)
        if code != 0:
            raise NvmlError(f"{name}: {self._words(code)}", code)

    def _words(self, code: int) -> str:
        describe = getattr(self._library, "nvmlErrorString", None)
        if describe is None:
            return f"error {code}"
        describe.restype = ctypes.c_char_p
        return f"{(describe(ctypes.c_int(code)) or b'unknown error').decode(errors='replace')} (error {code})"
