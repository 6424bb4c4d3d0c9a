# SPDX-License-Identifier: Apache-2.0
"""Where graphs replay, the backward passes of a schedule run on the thread that calls it; nowhere else.
Without a GPU they do so in any case, and what tells is autograd's own switch."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import megatron_rig as rig
import pytest
import torch
from moe_rig import FULL_RECOMPUTE, recompute
from torch import Tensor

import megagraph
from megagraph.demo.trainer import Trainer

is_multithreaded: Callable[[], bool] = torch._C._is_multithreading_enabled


@pytest.fixture(autouse=True)
def multithreading() -> Iterator[None]:
    """As torch has it, before and after each test, whatever happened in between."""
    assert is_multithreaded()
    yield
    assert is_multithreaded()


class Seen:
    """What backward passes find: their threads, and whether autograd may use threads of its own."""

    def __init__(self, trainer: Trainer) -> None:
        self.threads: list[int] = []
        self.multithreaded: list[bool] = []
        self.does: Callable[[], object] = bool  # besides
        trainer.chunk.embedding.register_forward_hook(self._look_at)

    def _look_at(self, _module: object, _args: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self._look)

    def _look(self, _grad: Tensor) -> None:
        self.threads.append(threading.get_ident())
        self.multithreaded.append(is_multithreaded())
        self.does()

    def of(self, run: Callable[..., object], *args: Any, **given: Any) -> list[bool]:
        """Whether autograd's threads were on in each backward pass of `run`."""
        self.multithreaded.clear()
        self.threads.clear()
        run(*args, **given)
        return list(self.multithreaded)


def trained(install: rig.Install, **further: Any) -> tuple[Trainer, Seen]:
    """A model that replays in training, and what its backward passes find."""
    install()
    trainer = Trainer(rig.OPTIONS, **further)
    seen = Seen(trainer)
    assert seen.of(rig.step, trainer, [rig.ONE, rig.TWO]) == [True, True], "nothing was captured yet"
    rig.step(trainer, [rig.ONE, rig.TWO])
    return trainer, seen


@pytest.mark.parametrize(
    ("transformer", "ddp"),
    [({}, {}), ({"deallocate_pipeline_outputs": True}, {}), ({}, {"overlap_grad_reduce": True})],
    ids=["torch's backward", "the engine itself, as pipelines call it", "DDP's hooks"],
)
def test_backwards_of_replays_run_on_the_calling_thread(install: Any, transformer: Any, ddp: Any) -> None:
    trainer, seen = trained(install, config=transformer, ddp=ddp)
    before = rig.report_of(trainer)["replays"]
    assert seen.of(rig.step, trainer, [rig.ONE, rig.TWO]) == [False, False]
    assert seen.threads == [threading.get_ident()] * 2
    assert rig.report_of(trainer)["replays"] == before + 2 * rig.LAYERS


def test_graphs_are_off_on_the_thread_that_asked_and_in_its_backward_passes(install: rig.Install) -> None:
    """Bug: a thread that computed rewards switched them off for the trainer, too."""
    trainer, seen = trained(install)
    asks, ends, is_off = threading.Event(), threading.Event(), []

    def rewards() -> None:
        with megagraph.disable_cuda_graphs_this_step():
            asks.set()
            ends.wait()

    other = threading.Thread(target=rewards)
    other.start()
    assert asks.wait(60)
    before = rig.report_of(trainer)["replays"]
    rig.step(trainer, [rig.ONE, rig.TWO])
    assert rig.report_of(trainer)["replays"] == before + 2 * rig.LAYERS
    ends.set()
    other.join()

    seen.does = lambda: is_off.append(megagraph.is_cuda_graph_skipped())
    rig.step(trainer, [rig.ONE, rig.TWO], eager=True)
    rig.step(trainer, [rig.ONE, rig.TWO])
    assert is_off == [True, True, False, False]


def test_schedules_of_two_threads_need_not_end_in_turn(install: rig.Install) -> None:
    """Bug: the models of the one that ended first were in a step for good, without graphs, and in memory."""
    install()
    trainers, others = [Trainer(rig.OPTIONS) for _ in range(2)], [threading.Event() for _ in range(2)]

    def evaluate(own: int) -> None:
        def forward_step(data: Any, chunk: Any) -> Any:
            others[own].set()  # the other one begins, or ends
            assert own or others[1].wait(60)
            return rig.forward(chunk, next(data), trainers[own].device)

        with torch.no_grad():
            rig.run_schedule(trainers[own].model, forward_step, [rig.ONE], 1, forward_only=True)

    plugin, entered = rig.the_plugin(), threading.Thread(target=evaluate, args=(0,))
    entered.start()
    assert others[0].wait(60)
    trainers[1].chunk.register_forward_hook(lambda *_args: entered.join())
    evaluate(1)
    assert plugin.step_models == () and plugin.step_graphs == set()


@pytest.mark.parametrize("how", ["skipped", "suspended", "mode eager", "refused"])
def test_a_step_without_graphs_is_left_alone(install: rig.Install, how: str) -> None:
    install(mode="eager" if how == "mode eager" else "graph")
    trainer = Trainer(rig.OPTIONS, config=FULL_RECOMPUTE if how == "refused" else None)
    seen = Seen(trainer)
    rig.step(trainer, [rig.ONE], times=3)
    if how == "suspended":
        megagraph.suspend()
    assert seen.of(rig.step, trainer, [rig.ONE], eager=how == "skipped") == [True]


def test_a_backward_outside_of_a_schedule_is_left_alone(install: rig.Install) -> None:
    """And who switched threads off finds them off behind a schedule."""
    trainer, seen = trained(install)
    before = rig.report_of(trainer)["replays"]
    trainer.zero_grad()
    assert seen.of(lambda: rig.forward(trainer.model, rig.ONE, trainer.device)[0].sum().backward()) == [True]
    assert rig.report_of(trainer)["replays"] == before + rig.LAYERS
    with torch.autograd.set_multithreading_enabled(False):
        assert seen.of(rig.step, trainer, [rig.ONE]) == [False]
        assert not is_multithreaded()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_switch_is_put_back_after_an_error(install: rig.Install, where: str) -> None:
    trainer, seen = trained(install)

    def give_up(*_: object) -> None:
        assert not is_multithreaded()
        raise ArithmeticError

    def fail(_module: object, _args: object, out: Tensor) -> None:
        if where == "forward":
            give_up()
        out.register_hook(give_up)

    with trainer.chunk.embedding.register_forward_hook(fail), pytest.raises(ArithmeticError):
        rig.step(trainer, [rig.ONE])
    assert is_multithreaded()
    # DDP counts gradients, and has not heard of all of them.
    assert seen.of(rig.schedule, trainer.model, [rig.ONE], 1, trainer.device) == [False]


@pytest.mark.usefixtures("recompute_on_cpu")
@pytest.mark.parametrize("recomputes", [False, True], ids=["plain", "a backward inside the backward"])
def test_bits_where_an_eager_layer_lies_between_replayed_ones(recomputes: bool) -> None:
    """The eager one recomputes its MLP through Megatron's checkpoint, which calls the engine again."""
    # Megatron recomputes no MLP that hands on its bias.
    pair = rig.Pair(layers=3, config=recompute("mlp", add_bias_linear=False) if recomputes else None)
    for trainer in pair.both:
        trainer.chunk.decoder.layers[1].self_attention.register_forward_hook(lambda *args: None)
    seen = Seen(pair.graphed)
    for index in range(3):
        pair.step(rig.ONE, rig.Micro(lengths=(3 + index, 30, 8), seed=index))
    assert seen.multithreaded == [True] * 2 + [False] * 4
    assert pair.report()["eager"] == {"WARMING_UP": 2 * 3, "FOREIGN_HOOK": 2 * 2}


@pytest.mark.gpu
def test_bits_where_the_backward_goes_by_way_of_the_host(pair: rig.Pair) -> None:
    """Losses are worked on by the host: one thread takes the place of two."""
    for trainer in pair.both:
        trainer.model.register_forward_hook(lambda _module, _args, losses: (losses.cpu() * 3).cuda())
    seen = Seen(pair.graphed)
    for index in range(4):
        pair.step(rig.ONE, rig.Micro(lengths=(3 + index, 30, 8), seed=index))
    assert seen.multithreaded == [True] * 2 + [False] * 6
    assert set(seen.threads[2:]) == {threading.get_ident()} and threading.get_ident() not in seen.threads[:2]
