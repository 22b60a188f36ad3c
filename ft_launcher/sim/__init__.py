"""The production core in a fake world: virtual time, seeded faults, invariants checked at every step."""
