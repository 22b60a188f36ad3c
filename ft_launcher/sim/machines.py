"""How machines and agents are lost, come back, come late, and are told to stop: one at a time, a rack, or a wave of them.

One function a kind, as in `inject`; each returns a sentence for the story, or None where there was nobody to strike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_launcher.core.events import SignalArrived
from ft_launcher.core.evidence import signal_name
from ft_launcher.sim import disturb
from ft_launcher.sim.faults import ALL, Fault
from ft_launcher.sim.host import Host

if TYPE_CHECKING:
    from ft_launcher.sim.world import World


def _host(world: World, fault: Fault) -> Host:
    return world.hosts[fault.whole("node") % len(world.hosts)]


def node(world: World, fault: Fault) -> str | None:
    """A machine, or its agent alone."""
    host = disturb.host_of(world, fault)
    if host is None or not host.up:
        return None
    closed, returns_s = bool(fault["closed"]), fault["returns"]
    host.up, host.silent = False, not closed
    world.lost(host, host.silent)
    if returns_s > 0:
        world.later(returns_s, lambda: _return(world, host))
    back = f", back in {returns_s:g} s" if returns_s > 0 else ""
    return f"{host.name} is lost ({'its connections close' if closed else 'silence'}{back})"


def _return(world: World, host: Host) -> None:
    host.up, host.silent = True, False
    world.trace.note(world.clock.now, "fault", f"{host.name} is back")
    world.come_back(host)


def rack(world: World, fault: Fault) -> str | None:
    """Neighbours share a switch or a power supply."""
    first, count = fault.whole("node"), min(fault.whole("nodes"), len(world.hosts))
    names = [world.hosts[(first + i) % len(world.hosts)].number for i in range(count)]
    said = [node(world, Fault(fault.at_s, "node", {**fault.args, "node": number})) for number in names]
    return f"a rack is lost: {'; '.join(text for text in said if text)}" if any(said) else None


def preempted(world: World, fault: Fault) -> str | None:
    """The scheduler takes machines back: a stop signal to their agents, and soon after they are gone."""
    first, count = fault.whole("node"), min(fault.whole("nodes"), len(world.hosts))
    numbers = [world.hosts[(first + i) % len(world.hosts)].number for i in range(count)]
    told = [term(world, Fault(fault.at_s, "term", {"node": n, "signal": 15, "times": 1, "gap": 0.0})) for n in numbers]
    for number in numbers:
        gone = Fault(fault.at_s, "node", {"node": number, "closed": 1, "returns": fault["returns"]})
        world.later(fault["warning"], lambda gone=gone: _gone(world, gone))  # type: ignore[misc]
    return f"{count} machines are taken back in {fault['warning']:g} s: {'; '.join(text for text in told if text)}" if any(told) else None


def _gone(world: World, fault: Fault) -> None:
    said = node(world, fault) if not world.ended else None
    if said is not None:
        world.trace.note(world.clock.now, "fault", said)
        world.count_usable()


def late(world: World, fault: Fault) -> str | None:
    """It joins the next launch later than others."""
    _host(world, fault).luck.late_s = fault["seconds"]
    return f"{_host(world, fault).name} will join the next launch {fault['seconds']:g} s late"


def term(world: World, fault: Fault) -> str | None:
    """A stop signal to one agent or all."""
    launch = world.launch
    if launch is None or launch.over:
        return None
    everyone = fault.whole("node") == ALL
    names = [host.name for host in world.hosts] if everyone else [_host(world, fault).name]
    agents = [agent for name in names if (agent := launch.agents.get(name)) is not None and agent.live]
    number = fault.whole("signal")
    for again in range(fault.whole("times")):
        for agent in agents:
            world.later(again * fault["gap"], lambda agent=agent: agent.feed(SignalArrived(number)))  # type: ignore[misc]
    if not agents:
        return None
    launch.signalled(number, agents)
    return f"{'all agents get' if everyone else names[0] + ' gets'} {signal_name(number)}{' twice' if fault.whole('times') > 1 else ''}"
