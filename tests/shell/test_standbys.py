"""The agent's view of the stores that wait for coming cycles."""

from __future__ import annotations

import asyncio

from ft_launcher.core.evidence import Address
from ft_launcher.shell.standbys import Standbys


class Desk:
    """A Standbys whose zygote only takes notes."""

    def __init__(self) -> None:
        self.opened: list[Address] = []
        self.said: list[str] = []
        self.asked: list[int] = []
        self.released: list[int] = []
        self.standbys = Standbys("node-1", "127.0.0.1", self.opened.append, self.said.append)
        self.standbys.use(lambda token, host: self.asked.append(token), self.released.append)


def test_a_store_is_asked_for_once_and_advertised_by_the_nodes_address() -> None:
    desk = Desk()
    desk.standbys.request(0.0)
    desk.standbys.request(0.0)
    assert desk.asked == [1]
    desk.standbys.ready(1, 4000)
    assert desk.opened == [Address("node-1", 4000)]


def test_an_answer_to_an_old_question_is_ignored() -> None:
    desk = Desk()
    desk.standbys.request(0.0)
    desk.standbys.use(lambda token, host: desk.asked.append(token), desk.released.append)
    desk.standbys.ready(1, 4000)
    assert desk.opened == []


def test_only_the_store_that_was_used_is_released() -> None:
    desk = Desk()
    for port in (4000, 4001):
        desk.standbys.request(0.0)
        desk.standbys.ready(desk.asked[-1], port)
    desk.standbys.in_use = Address("node-1", 4000)
    desk.standbys.release_used()
    assert desk.released == [1]
    desk.standbys.release_used()
    assert desk.released == [1]


def test_without_a_store_a_free_port_is_offered_and_said() -> None:
    desk = Desk()
    desk.standbys.request(0.0)
    desk.standbys.failed(1, "torch is not installed")
    (address,) = desk.opened
    assert not address.serving
    assert address.port > 0
    assert "torch is not installed" in desk.said[0]


def test_a_waiting_store_that_dies_is_replaced_one_in_use_is_not() -> None:
    desk = Desk()
    desk.standbys.request(0.0)
    desk.standbys.ready(1, 4000)
    desk.standbys.failed(1, "killed")
    assert [a.serving for a in desk.opened] == [True, False]
    desk.standbys.request(0.0)
    desk.standbys.ready(2, 4001)
    desk.standbys.in_use = Address("node-1", 4001)
    desk.standbys.failed(2, "killed")
    assert len(desk.opened) == 3


def test_an_urgent_request_overtakes_a_delayed_one() -> None:
    async def story() -> list[int]:
        desk = Desk()
        desk.standbys.request(3600.0)
        desk.standbys.request(0.0)
        await asyncio.sleep(0)
        return desk.asked

    assert asyncio.run(story()) == [1]
