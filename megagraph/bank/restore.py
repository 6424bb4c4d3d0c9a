# SPDX-License-Identifier: Apache-2.0
"""What calls of sites write beside their outputs: finds it, keeps it as it was, compares it, puts it back.

That is gradients, buffers, further state, values in plain attributes, flags and torch's settings.

Note [Plain attributes]
A graph reads and writes the tensor that it was captured with. A module that updates it in place is served
like one with a buffer. One that binds another tensor to the attribute (a statistic, say) does so once, in
the capture: from then on the host reads what no replay writes, and each replay reads what the host has
dropped. So it is with any other value: no replay counts a counter up. A call that leaves another tensor than
it found, or one where there was none, is found in its warm-up, and its site stays eager.

Other values may settle: some adapters set a flag of their layer in each call, to what the call itself goes
by. So a site that leaves another value is called once more. If that one leaves all values, and its outputs
have the same bits, no call goes by what it finds: graphs are captured with the values that calls leave,
which stay in the module. Else the site stays eager, and all is put back. Neither Megatron's layers nor
Transformer Engine's modules change values in each call, apart from fp8, statistics that are refused by name,
and flags that the owner of a bank answers for by name.

Looked at are attributes, and what lists, tuples, sets and dictionaries in them hold, and nothing deeper.
"""

import contextlib
import enum
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.sites import SiteSpec

__all__ = [
    "KeptGradients",
    "KeptState",
    "PlainAttributes",
    "Results",
    "leaves_no_trace",
    "main_grad_of",
    "plain_tensors",
    "written_by",
]


Results = dict[str, Tensor]  # of one run, by what they are in words

_TORCHS_OWN = frozenset(vars(nn.Module()))


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN}


def _tensors(value: Any) -> dict[Any, Tensor]:
    """The tensors of an attribute, by their place in it."""
    if isinstance(value, Tensor):
        return {None: value}
    if isinstance(value, (list, tuple)):
        return {index: item for index, item in enumerate(value) if isinstance(item, Tensor)}
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if isinstance(item, Tensor)}
    return {}


def plain_tensors(modules: Collection[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """What modules, by name, keep in plain attributes, each once; not their parameters and buffers."""
    known = {id(tensor) for _where, it in modules for tensor in (*it.parameters(), *it.buffers())}
    found: dict[str, Tensor] = {}
    for where, module in modules:
        for name, value in _attributes(module).items():
            for place, tensor in _tensors(value).items():
                if id(tensor) not in known:
                    known.add(id(tensor))
                    path = f"{where}.{name}" if where else name
                    found[path if place is None else f"{path}[{place!r}]"] = tensor
    return found


_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum)
_MISSING = object()


def _is_same(before: Any, now: Any) -> bool:
    """Whether nobody could tell two values apart: one object, or two plain ones that are equal."""
    if before is now:
        return True
    if type(before) is not type(now) or not isinstance(now, (*_PLAIN, tuple)):
        return False
    if isinstance(now, tuple):
        return len(before) == len(now) and all(map(_is_same, before, now))
    return bool(before == now)


def _has_same_content(before: Any, now: Any) -> bool:
    if isinstance(now, dict):
        return before.keys() == now.keys() and all(_is_same(before[key], now[key]) for key in now)
    if isinstance(now, list):
        return len(before) == len(now) and all(map(_is_same, before, now))
    return bool(before == now)


def _content(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict, set)) else None


def _is_as_before(value: Any, content: Any, now: Any) -> bool:
    return _is_same(value, now) and (content is None or _has_same_content(content, now))


class PlainAttributes:
    """What the attributes of some modules, by what they are called, hold, to be put back.

    Of those that are left out nothing is said.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], left_out: Collection[str] = ()) -> None:
        self._left_out = left_out
        # With a copy of the content of those that have some which may change.
        self._before = [
            (where, module, {name: (value, _content(value)) for name, value in _attributes(module).items()})
            for where, module in modules
        ]

    def put_back(self, *, leaves_values: bool = False) -> str | None:
        """Gives every attribute what it had; says what has happened to the first one that is not left out.

        `leaves_values`: but for those that are not left out either and hold no tensors.
        """
        changed = [
            (where, module, name, was, bool(_tensors(was[0]) or _tensors(vars(module).get(name))))
            for where, module, before in self._before
            for name in {**before, **_attributes(module)}
            for was in [before.get(name, (_MISSING, None))]
            if not _is_as_before(*was, vars(module).get(name, _MISSING))
        ]
        said = [
            f"attribute {name!r} of {type(module).__name__}{f' {where!r}' if where else ''} "
            + (
                "was bound to another tensor; graphs update tensors in place only"
                if is_tensor
                else "has another value after a call; graphs change no value"
            )
            for where, module, name, _was, is_tensor in changed
            if name not in self._left_out
        ]
        for _where, module, name, (value, content), is_tensor in changed:
            if leaves_values and not is_tensor and name not in self._left_out:
                continue
            if value is _MISSING:
                del vars(module)[name]
                continue
            vars(module)[name] = value
            if content is not None and not _has_same_content(content, value):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(content)
        return said[0] if said else None


def main_grad_of(param: Tensor) -> Tensor | None:
    """Where Megatron's DDP accumulates a parameter's gradient; None without it."""
    return getattr(param, "main_grad", None)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def _is_writable(tensor: Tensor) -> bool:
    """Whether a call may change a tensor in place: a plain one, whose entries share no memory."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta:
        return False
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    overlaps = any(stride == 0 and size > 1 for stride, size in steps)
    return _has_memory(tensor) and not overlaps and not tensor.is_inference()


def written_by(site: SiteSpec) -> dict[str, Tensor]:
    """What a site's calls may change in place beside gradients, each once, by what it is in words."""
    found = {
        **{f"buffer {name}": buffer for name, buffer in site.named_buffers()},
        **{f"further state {number}": state for number, state in enumerate(site.further_state())},
        **{f"attribute {it}": held for it, held in plain_tensors([*site.named_modules()]).items()},
    }
    named = {name: tensor for name, tensor in found.items() if _is_writable(tensor)}
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}


@contextlib.contextmanager
def leaves_no_trace(
    sites: Sequence[SiteSpec],
    *,
    work_runs: bool,
    left_out: Collection[str] = (),
    keeps_attributes: bool = True,
) -> Iterator[None]:
    """Puts back gradients, flags, buffers and attributes of the sites' modules, whatever happens inside.

    Where `work_runs`, contents change too. A buffer that is another one afterwards is a `ValueError`, and so
    is an attribute that has another value and is not left out: Note [Plain attributes]. The caller may keep
    attributes instead.
    """
    gradients, state = KeptGradients(sites, work_runs), KeptState(sites if work_runs else ())
    owners = [named for site in sites for named in site.named_modules()]
    attributes = PlainAttributes(owners if keeps_attributes else (), left_out)
    modules = [module for site in sites for module in site.modules()]
    tables = [(module._buffers, dict(module._buffers)) for module in modules]
    try:
        with gradients.put_back_afterwards():
            yield
    finally:
        state.put_all_back()
        rebound = any(
            table.get(name) is not buffer for table, before in tables for name, buffer in before.items()
        )
        for table, before in tables:
            table.update(before)
        changed_attribute = attributes.put_back()
    if rebound:
        raise ValueError("a buffer was reassigned; graphs update buffers in place only")
    if changed_attribute is not None:
        raise ValueError(changed_attribute)


_FLAG = "grad_added_to_main_grad"


class KeptGradients:
    """Of all trainable parameters of some sites, with the flags of fused accumulation.

    Only where `work_runs` may main gradients change, too.
    """

    def __init__(self, sites: Sequence[SiteSpec], work_runs: bool = True) -> None:
        self._params = [named for site in sites for named in site.trainable()]
        main_grads = (main_grad_of(param) for _name, param in self._params if work_runs)
        # Hosts free them outside of training; work without a backward pass does not touch them. Most often
        # they are zero between two steps, and need no copy.
        self._before = [
            (grad, grad.clone() if _C.has_bits(grad) else None)
            for grad in main_grads
            if grad is not None and _has_memory(grad)
        ]
        self._flags = [(param, getattr(param, _FLAG)) for _, param in self._params if hasattr(param, _FLAG)]

    def found(self, swap: _C.AccumulatorSwap | None = None) -> Results:
        """What autograd's accumulators, or those of a swap, have left, in no memory of its own."""
        names: dict[Tensor, str] = {param: name for name, param in self._params}
        found = [(param, main_grad_of(param)) for param in names]
        others = [(param, param.grad) for param, grad in found if grad is None]
        found += others if swap is None else [*swap.take_kept_grads()]
        return {f"gradient of {names[param]}": grad for param, grad in found if grad is not None}

    @contextlib.contextmanager
    def put_back_afterwards(self) -> Iterator[None]:
        """Leaves everything as it was, whatever happens inside, where no parameter has a `.grad` at first."""
        grads = [(param, param.grad) for _name, param in self._params]
        for param, _grad in grads:
            param.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for main_grad, before in self._before:
                    _ = main_grad.zero_() if before is None else main_grad.copy_(before)
            for param, grad in grads:
                param.grad = grad
            for param, flag in self._flags:
                setattr(param, _FLAG, flag)


class KeptState:
    """What calls of sites, by index, write beside gradients; `further` is put back at the end only."""

    def __init__(self, sites: Sequence[SiteSpec], further: Sequence[Tensor] = ()) -> None:
        written = [written_by(site) for site in sites]
        tensors = [*further, *(tensor for of_site in written for tensor in of_site.values())]
        # Aliases of one storage and version with what sites hold: some of it requires a gradient.
        live = {id(tensor): tensor.detach() for tensor in tensors}
        self._of_site = [{name: live[id(it)] for name, it in of_site.items()} for of_site in written]
        self._before = {id(tensor): (tensor, tensor.clone()) for tensor in live.values()}

    def found(self, index: int) -> Results:
        """What is there of a site, by what it is in words; in no memory of its own."""
        return dict(self._of_site[index])

    def now(self, index: int) -> Results:
        """What is there of a site: copies of what differs from before, and else what was there then."""
        pairs = [(name, now, self._was(now)) for name, now in self._of_site[index].items()]
        return {name: was if _C.have_same_bits(now, was) else now.clone() for name, now, was in pairs}

    def _was(self, tensor: Tensor) -> Tensor:
        return self._before[id(tensor)][1]

    def put(self, index: int, contents: Results | None = None) -> None:
        """Puts a site back, or where it was when `now()` gave this."""
        found = self._of_site[index].items()
        self._copy((it, self._was(it) if contents is None else contents[name]) for name, it in found)

    def put_all_back(self) -> None:
        """Puts everything back."""
        self._copy(self._before.values())

    @staticmethod
    @torch.no_grad()
    def _copy(contents: Iterable[tuple[Tensor, Tensor]]) -> None:
        for tensor, content in contents:
            # Autograd takes a new version for other content. A backward that has saved this tensor finds
            # what its forward has left, or what was there before.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor):
                tensor.copy_(content)
