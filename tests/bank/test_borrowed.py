# SPDX-License-Identifier: Apache-2.0
"""Tensors that a forward reaches beside its modules: graphs keep what they read, and no gradient is lost."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from bank_pair import WIDTH, Applies, Block, Pair, unowned, variant
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megagraph import _C
from megagraph.decide.reasons import EagerReason


@pytest.mark.parametrize("of_a_module", [False, True])
def test_a_frozen_tensor_from_elsewhere_is_read_with_eagers_bits(device: str, of_a_module: bool) -> None:
    """Ops show it, so that a closure, a list and a global are one."""
    table, other = torch.randn(WIDTH, device=device), nn.BatchNorm1d(WIDTH, device=device)
    other.running_mean = table
    reads = Applies(lambda hidden: hidden * (other.running_mean if of_a_module else table))
    pair = Pair(device, [Block(), reads, Block()]).capture()
    assert not pair.bank.failures and not pair.bank.have_borrowed_moved()
    for _ in range(2):
        assert pair.step() is None
        table.mul_(1.5)  # in place: graphs read the memory
    assert not pair.bank.have_borrowed_moved() and pair.bank.counters()["replays"] == 6


def kept(pair: Pair) -> list[int]:
    """How many tensors of nobody's each site's graphs have."""
    return [*map(len, pair.bank.captured[0].reads.values())]


def _dropped(held: list[Tensor]) -> None:
    held[0] = held[0] * 2


def _moved(held: list[Tensor]) -> None:
    held[0].data = held[0].data.clone()


def _freed(held: list[Tensor]) -> None:
    held[0].untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [_dropped, _moved, _freed])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_tensor_that_was_dropped_or_moved_is_noticed(
    device: str, change: Callable[[list[Tensor]], None], in_backward: bool
) -> None:
    """Bug: nothing watched it, so that replays went on reading what was there before."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> Tensor:
            return hidden.clone() if in_backward else hidden * held[0]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * held[0] if in_backward else grad.clone()

    held = [torch.randn(WIDTH, device=device)]
    pair = Pair(device, [Block(), Applies(Scale.apply)]).capture()
    assert pair.step() is None and not pair.bank.have_borrowed_moved()
    change(held)
    assert pair.bank.have_borrowed_moved()
    pair.bank.drop(["train"])
    assert not pair.bank.have_borrowed_moved(), "nobody reads it"


def test_its_memory_lives_as_long_as_the_graphs_that_read_it() -> None:
    """Bug: a graph kept its address, and nothing its memory."""
    memory = numpy.ones(WIDTH, dtype=numpy.float32)
    held, lives = [torch.from_numpy(memory)], weakref.ref(memory)
    del memory
    pair = Pair("cpu", [Applies(lambda hidden: hidden * held[0])]).capture()
    held[0] = held[0].clone()
    gc.collect()
    assert lives() is not None
    pair.bank.drop(["train"])
    gc.collect()
    assert lives() is None


def test_what_a_first_call_caches_is_kept_and_may_be_dropped(device: str) -> None:
    cache: dict[str, Tensor] = {}

    def cached(hidden: Tensor) -> Tensor:
        if "table" not in cache:
            cache["table"] = torch.arange(WIDTH, device=hidden.device)
        return hidden * cache["table"]

    pair = Pair(device, [Applies(cached), Block()]).capture()
    assert pair.step() is None
    assert kept(pair) == [1, 0]
    cache.clear()
    assert not pair.bank.have_borrowed_moved()


def test_nothing_is_kept_of_sites_that_read_what_they_have(device: str) -> None:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(WIDTH))
            self.number, self.in_list = torch.ones((), device=device), [torch.ones(WIDTH, device=device)]

        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden * self.table * self.number) + self.in_list[0]

    pair = Pair(device, [Own(), Own(), nn.Dropout(0.0)], num_slots=2, main_grad=True).capture()
    assert pair.step() is None and kept(pair) == [0, 0, 0]


def test_a_number_on_the_cpu_is_compared_beside_graphs_on_a_gpu() -> None:
    """It is an argument of a kernel; beside the host backend it is memory that replays read."""
    number, hidden = torch.tensor(2.0), torch.randn(3)
    for device, is_baked in (("cuda", True), ("cpu", False)):
        reads = _C.ReadTrace(torch.device(device))
        with reads.watching(hidden):
            hidden * number
        reads.keep([hidden])
        assert len(reads) == 1 and not reads.has_moved()
        number += 1
        assert reads.has_moved() == is_baked


# -- parameters --------------------------------------------------------------------------------------


class _Hidden(torch.autograd.Function):
    """Multiplies by a weight that no op is given, as a kernel that is called beside torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return hidden * unowned(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * unowned(ctx.weight), grad.sum(0)


def _by_hand(hidden: Tensor, weight: Tensor) -> Tensor:
    """As Transformer Engine's modules call their functions."""
    if torch.is_grad_enabled():
        return _Hidden.apply(hidden, weight)
    return _Hidden.forward(contextlib.nullcontext(), hidden, weight)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an op": lambda hidden, weight: hidden * weight,
    "a function of autograd": _Hidden.apply,
    "a re-entrant checkpoint": lambda hidden, weight: checkpoint(
        lambda it: it * weight, hidden, use_reentrant=True, preserve_rng_state=False
    ),
    "a re-entrant checkpoint that shows nothing in its forward": lambda hidden, weight: checkpoint(
        lambda it: _by_hand(it, weight), hidden, use_reentrant=True, preserve_rng_state=False
    ),
    "what was computed of it before": lambda hidden, weight: hidden * weight,
}


@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("how", USES)
def test_a_borrowed_parameter_is_refused_by_name_and_keeps_its_gradient(
    device: str, how: str, has_grad: bool
) -> None:
    """Bug: a re-entrant checkpoint hid it, and left the gradient of the warm-up's random input in it."""
    adapter = nn.LayerNorm(WIDTH, device=device)
    weight: Tensor = adapter.weight
    before = weight.grad = torch.randn(WIDTH, device=device) if has_grad else None
    given = weight * 2 if how == "what was computed of it before" else weight
    bits = None if before is None else before.clone()
    pair = Pair(device, [Block(), Applies(lambda hidden: USES[how](hidden, given))])
    pair.capture()
    name = "a tensor" if given is not weight else "weight of a LayerNorm"
    assert pair.failure(1, EagerReason.SHARED_PARAMETER) == (
        f"reaches {name} (torch.float32, (8,)), a parameter that none of its modules has"
    )
    assert weight.grad is before and (bits is None or torch.equal(bits, before))


def _leaf_of_input(hidden: Tensor) -> Tensor:
    """As a checkpoint of a host's own makes it."""
    inner = hidden.detach().requires_grad_()
    return hidden + inner * 0.5


def _leaf_of_its_own(hidden: Tensor) -> Tensor:
    return hidden * torch.full((WIDTH,), 1.5, device=hidden.device, requires_grad=True)


def _leaf_of_data(hidden: Tensor) -> Tensor:
    return hidden * torch.tanh(hidden).data.requires_grad_()


@pytest.mark.parametrize("forward", [_leaf_of_input, _leaf_of_its_own, _leaf_of_data])
def test_a_leaf_that_a_forward_makes_is_no_borrowed_parameter(
    device: str, forward: Callable[[Tensor], Tensor]
) -> None:
    """Bug: any leaf behind the outputs was taken for one, and left the layer eager."""
    pair = Pair(device, [Block(), Applies(forward), Block()]).capture()
    assert pair.bank.failures == []
    pair.replay_steps(2)


def _without_gradients(hidden: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        factor = weight * 2
    return hidden * factor


@pytest.mark.parametrize("use", [_without_gradients, lambda hidden, weight: hidden * weight.detach()])
def test_a_parameter_that_gets_no_gradient_is_memory_like_any_other(
    device: str, use: Callable[[Tensor, Tensor], Tensor]
) -> None:
    adapter = nn.LayerNorm(WIDTH, device=device)
    pair = Pair(device, [Block(), Applies(lambda hidden: use(hidden, adapter.weight))]).capture()
    assert pair.bank.failures == [] and kept(pair) == [0, 1]
    pair.replay_steps(2)


def test_a_parameter_from_elsewhere_is_memory_like_any_other_where_nothing_trains(device: str) -> None:
    adapter = nn.LayerNorm(WIDTH, device=device)
    pair = Pair(device, [Applies(lambda hidden: hidden * adapter.weight)])
    pair.capture(variant("even", training=False))
    with torch.no_grad():
        pair.forward(key="even", requires_grad=False)
    assert pair.bank.counters()["replays"] == 1 and not pair.bank.have_borrowed_moved()
    adapter.weight = nn.Parameter(torch.zeros(WIDTH, device=device))
    assert pair.bank.have_borrowed_moved()
