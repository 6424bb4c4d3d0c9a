# SPDX-License-Identifier: Apache-2.0
"""The hash of modules' Python state: other after each change, and the same again when that is taken back."""

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import swap_tensors

from megagraph import _C
from megagraph.packs.ops import TailConvention

Do = Callable[[Any], Any]
CAN_TELL = sys.version_info >= (3, 12)  # changes of dictionaries
ONE, FROZEN = nn.Identity(), nn.Parameter(torch.zeros(3, 3), requires_grad=False)
HELD = torch.zeros(3)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale, self.names, self.counter = 1.0, ["a"], 0

    def forward(self, hidden: Any) -> Any:
        return self.inner(hidden)


def watch_of(*layers: Any, left_out: Any = (), is_expected: Do = lambda _: False, device: str = "cpu") -> Any:
    references = [weakref.ref(child) for layer in layers for child in layer.modules()]
    return _C.StateWatch(references, weakref.ref(layers[0]), left_out, is_expected, torch.device(device))


def raises(*_given: Any) -> Any:
    raise KeyError("from the caller")


raising = partial(pytest.raises, KeyError, match="from the caller")


def test_an_address_that_is_used_again_is_another_object() -> None:
    """A patched forward that has gone, and the next one, which lies where it lay."""
    layer = Layer()
    watch = watch_of(layer)
    before, seen, addresses = watch.now(False), set(), set()
    for _ in range(50):
        layer.forward = lambda hidden: hidden
        addresses.add(id(layer.forward))
        seen.add(watch.now(False))
        del layer.forward
        assert watch.now(False) == before
    assert len(seen) == 50 and len(addresses) < 50


class Slotted:
    __slots__ = ("value",)  # nor a weak reference

    def __init__(self, value: Any = None) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("make", "count"),
    [
        *((lambda _index: object(), 50), (Slotted, 50), (lambda _index: torch.cuda.streams.Event(), 50)),
        *((lambda _index: Decimal("0.5"), 1), (Decimal, 50), (lambda _index: np.int64(7), 1), (np.int64, 50)),
        # Bug: Python has one hash for each two of these.
        (lambda index: 2**64 if index % 2 else 8, 2),
        (lambda index: complex(-1 - index % 2, -0.0 if index % 4 > 1 else 0.0), 4),
    ],
)
def test_objects_without_weak_references_are_told_apart(make: Callable[[int], Any], count: int) -> None:
    """Bug: an address that came again was the object of before."""
    layer = Layer()
    watch, seen = watch_of(layer), set()
    for index in range(50):
        layer.scale = make(index)
        seen.add(watch.now(True))
        layer.scale = None
    assert len(seen) == count


def test_the_watch_holds_nothing_that_refers_to_others() -> None:
    layer, held = Layer(), nn.Linear(1, 1)
    gone = weakref.ref(held)
    layer.scale = Slotted(held)
    held.owner = layer.scale  # and the other way round
    watch_of(layer).now(True)
    del layer, held
    gc.collect()
    assert gone() is None


def test_an_event_of_cuda_is_not_referred_to_weakly() -> None:
    """Bug: its end leaves weak references as they are, and the process died once one of them was freed."""
    layer = Layer()
    layer.scale = torch.cuda.streams.Event()  # which needs no GPU before it is recorded
    watch_of(layer).now(True)
    assert weakref.getweakrefcount(layer.scale) == 0


@dataclass
class Initialization:
    """As Transformer Engine's modules keep one of each parameter, in a dictionary."""

    function: Callable[[], Any]
    index: int = 0
    further: list[int] = field(default_factory=list)


def test_what_lies_in_a_dictionary_is_followed_as_long_as_it_is_there() -> None:
    """Another dictionary, and dataclasses."""
    layer: Any = Layer()
    metas = {name: Initialization(function=dict) for name in "ab"}
    layer.table = {**metas, "inner": (inner := {"scale": 1.0})}
    watch = watch_of(layer)
    before = watch.now(True)
    layer.table["inner"] = {"scale": 1.0}
    assert watch.now(False) == before
    inner["scale"] = 3.0  # nobody's by now
    assert watch.now(False) == before
    layer.table["a"] = Initialization(function=dict)
    assert (other := watch.now(True)) != before
    metas["a"].index = 2  # nobody's by now
    metas["a"].__dict__ = {"index": 3}
    assert watch.now(True) == other
    metas["b"].__dict__ = {"function": dict, "index": 4, "further": []}
    assert watch.now(True) != other


def test_an_error_halfway_leaves_no_stale_hash() -> None:
    layer = Layer()
    watch = watch_of(layer, is_expected=raises)
    before = watch.now(True)
    layer.scale = 2.0  # of the module that is read first
    with layer.inner.register_forward_hook(lambda *_: None), raising():
        watch.now(False)
    assert watch.now(False) != before
    layer.scale = 1.0
    assert watch.now(False) == before


@dataclass(slots=True)
class SlotOptions:
    """A configuration that has no dictionary."""

    scale: float = 1.0
    names: list[str] = field(default_factory=list)


class Options:
    """Some attributes that no dataclass declares."""

    def __init__(self) -> None:
        self.scale = 1.0


class CallableOptions(Options):
    """What is called is no configuration."""

    def __call__(self) -> float:
        return self.scale


class Lower(Layer):
    """Has its methods from above, a value of each kind, and what adapters keep on their class."""

    flags: ClassVar[dict[str, Any]] = {"merged": 0, "inner": {"rank": 0}}
    active: ClassVar[list[str]] = ["default"]
    shared: ClassVar[Any] = Initialization(function=dict)
    namespace: ClassVar[SimpleNamespace] = SimpleNamespace(index=0)

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Linear(3, 3))
        self.yes, self.no, self.one, self.other = True, False, ONE, nn.Tanh()
        self.options, self.slots = SimpleNamespace(scale=1.0, names=["a"]), SlotOptions()
        self.table: dict[str, Any] = {"counter": 1, "inner": {"scale": 1.0}, "pair": ({"a": 1},)}
        self.table["meta"] = Initialization(dict)
        self.listed: list[Any] = [{"b": 1}]
        self.config, self.attention_config = Options(), Options()
        self.held = HELD.detach()
        self.register_buffer("offset", torch.zeros(3))
        self.register_buffer("rows", torch.zeros(3)[1:])


class Lowest(Lower):
    """Another class, and nothing else."""


def swap(layer: Any, one: str, other: str) -> None:
    """Two values, or two children: the same ones, in the same order as before."""
    values = [getattr(layer, name) for name in (one, other)]
    for name in (one, other):
        delattr(layer, name)
    for name, value in zip((other, one), values, strict=True):
        setattr(layer, name, value)


def sets(name: str, one: Any, other: Any, owner: Do = lambda it: it) -> tuple[Do, Do]:
    return lambda it: setattr(owner(it), name, other), lambda it: setattr(owner(it), name, one)


def gives(name: str) -> tuple[Do, Do]:
    return lambda _: setattr(Layer, name, 2.0), lambda _: delattr(Layer, name)


def adds(owner: Do) -> tuple[Do, Do]:
    return lambda it: owner(it).append("b"), lambda it: owner(it).pop()


def updates(owner: Do, name: Any, one: Any, other: Any) -> tuple[Do, Do]:
    return lambda it: owner(it).__setitem__(name, other), lambda it: owner(it).__setitem__(name, one)


def hooks(kind: str, of: Do, prefix: str = "register_") -> tuple[Do, Do]:
    handles: list[Any] = []
    return (
        lambda it: handles.append(getattr(of(it), prefix + kind)(lambda *_: None)),
        lambda it: handles.pop().remove(),
    )


TORCHS = nn.modules.module
HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
# What changes, what takes it back, and whether it shows without the whole state.
CHANGES: dict[str, tuple[Do, Do, bool]] = {
    "a value": (*sets("scale", 1.0, 2.0), True),
    "a container": (*adds(lambda it: it.names), False),
    "an attribute taken out": (lambda it: delattr(it, "scale"), lambda it: setattr(it, "scale", 1.0), True),
    "two values": (lambda it: swap(it, "yes", "no"), lambda it: swap(it, "no", "yes"), True),
    "another child": (*sets("one", ONE, nn.Identity()), True),
    "two children": (lambda it: swap(it, "one", "other"), lambda it: swap(it, "other", "one"), True),
    # Written in no dictionary.
    "another class": (*sets("__class__", Lower, Lowest), False),
    # At once here alone: a scripted module has each call look at all of them.
    "another dictionary": (
        lambda it: setattr(it, "__dict__", {**vars(it), "before": vars(it), "scale": 2.0}),
        lambda it: setattr(it, "__dict__", it.before),
        True,
    ),
    "a parameter": (*sets("requires_grad", True, False, lambda it: it.inner.weight), True),
    "the tensor behind a parameter": (*2 * (lambda it: swap_tensors(it.inner.weight, FROZEN),), True),
    "a buffer": (*sets("requires_grad", False, True, lambda it: it.offset), True),
    "what a buffer is a view of": (*sets("requires_grad", False, True, lambda it: it.rows._base), True),
    "the mode of a scripted module": (lambda it: it.scripted.eval(), lambda it: it.scripted.train(), True),
    # Of the same name as what is left out.
    "a key of a value": (*updates(lambda it: it.table, "counter", 1, 2), True),
    "a key of an inner dictionary": (*updates(lambda it: it.table["inner"], "scale", 1.0, 2.0), True),
    "a key of a dictionary in a tuple": (*updates(lambda it: it.table["pair"][0], "a", 1, 2), True),
    # What lies in a list may go without a word, and its address be another's.
    "a key of a dictionary in a list": (*updates(lambda it: it.listed[0], "b", 1, 2), False),
    "a field in a dictionary": (*sets("index", 0, 1, lambda it: it.table["meta"]), CAN_TELL),
    "a container of a field": (*adds(lambda it: it.table["meta"].further), False),
    # Bug: a module that kept a namespace, to which nothing can refer weakly, was an error at the first look.
    "a value of a namespace": (*sets("scale", 1.0, 2.0, lambda it: it.options), CAN_TELL),
    "a container of a namespace": (*adds(lambda it: it.options.names), False),
    # Bug: a dataclass with slots was one object, whatever its fields became.
    "a slot": (*sets("scale", 1.0, 2.0, lambda it: it.slots), False),
    "a container in a slot": (*adds(lambda it: it.slots.names), False),
    "an empty slot": (lambda x: delattr(x.slots, "scale"), lambda x: setattr(x.slots, "scale", 1.0), False),
    # Bug: replays read the memory that it had before.
    "the memory of a tensor": (*sets("data", HELD, HELD.clone(), lambda it: it.held), False),
    "the form of a tensor": (*sets("data", HELD, HELD[:2], lambda it: it.held), False),
    "the gradient of a tensor": (*sets("requires_grad", False, True, lambda it: it.held), False),
    "config": (*sets("scale", 1.0, 2.0, lambda it: it.config), True),
    "attention_config": (*sets("scale", 1.0, 2.0, lambda it: it.attention_config), True),
    **{f"a {kind} of its own": (*hooks(kind, lambda it: it), True) for kind in HOOKS},
    **{f"a {kind} of all": (*hooks(kind, lambda it: TORCHS, "register_module_"), True) for kind in HOOKS},
    "forward of a class above": (*sets("forward", Layer.forward, abs, lambda it: Layer), True),
    **{f"{name} of a class above": (*gives(name), True) for name in ("gain", "__call__")},
    # Bug: a registry, or options that all layers share, were read once, whatever came later.
    "a dictionary of a class": (*updates(lambda it: it.flags, "merged", 0, 1), True),
    "an inner dictionary of a class": (*updates(lambda it: it.flags["inner"], "rank", 0, 1), True),
    "a list of a class": (*updates(lambda it: it.active, 0, "default", "other"), False),
    "a dataclass of a class": (*sets("index", 0, 1, lambda it: it.shared), CAN_TELL),
    "a namespace of a class": (*sets("index", 0, 1, lambda it: it.namespace), CAN_TELL),
}


def check(layer: Any, do: Do, undo: Do, is_seen_at_once: bool = True) -> None:
    """A change of a layer is another state, and taken back the same one."""
    other = nn.Identity()  # kept: for one that is gone each call looks at everything
    watch = watch_of(layer, other, left_out=["counter"])
    before = watch.now(True)
    layer.counter += 1  # which is left out
    assert watch.now(True) == before
    do(layer)
    assert (watch.now(False) != before) is is_seen_at_once
    assert watch.now(True) != before
    undo(layer)
    assert watch.now(True) == watch.now(False) == before


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_another_state_and_taken_back_the_same_one(what: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(TORCHS, "_global_is_full_backward_hook", None)  # which stays when a hook goes
    layer, without = Lower(), Lower()
    check(layer, *CHANGES[what])
    if what not in ("another dictionary", "the mode of a scripted module"):
        del without.scripted  # for which each call looks at everything
        check(without, *CHANGES[what])


def test_a_class_that_a_module_is_given_is_followed_from_then_on() -> None:
    layer = Lower()
    del layer.scripted
    watch = watch_of(layer)
    watch.now(True)
    layer.__class__, layer.scale = Lowest, 2.0
    watch.now(False)  # which reads it for its other value
    before = watch.now(True)
    Lowest.gain = 2.0
    assert watch.now(False) != before
    del Lowest.gain


def test_containers_that_know_each_other_are_read_in_time() -> None:
    """Bug: along all paths of eight steps."""
    layer, known = Layer(), [{} for _ in range(24)]
    for it in known:
        it.update(enumerate(known))
    layer.names = known[0]
    check(layer, lambda _: known[-1].update(more=1), lambda _: known[-1].pop("more"))


class Name(str):
    """A value that is hashed by Python, where another thread may have its turn, or an error its way."""

    meanwhile: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    def __hash__(self) -> int:
        type(self).meanwhile()
        return 1

    __eq__ = str.__eq__


def test_an_object_that_could_not_be_read_to_its_end_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what had been read before the error stayed, and nothing told of the rest."""
    layer = Layer()
    watch = watch_of(layer)
    before = watch.now(True)
    layer.note = Name("a")
    with monkeypatch.context() as patch, raising():
        patch.setattr(Name, "meanwhile", raises)
        watch.now(True)
    with_note = watch.now(True)
    layer.names.append("b")
    assert len({before, with_note, watch.now(True), watch_of(layer).now(True)}) == 3
    assert watch.now(True) == watch_of(layer).now(True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *((1.0, 0.5), (1.0, 2.0**61), (1, 2), (-1, -2), (1, 1.0), (1, True), (1.0, "1.0")),
        *((None, 0.5), (None, False), ((1.0, (1.0,)), (1.0, (0.5,))), ((1, 2), (1, (2,)))),
        *(tuple(TailConvention), (torch.float32, torch.float16), ("a", "b"), (len, abs)),
        (partial(int, base=2), partial(int, base=8)),
        *((slice(4), slice(6)), ((slice(4),), (slice(0, 4),)), ({"a": 1, "b": 2}, {"b": 2, "a": 1})),
        *((Decimal(-1), Decimal(-2)), (Decimal(1), 1), (np.int64(-1), np.int64(-2))),
    ],
    ids=repr,
)
def test_values_are_told_apart_also_where_they_or_their_hashes_are_equal(one: Any, other: Any) -> None:
    layer = Layer()
    layer.scale = one
    check(layer, *sets("scale", one, other))


@pytest.mark.parametrize(("name", "make"), [("options", Options), ("make_config", CallableOptions)])
def test_an_object_is_no_configuration_unless_its_attribute_says_so(name: str, make: type[Options]) -> None:
    layer, options = Layer(), make()
    setattr(layer, name, options)
    watch = watch_of(layer)
    before = watch.now(True)
    options.scale = 2.0
    assert watch.now(False) == watch.now(True) == before
    setattr(layer, name, make())
    assert watch.now(False) != before


def test_functions_of_the_caller_are_asked_each_time() -> None:
    layer, values, seen = Layer(), list[Any](), set()
    watch = watch_of(layer)
    watch.set_keys([lambda: values[-1]])
    for value in (1, 2, 1.0, "1", (1, 2), None, True):
        values.append(value)
        seen.add(watch.now(False))
        assert watch.now(False) == watch.now(True)
    assert len(seen) == 7
    watch.set_keys([raises])
    with raising():
        watch.now(False)


def test_modules_that_are_gone_are_no_error_and_are_not_kept() -> None:
    layers = [Layer(), Layer()]
    watch = watch_of(*layers)
    before, gone = watch.now(True), weakref.ref(layers[1])
    del layers[1]
    gc.collect()
    assert gone() is None
    assert watch.now(False) != before and watch.now(True) == watch.now(True)
    assert watch.items()


def test_a_buffer_is_followed_whatever_attributes_of_its_name_are() -> None:
    """Bug: from Python 3.12 on nothing told of another one if attributes of its name are left out."""
    layer = Layer()
    layer.register_buffer("table", torch.ones(1))
    watch = watch_of(layer, left_out=["table"])
    before = watch.now(True)
    layer.table = torch.ones(1, requires_grad=True)
    assert watch.now(True) != before


@pytest.mark.parametrize("what", ["a list", "a module"])
def test_what_goes_while_others_are_read_is_read_no_more(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it was read behind its end, and the process died."""
    layers = [Layer(), Layer(), Layer()]
    layers[1].scale = [Name("a")]
    watch = watch_of(*layers)
    before = watch.now(True)

    def meanwhile() -> None:
        if what == "a module":
            layers[0] = layers[2] = Layer()
        for layer in layers:
            layer.names = None

    with monkeypatch.context() as patch:
        patch.setattr(Name, "meanwhile", staticmethod(meanwhile))
        now = watch.now(True)
    assert watch.now(True) == now != before


def test_every_value_has_a_name_and_words_and_one_that_holds_itself_ends() -> None:
    """Bug: a text was cut inside of a character, and training died where that state was told of."""
    layer = Layer()
    layer.note = "\u00e9" * 100
    layer.loop = [layer.names]
    layer.loop.append(layer.loop)
    watch = watch_of(layer)
    assert watch.now(True) == watch.now(True)
    items = {(index, name): words for index, name, _hash, words in watch.items()}
    assert items[0, "scale"] == "1.0" and items[1, "in_features"] == "3"
    assert items[0, "Layer.forward"].endswith("Layer.forward")
    assert items[0, "names"] == "another list"
    assert items[0, "note"] == "'" + layer.note[:29] + "..."


@pytest.mark.parametrize(("device", "is_part"), [("cuda", True), ("cpu", False)])
def test_a_scalar_on_the_host_is_its_number_beside_graphs_on_a_device(device: str, is_part: bool) -> None:
    """Bug: kernels take its value, and a write in place was none. Graphs on the host read its memory."""
    layer, scale, table = Layer(), torch.tensor([2.0]), torch.arange(9.0)
    layer.scale, layer.table = scale, table
    watch = watch_of(layer, device=device)
    before = watch.now(True)
    scale.fill_(3.0)
    assert (watch.now(True) != before) is is_part
    scale.fill_(2.0)
    assert watch.now(True) == before
    table.fill_(3.0)
    assert watch.now(True) == before
