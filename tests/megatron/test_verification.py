# SPDX-License-Identifier: Apache-2.0
"""Graphs that are wrong for reasons that nobody watches: found before they are used, by name."""

from collections.abc import Callable
from typing import Any

import megatron_rig as rig
import pytest
import torch
from torch import Tensor

import megagraph
from megagraph.decide.dispatch import Capacity
from megagraph.decide.reasons import EagerReason
from megagraph.demo.trainer import Trainer
from megagraph.megatron.graphs.dispatcher import MicroBatch
from megagraph.megatron.graphs.verifying import Verifier


@pytest.fixture
def baked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's MLP does something else in a capture, which nothing in its state tells."""
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.transformer_layer import TransformerLayer

    original, forward = TransformerLayer.__init__, MLP.forward

    def changed(layer: Any, *args: Any, **kwargs: Any) -> None:
        original(layer, *args, **kwargs)
        layer.mlp.is_baked = layer.layer_number == 2

    def forward_with_a_global(mlp: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        out, bias = forward(mlp, *args, **kwargs)
        return out * (1.5 if mlp.is_baked and rig.is_capturing() else 1.0), bias

    monkeypatch.setattr(TransformerLayer, "__init__", changed)
    monkeypatch.setattr(MLP, "forward", forward_with_a_global)


def test_a_layer_whose_graph_is_wrong_is_named_and_runs_eager(
    baked: None, pair: rig.Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.step(rig.ONE, rig.TWO, times=4)
    pair.evaluate(rig.ONE, rig.TWO)
    pair.evaluate(rig.TWO, rig.ONE)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": (2 + 2) * rig.LAYERS, "VERIFY_FAILED": 3 * 2 + 2}
    assert report["replays"] == 3 * 2 + 2
    (failure,) = report["failures"]
    assert failure.startswith(
        "layer 1 (TransformerLayer) stays eager (VERIFY_FAILED): output differs from eager"
    )
    assert failure in "\n".join(caplog.messages)
    assert report["verification"]["verified"] == 3 and report["verification"]["unverified"] == 0


def test_without_verification_it_would_replay(install: rig.Install, baked: None) -> None:
    install(verify="off")
    pair = rig.Pair()
    rig.step(pair.graphed, [rig.ONE, rig.TWO], times=3)
    report = rig.report_of(pair.graphed)
    assert report["eager"] == {"WARMING_UP": 2 * rig.LAYERS} and report["replays"] == 2 * 2 * rig.LAYERS
    assert report["failures"] == [] and report["verification"]["verified"] == 0


SMALL, LARGE = (Capacity(tokens=tokens, num_seqs=5, max_seqlen=tokens) for tokens in (32, 64))


def test_every_capacity_is_verified_on_a_micro_batch_of_its_own(install: rig.Install) -> None:
    """Bug: the last micro-batch of a warm-up was kept alone, which smaller capacities do not hold."""
    install(capacities=(SMALL, LARGE))
    pair = rig.Pair()
    pair.step(rig.ONE, rig.TWO, times=3)  # of 29 and 41 rows
    figures = pair.report()["verification"]
    assert (figures["verified"], figures["unverified"], figures["unverified_sites"]) == (2, 0, [])
    assert figures["within_spread"] == [] and figures["seconds"] > 0


def test_graphs_that_no_micro_batch_was_kept_for_are_named(install: rig.Install) -> None:
    install(capacities=(SMALL, LARGE))
    pair = rig.Pair()
    pair.step(rig.TWO, times=3)
    report = pair.report()
    figures = report["verification"]
    assert (figures["verified"], figures["unverified"]) == (1, 1) and report["replays"]
    assert figures["unverified_sites"] == [
        {
            "variant": f"training, {SMALL}",
            "site": f"layer {layer} (TransformerLayer)",
            "why": "no micro-batch that fits was kept",
        }
        for layer in range(rig.LAYERS)
    ]


def test_rows_of_padding_between_documents_may_hold_anything(pair: rig.Pair) -> None:
    """Nobody reads them: kernels may leave there whatever the memory held."""
    padded = rig.Micro(lengths=(9, 20), padded=(12, 24))
    litter = torch.zeros(64, 1, 1, device=pair.graphed.device)
    litter[9:12] = litter[32:36] = 7.0
    rig.changes_output(
        pair.graphed.chunk.decoder.layers[1].mlp,
        lambda out: out + litter.to(out) if rig.is_capturing() else out,
    )
    pair.step(padded, times=3)
    report = pair.report()
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": rig.LAYERS}
    assert report["verification"]["verified"] == 1 and report["verification"]["within_spread"] == []


def test_micro_batches_that_nothing_is_captured_for_are_not_copied(
    install: rig.Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    keep = Verifier.keep

    def noted(verifier: Verifier, batch: MicroBatch, hidden_states: Tensor) -> None:
        kept.append(batch.reason)
        keep(verifier, batch, hidden_states)

    monkeypatch.setattr(Verifier, "keep", noted)
    install()
    trainer = Trainer(rig.OPTIONS)
    rig.step(trainer, [rig.ONE, rig.TWO])
    rig.step(trainer, [rig.ONE, rig.TWO], update=False)
    waiting, _loss = rig.forward(trainer.chunk, rig.ONE, trainer.device)  # holds the slot
    rig.forward(trainer.chunk, rig.TWO, trainer.device)
    del waiting
    assert rig.report_of(trainer)["eager"] == {"WARMING_UP": 2 * rig.LAYERS, "NO_FREE_SLOT": rig.LAYERS}
    assert kept == 2 * [EagerReason.WARMING_UP]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replayed CUDA graph runs no Python")
def test_a_graph_that_goes_wrong_later_is_found_by_one_in_as_many_micro_batches(install: rig.Install) -> None:
    """What was captured is spoilt, as a stray write into a pool would do it."""
    install(verify=4)
    pair = rig.Pair()
    pair.step(rig.ONE, times=2)
    assert pair.report()["verification"]["verified"] == 1
    spoilt = {"by": 1.0}
    layer = pair.graphed.chunk.decoder.layers[0]
    original = type(layer.mlp).forward

    def spoiling(mlp: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        out, bias = original(mlp, *args, **kwargs)
        is_graph = mlp is layer.mlp and rig.is_capturing()
        return out * (spoilt["by"] if is_graph else 1.0), bias

    type(layer.mlp).forward = spoiling  # type: ignore[method-assign]
    try:
        pair.step(rig.ONE, times=3)  # a state of its own
        verified = pair.report()["verification"]["verified"]
        pair.step(rig.ONE, rig.TWO, times=3)
        assert pair.report()["verification"]["verified"] > verified
        spoilt["by"] = 1.5
        rig.step(pair.graphed, [rig.ONE, rig.TWO], times=3)
        report = next(it for it in megagraph.reports() if it["replays"])
    finally:
        type(layer.mlp).forward = original  # type: ignore[method-assign]
    assert report["eager"]["VERIFY_FAILED"]
    assert any(
        "layer 0 (TransformerLayer) stays eager (VERIFY_FAILED)" in line for line in report["failures"]
    )


GAIN = 1.0


def _from_a_closure() -> tuple[Callable[[], float], Callable[[float], None]]:
    gain = 1.0

    def change(to: float) -> None:
        nonlocal gain
        gain = to

    return lambda: gain, change


def _from_a_global() -> tuple[Callable[[], float], Callable[[float], None]]:
    return lambda: GAIN, lambda to: globals().update(GAIN=to)


@pytest.mark.gpu  # on the host, graphs bake nothing in
@pytest.mark.parametrize("source", [_from_a_closure, _from_a_global])
def test_a_value_that_nobody_can_watch_is_found_once_it_has_changed(
    install: rig.Install, source: Callable[[], Any]
) -> None:
    install(verify=1)
    read, change = source()
    pair = rig.Pair()
    for trainer in pair.both:
        rig.changes_output(trainer.chunk.decoder.layers[1].mlp, lambda out: out * read())

    def losses_differ() -> bool:
        one = rig.step(pair.eager, [rig.ONE, rig.TWO], update=False, eager=True).losses
        other = rig.step(pair.graphed, [rig.ONE, rig.TWO], update=False).losses
        return not all(map(torch.equal, one, other))

    assert not any(losses_differ() for _ in range(3))
    assert pair.report()["replays"] and not pair.report()["failures"]
    change(0.5)
    try:
        assert not any(losses_differ() for _ in range(3))  # verified before the step that is the first
        (failure,) = pair.report()["failures"]
        assert failure.startswith("layer 1 (TransformerLayer) stays eager (VERIFY_FAILED): ")
    finally:
        change(1.0)


KEPT: list[Tensor] = []


@pytest.mark.gpu  # on the host, graphs have no pools
def test_memory_that_a_module_keeps_of_its_calls_is_never_written_over(pair: rig.Pair) -> None:

    def keep(out: Tensor) -> Tensor:
        if not rig.is_capturing():
            KEPT[:] = [out.detach()]
        return out

    for trainer in pair.both:
        rig.changes_output(trainer.chunk.decoder.layers[1].mlp, keep)
    try:
        pair.step(rig.ONE, rig.TWO, times=4)
    finally:
        KEPT.clear()
    report = pair.report()
    assert report["replays"] == 0 and report["eager"] == {
        "WARMING_UP": 2 * rig.LAYERS,
        "VERIFY_FAILED": 3 * 2 * rig.LAYERS,
    }
    assert len(report["failures"]) == rig.LAYERS
    assert all("a module keeps memory of its call" in failure for failure in report["failures"])
