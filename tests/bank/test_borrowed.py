# SPDX-License-Identifier: Apache-2.0
"""Tensors beside parameters and buffers: past the modules of a site, and in their plain attributes. A capture
leaves them alone, and no replay works on one that is gone. Gradients are added once, and none is lost."""

import contextlib
import copy
import gc
import pickle
import random
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace as Namespace
from typing import Any

import numpy
import pytest
import torch
from bank_pair import WIDTH, Applies, Block, Pair, unowned, variant
from delayed_linear import FILLER, DelayedLinear
from same_bits import assert_same_bits
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from megagraph import _C
from megagraph._C import PlainAttributes, plain_tensors
from megagraph.reasons import EagerReason


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


CHANGES: dict[str, Callable[[list[Tensor]], object]] = {
    "dropped": lambda held: held.append(held.pop() * 2),
    "moved": lambda held: setattr(held[0], "data", held[0].data.clone()),
    "freed": lambda held: held[0].untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_dropped_or_moved_tensor_is_noticed(device: str, change: str, in_backward: bool) -> None:
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
    CHANGES[change](held)
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


def test_nothing_is_kept_of_sites_that_read_theirs_or_trace_unknown_shapes(device: str, capfd: Any) -> None:
    """Bug: such a tensor has no number of bytes, and each op of a compiler left a line on standard error."""

    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(WIDTH))
            self.number, self.in_list = torch.ones((), device=device), [torch.ones(WIDTH, device=device)]

        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden * self.table * self.number) + self.in_list[0]

    def compiles(hidden: Tensor) -> Tensor:
        make_fx(torch.sin, tracing_mode="symbolic")(torch.ones(WIDTH, device=hidden.device))
        return hidden * 2

    layers = [Own(), Own(), nn.Dropout(0.0), Applies(compiles), Block()]
    pair = Pair(device, layers, num_slots=2, main_grad=True).capture()
    assert pair.step() is None and kept(pair) == [0] * 5
    assert "RecordFunction" not in capfd.readouterr().err


def test_a_number_on_the_cpu_is_compared_beside_graphs_on_a_gpu() -> None:
    """It is an argument of a kernel; beside the host backend it is memory that replays read."""
    number, hidden = torch.tensor(2.0), torch.randn(3)
    for device, is_baked in (("cuda", True), ("cpu", False)):
        reads = _C.ReadTrace(torch.device(device))
        with reads.watching(hidden, []):
            hidden * number
        reads.keep([hidden])
        assert len(reads) == 1 and not reads.has_moved()
        number += 1
        assert reads.has_moved() == is_baked


class _Hidden(torch.autograd.Function):
    """Multiplies by a weight that no op is given, as a kernel that is called beside torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return hidden * unowned(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * unowned(ctx.weight), grad.sum(0)


def _by_hand(weight: Tensor, hidden: Tensor) -> Tensor:
    """As Transformer Engine's modules call their functions."""
    if torch.is_grad_enabled():
        return _Hidden.apply(hidden, weight)
    return _Hidden.forward(contextlib.nullcontext(), hidden, weight)


reentrant = partial(checkpoint, use_reentrant=True, preserve_rng_state=False)
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an op": torch.mul,
    "a function of autograd": _Hidden.apply,
    "a re-entrant checkpoint": lambda hidden, weight: reentrant(lambda it: it * weight, hidden),
    "one whose forward shows nothing": lambda hidden, weight: reentrant(partial(_by_hand, weight), hidden),
    "what was computed of it before": torch.mul,
}


@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("how", USES)
def test_a_borrowed_parameter_is_refused_and_its_gradient_kept(device: str, how: str, has_grad: bool) -> None:
    """Bug: a re-entrant checkpoint hid it, and left the gradient of the warm-up's random input in it."""
    adapter = nn.LayerNorm(WIDTH, device=device)
    weight: Tensor = adapter.weight
    before = weight.grad = torch.full((WIDTH,), 3.0, device=device) if has_grad else None
    given = weight * 2 if how == "what was computed of it before" else weight
    pair = Pair(device, [Block(), Applies(lambda hidden: USES[how](hidden, given))]).capture()
    name = "a tensor" if given is not weight else "weight of a LayerNorm"
    said = f"reaches {name} (torch.float32, (8,)), a parameter that none of its modules has"
    assert pair.failure(1, EagerReason.SHARED_PARAMETER) == said
    assert weight.grad is before and (before is None or bool((before == 3).all()))


LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    # As a checkpoint of a host's own makes it.
    "of its input": lambda hidden: hidden + hidden.detach().requires_grad_() * 0.5,
    "of its own": lambda hidden: hidden * hidden.new_full((WIDTH,), 1.5).requires_grad_(),
    "of data": lambda hidden: hidden * torch.tanh(hidden).data.requires_grad_(),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_a_leaf_that_a_forward_makes_is_no_borrowed_parameter(device: str, kind: str) -> None:
    """Bug: any leaf behind the outputs was taken for one, and left the layer eager."""
    pair = Pair(device, [Block(), Applies(LEAVES[kind]), Block()]).capture()
    assert pair.bank.failures == []
    pair.replay_steps(2)


@pytest.mark.parametrize("without_gradient", [torch.no_grad()(torch.square), torch.detach])
def test_a_parameter_without_a_gradient_is_memory(device: str, without_gradient: Any) -> None:
    adapter = nn.LayerNorm(WIDTH, device=device)
    reads = Applies(lambda hidden: hidden * without_gradient(adapter.weight))
    pair = Pair(device, [Block(), reads]).capture()
    assert pair.bank.failures == [] and kept(pair) == [0, 1]
    pair.replay_steps(2)


def test_a_parameter_from_elsewhere_is_memory_like_any_other_where_nothing_trains(device: str) -> None:
    adapter = nn.LayerNorm(WIDTH, device=device)
    pair = Pair(device, [Applies(lambda hidden: hidden * adapter.weight)])
    pair.capture(variant("even", training=False))
    assert pair.evaluate() is None
    assert pair.bank.counters()["replays"] == 1 and not pair.bank.have_borrowed_moved()
    adapter.weight = nn.Parameter(torch.zeros(WIDTH, device=device))
    assert pair.bank.have_borrowed_moved()


# -- tensors in plain attributes -----------------------------------------------------------------------


class Keeps(nn.Module):
    """Scales, and keeps something of its call by `keep`."""

    def __init__(self, keep: Callable[["Keeps", Tensor], None], **attributes: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.keep = keep
        self.__dict__.update(attributes)

    def forward(self, hidden: Tensor) -> Tensor:
        self.keep(self, hidden.detach())
        return hidden * self.scale


def largest(module: Any, hidden: Tensor) -> None:
    """As attention's statistics of its logits."""
    now = hidden.abs().max()
    module.largest = now if module.largest is None else torch.max(module.largest, now)


def appends(module: Any, hidden: Tensor) -> None:
    module.history.append(hidden.mean())


BY_NAME = {"by_name": {"mean": torch.zeros(()), "other": 1}}
# What a call keeps, and what has been there before.
Keeping = dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any]]]
REBINDING: Keeping = {
    "a statistic's first tensor": (largest, {"largest": None}),
    "another tensor": (largest, {"largest": torch.zeros(())}),
    "a longer list": (appends, {"history": [torch.zeros(())]}),
    "a dictionary": (lambda module, hidden: module.by_name.update(mean=hidden.mean()), BY_NAME),
    "a shorter dictionary": (lambda module, hidden: module.by_name.pop("other", None), BY_NAME),
    "a tuple": (lambda it, hidden: setattr(it, "pair", (hidden.mean(), 3)), {"pair": (torch.zeros(()), 2)}),
    "a new attribute": (lambda module, hidden: setattr(module, "created", hidden.mean()), {}),
    "a count of calls": (lambda module, hidden: setattr(module, "calls", module.calls + 1), {"calls": 0}),
    "none any more": (lambda module, hidden: setattr(module, "dropped", None), {"dropped": torch.zeros(())}),
}


def look(module: nn.Module) -> dict[str, Any]:
    return {name: value if isinstance(value, Tensor) else repr(value) for name, value in vars(module).items()}


def eager_one(pair: Pair) -> Keeps:
    """That of the second layer."""
    return next(child for child in pair.eager_layers[1].modules() if isinstance(child, Keeps))


@pytest.mark.parametrize("name", REBINDING)
def test_a_site_that_binds_another_tensor_or_value_stays_eager(device: str, name: str) -> None:
    """Bug: each replay read a tensor that the host had dropped. Nor would one count calls."""
    keep, given = REBINDING[name]
    moved = {key: it.to(device) if isinstance(it, Tensor) else copy.deepcopy(it) for key, it in given.items()}
    keeps, attribute = Keeps(keep, **moved), next(iter(given), "created")
    pair = Pair(device, [Block(), nn.Sequential(keeps, Block())])
    before = look(keeps)
    pair.capture()
    assert before.keys() == look(keeps).keys()
    for name, value in look(keeps).items():
        assert value is before[name] if isinstance(value, Tensor) else value == before[name]
    what = "has another value after a call" if attribute == "calls" else "was bound to another tensor"
    assert f"attribute {attribute!r} of Keeps '0' {what}" in pair.failure(1, EagerReason.CAPTURE_FAILED)
    pair.replay_steps(3, CAPTURE_FAILED=3)
    assert repr(vars(keeps).get(attribute)) == repr(vars(eager_one(pair)).get(attribute))


# What a call changes inside of one value.
INSIDE: Keeping = {
    "a namespace": (lambda it, _: vars(it.own).update(calls=it.own.calls + 1), {"own": Namespace(calls=0)}),
    "a nested dictionary": (lambda it, _: it.own["a"].update({len(it.own["a"]): 0}), {"own": {"a": {}}}),
    "a deque": (lambda it, _: it.own.append(it.own[-1] + 1), {"own": deque([0], maxlen=2)}),
    "Python's generator": (lambda it, _: it.own.random(), {"own": random.Random(0)}),
    "numpy's generator": (lambda it, _: it.own.random(), {"own": numpy.random.default_rng(0)}),
    "torch's generator": (lambda it, _: torch.rand(1, generator=it.own), {"own": torch.Generator()}),
}


def stand_of(value: Any) -> bytes:
    return pickle.dumps(value.get_state().numpy() if isinstance(value, torch.Generator) else value)


@pytest.mark.parametrize("name", INSIDE)
def test_what_a_call_changes_inside_a_value_is_put_back_and_its_site_is_eager(device: str, name: str) -> None:
    """Bug: a capture counted or drew as well, and verification took draws for noise."""
    keep, given = INSIDE[name]
    tangle: list[Any] = [{} for _ in range(40)]
    for each in tangle:
        each.update(dict.fromkeys(range(40), tangle))  # more paths than anybody can walk
    keeps = Keeps(keep, **copy.deepcopy(given), tangle=tangle)
    pair = Pair(device, [Block(), nn.Sequential(keeps, Block())])
    before = stand_of(keeps.own)
    pair.capture()
    assert stand_of(keeps.own) == before
    assert "has another value after a call" in pair.failure(1, EagerReason.CAPTURE_FAILED)
    pair.replay_steps(3, CAPTURE_FAILED=3)
    assert stand_of(keeps.own) == stand_of(eager_one(pair).own) != before


class Kept(dict[str, int]):
    """Bug: its own copy was asked for, and the capture ended in its error."""

    def copy(self) -> Any:
        raise RuntimeError("not to be copied")


def caches(module: Any, hidden: Tensor) -> None:
    module.cache.setdefault("width", hidden.shape[1])


SETTLING: Keeping = {
    "a flag": (lambda module, hidden: setattr(module, "flag", True), {"flag": False}),
    "a new attribute": (lambda module, hidden: setattr(module, "width", hidden.shape[1]), {}),
    "a cache": (caches, {"cache": {}}),
    "a cache of its own kind": (caches, {"cache": Kept()}),
}


@pytest.mark.parametrize("name", SETTLING)
def test_values_that_each_call_sets_to_the_same_stay_as_calls_leave_them(device: str, name: str) -> None:
    """As adapters set a flag of the layer beside them: such sites stayed eager."""
    keep, given = SETTLING[name]
    keeps = Keeps(keep, **copy.deepcopy(given), passed_over=1)
    pair = Pair(device, [Block(), nn.Sequential(keeps, Block())]).capture()
    assert not pair.bank.failures
    pair.replay_steps(3)
    assert {**look(keeps), "scale": None} == {**look(eager_one(pair)), "scale": None}


def test_a_site_whose_first_call_is_another_one_stays_eager(device: str) -> None:
    """A value that settles, by which a call goes before it sets it."""

    class First(Keeps):
        def forward(self, hidden: Tensor) -> Tensor:
            factor, self.factor = self.factor, 1.0
            return super().forward(hidden) * factor

    first = First(lambda module, hidden: None, factor=2.0)
    pair = Pair(device, [Block(), first]).capture()
    detail = pair.failure(1, EagerReason.CAPTURE_FAILED)
    assert "attribute 'factor' of First has another value after a call" in detail
    assert detail.endswith("and the next call made other outputs") and first.factor == 2.0
    pair.replay_steps(2, CAPTURE_FAILED=2)


MOVED = "was given other memory"
# What a call does, and what is said of it.
WRITES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a buffer anew": (lambda it: setattr(it, "steps", it.steps + 1), "a buffer was reassigned"),
    "a buffer's memory": (lambda it: setattr(it.steps, "data", it.steps + 1), f"buffer steps {MOVED}"),
    "an attribute's memory": (lambda it: it.factor.set_(it.factor * 2), f"attribute factor {MOVED}"),
    "a parameter's memory": (lambda it: setattr(it.scale, "data", it.scale * 2), f"scale {MOVED}"),
    "a parameter in place": (lambda it: it.scale.data.mul_(0.9), "writes its parameter scale"),
    "a row of a parameter": (lambda it: it.scale.data[1:3].fill_(0.5), "writes its parameter scale"),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_layer_that_writes_what_no_capture_puts_back_stays_eager(device: str, what: str) -> None:
    """Bug: replays worked on other memory, or captures had written parameters twice more, without a word."""
    write, said = WRITES[what]

    def keep(module: Any, hidden: Tensor) -> None:
        with torch.no_grad():
            write(module)

    layer = Keeps(keep, factor=torch.ones(WIDTH, device=device))
    layer.register_buffer("steps", torch.zeros((), device=device))
    pair = Pair(device, [nn.Linear(WIDTH, WIDTH), layer])
    mine: Any = pair.layers[1]
    held = {name: getattr(mine, name) for name in ("steps", "factor", "scale")}
    before = {name: (it.data_ptr(), it.clone()) for name, it in held.items()}
    pair.capture()
    for name, tensor in held.items():
        place, content = before[name]
        assert getattr(mine, name) is tensor
        assert tensor.data_ptr() == place and torch.equal(tensor, content)
    assert said in pair.failure(1, EagerReason.CAPTURE_FAILED)
    pair.replay_steps(3, CAPTURE_FAILED=3)
    eager: Any = pair.eager_layers[1]
    assert all(torch.equal(getattr(mine, name), getattr(eager, name)) for name in held)


def test_a_tensor_that_is_updated_in_place_is_advanced_by_each_replay_and_by_no_capture(device: str) -> None:
    def count(module: Any, hidden: Tensor) -> None:
        module.calls.add_(1)
        module.in_list[0].mul_(0.5).add_(hidden.abs().max())

    calls, in_list = torch.zeros((), device=device), [torch.ones((), device=device), "other"]
    pair = Pair(device, [Block(), Keeps(count, calls=calls, in_list=in_list)], num_slots=2).capture()
    eager: Any = pair.eager_layers[1]
    assert (calls.item(), *in_list) == (0, 1, "other")
    for step in range(4):
        assert pair.step() is None and calls.item() == step + 1
        assert_same_bits([calls, in_list], [eager.calls, eager.in_list])
    assert pair.bank.counters()["replays"] == 4 * 2


def test_tensors_in_plain_attributes_live_as_long_as_the_graphs_that_read_them(device: str) -> None:
    layer: Any = Keeps(lambda module, hidden: None, factor=torch.full((WIDTH,), 2.0, device=device))
    pair = Pair(device, [layer]).capture()
    factor = weakref.ref(layer.factor)
    layer.factor = None
    gc.collect()
    assert factor() is not None
    pair.bank.release()
    gc.collect()
    assert factor() is None


def test_tensors_that_no_call_can_write_are_left_alone(device: str) -> None:
    """An inference tensor, one without memory and an expanded one cannot be written back."""
    with torch.inference_mode():
        inference = torch.ones(WIDTH, device=device)
    empty = torch.ones(WIDTH, device=device)
    empty.untyped_storage().resize_(0)
    expanded = torch.ones((), device=device).expand(WIDTH)
    pair = Pair(device, [nn.Identity(), nn.Tanh()])
    pair.layers[0].__dict__.update(one=inference, two=empty, three=expanded, four=[expanded])
    found = plain_tensors([("layer", pair.layers[0])])
    assert found == {"layer.one": inference, "layer.two": empty, "layer.three": expanded}
    pair.capture()
    assert not pair.bank.failures and pair.step() is None


def test_what_a_call_leaves_is_put_back_and_named_unless_it_is_equal() -> None:
    module: Any = Keeps(appends, history=[], largest=None, count=5, shape=(300, 400), name="a name")
    history, attributes = module.history, PlainAttributes([("", module)])
    module.shape, module.name = tuple([300, 400]), "".join(["a ", "name"])  # noqa: C409
    assert attributes.put_back() is None
    module(torch.ones(2, WIDTH))
    module.largest = torch.ones(())
    said = "attribute 'history' of Keeps was bound to another tensor; graphs update tensors in place only"
    assert attributes.put_back() == said
    assert module.history is history and history == [] and module.largest is None
    for value in (6, 5.0, "five", (5,), None, [5]):
        for left_out in ((), ("count",)):
            attributes = PlainAttributes([("", module)], left_out)
            module.count = value
            said = "attribute 'count' of Keeps has another value after a call; graphs change no value"
            assert attributes.put_back(leaves_values=bool(left_out)) == (None if left_out else said)
            assert module.count == 5 and type(module.count) is int


# -- every gradient of a captured backward is added once, and all of it, as eager adds it ------------


@pytest.mark.parametrize("zeroes_out", [False, True])
def test_gradients_of_fused_layers_are_added_once_unless_zeroed_out(device: str, zeroes_out: bool) -> None:
    """Megatron's hook adds what such a layer hands on, although it has added the gradient itself."""
    fused = [DelayedLinear(WIDTH, WIDTH, is_fused=True, delays=False) for _ in range(2)]
    pair = Pair(device, [fused[0], Block(), fused[1]], main_grad=True)
    for side in (pair.layers, pair.eager_layers):
        side[0].weight.zero_out_wgrad = zeroes_out
    pair.capture()
    assert not any(param.grad_added_to_main_grad for param in pair.params()), "capture left the flag set"
    pair.replay_steps(4)
    added, alone = (layer.weight.main_grad.mean() for layer in pair.layers[::2])
    assert (added > 3 * FILLER) == zeroes_out and alone < FILLER


class PartlyRecomputed(nn.Module):
    """Uses its weight outside of a re-entrant checkpoint and inside: the gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def _inner(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden @ self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        inner: Tensor = reentrant(self._inner, hidden)
        return inner + nn.functional.linear(inner, self.weight)


def test_a_gradient_that_comes_in_several_parts_leaves_its_layer_eager(device: str) -> None:
    """Without `main_grad`, eager adds part by part to an earlier gradient, and a graph added their sum."""
    pair = Pair(device, [Block(), PartlyRecomputed(), Block()]).capture(variant(), variant("even", rows=4))
    assert "gets its gradient in parts" in pair.failure(1, EagerReason.SHARED_PARAMETER)
    for _ in range(3):  # each on top of the one before
        assert pair.step() is None
        assert pair.step(pair.input(4), "even") is None
    assert pair.eager_calls() == {"SHARED_PARAMETER": 6}
    assert pair.bank.counters()["replays"] == 12


class Twice(PartlyRecomputed):
    """Uses its weight twice in one backward pass, which is one part."""

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(self._inner(hidden), self.weight)


@pytest.mark.parametrize(("kind", "main_grad"), [(Twice, False), (PartlyRecomputed, True)])
def test_one_part_and_several_in_main_grad_are_added_up(device: str, kind: Any, main_grad: bool) -> None:
    pair = Pair(device, [Block(), kind(), Block()], main_grad=main_grad).capture()
    assert pair.bank.failures == []
    pair.replay_steps(3)


def test_a_gradient_beside_main_grad_is_added_as_in_eager(device: str) -> None:
    """Megatron's FP32 optimizer leaves `main_grad` itself there, until somebody calls `zero_grad()`."""
    pair = Pair(device, [Block(), Block()], main_grad=True).capture()
    for stray in (lambda param: param.main_grad, torch.ones_like):
        for param in nn.ModuleList([*pair.layers, *pair.eager_layers]).parameters():
            param.grad = stray(param)
        assert pair.step() is EagerReason.PARAMETERS_CHANGED
        assert pair.step() is None, "the hook of eager's backward takes it away"


class Borrowing(nn.Module):
    """Uses the weight of another layer, through a list: no module of its own has it."""

    def __init__(self, other: Block) -> None:
        super().__init__()
        self.own, self.borrowed = nn.Linear(WIDTH, WIDTH), [other]

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.own(nn.functional.linear(hidden, self.borrowed[0].up.weight[:WIDTH]))


@pytest.mark.parametrize("main_grad", [False, True])
def test_a_parameter_that_a_layer_borrows_leaves_it_and_the_owner_eager(device: str, main_grad: bool) -> None:
    """Bug: the warm-up left the gradient of its random input there, and replays lost that of the pack."""
    lender = Block()
    pair = Pair(device, [lender, Block(), Borrowing(lender)], main_grad=main_grad)
    before = [param.clone() for param in pair.params()]
    pair.capture()
    assert all(param.grad is None for param in pair.params())
    assert pair.bank.eager_sites == dict.fromkeys((0, 2), EagerReason.SHARED_PARAMETER)
    lent, borrowed = (failure.detail for failure in pair.bank.failures)
    assert "is used by" in lent and "that none of its modules has" in borrowed
    pair.replay_steps(3, SHARED_PARAMETER=6)
    assert all(map(torch.equal, before, pair.params()))
