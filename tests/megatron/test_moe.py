# SPDX-License-Identifier: Apache-2.0
"""Layers of experts: attention in graphs and experts eager, with the bits of mode `eager`."""

from collections.abc import Callable, Iterator

import moe_rig
import pytest
from megatron_rig import CAPACITY, Micro, graph_config

from megagraph.config import GraphConfig

pytestmark = pytest.mark.megatron

Install = Callable[..., GraphConfig]


@pytest.fixture(autouse=True)
def experts() -> Iterator[None]:
    with moe_rig.experts_on_cpu():
        yield


def steps_of(count: int, *, masks: bool = False) -> list[list[Micro]]:
    """Steps of three packs, no two alike, with tails of up to half the capacity."""

    def pack(index: int) -> Micro:
        lengths = tuple(3 + (5 * index + 7 * place) % 9 for place in range(1 + index % 5))
        return Micro(
            lengths=lengths,
            seed=index,
            tail=(7 * index) % (CAPACITY.tokens - sum(lengths)) if index % 2 else 0,
            mask_seed=index if masks else None,
        )

    return [[pack(3 * number + place) for place in range(3)] for number in range(count)]


@pytest.mark.parametrize("case", moe_rig.CASES)
def test_bits(case: str) -> None:
    steps = steps_of(20)
    changes = moe_rig.CASES[case]
    eager = moe_rig.run(graph_config(mode="eager"), "EE", steps, **changes)
    graphed = moe_rig.run(graph_config(cuda_graph_modules="attn"), "EE", steps, **changes)
    for index, (one, other) in enumerate(zip(eager.steps, graphed.steps, strict=True)):
        moe_rig.assert_same_step(one, other, f"step {index}:")
    report = graphed.report
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * 2}
    assert report["replays"] >= 0.95 * (report["calls"] - 3 * 2)
    assert report["verification"]["verified"] == 1 and report["verification"]["unverified"] == 0
