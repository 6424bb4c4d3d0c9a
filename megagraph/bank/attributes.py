# SPDX-License-Identifier: Apache-2.0
"""Tensors that modules keep in plain attributes, beside their parameters and buffers.

Note [Tensors in plain attributes]
A graph reads and writes the tensor that it was captured with. A module that updates it in place is served
like one with a buffer. One that binds another tensor to the attribute (a statistic, say) does so once, in
the capture: from then on the host reads what no replay writes, and each replay reads what the host has
dropped. So a call that leaves another tensor than it found, or one where there was none, is found in its
warm-up, and its site stays eager. That costs a site that fills a cache in its first call, where a bank
captures it before any eager call. Neither Megatron's layers nor Transformer Engine's modules bind tensors in
their calls, apart from fp8 and the statistics that are refused by name.

Looked at are attributes that are tensors, and lists, tuples and dictionaries of them, and nothing deeper.
"""

from collections.abc import Iterator, Sequence
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


def plain_tensors(module: nn.Module) -> list[Tensor]:
    """What a module and its submodules keep in plain attributes; not their parameters and buffers."""
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    found = {
        id(tensor): tensor
        for child in module.modules()
        for _name, value in _attributes(child)
        for tensor in _tensors(value).values()
    }
    return [tensor for key, tensor in found.items() if key not in known]


class PlainAttributes:
    """Which tensors the attributes of some modules are, to be put back.

    Args:
        modules: with their submodules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [
            (name, child, dict(_attributes(child)))
            for module in modules
            for name, child in module.named_modules()
        ]
        self._contents = {
            id(value): (value, value.copy())
            for _name, _child, attributes in self._modules
            for value in attributes.values()
            if isinstance(value, (list, dict))
        }

    def _before(self, value: Any) -> Any:
        """An attribute's value as it was, if that was changed in place."""
        _value, content = self._contents.get(id(value), (None, value))
        return content

    def put_back(self) -> str | None:
        """Binds every attribute to the tensors that it was bound to.

        Returns:
            The first attribute that was bound to others, in words.
        """
        rebound = [
            (child, where, attribute, attributes)
            for where, child, attributes in self._modules
            for attribute in {**attributes, **dict(_attributes(child))}
            if self._is_rebound(attributes.get(attribute), vars(child).get(attribute))
        ]
        for child, _where, attribute, attributes in rebound:
            self._put_back_one(child, attribute, attributes)
        if not rebound:
            return None
        child, where, attribute, _attributes_before = rebound[0]
        return f"attribute {attribute!r} of {type(child).__name__}{f' {where!r}' if where else ''}"

    def _is_rebound(self, before: Any, now: Any) -> bool:
        found, left = _tensors(self._before(before)), _tensors(now)
        return found.keys() != left.keys() or any(left[place] is not found[place] for place in found)

    def _put_back_one(self, child: nn.Module, attribute: str, attributes: dict[str, Any]) -> None:
        if attribute not in attributes:
            del vars(child)[attribute]
            return
        value = vars(child)[attribute] = attributes[attribute]
        content = self._before(value)
        if content is value:
            return
        value.clear()
        if isinstance(value, dict):
            value.update(content)
        else:
            value.extend(content)
