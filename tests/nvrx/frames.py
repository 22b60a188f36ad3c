"""Frames as the clients of other versions send them, re-created from their attributes, and the bytes that a hostile one might send.

The pickles are written by Python's own pickler from look-alike classes, so they have exactly the form of the originals without the package being there.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

from monitors.nvrx_pickle import MODULE
from monitors.nvrx_wire import frame


class SectionAction(Enum):
    OPEN = 1
    CLOSE = 2
    CLOSE_ALL = 3


class WorkloadAction(Enum):
    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


_CLASSES: dict[str, type] = {"SectionAction": SectionAction, "WorkloadAction": WorkloadAction}


def thing(name: str, **attributes: Any) -> Any:
    """An object of the class `name` of NVRx's data module."""
    cls = _CLASSES.setdefault(name, type(name, (), {}))
    found = cls()
    found.__dict__.update(attributes)
    return found


@contextmanager
def _pretending() -> Iterator[None]:
    """The pickler looks every class up by name: for a moment they are where their name says, whether or not the real module is loaded."""
    parts = MODULE.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    saved = {name: sys.modules.get(name) for name in names}
    module = ModuleType(MODULE)
    for name in names[:-1]:
        sys.modules[name] = ModuleType(name)
    sys.modules[MODULE] = module
    for name, cls in _CLASSES.items():
        cls.__module__, cls.__qualname__ = MODULE, name
        setattr(module, name, cls)
    try:
        yield
    finally:
        for name, was in saved.items():
            if was is None:
                del sys.modules[name]
            else:
                sys.modules[name] = was


def pickled(value: Any, protocol: int = 4) -> bytes:
    with _pretending():
        return pickle.dumps(value, protocol)


def framed(value: Any, protocol: int = 4) -> bytes:
    return frame(pickled(value, protocol))


def authkey() -> Any:
    return thing("AuthkeyMsg", authkey=b"\0" * 32)


def init(rank: Any = 3, **more: Any) -> Any:
    """Of 0.4 and 0.5; with iteration and num_warmup_iters, of 0.6 and later."""
    return thing("InitMsg", rank_info=thing("RankInfo", global_rank=rank, local_rank=0, host="n0", pid=4711), **more)


def new_init(rank: int = 3, iteration: int | None = None, num_warmup_iters: int | None = None) -> Any:
    return init(rank, iteration=iteration, num_warmup_iters=num_warmup_iters)


def section(name: str | None, action: SectionAction, **more: Any) -> Any:
    return thing("SectionMsg", rank=3, section=name, action=action, **more)


def heartbeat() -> Any:
    return thing("HeartbeatMsg", rank=3, state={})


def section_timeouts(sections: Any, out: Any = None) -> Any:
    return thing("SectionTimeouts", section=sections, out_of_section=out, calculated_sections={"step"}, is_out_of_section_calculated=False)


def update(sections: Any = None, beats: Any = None, **more: Any) -> Any:
    return thing("UpdateConfigMsg", hb_timeouts=beats, section_timeouts=sections, **more)


def request(action: WorkloadAction, description: Any = "why") -> Any:
    return (3, thing("WorkloadControlRequest", action=action, description=description))
