"""The command line in one process: where options stop, what is a word, what reaches the job, exit codes and the one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ft_launcher import cli
from ft_launcher.config import Config, DrainOptions, SelftestOptions, SimulateOptions, Tee
from ft_launcher.edge import table, torchrun
from ft_launcher.errors import BugError, PlatformError, WorkerError


class Rooms:
    """Stands for the rooms behind the command line; keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.result: int | BaseException = 0

    def take(self, options: object) -> int:
        self.calls.append(options)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rooms]:
    made = Rooms()
    for name, function in (
        ("ft_launcher.shell.main", "run"),
        ("ft_launcher.sim.main", "run"),
        ("ft_launcher.selftest", "run"),
        ("ft_launcher.shell.drain", "request"),
    ):
        module = ModuleType(name)
        setattr(module, function, made.take)
        monkeypatch.setitem(sys.modules, name, module)
    yield made


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a script, and an environment in which nobody says anything."""
    for name in [name for name in os.environ if name.startswith(("FT_", "SLURM_", "MASTER_", "CUDA_"))]:
        if name not in ("FT_TEST_SESSION", "FT_TEST_CHECK_TREE", "FT_ETCD"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


def job(rooms: Rooms) -> Config:
    (only,) = rooms.calls
    assert isinstance(only, Config)
    return only


def error(capsys: pytest.CaptureFixture[str], args: list[str]) -> str:
    """Runs; asserts exit 2, exactly one line on stderr, nothing on stdout; gives the line without its beginning."""
    assert cli.run(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ft-launch: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("ft-launch: error: ").rstrip("\n")


HOSTILE = [
    "--tp",
    "9",
    "",
    " ",
    "--max-restarts=7",
    "--help",
    "-m",
    "--",
    "-x",
    "häß",
    "line\nbreak",
    "--nope",
    "simulate",
    "\udcff",
    "*",
    "a=b",
]


def test_what_follows_the_script_reaches_it_unchanged(rooms: Rooms) -> None:
    assert cli.run(["--max-restarts", "1", "train.py", *HOSTILE]) == 0
    assert job(rooms).command.args == tuple(HOSTILE)
    assert job(rooms).command.script == "train.py"
    assert job(rooms).max_restarts == 1
    assert job(rooms).topology.tp == 1


def test_a_double_dash_ends_the_options_before_the_script(rooms: Rooms, workplace: Path) -> None:
    (workplace / "--tp").write_text("")
    assert cli.run(["--max-restarts", "1", "--", "--tp", "4"]) == 0
    assert (job(rooms).command.script, job(rooms).command.args) == ("--tp", ("4",))


def test_a_module(rooms: Rooms) -> None:
    assert cli.run(["-m", "--max-restarts", "1", "json.tool", "--tp", "2"]) == 0
    assert (job(rooms).command.module, job(rooms).command.script, job(rooms).command.args) == ("json.tool", None, ("--tp", "2"))


def test_a_module_named_like_a_word_is_a_module(rooms: Rooms, workplace: Path) -> None:
    (workplace / "simulate.py").write_text("")
    assert cli.run(["-m", "simulate"]) == 0
    assert job(rooms).command.module == "simulate"


@pytest.mark.parametrize("name", ["./simulate", "simulate.py", "Simulate", "sub/drain", "selftest.py"])
def test_only_the_exact_word_is_a_word(rooms: Rooms, workplace: Path, name: str) -> None:
    (workplace / name).parent.mkdir(exist_ok=True)
    (workplace / name).write_text("")
    assert cli.run([name, "--ranks", "2"]) == 0
    assert job(rooms).command.script == name


def test_a_word_wins_over_a_script_of_that_name(rooms: Rooms, workplace: Path) -> None:
    (workplace / "simulate").write_text("")
    assert (
        cli.run(["simulate", "--ranks", "8", "--nodes=2", "--hours", "1.5", "--seed", "3", "--faults", "crash=1", "--json", "--story"]) == 0
    )
    assert rooms.calls == [SimulateOptions(ranks=8, nodes=2, hours=1.5, seed=3, faults="crash=1", json=True, story=True)]


def test_the_other_words(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms.result = 3
    assert cli.run(["simulate"]) == 3
    assert cli.run(["selftest", "--json"]) == 3
    assert cli.run(["drain", "n1", "--store", "etcd://a:1", "--run-id", "r"]) == 3
    monkeypatch.setenv("FT_STORE", "etcd://a:1")
    assert cli.run(["--run-id", "r", "drain", "n1"]) == 3
    assert rooms.calls[:2] == [SimulateOptions(), SelftestOptions(json=True)]
    assert isinstance(rooms.calls[2], DrainOptions)
    assert rooms.calls[2] == rooms.calls[3]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["simulate", "--ranks", "0"], "--ranks '0': must be a whole number"),
        (["simulate", "--ranks", "3", "--nodes", "2"], "--ranks 3 must be a multiple of --nodes 2"),
        (["simulate", "--hours", "nan"], "--hours 'nan'"),
        (["simulate", "--seed", "-1"], "--seed '-1'"),
        (["simulate", "--tp", "2"], "unknown option '--tp'"),
        (["simulate", "extra"], "extra"),
        (["--tp", "2", "simulate"], "--tp before 'simulate'"),
        (["--dry-run", "drain", "n"], "--dry-run before 'drain'"),
        (["selftest", "extra"], "extra"),
        (["drain"], "missing argument 'NODE'"),
        (["drain", "n1"], "drain: needs --store etcd"),
        (["drain", "n1", "--store", "memory"], "drain: needs --store etcd"),
    ],
)
def test_words_refuse(capsys: pytest.CaptureFixture[str], rooms: Rooms, args: list[str], message: str) -> None:
    assert message in error(capsys, args)
    assert rooms.calls == []


def test_a_missing_room_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ft_launcher.sim.main", None)  # what Python makes of a module that is not there
    assert "no ft_launcher.sim.main" in error(capsys, ["simulate"])


def test_torchruns_spellings(rooms: Rooms) -> None:
    args = [
        "--nnodes=1:1",
        "--nproc_per_node=3",
        "--max_restarts=2",
        "--rdzv_id=job7",
        "--node_rank=0",
        "--local_addr=127.0.0.1",
        "--start_method",
        "spawn",
        "--log_dir",
        "logs",
    ]
    assert cli.run([*args, "--standalone", "train.py"]) == 0
    made = job(rooms)
    assert (made.nnodes, made.nnodes_max, made.nproc, made.max_restarts, made.run_id) == (1, 1, 3, 2, "job7")
    assert (made.node_order, made.node_addr, made.start_method, made.log_dir.name, made.store.kind) == (
        0,
        "127.0.0.1",
        "spawn",
        "logs",
        "memory",
    )


def test_an_etcd_rendezvous_is_a_store(rooms: Rooms) -> None:
    assert cli.run(["--nnodes", "2", "--rdzv-backend=etcd", "--rdzv-endpoint=h:2379", "--rdzv-id", "x", "train.py"]) == 0
    assert job(rooms).store.endpoints == (("h", 2379),)


def test_what_is_not_needed_is_dropped_with_a_note(
    rooms: Rooms, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert (
        cli.run(["--master-addr", "localhost", "--master_port=6000", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "train.py"]) == 0
    )
    assert capsys.readouterr().err == ""
    assert [note.split(" is not used")[0] for note in job(rooms).notes] == [
        "--master-addr",
        "--master-port",
        "--rdzv-endpoint",
        "MASTER_PORT=29500 in the environment",
    ]
    assert cli.run(["--master-addr", "localhost", "--dry-run", "train.py"]) == 0
    assert capsys.readouterr().err.startswith("ft-launch: note: --master-addr is not used: ")


@pytest.mark.parametrize("name", [*torchrun.REFUSED, *torchrun.REFUSED_SWITCHES])
def test_what_cannot_mean_anything_here_is_refused(capsys: pytest.CaptureFixture[str], name: str) -> None:
    args = [f"--{name}"] if name in torchrun.REFUSED_SWITCHES else [f"--{name}", "1"]
    assert f"--{name} (torchrun's) has no equal here: " in error(capsys, [*args, "train.py"])


def test_every_option_of_torchrun_has_an_answer() -> None:
    """Taken, translated, dropped with a note or refused with a hint; none is simply unknown."""
    pytest.importorskip("torch")
    from torch.distributed.run import get_args_parser

    theirs = {
        flag[2:] for action in get_args_parser()._actions for flag in action.option_strings if flag.startswith("--") and "_" not in flag
    }
    ours = {*table.OPTIONS, *torchrun.TAKES_VALUE, *torchrun.SWITCHES, *torchrun.REFUSED, *torchrun.REFUSED_SWITCHES, "help", "module"}
    assert theirs <= ours


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rdzv-backend", "zeus", "train.py"], "--rdzv-backend 'zeus': must be one of"),
        (["--rdzv-backend", "etcd", "train.py"], "needs --rdzv-endpoint"),
        (["--rdzv-id", "a", "--run-id", "b", "train.py"], "mean the same and differ"),
        (["--rdzv-backend", "etcd", "--rdzv-endpoint", "a:1", "--store", "etcd://b:1", "train.py"], "mean the same and differ"),
        (["--standalone", "--nnodes", "2", "train.py"], "--standalone means --nnodes 1"),
        (["--standalone", "--store", "etcd://a:1", "train.py"], "--standalone means"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1", "--rdzv-id", "x", "train.py"], "several nodes need --store"),
        (["--max-restart", "3", "train.py"], "unknown option '--max-restart'; did you mean --max-restarts?"),
        (["--max", "3", "train.py"], "unknown option '--max'"),
        (["--tensor-model-parallel-size", "3", "train.py"], "unknown option '--tensor-model-parallel-size'"),
        (["-x", "train.py"], "unknown option '-x'"),
        (["--tp"], "option '--tp' requires an argument"),
        (["--log-dir", "--tp", "2", "train.py"], "--log-dir needs a value, but the next word is the option '--tp'"),
        (["--dry-run=yes", "train.py"], "--dry-run"),
        ([], "missing script"),
        ([""], "missing script"),
        (["-m"], "missing module"),
        (["--tp", "2"], "missing script"),
        (["nosuch.py"], "script 'nosuch.py' does not exist"),
        (["a\nb"], r"script 'a\nb' does not exist"),
        (["a\0b"], "script"),
        (["x" * 5000], "script"),
        (["."], "script '.' is a directory without a __main__.py"),
        (["/dev/null"], "is not a regular file"),
        (["-m", "no_such_module"], "there is no module or package no_such_module"),
        (["-m", "train.py/x"], "is no module name"),
        (["--config", "nope.yaml", "train.py"], "--config nope.yaml: cannot be read"),
        (["--ft-state", ".", "train.py"], "is a directory; name a file"),
        (["--store", "etcd://a:1", "--store-ca", "nope", "train.py"], "--store-ca"),
        (["--node-addr", "no.such.host.invalid:1", "train.py"], "the host has no address"),
        (["--health-check", "", "train.py"], "--health-check ''"),
        (["--node-label", "a", "train.py"], "--node-label 'a'"),
    ],
)
def test_bad_input_is_one_line_and_nothing_happens(
    capsys: pytest.CaptureFixture[str], rooms: Rooms, workplace: Path, args: list[str], message: str
) -> None:
    assert message in error(capsys, args)
    assert rooms.calls == []
    assert [path.name for path in workplace.iterdir()] == ["train.py"]


def test_a_folder_with_a_main_and_a_zip_are_scripts(rooms: Rooms, workplace: Path) -> None:
    (workplace / "app").mkdir()
    (workplace / "app" / "__main__.py").write_text("")
    assert cli.run(["app"]) == 0
    assert job(rooms).command.script == "app"


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (PlatformError("the store at a:1 does not answer", exit_code=69), 69, "ft-launch: error: the store at a:1 does not answer\n"),
        (WorkerError("rank 3 failed", exit_code=41), 41, "ft-launch: error: rank 3 failed\n"),
        (BugError("impossible", ["first", "second"]), 70, "ft-launch: bug: impossible\nwhat led there:\n  first\n  second\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_the_run_become_their_exit_code(
    rooms: Rooms, capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, line: str
) -> None:
    rooms.result = raised
    assert cli.run(["train.py"]) == code
    assert capsys.readouterr().err == line


def test_the_runs_own_code_is_passed_on(rooms: Rooms) -> None:
    rooms.result = 75
    assert cli.run(["train.py"]) == 75


def test_switches(rooms: Rooms) -> None:
    assert cli.run(["--fixed-timeouts", "--tee", "none", "--node-label", "a=b", "--node-label", "c=d", "train.py"]) == 0
    assert (job(rooms).learn_timeouts, job(rooms).tee, job(rooms).node_labels) == (False, Tee(frozenset()), {"a": "b", "c": "d"})


def test_dry_run_prints_the_table_and_creates_nothing(rooms: Rooms, capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    args = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--tp",
        "2",
        "--store",
        "etcd://a:1",
        "--run-id",
        "r",
        "--node-id",
        "me",
        "--node-rank",
        "1",
        "--log-dir",
        "a/b",
    ]
    assert cli.run([*args, "--dry-run", "train.py"]) == 0
    out = capsys.readouterr().out
    assert rooms.calls == []
    assert "4 ranks = tp 2 x cp 1 x dp 2 x pp 1 on 2 nodes x 2 slots" in out
    assert "<node 0>/0" in out
    assert "me/1" in out
    assert "2 (flag)" in out
    assert [path.name for path in workplace.iterdir()] == ["train.py"]


def test_help_names_every_option_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    out = capsys.readouterr().out
    for option in table.OPTIONS.values():
        assert f"--{option.name}" in out
    assert "--fixed-timeouts" in out
    assert "simulate --help" in out
    assert "rdzv" not in out
    for word in ("simulate", "selftest", "drain"):
        assert cli.run([word, "--help"]) == 0
        assert f"Usage: ft-launch {word}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import ft_launcher

    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"ft-launch {ft_launcher.__version__}\n"


def test_effective_options_can_go_into_a_journal(rooms: Rooms) -> None:
    assert cli.run(["--tp", "1", "train.py"]) == 0
    assert json.loads(json.dumps(job(rooms).effective()))["tp"] == "1 (flag)"
