# SPDX-License-Identifier: Apache-2.0
"""Neighbouring layers in one graph for each pass: the bits of eager, cut where needed and nowhere else."""

import dataclasses
import gc
import itertools
import logging
from collections.abc import Callable
from typing import Any

import megatron_rig as rig
import moe_rig
import parallel_jobs
import pipeline_jobs
import pytest
from worlds import World, on_ranks

import megagraph
from benchmarks.subjects.pipelines import Cut
from megagraph.bank.backends import Backend, CudaBackend
from megagraph.bank.capture import CapturePlan

LAYERS = 6
FULL = rig.Micro(lengths=(64,), seed=2)
CHUNKS = {"cuda_graph_granularity": "chunk"}
GROUPED = {"kinds": "E-E", "is_grouped": True, **moe_rig.GROUPED["swiglu"]}


@pytest.fixture
def pair() -> rig.Pair:
    """One runs eager, the other in chunks."""
    return rig.Pair(layers=LAYERS, plugin=CHUNKS)


def sites(pair: rig.Pair) -> list[str]:
    """The names of the sites that have graphs, as present."""
    bank = rig.the_plugin().graphs_of_model(pair.graphed.chunk).captures.bank
    return [spec.within("") for index, spec in enumerate(bank.specs) if index not in bank.eager_sites]


def test_all_layers_have_one_graph_for_each_pass(pair: rig.Pair) -> None:
    pair.step(rig.ONE, rig.TWO, FULL, times=3)
    pair.evaluate(rig.ONE, FULL)
    pair.evaluate(rig.TWO, rig.ONE)
    assert sites(pair) == ["layers 0 to 5"]
    # Calls are those of layers, also where one graph makes them.
    figures = {"layers": LAYERS, "sites": 1, "graphs": 3, "verified": 2}
    report = pair.ran((2 * 3 + 2) * LAYERS, **figures, WARMING_UP=(3 + 2) * LAYERS)
    # Bug: what made the second state was compared with the names of before the layers were joined.
    assert report["states"][1].startswith("layers 0 to 5.layer 0: training True -> False, ")


def _layer(pair: rig.Pair, index: int) -> Any:
    return pair.graphed.chunk.decoder.layers[index]


WRONG: dict[str, Callable[[Any], object]] = {
    "CAPTURE_FAILED": rig.breaks,
    "VERIFY_FAILED": lambda mlp: rig.changes_output(mlp, lambda out: out * (1 + rig.is_capturing())),
}
FAULTS = {"FOREIGN_HOOK": lambda mlp: mlp.register_forward_hook(lambda *_args: None), **WRONG}


@pytest.mark.parametrize(
    ("at_fault", "joined"),
    [
        *(({2: reason}, ["layers 0 to 1", "layers 3 to 5"]) for reason in WRONG),
        (dict(zip((1, 3, 4), FAULTS, strict=True)), ["layer 0", "layer 2", "layer 5"]),
    ],
    ids=[*WRONG, "several"],
)
def test_a_layer_at_fault_is_named_and_cut_out(pair: rig.Pair, at_fault: dict[int, str], joined: Any) -> None:
    for index, reason in at_fault.items():
        FAULTS[reason](_layer(pair, index).mlp)
    pair.step(rig.ONE, rig.TWO, times=3)
    assert sites(pair) == joined
    eager, replays = dict.fromkeys(at_fault.values(), 2 * 2), 2 * 2 * (LAYERS - len(at_fault))
    report = pair.ran(replays, failures=len(at_fault), WARMING_UP=2 * LAYERS, **eager)
    for failure, (index, reason) in zip(sorted(report["failures"]), at_fault.items(), strict=True):
        assert failure.startswith(f"layer {index} (TransformerLayer)") and reason in failure


def test_layers_that_fail_only_together_stay_apart(pair: rig.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []  # layers in the graph that is being captured, or of a warm-up of one
    for backend in (Backend, CudaBackend):

        def record(self: Any, pool: int, body: Any, *given: Any, original: Any = backend.record) -> Any:
            return original(self, pool, lambda: (ran.clear(), body())[1], *given)

        monkeypatch.setattr(backend, "record", record)
    warm_up = CapturePlan._run_once
    monkeypatch.setattr(CapturePlan, "_run_once", lambda *args: (ran.clear(), warm_up(*args))[1])
    for index in range(LAYERS):  # at most two in one graph
        rig.breaks(_layer(pair, index).mlp, lambda: rig.is_capturing() and (ran.append(0) or len(ran) > 2))
    pair.step(rig.ONE, rig.TWO, times=3)
    assert sites(pair) == [f"layer {index}" for index in range(LAYERS)]
    pair.ran(WARMING_UP=2 * LAYERS)


def test_a_hook_that_comes_later_cuts_and_one_that_goes_joins_again(pair: rig.Pair) -> None:
    pair.step(rig.ONE, rig.TWO, times=2)
    assert sites(pair) == ["layers 0 to 5"]
    handle = _layer(pair, 3).register_forward_hook(lambda *_args: None)
    pair.step(rig.ONE, rig.TWO, times=2)
    assert sites(pair) == ["layers 0 to 2", "layers 4 to 5"]
    handle.remove()
    pair.step(rig.ONE, rig.TWO, times=2)
    assert sites(pair) == ["layers 0 to 5"]
    weight = _layer(pair, 4).mlp.linear_fc1.weight
    weight.data = weight.data.clone()  # which is captured again as one
    pair.step(rig.ONE, rig.TWO, times=2)
    assert sites(pair) == ["layers 0 to 5"] and len(pair.report()["failures"]) == 1
    assert pair.report()["eager"].keys() == {"WARMING_UP", "FOREIGN_HOOK", "ADDRESS_MOVED"}


@pytest.mark.parametrize("is_kept", [True, False])
def test_other_layers_are_joined_anew(pair: rig.Pair, is_kept: bool) -> None:
    """Bug: a step without graphs, and the one after it, asked a layer that nobody had any more."""
    pair.step(rig.ONE, times=3)
    kept = []
    for trainer in pair.both:
        kept += [trainer.chunk.decoder.layers[5]] * is_kept
        del trainer.chunk.decoder.layers[5]
        megagraph.watch(trainer.chunk, key=int)
    gc.collect()
    pair.each(lambda trainer: rig.step(trainer, [rig.TWO], eager=True))
    pair.step(rig.TWO, times=3)
    assert sites(pair) == ["layers 0 to 4"] and len(kept) == 2 * is_kept


def test_scopes_that_leave_gaps_join_nothing_and_a_sentence_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pair = rig.Pair(layers=3, plugin={**CHUNKS, "cuda_graph_modules": "attn"})
    with caplog.at_level(logging.WARNING, logger="megagraph"):
        pair.step(rig.ONE, rig.TWO, times=3)
    assert pair.report()["sites"] == 3
    assert "cuda_graph_granularity='chunk' joins no layers: cuda_graph_modules leaves" in caplog.text


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize(
    ("make", "given", "layers"), [(rig.HybridTrainer, {}, 4), (moe_rig.ExpertTrainer, GROUPED, 3)]
)
def test_layers_of_other_models_are_joined(make: rig.Make, given: dict[str, Any], layers: int) -> None:
    report = rig.Pair(make, plugin=CHUNKS, **given).train(rig.steps_of(4, masks=True))
    rig.ran(report, layers=layers, sites=1, WARMING_UP=3 * layers)


@on_ranks(2)
def test_buckets_are_reduced_while_the_backward_goes_on() -> None:
    """That of the last layers before the graph of the first ones is launched."""
    cut, options = Cut(stages=1), dataclasses.replace(rig.OPTIONS, layers=LAYERS, heads=4)
    cut.start()
    megagraph.install(rig.graph_config(**CHUNKS))
    trainer = pipeline_jobs.Trainer(cut, options, ddp=BUCKETS)
    first: Any = next(trainer.models[0].decoder.layers[0].parameters())
    had: list[bool] = []  # gradients of the first layer at each reduction
    trainer.train([rig.ONE], eager=False)
    trainer.at_reduction = lambda: had.append(bool(first.main_grad.any()))
    for micro in (rig.ONE, rig.TWO):
        trainer.train([micro], eager=False)
    (report,) = megagraph.reports()
    assert report["replays"] == 2 * LAYERS and not had[0] and had[-1]


BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 20_000}
SHARDED = {**BUCKETS, "use_distributed_optimizer": True, "overlap_param_gather": True}
# Of each chunk: how many layers and sites, which end where buckets do.
TRAININGS: dict[str, tuple[dict[str, Any], int, range]] = {
    "buckets": ({"cut": Cut(stages=1), "ddp": SHARDED}, LAYERS, range(2, LAYERS)),
    "pipelines": ({"cut": Cut(chunks=2)}, 3, range(1, 2)),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_bits_on_ranks(world2: World, name: str) -> None:
    """Buckets are reduced in the order of eager, and gathered in the forward."""
    options, layers, sites = TRAININGS[name]
    reports = world2.run(pipeline_jobs.train_pair, layers=layers, plugin=CHUNKS, **options)
    for report in itertools.chain(*reports):
        assert report["sites"] in sites
        rig.ran(report, layers=layers, WARMING_UP=report["first"] * layers)


def test_ranks_that_share_layers_are_cut_alike(world2: World) -> None:
    """Rank 0 alone is at fault in layer 1 of two."""
    given = {"config": {"tensor_model_parallel_size": 2}, "plugin": CHUNKS, "how": {0: "capture"}}
    for report in world2.run(parallel_jobs.disagree, tensor_parallel=2, **given):
        assert (report["layers"], report["sites"]) == (2, 2)
        assert report["replays"] > 0 and len(report["failures"]) == 1
