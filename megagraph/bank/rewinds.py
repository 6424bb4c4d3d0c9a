# SPDX-License-Identifier: Apache-2.0
"""Notices draws from a random stream that was set back: what recomputes does so, and no graph can.

Looks only; what follows from it is decided elsewhere.

Note [Draws after a rewind]
A checkpoint sets the device's default generator back to what it was in the forward, runs its region again,
and sets the generator to where it had got. A graph has no such place to go back to: it draws where the
generator stands when it is replayed. So a region that draws gets other numbers than in its forward, unless
nothing sets the generator back in eager either, as where Megatron and Transformer Engine swap generators and
not their states. A region that draws nothing may be swapped around as it likes.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Rewinds", "rewinds_of_default_generator"]


class Rewinds:
    """Follows one stream past the places where it is set to another state.

    Args:
        stream: whose state is set inside `setting()` only.
    """

    def __init__(self, stream: torch.Generator) -> None:
        self._stream = stream
        # How far the stream had got, while it is set elsewhere.
        self._reached: Tensor | None = None
        self._set_to: Tensor | None = None
        self._has_drawn = False

    @contextlib.contextmanager
    def setting(self) -> Iterator[None]:
        """Entered around what sets the stream."""
        before = self._stream.get_state()
        self._look(before)
        yield
        after = self._stream.get_state()
        if self._reached is None:
            self._reached = None if torch.equal(before, after) else before
        elif torch.equal(after, self._reached):
            self._reached = None
        self._set_to = after

    def _look(self, now: Tensor) -> None:
        if self._reached is not None and self._set_to is not None:
            self._has_drawn = self._has_drawn or not torch.equal(now, self._set_to)

    def has_drawn(self) -> bool:
        """Whether anybody drew while the stream was elsewhere than it had got to."""
        self._look(self._stream.get_state())
        return self._has_drawn


class _StandIn(torch.Generator):
    """Takes a default generator's place for Python, which sets it through here; shares its state.

    To swap generators, and not their states, is nothing to be noticed.
    """

    real: torch.Generator
    rewinds: Rewinds

    def set_state(self, new_state: Tensor) -> torch.Generator:
        with self.rewinds.setting():
            return self.real.set_state(new_state)

    def set_offset(self, offset: int) -> torch.Generator:
        with self.rewinds.setting():
            return self.real.set_offset(offset)

    def manual_seed(self, seed: int) -> torch.Generator:
        with self.rewinds.setting():
            return self.real.manual_seed(seed)

    def seed(self) -> int:
        with self.rewinds.setting():
            return self.real.seed()

    def graphsafe_set_state(self, state: torch.Generator) -> torch.Generator:
        super().graphsafe_set_state(state)
        return self.real.graphsafe_set_state(state)


@contextlib.contextmanager
def rewinds_of_default_generator(device: torch.device) -> Iterator[Rewinds]:
    """Follows the default generator of a CUDA device.

    torch, Megatron and Transformer Engine all look it up in `torch.cuda.default_generators` to set it.
    """
    cuda: Any = torch.cuda
    generators = cuda.default_generators
    stand_in = _StandIn(device)
    stand_in.real = generators[device.index]
    stand_in.rewinds = Rewinds(stand_in.real)
    torch.Generator.graphsafe_set_state(stand_in, stand_in.real)
    cuda.default_generators = tuple(
        stand_in if index == device.index else generator for index, generator in enumerate(generators)
    )
    try:
        yield stand_in.rewinds
    finally:
        cuda.default_generators = generators
