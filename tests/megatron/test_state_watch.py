# SPDX-License-Identifier: Apache-2.0
"""The hash of modules' Python state: other after each change, and the same again when that is taken back."""

import enum
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from megagraph import _C


class Layer(nn.Module):
    """Some attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale, self.names, self.counter = 1.0, ["a"], 0

    def forward(self, hidden: Any) -> Any:
        """What is called."""
        return self.inner(hidden)


def watch_of(
    modules: Sequence[nn.Module],
    left_out: Sequence[str] = (),
    keys: Sequence[Callable[[], Any]] = (),
    device: str = "cpu",
) -> _C.StateWatch:
    references = [weakref.ref(child) for module in modules for child in module.modules()]
    return _C.StateWatch(
        references, weakref.ref(modules[0]), left_out, lambda hook: False, list(keys), torch.device(device)
    )


def test_an_address_that_is_used_again_is_another_object() -> None:
    """A patched forward that has gone, and the next one, which lies where it lay."""
    layer = Layer()
    watch = watch_of([layer])
    before, seen, addresses = watch.now(False), set(), set()
    for _ in range(50):
        layer.forward = lambda hidden: hidden  # type: ignore[method-assign]
        addresses.add(id(layer.forward))
        seen.add(watch.now(False))
        del layer.forward
        assert watch.now(False) == before
    assert len(seen) == 50 and len(addresses) < 50


def test_dictionaries_are_followed_as_long_as_nobody_else_holds_them() -> None:
    """What lies in a list may go without a word, and its address be another's."""
    layer: Any = Layer()
    layer.table = {"inner": {"scale": 1.0}, "pair": ({"a": 1},)}
    layer.names = [{"b": 1}]
    watch = watch_of([layer])
    before, seen = watch.now(True), set()
    inner, of_pair = layer.table["inner"], layer.table["pair"][0]
    for changed, key in ((inner, "scale"), (of_pair, "a")):
        changed[key] += 1
        seen.add(watch.now(False))
        changed[key] -= 1
        assert watch.now(False) == before
    assert before not in seen and len(seen) == 2
    layer.table["inner"] = {"scale": 1.0}
    assert watch.now(False) == before
    inner["scale"] = 3.0  # nobody's by now
    assert watch.now(False) == before
    layer.names[0]["b"] = 2
    assert watch.now(False) == before
    assert watch.now(True) != before


@dataclass
class Initialization:
    """As Transformer Engine's modules keep one of each parameter, in a dictionary."""

    function: Callable[[], Any]
    index: int = 0
    further: list[int] = field(default_factory=list)


CAN_TELL = sys.version_info >= (3, 12)  # changes of dictionaries


def test_a_dataclass_in_a_dictionary_is_followed_where_changes_of_dictionaries_can_be_told() -> None:
    layer: Any = Layer()
    metas = {name: Initialization(function=dict) for name in "ab"}
    layer.table = {**metas}
    watch = watch_of([layer])
    before = watch.now(True)
    metas["a"].index = 1
    assert (watch.now(False) != before) is CAN_TELL
    assert watch.now(True) != before
    metas["a"].index = 0
    assert watch.now(True) == before
    metas["b"].further.append(1)
    assert watch.now(False) == before and watch.now(True) != before
    metas["b"].further.clear()
    layer.table["a"] = Initialization(function=dict)
    assert (other := watch.now(True)) != before
    metas["a"].index = 2  # nobody's by now
    metas["a"].__dict__ = {"index": 3}
    assert watch.now(True) == other
    metas["b"].__dict__ = {"function": dict, "index": 4, "further": []}
    assert watch.now(True) != other


def test_an_error_halfway_leaves_no_stale_hash() -> None:
    layer = Layer()
    is_broken = False

    def is_expected(hook: Any) -> bool:
        if is_broken:
            raise KeyError("from the caller")
        return False

    references = [weakref.ref(child) for child in layer.modules()]
    watch = _C.StateWatch(references, weakref.ref(layer), [], is_expected, [])
    before = watch.now(True)
    layer.scale = 2.0  # of the module that is read first
    handle = layer.inner.register_forward_hook(lambda *_: None)
    is_broken = True
    with pytest.raises(KeyError, match="from the caller"):
        watch.now(False)
    is_broken = False
    handle.remove()
    assert watch.now(False) != before
    layer.scale = 1.0
    assert watch.now(False) == before


class Lower(Layer):
    """Has its methods from above."""


def swap(layer: Any, one: str, other: str) -> None:
    """Two values, or two children: the same ones, in the same order as before."""
    values = [getattr(layer, name) for name in (one, other)]
    for name in (one, other):
        delattr(layer, name)
    for name, value in zip((other, one), values, strict=True):
        setattr(layer, name, value)


def sets(name: str, one: Any, other: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    return lambda it: setattr(it, name, other), lambda it: setattr(it, name, one)


def trains(is_trained: bool) -> Callable[[Any], Any]:
    return lambda it: it.inner.weight.requires_grad_(is_trained)


# What changes, what takes it back, and whether it shows without the whole state.
CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], bool]] = {
    "a value": (*sets("scale", 1.0, 2.0), True),
    "a container": (lambda it: it.names.append("b"), lambda it: it.names.pop(), False),
    "an attribute taken out": (lambda it: delattr(it, "scale"), lambda it: setattr(it, "scale", 1.0), True),
    "two values": (lambda it: swap(it, "yes", "no"), lambda it: swap(it, "no", "yes"), True),
    "two children": (lambda it: swap(it, "one", "other"), lambda it: swap(it, "other", "one"), True),
    # Written in no dictionary.
    "another class": (*sets("__class__", Layer, Lower), False),
    # At once here alone: a scripted module has each call look at all of them.
    "another dictionary": (
        lambda it: setattr(it, "__dict__", {**vars(it), "before": vars(it), "scale": 2.0}),
        lambda it: setattr(it, "__dict__", it.before),
        True,
    ),
    "a parameter": (*(trains(False), trains(True)), True),
    "a buffer": (lambda it: it.offset.requires_grad_(), lambda it: it.offset.requires_grad_(False), True),
    "the mode of a scripted module": (lambda it: it.scripted.eval(), lambda it: it.scripted.train(), True),
    # Of the same name as what is left out.
    "a key of a value": (lambda it: it.table.update(counter=2), lambda it: it.table.update(counter=1), True),
    # Bug: a module that kept a namespace, to which nothing can refer weakly, was an error at the first look.
    "a value of a namespace": (
        lambda it: setattr(it.options, "scale", 2.0),
        lambda it: setattr(it.options, "scale", 1.0),
        CAN_TELL,
    ),
    "a container of a namespace": (
        *(lambda it: it.options.names.append("b"), lambda it: it.options.names.pop()),
        False,
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_another_state_and_taken_back_the_same_one(what: str) -> None:
    layer: Any = Layer()
    layer.scripted = torch.jit.script(nn.Linear(3, 3))
    layer.yes, layer.no, layer.one, layer.other = True, False, nn.Identity(), nn.Tanh()
    layer.options, layer.table = SimpleNamespace(scale=1.0, names=["a"]), {"counter": 1}
    layer.register_buffer("offset", torch.zeros(3))
    watch = watch_of([layer], left_out=["counter"])
    before = watch.now(True)
    layer.counter += 1  # which is left out
    assert watch.now(True) == before
    do, undo, is_seen_at_once = CHANGES[what]
    do(layer)
    assert (watch.now(False) != before) is is_seen_at_once
    assert watch.now(True) != before
    undo(layer)
    assert watch.now(True) == watch.now(False) == before


class Choice(enum.Enum):
    """What a module may be told to do."""

    PLAIN = 1
    NEGATED = 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *((1.0, 0.5), (1.0, 2.0**61), (1, 2), (-1, -2), (1, 1.0), (1, True), (1.0, "1.0")),
        *((None, 0.5), (None, False), ((1.0, (1.0,)), (1.0, (0.5,))), ((1, 2), (1, (2,)))),
        *((Choice.PLAIN, Choice.NEGATED), (torch.float32, torch.float16), ("a", "b"), (len, abs)),
        (partial(int, base=2), partial(int, base=8)),
    ],
    ids=repr,
)
def test_values_are_told_apart_also_where_their_hashes_or_they_themselves_are_equal(
    one: Any, other: Any
) -> None:
    layer = Layer()
    layer.scale = one
    watch = watch_of([layer])
    before = watch.now(False)
    layer.scale = other
    assert watch.now(False) != before
    layer.scale = one
    assert watch.now(False) == before


HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_of_every_kind_is_part_of_the_state(
    kind: str, is_global: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs = nn.modules.module
    monkeypatch.setattr(torchs, "_global_is_full_backward_hook", None)  # which stays when a hook goes
    layer = Layer()
    watch = watch_of([layer])
    before = watch.now(False)
    owner, name = (torchs, f"register_module_{kind}") if is_global else (layer, f"register_{kind}")
    handle = getattr(owner, name)(lambda *_: None)
    with_hook = watch.now(False)
    handle.remove()
    assert with_hook != before and watch.now(False) == before


class Options:
    """Some attributes that no dataclass declares."""

    def __init__(self) -> None:
        self.scale = 1.0


class CallableOptions(Options):
    """What is called is no configuration."""

    def __call__(self) -> float:
        return self.scale


@pytest.mark.parametrize(
    ("name", "make", "is_followed"),
    [
        ("config", Options, True),
        ("attention_config", Options, True),
        ("options", Options, False),
        ("make_config", CallableOptions, False),
    ],
)
def test_an_object_is_a_configuration_where_the_name_of_its_attribute_says_so(
    name: str, make: type[Options], is_followed: bool
) -> None:
    layer, options = Layer(), make()
    setattr(layer, name, options)
    watch = watch_of([layer])
    before = watch.now(True)
    options.scale = 2.0
    for whole in (False, True):
        assert (watch.now(whole) != before) is is_followed
    options.scale = 1.0
    assert watch.now(False) == before
    setattr(layer, name, make())
    assert watch.now(False) != before


@pytest.mark.parametrize("name", ["forward", "gain"])
def test_what_is_set_on_a_class_above_that_of_a_module_is_part_of_the_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Lower()
    watch = watch_of([layer])
    before = watch.now(False)
    with monkeypatch.context() as patch:
        patch.setattr(Layer, name, 2.0 if name == "gain" else lambda layer, hidden: hidden, raising=False)
        assert watch.now(False) != before
    assert watch.now(False) == before


def test_functions_of_the_caller_are_asked_each_time() -> None:
    values: list[Any] = [1]
    watch = watch_of([Layer()], keys=[lambda: values[-1]])
    seen = {}
    for value in (1, 2, 1.0, "1", (1, 2), None, True):
        values.append(value)
        seen[watch.now(False)] = value
        assert watch.now(False) == watch.now(True)
    assert len(seen) == 7

    def raises() -> None:
        raise KeyError("from the caller")

    with pytest.raises(KeyError, match="from the caller"):
        watch_of([Layer()], keys=[raises]).now(False)


def test_modules_that_are_gone_are_no_error_and_are_not_kept() -> None:
    layers = [Layer(), Layer()]
    watch = watch_of(layers)
    before, gone = watch.now(True), weakref.ref(layers[1])
    del layers[1]
    gc.collect()
    assert gone() is None
    assert watch.now(False) != before and watch.now(True) == watch.now(True)
    assert watch.items()


def test_every_value_has_a_name_and_words_and_one_that_holds_itself_ends() -> None:
    layer = Layer()
    layer.loop = [layer.names]
    layer.loop.append(layer.loop)
    watch = watch_of([layer])
    assert watch.now(True) == watch.now(True)
    items = {(index, name): words for index, name, _hash, words in watch.items()}
    assert items[0, "scale"] == "1.0" and items[1, "in_features"] == "3"
    assert items[0, "Layer.forward"].endswith("Layer.forward")
    assert items[0, "names"] == "another list"


class Registered(Layer):
    """What adapters keep on their class, and all layers share."""

    flags: ClassVar[dict[str, Any]] = {}
    active: ClassVar[list[str]] = []
    options: ClassVar[Any] = Initialization(function=dict)
    namespace: ClassVar[SimpleNamespace] = SimpleNamespace(index=0)


@pytest.mark.parametrize(
    ("change", "is_noticed_at_once"),
    [
        (lambda value: Registered.flags.update(merged=value), True),
        (lambda value: Registered.flags["inner"].update(rank=value), True),
        (lambda value: Registered.active.__setitem__(0, str(value)), False),
        (lambda value: setattr(Registered.options, "index", value), CAN_TELL),
        (lambda value: setattr(Registered.namespace, "index", value), CAN_TELL),
    ],
    ids=["dictionary", "inner dictionary", "list", "dataclass", "namespace"],
)
def test_what_a_class_attribute_holds_is_part_of_the_state(
    change: Callable[[int], None], is_noticed_at_once: bool
) -> None:
    """Bug: a registry, or options that all layers share, were read once, whatever came later."""
    Registered.flags = {"merged": 0, "inner": {"rank": 0}}
    Registered.active = ["default"]
    layers = [Registered(), Registered()]
    watch = watch_of(layers)
    change(1)
    before = watch.now(True)
    change(2)
    assert (watch.now(False) != before) is is_noticed_at_once
    assert watch.now(True) != before
    change(1)
    assert watch.now(True) == before


@dataclass(slots=True)
class SlotOptions:
    """A configuration that has no dictionary."""

    scale: float = 1.0
    names: list[str] = field(default_factory=list)


def test_a_dataclass_with_slots_is_compared_by_its_fields() -> None:
    """Bug: it was one object, whatever its fields became."""
    layer, options = Layer(), SlotOptions()
    layer.options = options  # type: ignore[assignment]
    watch = watch_of([layer])
    before = watch.now(True)
    options.scale = 2.0
    assert watch.now(True) != before
    options.scale = 1.0
    options.names.append("x")
    assert watch.now(True) != before
    options.names.clear()
    assert watch.now(True) == before
    del options.scale
    assert watch.now(True) != before


@pytest.mark.parametrize(("device", "is_part"), [("cuda", True), ("cpu", False)])
def test_a_scalar_on_the_host_is_its_number_beside_graphs_on_a_device(device: str, is_part: bool) -> None:
    """Bug: kernels take its value, and a write in place was none. Graphs on the host read its memory."""
    layer, scale, table = Layer(), torch.tensor(2.0), torch.tensor([2.0])
    layer.scale, layer.table = scale, table  # type: ignore[assignment]
    watch = watch_of([layer], device=device)
    before = watch.now(True)
    scale.fill_(3.0)
    assert (watch.now(True) != before) is is_part
    scale.fill_(2.0)
    assert watch.now(True) == before
    table.fill_(3.0)
    assert watch.now(True) == before
