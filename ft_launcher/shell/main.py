"""One launch, from configuration to exit code: builds the rooms, connects them, and takes them down in order.

The only place where agent, controller, files and console meet. It decides nothing; what fails here fails with one clear line and the right code.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ft_launcher import report
from ft_launcher.config import Config
from ft_launcher.core.evidence import NodeInfo
from ft_launcher.core.node import STOP_SIGNALS, NodeOptions
from ft_launcher.core.placement import Placement
from ft_launcher.core.state import Options
from ft_launcher.errors import BugError, FTError
from ft_launcher.shell import linux
from ft_launcher.shell.agent import Agent, Surroundings
from ft_launcher.shell.console import Console
from ft_launcher.shell.controller import Controller, Job
from ft_launcher.shell.exporter import Exporter
from ft_launcher.shell.journal import Journal
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.logs import LogTail
from ft_launcher.shell.nursery import Nursery
from ft_launcher.shell.process import ZygoteOptions
from ft_launcher.shell.rank_env import job_environment
from ft_launcher.shell.record import Files, RunRecord
from ft_launcher.shell.store import MemoryStore
from ft_launcher.shell.writer import Writer
from ft_launcher.state.run_folder import create_run_folder

FLUSH_S = 5.0
LOCAL_HOST = "127.0.0.1"


def run(config: Config, environ: Mapping[str, str] | None = None) -> int:
    """Launch and supervise until the job is done; returns the exit code. Raises FTError for what the user or the platform got wrong."""
    environ = dict(os.environ if environ is None else environ)
    folder = create_run_folder(config.log_dir, config.run_id)
    linux.become_subreaper()
    console = Console()
    writer = Writer(lambda text: console.say(text, "warning"))
    files = Files(folder, writer, Journal(writer, folder.journal(config.node_id), config.node_id), console)
    console.start()
    writer.start()
    tail = LogTail(1, config.topology.world, console.say)
    tail.start()
    try:
        return asyncio.run(_launch(config, environ, files, tail))
    except BugError as error:
        files.journal.record("bug", None, text=str(error))
        raise
    finally:
        tail.close(FLUSH_S)
        writer.close(FLUSH_S)
        console.close(FLUSH_S)


def core_options(config: Config) -> Options:
    """The core's part of the configuration."""
    return Options(
        nodes_wanted=config.nnodes,
        nproc=config.nproc,
        can_join=config.store.kind != "memory",
        max_restarts=config.max_restarts,
        no_progress_cycles=config.no_progress_cycles,
        join_wait_s=config.join_wait_s,
        spare_wait_s=config.spare_wait_s,
        exit_grace_s=config.exit_grace_s,
        term_grace_s=config.term_grace_s,
        survivor_grace_s=config.survivor_grace_s,
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


async def _launch(config: Config, environ: Mapping[str, str], files: Files, tail: LogTail) -> int:
    options = core_options(config)
    store, keys = MemoryStore(), Keys(config.run_id)
    exporter = Exporter(config, options, files.folder, files.writer, lambda text: files.console.say(text, "warning"))
    record = RunRecord(files, exporter)
    job = Job(keys, files.folder.generation, config.topology, options)
    controller = Controller(store, job, record, config.node_id)
    around = Surroundings(config, store, keys, files, tail, controller.offer)
    forwarded = frozenset(config.forward_signals) - STOP_SIGNALS
    node = NodeOptions(config.node_id, files.folder.generation, forwarded, survivor_grace_s=config.survivor_grace_s)
    agent = Agent(around, Nursery(_zygote_options(config, environ, files)), node, config.node_addr or LOCAL_HOST)
    _announce(config, files)
    await _register(config, store, keys, files)
    _catch_signals(agent, forwarded)
    controlling = asyncio.create_task(controller.run(lease=0))
    controlling.add_done_callback(lambda task: _on_controller_done(task, agent))
    try:
        return await agent.run()
    finally:
        controlling.cancel()
        with suppress(asyncio.CancelledError, FTError):
            await controlling
        await store.close()


def _on_controller_done(task: asyncio.Task[None], agent: Agent) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        agent.fail(error)


def _catch_signals(agent: Agent, forwarded: frozenset[int]) -> None:
    loop = asyncio.get_running_loop()
    for number in sorted(STOP_SIGNALS | forwarded):
        loop.add_signal_handler(number, agent.on_signal, number)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


async def _register(config: Config, store: MemoryStore, keys: Keys, files: Files) -> None:
    """On the embedded store a registration needs no lease: it lives and dies with this process."""
    info = NodeInfo(
        node_id=config.node_id,
        address=config.node_addr or LOCAL_HOST,
        nproc=config.nproc,
        generation=files.folder.generation,
        order=config.node_order,
        labels=dict(config.node_labels),
    )
    await store.put(keys.node(config.node_id), json.dumps(info.to_json()))


def _announce(config: Config, files: Files) -> None:
    placement = Placement(nodes=(config.node_id,), nproc=config.nproc)
    paths = {"store": config.store.kind, "logs": str(files.folder.path), "ft_state": str(config.ft_state)}
    limits = {**config.timeouts.sections, "out of section": config.timeouts.out_of_section_s}
    files.console.raw(report.banner(config.topology, placement, config.run_id, paths, limits))
    for note in config.notes:
        files.console.say(note)
    files.journal.record("launch", None, options=config.effective())
