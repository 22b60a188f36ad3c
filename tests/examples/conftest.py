"""One forking parent for all tests of the examples."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from example_ranks import EXAMPLES, Nursery

sys.path.insert(0, str(EXAMPLES / "megatron_gpt"))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    from options import PRELOAD

    parent = Nursery(PRELOAD.split(","))
    yield parent
    parent.close()
