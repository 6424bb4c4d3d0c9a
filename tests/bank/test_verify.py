# SPDX-License-Identifier: Apache-2.0
"""Graphs are compared with their modules: what differs is named, and nothing is left behind."""

import dataclasses
import itertools
import random
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from bank_pair import ROWS, WIDTH, Applies, Block, Pair, blocks, give_main_grads, rng_states, variant
from notes import told
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph.bank.bank import Bank
from megagraph.bank.capture import GAVE_UP, BankOptions, GroupGaveUp
from megagraph.bank.sites import EagerPart, SiteSpec
from megagraph.bank.verify import Example, Verification, verify

ONE_BIT_MORE = 2.0 * (1 + 2**-23)
runs_python = pytest.mark.skipif(torch.cuda.is_available(), reason="a replayed CUDA graph runs no Python")


class Baked(nn.Module):
    """Doubles, and as it was captured something else: what a graph does that has baked in a value."""

    is_captured = False

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight * (self.factor if Baked.is_captured else 2.0)


# A bank's guard: around captures, and around replays of the host backend.
captures = partial(told, partial(setattr, Baked, "is_captured"), True, False)


def captured(steps: Any, device: str, *, training: bool = True, fewer_rows: bool = False, **how: Any) -> Bank:
    moved = [step.to(device) if isinstance(step, nn.Module) else step for step in steps]
    bank = Bank(moved, device, options=BankOptions(guard=captures, **how))
    bank.capture([variant("it", training=training, fewer_rows=fewer_rows)])
    return bank


def together(worst: Callable[[int], int]) -> dict[str, Any]:
    """Options of a bank of one of several ranks, from what it says to the worst that any rank says."""
    told = {"max_over_ranks": lambda said: [worst(each) for each in said]}
    return {**told, "run_eager_alike": mock.Mock(side_effect=AssertionError("a verification is no step"))}


def example(device: str, *, rows: int = ROWS) -> Example:
    generator = torch.Generator().manual_seed(5)
    hidden, grad = (torch.randn(rows, WIDTH, generator=generator).to(device) for _ in range(2))
    return Example(hidden=hidden, grad=grad)


def verified(layers: Sequence[Any], device: str, **options: Any) -> Verification:
    """Of a bank that they outlive."""
    return verify(captured(layers, device, **options), "it", example(device))


def assert_right(found: Verification) -> None:
    assert found.differences == [] and found.within_spread == set() and found.not_run == {}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("main_grads", [True, False])
def test_right_graphs_neither_differ_nor_leave_a_trace(device: str, training: bool, main_grads: bool) -> None:
    pair = Pair(device, [*blocks(), nn.Dropout(0.5 if device == "cuda" else 0.0)], main_grad=main_grads)
    bank, heard = pair.capture(variant("it", training=training)).bank, list[Any]()
    bank.set_listener(lambda: True, lambda *sites: heard.append(sites), heard.append, [0])
    for param in pair.params():
        if main_grads:
            param.main_grad.uniform_()
        else:
            param.grad = torch.rand_like(param)
    grads = [param.main_grad if main_grads else param.grad for param in pair.params()]
    before = [grad.clone() for grad in grads], rng_states(device), bank.counters()
    assert_right(verify(bank, "it", example(device)))
    assert not bank.failures and not heard and bank.all_free()
    assert_same_bits((grads, rng_states(device), bank.counters()), before, "what a verification left")
    assert main_grads or all(param.grad is grad for param, grad in zip(pair.params(), grads, strict=True))


@pytest.mark.parametrize("factor", [2.5, ONE_BIT_MORE])
@pytest.mark.parametrize("training", [True, False])
def test_a_value_that_was_baked_in_is_named_with_its_site(device: str, training: bool, factor: float) -> None:
    found = verified([Block(), Baked(factor), Block()], device, training=training).differences
    assert {it.index for it in found} == {1}  # and not what comes after it
    names = ["output", "gradient of the input", "gradient of weight"]
    assert [it.tensor for it in found] == (names if training else names[:1])
    assert str(found[0]).startswith("output differs from eager by up to ")


@pytest.mark.parametrize("graph_has_it", [True, False])
def test_a_gradient_that_only_one_of_them_makes_is_a_difference(device: str, graph_has_it: bool) -> None:
    def partly(hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden * 2 + (weight - weight.detach() if Baked.is_captured is graph_has_it else 0)

    (found,) = verified([Applies(partly, has_weight=True), nn.Tanh()], device).differences
    assert (found.index, found.tensor, found.off) == (0, "gradient of weight", float("inf"))


def noisy(least: float, most: float) -> Applies:
    """Another result in each call, of no random stream of torch's."""
    return Applies(lambda hidden: hidden * (1.5 if Baked.is_captured else random.uniform(least, most)))


def test_a_module_that_differs_from_itself_may_differ_from_its_graph_as_much(device: str) -> None:
    random.seed(3)
    wide = verified([noisy(1.0, 2.0)], device, training=False)
    assert wide.differences == [] and wide.within_spread == {0}
    (found,) = verified([noisy(1.0, 1.1)], device, training=False).differences
    assert 0 < found.spread < found.off and "and eager there from itself by up to" in str(found)


@pytest.mark.parametrize(("factor", "differs"), [(3.0, False), (9.0, True)])
def test_what_seldom_differs_from_itself_runs_again(device: str, factor: float, differs: bool) -> None:
    runs = itertools.count()

    def rarely(hidden: Tensor, weight: Tensor) -> Tensor:
        """Its weight's gradient is another one in few runs, and its output in all."""
        scale, of_weight = 1.25, factor
        if not Baked.is_captured:
            scale, of_weight = random.uniform(1.0, 2.0), 3.0 if next(runs) == 9 else 2.0
        return hidden * weight * scale + (weight * of_weight - weight.detach() * of_weight)

    random.seed(3)
    layer = Applies(rarely, has_weight=True).to(device)
    held = give_main_grads([layer])
    given = dataclasses.replace(example(device), hidden=torch.zeros(ROWS, WIDTH, device=device))
    given.hidden[0] = 1e-3  # so that the other gradients hardly matter
    found = verify(captured([layer], device), "it", given)
    assert held and {it.tensor for it in found.differences} == ({"gradient of weight"} if differs else set())
    assert found.within_spread == {0}  # in its other tensors


@runs_python
@pytest.mark.parametrize("times", [3, 4])
def test_a_graph_that_seldom_lies_far_off_is_right_if_its_module_scatters(times: int) -> None:
    """A module that is always alike excuses nothing, although it is verified once more, too."""

    def scatters(spread: float, far: list[float]) -> Applies:
        def forward(hidden: Tensor) -> Tensor:
            if Baked.is_captured:
                return hidden * (far.pop() if far else 1.5)
            return hidden * random.uniform(1.5 - spread, 1.5 + spread)

        return Applies(forward)

    random.seed(3)
    far: tuple[list[float], list[float]] = [], []
    layers = [scatters(0.1, far[0]), scatters(0.0, far[1])]
    bank = captured(layers, "cpu", training=False)
    far[0].extend([5.0] * times)
    far[1].append(5.0)
    found = verify(bank, "it", example("cpu"))
    assert {it.index for it in found.differences} == ({1} if times == 3 else {0, 1})
    assert found.within_spread == ({0} if times == 3 else set()) and far == ([], [])


@runs_python
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize(("entry", "entries"), [(1 + 2**-8, 8), (1 + 2**-8, 9), (1.5, 1)])
@pytest.mark.parametrize("times", [3, 4])
def test_a_rounding_that_does_not_recur_is_chance_but_where_algorithms_are_deterministic(
    times: int, entry: float, entries: int, is_exact: bool
) -> None:
    """Calls of the module are alike, and a few entries of its graph's first ones are others."""
    others = list[float]()

    def rounds(hidden: Tensor) -> Tensor:
        out = hidden * 1.5
        if Baked.is_captured and others:
            out.data.view(-1)[:entries] *= others.pop()
        return out

    torch.use_deterministic_algorithms(is_exact)
    layer = Applies(rounds)
    bank = captured([layer], "cpu", training=False)
    others += [entry] * times
    given = dataclasses.replace(example("cpu"), hidden=torch.ones(ROWS, WIDTH))
    is_rounding = not is_exact and entry < 1.5 and entries < 9
    assert bool(verify(bank, "it", given).differences) is not (is_rounding and times < 4)
    assert len(others) == (0 if is_rounding else times - 1)


@pytest.mark.parametrize("differs_elsewhere", [False, True])
def test_ranks_that_share_communicators_run_their_modules_as_often(differs_elsewhere: bool) -> None:
    """Bug: where a layer differed from itself on one rank alone, only that rank ran it again."""
    calls, elsewhere = list[bool](), iter([0][:0])
    # Each of its own calls would enter a collective.
    layers = [Applies(lambda hidden: calls.append(not Baked.is_captured) or hidden * 2), nn.Tanh()]
    bank = captured(layers, "cpu", training=False, **together(lambda said: max(next(elsewhere, 0), said)))
    # All begin. A site runs, its module does; as long as they differ, it runs once more.
    of_site, may_be_chance = [0, 0, *[1, 0] * 19, 0], [1, 1, 1, 0]
    if differs_elsewhere:
        elsewhere = iter([answer for last in may_be_chance for answer in [0, *of_site * len(layers), last]])
    calls.clear()
    assert_right(verify(bank, "it", example("cpu")))
    assert sum(calls) == (4 * 20 if differs_elsewhere else 1)  # verified as often as there


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
@pytest.mark.parametrize("training", [True, False])
def test_a_call_that_fails_on_one_rank_is_given_up_on_all(training: bool, error: type[Exception]) -> None:
    """Bug: that rank used its graphs, and the others waited for it. One without memory tells them nothing."""
    said: list[int] = []
    is_broken, elsewhere = False, iter([0][:0])

    def breaks(hidden: Tensor) -> Tensor:
        if is_broken and not Baked.is_captured:
            raise error
        return hidden * 2

    def worst(own: int) -> int:
        said.append(own)
        return max(own, next(elsewhere, 0))

    layers = [Block(), Block(), Applies(breaks)]
    bank = captured(layers, "cpu", training=training, **together(worst))
    said.clear()
    assert_right(verify(bank, "it", example("cpu")))
    num_exchanges, before = len(said), [param.grad for param in bank.specs[0].parameters()]
    # Up to the last site's module, which runs first where there are backwards.
    fine = [0] * (1 + 4 if training else 3 * 3)
    said.clear()
    is_broken = True
    with pytest.raises(error):
        verify(bank, "it", example("cpu"))
    assert said == [*fine, *([GAVE_UP] if error is ValueError else [])] and bank.all_free()
    is_broken = False
    for place in range(num_exchanges):
        elsewhere = iter([*[0] * place, GAVE_UP])
        with pytest.raises(GroupGaveUp):
            verify(bank, "it", example("cpu"))
        assert bank.all_free() and [param.grad for param in bank.specs[0].parameters()] == before
    assert_right(verify(bank, "it", example("cpu")))


def test_what_one_rank_cannot_begin_no_rank_verifies() -> None:
    """Bug: that rank kept from it, and others waited in a graph, or would in a module's collective."""
    elsewhere, runs = iter([0][:0]), list[None]()
    layers = [Block(), Applies(lambda hidden: runs.append(None) or hidden * 2), Block()]
    bank = captured(layers, "cpu", **together(lambda said: next(elsewhere, said)))
    elsewhere = iter([0, 0, 1])  # the second site
    found = verify(bank, "it", example("cpu"))
    assert found.not_run == {1: "on another rank"} and found.differences == [] and bank.all_free()
    elsewhere = iter([1])
    runs.clear()
    with pytest.raises(RuntimeError, match=r"^variant it runs eager \(on another rank\) and cannot be"):
        verify(bank, "it", example("cpu"))
    assert not runs and bank.all_free()


def test_gradients_that_grow_from_site_to_site_are_verified_all_the_same(device: str) -> None:
    """Bug: with parts between sites that stay eager they overflowed, and were infinite on both ways."""
    grows = Applies(lambda hidden: hidden * 1e4 - hidden.detach() * (1e4 - 1))
    found = verified([Baked(2.5), *[grows] * 12], device).differences
    assert "gradient of the input" in {it.tensor for it in found}
    assert {it.index for it in found} == {0}


def test_an_error_in_a_module_leaves_no_gradient_behind(device: str) -> None:
    is_broken = False

    def fail(_grad: Tensor) -> None:
        raise ValueError("of this module")

    def raises(hidden: Tensor) -> Tensor:
        out = hidden * 2
        if is_broken and not Baked.is_captured:
            out.register_hook(fail)
        return out

    pair = Pair(device, [Block(), Applies(raises), Block()], main_grad=True, guard=captures)
    bank = pair.capture(variant("it")).bank
    for param in pair.params():
        param.main_grad.uniform_()
    before, counters = [param.main_grad.clone() for param in pair.params()], bank.counters()
    is_broken = True
    with pytest.raises(ValueError, match="of this module"):
        verify(bank, "it", example(device))
    is_broken = False
    assert bank.counters() == counters and all(param.grad is None for param in pair.params())
    assert_same_bits([param.main_grad for param in pair.params()], before, "what a failed one left")
    deadline = time.monotonic() + 10.0
    while bank.holders() and time.monotonic() < deadline:
        time.sleep(0.01)  # autograd's thread lets go of what has raised a moment after it did so here
    assert verify(bank, "it", example(device)).differences == []


@pytest.mark.parametrize("training", [True, False])
def test_rows_that_nobody_reads_may_hold_anything(device: str, training: bool) -> None:
    draws = random.Random(3)  # nobody else's: a draw from Python's own would leave the layer eager

    def littered(hidden: Tensor) -> Tensor:
        return torch.cat([hidden[:4] * 2, hidden[4:].detach() * draws.random()])

    layers = [Applies(littered), nn.Tanh()]
    bank = captured(layers, device, training=training)
    given = example(device)
    all_rows = verify(bank, "it", given)
    assert all_rows.differences or all_rows.within_spread
    assert_right(verify(bank, "it", dataclasses.replace(given, valid_rows=torch.arange(4, device=device))))


def test_sites_that_stay_eager_are_passed_over(device: str) -> None:
    def refuses(hidden: Tensor) -> Tensor:
        if Baked.is_captured:
            raise RuntimeError("not in a capture")
        return hidden * 3

    layers = [Block(), Applies(refuses), Baked(2.5), Block()]
    bank = captured(layers, device)
    assert set(bank.eager_sites) == {1}
    counters = bank.counters()
    found = verify(bank, "it", example(device)).differences
    assert {it.index for it in found} == {2} and bank.counters() == counters


def test_a_bank_that_cannot_replay_says_so(pair: Pair) -> None:
    torch.use_deterministic_algorithms(False)  # the fixture puts it back
    with pytest.raises(RuntimeError, match=r"variant train runs eager \(NUMERICS_CHANGED\) and cannot be"):
        verify(pair.bank, "train", example(pair.device))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rows", [ROWS, ROWS - 2])
@pytest.mark.parametrize("eager_at", [{0}, {1}, {0, 1, 2}, {3}])
def test_sites_are_verified_beside_eager_parts(device: str, rows: int, eager_at: Any, training: bool) -> None:
    """Bug: behind something eager, only micro-batches that filled the capacity were compared at all."""
    steps: list[Any] = [Block(), Baked(2.0), Baked(2.5)]
    part = EagerPart(name="between", module=steps[0], forward=lambda _module, before, **_: before * 1.5)
    for place in sorted(eager_at, reverse=True):
        steps.insert(place, part)
    bank = captured(steps, device, training=training, fewer_rows=True)
    found = verify(bank, "it", example(device, rows=rows))
    assert not bank.failures and found.not_run == {}
    assert {it.index for it in found.differences} == {2}


def test_a_site_that_does_not_take_the_micro_batch_is_named_with_its_reason(device: str) -> None:
    layers = blocks(3)
    bank = captured(layers, device, **together(lambda said: said))

    def site(leaf: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda it: it, lambda it: it):
            return second(leaf)

    first, second, third = bank.sites
    bank.sites = (first, site, third)
    assert verify(bank, "it", example(device)).not_run == {1: "RECOMPUTING"}


class Counts(nn.Module):
    """Adds up its rows in one of several places, which its graph may not do; has what cannot be written."""

    def __init__(self, where: str, device: str, *, in_graph: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, device=device))
        self.where, self.in_graph = where, in_graph
        self.register_buffer("counted", torch.zeros(WIDTH, device=device))
        self.kept, self.foreign = torch.zeros(WIDTH, device=device), [torch.zeros(WIDTH, device=device)]
        self.others = [nn.Parameter(torch.zeros(WIDTH, device=device))]  # past `parameters()`
        self.register_buffer("expanded", torch.zeros(1, device=device).expand(WIDTH))
        self.nowhere = torch.zeros(WIDTH, device="meta")

    @property
    def written(self) -> Tensor:
        places = {"buffer": self.counted, "attribute": self.kept, "state": self.foreign[0]}
        return {**places, "parameter": self.others[0].detach()}[self.where]

    def forward(self, hidden: Tensor) -> Tensor:
        if self.in_graph or not Baked.is_captured:
            self.written.add_(hidden.detach().abs().sum(0))
        return hidden * self.weight


NAMES = {"buffer": "buffer counted", "attribute": "attribute kept", "state": "further state 0"}
NAMES["parameter"] = "attribute others[0]"


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", NAMES)
def test_written_state_is_compared_and_reset(device: str, where: str, training: bool, in_graph: bool) -> None:
    """Bug: it was never compared; and a plain attribute had counted every run afterwards."""
    layer = Counts(where, device, in_graph=in_graph)
    further: dict[str, Any] = {"state": lambda module: module.foreign} if where == "state" else {}
    layers = blocks(2)
    steps = [layers[0], SiteSpec(name="counts", module=layer, **further), layers[1]]
    bank = captured(steps, device, training=training)
    assert not bank.failures and not layer.written.any()  # as before the capture
    layer.written.fill_(7.0)
    found = verify(bank, "it", example(device))
    assert [(it.index, it.tensor) for it in found.differences] == ([] if in_graph else [(1, NAMES[where])])
    assert found.within_spread == set()
    assert bool((layer.written == 7.0).all())


def test_one_run_is_let_go_before_the_next(device: str) -> None:
    factors, alive = itertools.count(1), []
    outs: list[weakref.ref[Tensor]] = []

    def counted(hidden: Tensor) -> Tensor:
        if Baked.is_captured:
            return hidden * 2
        alive.append(sum(out() is not None for out in outs))
        out = hidden * next(factors)
        outs.append(weakref.ref(out))
        return out

    layer = Applies(counted)
    bank = captured([layer], device, training=False)
    alive.clear()
    verify(bank, "it", example(device))
    assert len(alive) >= 5 and set(alive) == {0}


def test_a_backward_reads_what_its_own_forward_has_written(device: str) -> None:
    class Scratch(nn.Module):
        """Keeps its scale in a buffer, for its backward."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.copy_(hidden.abs().amax(0) + 1)
            return hidden * self.scale

    assert verified([Scratch(), Scratch()], device).differences == []
