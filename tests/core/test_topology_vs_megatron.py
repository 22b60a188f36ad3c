"""Coordinates, groups, and what is refused: equal to megatron-core's own, for every rank order.

Two ways of asking Megatron. `recorded` lets `initialize_model_parallel` itself run with `create_group` replaced by a note of its ranks: its
wiring of names to groups and its refusals are under test, and thousands of shapes take seconds. `test_every_rank_finds_itself` then takes
torch's fake process group and the public getters, for every rank of some shapes. Importing megatron.core takes seconds: one module, once.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ft_launcher.core.topology import DEFAULT_ORDER, Coords, ExpertCoords, Topology
from ft_launcher.errors import ConfigError

dist: Any = None
mpu: Any = None
FakeStore: Any = None


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """When the first of these tests runs, not when tests are collected: every worker collects, and the import takes seconds."""
    import torch.distributed
    from megatron.core import parallel_state
    from torch.testing._internal.distributed import fake_pg

    globals().update(dist=torch.distributed, mpu=parallel_state, FakeStore=fake_pg.FakeStore)


ORDERS = tuple("-".join(words) for words in itertools.permutations(DEFAULT_ORDER.split("-")))
MEGATRON_NAME = {  # ours -> group_desc of initialize_model_parallel
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "etp": "EXPERT_TENSOR_PARALLEL_GROUP",
    "edp": "EXPERT_DATA_PARALLEL_GROUP",
    "tp-pp": "MODEL_PARALLEL_GROUP",
    "dp-cp": "DATA_PARALLEL_GROUP_WITH_CP",
    "tp-cp": "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "tp-dp": "TENSOR_AND_DATA_PARALLEL_GROUP",
    "tp-dp-cp": "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    "etp-ep": "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "etp-ep-pp": "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
}

Shape = tuple[int, int, int, int, int, int | None]
"""world, tp, cp, pp, ep, etp"""


def initialize(shape: Shape, order: str) -> None:
    _, tp, cp, pp, ep, etp = shape
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        order=order,
        create_gloo_process_groups=False,
    )


@contextmanager
def world_of(world: int, rank: int = 0) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def recorded(world: int) -> Iterator[dict[str, list[tuple[int, ...]]]]:
    """Inside, initialize_model_parallel creates no group but notes its ranks here, by group_desc."""
    notes: dict[str, list[tuple[int, ...]]] = defaultdict(list)

    def note(ranks: list[int], group_desc: str, **_: object) -> None:
        notes[group_desc].append(tuple(ranks))

    with pytest.MonkeyPatch.context() as patch, world_of(world):
        patch.setattr(mpu, "create_group", note)
        yield notes


def ours(shape: Shape, order: str) -> Topology | None:
    world, tp, cp, pp, ep, etp = shape
    try:
        return Topology.build(world=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order=order)
    except ConfigError:
        return None


def compare(shape: Shape, order: str, notes: dict[str, list[tuple[int, ...]]]) -> bool:
    """Both accept with the same groups (True) or both refuse (False)."""
    notes.clear()
    topology = ours(shape, order)
    try:
        initialize(shape, order)
    except (RuntimeError, AssertionError) as refusal:
        assert topology is None, f"Megatron refuses {shape} {order}: {refusal}"
        return False
    finally:
        mpu.destroy_model_parallel()
    assert topology is not None, f"Megatron accepts {shape} {order}"
    for kind, name in MEGATRON_NAME.items():
        assert list(topology.groups(kind)) == notes[name], f"{kind} of {shape} {order}"
    return True


def shapes_of(world: int) -> list[Shape]:
    """Every combination of degrees up to the world's size, those that do not divide included."""
    sizes = range(1, world + 1)
    return [(world, *degrees) for degrees in itertools.product(sizes, sizes, sizes, sizes, (None, *sizes))]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_shapes_of_a_small_world(world: int) -> None:
    """Every shape with the default order, refusals included; every order where any is accepted."""
    with recorded(world) as notes:
        accepted = [shape for shape in shapes_of(world) if compare(shape, DEFAULT_ORDER, notes)]
        assert accepted
        for shape, order in itertools.product(accepted, ORDERS):
            compare(shape, order, notes)


@pytest.mark.parametrize(
    "shape", [(8, 2, 1, 2, 2, 1), (8, 2, 2, 2, 2, None), (16, 2, 2, 2, 4, 1), (24, 2, 3, 2, 3, None), (12, 1, 1, 3, 2, 2)]
)
def test_all_orders_of_a_larger_world(shape: Shape) -> None:
    """Degrees all above 1 and expert views unlike the dense one: some orders are refused, and the same ones as by Megatron."""
    with recorded(shape[0]) as notes:
        verdicts = [compare(shape, order, notes) for order in ORDERS]
    assert 24 <= sum(verdicts) < len(ORDERS)  # at least the 4! orders with pp last


def test_random_shapes_and_orders() -> None:
    """Larger worlds, degrees drawn from their divisors, seeded; both outcomes must occur often."""
    draw = random.Random(20)
    verdicts = []
    for world in (8, 12, 16, 30, 32, 48, 64):
        divisors = [n for n in range(1, world + 1) if world % n == 0 and n <= 8]
        with recorded(world) as notes:
            for _ in range(60):
                tp, cp, pp, ep = (draw.choice(divisors[:4]) for _ in range(4))
                shape = (world, tp, cp, pp, ep, draw.choice([None, *divisors[:3]]))
                verdicts.append(compare(shape, draw.choice(ORDERS), notes))
    assert verdicts.count(True) > 60 and verdicts.count(False) > 60


def test_a_big_job() -> None:
    """2,048 ranks with every degree above 1."""
    with recorded(2048) as notes:
        assert compare((2048, 8, 2, 8, 16, 1), DEFAULT_ORDER, notes)


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((8, 2, 1, 2, 1, None), DEFAULT_ORDER),
        ((8, 2, 1, 2, 2, 1), DEFAULT_ORDER),
        ((16, 2, 2, 2, 4, 1), DEFAULT_ORDER),
        ((8, 2, 1, 2, 1, None), "tp-cp-ep-pp-dp"),  # --use-tp-pp-dp-mapping
        ((12, 1, 3, 2, 3, None), "cp-tp-dp-ep-pp"),
        ((16, 2, 1, 2, 2, 1), "dp-ep-tp-cp-pp"),
    ],
)
def test_every_rank_finds_itself(shape: Shape, order: str) -> None:
    """Each rank in its own fake world: Megatron's getters give our coordinates and our group."""
    topology = ours(shape, order)
    assert topology is not None
    for rank in range(shape[0]):
        with world_of(shape[0], rank):
            initialize(shape, order)
            dense = Coords(
                tp=mpu.get_tensor_model_parallel_rank(),
                cp=mpu.get_context_parallel_rank(),
                dp=mpu.get_data_parallel_rank(),
                pp=mpu.get_pipeline_model_parallel_rank(),
            )
            expert = ExpertCoords(
                etp=mpu.get_expert_tensor_parallel_rank(),
                ep=mpu.get_expert_model_parallel_rank(),
                edp=mpu.get_expert_data_parallel_rank(),
                pp=mpu.get_pipeline_model_parallel_rank(),
            )
            members = tuple(dist.get_process_group_ranks(mpu.get_model_parallel_group()))
        assert (topology.coords(rank), topology.expert_coords(rank)) == (dense, expert)
        assert topology.rank_of(dense) == topology.rank_of(expert) == rank
        assert topology.group_of("tp-pp", rank) == members
