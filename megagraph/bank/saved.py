# SPDX-License-Identifier: Apache-2.0
"""Finds out what of a call's input and output its backward pass reads.

A graph reads them where they lie, and nobody would notice that they were written meanwhile: autograd does
so by the tensors that eager saves.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["SavedTensors", "Saves", "saved_tensors"]


class Saves(NamedTuple):
    """Whether a backward pass reads the call's input, and each of its outputs."""

    input: bool
    outputs: tuple[bool, ...]


class SavedTensors:
    """The memory of what autograd saved."""

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def note(self, tensor: Tensor) -> Tensor:
        """Takes note of a tensor that is being saved, and hands it on."""
        if tensor.layout is torch.strided:
            self._storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    def of(self, given: Tensor, outputs: Sequence[Tensor]) -> Saves:
        """What of a call was saved."""
        return Saves(self._has(given), tuple(map(self._has, outputs)))

    def _has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages


@contextlib.contextmanager
def saved_tensors() -> Iterator[SavedTensors]:
    """Notes what autograd saves inside."""
    saved = SavedTensors()
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        yield saved
