# SPDX-License-Identifier: Apache-2.0
"""What calls of sites write beside their outputs: finds it, keeps it as it was, compares it, puts it back.

That is gradients, buffers, further state, values in plain attributes, flags and torch's settings.

Note [Plain attributes]
A graph reads and writes the tensor that it was captured with. A module that updates it in place is served
like one with a buffer. One that binds another tensor to the attribute (a statistic, say) does so once, in
the capture: from then on the host reads what no replay writes, and each replay reads what the host has
dropped. So it is with any other value: no replay counts a counter up. A call that leaves another value than
it found, or one where there was none, is found in its warm-up, and its site stays eager. That costs a site
that fills a cache in its first call, where a bank captures it before any eager call. Neither Megatron's
layers nor Transformer Engine's modules change values in their calls, apart from fp8, statistics that are
refused by name, and flags that the owner of a bank answers for by name.

Looked at are attributes, and what lists, tuples, sets and dictionaries in them hold, and nothing deeper.
"""

import contextlib
import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    "unfilled",
    "written_by",
]


Results = dict[str, Tensor]  # of one run, by what they are in words

_TORCHS_OWN = frozenset(vars(nn.Module()))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in _TORCHS_OWN:
            yield name, value


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
        for name, value in _attributes(module):
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


class PlainAttributes:
    """What the attributes of some modules hold, to be put back.

    Args:
        modules: by what they are called.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = [(name, module, dict(_attributes(module))) for name, module in modules]
        self._contents = {
            id(value): (value, value.copy())
            for _name, _child, attributes in self._modules
            for value in attributes.values()
            if isinstance(value, (list, dict, set))
        }

    def put_back(self, left_out: Collection[str] = ()) -> str | None:
        """Gives every attribute the value and the content that it had.

        Args:
            left_out: names of attributes that may have changed.

        Returns:
            What has happened to the first one that has changed, in words.
        """
        changed = [
            (child, where, name, attributes)
            for where, child, attributes in self._modules
            for name in {**attributes, **dict(_attributes(child))}
            if not self._is_as_before(attributes.get(name, _MISSING), vars(child).get(name, _MISSING))
        ]
        said = [self._in_words(*found) for found in changed if found[2] not in left_out]
        for child, _where, name, attributes in changed:
            self._put_back_one(child, name, attributes)
        return said[0] if said else None

    def _in_words(self, child: nn.Module, where: str, name: str, attributes: dict[str, Any]) -> str:
        what = (
            "was bound to another tensor; graphs update tensors in place only"
            if _tensors(attributes.get(name)) or _tensors(vars(child).get(name))
            else "has another value after a call; graphs change no value"
        )
        return f"attribute {name!r} of {type(child).__name__}{f' {where!r}' if where else ''} {what}"

    def _is_as_before(self, before: Any, now: Any) -> bool:
        if not _is_same(before, now):
            return False
        _value, content = self._contents.get(id(before), (None, None))
        return content is None or _has_same_content(content, now)

    def _put_back_one(self, child: nn.Module, name: str, attributes: dict[str, Any]) -> None:
        if name not in attributes:
            del vars(child)[name]
            return
        value = vars(child)[name] = attributes[name]
        if id(value) not in self._contents:
            return
        _value, content = self._contents[id(value)]
        if not _has_same_content(content, value):
            value.clear()
            if isinstance(value, list):
                value.extend(content)
            else:
                value.update(content)


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
    sites: Sequence[SiteSpec], *, work_runs: bool, left_out: Collection[str] = ()
) -> Iterator[None]:
    """Puts back gradients, flags, buffers and attributes of the sites' modules, whatever happens inside.

    Args:
        sites: owners of the modules.
        work_runs: the work inside really runs, so that contents change too.
        left_out: names of attributes that may have other values afterwards.

    Raises:
        ValueError: where a buffer is another one afterwards, or an attribute has another value: Note
            [Plain attributes].
    """
    gradients, state = KeptGradients(sites, work_runs), KeptState(sites if work_runs else ())
    attributes = PlainAttributes([named for site in sites for named in site.named_modules()])
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
        changed_attribute = attributes.put_back(left_out)
    if rebound:
        raise ValueError("a buffer was reassigned; graphs update buffers in place only")
    if changed_attribute is not None:
        raise ValueError(changed_attribute)


@contextlib.contextmanager
def unfilled() -> Iterator[None]:
    """Lets `torch.empty` leave memory as it is in deterministic mode, too.

    A static buffer is written before its graph is launched: a captured fill would overwrite it.
    """
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filled


_FLAG = "grad_added_to_main_grad"


class KeptGradients:
    """Of all trainable parameters of some sites, with the flags of fused accumulation.

    Args:
        sites: whose parameters.
        work_runs: main gradients may change, too.
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
        """What is there, by what it is in words; in no memory of its own.

        Args:
            swap: the accumulators of the backward pass; None for autograd's own.
        """
        named = [(name, param, main_grad_of(param)) for name, param in self._params]
        results = [(name, grad) for name, _param, grad in named if grad is not None]
        others = [(name, param) for name, param, grad in named if grad is None]
        kept = [param.grad for _name, param in others] if swap is None else swap.take_kept_grads()
        results += [(name, grad) for (name, _), grad in zip(others, kept, strict=True) if grad is not None]
        return {f"gradient of {name}": grad for name, grad in results}

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
    """What calls of sites write beside gradients.

    Args:
        sites: whose calls, by index.
        further: what they write that is put back at the end only, and never shown.
    """

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

    def changed(self, index: int) -> Results:
        """Copies of what differs from before."""
        found = self._of_site[index].items()
        return {name: now.clone() for name, now in found if not _C.have_same_bits(now, self._was(now))}

    def with_unchanged(self, index: int, changed: Results) -> Results:
        """What `changed()` gave, and the rest of the site as it was before."""
        return {name: changed.get(name, self._was(tensor)) for name, tensor in self._of_site[index].items()}

    def _was(self, tensor: Tensor) -> Tensor:
        return self._before[id(tensor)][1]

    def put(self, index: int, changed: Mapping[str, Tensor] | None = None) -> None:
        """Puts a site back, or where it was when `changed()` gave this."""
        self._copy((tensor, self._was(tensor)) for tensor in self._of_site[index].values())
        if changed:
            self._copy((self._of_site[index][name], content) for name, content in changed.items())

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
