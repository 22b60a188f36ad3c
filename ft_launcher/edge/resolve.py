"""From settings to one `Config`: types, defaults, and everything that two options together can get wrong.

Asks the machine only through `Machine`, so that a test can be any host. Touches no disk and opens no port: `preflight` does that
afterwards, when all words are known to be sound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from ft_launcher.config import SECTIONS, Config, DrainOptions, StoreOptions, Tee, Timeouts
from ft_launcher.core.command import Command
from ft_launcher.core.topology import DEFAULT_ORDER, Topology
from ft_launcher.edge import values
from ft_launcher.edge.sources import Reader
from ft_launcher.edge.values import show
from ft_launcher.errors import ConfigError
from ft_launcher.script_args import megatron_says

PASSWORD = "FT_STORE_PASSWORD"
MOST_RANKS = 1_000_000
_DEGREES = ("tp", "pp", "cp", "ep", "etp")


@dataclass(frozen=True, slots=True)
class Machine:
    """What is asked of the host: its name, its GPUs, its cores, whether a top-level module can be imported, a new run id, where relative
    paths start.
    """

    hostname: Callable[[], str]
    gpus: Callable[[], int]
    cores: Callable[[], int]
    importable: Callable[[str], bool]
    new_run_id: Callable[[], str]
    cwd: Path
    environ: Mapping[str, str]


def resolve(reader: Reader, command: Command, machine: Machine) -> Config:
    """The Config of a launch. Raises ConfigError: one line with the option, its value, what is allowed and where it was said."""
    nnodes, nnodes_max = reader.optional("nnodes", values.node_range) or (1, None)
    nproc = _nproc(reader, machine)
    if nnodes * nproc > MOST_RANKS:
        raise ConfigError(
            f"{reader.where('nnodes')} {nnodes} x {reader.where('nproc-per-node')} {nproc}: a job has at most {MOST_RANKS} ranks"
        )
    topology = _topology(reader, command, nnodes * nproc)
    store = _store(reader, machine, several=max(nnodes, nnodes_max or 1))
    log_dir = _path(reader.read("log-dir", values.nonempty), machine)
    ft_state = reader.optional("ft-state", values.nonempty)
    return Config(
        command=command,
        topology=topology,
        nnodes=nnodes,
        nnodes_max=nnodes_max,
        nproc=nproc,
        run_id=_run_id(reader, machine, max(nnodes, nnodes_max or 1)),
        node_id=_node_id(reader, machine),
        node_addr=reader.optional("node-addr", values.address),
        node_labels=reader.merged("node-label", values.labels),
        node_order=reader.optional("node-order", values.count(0)),
        store=store,
        timeouts=_timeouts(reader),
        learn_timeouts=reader.read("learn-timeouts", values.boolean),
        hang_action=cast(Literal["restart", "log"], reader.read("hang-action", values.choice("restart", "log"))),
        max_restarts=reader.read("max-restarts", values.count(0)),
        no_progress_cycles=reader.read("no-progress-cycles", values.count(1)),
        healthy_stretch_s=reader.read("healthy-stretch", values.seconds(at_least=0)),
        quarantine_after=reader.read("quarantine-after", values.count(0)),
        quarantine_days=reader.read("quarantine-days", values.days),
        progress_file=_optional_path(reader, "progress-file", machine),
        node_ttl_s=reader.read("node-ttl", values.seconds(at_least=1)),
        join_wait_s=reader.read("join-wait", values.seconds(at_least=0)),
        spare_wait_s=reader.read("spare-wait", values.seconds(at_least=0)),
        exit_grace_s=reader.read("exit-grace", values.seconds(at_least=0)),
        term_grace_s=reader.read("term-grace", values.seconds(at_least=0)),
        survivor_grace_s=reader.read("survivor-grace", values.seconds(at_least=0)),
        forward_signals=reader.read("forward-signals", values.signals),
        health_check=reader.optional("health-check", values.nonempty),
        preload=_preload(reader, machine),
        start_method=cast(Literal["fork", "spawn"], reader.read("start-method", values.choice("fork", "spawn"))),
        log_dir=log_dir,
        ft_state=log_dir / "ft_state.json" if ft_state is None else _path(ft_state, machine),
        tee=_tee(reader, topology.world),
        origins=_shown(reader),
    )


def resolve_drain(reader: Reader, node: str, machine: Machine) -> DrainOptions:
    """Which node of which run is to be drained. Raises ConfigError where the store or the run is not said."""
    if not values.is_identifier(node):
        raise ConfigError(
            f"drain {show(node)}: a node id has letters, digits, '.', '_' and '-' only; it is the --node-id of an agent (its host name by default)"
        )
    store = _store(reader, machine, several=1)
    if store.kind == "memory":
        raise ConfigError(
            "drain: needs --store etcd://host:port; a job with the embedded store has one node and no spare: send TERM to its ft-launch to drain it"
        )
    run_id = reader.optional("run-id", values.identifier)
    if run_id is None:
        raise ConfigError("drain: needs --run-id ID, the name of the run whose node is to be drained")
    return DrainOptions(node=node, run_id=run_id, store=store)


def _nproc(reader: Reader, machine: Machine) -> int:
    text = reader.given["nproc-per-node"][-1].text if reader.has("nproc-per-node") else None
    if text is None:
        gpus = machine.gpus()
        reader.note("nproc-per-node", gpus or 1, "default: GPUs found" if gpus else "default: no GPU found")
        return gpus or 1
    if text not in ("gpu", "cpu", "auto"):
        return reader.read("nproc-per-node", _count_or_word)
    gpus = 0 if text == "cpu" else machine.gpus()
    if text == "gpu" and not gpus:
        raise ConfigError(f"{reader.where('nproc-per-node')} gpu: no GPU was found on this node; say how many ranks it shall run")
    reader.note("nproc-per-node", gpus or machine.cores(), f"{reader.origin('nproc-per-node')}: {text}")
    return gpus or machine.cores()


def _count_or_word(text: str) -> int:
    try:
        return values.count()(text)
    except values.BadValueError as bad:
        raise values.BadValueError(f"{bad}, or gpu, cpu, auto") from None


def _topology(reader: Reader, command: Command, world: int) -> Topology:
    """Ours where given, else Megatron's flag in the script's arguments; both and different is a mistake that costs a run."""
    said = megatron_says(command.args)
    degrees: dict[str, int] = {}
    for name in _DEGREES:
        ours = reader.optional(name, values.count())
        if ours is None and name not in said:
            continue
        theirs = int(said[name].text) if name in said else ours
        if ours is not None and ours != theirs:
            raise _mismatch(reader, name, str(ours), said[name].flag, str(theirs))
        degrees[name] = ours if ours is not None else int(said[name].text)
        if ours is None:
            reader.note(name, degrees[name], f"script {said[name].flag}")
    order = reader.optional("rank-order", str.lower)
    if order is not None and "rank-order" in said and order != said["rank-order"].text:
        raise _mismatch(reader, "rank-order", order, said["rank-order"].flag, said["rank-order"].text)
    if order is None and "rank-order" in said:
        order = said["rank-order"].text
        reader.note("rank-order", order, f"script {said['rank-order'].flag}")
    topology = _built(reader, world, order or DEFAULT_ORDER, degrees)
    for name in (*_DEGREES, "rank-order"):
        if name not in reader.shown:
            reader.note(name, getattr(topology, name.removeprefix("rank-")), "default")
    reader.note("dp", topology.dp, f"{world} ranks / (tp {topology.tp} x cp {topology.cp} x pp {topology.pp})")
    return topology


def _built(reader: Reader, world: int, order: str, degrees: dict[str, int]) -> Topology:
    """The topology; where it cannot be, the complaint also says who gave the degrees that no flag gave, and where the world's size came
    from.
    """
    try:
        return Topology.build(world=world, order=order, **degrees)
    except ConfigError as error:
        shown = {name: text for name, text in reader.shown.items() if name in (*degrees, "nnodes", "nproc-per-node", "rank-order")}
        elsewhere = [f"{name} is {text}" for name, text in shown.items() if not text.endswith("(flag)")]
        raise ConfigError(f"{error}{'; ' if elsewhere else ''}{', '.join(elsewhere)}") from None


def _mismatch(reader: Reader, name: str, ours: str, flag: str, theirs: str) -> ConfigError:
    return ConfigError(
        f"{reader.where(name)} {ours} differs from {flag} ({theirs}) in the script's arguments; give one of them, or the same value twice"
    )


def _store(reader: Reader, machine: Machine, several: int) -> StoreOptions:
    store = reader.optional("store", values.store) or StoreOptions()
    if store.kind == "memory":
        if several > 1:
            said = f"{reader.where('nnodes')} {show(reader.given['nnodes'][-1].text)}"
            raise ConfigError(
                f"{said}: several nodes need --store etcd://host:port[,host:port] (or FT_STORE); the memory store holds one node"
            )
        reader.note("store", "memory", reader.origin("store"))
        if name := next((name for name in ("ca", "cert", "key", "user") if reader.origin(f"store-{name}") == "flag"), None):
            raise ConfigError(f"--store-{name} means nothing with the memory store: give --store etcd://host:port as well, or leave it out")
    timeout_s = reader.read("store-timeout", values.seconds())
    ca, cert, key = (_optional_path(reader, f"store-{name}", machine) for name in ("ca", "cert", "key"))
    user = reader.optional("store-user", values.nonempty)
    password = machine.environ.get(PASSWORD) or None
    if (cert is None) != (key is None):
        given, missing = ("cert", "key") if key is None else ("key", "cert")
        raise ConfigError(
            f"{reader.where(f'store-{given}')} needs --store-{missing} FILE as well: a client certificate and its key go together"
        )
    if store.kind == "memory":
        return replace(store, timeout_s=timeout_s)
    if user is not None and password is None:
        raise ConfigError(f"{reader.where('store-user')} {show(user)} needs the password in {PASSWORD} (never on the command line)")
    return replace(store, timeout_s=timeout_s, ca=ca, cert=cert, key=key, user=user, password=password if user else None)


def _run_id(reader: Reader, machine: Machine, several: int) -> str:
    given = reader.optional("run-id", values.identifier)
    if given is not None:
        return given
    if several > 1:
        raise ConfigError("--run-id: several nodes need the same one on each (--run-id ID, FT_RUN_ID, or the scheduler's SLURM_JOB_ID)")
    made = machine.new_run_id()
    reader.note("run-id", made, "generated")
    return made


def _node_id(reader: Reader, machine: Machine) -> str:
    given = reader.optional("node-id", values.identifier)
    if given is not None:
        return given
    name = machine.hostname()
    if not values.is_identifier(name):
        raise ConfigError(f"the host name {show(name)} cannot be a node id (letters, digits, '.', '_', '-'); give --node-id ID")
    reader.note("node-id", name, "host name")
    return name


def _timeouts(reader: Reader) -> Timeouts:
    given = reader.merged("timeouts", values.timeouts)
    sections = {**SECTIONS, **given}
    text = ",".join(f"{name}={limit:g}" for name, limit in sections.items())
    reader.note("timeouts", text, reader.origin("timeouts"))
    return Timeouts(sections=sections, out_of_section_s=reader.read("out-of-section", values.seconds()))


def _tee(reader: Reader, world: int) -> Tee:
    tee = reader.read("tee", values.tee)
    unknown = sorted(rank for rank in tee.ranks or () if rank >= world)
    if unknown:
        raise ConfigError(f"{reader.where('tee')}: unknown rank {', '.join(map(str, unknown))}: this job has ranks 0 to {world - 1}")
    return tee


def _preload(reader: Reader, machine: Machine) -> tuple[str, ...]:
    given = reader.optional("preload", values.modules)
    if given is None:
        there = machine.importable("torch")
        reader.note("preload", "torch" if there else "none", "default" if there else "default: torch is not installed")
        return ("torch",) if there else ()
    for name in given:
        if not machine.importable(name.partition(".")[0]):
            raise ConfigError(
                f"{reader.where('preload')}: there is no module {name.partition('.')[0]} to import; name installed modules, as in torch,megatron.core, or none"
            )
    return given


def _path(text: str, machine: Machine) -> Path:
    try:
        return machine.cwd / Path(text).expanduser()
    except RuntimeError:
        return machine.cwd / text


def _optional_path(reader: Reader, name: str, machine: Machine) -> Path | None:
    text = reader.optional(name, values.nonempty)
    return None if text is None else _path(text, machine)


def _shown(reader: Reader) -> dict[str, str]:
    """What `effective` shows: everything that has a value, in the table's order, then what was derived."""
    from ft_launcher.edge.table import OPTIONS

    if labels := reader.merged("node-label", values.labels):
        reader.note("node-label", ",".join(f"{key}={value}" for key, value in labels.items()), reader.origin("node-label"))
    defaults = {"nnodes": "1 (default)", "ft-state": "ft_state.json in --log-dir (default)"}
    ordered = {name: reader.shown.get(name) or defaults.get(name) for name in OPTIONS}
    return {name: text for name, text in (ordered | reader.shown).items() if text is not None}
