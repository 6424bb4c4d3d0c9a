# SPDX-License-Identifier: Apache-2.0
"""Graphs are compared with their modules: what differs is named, and nothing is left behind."""

import contextlib
import dataclasses
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from bank_pair import ROWS, WIDTH, Block, Pair, blocks, give_main_grads, rng_states, variant
from torch import Tensor, nn

from megagraph.bank.backends import KeptMemoryError
from megagraph.bank.bank import Bank, BankOptions
from megagraph.bank.sites import EagerPart, SiteSpec
from megagraph.bank.verify import Example, Verification, verify


class Baked(nn.Module):
    """Doubles, and as it was captured something else: what a graph does that has baked in a value."""

    is_captured = False

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, hidden: Tensor) -> Tensor:
        """What is called."""
        return hidden * self.weight * (self.factor if Baked.is_captured else 2.0)


@contextlib.contextmanager
def _captures() -> Iterator[None]:
    """A bank's guard: around captures, and around replays of the host backend."""
    Baked.is_captured = True
    try:
        yield
    finally:
        Baked.is_captured = False


def captured(layers: Sequence[nn.Module], device: str, *, training: bool) -> Bank:
    bank = Bank([layer.to(device) for layer in layers], device, options=BankOptions(guard=_captures))
    bank.capture([variant("it", training=training)])
    assert not bank.failures
    return bank


def example(device: str, *, rows: int = ROWS) -> Example:
    generator = torch.Generator().manual_seed(5)
    hidden, grad = (torch.randn(rows, WIDTH, generator=generator).to(device) for _ in range(2))
    return Example(hidden=hidden, grad=grad)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("main_grads", [True, False])
def test_graphs_that_are_right_differ_in_nothing_and_nothing_is_left(
    device: str, training: bool, main_grads: bool
) -> None:
    layers = [layer.to(device) for layer in [*blocks(), nn.Dropout(0.5 if device == "cuda" else 0.0)]]
    held = give_main_grads(layers) if main_grads else []
    bank = captured(layers, device, training=training)
    params = [param for layer in layers for param in layer.parameters()]
    for param in params:
        if main_grads:
            param.main_grad.uniform_()  # type: ignore[attr-defined]
        else:
            param.grad = torch.rand_like(param)
    before = [getattr(param, "main_grad", param.grad).clone() for param in params]
    states, counters = rng_states(device), bank.counters()
    verified = verify(bank, "it", example(device))
    assert verified.differences == [] and verified.within_spread == set()
    assert verified.num_replays == len(layers)
    after = [getattr(param, "main_grad", param.grad) for param in params]
    assert all(map(torch.equal, before, after))
    assert all(map(torch.equal, states, rng_states(device))) and bank.counters() == counters
    assert bank.core.all_free() and len(held) == (len(params) if main_grads else 0)


@pytest.mark.parametrize("training", [True, False])
def test_a_value_that_was_baked_in_is_named_with_its_site(device: str, training: bool) -> None:
    layers = [Block(), Baked(2.5), Block()]
    bank = captured(layers, device, training=training)
    verified = verify(bank, "it", example(device))
    assert {found.index for found in verified.differences} == {1}  # and not what comes after it
    names = [found.tensor for found in verified.differences]
    assert names == (["output", "gradient of the input", "gradient of weight"] if training else ["output"])
    assert str(verified.differences[0]).startswith("output differs from eager by up to ")


@pytest.mark.parametrize("graph_has_it", [True, False])
def test_a_gradient_that_only_one_of_them_makes_is_a_difference(device: str, graph_has_it: bool) -> None:
    class Partly(nn.Module):
        """Uses its weight in a capture only, or outside of it only."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * 2 + (self.weight if Baked.is_captured is graph_has_it else 0)

    layers = [Partly(), nn.Tanh()]
    bank = captured(layers, device, training=True)
    (found,) = verify(bank, "it", example(device)).differences
    assert (found.index, found.tensor, found.off) == (0, "gradient of weight", float("inf"))


def test_one_bit_is_a_difference(device: str) -> None:
    layer = Baked(2.0 * (1 + 2**-23))
    bank = captured([layer], device, training=False)
    assert verify(bank, "it", example(device)).differences


def test_a_module_that_differs_from_itself_may_differ_from_its_graph_as_much(device: str) -> None:
    class Noisy(nn.Module):
        """Another result in each call, of no random stream of torch's."""

        def __init__(self, least: float, most: float) -> None:
            super().__init__()
            self.range = least, most

        def forward(self, hidden: Tensor) -> Tensor:
            least, most = self.range
            return hidden * (1.5 if Baked.is_captured else random.uniform(least, most))

    random.seed(3)
    wide, narrow = Noisy(1.0, 2.0), Noisy(1.0, 1.1)
    bank = captured([wide], device, training=False)
    verified = verify(bank, "it", example(device))
    assert verified.differences == [] and verified.within_spread == {0}
    bank = captured([narrow], device, training=False)
    (found,) = verify(bank, "it", example(device)).differences
    assert 0 < found.spread < found.off and "and eager there from itself by up to" in str(found)


def test_a_module_that_seldom_differs_from_itself_in_some_tensor_is_run_again(device: str) -> None:
    class Rarely(nn.Module):
        """Its weight's gradient is another one in few runs, and its output in all."""

        def __init__(self, factor: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.factor, self.runs = factor, itertools.count()

        def forward(self, hidden: Tensor) -> Tensor:
            if Baked.is_captured:
                return hidden * self.weight * 1.25 + (
                    self.weight * self.factor - self.weight.detach() * self.factor
                )
            out = hidden * self.weight * random.uniform(1.0, 2.0)
            rarely = 3.0 if next(self.runs) == 9 else 2.0
            return out + (self.weight * rarely - self.weight.detach() * rarely)

    random.seed(3)
    for factor, differs in ((3.0, False), (9.0, True)):
        layer = Rarely(factor)
        held = give_main_grads([layer.to(device)])
        bank = captured([layer], device, training=True)
        given = dataclasses.replace(example(device), hidden=torch.zeros(ROWS, WIDTH, device=device))
        given.hidden[0] = 1e-3  # so that the other gradients hardly matter
        verified = verify(bank, "it", given)
        names = {found.tensor for found in verified.differences}
        assert names == ({"gradient of weight"} if differs else set()), (factor, verified.differences)
        assert held


@pytest.mark.parametrize("differs_elsewhere", [False, True])
def test_ranks_that_share_communicators_run_their_modules_as_often(differs_elsewhere: bool) -> None:
    """Bug: where a layer differed from itself on one rank alone, only that rank ran it again."""

    class Counts(nn.Module):
        """Its eager calls, each of which would enter a collective."""

        calls = 0

        def forward(self, hidden: Tensor) -> Tensor:
            Counts.calls += not Baked.is_captured
            return hidden * 2

    def max_over_ranks(said: Sequence[int]) -> list[int]:
        is_of_runs = is_verified and len(said) == 1  # and not of whether a site is run at all
        return [1 if differs_elsewhere and is_of_runs else it for it in said]

    Counts.calls, is_verified = 0, False
    layers = [Counts(), nn.Tanh()]
    bank = Bank(
        layers,
        "cpu",
        options=BankOptions(holds_collectives=True, guard=_captures, max_over_ranks=max_over_ranks),
    )
    bank.capture([variant("it", training=False)])
    Counts.calls, is_verified = 0, True
    verified = verify(bank, "it", example("cpu"))
    assert verified.differences == [] and verified.within_spread == set()
    assert Counts.calls == (4 * 20 if differs_elsewhere else 1)  # verified as often as there


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replayed CUDA graph runs no Python")
@pytest.mark.parametrize("times", [1, 2])
def test_a_graph_that_lies_far_off_once_is_right_if_its_module_scatters(times: int) -> None:
    class Scatters(nn.Module):
        """Its calls differ a little, and those of its graph sometimes by much more."""

        def __init__(self) -> None:
            super().__init__()
            self.far = [1.0] * times

        def forward(self, hidden: Tensor) -> Tensor:
            if Baked.is_captured:
                return hidden * (5.0 if is_verified and self.far and self.far.pop() else 1.5)
            return hidden * random.uniform(1.4, 1.6)

    random.seed(3)
    is_verified = False
    layer = Scatters()
    bank = captured([layer], "cpu", training=False)
    is_verified = True
    verified = verify(bank, "it", example("cpu"))
    assert [found.tensor for found in verified.differences] == ["output"] * (times - 1)
    assert verified.within_spread == ({0} if times == 1 else set()) and layer.far == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replayed CUDA graph runs no Python")
@pytest.mark.parametrize("entry", [1 + 2**-8, 1.5])
@pytest.mark.parametrize("times", [3, 4])
def test_a_rounding_that_does_not_recur_is_chance_but_where_algorithms_are_deterministic(
    times: int, entry: float
) -> None:
    class Rounds(nn.Module):
        """Its calls are alike, and one entry of its graph's first ones is another one."""

        def __init__(self) -> None:
            super().__init__()
            self.others = [entry] * times

        def forward(self, hidden: Tensor) -> Tensor:
            out = hidden * 1.5
            if Baked.is_captured and is_verified and self.others:
                out.data[0, 0] *= self.others.pop()
            return out

    for is_exact in (False, True):
        torch.use_deterministic_algorithms(is_exact)
        is_verified = False
        layer = Rounds()
        bank = captured([layer], "cpu", training=False)
        is_verified = True
        given = dataclasses.replace(example("cpu"), hidden=torch.ones(ROWS, WIDTH))
        is_chance = not is_exact and entry < 1.5 and times < 4
        assert bool(verify(bank, "it", given).differences) is not is_chance
        assert len(layer.others) == (0 if not is_exact and entry < 1.5 else times - 1)


@pytest.mark.parametrize("growth", [1e4, 1.0])
def test_gradients_that_grow_from_site_to_site_are_verified_all_the_same(device: str, growth: float) -> None:
    """Bug: with parts between sites that stay eager they overflowed, and were infinite on both ways."""

    class Scale(nn.Module):
        """Its input again, whose gradient grows."""

        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * self.factor - hidden.detach() * (self.factor - 1)

    layers = [Baked(2.5), *(Scale(growth) for _ in range(12))]
    bank = captured(layers, device, training=True)
    found = verify(bank, "it", example(device)).differences
    assert "gradient of the input" in {it.tensor for it in found if it.index == 0}
    assert {it.index for it in found} == {0}


def test_an_error_in_a_module_leaves_no_gradient_behind(device: str) -> None:
    class Raises(Block):
        """Its eager calls raise in the backward, once it was captured."""

        is_broken = False

        def forward(self, hidden: Tensor) -> Tensor:
            out = super().forward(hidden)
            if Raises.is_broken and not Baked.is_captured:
                out.register_hook(self._fail)
            return out

        def _fail(self, grad: Tensor) -> None:
            raise ValueError("of this module")

    layers = [layer.to(device) for layer in (Block(), Raises(), Block())]
    held = give_main_grads(layers)
    bank = captured(layers, device, training=True)
    params = [param for layer in layers for param in layer.parameters()]
    for param in params:
        param.main_grad.uniform_()  # type: ignore[attr-defined]
    before = [param.main_grad.clone() for param in params]  # type: ignore[attr-defined]
    counters = bank.counters()
    Raises.is_broken = True
    with pytest.raises(ValueError, match="of this module"):
        verify(bank, "it", example(device))
    Raises.is_broken = False
    assert bank.counters() == counters
    assert held and all(torch.equal(param.main_grad, old) for param, old in zip(params, before, strict=True))  # type: ignore[attr-defined]
    assert all(param.grad is None for param in params)
    gc.collect()
    assert verify(bank, "it", example(device)).differences == []


@pytest.mark.parametrize("training", [True, False])
def test_rows_that_nobody_reads_may_hold_anything(device: str, training: bool) -> None:
    class Littered(nn.Module):
        """Leaves something else behind the fourth row in each call."""

        def forward(self, hidden: Tensor) -> Tensor:
            litter = torch.full_like(hidden[4:], random.random())
            return torch.cat([hidden[:4] * 2, litter * hidden[4:].detach()])

    layers = [Littered(), nn.Tanh()]
    bank = captured(layers, device, training=training)
    given = example(device)
    all_rows = verify(bank, "it", given)
    assert all_rows.differences or all_rows.within_spread
    read = dataclasses.replace(given, valid_rows=torch.arange(4, device=device))
    verified = verify(bank, "it", read)
    assert verified.differences == [] and verified.within_spread == set()


def test_what_is_no_number_in_both_is_the_same(device: str) -> None:
    layer = Block()
    bank = captured([layer], device, training=True)
    given = example(device)
    given.hidden[0, 0] = float("nan")
    assert verify(bank, "it", given).differences == []


def test_sites_that_stay_eager_are_passed_over(device: str) -> None:
    class Refuses(nn.Module):
        """Cannot be captured."""

        def forward(self, hidden: Tensor) -> Tensor:
            if Baked.is_captured:
                raise RuntimeError("not in a capture")
            return hidden * 3

    layers = [layer.to(device) for layer in (Block(), Refuses(), Baked(2.5), Block())]
    bank = Bank(layers, device, options=BankOptions(guard=_captures))
    bank.capture([variant("it")])
    assert set(bank.eager_sites) == {1}
    counters = bank.counters()
    verified = verify(bank, "it", example(device))
    assert {found.index for found in verified.differences} == {2} and bank.counters() == counters


def test_the_listener_hears_nothing_of_it(device: str) -> None:
    layers = [layer.to(device) for layer in blocks()]
    held = give_main_grads(layers)
    bank = captured(layers, device, training=True)
    heard: list[Any] = []
    bank.listen(lambda: True, lambda *sites: heard.append(sites), [0])
    verify(bank, "it", example(device))
    assert not heard and held
    with bank.micro_batch("it"):
        bank(example(device).hidden.requires_grad_()).sum().backward()
    assert heard


def test_a_bank_that_cannot_replay_says_so(device: str) -> None:
    pair = Pair(device, blocks()).capture()
    torch.use_deterministic_algorithms(False)  # the fixture puts it back
    with pytest.raises(RuntimeError, match=r"variant train runs eager \(NUMERICS_CHANGED\) and cannot be"):
        verify(pair.bank, "train", example(device))


# -- which sites are verified ----------------------------------------------------------------------


def eager_part(module: nn.Module) -> EagerPart:
    """Something between two sites."""
    return EagerPart(name="between", module=module, forward=lambda _module, before, **_: before * 1.5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rows", [ROWS, ROWS - 2])
@pytest.mark.parametrize("eager_at", [{0}, {1}, {0, 1, 2}, {3}])
def test_every_site_is_verified_wherever_something_eager_lies(
    device: str, rows: int, eager_at: set[int], training: bool
) -> None:
    """Bug: behind something eager, only micro-batches that filled the capacity were compared at all."""
    layers = [layer.to(device) for layer in (Block(), Baked(2.0), Baked(2.5))]
    steps: list[nn.Module | EagerPart] = [*layers]
    for place in sorted(eager_at, reverse=True):
        steps.insert(place, eager_part(layers[0]))
    bank = Bank(steps, device, options=BankOptions(guard=_captures))
    bank.capture([dataclasses.replace(variant("it", training=training), fewer_rows=True)])
    assert not bank.failures
    verified = verify(bank, "it", example(device, rows=rows))
    assert verified.num_replays == len(layers) and verified.not_run == {}
    assert {found.index for found in verified.differences} == {2}


def test_a_site_that_does_not_take_the_micro_batch_is_named_with_its_reason(device: str) -> None:
    layers = [layer.to(device) for layer in blocks(3)]
    bank = captured(layers, device, training=True)

    def site(leaf: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda it: it, lambda it: it):
            return second(leaf)

    first, second, third = bank.sites
    bank.sites = (first, site, third)  # type: ignore[assignment]
    verified = verify(bank, "it", example(device))
    assert verified.not_run == {1: "RECOMPUTING"} and verified.num_replays == 2


# -- what calls write beside gradients -------------------------------------------------------------


class Counts(nn.Module):
    """Adds up its rows: in a buffer, a plain attribute, or what belongs to nobody; its graph may not."""

    def __init__(self, where: str, *, in_graph: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.where, self.in_graph = where, in_graph
        self.register_buffer("counted", torch.zeros(WIDTH))
        self.kept, self.foreign = torch.zeros(WIDTH), [torch.zeros(WIDTH)]

    def to(self, device: Any) -> "Counts":  # type: ignore[override]
        """Plain attributes as well."""
        self.kept, self.foreign = self.kept.to(device), [self.foreign[0].to(device)]
        return super().to(device)

    @property
    def written(self) -> Tensor:
        """Where it counts."""
        return {"buffer": self.counted, "attribute": self.kept, "state": self.foreign[0]}[self.where]  # type: ignore[dict-item]

    def forward(self, hidden: Tensor) -> Tensor:
        if self.in_graph or not Baked.is_captured:
            self.written.add_(hidden.detach().abs().sum(0))
        return hidden * self.weight


NAMES = {"buffer": "buffer counted", "attribute": "attribute kept", "state": "further state 0"}


@contextlib.contextmanager
def captured_counts(
    where: str, device: str, *, in_graph: bool, training: bool
) -> Iterator[tuple[Bank, Counts]]:
    """One module that counts, between two that do not; they live as long as the context."""
    layer = Counts(where, in_graph=in_graph).to(device)
    before, after = (it.to(device) for it in blocks(2))
    further: dict[str, Any] = {"state": lambda module: module.foreign} if where == "state" else {}
    bank = Bank(
        [before, SiteSpec(name="counts", module=layer, **further), after],
        device,
        options=BankOptions(guard=_captures),
    )
    bank.capture([variant("it", training=training)])
    assert not bank.failures
    yield bank, layer


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", NAMES)
def test_what_a_graph_fails_to_write_is_a_difference(device: str, where: str, training: bool) -> None:
    """Bug: it was put back, and never compared."""
    with captured_counts(where, device, in_graph=False, training=training) as (bank, layer):
        layer.written.fill_(7.0)
        (found,) = verify(bank, "it", example(device)).differences
        assert (found.index, found.tensor) == (1, NAMES[where]) and bool((layer.written == 7.0).all())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", NAMES)
def test_what_a_graph_writes_as_its_module_is_right_and_put_back(
    device: str, where: str, training: bool
) -> None:
    """Bug: a plain attribute had counted every run of a verification afterwards."""
    with captured_counts(where, device, in_graph=True, training=training) as (bank, layer):
        assert not layer.written.any()  # as before the capture
        layer.written.fill_(7.0)
        verified = verify(bank, "it", example(device))
        assert verified.differences == [] and verified.within_spread == set()
        assert bool((layer.written == 7.0).all())


class Averages(nn.Module):
    """Keeps a running average of another's parameter in a list, past `parameters()`; its graph may not."""

    def __init__(self, *, in_graph: bool) -> None:
        super().__init__()
        self.in_graph, self.weight = in_graph, nn.Parameter(torch.ones(WIDTH))
        self.averages = [nn.Parameter(torch.zeros(WIDTH))]
        self.register_buffer("expanded", torch.zeros(1).expand(WIDTH))
        self.nowhere = torch.zeros(WIDTH, device="meta")

    def forward(self, hidden: Tensor) -> Tensor:
        if self.in_graph or not Baked.is_captured:
            with torch.no_grad():
                self.averages[0].mul_(0.5).add_(hidden.detach().mean(0))
        return hidden * self.weight


@pytest.mark.parametrize("in_graph", [True, False])
def test_what_requires_a_gradient_is_compared_and_what_cannot_be_written_is_left_out(in_graph: bool) -> None:
    layer = Averages(in_graph=in_graph)
    bank = captured([layer], "cpu", training=True)
    found = verify(bank, "it", example("cpu")).differences
    assert [it.tensor for it in found] == ([] if in_graph else ["attribute averages[0]"])
    assert not layer.averages[0].any()


def test_one_run_is_let_go_before_the_next(device: str) -> None:
    class Counted(nn.Module):
        """Knows how many outputs of its eager runs live when another one begins."""

        def __init__(self) -> None:
            super().__init__()
            self.factors = itertools.count(1)

        def forward(self, hidden: Tensor) -> Tensor:
            if Baked.is_captured:
                return hidden * 2
            alive.append(sum(out() is not None for out in outs))
            out = hidden * next(self.factors)
            outs.append(weakref.ref(out))
            return out

    outs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    layer = Counted()
    bank = captured([layer], device, training=False)
    alive.clear()
    verify(bank, "it", example(device))
    assert len(alive) >= 5 and set(alive) == {0}


def test_what_one_rank_cannot_run_no_rank_compares() -> None:
    """Or it would wait in its module's collective for the others."""

    def max_over_ranks(said: Sequence[int]) -> list[int]:
        return [1, 1] if is_verified and list(said) == [0, 1] else list(said)  # of the second site

    is_verified = False
    layers = blocks(3)
    bank = Bank(
        layers,
        "cpu",
        options=BankOptions(holds_collectives=True, guard=_captures, max_over_ranks=max_over_ranks),
    )
    bank.capture([variant("it")])
    is_verified = True
    verified = verify(bank, "it", example("cpu"))
    assert verified.not_run == {1: "on another rank"} and verified.num_replays == 2
    assert verified.differences == [] and bank.core.all_free()


def test_a_backward_reads_what_its_own_forward_has_written(device: str) -> None:
    class Scratch(nn.Module):
        """Keeps its scale in a buffer, for its backward."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.copy_(hidden.abs().amax(0) + 1)  # type: ignore[operator]
            return hidden * self.scale

    layers = [Scratch(), Scratch()]
    bank = captured(layers, device, training=True)
    assert verify(bank, "it", example(device)).differences == []


# -- memory of graphs and of what is verified -------------------------------------------------------


class _ReadsFreed(torch.autograd.Function):
    """Doubles. The backward of a capture reads memory that was given back when the forward ended."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, alias: Callable[[Tensor], Tensor]) -> Tensor:
        factor = torch.full_like(hidden, 2.0)
        ctx.factor = alias(factor) if torch.cuda.is_current_stream_capturing() else factor
        return hidden * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


@pytest.mark.gpu
def test_a_kernel_that_reads_freed_memory_is_found() -> None:
    class Doubles(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            out: Tensor = _ReadsFreed.apply(hidden, bank.backend.boundary)
            return out

    layers = [layer.to("cuda") for layer in (Block(), Doubles(), *blocks(6))]
    bank = Bank(layers, "cuda")
    bank.capture([variant("it")])
    assert not bank.failures
    verified = verify(bank, "it", example("cuda"))
    # Whoever comes before it gets a gradient of its own.
    assert {(found.index, found.tensor) for found in verified.differences} == {(1, "gradient of the input")}


@pytest.mark.gpu
def test_a_write_into_the_pool_between_forward_and_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = blocks()
    bank = captured(layers, "cuda", training=True)
    assert verify(bank, "it", example("cuda")).differences == []
    original = Verification._run_backwards

    def spoil(verification: Verification) -> None:
        pools = [it for it in torch.cuda.memory_snapshot() if tuple(it["segment_pool_id"]) != (0, 0)]
        assert pools
        for segment in pools:
            size = segment["total_size"]
            storage = torch._C._construct_storage_from_data_pointer(
                segment["address"], torch.device("cuda", segment["device"]), size
            )
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,)).fill_(0x3F)
        original(verification)

    monkeypatch.setattr(Verification, "_run_backwards", spoil)
    found = verify(bank, "it", example("cuda")).differences
    assert {difference.index for difference in found} == {*range(len(bank.sites))}


class _Wide(nn.Module):
    """A layer that saves three activations, and may keep one for somebody."""

    kept: ClassVar[list[Tensor]] = []

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)
        self.keeps = keeps

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.tanh(self.into(hidden)).exp()
        if self.keeps and not Baked.is_captured:
            _Wide.kept.append(inner.detach())
        return hidden + torch.tanh(self.out(inner))


_MANY_ROWS = 1 << 15  # 64 MiB for each activation of 512 columns


def _wide_example() -> Example:
    return Example(hidden=torch.randn(_MANY_ROWS, WIDTH, device="cuda"))


def _captured_wide(layers: Sequence[nn.Module]) -> Bank:
    bank = Bank([layer.to("cuda") for layer in layers], "cuda", options=BankOptions(guard=_captures))
    bank.capture([dataclasses.replace(variant("it"), rows=_MANY_ROWS)])
    assert not bank.failures
    return bank


@pytest.mark.gpu
def test_modules_run_in_memory_that_the_graphs_have() -> None:
    layers = [_Wide() for _ in range(4)]
    bank = _captured_wide(layers)
    given, pool = _wide_example(), bank.pool_bytes()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        verified = verify(bank, "it", given)
        assert verified.differences == [] and verified.num_replays == 4
    # Copies of what one site makes: of 2 MiB each, where a module alone needs three times 64 MiB.
    assert torch.cuda.max_memory_reserved() - before <= 48 << 20
    assert bank.pool_bytes() - pool <= 4 << 20 and verified.most_bytes <= 48 << 20


@pytest.mark.gpu
def test_a_module_that_keeps_what_was_lent_is_an_error() -> None:
    layers = [_Wide(), _Wide(keeps=True), _Wide()]
    bank = _captured_wide(layers)
    _Wide.kept.clear()
    with pytest.raises(KeptMemoryError, match=f"{64 << 20} bytes that were lent are still in use"):
        verify(bank, "it", _wide_example())
    _Wide.kept.clear()


@pytest.mark.gpu
def test_where_a_pool_cannot_be_lent_modules_run_in_memory_of_their_own() -> None:
    layers = [_Wide() for _ in range(3)]
    bank = _captured_wide(layers)
    note = bank.captured[0].notes[0][2]
    with bank.backend.recording(), bank.backend.lend(0, note) as lent:
        with lent():
            held = torch.empty(1 << 20, device="cuda")
        with bank.backend.lend(0, note) as again, again():
            elsewhere = torch.empty(1 << 20, device="cuda")
        assert verify(bank, "it", _wide_example()).differences == []
        assert held.data_ptr() != elsewhere.data_ptr()
        del held, elsewhere
