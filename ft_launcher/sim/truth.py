"""What really happens in the cycle that runs, which no machine sees and the checks compare with; and what is seen of it: where each rank is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft_launcher.core.evidence import RankProgress
from ft_launcher.core.rerun_report import RerunStatus
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.nursery import Exit

if TYPE_CHECKING:
    from ft_launcher.sim.launch import Launch

WAITING_PLACE = "collective:all_reduce@dp distributed.py:finish_grad_sync"
OWN_PLACE = "user train.py:forward_step"


@dataclass(slots=True)
class Truth:
    """What really happened in the cycle that runs: who was hurt on purpose, who hangs, how ranks ended, whether the `platform` (a zygote, a store) broke it, whether
    somebody really `stands_still` (`since`), which placed agents were lost, whether stacks `show` where ranks stand, whether a result was `disputed` and what was found (None: nothing
    that anybody can read), whether ranks left with 16 or 17 without a reason that was `passed_on`. The checks see it, no machine does.
    """

    cycle: int = -1
    hurt: set[int] = field(default_factory=set)
    hung: set[int] = field(default_factory=set)
    ended: dict[int, Exit] = field(default_factory=dict)
    first_zero_at: float | None = None
    platform: bool = False
    stands_still: bool = False
    since: float | None = None
    lost: set[str] = field(default_factory=set)
    shows: bool = False
    disputed: bool = False
    finding: tuple[int, RerunStatus | None] | None = None
    passed_on: bool = False
    began_at: float = 0.0


def where(launch: Launch, agent: Agent, ranks: Sequence[int]) -> dict[int, RankProgress]:
    """Where the ranks of its cycle are; nothing before they have met."""
    step, script = launch.step, launch.world.setting.script
    if step is None or agent.machine.cycle != launch.truth.cycle or not step.met:
        return {}
    page, client, truth = step.page(), script.client, launch.truth
    found = {}
    for rank in ranks:
        place = (OWN_PLACE if rank in truth.hung else WAITING_PLACE) if truth.shows and truth.hung else ""
        found[rank] = RankProgress(
            iteration=step.base + page.steps if client and page.steps else None,
            steps=page.steps if client else 0,
            section=page.section if client else None,
            since_s=launch.clock.now - page.since if page.section is not None else step.standing_s(),
            client=client,
            saved=client and page.saves > 0,
            ended=page.steps + page.saves if client else 0,
            stepping=page.section == "step",
            still_s=step.standing_s(),
            place=place if client else "",
        )
    return found
