# SPDX-License-Identifier: Apache-2.0
"""Random-number state: put back after a capture, and watched for draws that a graph cannot make."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megagraph.bank.rewinds import Rewinds, rewinds_of_default_generator

__all__ = ["RngSources", "RngTracker"]


class RngTracker(Protocol):
    """Named random streams, as Megatron's and Transformer Engine's trackers keep them.

    A stream that is a `torch.Generator` can be advanced by a graph; one that is a saved state (a
    tensor, swapped into the default generator for a while) cannot.
    """

    def get_states(self) -> Mapping[str, Tensor | torch.Generator]: ...
    def set_states(self, states: Mapping[str, Tensor | torch.Generator]) -> None: ...


_Snapshot = tuple[list[Tensor], list[dict[str, Tensor | torch.Generator]]]


class RngSources:
    """Everything on a device that random numbers are drawn from.

    Args:
        device: its default generator is always included, and the CPU's.
        trackers: named streams beside it.
    """

    def __init__(self, device: torch.device, trackers: Sequence[RngTracker] = ()) -> None:
        self._trackers = list(trackers)
        self._device = device
        self._is_host_drawn = device.type == "cpu"  # the host backend draws from it in each replay
        self._defaults = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self._defaults.append(torch.cuda.default_generators[device.index])

    def generators(self) -> list[torch.Generator]:
        """The graph-safe streams of the trackers; a capture has to register them."""
        streams = [stream for tracker in self._trackers for stream in tracker.get_states().values()]
        return [stream for stream in streams if isinstance(stream, torch.Generator)]

    def snapshot(self) -> _Snapshot:
        """The state of every stream now."""
        states = [generator.get_state() for generator in [*self._defaults, *self.generators()]]
        saved: list[dict[str, Tensor | torch.Generator]] = [
            {name: stream for name, stream in tracker.get_states().items() if isinstance(stream, Tensor)}
            for tracker in self._trackers
        ]
        return states, saved

    def restore(self, snapshot: _Snapshot) -> None:
        """Sets every stream back."""
        states, saved = snapshot
        for generator, state in zip([*self._defaults, *self.generators()], states, strict=True):
            generator.set_state(state)
        for tracker, streams in zip(self._trackers, saved, strict=True):
            if streams:
                tracker.set_states({**tracker.get_states(), **streams})

    @contextlib.contextmanager
    def watched(self) -> Iterator[Rewinds]:
        """Follows the device's default generator: Note [Draws after a rewind].

        The host backend runs Python again in each replay, so that nothing is noticed there.
        """
        if self._device.type != "cuda":
            yield Rewinds(self._defaults[-1])
            return
        with rewinds_of_default_generator(self._device) as rewinds:
            yield rewinds

    def drew_unsafely(self, snapshot: _Snapshot) -> bool:
        """Whether a stream that no graph can advance has moved since `snapshot`."""
        now = self.snapshot()
        if not self._is_host_drawn and not torch.equal(snapshot[0][0], now[0][0]):
            return True
        for before, after in zip(snapshot[1], now[1], strict=True):
            for name, state in after.items():
                old = before.get(name)
                if isinstance(old, Tensor) and isinstance(state, Tensor) and not torch.equal(old, state):
                    return True
        return False
