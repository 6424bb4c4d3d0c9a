# SPDX-License-Identifier: Apache-2.0
"""What modules keep in plain attributes, beside their parameters and buffers.

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

import enum
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["PlainAttributes", "plain_tensors"]

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
