# SPDX-License-Identifier: Apache-2.0
"""Graphs that are wrong for reasons that nobody watches: found before they are used, by name."""

import dataclasses
import gc
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import megatron_rig as rig
import moe_rig
import pytest
import torch
from host_rig import Offload
from megatron_rig import OPTIONS, Micro, graph_config
from notes import noting
from same_bits import assert_same_bits
from streams import seed_streams
from torch import Tensor, nn
from watched import free_models

import megagraph
from megagraph._C import Capacity
from megagraph.bank.verify import Example
from megagraph.demo.trainer import Trainer
from megagraph.megatron.graphs import verifying
from megagraph.megatron.graphs.verifying import Verifier
from megagraph.megatron.parallel.peers import HostGroup
from megagraph.megatron.watch import LayerWatch
from megagraph.reasons import EagerReason


def _captured_as(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    """A module does something else in a capture, which nothing in its state tells."""
    rig.changes_output(module, lambda out: change(out) if rig.is_capturing() else out)


def _baked(chunk: Any) -> None:
    _captured_as(chunk.decoder.layers[1].mlp, lambda out: out * 1.5)


def test_a_layer_whose_graph_is_wrong_is_named_runs_eager_and_gets_none_again(caplog: Any) -> None:
    """Bugs: once memory moved in a suspension the wrong graph was used, unverified, or captured again."""
    pair = rig.Pair(prepare=_baked)
    pair.step(rig.ONE, rig.TWO, times=4)
    pair.evaluate(rig.ONE, rig.TWO)
    pair.evaluate(rig.TWO, rig.ONE)
    eager = {"WARMING_UP": (2 + 2) * rig.LAYERS, "VERIFY_FAILED": 3 * 2 + 2}
    (why,) = pair.ran(3 * 2 + 2, failures=1, verified=3, unverified=0, **eager)["failures"]
    assert why.startswith("layer 1 (TransformerLayer) stays eager (VERIFY_FAILED): output differs from eager")
    assert why in "\n".join(caplog.messages)
    layer, captured = pair.graphed.chunk.decoder.layers[1], []
    rig.changes_output(layer.mlp, lambda out: captured.append(rig.is_capturing()) or out)
    for _ in range(2):
        megagraph.suspend()
        for trainer in pair.both:
            for parameter in trainer.chunk.decoder.parameters():
                parameter.data = parameter.data.clone()
        megagraph.resume()
        pair.step(rig.ONE, rig.TWO, times=2)
    eager["VERIFY_FAILED"] += 2 * 2 * 2
    report = pair.ran(failures=1, unverified=1, **eager)
    assert captured and not any(captured)
    for trainer in pair.both:  # the other one takes its place, and its name
        trainer.chunk.decoder.layers = nn.ModuleList(reversed(trainer.chunk.decoder.layers))
    pair.step(rig.ONE, rig.TWO, times=3)
    assert pair.report()["replays"] == report["replays"] + 2 * 2


def test_a_layer_whose_graph_is_wrong_on_another_rank_runs_eager_here(monkeypatch: Any) -> None:
    failing, elsewhere = Verifier.failing, iter([[0], [0, 1]])

    def of_ranks(*args: Any) -> Any:
        with mock.patch.object(HostGroup, "max_over_ranks", lambda _group, said: next(elsewhere, said)):
            return failing(*args)

    monkeypatch.setattr(Verifier, "failing", of_ranks)
    pair = rig.Pair()
    pair.step(rig.ONE, rig.TWO, times=3)
    report = pair.ran(failures=1, WARMING_UP=2 * rig.LAYERS, GROUP_DISAGREED=2 * 2)
    assert report["failures"][0].split(": ")[1] == "its graph is wrong on another rank of the group"


def test_a_pack_without_any_row_that_is_read_is_no_example() -> None:
    """Bug: in it a graph that was wrong differed in nothing, and was used for all packs that came."""
    pair, pack = rig.Pair(prepare=_baked), Micro(lengths=(9, 20), padded=(12, 20))
    pair.step(pack, times=3)
    for _ in range(2):
        for trainer in pair.both:
            weight = trainer.chunk.decoder.layers[0].mlp.linear_fc1.weight
            weight.data = weight.data.clone()
        pair.step(Micro(lengths=(0,), padded=(4,)))
        pair.step(pack)
    report = pair.report()
    assert report["eager"].keys() == {"WARMING_UP", "ADDRESS_MOVED", "VERIFY_FAILED"}
    assert report["verification"]["unverified"] == 1


def test_without_verification_it_would_replay(install: rig.Install) -> None:
    install(verify="off")
    trainer = rig.ModelTrainer(prepare=_baked)
    rig.step(trainer, [rig.ONE, rig.TWO], times=3)
    rig.ran(rig.report_of(trainer), 2 * 2 * rig.LAYERS, verified=0, WARMING_UP=2 * rig.LAYERS)


def test_every_capacity_is_verified_on_a_micro_batch_of_its_own_or_named(install: rig.Install) -> None:
    """Bug: the last micro-batch of a warm-up was kept alone, which smaller capacities do not hold."""
    small, large = (Capacity(tokens=tokens, num_seqs=5, max_seqlen=tokens) for tokens in (32, 64))

    def report_after(*micros: rig.Micro) -> dict[str, Any]:
        install(capacities=(small, large))
        trainer = rig.ModelTrainer()
        rig.step(trainer, micros, times=3)
        report = rig.report_of(trainer)
        megagraph.uninstall()
        return report

    figures = report_after(rig.ONE, rig.TWO)["verification"]  # of 29 and 41 rows
    assert (figures["verified"], figures["unverified"], figures["unverified_sites"]) == (2, 0, [])
    assert figures["within_spread"] == [] and figures["seconds"] > 0
    report = report_after(rig.TWO)
    figures = report["verification"]
    assert (figures["verified"], figures["unverified"]) == (1, 1) and report["replays"]
    told = {"variant": f"training, {small}", "why": "no micro-batch that fits was kept"}
    sites = [f"layer {layer} (TransformerLayer)" for layer in range(rig.LAYERS)]
    assert figures["unverified_sites"] == [{**told, "site": site} for site in sites]


def test_rows_of_padding_between_documents_may_hold_anything(pair: rig.Pair) -> None:
    """Nobody reads them: kernels may leave there whatever the memory held."""
    padded = rig.Micro(lengths=(9, 20), padded=(12, 24))
    litter = torch.zeros(64, 1, 1, device=pair.graphed.device)
    litter[9:12] = litter[32:36] = 7.0
    _captured_as(pair.graphed.chunk.decoder.layers[1].mlp, lambda out: out + litter.to(out))
    pair.step(padded, times=3)
    assert pair.ran(verified=1, WARMING_UP=rig.LAYERS)["verification"]["within_spread"] == []


def test_micro_batches_nothing_is_captured_for_are_not_copied(trainer: Trainer, monkeypatch: Any) -> None:
    kept = noting(monkeypatch, Verifier, "keep", lambda _verifier, batch, _hidden: batch.reason)
    rig.step(trainer, [rig.ONE, rig.TWO])
    rig.step(trainer, [rig.ONE, rig.TWO], update=False)
    waiting, _loss = rig.forward(trainer.chunk, rig.ONE, trainer.device)  # holds the slot
    rig.forward(trainer.chunk, rig.TWO, trainer.device)
    del waiting
    rig.ran(rig.report_of(trainer), WARMING_UP=2 * rig.LAYERS, NO_FREE_SLOT=rig.LAYERS)
    assert kept == 2 * [EagerReason.WARMING_UP]


@pytest.mark.parametrize("warmup", [1, 2])
def test_no_micro_batch_is_kept_for_a_state_that_only_the_first_call_was_in(warmup: int) -> None:
    """Bug: with Transformer Engine, whose modules set `activation_dtype` there, it stayed for ever."""

    def mark(chunk: Any) -> None:
        mlp = chunk.decoder.layers[0].mlp
        rig.changes_output(mlp, lambda out: setattr(mlp, "dtype_of_first_call", out.dtype) or out)

    pair = rig.Pair(plugin={"cuda_graph_warmup_steps": warmup}, prepare=mark)
    pair.step(rig.ONE, rig.TWO, times=warmup + 2)
    pair.ran(verified=1, WARMING_UP=2 * warmup * rig.LAYERS)
    assert not _examples()


def _examples() -> list[Example]:
    return [it for it in gc.get_objects() if isinstance(it, Example)]


def test_no_micro_batch_is_kept_that_was_verified_again() -> None:
    pair = rig.Pair(plugin={"verify": 3})
    for verified, kept in ((0, 1), (1, 0), (1, 0), (1, 1), (2, 0)):
        pair.step(rig.ONE)
        assert (pair.report()["verification"]["verified"], len(_examples())) == (verified, kept)


def test_no_micro_batch_of_a_model_that_is_refused_is_kept() -> None:
    pair = rig.Pair(plugin={"cuda_graph_warmup_steps": 3})
    pair.step(rig.ONE)
    assert _examples()
    for trainer in pair.both:
        trainer.chunk.config.fp8 = "hybrid"
        trainer.chunk.decoder.layers = nn.ModuleList(reversed(trainer.chunk.decoder.layers))
    pair.step(rig.ONE)
    assert pair.report()["eager"]["SCOPE_UNSUPPORTED"] and not _examples()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replayed CUDA graph runs no Python")
def test_a_graph_that_goes_wrong_later_is_found_by_one_in_as_many_micro_batches() -> None:
    """What was captured is spoilt, as a stray write into a pool would do it."""
    pair = rig.Pair(plugin={"verify": 4})
    pair.step(rig.ONE, times=2)
    assert pair.report()["verification"]["verified"] == 1
    spoilt = {"by": 1.0}
    _captured_as(pair.graphed.chunk.decoder.layers[0].mlp, lambda out: out * spoilt["by"])
    pair.step(rig.ONE, times=3)  # a state of its own
    verified = pair.report()["verification"]["verified"]
    pair.step(rig.ONE, rig.TWO, times=3)
    assert pair.report()["verification"]["verified"] > verified
    spoilt["by"] = 1.5
    rig.step(pair.graphed, [rig.ONE, rig.TWO], times=3)
    report = next(it for it in megagraph.reports() if it["replays"])
    assert report["eager"]["VERIFY_FAILED"]
    assert any("layer 0 (TransformerLayer) stays eager (VERIFY_FAILED)" in it for it in report["failures"])


@pytest.mark.parametrize("every", [1, 2])
def test_what_is_verified_again_waits_for_the_state_of_its_graphs(monkeypatch: Any, every: int) -> None:
    """Bugs: graphs of a training were compared with layers that were in evaluation by then; those of passes
    without gradients inside of its steps never were, as training came first."""
    note = lambda bank, key, _example: (key.grad, bank.specs[0].module.training)  # noqa: E731
    modes = noting(monkeypatch, verifying, "verify", note)
    pair = rig.Pair(plugin={"verify": every})

    def packs(trainer: Any) -> Iterator[Micro]:
        yield rig.ONE
        with torch.no_grad():
            rig.forward(trainer.model, rig.TWO, trainer.device)
        yield rig.TWO

    for _ in range(8):
        assert_same_bits(*pair.each(lambda trainer: rig.step(trainer, packs(trainer), 2)))
        pair.evaluate(rig.ONE, rig.TWO)
    assert {*modes} == {(True, True), (False, True), (False, False)}
    assert min(map(modes.count, modes)) > 2


@pytest.mark.parametrize("moves", [True, False])
def test_what_is_verified_again_waits_for_gradients_that_are_away(monkeypatch: Any, moves: bool) -> None:
    """Bugs: a pass without gradients in training mode had graphs of training verified on freed memory; and if
    that came back where it was, graphs of the pass in their place, each time."""
    graded = noting(monkeypatch, verifying, "verify", lambda bank, key, _example: key.grad)
    pair, offloads = rig.Pair(plugin={"verify": 1}), [Offload(), Offload()]
    has_memory, there = LayerWatch.has_memory, {True: True, False: True}  # what graphs with gradients need
    monkeypatch.setattr(LayerWatch, "has_memory", lambda it, grad: there[grad] and has_memory(it, grad=grad))

    def without_gradients(trainer: Any) -> list[Tensor]:
        with rig.evaluating(trainer.model, in_training=True):
            return rig.schedule(trainer.model, [rig.ONE], 1, trainer.device, forward_only=True)

    for index in range(5):
        pair.step(rig.ONE, rig.TWO)
        there[True] = moves
        for offload, trainer in zip(offloads, pair.both, strict=True) if moves else ():
            offload.gradients(trainer.model)
        before = sum(graded)
        with torch.inference_mode(index == 4):
            assert_same_bits(*pair.each(without_gradients))
        assert sum(graded) == before
        for offload, trainer in zip(offloads, pair.both, strict=True) if moves else ():
            offload.gradients_back(trainer.model)
        there[True] = True
    assert sum(graded) > 2 and len(graded) > sum(graded)


GAIN = 1.0


@pytest.mark.gpu  # on the host, graphs bake nothing in
def test_a_value_that_nobody_can_watch_is_found_once_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = rig.Pair(
        plugin={"verify": 1},
        prepare=lambda chunk: rig.changes_output(chunk.decoder.layers[1].mlp, lambda out: out * GAIN),
    )
    pair.step(rig.ONE, rig.TWO, update=False, times=3)
    assert pair.report()["replays"] and not pair.report()["failures"]
    monkeypatch.setitem(globals(), "GAIN", 0.5)
    pair.step(rig.ONE, rig.TWO, update=False, times=3)  # verified before the step that is the first
    (failure,) = pair.report()["failures"]
    assert failure.startswith("layer 1 (TransformerLayer) stays eager (VERIFY_FAILED): ")


@pytest.mark.gpu  # on the host, graphs have no pools
def test_memory_that_a_module_keeps_of_its_calls_is_never_written_over(pair: rig.Pair) -> None:
    kept: list[Tensor] = []

    def keep(out: Tensor) -> Tensor:
        if not rig.is_capturing():
            kept[:] = [out.detach()]
        return out

    for trainer in pair.both:
        rig.changes_output(trainer.chunk.decoder.layers[1].mlp, keep)
    pair.step(rig.ONE, rig.TWO, times=4)
    eager = {"WARMING_UP": 2 * rig.LAYERS, "VERIFY_FAILED": 3 * 2 * rig.LAYERS}
    report = pair.ran(0, failures=rig.LAYERS, **eager)
    assert all("a module keeps memory of its call" in failure for failure in report["failures"])


# -- kernels that add with atomics make other bits in each run; that costs no layer its graph --------

# So wide that many terms are added, and packs long enough for several blocks of attention.
WIDE = dataclasses.replace(OPTIONS, hidden=1024, heads=8, max_tokens=2048)
CAPACITY = Capacity(tokens=2048, num_seqs=8, max_seqlen=2048)
MODELS = 8
EXPERTS = {"moe_ffn_hidden_size": 512, "normalization": "RMSNorm", "moe_grouped_gemm": True}
SCOPES: dict[str, Sequence[str]] = {
    "dense": (),
    "attention and routers": ("attn", "moe_router"),
    "and rows permuted": ("attn", "moe_router", "moe_preprocess"),
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # Transformer Engine's own, of every kind
@pytest.mark.parametrize("engine", [True, False], ids=["Transformer Engine", "our attention"])
@pytest.mark.parametrize("scopes", SCOPES)
def test_no_layer_stays_eager_for_noise(scopes: str, engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has to be one run more of its layer, and layers differ from themselves here."""
    if engine and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")  # read when an attention module is made
    make = moe_rig.ExpertTrainer if SCOPES[scopes] else rig.ModelTrainer
    of_engine = {"normalization": "RMSNorm", **(EXPERTS if SCOPES[scopes] else {})} if engine else {}
    noisy: set[str] = set()
    for seed in range(MODELS):
        options = dataclasses.replace(WIDE, seed=seed)
        micros = [Micro(lengths=(900, 20, 400, 600), seed=seed), Micro(lengths=(2048,), seed=1)]
        config = graph_config(capacities=(CAPACITY,), cuda_graph_modules=SCOPES[scopes])
        seed_streams()
        report = rig.train(config, [micros] * 3, make, options=options, engine=engine, **of_engine).report
        free_models()  # gigabytes of a GPU that others share
        assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}
        assert report["verification"]["unverified_sites"] == [] and report["replays"] > 0
        noisy |= set(report["verification"]["within_spread"])
    # Or this would show nothing. Transformer Engine's attention seldom differs from itself at such sizes.
    assert noisy or engine


def test_nothing_is_captured_while_torch_keeps_parametrized_weights(install: rig.Install) -> None:
    """Bug: the step's backward met the weight of a capture, whose graph was gone, and raised."""

    def prepare(chunk: Any) -> None:
        linear = chunk.decoder.layers[1].mlp.linear_fc2
        nn.utils.parametrize.register_parametrization(linear, "weight", nn.Tanh())

    install()
    trainer = rig.ModelTrainer(prepare=prepare)
    for _ in range(3):
        with nn.utils.parametrize.cached():
            rig.step(trainer, [rig.ONE], update=False)
    assert not rig.report_of(trainer)["graphs"]
    rig.step(trainer, [rig.ONE], update=False)
    rig.ran(rig.report_of(trainer), rig.LAYERS, WARMING_UP=3 * rig.LAYERS)


def test_graphs_that_an_evaluation_finds_due_are_compared_beside_earlier_gradients(pair: rig.Pair) -> None:
    """Bug: they were used unverified. Megatron's FP32 optimizer leaves `main_grad` in `.grad` until then."""

    def scored_and_trained(trainer: Trainer) -> rig.Step:
        with torch.no_grad():
            rig.schedule(trainer.model, [rig.ONE], 1, trainer.device, forward_only=True)
        return rig.step(trainer, [rig.ONE])

    for index in range(4):
        assert_same_bits(*pair.each(scored_and_trained), f"step {index}")
    report = pair.report()
    assert report["replays"] and report["verification"]["unverified_sites"] == []
