# SPDX-License-Identifier: Apache-2.0
"""What may change of captured layers between two steps is noticed, each under its reason."""

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_rig import OPTIONS, Micro, report_of, step
from torch import nn

from megagraph import _C
from megagraph.bank.sites import SiteSpec
from megagraph.config import GraphConfig
from megagraph.decide.reasons import EagerReason
from megagraph.demo.trainer import Trainer
from megagraph.megatron.patch.installation import installed_plugin
from megagraph.megatron.watch.addresses import AddressWatch

pytestmark = pytest.mark.megatron

ONE = Micro(lengths=(9, 20))
Install = Callable[..., GraphConfig]


def _replace_weight(layer: Any) -> None:
    linear = layer.mlp.linear_fc1
    linear.weight = nn.Parameter(linear.weight.detach().clone())


def _replace_main_grad(layer: Any) -> None:
    weight = layer.mlp.linear_fc1.weight
    weight.main_grad = weight.main_grad.clone()


def _move_main_grad(layer: Any) -> None:
    main_grad = layer.mlp.linear_fc1.weight.main_grad
    main_grad.data = main_grad.data.clone()


def _move(layer: Any) -> None:
    layer.mlp.linear_fc1.weight.data = layer.mlp.linear_fc1.weight.data.clone()


def _replace_submodule(layer: Any) -> None:
    layer.self_attention.core_attention = copy.deepcopy(layer.self_attention.core_attention)


CHANGES: dict[str, tuple[Callable[[Any], Any], EagerReason]] = {
    "moved weight": (_move, EagerReason.ADDRESS_MOVED),
    "other weight": (_replace_weight, EagerReason.ADDRESS_MOVED),
    "other main_grad": (_replace_main_grad, EagerReason.ADDRESS_MOVED),
    "moved main_grad": (_move_main_grad, EagerReason.ADDRESS_MOVED),
    "frozen weight": (
        lambda layer: layer.mlp.linear_fc1.weight.requires_grad_(False),
        EagerReason.PARAMETERS_CHANGED,
    ),
    "other submodule": (_replace_submodule, EagerReason.PARAMETERS_CHANGED),
    "further submodule": (
        lambda layer: layer.mlp.add_module("further", nn.Identity()),
        EagerReason.PARAMETERS_CHANGED,
    ),
    "forward hook": (
        lambda layer: layer.mlp.register_forward_hook(lambda *args: None),
        EagerReason.FOREIGN_HOOK,
    ),
    "forward pre-hook": (
        lambda layer: layer.mlp.register_forward_pre_hook(lambda *args: None),
        EagerReason.FOREIGN_HOOK,
    ),
    "backward hook": (
        lambda layer: layer.mlp.register_full_backward_hook(lambda *args: None),
        EagerReason.FOREIGN_HOOK,
    ),
    "gradient hook": (
        lambda layer: layer.mlp.linear_fc1.weight.register_hook(lambda grad: grad),
        EagerReason.FOREIGN_HOOK,
    ),
    "accumulation hook": (
        lambda layer: layer.mlp.linear_fc1.weight.register_post_accumulate_grad_hook(lambda param: None),
        EagerReason.FOREIGN_HOOK,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_and_costs_a_step(change: str, install: Install) -> None:
    """Bugs: a hook on the accumulation of a gradient that came after the capture never ran, and a submodule
    that was replaced was replayed as it had been."""
    install()
    trainer = Trainer(OPTIONS)
    for _ in range(2):
        step(trainer, [ONE], update=False)
    plugin = installed_plugin()
    assert plugin is not None
    (graphs,) = plugin.all_graphs()
    work, reason = CHANGES[change]
    assert graphs.block.what_changed() is None and graphs.block.what_changed() is None
    work(trainer.chunk.decoder.layers[1])
    assert graphs.block.what_changed() is reason
    step(trainer, [ONE], update=False)
    assert report_of(trainer)["eager"][reason.name] > 0


def test_a_buffer_that_is_replaced_is_noticed(install: Install) -> None:
    """Bug: graphs went on to read the buffer of their capture."""
    install()
    trainer = Trainer(OPTIONS)
    mlp = trainer.chunk.decoder.layers[1].mlp
    mlp.register_buffer("table", torch.ones(3, device=trainer.device), persistent=False)
    for _ in range(3):
        step(trainer, [ONE], update=False)
        mlp.table.add_(1)  # in place: graphs read it
    assert set(report_of(trainer)["eager"]) == {"WARMING_UP"}
    mlp.table = torch.zeros(3, device=trainer.device)
    step(trainer, [ONE], update=False)
    assert report_of(trainer)["eager"]["ADDRESS_MOVED"] == 2


@pytest.mark.parametrize("what", ["weight", "bias", "main_grad"])
def test_memory_that_is_away_is_missed_where_graphs_would_read_it(what: str) -> None:
    """Asked of the watch itself: a capture that read such memory would crash."""
    module = nn.Linear(3, 3)
    for param in module.parameters():
        param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
    module.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    watch = AddressWatch([SiteSpec(name="layer", module=module)])
    assert watch.has_memory(grad=False) and watch.has_memory(grad=True)
    freed: Any = module.weight.main_grad if what == "main_grad" else getattr(module, what)
    freed.untyped_storage().resize_(0)
    assert not watch.has_memory(grad=True)
    assert watch.has_memory(grad=False) == (what == "main_grad")


STATE_CHANGES: dict[str, tuple[Callable[[list[torch.Tensor]], Any], bool]] = {
    "another tensor": (lambda state: state.__setitem__(0, torch.zeros(3)), True),
    "other memory": (lambda state: setattr(state[0], "data", torch.zeros(3)), True),
    "none": (lambda state: state.clear(), True),
    "one more": (lambda state: state.append(torch.zeros(3)), False),
    "another value": (lambda state: state[0].fill_(7.0), False),
}


@pytest.mark.parametrize("what", STATE_CHANGES)
def test_what_graphs_write_and_no_module_owns_has_to_lie_where_it_was(what: str) -> None:
    module, state = nn.Linear(3, 3), [torch.zeros(3)]
    watch = AddressWatch([SiteSpec(name="layer", module=module, state=lambda _module: state)])
    watch.watch(grad=False)
    watch.look()
    assert watch.holds_state and not watch.has_other_state() and watch.change is None
    change, is_noticed = STATE_CHANGES[what]
    change(state)
    watch.look()
    assert watch.has_other_state() is is_noticed
    assert watch.change is (EagerReason.ADDRESS_MOVED if is_noticed else None)


def test_the_hash_is_of_modules_that_are_there() -> None:
    modules = [nn.Linear(3, 3), nn.LayerNorm(3)]
    references = [weakref.ref(module) for module in modules]
    watch = _C.ModuleWatch(references)
    before = watch.fingerprint()
    assert watch.fingerprint() == _C.ModuleWatch(references).fingerprint() == before
    modules.pop()
    assert watch.fingerprint() != before
    assert _C.ModuleWatch([]).fingerprint() != before


def test_the_hash_holds_no_module() -> None:
    module = nn.Linear(3, 3)
    reference = weakref.ref(module)
    watch = _C.ModuleWatch([reference])
    watch.fingerprint()
    del module
    assert reference() is None


def test_an_attribute_that_raises_is_no_missing_one() -> None:
    class Raising(nn.Parameter):
        @property
        def main_grad(self) -> torch.Tensor:
            raise RuntimeError("not now")

    module = nn.Linear(3, 3, bias=False)
    module.weight = Raising(torch.zeros(3, 3))
    with pytest.raises(RuntimeError, match="not now"):
        _C.ModuleWatch([weakref.ref(module)]).fingerprint()


class Owner(nn.Module):
    """Has one of everything that the hash covers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("scale", torch.ones(3))
        for param in self.parameters():
            param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]


def _moved(param: Any) -> None:
    param.data = param.data.clone()


DIFFERENCES: dict[str, Callable[[Any], object]] = {
    "a parameter replaced": lambda owner: setattr(owner.inner, "weight", nn.Parameter(torch.zeros(3, 3))),
    "a parameter in other memory": lambda owner: _moved(owner.inner.weight),
    "a parameter without memory": lambda owner: owner.inner.bias.untyped_storage().resize_(0),
    "a parameter frozen": lambda owner: owner.norm.weight.requires_grad_(False),
    "a gradient replaced": lambda owner: setattr(owner.inner.bias, "main_grad", torch.zeros(3)),
    "a gradient in other memory": lambda owner: _moved(owner.inner.bias.main_grad),
    "a gradient taken away": lambda owner: delattr(owner.norm.bias, "main_grad"),
    "a hook on a gradient": lambda owner: owner.norm.bias.register_hook(lambda grad: grad),
    "a buffer in other memory": lambda owner: _moved(owner.scale),
    "a buffer replaced": lambda owner: setattr(owner, "scale", torch.ones(3)),
    "a submodule replaced": lambda owner: setattr(owner, "norm", nn.LayerNorm(3)),
    "a submodule more": lambda owner: owner.add_module("further", nn.Identity()),
    "a hook on a module": lambda owner: owner.inner.register_forward_pre_hook(lambda *_: None),
    "a table of hooks replaced": lambda owner: setattr(
        owner.inner, "_forward_hooks", OrderedDict({7: print})
    ),
    "all attributes replaced": lambda owner: setattr(owner.norm, "__dict__", dict(vars(nn.LayerNorm(3)))),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_the_hash_sees_every_change_however_often_it_was_asked_before(what: str) -> None:
    owner = Owner()
    modules = list(owner.modules())
    watch = _C.ModuleWatch([weakref.ref(module) for module in modules])
    before = watch.fingerprint()
    assert [watch.fingerprint() for _ in range(3)] == [before] * 3
    DIFFERENCES[what](owner)
    assert watch.fingerprint() != before
