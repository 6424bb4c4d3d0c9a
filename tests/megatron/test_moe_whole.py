# SPDX-License-Identifier: Apache-2.0
"""Whole layers of experts that are padded to a capacity in graphs: router, dispatch, experts and combine."""

import moe_jobs
import pytest
from megatron_rig import Install, Pair, forget_metrics, report_of, step, steps_of
from moe_rig import PADDED as CASES
from moe_rig import Config, ExpertTrainer
from worlds import World

from megagraph.megatron.scopes.moe import MOE

pytestmark = [
    pytest.mark.usefixtures("experts"),
    # Of shared experts that overlap, whose gradients Megatron makes on a stream of its own.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]

BOTH = ("attn", "moe")
PADDED = CASES["padded"]


def test_metrics_that_are_replaced_between_steps_are_noticed(install: Install) -> None:
    install(cuda_graph_modules=BOTH)
    trainer = ExpertTrainer(**CASES["sigmoid, bias, groups"])
    for index, micros in enumerate(steps_of(5)):
        if index == 3:
            forget_metrics()
        step(trainer, micros)
    assert report_of(trainer)["eager"] == {"WARMING_UP": 3 * 2, "ADDRESS_MOVED": 3 * 2}


def test_a_hook_on_the_experts_keeps_them_eager(install: Install) -> None:
    install(cuda_graph_modules=BOTH)
    pair = Pair(ExpertTrainer, **PADDED)
    seen: list[str] = []
    for trainer in pair.both:
        trainer.chunk.decoder.layers[1].mlp.experts.register_forward_hook(lambda *_: seen.append("experts"))
    assert pair.train(steps_of(4))["eager"] == {"WARMING_UP": 3 * 2, "FOREIGN_HOOK": 3 * 3}
    assert len(seen) == 2 * 4 * 3


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
    report = report_of(trainer)
    assert report["eager"] == {"WARMING_UP": 3 * 2, "SCOPE_UNSUPPORTED": 3 * 2}
    assert words in report["failures"][0] and "or name 'moe_router'" in report["failures"][0]


def test_ranks_with_packs_of_their_own(world2: World) -> None:
    """Bug that was: experts have the group that saves their shards over ranks, and no forward uses it."""
    for report in world2.run(moe_jobs.train_pair, scopes=(*BOTH, "mlp"), num_steps=5, **PADDED):
        assert report["eager"] == {"WARMING_UP": 3 * 2} and report["failures"] == []
