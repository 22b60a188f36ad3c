"""One launch, from configuration to exit code: builds the rooms, connects them, and takes them down in order.

The only place where agent, controller, files and console meet. It decides nothing; what fails here fails with one clear line and the right code.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ft_launcher import report
from ft_launcher.config import Config
from ft_launcher.core.node import STOP_SIGNALS, NodeOptions
from ft_launcher.core.placement import Placement
from ft_launcher.core.state import JobState, Options
from ft_launcher.errors import FTError
from ft_launcher.shell import epilogue, linux
from ft_launcher.shell.agent import Agent, Surroundings, Tell
from ft_launcher.shell.console import Console
from ft_launcher.shell.controller import Controller, Job, Neighbours
from ft_launcher.shell.device_ids import Devices, find_devices
from ft_launcher.shell.ears import Ears
from ft_launcher.shell.exporter import Exporter
from ft_launcher.shell.health import CHECK_S, Gate, Outlook
from ft_launcher.shell.health_clearing import Clearing
from ft_launcher.shell.health_disk import DiskSpace
from ft_launcher.shell.join import FinishedError
from ft_launcher.shell.journal import Journal, utc_now
from ft_launcher.shell.ledger import inherited
from ft_launcher.shell.limits import LimitsKeeper
from ft_launcher.shell.logs import LogTail
from ft_launcher.shell.nursery import Nursery
from ft_launcher.shell.presence import Alone, Hooks, Presence, Shared
from ft_launcher.shell.process import ZygoteOptions
from ft_launcher.shell.progress_file import ProgressFile
from ft_launcher.shell.rank_env import job_environment
from ft_launcher.shell.record import Files, RunRecord
from ft_launcher.shell.writer import Writer
from ft_launcher.state.run_folder import RunFolder, create_run_folder
from monitors.attribution import attribute
from monitors.learning import Learning
from rerun.tracker import tracker_path

FLUSH_S = 5.0
HAND_OVER_S = 1.0
"""So long a node that leaves waits for its disk, that whoever governs next can read what was written here."""
REAP_S = 30.0
"""So long a node may take to clear a cycle; the time of a health check comes on top."""


def run(config: Config, environ: Mapping[str, str] | None = None) -> int:
    """Launch and supervise until the job is done; returns the exit code. Raises FTError for what the user or the platform got wrong."""
    _reserve_standard_descriptors()
    console, ears = Console(), Ears()
    ears.overlook(_notices(config))  # one ahead of a pre-emption must not end a launcher that has no ranks yet
    try:
        environ = dict(os.environ if environ is None else environ)
        given = _Given(config, environ, find_devices(config.nproc, environ), ears, console)
        folder = create_run_folder(config.log_dir, config.run_id) if config.store.kind == "memory" else None
        linux.become_subreaper()
        console.start()
        return asyncio.run(_enter(given, folder))
    except FinishedError as finished:
        console.say(str(finished))
        return finished.code
    finally:
        ears.close()
        console.close(FLUSH_S)


@dataclass(frozen=True, slots=True)
class _Given:
    """What the launcher has before it knows of anybody else."""

    config: Config
    environ: Mapping[str, str]
    devices: Devices
    ears: Ears
    console: Console


def _notices(config: Config) -> set[int]:
    """The signals that do not stop the job."""
    return {signal.SIGUSR1, signal.SIGUSR2, *config.forward_signals} - STOP_SIGNALS


def _reserve_standard_descriptors() -> None:
    """Where 0, 1 or 2 is closed, the next thing opened would get that number, and be written to as if it were the terminal."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one


async def _enter(given: _Given, folder: RunFolder | None) -> int:
    """Join the job, then run it."""
    config, console = given.config, given.console
    presence: Presence
    if folder is not None:
        presence = Alone(config, folder.generation, given.devices.names)
    else:
        presence = await _joined(given)
        folder = create_run_folder(config.log_dir, config.run_id, presence.generation)
    writer = Writer(lambda text: console.say(text, "warning"))
    files = Files(folder, writer, Journal(writer, folder.journal(config.node_id), config.node_id), console)
    writer.start()
    tail = LogTail(1, config.topology.world, console.say)
    tail.start()
    try:
        return await _launch(given, presence, files, tail)
    finally:
        await asyncio.to_thread(writer.flush, HAND_OVER_S)
        await presence.leave()
        await asyncio.to_thread(tail.close, FLUSH_S)
        await asyncio.to_thread(writer.close, FLUSH_S)


async def _joined(given: _Given) -> Shared:
    """A stop signal while joining ends the attempt."""
    task = asyncio.create_task(Shared.enter(given.config, given.environ, given.console.say, given.devices.names))
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        task.cancel()

    given.ears.hear(STOP_SIGNALS, stop)
    task.add_done_callback(lambda _: given.ears.leave())
    try:
        return await task
    except asyncio.CancelledError:
        raise FinishedError(f"stopped by {signal.Signals(stopped[0]).name} while joining", 128 + stopped[0]) from None


def core_options(config: Config) -> Options:
    """The core's part of the configuration."""
    return Options(
        nodes_wanted=config.nnodes,
        nproc=config.nproc,
        can_join=config.store.kind != "memory",
        max_restarts=config.max_restarts,
        no_progress_cycles=config.no_progress_cycles,
        healthy_stretch_s=config.healthy_stretch_s,
        quarantine_after=config.quarantine_after,
        join_wait_s=config.join_wait_s,
        spare_wait_s=config.spare_wait_s,
        exit_grace_s=config.exit_grace_s,
        term_grace_s=config.term_grace_s,
        survivor_grace_s=config.survivor_grace_s,
        reap_s=REAP_S if config.health_check is None else REAP_S + CHECK_S,
        attribute=attribute,
    )


def _zygote_options(config: Config, environ: Mapping[str, str], files: Files) -> ZygoteOptions:
    return ZygoteOptions(
        command=config.command,
        cwd=str(Path.cwd()),
        env=job_environment(config, environ),
        preload=config.preload,
        start_method=config.start_method,
        log_path=str(files.folder.path / f"zygote.{config.node_id}.log"),
    )


def _controllers(
    config: Config, presence: Presence, files: Files
) -> Callable[[str, Callable[[Controller], Neighbours] | None], Controller]:
    """Builds a controller, with a record of its own, whenever this agent becomes one."""
    options = core_options(config)

    def learning(records: object) -> Learning:
        command = config.command
        return Learning(config.timeouts.sections, (config.topology.to_json(), " ".join(command.target), command.args), records)

    def make(name: str, neighbours: Callable[[Controller], Neighbours] | None) -> Controller:
        """A fresh one: what a predecessor wrote down goes on in the same files."""
        exporter = Exporter(config, options, files.folder, files.writer, lambda text: files.console.say(text, "warning"))
        record = RunRecord(files, exporter, topology=config.topology)
        keeper = LimitsKeeper(presence.store, presence.keys, record, learning) if config.learn_timeouts else None

        def inherit(fresh: JobState) -> JobState:
            return inherited(fresh, exporter.document, utc_now(), config.topology.world)

        job = Job(presence.keys, presence.generation, config.topology, options, inherit)
        return Controller(presence.store, job, record, name, neighbours, keeper)

    return make


def _clearing(config: Config, environ: Mapping[str, str], devices: Devices, files: Files, spare: set[int]) -> Clearing:
    """What a node must pass before it takes ranks, and what is read when a cycle is over."""

    def say(text: str, level: str) -> None:
        files.console.say(text, level)
        files.journal.record("note", None, text=text)

    gate = Gate(Outlook(config.node_id, environ, say, files.journal.record, spare), devices, config.health_check)
    return Clearing(gate, ProgressFile(config.progress_file) if config.progress_file is not None else None)


async def _launch(given: _Given, presence: Presence, files: Files, tail: LogTail) -> int:
    agent: Agent | None = None
    try:
        agent = _agent(given, presence, files, tail)
        return await _run_agent(given, presence, files, agent)
    except (FTError, OSError, MemoryError) as error:
        raise epilogue.failed(files, error, *(agent.knows if agent is not None else (None, None))) from error


def _agent(given: _Given, presence: Presence, files: Files, tail: LogTail) -> Agent:
    config, environ, devices = given.config, given.environ, given.devices
    forwarded = frozenset(config.forward_signals) - STOP_SIGNALS
    node = NodeOptions(
        config.node_id,
        presence.generation,
        forwarded,
        survivor_grace_s=config.survivor_grace_s,
        incarnation=presence.incarnation,
        tracker=tracker_path(config.command.args) is not None,
        devices=devices.names,
    )
    nursery = Nursery(_zygote_options(config, environ, files))
    tell = Tell(presence.progress, presence.samples, presence.suspicion)
    clearing = _clearing(config, environ, devices, files, nursery.spared)
    around = Surroundings(config, presence.store, presence.keys, files, tail, tell, presence.in_touch, clearing, presence.away)
    return Agent(around, nursery, node, (presence.host, presence.listen_on))


async def _run_agent(given: _Given, presence: Presence, files: Files, agent: Agent) -> int:
    """Until the agent has left, and whoever governed here has written down what was decided."""
    config = given.config
    _announce(config, files)
    given.ears.hear(STOP_SIGNALS | _notices(config), agent.on_signal)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    disk = asyncio.create_task(DiskSpace(files.folder.path, files.console.say).watch(files.writer))
    hooks = Hooks(agent.set_lease, agent.busy, agent.training, agent.fail, agent.look)
    governing = asyncio.create_task(presence.govern(_controllers(config, presence, files), hooks))
    governing.add_done_callback(lambda task: _on_governing_done(task, agent))
    try:
        code = await agent.run()
        epilogue.concluded(files, config.node_id, agent.knows[0])
        return code
    finally:
        disk.cancel()
        governing.cancel()
        with suppress(asyncio.CancelledError, FTError):
            await governing


def _on_governing_done(task: asyncio.Task[None], agent: Agent) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        agent.fail(error)


def _announce(config: Config, files: Files) -> None:
    nodes = (config.node_id,) if config.nnodes == 1 else tuple(f"<node {i}>" for i in range(config.nnodes))
    placement = Placement(nodes=nodes, nproc=config.nproc)
    paths = {"store": config.store.kind, "logs": str(files.folder.path), "ft_state": str(config.ft_state)}
    limits = {**config.timeouts.sections, "out of section": config.timeouts.out_of_section_s}
    files.console.raw(report.banner(config.topology, placement, config.run_id, paths, limits))
    for note in config.notes:
        files.console.say(note)
    files.journal.record("launch", None, options=config.effective())
