"""`current_timeouts`: the one key of ft_state.json whose shape is not ours but NVRx's, which builds dataclasses from it and refuses any
key it does not know.

Pure: builds that shape from our timeouts, and judges what somebody else (Megatron's `--save DIR/ft_state.json`) has written. Source:
`RankMonitorClient.state_dict` and `load_state_dict`, `HeartbeatTimeouts` and `SectionTimeouts` of nvidia_resiliency_ext.fault_tolerance
0.4.1 to 0.7. Fixed timeouts are exported as sections that were *not* calculated: the client then takes them, and replaces them (instead
of averaging) once it has calculated its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

_SECTION_KEYS = {"section", "out_of_section", "calculated_sections", "is_out_of_section_calculated"}
_HEARTBEAT_KEYS = {"initial", "subsequent", "were_calculated"}
_MAX_SECTIONS = 256
_MAX_NAME_CHARS = 256


def current_timeouts(
    sections_s: Mapping[str, float | None], out_of_section_s: float | None, learned: Collection[str] = (), out_learned: bool = False
) -> dict[str, Any]:
    """NVRx's shape for these timeouts in seconds (None: never times out); `learned` names the sections whose value was calculated from
    observation.
    """
    return {
        "section": {
            "section": {name: _number(value) for name, value in sections_s.items()},
            "out_of_section": _number(out_of_section_s),
            "calculated_sections": sorted(set(learned) & set(sections_s)),
            "is_out_of_section_calculated": out_learned,
        }
    }


def trouble_in(value: object) -> str | None:
    """None where `value` is a `current_timeouts` that every NVRx loads and whose numbers make sense; else one line that says what is
    wrong.
    """
    if not isinstance(value, dict):
        return f"current_timeouts is {_kind(value)}, not an object"
    extra = sorted(set(value) - {"section", "heartbeat"})
    if extra:
        return f"current_timeouts has unknown keys {_names(extra)}"
    if "heartbeat" in value:
        found = _heartbeat_trouble(value["heartbeat"])
        if found:
            return found
    return _section_trouble(value["section"]) if "section" in value else None


def _heartbeat_trouble(beat: object) -> str | None:
    where = "current_timeouts.heartbeat"
    if not isinstance(beat, dict) or set(beat) - _HEARTBEAT_KEYS:
        return f"{where} is not an object of {_names(sorted(_HEARTBEAT_KEYS))}"
    for key in ("initial", "subsequent"):
        if not _seconds(beat.get(key)):
            return f"{where}.{key} is not a number of seconds > 0"
    return None if isinstance(beat.get("were_calculated"), bool | None) else f"{where}.were_calculated is not true, false or null"


def _section_trouble(section: object) -> str | None:
    where = "current_timeouts.section"
    if not isinstance(section, dict) or set(section) - _SECTION_KEYS:
        return f"{where} is not an object of {_names(sorted(_SECTION_KEYS))}"
    named = section.get("section", {})
    if not isinstance(named, dict) or len(named) > _MAX_SECTIONS:
        return f"{where}.section is not an object of at most {_MAX_SECTIONS} sections"
    for name, value in named.items():
        if not _seconds(value) or len(name) > _MAX_NAME_CHARS:
            return f"{where}.section[{name[:60]!a}] is not a number of seconds > 0"
    if not _seconds(section.get("out_of_section")):
        return f"{where}.out_of_section is not a number of seconds > 0"
    calculated = section.get("calculated_sections", [])
    if not isinstance(calculated, list) or not all(isinstance(name, str) and name in named for name in calculated):
        return f"{where}.calculated_sections is not a list of sections named above"
    return (
        None
        if isinstance(section.get("is_out_of_section_calculated", False), bool)
        else f"{where}.is_out_of_section_calculated is not true or false"
    )


def _seconds(value: object) -> bool:
    """A timeout as NVRx writes it: seconds, or null for "not used"."""
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12 and math.isfinite(value)


def _number(value: float | None) -> float | None:
    return float(value) if value is not None and _seconds(value) else None


def _kind(value: object) -> str:
    return {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number", type(None): "null"}.get(
        type(value), type(value).__name__
    )


def _names(names: Collection[str]) -> str:
    shown = ", ".join(ascii(name[:40]) for name in list(names)[:4])
    return shown + (", ..." if len(names) > 4 else "")
