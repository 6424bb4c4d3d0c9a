# SPDX-License-Identifier: Apache-2.0
"""Overlap with `delay_wgrad_compute` in one process. On the CPU core's linears do as Transformer Engine's."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import megatron_rig as rig
import moe_rig
import overlap_rig as overlap
import parallel_jobs
import pytest
import torch
from megatron_rig import Micro
from notes import told
from overlap_rig import CALLS, COUNTS, FIRST, REDUCES, compare, steps_of, train, train_eager
from same_bits import assert_same_bits
from test_overlap_alone import engines

from megagraph.megatron.parallel.ddp import _late_gradients

pytestmark = [pytest.mark.megatron, pytest.mark.both, pytest.mark.usefixtures("deterministic_engine")]

STEPS = 7 if rig.ON_GPU else 4
BREAKS = 2  # the step that raises
HOOKED = 2  # the first step with a hook
HOW = ["unfused", "fused"]


@contextlib.contextmanager
def late_alone(trainer: Any) -> Iterator[None]:
    """No backward of a layer adds to a late weight, and what comes later to those of that layer alone."""
    finish, numbers = layer_node().backward_dw, itertools.count()
    grads = [linear.weight.main_grad for linear in overlap.linears_of(trainer.chunk)]
    before = [torch.zeros_like(grad) for grad in grads]

    def added() -> list[bool]:
        torch.cuda.synchronize()
        old, before[:] = [*before], [grad.clone() for grad in grads]
        return [not torch.equal(*each) for each in zip(old, grads, strict=True)]

    def backward_dw(node: Any) -> Any:
        if node.name not in (FIRST, "attn"):  # of experts
            return finish(node)
        assert not any(added())
        finish(node)
        layer = CALLS - 1 - next(numbers) % CALLS
        assert added() == [it // 2 == layer for it in range(len(grads))]

    with mock.patch.object(layer_node(), "backward_dw", backward_dw):
        yield
    assert next(numbers) > 0


@engines
@pytest.mark.parametrize("ddp", [{}, REDUCES], ids=["reduced at the end", "reduced meanwhile"])
@pytest.mark.parametrize("delays", HOW)
def test_weights_whose_gradients_come_later_have_bits_of_others(delays: str, ddp: Any, engine: bool) -> None:
    steps = steps_of(STEPS, masks=True)
    at_once = train_eager(steps, delays=f"{delays} at once", engine=engine)
    for mode in ("eager", "graph"):
        around = rig.at(STEPS - 1, late_alone)
        later = train(steps, mode, delays=delays, engine=engine, ddp=ddp, around=around)
        assert_same_bits(at_once, later, mode)
        overlap.check_calls(later.report, mode, sum(map(len, steps)))


@engines
@pytest.mark.parametrize("scopes", [("attn",), ("moe_router",), ("attn", "moe_router")], ids="+".join)
def test_each_gradient_is_made_by_the_graph_or_by_the_node(scopes: tuple[str, ...], engine: bool) -> None:
    """What shared experts and attention leave, of which one may be eager; a dense layer's MLP always is."""
    for kinds in ("EE", "-E"):
        more = {**moe_rig.SHARED, "engine": engine}
        compare(steps_of(3, fills=False), scopes, kinds=kinds, delays="unfused", **more)


@engines
@pytest.mark.parametrize("at", ["", f"{FIRST} backward"])
@pytest.mark.parametrize("delays", HOW)
def test_eager_micro_batches_between_graphed_ones_make_their_own(delays: str, at: str, engine: bool) -> None:
    """One in each step fits no capacity; others begin while graphs are suspended, from a place in it on."""

    @contextlib.contextmanager
    def suspended(_trainer: Any) -> Iterator[None]:
        suspend = rig.the_plugin().set_suspended
        suspends = overlap.in_nodes(lambda place: suspend(True) if place == at else None, behind=True)
        with suspends, told(suspend, not at, False):
            yield

    around = rig.at(2, suspended)  # a step of four
    misfit = Micro(lengths=parallel_jobs.MISFIT)
    steps = [[*micros[:1], misfit, *micros[1:]] for micros in steps_of(STEPS, fills=False)]
    graphed = train(steps, "graph", delays=delays, around=around, engine=engine)
    assert_same_bits(train(steps, "eager", delays=delays, engine=engine), graphed)
    assert set(graphed.report["eager"]) == {"WARMING_UP", "TOO_MANY_SEQUENCES", "SUSPENDED"}
    assert graphed.report["failures"] == []


def layer_node() -> Any:
    """The class of a layer's nodes, wherever this release has it."""
    try:
        from megatron.core.models.common import utils as module
    except ImportError:
        from megatron.core.models.gpt import fine_grained_callables as module
    return module.TransformerLayerNode


@pytest.mark.parametrize("number", [CALLS, CALLS + 1])
def test_a_step_that_raises_before_all_is_finished_leaves_the_next_one_right(number: int) -> None:
    steps = steps_of(BREAKS + 2)

    @contextlib.contextmanager
    def breaking(_trainer: Any) -> Iterator[None]:
        lost = overlap.in_nodes(overlap.raising(f"{FIRST} backward", number), behind=True)
        with pytest.raises(OSError, match="lost"), lost:
            yield
        rig.metrics()

    graphed = train(steps, "graph", delays="unfused", around=rig.at(BREAKS, breaking))
    assert_same_bits(train_eager([*steps[:BREAKS], *steps[BREAKS + 1 :]], delays="unfused"), graphed)
    rig.ran(graphed.report, WARMING_UP=COUNTS[0] * CALLS)


@pytest.mark.parametrize(("layer", "since"), [*((layer, 0) for layer in range(CALLS)), (0, COUNTS[2] - 1)])
def test_a_layer_whose_gradients_are_left_out_fails_the_step(layer: int, since: int) -> None:
    """Which eager would go on without; `since` a micro-batch, be it the last one of the step."""
    finish, passes = layer_node().backward_dw, itertools.count()

    def backward_dw(node: Any) -> None:
        number, behind = divmod(next(passes), CALLS) if node.name in (FIRST, "attn") else (-1, 0)
        if number < since or CALLS - 1 - behind != layer:
            finish(node)

    leaves_out = mock.patch.object(layer_node(), "backward_dw", backward_dw)
    with pytest.raises(RuntimeError, match="was never finished"):
        train(steps_of(3), "graph", delays="unfused", around=rig.at(2, lambda _: leaves_out))


def test_a_hook_of_somebody_elses_on_what_comes_late_keeps_its_layer_eager() -> None:
    def hooked(trainer: Any) -> None:
        (first, *_) = overlap.linears_of(trainer.chunk)
        first.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(0))

    calls: list[int] = []
    steps, around = steps_of(STEPS), rig.at(HOOKED, hooked)
    graphed = train(steps, "graph", delays="unfused", around=around)
    of_graphs, calls = calls, []
    assert_same_bits(train(steps, "eager", delays="unfused", around=around), graphed)
    assert len(of_graphs) == len(calls) == sum(map(len, steps[HOOKED:]))
    assert set(graphed.report["eager"]) == {"WARMING_UP", "STATE_CHANGED", "FOREIGN_HOOK"}


def test_late_gradients_of_a_layer_that_asks_in_another_way_are_told_of_late_as_well() -> None:
    """It may find nothing to make while nothing runs, and say so."""
    late, other = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    late.skip_backward_post_hook = True  # type: ignore[attr-defined]
    asks = mock.Mock(side_effect=RuntimeError("Pop empty queue"))
    spec: Any = mock.Mock(finish=asks, parameters=lambda: [other, late], modules=lambda: [])
    assert [*_late_gradients(spec)] == [late] and asks.call_count == 1
    spec.finish = None
    assert not _late_gradients(spec)


def test_cores_linear_layers_leave_nothing_and_a_sentence_says_so(caplog: pytest.LogCaptureFixture) -> None:
    steps, ddp = steps_of(3), {"delay_wgrad_compute": True}
    prepare = lambda chunk: setattr(chunk.config, "delay_wgrad_compute", True)  # noqa: E731
    graphed = train(steps, "graph", delays="unfused at once", ddp=ddp, prepare=prepare)
    assert_same_bits(train(steps, "eager"), graphed)
    overlap.check_calls(graphed.report, "graph", sum(map(len, steps)))
    assert "delay_wgrad_compute delays nothing in graphs" in caplog.text


def test_layers_that_delay_without_overlap_stay_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their host asks for what they have queued. Bug: what captures had queued came first."""
    finalize = overlap.OverlapTrainer._finalize

    def asking(trainer: Any, *args: Any, **kwargs: Any) -> None:
        for linear in overlap.linears_of(trainer.chunk):
            linear.backward_dw()
        finalize(trainer, *args, **kwargs)

    monkeypatch.setattr(overlap.OverlapTrainer, "_finalize", asking)
    steps = [micros[:1] for micros in steps_of(3)]
    eager, graphed = (train(steps, it, delays="unfused", overlaps=False) for it in ("eager", "graph"))
    assert_same_bits(eager, graphed)
    rig.ran(graphed.report, failures=1, SCOPE_UNSUPPORTED=3 * CALLS)
