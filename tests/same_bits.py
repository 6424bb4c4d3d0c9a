# SPDX-License-Identifier: Apache-2.0
"""Whether two runs have left the same bits: one comparison, whatever they are made of. And whether attention
is as close to float64 as its roundings allow."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

MOST_DIFFERENCES = 8  # that a message names


class BitsDiffer(AssertionError):
    """Two runs differ. `.ci/tests` never runs a test again that raised it: bits do not differ by accident."""


def assert_same_bits(one: Any, other: Any, where: str = "") -> None:
    """All tensors of both are of one dtype and shape and equal; no entry is NaN. Everything else is `==`."""
    found = list(_differences(one, other, where))
    if found:
        more = f"\nand {len(found) - MOST_DIFFERENCES} more" if len(found) > MOST_DIFFERENCES else ""
        raise BitsDiffer("\n".join(found[:MOST_DIFFERENCES]) + more)


# The error that a result may have against float64, in units of eps(dtype) * max(1, max|expected|):
# sums of up to 300 products in float32, and FlashAttention's bfloat16 probabilities.
ERROR_UNITS = {"cpu": 32, "cuda": 8}


def assert_close_to_float64(actual: list[Tensor], expected: list[Tensor], device: str = "cpu") -> None:
    """Output and gradients, of which some may have a tail that is not expected."""
    assert len(actual) == len(expected)
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=False):
        if e.numel() == 0:
            continue
        bound = ERROR_UNITS[device] * torch.finfo(a.dtype).eps * max(1.0, e.abs().max().item())
        error = (a[: e.size(0)].cpu().double() - e).abs().max().item()
        assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}"


def _differences(one: Any, other: Any, where: str) -> Iterator[str]:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        yield from _of_tensors(one, other, where)
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        yield from _of_parts(one, other, where, "{}[{!r}]")
    elif dataclasses.is_dataclass(one) and type(one) is type(other):
        names = [field.name for field in dataclasses.fields(one) if field.compare]
        parts = [{name: getattr(it, name) for name in names} for it in (one, other)]
        yield from _of_parts(*parts, where, "{}.{}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        yield from _of_parts(dict(enumerate(one)), dict(enumerate(other)), where, "{}[{}]")
    elif isinstance(one, Tensor) or isinstance(other, Tensor) or one != other:
        yield f"{where or 'they'}: {one} and {other}"


def _of_parts(one: Mapping[Any, Any], other: Mapping[Any, Any], where: str, place: str) -> Iterator[str]:
    if one.keys() != other.keys():
        yield f"{where or 'they'} have other parts: {list(one)} and {list(other)}"
        return
    for name, value in one.items():
        yield from _differences(value, other[name], place.format(where, name))


def _of_tensors(one: Tensor, other: Tensor, where: str) -> Iterator[str]:
    kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (one, other)]
    if kinds[0] != kinds[1]:
        yield f"{where or 'they'}: {kinds[0]} and {kinds[1]}"
    elif not torch.equal(one, other):
        places = (one != other).nonzero()
        first = tuple(places[0].tolist())
        values = f"first {one[first].item()} and {other[first].item()} at {list(first)}"
        yield f"{where or 'they'}: {len(places)} of {one.numel()} entries differ, {values}"
