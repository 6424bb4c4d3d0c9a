# SPDX-License-Identifier: Apache-2.0
"""Layers of experts in each way that they are graphed: the bits of mode `eager`, in all a step leaves."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import moe_cases
import moe_rig
import pytest

from megagraph.megatron.specs import with_grouped_experts

pytestmark = [
    pytest.mark.megatron,
    # Of shared experts that overlap, whose gradients Megatron makes on a stream of its own.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
    # Of torch's compiler, which Megatron's fused activations run through on a GPU.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
STEPS = 8
KINDS = "EE"


class Way(NamedTuple):
    """A way to graph layers of experts: what is named, the models, and whether their experts are grouped."""

    scopes: str | tuple[str, ...]
    cases: dict[str, dict[str, Any]]
    is_grouped: bool = False


WAYS = {
    "attention": Way("attn", moe_rig.CASES),
    "attention, routers": Way(("attn", "moe_router"), moe_cases.ROUTED),
    "attention, routers, permutation": Way(("attn", "moe_router", "moe_preprocess"), moe_cases.PERMUTED),
    "padded experts": Way(("attn", "moe"), moe_cases.PADDED),
    "grouped experts": Way((), {**moe_cases.GROUPED, **moe_cases.GROUPED_ON_GPU}, is_grouped=True),
}
TABLE = [
    pytest.param(way, case, marks=[pytest.mark.gpu] if case in moe_cases.GROUPED_ON_GPU else [])
    for way, (_, cases, _) in WAYS.items()
    for case in cases
]


@pytest.fixture(autouse=True)
def experts() -> Iterator[None]:
    moe_rig.forget_metrics()
    with moe_rig.experts_on_cpu():
        yield


@pytest.mark.parametrize(("way", "case"), TABLE)
def test_bits(way: str, case: str) -> None:
    scopes, cases, is_grouped = WAYS[way]
    if "moe_preprocess" in scopes and not moe_cases.can_permute(cases[case]):
        pytest.skip("this release permutes into shapes that only the device knows")
    spec = with_grouped_experts(moe_rig.block_spec(KINDS)) if is_grouped else None
    report = moe_rig.compare(KINDS, moe_rig.steps_of(STEPS), scopes, spec=spec, **cases[case])
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * 2}
    assert report["calls"] == STEPS * 3 * 2 and report["replays"] == (STEPS - 1) * 3 * 2
    assert report["verification"]["verified"] == 1 and report["verification"]["unverified"] == 0
    assert report["layers"] == 2 and report["graphs"] == 2 * 2
