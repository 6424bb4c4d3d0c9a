# SPDX-License-Identifier: Apache-2.0
"""Tensors in plain attributes: a capture leaves them alone, and no replay works on one that is gone."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bank_pair import WIDTH, Block, Pair
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph._C import PlainAttributes, plain_tensors
from megagraph.reasons import EagerReason


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
    """Bug: the warm-up's numbers stayed in it, and each replay read a tensor that the host had dropped. Nor
    would a replay count calls, on which an eager one may depend."""
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


def test_a_layer_that_assigns_a_buffer_anew_stays_eager(device: str) -> None:
    """Its buffer was frozen in the graph, and the capture's own tensor was left in the module."""
    counts: Any = Keeps(lambda module, hidden: setattr(module, "steps", module.steps + 1))
    counts.register_buffer("steps", torch.zeros((), device=device))
    before, pair = counts.steps, Pair(device, [nn.Linear(WIDTH, WIDTH), counts]).capture()
    assert counts.steps is before and pair.failure(1, EagerReason.CAPTURE_FAILED)
    pair.replay_steps(3, CAPTURE_FAILED=3)


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
