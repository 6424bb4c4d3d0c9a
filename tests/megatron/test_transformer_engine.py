# SPDX-License-Identifier: Apache-2.0
"""Layers of Transformer Engine, on a GPU: the bits of eager, and those of a run without the plugin."""

import dataclasses
from typing import Any

import megatron_rig as rig
import parallel_jobs
import pytest
import torch
from rope_rig import canonical
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


def packs(index: int) -> list[rig.Micro]:
    """Three packs, other ones in each step."""
    return parallel_jobs.steps_of(index + 1)[index]


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("fused_rope", [True, False])
def test_bits(fused_rope: bool, normalization: str) -> None:
    pair = rig.Pair(
        spec=rig.te_layer_spec(), config={"apply_rope_fusion": fused_rope, "normalization": normalization}
    )
    pair.train(map(packs, range(8)))
    pair.evaluate(*packs(0))
    pair.evaluate(*packs(1))
    report = pair.report()
    assert report["failures"] == []
    assert report["eager"] == {"WARMING_UP": 2 * 3 * rig.LAYERS}  # of training, of evaluation


@pytest.mark.parametrize("scopes", [("attn",), ("mlp",), ("attn", "mlp")])
@pytest.mark.parametrize("overlap", [False, True])
def test_halves_of_layers(install: rig.Install, scopes: tuple[str, ...], overlap: bool) -> None:
    install(cuda_graph_modules=scopes)
    config = {"apply_rope_fusion": True, "normalization": "RMSNorm"}
    pair = rig.Pair(spec=rig.te_layer_spec(), config=config, ddp={"overlap_grad_reduce": overlap})
    for index in range(100 if overlap else 40):
        pair.step(*packs(index))
        if index % 20 == 10:
            pair.evaluate(*packs(index))
    report = pair.report()
    assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}
    assert report["replays"] >= 0.95 * report["calls"]
    assert (
        report["graphs"] == 3 * rig.LAYERS
    )  # of each half, or of layers: forwards, and backwards of training


@pytest.mark.parametrize("overlap", [False, True])
def test_layers_in_one_graph(install: rig.Install, overlap: bool) -> None:
    install(cuda_graph_granularity="chunk", cuda_graph_slots=2)
    config = {"apply_rope_fusion": True, "normalization": "RMSNorm"}
    pair = rig.Pair(layers=4, spec=rig.te_layer_spec(), config=config, ddp={"overlap_grad_reduce": overlap})
    for index in range(100):
        pair.step(*packs(index))
        if index % 40 == 10:
            pair.evaluate(*packs(index))
    report = pair.report()
    assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}
    assert report["replays"] >= 0.95 * report["calls"]
    assert (report["layers"], report["sites"]) == (4, 1)
    assert report["graphs"] == 3 * 2  # forwards, and backwards of training, in each slot


def test_padding_between_documents() -> None:
    pair = rig.Pair(spec=rig.te_layer_spec(), config={"apply_rope_fusion": True})
    for index in range(6):
        pair.step(
            rig.Micro(lengths=(7 + index, 20), padded=(16, 32), seed=index),
            rig.Micro(lengths=(3, 9, 30), padded=(8, 16, 40), seed=50 + index),
        )
    report = pair.report()
    assert report["failures"] == []
    assert report["eager"] == {"WARMING_UP": 2 * rig.LAYERS}


@pytest.mark.parametrize("fused_rope", [True, False])
def test_a_hybrid_model_of_its_layers(install: rig.Install, fused_rope: bool) -> None:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    install()
    config = {"apply_rope_fusion": fused_rope, "normalization": "RMSNorm"}
    report = rig.Pair(rig.HybridTrainer, spec=hybrid_stack_spec, config=config).train(map(packs, range(6)))
    assert report["model"] == "HybridModel #2" and report["failures"] == []
    assert report["eager"] == {"WARMING_UP": 3 * len(rig.HYBRID_PATTERN)}
    assert report["replays"] == 5 * 3 * len(rig.HYBRID_PATTERN)


def _fuse_weight_gradients(trainer: Trainer) -> None:
    for module in trainer.chunk.decoder.layers.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def test_fused_weight_gradients_are_added_once(install: rig.Install) -> None:
    """Without an update, so that the gradients of a model that fuses nothing are those to expect."""
    install()
    eager, graphed, plain = (Trainer(rig.OPTIONS, spec=rig.te_layer_spec()) for _ in range(3))
    for trainer in (eager, graphed):
        _fuse_weight_gradients(trainer)
    for index in range(4):
        left = rig.step(graphed, packs(index), update=False)
        assert_same_bits(rig.step(eager, packs(index), update=False, eager=True), left)
        unfused = rig.step(plain, packs(index), update=False, eager=True)
        for name, grad in unfused.grads.items():
            torch.testing.assert_close(left.grads[name], grad, rtol=0, atol=0.02 * float(grad.abs().max()))
    report = megagraph.reports()[0]  # of the one that ran first
    assert report["failures"] == [] and report["replays"] == 3 * 3 * rig.LAYERS


def _model(**config: Any) -> Trainer:
    """From the same random state each time."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7, te_rng_tracker=True, force_reset_rng=True)
    return Trainer(rig.OPTIONS, spec=rig.te_layer_spec(), config=config)


def test_dropout_from_its_random_streams() -> None:
    steps = [packs(index) for index in range(6)]
    graphed = rig.compare_runs(steps, _model, hidden_dropout=0.1, attention_dropout=0.0)
    assert graphed.report["eager"] == {"WARMING_UP": 3 * rig.LAYERS}
    without = rig.train(rig.graph_config(), steps[:1], _model)
    assert not torch.equal(graphed.steps[0].losses[0], without.steps[0].losses[0])


@pytest.mark.parametrize("aliased", [False, True])
@pytest.mark.parametrize("fused_rope", [True, False])
@pytest.mark.parametrize("max_seqlen", [64, 32], ids=["all the tokens", "half of them"])
def test_canonical_packs_have_the_bits_of_an_unpatched_run(
    max_seqlen: int, fused_rope: bool, aliased: bool
) -> None:
    """Bug: unfused, with a table as long as the pack, every loss differed from that of the unpatched run."""
    capacity = rig.CAPACITY.replace(max_seqlen=max_seqlen)
    lengths = [(10, 30, 24), (32, 32), (2, 2, 28, 32), (16, 16, 16, 16), (31, 1, 32)]
    steps: list[list[rig.Micro]] = [
        [
            canonical(lengths[(index + m) % 5], capacity=capacity, seed=7 * index + m, aliased=aliased)
            for m in range(2)
        ]
        for index in range(60)
    ]
    graphed = rig.compare_runs(steps, _model, {"capacities": (capacity,)}, apply_rope_fusion=fused_rope)
    assert_same_bits(rig.train(None, steps, _model, apply_rope_fusion=fused_rope), graphed)
    goes_on = max_seqlen == 64 and not fused_rope  # from document to document
    expected = {"SIGNATURE_CHANGED": 60 * 2 * rig.LAYERS} if goes_on else {"WARMING_UP": 2 * rig.LAYERS}
    assert graphed.report["eager"] == expected
    assert graphed.report["failures"] == []


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism(world2: World, sequence_parallel: bool, dropout: float) -> None:
    """Bug: with sequence parallelism the block's random stream was swapped in once more for the capture, and
    no layer, each with a kernel that draws without effect, was captured."""
    transformer = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": sequence_parallel,
        "apply_rope_fusion": True,
        "hidden_dropout": dropout,
    }
    job, make = parallel_jobs.train_pair, parallel_jobs.of_engine
    reports = world2.run(job, tensor_parallel=2, make=make, config=transformer)
    for report in reports:
        assert report["failures"] == []
        # Its first call leaves a module in another state, which ranks tell each other of between steps.
        assert report["eager"] == {"WARMING_UP": 2 * parallel_jobs.PACKS * rig.LAYERS}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fp8_is_refused_by_name(install: rig.Install, recipe: str) -> None:
    install()
    options = dataclasses.replace(rig.OPTIONS, hidden=64, heads=2)
    trainer = Trainer(options, spec=rig.te_layer_spec(), config={"fp8": "hybrid", "fp8_recipe": recipe})
    left: rig.Step = rig.step(trainer, [canonical((64,))])
    assert not any(grad.isnan().any() for grad in left.grads.values())
    (report,) = megagraph.reports()
    assert report["eager"] == {"SCOPE_UNSUPPORTED": rig.LAYERS}
