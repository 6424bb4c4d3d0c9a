# SPDX-License-Identifier: Apache-2.0
"""What a variant's calls are given beside the hidden states: buffers of metadata, and constants.

Note [Arguments of a variant]
`VariantSpec.arguments` runs at the capture, and no replay runs it again. What it hands on of the buffers
(themselves, or views) follows each micro-batch; everything else keeps the value that it had at the capture,
and lives as long as the graphs. So a value that was computed from a buffer's content would stay the
example's: it is an error. It is found by asking again while the buffers hold something else.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from megagraph.bank.sites import VariantSpec

__all__ = ["arguments_of", "tensors_in"]

_DEPTH = 4


def _values_in(value: Any, path: str, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values, by where they are."""
    if isinstance(value, (Tensor, bool, int, float, str)):
        yield path, value
    elif depth == 0 or isinstance(value, (nn.Module, type)):
        return
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _values_in(item, f"{path}[{index}]", depth - 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _values_in(item, f"{path}[{key!r}]", depth - 1)
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            yield from _values_in(item, f"{path}.{name}", depth - 1)


def _all_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for name, given in arguments.items() for path, value in _values_in(given, name)}


def tensors_in(arguments: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor of a call's arguments, also those inside containers and plain objects."""
    return [value for value in _all_values(arguments).values() if isinstance(value, Tensor)]


@contextlib.contextmanager
def _other_contents(variant: VariantSpec, buffers: Mapping[str, Tensor]) -> Iterator[None]:
    """The buffers that staging refills hold something else than their examples."""
    staged = [buffers[name] for name, spec in variant.metadata.items() if spec.is_staged]
    before = [buffer.clone() for buffer in staged]
    for buffer in staged:
        buffer.fill_(not bool(buffer.any()))  # zeros, or ones in place of zeros: offsets stay offsets
    try:
        yield
    finally:
        for buffer, content in zip(staged, before, strict=True):
            buffer.copy_(content)


def _storage(tensor: Tensor) -> int:
    return 0 if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return type(value) is type(other) and bool(value == other)
    if value.shape != other.shape or value.dtype != other.dtype or value.device != other.device:
        return False
    if value.device.type == "meta":
        return True
    both_nan = (value != value) & (other != other)
    return bool(((value == other) | both_nan).all())


def arguments_of(variant: VariantSpec, buffers: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """A variant's arguments over the metadata buffers of a slot, filled with their examples.

    Raises:
        ValueError: naming an argument that was computed from the content of a buffer: Note [Arguments of a
            variant].
    """
    arguments = variant.arguments(buffers)
    with _other_contents(variant, buffers):
        try:
            others = _all_values(variant.arguments(buffers))
        except Exception as error:
            raise ValueError(
                f"variant {variant}: its arguments depend on the content of the metadata buffers, which no "
                f"replay would see; asked with other contents they raise {type(error).__name__}: {error}"
            ) from error
    ours = {_storage(buffer) for buffer in buffers.values()} - {0}
    for path, value in _all_values(arguments).items():
        if isinstance(value, Tensor) and _storage(value) in ours:
            continue
        if path not in others or not _is_same(value, others[path]):
            raise ValueError(
                f"variant {variant}: argument {path} is computed from the content of a metadata buffer and "
                "would keep the example's; hand the buffer on, or a view of it, and compute in the module"
            )
    return arguments
