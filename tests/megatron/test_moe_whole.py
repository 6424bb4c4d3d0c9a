# SPDX-License-Identifier: Apache-2.0
"""Whole layers of experts that are padded to a capacity in graphs: router, dispatch, experts and combine."""

from collections.abc import Callable, Iterator
from typing import Any

import moe_cases
import moe_jobs
import moe_rig
import pytest
from megatron_rig import step
from moe_rig import ExpertTrainer, compare_steps, expert_step, steps_of
from worlds import World

import megagraph
from megagraph.config import GraphConfig
from megagraph.megatron.scopes.moe import MOE

pytestmark = [
    pytest.mark.megatron,
    # Of shared experts that overlap, whose gradients Megatron makes on a stream of its own.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]

Install = Callable[..., GraphConfig]
Config = dict[str, Any]
BOTH = ("attn", "moe")
PADDED = moe_cases.PADDED["padded"]
BIAS = moe_cases.PADDED["sigmoid, bias, groups"]


@pytest.fixture(autouse=True)
def experts() -> Iterator[None]:
    moe_rig.forget_metrics()
    with moe_rig.experts_on_cpu():
        yield


def test_metrics_that_are_replaced_between_steps_are_noticed(install: Install) -> None:
    install(cuda_graph_modules=BOTH)
    trainer = ExpertTrainer(**BIAS)
    for index, micros in enumerate(steps_of(5)):
        if index == 3:
            moe_rig.forget_metrics()
        expert_step(trainer, micros)
    (report,) = megagraph.reports()
    assert report["eager"] == {"WARMING_UP": 3 * 2, "ADDRESS_MOVED": 3 * 2}


def test_a_hook_on_the_experts_keeps_them_eager(install: Install) -> None:
    install(cuda_graph_modules=BOTH)
    trainers = [ExpertTrainer(**PADDED) for _ in range(2)]
    seen: list[str] = []
    for trainer in trainers:
        trainer.chunk.decoder.layers[1].mlp.experts.register_forward_hook(lambda *_: seen.append("experts"))
    compare_steps(trainers, steps_of(4))
    assert len(seen) == 2 * 4 * 3
    assert megagraph.reports()[1]["eager"] == {"WARMING_UP": 3 * 2, "FOREIGN_HOOK": 3 * 3}


def test_a_dispatcher_keeps_nothing_of_a_capture(install: Install) -> None:
    """Its tensors would take their memory out of the slot's pool."""
    install(cuda_graph_modules=BOTH)
    trainer = ExpertTrainer(**PADDED)
    for micros in steps_of(3):
        step(trainer, micros)
    for layer in trainer.chunk.decoder.layers:
        dispatcher = layer.mlp.token_dispatcher
        assert dispatcher.probs is None and dispatcher.routing_map is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_token_dispatcher_type": "allgather"}, "the dispatcher 'allgather' counts rows on the host"),
        (
            {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_overlap": True},
            "moe_shared_expert_overlap=True is not supported yet",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            "'moe' in recompute_modules is not supported yet",
        ),
    ],
)
def test_what_waits_or_forks_is_refused_by_name(install: Install, changes: Config, words: str) -> None:
    install(cuda_graph_modules=BOTH)
    trainer = ExpertTrainer(**{**PADDED, **changes})
    assert words in str(MOE.unsupported(trainer.chunk.decoder.layers[0]))
    for micros in steps_of(2):
        step(trainer, micros)
    (report,) = megagraph.reports()
    assert report["eager"] == {"WARMING_UP": 3 * 2, "SCOPE_UNSUPPORTED": 3 * 2}
    assert words in report["failures"][0] and "or name 'moe_router'" in report["failures"][0]


def test_ranks_with_packs_of_their_own(world2: World) -> None:
    """Bug that was: experts have the group that saves their shards over ranks, and no forward uses it."""
    for report in world2.run(moe_jobs.train_pair, scopes=(*BOTH, "mlp"), num_steps=5, **PADDED):
        assert report["eager"] == {"WARMING_UP": 3 * 2} and report["failures"] == []
