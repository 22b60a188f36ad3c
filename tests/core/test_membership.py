"""Lost or kept: every rule of membership and its opposite."""

from __future__ import annotations

import pytest

from ft_launcher.core.membership import Finding, Kept, Lost, Membership, Probe, Reply, Rules


class World:
    """A membership of some nodes and a clock."""

    def __init__(self, *nodes: str, ttl_s: float = 10.0) -> None:
        self.now = 100.0
        self.members = Membership(Rules(ttl_s))
        for node in nodes:
            self.members.joined(self.now, node)

    def after(self, seconds: float) -> World:
        self.now += seconds
        return self

    def reply(self, node: str, reply: Reply) -> list[Finding]:
        return self.members.replied(self.now, node, reply)

    def tick(self) -> list[Finding]:
        return self.members.tick(self.now)

    def silence(self, node: str, seconds: float) -> list[Finding]:
        """Probes go unanswered for some time; everything found meanwhile."""
        found: list[Finding] = []
        for _ in range(int(seconds / 0.5) + 1):
            found += self.reply(node, Reply.SILENT)
            self.after(0.5)
            found += self.tick()
        return found


def lost(findings: list[Finding]) -> list[str]:
    return [f.node_id for f in findings if isinstance(f, Lost)]


def kept(findings: list[Finding]) -> list[str]:
    return [f.node_id for f in findings if isinstance(f, Kept)]


def test_closed_and_refused_is_lost_at_once() -> None:
    world = World("a", "b")
    assert world.members.disconnected(world.now, "a") == [Probe("a")]
    (finding,) = world.reply("a", Reply.REFUSED)
    assert isinstance(finding, Lost)
    assert "connection closed and its address refuses a new one" in finding.reason


def test_closed_but_answering_is_nothing() -> None:
    world = World("a", "b")
    world.members.disconnected(world.now, "a")
    assert world.reply("a", Reply.ANSWERED) == []
    assert list(world.members.suspects()) == []


def test_closed_and_silent_with_a_lease_is_not_lost() -> None:
    world = World("a", "b")
    world.members.disconnected(world.now, "a")
    assert lost(world.silence("a", 60)) == []


def test_no_lease_and_refused_is_lost() -> None:
    world = World("a", "b")
    assert world.members.lease_gone(world.now, "a") == [Probe("a")]
    assert lost(world.reply("a", Reply.REFUSED)) == ["a"]


def test_no_lease_but_answering_is_kept_and_said_once() -> None:
    world = World("a", "b")
    world.members.lease_gone(world.now, "a")
    assert world.reply("a", Reply.ANSWERED) == [], "it may be about to leave, and has given up its lease first"
    found = world.after(1).reply("a", Reply.ANSWERED)
    assert kept(found) == ["a"]
    for _ in range(100):
        assert world.after(1).reply("a", Reply.ANSWERED) == []


def test_no_lease_silence_and_no_progress_is_lost_after_a_second() -> None:
    world = World("a", "b")
    world.members.lease_gone(world.now, "a")
    assert lost(world.reply("a", Reply.SILENT)) == []
    assert lost(world.after(0.9).tick()) == []
    found = world.after(0.2).tick()
    assert lost(found) == ["a"]
    assert "no step was begun and completed since" in found[0].reason  # type: ignore[union-attr]


def test_steps_begun_after_the_expiry_keep_a_silent_node() -> None:
    world = World("a", "b")
    world.members.lease_gone(world.now, "a")
    world.members.stepped(world.now + 0.2)
    assert lost(world.silence("a", 20)) == []


def test_a_step_begun_before_the_expiry_proves_nothing() -> None:
    world = World("a", "b")
    world.members.lease_gone(world.now, "a")
    world.members.stepped(world.now - 0.1)
    assert lost(world.silence("a", 2)) == ["a"]


def test_after_ten_ttl_without_an_answer_progress_does_not_help() -> None:
    world = World("a", "b", ttl_s=1.0)
    world.members.lease_gone(world.now, "a")
    found: list[Finding] = []
    while not lost(found) and world.now < 200:
        world.members.stepped(world.now + 0.01)
        found += world.silence("a", 0.5)
    assert 9 < world.now - 100 < 13


def test_an_answer_ends_a_silence() -> None:
    world = World("a", "b")
    world.members.lease_gone(world.now, "a")
    world.reply("a", Reply.SILENT)
    world.after(0.9).reply("a", Reply.ANSWERED)
    assert lost(world.after(0.5).tick()) == []
    world.reply("a", Reply.SILENT)
    assert lost(world.after(0.9).tick()) == []


def test_a_renewed_lease_ends_the_suspicion() -> None:
    world = World("a", "b")
    world.members.lease_gone(world.now, "a")
    world.reply("a", Reply.SILENT)
    world.members.joined(world.now, "a")
    assert lost(world.silence("a", 60)) == []
    assert list(world.members.suspects()) == []


def test_all_leases_gone_at_once_is_the_store_not_the_nodes() -> None:
    world = World("a", "b", "c")
    for node in "abc":
        world.members.lease_gone(world.now, node)
    world.after(1)
    found = [f for node in "abc" for f in world.reply(node, Reply.ANSWERED)]
    assert kept(found) == ["a", "b", "c"]
    assert "the store is in trouble" in found[0].reason  # type: ignore[union-attr]


def test_all_gone_and_all_silent_is_held_for_we_may_be_the_one_cut_off() -> None:
    world = World("a", "b", "c")
    for node in "abc":
        world.members.lease_gone(world.now, node)
    found = [f for node in "abc" for f in world.silence(node, 3)]
    assert lost(found) == []


def test_nothing_is_judged_while_the_store_is_away() -> None:
    world = World("a", "b")
    world.members.lease_gone(world.now, "a")
    world.members.store_away(world.now)
    assert lost(world.silence("a", 300)) == []
    world.members.store_back(world.now)
    assert lost(world.silence("a", 2)) == ["a"]


def test_refused_is_proof_even_while_the_store_is_away() -> None:
    world = World("a", "b")
    world.members.store_away(world.now)
    world.members.disconnected(world.now, "a")
    assert lost(world.reply("a", Reply.REFUSED)) == ["a"]


def test_doubtful_nodes_are_probed_again() -> None:
    world = World("a", "b")
    world.members.lease_gone(world.now, "a")
    assert world.after(0.1).tick() == []
    assert world.after(0.5).tick() == [Probe("a")]


@pytest.mark.parametrize("reply", list(Reply))
def test_unknown_nodes_are_nobodys_business(reply: Reply) -> None:
    world = World("a")
    assert world.reply("x", reply) == []
    assert world.members.lease_gone(world.now, "x") == []
    assert world.members.disconnected(world.now, "x") == []


def refuse(world: World, node: str, witness: str) -> list[Finding]:
    return world.members.replied(world.now, node, Reply.REFUSED, witness)


def test_a_registered_node_that_was_never_reached_needs_two_witnesses() -> None:
    """What a new controller finds: a firewall could say "refused" to it alone."""
    world = World("a", "b")
    assert refuse(world, "a", "self") == [Probe("a")]
    assert refuse(world, "a", "self") == []
    assert lost(refuse(world, "a", "b")) == ["a"]


def test_a_first_refusal_is_followed_up_until_a_witness_is_found() -> None:
    world = World("a", "b")
    refuse(world, "a", "self")
    assert world.after(0.6).tick() == [Probe("a")]
    assert world.after(0.6).tick() == [Probe("a")]
    world.reply("a", Reply.ANSWERED)
    assert world.after(0.6).tick() == []


def test_an_answer_in_between_starts_the_witnesses_anew() -> None:
    world = World("a", "b")
    refuse(world, "a", "self")
    world.reply("a", Reply.ANSWERED)
    world.members.joined(world.now, "a")
    assert lost(refuse(world, "a", "b")) == []
    assert lost(refuse(world, "a", "c")) == [], "met before: one that refuses now has to close its connection first"


def test_two_lost_at_once_are_both_lost_though_all_members_are_suspect() -> None:
    world = World("a", "b")
    found: list[Finding] = []
    for node in "ab":
        world.members.lease_gone(world.now, node)
    for _ in range(4):
        for node in "ab":
            found += world.reply(node, Reply.SILENT)
        found += world.after(0.5).tick()
    assert sorted(lost(found)) == ["a", "b"]


def test_a_node_that_has_answered_all_along_is_not_lost_by_one_silence() -> None:
    """Simulation seed 21: cut off from the store for more than ten lease times, then one other agent does not reach it."""
    world = World("a", "b", ttl_s=1.0)
    world.members.lease_gone(world.now, "a")
    for _ in range(40):
        world.after(0.5).reply("a", Reply.ANSWERED)
    world.after(0.1)
    assert lost(world.reply("a", Reply.SILENT)) == []


def test_silence_while_the_lease_held_does_not_count_afterwards() -> None:
    world = World("a", "b")
    world.members.disconnected(world.now, "a")
    world.reply("a", Reply.SILENT)
    world.after(5)
    world.members.lease_gone(world.now, "a")
    assert lost(world.after(0.5).tick()) == []
