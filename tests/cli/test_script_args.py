"""Megatron's flags in the script's arguments, read as Megatron's own parser reads them."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.script_args import MAPPING_FLAG, SIZES, megatron_says


def said(*args: str) -> dict[str, str]:
    return {name: what.text for name, what in megatron_says(args).items()}


def test_both_forms_and_all_flags() -> None:
    args = [part for at, flag in enumerate(SIZES) for part in ([flag, str(at + 1)] if at % 2 else [f"{flag}={at + 1}"])]
    assert said(*args, MAPPING_FLAG) == {"tp": "1", "pp": "2", "cp": "3", "ep": "4", "etp": "5", "rank-order": "tp-cp-ep-pp-dp"}


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--tp", "4"),
        ("--tensor-model-parallel-size",),
        ("--tensor-model-parallel-size", "two"),
        ("--tensor-model-parallel-size=",),
        ("--tensor-model-parallel-size", "0"),
        ("--tensor-model-parallel-size", "-1"),
        ("--", "--tensor-model-parallel-size", "2"),
        ("x--tensor-model-parallel-size=2",),
    ],
)
def test_what_says_nothing(args: tuple[str, ...]) -> None:
    assert said(*args) == {}


sizes = st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.integers(1, 64), st.booleans()), max_size=6)


@given(sizes, st.booleans(), st.lists(st.sampled_from(["--lr=1", "--bf16"]), max_size=3))
def test_agrees_with_argparse(chosen: list[tuple[str, int, bool]], mapping: bool, others: list[str]) -> None:
    """The last occurrence counts, as in Megatron-LM's parser."""
    parser = argparse.ArgumentParser()
    for flag, name in SIZES.items():
        parser.add_argument(flag, type=int, dest=name)
    parser.add_argument(MAPPING_FLAG, action="store_true", dest="mapping")
    parser.add_argument("--lr")
    parser.add_argument("--bf16", action="store_true")
    args = (
        [part for flag, size, joined in chosen for part in ([f"{flag}={size}"] if joined else [flag, str(size)])]
        + others
        + [MAPPING_FLAG] * mapping
    )
    parsed = parser.parse_args(args)
    expected = {name: str(getattr(parsed, name)) for name in SIZES.values() if getattr(parsed, name) is not None}
    assert said(*args) == expected | ({"rank-order": "tp-cp-ep-pp-dp"} if parsed.mapping else {})
