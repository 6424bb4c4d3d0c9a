# SPDX-License-Identifier: Apache-2.0
"""A third pass: what a site's backward leaves to be done later, in graphs of its own.
Sites run one by one, each with a leaf in front of it, as nodes of a plan do."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from bank_pair import WIDTH, Block, Pair, variant
from delayed_linear import DelayedLinear, accumulates, capturing
from notes import precision
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph.bank.sites import SiteSpec
from megagraph.bank.verify import Example, verify
from megagraph.reasons import EagerReason


class DelayedBlock(nn.Module):
    """A residual block whose products for weights come late; the gradients of its norm do not."""

    def __init__(self, *, is_fused: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = DelayedLinear(WIDTH, 2 * WIDTH, is_fused=is_fused)
        self.down = DelayedLinear(2 * WIDTH, WIDTH, is_fused=is_fused)
        self.fails = False

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))

    def backward_dw(self) -> None:
        self.down.backward_dw()
        if self.fails:
            raise RuntimeError("no product today")
        self.up.backward_dw()

    def forget(self) -> None:
        for linear in (self.down, self.up):
            linear.wgrad_store.context.queue.clear()
            linear.weight.grad = None


class Flight:
    """One micro-batch on one side: of each layer its leaf, its output, and what finishes its backward."""

    def __init__(self) -> None:
        self.leaves, self.outputs = list[Tensor](), list[Tensor]()
        self.rests = list[Callable[[], None] | None]()

    def run(self, layer: Callable[[Tensor], Any], given: Tensor, take: Callable[[], Any]) -> Tensor:
        self.leaves.append(given.detach().requires_grad_())
        self.outputs.append(layer(self.leaves[-1]))
        self.rests.append(take())
        return self.outputs[-1]

    def backward(self, index: int, grad: Tensor) -> Tensor:
        torch.autograd.backward(self.outputs[index], grad)
        before = self.leaves[index].grad
        assert before is not None
        return before

    def finish(self, index: int) -> None:
        if (rest := self.rests[index]) is not None:
            rest()


class DelayedPair(Pair):
    """Blocks under a bank, one of which has nothing to finish, and the same eager."""

    def __init__(self, device: str, *layers: nn.Module, is_fused: bool = False, **options: Any) -> None:
        layers = layers or (DelayedBlock(is_fused=is_fused), Block(), DelayedBlock(is_fused=is_fused))
        options = {"main_grad": True, "guard": capturing} | options
        options["steps"] = lambda layers: [SiteSpec(name="layer", module=layer) for layer in layers]
        super().__init__(device, layers, **options)
        for site in self.bank.specs:
            if isinstance(site.module, DelayedBlock):
                site.finish, site.forget = DelayedBlock.backward_dw, DelayedBlock.forget
        for linear in (*self.linears(self.layers), *self.linears(self.eager_layers)):
            linear.register_wgrad_accumulation_and_reduce_hooks(accumulates(linear.weight))
        self.capture()

    @staticmethod
    def linears(layers: Sequence[nn.Module]) -> list[DelayedLinear]:
        return [it for layer in layers for it in layer.modules() if isinstance(it, DelayedLinear)]

    def fly(self, hidden: Tensor) -> Flight:
        """Forwards in the bank."""
        with self.bank.micro_batch("train") as reason:
            assert reason is None
            return self.fly_on(hidden)

    def fly_on(self, hidden: Tensor) -> Flight:
        """In a micro-batch that has begun."""
        flight = Flight()
        for site in self.bank.sites:
            hidden = flight.run(site, hidden, self.bank.take_finish)
        return flight

    def fly_back(self, index: int = 0) -> Flight:
        """With the backward of one layer, which is not finished."""
        flight = self.fly(self.input())
        flight.backward(index, self.input())
        return flight

    def both(self, scale: float = 1.0) -> tuple[Flight, Flight, Tensor]:
        """Forwards on both sides, and a gradient of the output."""
        hidden, eager = self.input(), Flight()
        ours, given = self.fly(hidden), hidden.clone()
        for layer in self.eager_layers:
            given = eager.run(layer, given, lambda layer=layer: getattr(layer, "backward_dw", None))
        return ours, eager, scale * self.input()

    def land(self, ours: Flight, eager: Flight, grad: Tensor) -> None:
        """Backwards of both from the last layer on, each finished before the next; looks at all between."""
        grads = [grad, grad]
        for index in reversed(range(len(self.layers))):
            late = [linear.weight.main_grad for linear in self.linears(self.layers)]
            before = [gradient.clone() for gradient in late]
            grads = [it.backward(index, grad) for it, grad in zip((ours, eager), grads, strict=True)]
            assert_same_bits(*grads, f"gradient of the input of layer {index}")
            assert_same_bits(late, before, "what comes late")
            for it in (ours, eager):
                it.finish(index)
            self.check_state()
            for linear in self.linears([self.layers[index]]):
                assert linear.weight.main_grad.any()

    def train(self, times: int = 1) -> None:
        for _ in range(times):
            self.land(*self.both())
        self.check_counters()

    def forget(self) -> None:
        """What a micro-batch that was not finished has left, some of it where the host's graphs run."""
        for layer in (*self.layers, *self.eager_layers):
            if isinstance(layer, DelayedBlock):
                layer.forget()
            for param in layer.parameters():
                param.main_grad.zero_()


@pytest.mark.parametrize("delays", [True, False], ids=["delayed", "at once"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_bits_of_eager_and_what_comes_late_comes_late(device: str, is_fused: bool, delays: bool) -> None:
    """Of eager that makes all in the backward, too. Without gradients there is nothing to finish."""
    pair = DelayedPair(device, is_fused=is_fused)
    assert pair.bank.num_graphs == 3 + 2 + 3 and not pair.bank.failures
    assert not any(param.main_grad.any() for param in pair.params())
    for linear in pair.linears(pair.eager_layers):
        linear.wgrad_store.delays = delays
    pair.train(4)
    pair.update_weights()
    pair.train()
    assert pair.counts() == {"calls": 5 * 3, "replays": 5 * 3}
    with pair.bank.micro_batch("train"):
        assert pair.bank.replay_all(pair.input()) is NotImplemented
    pair.bank.capture([variant("even", training=False)])
    with torch.no_grad(), pair.bank.micro_batch("even"):
        assert isinstance(pair.bank.sites[0](pair.input()), Tensor)
        assert pair.bank.take_finish() is None


def test_micro_batches_in_turn_each_get_their_own(device: str) -> None:
    """Two slots, forwards of one micro-batch before backwards of another, each scaled apart."""
    pair = DelayedPair(device, num_slots=2)
    flights = [pair.both(scale=0.5)]
    for step in range(6):
        flights.append(pair.both(scale=2.0**step))
        pair.land(*flights.pop(0))
    pair.land(*flights.pop())
    assert pair.counts() == {"calls": 7 * 3, "replays": 7 * 3}


def test_nothing_enters_the_slot_of_an_unfinished_site_which_is_free_once_it_is_finished(device: str) -> None:
    """Neither a backward, which raises, nor a forward, nor another micro-batch, nor a capture."""
    pair = DelayedPair(device)
    with pair.bank.micro_batch("train"):
        ours = pair.fly_on(pair.input())
        grad = ours.backward(2, pair.input())
        assert pair.bank.sites[2](ours.leaves[2]) is NotImplemented
    assert pair.eager_calls() == {EagerReason.NESTING.name: 1}
    with pytest.raises(RuntimeError, match=r"out of order.*to be finished.*1 unfinished backward of site 2"):
        ours.backward(1, grad)
    with pair.bank.micro_batch("train") as reason:
        assert reason is EagerReason.NO_FREE_SLOT
    ours.finish(2)
    grad = ours.backward(1, grad)
    ours.backward(0, grad)
    ours.outputs, ours.leaves = [], []
    del grad
    with pytest.raises(RuntimeError, match=r"still held: slot 0: 1 unfinished backward of site 0$"):
        pair.capture()
    ours.finish(0)
    assert pair.bank.all_free()


def test_finishing_twice_too_early_or_for_another_micro_batch(device: str) -> None:
    """Each is an error, which changes nothing."""
    pair = DelayedPair(device, DelayedBlock(), num_slots=2)
    (*both, grad), other = pair.both(), pair.both(scale=8.0)
    with pytest.raises(RuntimeError, match="site 0, slot 0, was asked to finish before the backward"):
        both[0].finish(0)
    for flight in both:
        flight.backward(0, grad)
    with pytest.raises(RuntimeError, match=r"slot 1, .* before the backward of its micro-batch"):
        other[0].finish(0)
    for flight in both:
        flight.finish(0)
    with pytest.raises(RuntimeError, match="site 0, slot 0, was asked to finish twice"):
        both[0].finish(0)
    pair.check_state()
    pair.land(*other)


def test_what_is_never_finished_is_named(device: str) -> None:
    """Before the next micro-batch, once; not if somebody has asked what there is."""
    pair = DelayedPair(device, DelayedBlock())
    never = "the backward of site 0 in slot 0 was never finished: gradients are missing"
    pair.fly_back()
    with pytest.raises(RuntimeError, match=never), pair.bank.micro_batch("train"):
        pass
    pair.fly_back()
    assert pair.bank.take_unfinished() == never
    flight = pair.fly_back()
    assert [pair.bank.take_unfinished() for _ in range(2)] == [never, ""]
    del flight
    assert pair.bank.take_unfinished() == "" and pair.bank.all_free()
    pair.forget()
    pair.train()


def test_gradients_are_told_of_when_they_are_there(device: str) -> None:
    pair = DelayedPair(device)
    told: list[tuple[int, set[str]]] = []

    def tell(site: int, _last: int = 0) -> None:
        params = pair.layers[site].named_parameters()
        told.append((site, {name for name, param in params if param.main_grad.any()}))

    pair.bank.set_listener(lambda: True, tell, tell, [])
    pair.train()
    norm = {"norm.weight", "norm.bias"}
    whole = {*norm, "up.weight", "down.weight"}
    assert told == [(2, norm), (2, whole), (1, {*whole, "up.bias"}), (0, norm), (0, whole)]


def test_what_cannot_be_finished_any_more(device: str) -> None:
    """Its output was dropped, its input written, a setting changed, or the bank was released."""
    pair = DelayedPair(device, DelayedBlock())

    def check(said: str) -> None:
        with pytest.raises(RuntimeError, match=said):
            flight.finish(0)
        flight.outputs.clear()
        assert pair.bank.all_free() and not pair.bank.take_unfinished()

    flight = pair.fly(pair.input())
    flight.outputs.clear()
    check("a backward that failed, or that can't come any more")
    flight = pair.fly(pair.input())
    with precision("medium"):
        with pytest.raises(RuntimeError, match=r"a numeric setting .* changed"):
            flight.backward(0, pair.input())
        check("before the backward")
    flight = pair.fly_back()
    with precision("medium"):
        check("a numeric setting .* changed")
    flight = pair.fly_back()
    with torch.no_grad():
        flight.leaves[0].add_(1)
    check("modified by an inplace operation")
    flight = pair.fly_back()
    pair.bank.release()
    check("released before the backward of site 0 was finished")


def test_a_product_that_fails_or_has_no_main_grad(device: str) -> None:
    """In the capture its site stays eager, and nothing is left of it. On the host a replay can fail, too."""
    pair = DelayedPair(device, DelayedBlock(), DelayedBlock())
    if device == "cpu":
        flight = pair.fly_back(1)
        pair.layers[1].fails = True
        with pytest.raises(RuntimeError, match="no product today"):
            flight.finish(1)
        del flight
        assert pair.bank.all_free() and not pair.bank.take_unfinished()
        pair.forget()
    pair.layers[1].fails = True
    pair.capture()
    assert "RuntimeError: no product today" in pair.failure(1, EagerReason.CAPTURE_FAILED)
    assert not any(linear.wgrad_store.context.qsize() for linear in pair.linears(pair.layers))
    assert all(param.grad is None for param in pair.params())
    pair = DelayedPair(device, DelayedBlock(), main_grad=False)
    assert "expected main_grad of up.weight" in pair.failure(0, EagerReason.CAPTURE_FAILED)


@pytest.mark.parametrize("is_fused", [False, True])
def test_verification_compares_what_comes_late_and_leaves_no_trace(device: str, is_fused: bool) -> None:
    pair = DelayedPair(device, num_slots=2, is_fused=is_fused)
    pair.train()
    found = verify(pair.bank, "train", Example(hidden=pair.input(), grad=pair.input()))
    assert not found.differences and not found.not_run
    pair.check_state()
    assert not any(linear.wgrad_store.context.qsize() for linear in pair.linears(pair.layers))
    pair.train()


def test_verification_finds_a_product_that_is_another_one(device: str) -> None:
    pair = DelayedPair(device, DelayedBlock(), DelayedBlock())
    site, calls = pair.bank.specs[1], itertools.count()

    def doubled(layer: DelayedBlock) -> None:
        layer.backward_dw()
        if device == "cuda" or next(calls):  # the host runs the graph's first
            layer.up.weight.grad.mul_(2)

    site.finish = doubled
    found = verify(pair.bank, "train", Example(hidden=pair.input(), grad=pair.input()))
    assert {(it.index, it.tensor) for it in found.differences} == {(1, "gradient of up.weight")}
