"""How each kind of fault is brought about in the fake world: one function a kind.

Each returns a sentence for the story, or None when there was nobody to strike (a rank that does not run, a machine that is down). A new kind needs an
entry in `faults.KINDS` and one here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ft_launcher.core.evidence import signal_name
from ft_launcher.sim import corrupt, disturb, machines
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.faults import STAMPS, Fault
from ft_launcher.sim.host import Host
from ft_launcher.sim.nursery import Exit, Proc

if TYPE_CHECKING:
    from ft_launcher.sim.world import World


def strike(world: World, fault: Fault) -> str | None:
    """Bring it about; what happened in words, None when it struck nobody."""
    return STRIKES[fault.kind](world, fault)


def _proc(world: World, rank: int) -> tuple[Agent, Proc] | None:
    """The running process of a rank, of whatever cycle."""
    launch = world.launch
    if launch is None or launch.over or launch.state.placement is None or not 0 <= rank < launch.state.placement.world:
        return None
    agent = launch.agents.get(launch.state.placement.node_of(rank))
    proc = agent.nursery.procs.get(rank) if agent is not None else None
    return (agent, proc) if agent is not None and proc is not None and proc.leaving is None and not proc.hung else None


def _agent(world: World, fault: Fault) -> Agent | None:
    """The live agent on the fault's node."""
    host = world.hosts[fault.whole("node") % len(world.hosts)]
    agent = world.launch.agents.get(host.name) if world.launch is not None else None
    return agent if agent is not None and agent.live else None


def _host(world: World, fault: Fault) -> Host:
    return world.hosts[fault.whole("node") % len(world.hosts)]


def _hurt(world: World, proc: Proc) -> None:
    launch = world.launch
    if launch is not None and proc.cycle == launch.truth.cycle:
        launch.truth.hurt.add(proc.rank)


# -- ranks ------------------------------------------------------------------------------------------------------------------------------


def _crash(world: World, fault: Fault) -> str | None:
    return _kill_rank(world, fault.whole("rank"), fault.whole("signal"))


def _kill_rank(world: World, rank: int, number: int) -> str | None:
    found = _proc(world, rank)
    if found is None:
        return None
    agent, proc = found
    _hurt(world, proc)
    agent.nursery.leave(proc, world.noise.uniform(0.0005, 0.01), Exit(signal=number))
    return f"rank {rank} on {agent.name} is killed by {signal_name(number)}"


def _together(world: World, fault: Fault) -> str | None:
    first, number = fault.whole("rank"), fault.whole("signal")
    said = _kill_rank(world, first, number)
    for extra in range(1, fault.whole("ranks")):
        rank = (first + extra * 7) % world.setting.ranks
        world.later(world.noise.uniform(0.0, fault["within"]), lambda rank=rank: _kill_later(world, rank, number))  # type: ignore[misc]
    return None if said is None else f"{said}, {fault.whole('ranks') - 1} more within {fault['within']:g} s"


def _kill_later(world: World, rank: int, number: int) -> None:
    said = _kill_rank(world, rank, number)
    if said is not None:
        world.trace.note(world.clock.now, "fault", said)


def _exit(world: World, fault: Fault) -> str | None:
    found = _proc(world, fault.whole("rank"))
    if found is None:
        return None
    agent, proc = found
    text = STAMPS[fault.whole("text") % len(STAMPS)]
    _hurt(world, proc)
    agent.nursery.leave(proc, fault["linger"], Exit(code=fault.whole("code")), text)
    return f"rank {proc.rank} on {agent.name} fails: {text} (exit {fault.whole('code')} in {fault['linger']:g} s)"


def _hang(world: World, fault: Fault) -> str | None:
    found = _proc(world, fault.whole("rank"))
    if found is None or world.launch is None or not world.setting.script.client:
        return None
    agent, proc = found
    if proc.cycle != world.launch.truth.cycle:
        return None
    proc.hung = True
    world.launch.truth.hung.add(proc.rank)
    world.launch.peers.stand_still()
    return f"rank {proc.rank} on {agent.name} stands still"


def _leave(world: World, fault: Fault) -> str | None:
    found = _proc(world, fault.whole("rank"))
    if found is None:
        return None
    agent, proc = found
    _hurt(world, proc)
    agent.nursery.leave(proc, 0.01, Exit(code=0))
    return f"rank {proc.rank} on {agent.name} leaves with 0 while the others train"


def _rerun(world: World, fault: Fault) -> str | None:
    code, first = fault.whole("code"), fault.whole("rank")
    if world.launch is not None:
        world.launch.truth.passed_on = True
        world.launch.asked_for_nothing = world.launch.asked_for_nothing or code == 16
    ranks = range(world.setting.ranks) if fault.whole("all") else range(first, first + 1)
    struck = 0
    for rank in ranks:
        found = _proc(world, rank)
        if found is not None:
            struck += 1
            _hurt(world, found[1])
            found[0].nursery.leave(found[1], world.noise.uniform(0.01, 1.0), Exit(code=code))
    return f"{struck} rank{'s' if struck > 1 else ''} leave with {code}" if struck else None


# -- nodes ------------------------------------------------------------------------------------------------------------------------------


def _uneven(world: World, fault: Fault) -> str | None:
    luck = _host(world, fault).luck
    luck.finish_late_s, luck.finish_trains = fault["seconds"], bool(fault["trains"])
    return f"the ranks of {_host(world, fault).name} will finish {fault['seconds']:g} s late{', training' if luck.finish_trains else ''}"


def _zygote(world: World, fault: Fault) -> str | None:
    agent = _agent(world, fault)
    if agent is None:
        return None
    agent.host.luck.zygote_fails = fault.whole("times")
    _end_zygote(world, agent)
    return f"the zygote of {agent.name} dies, and {fault.whole('times')} more after it"


def _end_zygote(world: World, agent: Agent) -> None:
    launch = world.launch
    if launch is not None and launch.step is not None and launch.step.frozen_at is None and agent.nursery.procs:
        launch.truth.platform = True
    if launch is not None:
        launch.shaken_at = world.clock.now
    agent.nursery.die("the zygote was killed by SIGKILL")


def _slowstart(world: World, fault: Fault) -> str | None:
    agent = _agent(world, fault)
    if agent is None:
        return None
    agent.host.luck.zygote_slow_s = fault["seconds"]
    _end_zygote(world, agent)
    return f"the zygote of {agent.name} dies; the next takes {fault['seconds']:g} s longer"


def _slowreap(world: World, fault: Fault) -> str | None:
    host = _host(world, fault)
    host.luck.reap_slow_s = fault["seconds"]
    return f"the next reaping on {host.name} takes {fault['seconds']:g} s longer"


def _unkillable(world: World, fault: Fault) -> str | None:
    host = _host(world, fault)
    host.luck.leaves_unkillable = True
    return f"the next reaping on {host.name} will leave a process that cannot be killed"


def _stuck(world: World, fault: Fault) -> str | None:
    host = _host(world, fault)
    host.luck.kill_slow_s = fault["seconds"]
    return f"at the next kill on {host.name} a rank is deep in the kernel for {fault['seconds']:g} s"


def _standby(world: World, fault: Fault) -> str | None:
    luck = _host(world, fault).luck
    luck.standby_slow_s, luck.standby_fails = fault["seconds"], bool(fault["fails"])
    return f"the next standby store of {_host(world, fault).name} takes {fault['seconds']:g} s{' and fails' if luck.standby_fails else ''}"


# -- signals, store, time ---------------------------------------------------------------------------------------------------------------


def _drain(world: World, fault: Fault) -> str | None:
    agent, launch = _agent(world, fault), world.launch
    if agent is None or launch is None or launch.alone:
        return None
    launch.store.call(agent.host, lambda: launch.store.put(f"drains/{agent.name}", True), lambda _: None)
    return f"somebody wants {agent.name} to be drained"


def _slowstore(world: World, fault: Fault) -> str | None:
    host = _host(world, fault)
    host.store_slow_s, host.store_slow_until = fault["delay"], world.clock.now + fault["lasts"]
    return f"the store is slow for {host.name}: up to {fault['delay']:g} s for {fault['lasts']:g} s"


def _repeat(world: World, fault: Fault) -> str | None:
    if world.launch is None or world.launch.over:
        return None
    controller = world.launch.gov.in_office
    if controller is None:
        return None
    controller.list_again()
    return "the controller's watch begins anew: all reports are listed again"


STRIKES: dict[str, Callable[[World, Fault], str | None]] = {
    "crash": _crash,
    "exit": _exit,
    "together": _together,
    "hang": _hang,
    "leave": _leave,
    "uneven": _uneven,
    "rerun": _rerun,
    "zygote": _zygote,
    "slowstart": _slowstart,
    "slowreap": _slowreap,
    "unkillable": _unkillable,
    "stuck": _stuck,
    "standby": _standby,
    "node": machines.node,
    "rack": machines.rack,
    "preempted": machines.preempted,
    "term": machines.term,
    "drain": _drain,
    "slowstore": _slowstore,
    "repeat": _repeat,
    "stall": disturb.stall,
    "freeze": disturb.freeze,
    "cut": disturb.cut,
    "outage": disturb.outage,
    "lossy": disturb.lossy,
    "slow": disturb.slow,
    "late": machines.late,
    "device": corrupt.device,
    "glitch": corrupt.glitch,
    "oddity": corrupt.oddity,
}
