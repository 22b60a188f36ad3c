"""What the documentation claims is checked against the code.

Links lead somewhere, anchors too. Commands in code blocks are parsed with the command line's own tables: an option that does not exist fails. Python blocks compile, and what they
import from here exists. The page about torchrun is compared with torchrun's and NVRx's own parsers.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ft_launcher import words
from ft_launcher.dashboard.cli import cli as state_cli
from ft_launcher.edge import torchrun
from ft_launcher.edge.table import OPTIONS
from ft_launcher.integrations import slurm

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOR_PEOPLE = [page for page in PAGES if "facts" not in page.parts]
"""What was measured about others (docs/facts) has others' commands and no promise of ours."""
SWITCHES = {"--module", "-m", "--dry-run", "--help", "--version", "--standalone"}
NO_VALUE = SWITCHES | {f"--{word}" for option in OPTIONS.values() if option.off for word in (option.name, option.off)}
TAKES_VALUE = (
    {f"--{option.name}" for option in OPTIONS.values() if not option.off} | {"--config"} | {f"--{name}" for name in torchrun.TAKES_VALUE}
)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Fenced code blocks of these languages."""
    for language, text in re.findall(r"^```([a-z]*)[^\n]*\n(.*?)^```", page.read_text(), re.S | re.M):
        if language in languages:
            yield text


def commands(page: Path) -> Iterator[list[str]]:
    """Command lines in shell blocks, as words; continued lines joined, comments and `$ ` left out, several commands of a line apart."""
    for text in blocks(page, "", "bash", "sh", "shell", "console"):
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            try:
                lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=";&|")
                lexer.whitespace_split = True
                found = list(lexer)
            except ValueError:
                continue  # output, not a command
            command: list[str] = []
            for word in [*found, ";"]:
                if word in (";", "&", "&&", "|", "||"):
                    yield from [command] if command else []
                    command = []
                else:
                    command.append(word)


def ours(command: list[str]) -> tuple[str, list[str]] | None:
    """(program, its words) where a command line starts one of our programs, whatever stands before it."""
    for i, word in enumerate(command):
        if word in ("ft-launch", "ft-state"):
            return (word, command[i + 1 :]) if i == 0 or "=" in command[i - 1] or command[i - 1] in ("exec", "srun", "time") else None
        if word == "-m" and command[i + 1 : i + 2] in (["ft_launcher"], ["ft_launcher.integrations.slurm"]):
            return ("ft-launch" if command[i + 1] == "ft_launcher" else "slurm"), command[i + 2 :]
    return None


def unknown_options(program: str, given: list[str]) -> list[str]:
    """The words that look like options and are none."""
    if program == "ft-launch":
        return unknown_launch_options(given)
    group: click.Group = state_cli if program == "ft-state" else slurm._commands()
    if not given or given[0] not in group.commands:
        return [word for word in given[:1] if word.isalpha()]
    return unknown_click_options(group.commands[given[0]], given[1:])


def unknown_click_options(command: click.Command, given: list[str]) -> list[str]:
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
    return [word for word in given if word.startswith("--") and word.partition("=")[0] not in known]


def unknown_launch_options(given: list[str]) -> list[str]:
    """Options stop at the script; behind `selftest`, `simulate` and `drain` are theirs."""
    bad, at = [], 0
    while at < len(given):
        word = given[at]
        if word in words.WORDS:
            return bad + unknown_click_options(words.command(word), given[at + 1 :])
        if not word.startswith("-"):
            return bad
        flag, equals, _ = word.partition("=")
        flag = flag.replace("_", "-")
        if flag not in NO_VALUE | TAKES_VALUE and word not in ("--", "-"):
            bad.append(word)
        at += 1 if equals or flag in NO_VALUE else 2
    return bad


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    text = re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return "".join(c for c in text if c in "- _" or unicodedata.category(c)[0] in "LN").replace(" ", "-")


def test_the_state_diagrams_are_those_of_the_tables() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "states.py"), "--check"], check=False)
    assert done.returncode == 0, "run: python tools/states.py"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    for target, part in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", prose):
        if "://" in target or target.startswith("mailto:"):
            continue
        place = page.parent / target if target else page
        assert place.exists(), f"{page.name} links to {target}"
        if part and place.suffix == ".md":
            assert part in {anchor(text) for text in re.findall(r"^#+ (.*)$", place.read_text(), re.M)}, (
                f"{page.name} links to {target}#{part}"
            )


def test_no_page_speaks_of_a_machine_of_ours() -> None:
    for page in PAGES:
        assert "/work/" not in page.read_text(), page


@pytest.mark.parametrize("page", FOR_PEOPLE, ids=name_of)
def test_commands_use_options_that_exist(page: Path) -> None:
    for command in commands(page):
        if found := ours(command):
            assert unknown_options(*found) == [], f"{page.name}: {shlex.join(command)}"


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("ft-launch --tp 2 --no-such x train.py --mine", ["--no-such"]),
        ("FT_TP=2 ft-launch --fixed-timeouts --nproc_per_node=4 -m mod --mine", []),
        ("ft-launch simulate --seeds 3", ["--seeds"]),
        ("srun ft-launch --tee all --wat", ["--wat"]),
        ("ft-state shew", ["shew"]),
        ("python -m ft_launcher.integrations.slurm after-run --cod 3", ["--cod"]),
    ],
)
def test_the_check_of_commands_can_fail(line: str, bad: list[str]) -> None:
    found = ours(shlex.split(line))
    assert found is not None and unknown_options(*found) == bad


def test_most_pages_with_commands_are_read() -> None:
    assert sum(ours(command) is not None for page in FOR_PEOPLE for command in commands(page)) > 25, (
        "the parser has lost sight of the commands"
    )


@pytest.mark.parametrize("page", FOR_PEOPLE, ids=name_of)
def test_python_blocks_compile_and_import_what_exists(page: Path) -> None:
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text, filename=page.name)):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] in ("ft_launcher", "monitors", "rerun")
                and importlib.util.find_spec(node.module or "")
            ):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page.name}: {node.module} has no {alias.name}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("ft_launcher", "monitors"):
                raise AssertionError(f"{page.name}: there is no {node.module}")


# -- docs/torchrun.md -------------------------------------------------------------------------------------------------------------------------

TORCHRUN = ROOT / "docs" / "torchrun.md"


def rows() -> dict[str, tuple[str, str]]:
    """Flag -> (what it is here, the remark), from the page's tables."""
    found: dict[str, tuple[str, str]] = {}
    for line in TORCHRUN.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `-") and len(cells) == 3:
            for flag in re.findall(r"`(--?[a-z-]+)`", cells[0]):
                assert flag not in found, flag
                found[flag] = (cells[1], cells[2])
    return found


def parser_flags(module: str) -> list[set[str]]:
    """Each option of a parser as the set of its spellings, with hyphens."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    code = f"import json; from {module} import get_args_parser as p; print(json.dumps([a.option_strings for a in p()._actions if a.option_strings]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # not in this process: it imports torch
    return [{flag.replace("_", "-") for flag in spellings} for spellings in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.parametrize("module", ["torch.distributed.run", "nvidia_resiliency_ext.fault_tolerance.launcher"])
def test_every_flag_of_the_installed_launcher_is_in_the_page(module: str) -> None:
    known = set(rows())
    missing = [sorted(spellings) for spellings in parser_flags(module) if not spellings & known]
    assert missing == [], "docs/torchrun.md has no row for these"


def test_the_page_says_what_the_command_line_does_with_torchruns_flags() -> None:
    table = rows()
    for name in (*torchrun.REFUSED, *torchrun.REFUSED_SWITCHES):
        assert table[f"--{name}"][0] == "refused", name
    for name in torchrun.UNUSED:
        assert table[f"--{name}"][0] == "noted", name
    for flag, (here, _) in table.items():
        name = flag.removeprefix("--")
        if here in ("same", "differs") and flag.startswith("--"):
            assert name in OPTIONS or flag in SWITCHES or name in torchrun.SAME, flag
        if here.startswith("as "):
            assert name in torchrun.TAKES_VALUE or name in torchrun.SWITCHES, flag
    accepted = {f"--{name}" for name in (*torchrun.TAKES_VALUE, *torchrun.SWITCHES)}
    assert accepted <= set(table)


def test_what_the_page_names_as_ours_exists() -> None:
    theirs = set(rows())
    text = re.sub(r"^```.*?^```", "", TORCHRUN.read_text(), flags=re.S | re.M)
    named = {flag.replace("_", "-") for flag in re.findall(r"`(--[a-z_-]+)", text)}
    named |= {flag for here, remark in rows().values() for flag in re.findall(r"--[a-z][a-z-]*", f"{here} {remark}")}
    unknown = {flag for flag in named - theirs if flag not in NO_VALUE | TAKES_VALUE}
    assert unknown <= {"--ft-param-", "--fault-tol-cfg-path"}, unknown


# -- docs/exit-codes.md -----------------------------------------------------------------------------------------------------------------------


def test_the_page_of_exit_codes_has_every_code() -> None:
    codes = set(re.findall(r"^\| ([0-9a-z+ ]+) \|", (ROOT / "docs" / "exit-codes.md").read_text(), re.M))
    assert {"0", "2", "16", "17", "69", "70", "75", "93", "128+n", "any other"} == codes - {"code"}
