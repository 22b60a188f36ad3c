"""Where things are in the store: `/ft/v1/<run id>/...` (docs/design.md section 6)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one run id. Generations share them: a newer one overwrites what an older one left."""

    run_id: str

    @property
    def root(self) -> str:
        """Prefix of everything."""
        return f"/ft/v1/{self.run_id}/"

    @property
    def leader(self) -> str:
        """The controller's lease-bound key."""
        return f"{self.root}leader"

    @property
    def job(self) -> str:
        """The whole job state."""
        return f"{self.root}job"

    @property
    def spec(self) -> str:
        """What every agent of the generation must agree on, and which launch it is."""
        return f"{self.root}spec"

    @property
    def secret(self) -> str:
        """What agents show each other on the channel."""
        return f"{self.root}secret"

    @property
    def limits(self) -> str:
        """The sections' timeouts as they hold now; every agent follows it."""
        return f"{self.root}limits"

    @property
    def learning(self) -> str:
        """Everything that was learned, for the next controller."""
        return f"{self.root}learning"

    @property
    def nodes(self) -> str:
        """Prefix of the registrations."""
        return f"{self.root}nodes/"

    @property
    def reports(self) -> str:
        """Prefix of the nodes' cumulative reports."""
        return f"{self.root}reports/"

    @property
    def drains(self) -> str:
        """Prefix of the nodes that somebody wants out (`ft-launch drain`)."""
        return f"{self.root}drains/"

    @property
    def registers(self) -> str:
        """Prefix of what the store's clients keep for themselves."""
        return f"{self.root}registers/"

    def node(self, node_id: str) -> str:
        """A node's registration (on its lease)."""
        return f"{self.nodes}{node_id}"

    def report(self, node_id: str) -> str:
        """A node's report (not on its lease)."""
        return f"{self.reports}{node_id}"
