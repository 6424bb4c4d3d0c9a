# SPDX-License-Identifier: Apache-2.0
"""Layers of Transformer Engine, on a GPU: the bits of eager, and those of a run without the plugin."""

from functools import partial
from typing import Any

import megatron_rig as rig
import parallel_jobs
import pytest
import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from model_specs import te_layer_spec
from rope_rig import canonical_steps
from same_bits import assert_same_bits
from worlds import World

import megagraph
from megagraph.demo.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    rig.needs_engine,
    pytest.mark.usefixtures("deterministic_engine"),
    pytest.mark.filterwarnings("ignore"),  # its own, of every kind
]

CHUNKS = {"cuda_graph_granularity": "chunk", "cuda_graph_slots": 2}
FUSED_ROPE = {"apply_rope_fusion": True, "normalization": "RMSNorm"}
# Megatron's config, its DDP's, ours; steps, sites, graphs (in each slot forwards, and backwards of training).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int, int, int]] = {
    "LayerNorm, fused RoPE": ({**FUSED_ROPE, "normalization": "LayerNorm"}, {}, {}, 8, 2, 6),
    "RMSNorm, unfused RoPE": ({"normalization": "RMSNorm"}, {}, {}, 8, 2, 6),
    "one graph": (FUSED_ROPE, {"overlap_grad_reduce": True}, CHUNKS, 100, 1, 6),
}


@pytest.mark.parametrize("case", CASES)
def test_bits(case: str) -> None:
    config, ddp, plugin, steps, sites, graphs = CASES[case]
    pair = rig.Pair(spec=te_layer_spec(), config=config, ddp=ddp, plugin=plugin)
    *given, last = parallel_jobs.steps_of(steps + 1)
    for index, micros in enumerate(given):
        pair.step(*micros)
        if index % 20 == 7:
            pair.evaluate(*micros)
            pair.evaluate(*last)
    report = pair.report()
    assert report["failures"] == [] and (report["sites"], report["graphs"]) == (sites, graphs)
    assert set(report["eager"]) == {"WARMING_UP"}
    if steps < 100:
        assert report["eager"]["WARMING_UP"] == 2 * 3 * rig.LAYERS  # of training, of evaluation
    else:
        assert report["replays"] >= 0.95 * report["calls"]


def test_padding_between_documents() -> None:
    pair = rig.Pair(spec=te_layer_spec(), config={"apply_rope_fusion": True})
    for index in range(6):
        pair.step(
            rig.Micro(lengths=(7 + index, 20), padded=(16, 32), seed=index),
            rig.Micro(lengths=(3, 9, 30), padded=(8, 16, 40), seed=50 + index),
        )
    pair.ran(WARMING_UP=2 * rig.LAYERS)


@pytest.mark.parametrize("fused_rope", [True, False])
def test_a_hybrid_model_of_its_layers(install: rig.Install, fused_rope: bool) -> None:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    install()
    config = {"apply_rope_fusion": fused_rope, "normalization": "RMSNorm"}
    pair = rig.Pair(rig.HybridTrainer, spec=hybrid_stack_spec, config=config)
    report = pair.train(parallel_jobs.steps_of(6))
    rig.ran(report, 5 * 3 * len(rig.HYBRID_PATTERN), WARMING_UP=3 * len(rig.HYBRID_PATTERN))
    assert report["model"] == "HybridModel #2"


def test_fused_weight_gradients_are_added_once(install: rig.Install) -> None:
    """Without an update, so that the gradients of a model that fuses nothing are those to expect."""
    install()
    eager, graphed, plain = (Trainer(rig.OPTIONS, spec=te_layer_spec()) for _ in range(3))
    for trainer in (eager, graphed):
        for module in trainer.chunk.decoder.layers.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
    for micros in parallel_jobs.steps_of(4):
        left = rig.step(graphed, micros, update=False)
        assert_same_bits(rig.step(eager, micros, update=False, eager=True), left)
        unfused = rig.step(plain, micros, update=False, eager=True)
        for name, grad in unfused.grads.items():
            torch.testing.assert_close(left.grads[name], grad, rtol=0, atol=0.02 * float(grad.abs().max()))
    report = megagraph.reports()[0]  # of the one that ran first
    assert report["failures"] == [] and report["replays"] == 3 * 3 * rig.LAYERS


def _model(**config: Any) -> Trainer:
    """From the same random state each time."""
    model_parallel_cuda_manual_seed(7, te_rng_tracker=True, force_reset_rng=True)
    return Trainer(rig.OPTIONS, spec=te_layer_spec(), config=config)


def test_dropout_from_its_random_streams() -> None:
    steps = parallel_jobs.steps_of(6)
    graphed = rig.compare_runs(steps, _model, hidden_dropout=0.1, attention_dropout=0.0)
    assert graphed.report["eager"] == {"WARMING_UP": 3 * rig.LAYERS}
    without = rig.train(rig.graph_config(), steps[:1], _model)
    assert not torch.equal(graphed.steps[0].losses[0], without.steps[0].losses[0])


@pytest.mark.parametrize(
    ("max_seqlen", "fused_rope", "aliased"),
    [(64, True, False), (64, False, True), (32, True, True), (32, False, False)],
)
def test_canonical_packs_have_unpatched_bits(max_seqlen: int, fused_rope: bool, aliased: bool) -> None:
    """Bug: unfused, with a table as long as the pack, every loss differed from that of the unpatched run."""
    capacity = rig.CAPACITY.replace(max_seqlen=max_seqlen)
    steps = canonical_steps(capacity, 60, aliased=aliased)
    graphed = rig.compare_runs(steps, _model, {"capacities": (capacity,)}, apply_rope_fusion=fused_rope)
    assert_same_bits(rig.train(None, steps, _model, apply_rope_fusion=fused_rope), graphed)
    goes_on = max_seqlen == 64 and not fused_rope  # from document to document
    expected = {"SIGNATURE_CHANGED": 60 * 2 * rig.LAYERS} if goes_on else {"WARMING_UP": 2 * rig.LAYERS}
    assert graphed.report["eager"] == expected
    assert graphed.report["failures"] == []


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism(world2: World, sequence_parallel: bool, dropout: float) -> None:
    """Bug: with sequence parallelism the block's random stream was swapped in twice, no layer captured."""
    transformer = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    transformer |= {"apply_rope_fusion": True, "hidden_dropout": dropout}
    given = {"make": partial(parallel_jobs.model, engine=True), "config": transformer, "num_steps": 4}
    reports = world2.run(parallel_jobs.train_pair, tensor_parallel=2, **given)
    for report in reports:
        assert report["failures"] == []
        # Its first call leaves a module in another state, which ranks tell each other of between steps.
        assert report["eager"] == {"WARMING_UP": 2 * parallel_jobs.PACKS * rig.LAYERS}
