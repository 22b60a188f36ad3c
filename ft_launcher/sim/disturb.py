"""How frozen processes, cuts, outages, lossy channels and slow ranks are brought about: each begins, lasts, and ends by itself.

One function a kind, as in `inject`; each returns a sentence for the story, or None where there was nobody to strike. Whoever is frozen or cut off goes on afterwards from where he was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_launcher.sim.agent import Agent
from ft_launcher.sim.faults import CONTROLLER, Fault
from ft_launcher.sim.host import Host

if TYPE_CHECKING:
    from ft_launcher.sim.launch import Launch
    from ft_launcher.sim.world import World

CUTS = ("the store", "the controller", "everything")


def governor(world: World) -> Host | None:
    """The machine of the agent that holds the office."""
    controller = world.launch.gov.in_office if world.launch is not None else None
    return controller.host if controller is not None else None


def host_of(world: World, fault: Fault) -> Host | None:
    """The fault's machine: a number, or the controller's."""
    return governor(world) if fault.whole("node") == CONTROLLER else world.hosts[fault.whole("node") % len(world.hosts)]


def _struck(world: World, fault: Fault) -> tuple[Launch, Host, Agent] | None:
    """A live agent on the fault's machine."""
    launch, host = world.launch, host_of(world, fault)
    agent = launch.agents.get(host.name) if launch is not None and host is not None else None
    return (launch, host, agent) if launch is not None and host is not None and agent is not None and agent.live else None


def _holds_ranks(launch: Launch, agent: Agent) -> bool:
    """Its ranks belong to the running cycle, and others wait for them."""
    return any(proc.cycle == launch.truth.cycle for proc in agent.nursery.procs.values())


# -- time ---------------------------------------------------------------------------------------------------------------------------------


def stall(world: World, fault: Fault) -> str | None:
    """An agent's process is stopped; its ranks are not."""
    found = _struck(world, fault)
    if found is None:
        return None
    launch, _, agent = found
    freeze_agent(world, launch, agent, fault["seconds"])
    who = "the controller" if fault.whole("node") == CONTROLLER else "the agent"
    return f"{who} of {agent.name} is frozen for {fault['seconds']:g} s"


def freeze_agent(world: World, launch: Launch, agent: Agent, seconds: float) -> None:
    """It handles nothing, renews nothing and answers nobody for a while."""
    presence = launch.presences[agent.name]
    presence.block("frozen")
    agent.stall(seconds)
    world.troubled(agent.life.until)
    world.later(seconds, lambda: _wake(world, launch, agent))
    world.count_usable()


def _wake(world: World, launch: Launch, agent: Agent) -> None:
    presence = launch.presences.get(agent.name)
    if not agent.live or not agent.life.awake or presence is None or presence.agent is not agent:
        return
    presence.unblock("frozen")
    if presence.controller is not None:
        presence.controller.wake()
    launch.watchmen[agent.name].look()
    world.count_usable()


def freeze(world: World, fault: Fault) -> str | None:
    """Every process of a machine is stopped: agent, zygote, ranks."""
    found = _struck(world, fault)
    if found is None:
        return None
    launch, host, agent = found
    seconds = fault["seconds"]
    host.frozen_until = max(host.frozen_until, world.clock.now + seconds)
    agent.nursery.life.freeze(seconds)
    freeze_agent(world, launch, agent, seconds)
    if _holds_ranks(launch, agent):
        _hold(world, launch, f"{host.name} frozen", seconds)
    return f"all of {host.name} is frozen for {seconds:g} s"


def _hold(world: World, launch: Launch, why: str, seconds: float) -> None:
    """The training waits for a machine, and goes on after."""
    step = launch.step
    if step is None:
        return
    step.hold(why)
    launch.stands_still()

    def release() -> None:
        step.release(why)
        if launch.step is step:
            launch.moves()

    world.later(seconds, release)


def slow(world: World, fault: Fault) -> str | None:
    """A node's ranks take longer for everything, and so all others wait for them in every step."""
    found = _struck(world, fault)
    step = world.launch.step if world.launch is not None else None
    if found is None or step is None or step.began_at is None or step.frozen_at is not None or not _holds_ranks(found[0], found[2]):
        return None
    launch, host, _ = found
    _set_pace(world, launch, host.name, fault["factor"])

    def back() -> None:
        if launch.step is step:
            _set_pace(world, launch, host.name, 1.0)

    world.later(fault["lasts"], back)
    return f"the ranks of {host.name} take {fault['factor']:g} times as long for {fault['lasts']:g} s"


def _set_pace(world: World, launch: Launch, name: str, factor: float) -> None:
    step = launch.step
    if step is None:
        return
    world.lessons.listen(step)
    step.slow(name, factor)
    world.lessons.turn(step.factor)
    world.learn(launch.truth.cycle)
    for agent in launch.peers.agents():
        launch.watchmen[agent.name].look()


# -- network and store ----------------------------------------------------------------------------------------------------------------------


def cut(world: World, fault: Fault) -> str | None:
    """A node is cut off from the store, from the controller, or from everything."""
    found = _struck(world, fault)
    if found is None or found[0].alone:
        return None
    launch, host, agent = found
    until, other = world.clock.now + fault["lasts"], governor(world)
    what = fault.whole("what")
    if what == 1 and (other is None or other is host):
        return None
    if what == 1 and other is not None:
        launch.gov.network.cut(host, other, until)
    elif what == 0:
        host.store_cut_until = max(host.store_cut_until, until)
    else:
        host.isolated_until = max(host.isolated_until, until)
        if _holds_ranks(launch, agent) and launch.state.placement is not None and len(launch.state.placement.nodes) > 1:
            _hold(world, launch, f"{host.name} isolated", fault["lasts"])
    if what != 1:
        launch.presences[agent.name].store_away(until)
    _for_a_while(world, until)
    return (
        f"{host.name} is cut off from {CUTS[what]}{f' on {other.name}' if what == 1 and other is not None else ''} for {fault['lasts']:g} s"
    )


def _for_a_while(world: World, until: float) -> None:
    world.troubled(until)
    world.count_usable()
    world.clock.at(until + 0.001, world.count_usable)


def outage(world: World, fault: Fault) -> str | None:
    """The store is away for everybody."""
    launch = world.launch
    if launch is None or launch.over or launch.alone:
        return None
    launch.store.go_away(fault["lasts"], bool(fault["forgets"]))
    for presence in launch.presences.values():
        presence.store_away(launch.store.away_until)
    _for_a_while(world, launch.store.away_until)
    return f"the store is away for {fault['lasts']:g} s{', and all leases end meanwhile' if fault['forgets'] else ''}"


def lossy(world: World, fault: Fault) -> str | None:
    """A node's channel loses, repeats, delays and disorders messages."""
    host = host_of(world, fault)
    if host is None:
        return None
    host.lossy_s, host.lossy_until = fault["delay"], world.clock.now + fault["lasts"]
    _for_a_while(world, host.lossy_until)
    return f"the channel of {host.name} loses, repeats and disorders messages, up to {fault['delay']:g} s, for {fault['lasts']:g} s"
