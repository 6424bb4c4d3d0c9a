# SPDX-License-Identifier: Apache-2.0
"""What changes of captured layers between steps is noticed by its reason. Trained: test_state_changes.py."""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from torch import nn

from megagraph.bank.sites import SiteSpec, ineligible_sites
from megagraph.megatron.watch import LayerWatch
from megagraph.reasons import EagerReason

_MOVED, _OTHERS, _HOOK = EagerReason.ADDRESS_MOVED, EagerReason.PARAMETERS_CHANGED, EagerReason.FOREIGN_HOOK
KEPT: list[Any] = []


def _moved(param: Any) -> None:
    param.data = param.data.clone()


class Watched:
    def __init__(self, module: nn.Module, *, grad: bool = True, **site: Any) -> None:
        self.specs = [SiteSpec(name="layer", module=module, **site)]
        self.watch = LayerWatch(self.specs, module, keys=list, is_expected_hook=lambda hook: False)
        self._ineligible = ineligible_sites(self.specs)
        self.watch.expect_hooks()
        self.watch.expect_memory(grad=grad)

    def look(self) -> EagerReason | None:
        return self.watch.difference(self._of_hooks)

    def _of_hooks(self) -> EagerReason | None:
        changed = ineligible_sites(self.specs).items() ^ self._ineligible.items()
        return min((reason for _index, (reason, _what) in changed), default=None)


def with_main_grads(module: nn.Module) -> Any:
    for param in module.parameters():
        param.main_grad = torch.zeros_like(param)
    return module


@pytest.mark.parametrize("what", ["weight", "bias", "main_grad"])
def test_memory_that_is_away_is_missed_where_graphs_would_read_it(what: str) -> None:
    """Asked of the watch itself: a capture that read such memory would crash."""
    module = with_main_grads(nn.Linear(3, 3))
    module.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    module.register_parameter("nowhere", nn.Parameter(torch.zeros(3, device="meta")))
    watch = Watched(module).watch
    assert watch.has_memory(grad=False) and watch.has_memory(grad=True)
    freed: Any = module.weight.main_grad if what == "main_grad" else getattr(module, what)
    freed.untyped_storage().resize_(0)
    assert not watch.has_memory(grad=True)
    assert watch.has_memory(grad=False) == (what == "main_grad")


def test_the_watch_holds_no_module_and_misses_the_memory_of_one_that_is_gone() -> None:
    module = nn.Linear(3, 3)
    watched, reference = Watched(module), weakref.ref(module)
    assert watched.look() is None
    del module
    assert reference() is None
    assert watched.look() is _MOVED


def test_a_gradient_that_a_parameter_computes_is_asked_for_each_time() -> None:
    """If it raises, it is no missing one."""

    class Computes(nn.Parameter):
        main_grad = property(lambda self: grads[-1])

    module, grads = nn.Linear(3, 3, bias=False), list[torch.Tensor]()
    module.weight = Computes(torch.zeros(3, 3))
    with pytest.raises(IndexError):
        Watched(module)
    grads.append(torch.zeros(3, 3))
    watched = Watched(module)
    assert [watched.look() for _ in range(2)] == [None] * 2
    grads.append(torch.zeros(3, 3))
    assert watched.look() is EagerReason.ADDRESS_MOVED and watched.watch.have_only_gradients_moved


class Owner(nn.Module):
    """Has one of everything that the hashes cover, and knows what graphs write that no module owns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.nothing = nn.Identity()
        self.own = nn.Parameter(torch.zeros(3))
        self.store = torch.ones(4)
        self.register_buffer("scale", self.store[:3])
        self.inner.register_buffer("cos_cached", torch.ones(3))
        self.yarn = YarnRotaryEmbedding(4, original_max_position_embeddings=8, use_cpu_initialization=True)
        self.state = [torch.zeros(3)]
        with_main_grads(self)


def _another_over_its_memory(owner: Any) -> None:
    before = owner.norm.weight
    owner.norm.weight = nn.Parameter(before.data)
    owner.norm.weight.main_grad = before.main_grad


def _given(owner: Any, attributes: dict[str, Any]) -> None:
    """Those of before live on."""
    KEPT.append(vars(owner))
    owner.__dict__ = attributes


def _gradient_and_a_child(owner: Any) -> None:
    _moved(owner.inner.bias.main_grad)
    owner.nothing = nn.Identity()


DIFFERENCES: dict[str, tuple[Callable[[Any], object], EagerReason]] = {
    "a parameter replaced": (lambda it: setattr(it.inner, "weight", nn.Parameter(torch.zeros(3, 3))), _MOVED),
    "a parameter replaced over its memory": (_another_over_its_memory, _MOVED),
    "a parameter in other memory": (lambda it: _moved(it.inner.weight), _MOVED),
    "a parameter without memory": (lambda it: it.inner.bias.untyped_storage().resize_(0), _MOVED),
    "a parameter more": (lambda it: setattr(it.inner, "more", nn.Parameter(torch.zeros(3))), _MOVED),
    "a parameter less": (lambda it: setattr(it.norm, "bias", None), _MOVED),
    "a gradient replaced": (lambda it: setattr(it.inner.bias, "main_grad", torch.zeros(3)), _MOVED),
    "a gradient in other memory": (lambda it: _moved(it.inner.bias.main_grad), _MOVED),
    "a gradient in new attributes": (lambda it: _given(it.inner.bias, {"main_grad": torch.zeros(3)}), _MOVED),
    "a gradient taken away": (lambda it: delattr(it.norm.bias, "main_grad"), _MOVED),
    "a hook on a gradient": (lambda it: it.norm.bias.register_hook(lambda grad: grad), _HOOK),
    "a hook after adding": (lambda it: it.own.register_post_accumulate_grad_hook(lambda _: None), _HOOK),
    "a buffer in other memory": (lambda it: _moved(it.scale), _MOVED),
    "a buffer replaced": (lambda it: setattr(it, "scale", torch.ones(3)), _MOVED),
    "a buffer of more rows": (lambda it: setattr(it, "scale", it.store[:4]), _MOVED),
    "a buffer of another dtype": (lambda it: setattr(it, "scale", it.store[:3].view(torch.int32)), _MOVED),
    "a parameter transposed": (lambda it: setattr(it.inner.weight, "data", it.inner.weight.data.t()), _MOVED),
    # Bug: it went unnoticed in any module.
    "a buffer called as YaRN's": (lambda it: setattr(it.inner, "cos_cached", torch.ones(7)), _MOVED),
    "a submodule replaced": (lambda it: setattr(it, "norm", nn.LayerNorm(3)), _MOVED),
    "an empty submodule replaced": (lambda it: setattr(it, "nothing", nn.Identity()), _OTHERS),
    "an empty submodule beside a gradient in other memory": (_gradient_and_a_child, _OTHERS),
    "a submodule more": (lambda it: it.add_module("further", nn.Identity()), _OTHERS),
    "a submodule less": (lambda it: delattr(it, "nothing"), _OTHERS),
    "a submodule inside of another": (lambda it: it.nothing.add_module("in", nn.Identity()), _OTHERS),
    "a hook on a module": (lambda it: it.inner.register_forward_pre_hook(lambda *_: None), _HOOK),
    "a table of hooks": (lambda it: setattr(it.inner, "_forward_hooks", OrderedDict({7: print})), _HOOK),
    "all attributes": (lambda it: setattr(it.norm, "__dict__", vars(nn.LayerNorm(3))), _MOVED),
    # Neither dictionary tells of it.
    "all attributes, which live on": (lambda it: _given(it.norm, vars(nn.LayerNorm(3))), _MOVED),
    "another tensor that graphs write": (lambda it: it.state.__setitem__(0, torch.zeros(3)), _MOVED),
    "other memory of what they write": (lambda it: setattr(it.state[0], "data", torch.zeros(3)), _MOVED),
    "none that graphs write": (lambda it: it.state.clear(), _MOVED),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_the_watch_sees_every_change_however_often_it_was_asked_before(what: str) -> None:
    watched = Watched(owner := Owner(), state=lambda it: it.state)
    assert [watched.look() for _ in range(3)] == [None] * 3
    change, reason = DIFFERENCES[what]
    change(owner)
    assert [watched.look() for _ in range(3)] == [reason] * 3
    assert watched.watch.have_only_gradients_moved is what.startswith("a gradient")
    assert not watched.watch.are_gradients_away


def test_gradients_without_memory_are_away_and_have_not_moved() -> None:
    watched = Watched(owner := Owner())
    owner.inner.bias.main_grad.untyped_storage().resize_(0)
    for _ in range(2):
        assert watched.look() is None and watched.watch.are_gradients_away
        assert not watched.watch.have_only_gradients_moved
        watched.watch.expect_memory(grad=False)  # an evaluation was captured meanwhile
    owner.add_module("further", nn.Identity())
    assert watched.look() is EagerReason.PARAMETERS_CHANGED and watched.watch.are_gradients_away
    watched.watch.forget_gradients()
    assert not watched.watch.are_gradients_away


UNREAD: dict[str, Callable[[Any], object]] = {
    "YaRN's cosines": lambda owner: owner.yarn.get_cached_cos_sin(16),
    "a parameter of the module itself": lambda owner: _moved(owner.own),
    "its memory": lambda owner: owner.own.untyped_storage().resize_(0),
    "its gradient": lambda owner: _moved(owner.own.main_grad),
    "whether it is trained": lambda owner: owner.own.requires_grad_(False),
    "a parameter of a child that is bypassed": lambda owner: _moved(owner.norm.weight),
    "a buffer of the module itself": lambda owner: _moved(owner.scale),
    "a further tensor that graphs write": lambda owner: owner.state.append(torch.zeros(3)),
    "what they write": lambda owner: owner.state[0].fill_(7.0),
}


@pytest.mark.parametrize("what", UNREAD)
def test_what_graphs_do_not_read_may_change(what: str) -> None:
    (owner := Owner()).norm.add_module("part", nn.Identity())
    watched = Watched(owner, parts=("inner", "yarn", "norm.part"), state=lambda it: it.state)
    UNREAD[what](owner)
    assert watched.look() is None and watched.watch.has_memory(grad=True)
    owner.norm.register_forward_hook(lambda *_: None)
    assert watched.look() is EagerReason.FOREIGN_HOOK
