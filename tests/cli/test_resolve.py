"""Which value wins, what the defaults are, and what two options together can get wrong."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ft_launcher.config import StoreOptions, Tee
from ft_launcher.edge.resolve import resolve_drain
from ft_launcher.edge.sources import Reader, environment_notes, gather
from ft_launcher.errors import ConfigError
from tests.cli.edge import config, machine, settings

ETCD = {"store": "etcd://a:2379", "run-id": "r"}


def test_defaults_are_the_documented_ones() -> None:
    made = config()
    assert (made.nnodes, made.nnodes_max, made.nproc, made.topology.world) == (1, None, 1, 1)
    assert (made.max_restarts, made.no_progress_cycles, made.hang_action, made.learn_timeouts) == (3, 3, "restart", True)
    assert (made.node_ttl_s, made.join_wait_s, made.spare_wait_s) == (10, 600, 600)
    assert (made.exit_grace_s, made.term_grace_s, made.survivor_grace_s) == (60, 25, 0)
    assert made.timeouts.sections == {"setup": 600, "step": 180, "checkpointing": 420}
    assert made.timeouts.out_of_section_s == 300
    assert made.store == StoreOptions(kind="memory", timeout_s=300)
    assert made.forward_signals == (signal.SIGUSR1, signal.SIGUSR2)
    assert (made.preload, made.start_method, made.tee) == (("torch",), "fork", Tee(None))
    assert (made.log_dir, made.ft_state) == (Path("/work/ft_logs"), Path("/work/ft_logs/ft_state.json"))
    assert (made.node_id, made.run_id, made.node_order, made.node_addr, made.health_check, made.progress_file) == (
        "box",
        "run-1",
        None,
        None,
        None,
        None,
    )


def test_every_option_has_a_way_into_the_config(tmp_path: Path) -> None:
    """Each option of the table, set to something that is not its default, changes the Config: none is accepted and ignored."""
    from ft_launcher.edge.table import OPTIONS

    texts = {
        "tp": "2", "pp": "2", "cp": "2", "ep": "2", "etp": "2", "rank-order": "tp-cp-ep-pp-dp", "nnodes": "2:3",
        "nproc-per-node": "8", "node-id": "n", "node-addr": "h", "node-label": "a=b", "store": "etcd://h:1", "store-timeout": "1",
        "store-ca": "f", "store-cert": "f", "store-key": "f", "store-user": "u", "run-id": "x", "timeouts": "step=1",
        "out-of-section": "1", "learn-timeouts": "false", "hang-action": "log", "max-restarts": "9", "no-progress-cycles": "9",
        "progress-file": "p", "node-ttl": "9", "join-wait": "9", "spare-wait": "9", "exit-grace": "9", "term-grace": "9",
        "survivor-grace": "9", "forward-signals": "HUP", "health-check": "c", "preload": "none", "start-method": "spawn",
        "ft-state": "s", "log-dir": "d", "tee": "none", "healthy-stretch": "9", "quarantine-after": "9", "quarantine-days": "9",
    }  # fmt: skip
    assert set(texts) == set(OPTIONS)
    base = {"nnodes": "2", "nproc-per-node": "16", "store": "etcd://z:1", "run-id": "y", "store-cert": "a", "store-key": "b"}
    on = machine({"FT_STORE_PASSWORD": "s"})
    for name, text in texts.items():
        assert config(base | {name: text}, on=on) != config(base, on=on), name


def test_flag_over_file_over_environment_over_scheduler(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("max-restarts: 5\nnode_ttl: 7\n")
    environ = {"FT_MAX_RESTARTS": "6", "FT_NODE_TTL": "6", "FT_TERM_GRACE": "6", "FT_RUN_ID": "env", "SLURM_JOB_ID": "77"}
    made = config({"max-restarts": "4"}, environ=environ, file=str(file))
    assert (made.max_restarts, made.node_ttl_s, made.term_grace_s, made.run_id) == (4, 7, 6, "env")
    shown = made.effective()
    assert shown["max-restarts"] == "4 (flag)"
    assert shown["node-ttl"] == f"7 (file {file}:2)"
    assert shown["term-grace"] == "6 (env FT_TERM_GRACE)"
    assert shown["exit-grace"] == "60 (default)"


def test_slurm_gives_defaults() -> None:
    environ = {"SLURM_NNODES": "4", "SLURM_JOB_ID": "123", "SLURM_NODEID": "3", "FT_STORE": "etcd://s:2379"}
    made = config({"nproc-per-node": "2"}, environ=environ)
    assert (made.nnodes, made.run_id, made.node_order, made.topology.world) == (4, "123", 3, 8)
    assert config({"nnodes": "1"}, environ=environ).nnodes == 1


def test_a_launcher_inside_a_rank_does_not_take_the_outer_runs_name() -> None:
    made = config(environ={"FT_CYCLE": "0", "FT_RUN_ID": "outer", "FT_NODE_ID": "outer-node", "FT_TEE": "none"})
    assert (made.run_id, made.node_id, made.tee) == ("run-1", "box", Tee(frozenset()))


def test_an_empty_variable_says_nothing() -> None:
    assert config(environ={"FT_MAX_RESTARTS": "", "SLURM_NNODES": " "}).max_restarts == 3


def test_maps_merge_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("timeouts: {setup: 900, step: 50}\nnode-label: [rack=r1, zone=z]\n")
    made = config({"timeouts": "step=60,+data=5", "node-label": ["rack=r2", "gen=3"]}, file=str(file))
    assert made.timeouts.sections == {"setup": 900, "step": 60, "checkpointing": 420, "data": 5}
    assert made.node_labels == {"rack": "r2", "zone": "z", "gen": "3"}
    assert made.effective()["timeouts"] == "setup=900,step=60,checkpointing=420,data=5 (flag)"


@pytest.mark.parametrize(
    ("text", "gpus", "ranks"), [(None, 8, 8), (None, 0, 1), ("gpu", 4, 4), ("auto", 4, 4), ("auto", 0, 12), ("cpu", 4, 12), ("3", 8, 3)]
)
def test_ranks_per_node(text: str | None, gpus: int, ranks: int) -> None:
    flags = {} if text is None else {"nproc-per-node": text}
    assert config(flags, on=machine(gpus=gpus)).nproc == ranks


def test_gpus_are_not_looked_for_when_a_number_is_given() -> None:
    def boom() -> int:
        raise AssertionError("asked for GPUs")

    from dataclasses import replace

    assert config({"nproc-per-node": "3"}, on=replace(machine(), gpus=boom)).nproc == 3


def test_megatrons_flags_fill_ours() -> None:
    made = config({"nproc-per-node": "16"}, args=("--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size=2", "--lr", "1"))
    assert (made.topology.tp, made.topology.pp, made.topology.dp, made.topology.etp) == (4, 2, 2, 4)
    assert made.effective()["tp"] == "4 (script --tensor-model-parallel-size)"
    assert made.command.args == ("--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size=2", "--lr", "1")


def test_the_same_degree_twice_is_fine_and_a_mismatch_names_both() -> None:
    assert config({"tp": "2", "nproc-per-node": "4"}, args=("--tensor-model-parallel-size=2",)).topology.tp == 2
    with pytest.raises(ConfigError, match=r"^--tp 2 differs from --tensor-model-parallel-size \(4\)"):
        config({"tp": "2", "nproc-per-node": "4"}, args=("--tensor-model-parallel-size=4",))
    with pytest.raises(ConfigError, match=r"^FT_PP 2 differs from --pipeline-model-parallel-size \(4\)"):
        config({"nproc-per-node": "4"}, args=("--pipeline-model-parallel-size", "4"), environ={"FT_PP": "2"})
    with pytest.raises(ConfigError, match=r"^--rank-order tp-cp-ep-dp-pp differs from --use-tp-pp-dp-mapping"):
        config({"rank-order": "tp-cp-ep-dp-pp"}, args=("--use-tp-pp-dp-mapping",))


def test_a_degree_that_does_not_divide_says_who_gave_it() -> None:
    with pytest.raises(ConfigError, match=r"--tp 3: .*4 ranks.*tp is 3 \(script --tensor-model-parallel-size\)"):
        config({"nproc-per-node": "4"}, args=("--tensor-model-parallel-size", "3"))
    with pytest.raises(ConfigError, match=r"^--tp 3: does not divide the world of 4 ranks; .*1, 2, 4$"):
        config({"nproc-per-node": "4", "tp": "3"})


def test_the_password_comes_from_the_environment_and_is_never_shown() -> None:
    made = config(ETCD | {"store-user": "me"}, on=machine({"FT_STORE_PASSWORD": "hunter2"}))
    assert made.store.password == "hunter2"
    assert "hunter2" not in repr(made) + str(made.effective())
    with pytest.raises(ConfigError, match="FT_STORE_PASSWORD"):
        config(ETCD | {"store-user": "me"})
    with pytest.raises(ConfigError) as caught:
        config({"store": "etcd://me:hunter2@a:2379"})
    assert "FT_STORE_PASSWORD" in str(caught.value)
    assert "hunter2" not in str(caught.value)


BAD = {
    "several nodes, no store": ({"nnodes": "2", "run-id": "r"}, "--nnodes '2': several nodes need --store etcd"),
    "spares, no store": ({"nnodes": "1:2", "run-id": "r"}, "--nnodes '1:2': several nodes need --store etcd"),
    "several nodes, no run id": ({"nnodes": "2", "store": "etcd://a:1"}, "--run-id: several nodes need the same one"),
    "MAX below N": ({"nnodes": "4:2"}, "--nnodes '4:2': N:MAX needs MAX >= N"),
    "no rank": ({"nproc-per-node": "0"}, "--nproc-per-node '0': must be a whole number from 1"),
    "no GPU": ({"nproc-per-node": "gpu"}, "--nproc-per-node gpu: no GPU was found"),
    "rank out of the world": ({"nproc-per-node": "4", "tee": "0,4,9"}, "--tee: unknown rank 4, 9: this job has ranks 0 to 3"),
    "cert without key": (ETCD | {"store-cert": "c"}, "--store-cert needs --store-key"),
    "key without cert": (ETCD | {"store-key": "c"}, "--store-key needs --store-cert"),
    "TLS without a store": ({"store-ca": "f"}, "--store-ca means nothing with the memory store"),
    "preload of nothing": ({"preload": "torch,toch.x"}, "--preload: there is no module toch"),
    "far too many": ({"nproc-per-node": "9999999"}, "a job has at most 1000000 ranks"),
    "order": ({"rank-order": "tp-pp"}, "tp-pp"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_combinations(case: str) -> None:
    flags, message = BAD[case]
    with pytest.raises(ConfigError) as caught:
        config(flags)
    assert message in str(caught.value)


def test_a_bad_variable_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match=r"^SLURM_NNODES 'two': must be"):
        config(environ={"SLURM_NNODES": "two"})
    with pytest.raises(ConfigError, match=r"^FT_NODE_TTL '-1': must be a number of seconds, at least 1"):
        config(environ={"FT_NODE_TTL": "-1"})


def test_a_host_name_that_cannot_be_a_node_id() -> None:
    from dataclasses import replace

    odd = replace(machine(), hostname=lambda: "(none)")
    with pytest.raises(ConfigError, match="give --node-id"):
        config(on=odd)
    assert config({"node-id": "n1"}, on=odd).node_id == "n1"


def test_without_torch_nothing_is_preloaded() -> None:
    made = config(on=machine(modules=()))
    assert made.preload == ()
    assert made.effective()["preload"] == "none (default: torch is not installed)"


def test_drain_needs_a_store_and_a_run() -> None:
    def drain(flags: dict[str, str], node: str = "n1") -> object:
        return resolve_drain(Reader(gather(settings(flags), None, {})), node, machine())

    with pytest.raises(ConfigError, match="needs --store etcd"):
        drain({"run-id": "r"})
    with pytest.raises(ConfigError, match="needs --run-id"):
        drain({"store": "etcd://a:1"})
    with pytest.raises(ConfigError, match="a node id has letters"):
        drain(ETCD, node="../x")
    assert drain(ETCD) == resolve_drain(Reader(gather({}, None, {"FT_STORE": "etcd://a:2379", "FT_RUN_ID": "r"})), "n1", machine())


def test_a_variable_that_is_nearly_an_option_is_pointed_out() -> None:
    assert environment_notes({"FT_MAX_RESTART": "1"}) == [
        "FT_MAX_RESTART in the environment is not an option and is ignored; did you mean FT_MAX_RESTARTS?"
    ]
    assert environment_notes({"FT_MAX_RESTARTS": "1", "FT_CYCLE": "0", "FT_STORE_PASSWORD": "x", "FT_OTHER_TOOL": "1"}) == []
