# SPDX-License-Identifier: Apache-2.0
"""Random-number state: put back after a capture, and watched for draws that a graph cannot make.

Note [Draws after a rewind]
A checkpoint sets the device's default generator back to what it was in the forward, runs its region again,
and sets the generator to where it had got. A graph has no such place to go back to: it draws where the
generator stands when it is replayed. So a region that draws gets other numbers than in its forward, unless
nothing sets the generator back in eager either, as where Megatron and Transformer Engine swap generators and
not their states. A region that draws nothing may be swapped around as it likes.
"""

import contextlib
import operator
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

__all__ = [
    "HostStreams",
    "Rewinds",
    "RngSources",
    "RngTracker",
    "Snapshot",
    "TrackerSource",
    "rewinds_of_default_generator",
]


class Rewinds:
    """Follows one stream, whose state is set inside `setting()` only, past the places where it is set."""

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
    """Follows a device's default generator: Note [Draws after a rewind].

    torch, Megatron and Transformer Engine all look it up in `torch.cuda.default_generators` to set it. The
    host backend runs Python again in each replay, so that nothing is noticed there.
    """
    if device.type != "cuda":
        yield Rewinds(torch.default_generator)
        return
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


class HostStreams:
    """Where Python's and numpy's default generators were: a capture draws from them once for all replays."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), numpy.random.get_state(legacy=False)

    def put_back(self) -> bool:
        """Sets them back; returns whether they had moved."""
        is_other = random.getstate() != self._python
        if is_other:
            random.setstate(self._python)
        if pickle.dumps(numpy.random.get_state(legacy=False)) != pickle.dumps(self._numpy):
            numpy.random.set_state(self._numpy)
            is_other = True
        return is_other


class RngTracker(Protocol):
    """Named random streams, as Megatron's and Transformer Engine's trackers keep them.

    A stream that is a `torch.Generator` can be advanced by a graph; one that is a saved state (a
    tensor, swapped into the default generator for a while) cannot.
    """

    def get_states(self) -> Mapping[str, Tensor | torch.Generator]: ...
    def set_states(self, states: Mapping[str, Tensor | torch.Generator]) -> None: ...


def _is_same_stream(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether two generators advance together: swapping them makes new ones of one state."""
    if one is other or one.device != other.device or one.device.type != "cuda":
        return one is other
    if not torch.equal(one.get_state(), other.get_state()):
        return False
    offset = one.get_offset()
    one.set_offset(offset + 4)  # Philox counts in fours
    try:
        return other.get_offset() != offset
    finally:
        one.set_offset(offset)


TrackerSource = Callable[[], RngTracker]  # which may be replaced
Snapshot = tuple[list[Tensor], list[dict[str, Tensor]]]  # of generators, and of each tracker's saved states


class RngSources:
    """What random numbers are drawn from: the default generators of a device and the CPU, and trackers."""

    def __init__(self, device: torch.device, trackers: Sequence[TrackerSource] = ()) -> None:
        self._sources = trackers
        self._is_host_drawn = device.type == "cpu"  # the host backend draws from it in each replay
        self._defaults = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self._defaults.append(torch.cuda.default_generators[device.index])
        # What graphs draw from, once there are any, and every stream when that was last compared.
        self._captured: list[torch.Generator] | None = None
        self._seen: list[Tensor | torch.Generator] = []

    def generators(self) -> list[torch.Generator]:
        """The graph-safe streams of the trackers; a capture has to register them."""
        streams = (stream for source in self._sources for stream in source().get_states().values())
        return [stream for stream in streams if isinstance(stream, torch.Generator)]

    def expect_streams(self) -> None:
        """Remembers the generators of now; before the first capture."""
        if self._captured is None:
            self._captured = self.generators()

    def has_other_streams(self) -> bool:
        """Whether trackers draw from other generators than the graphs: their states were set, say."""
        if self._captured is None:
            return False
        seen: list[Tensor | torch.Generator] = []
        for source in self._sources:  # no function of ours: before each step
            seen += source().get_states().values()
        if len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen)):
            return False
        now = self.generators()
        if len(now) != len(self._captured) or not all(map(_is_same_stream, self._captured, now)):
            return True
        self._seen = seen
        return False

    def snapshot(self) -> Snapshot:
        """The state of every stream now."""
        states = [generator.get_state() for generator in [*self._defaults, *self.generators()]]
        saved = [
            {name: stream for name, stream in source().get_states().items() if isinstance(stream, Tensor)}
            for source in self._sources
        ]
        return states, saved

    def restore(self, snapshot: Snapshot) -> None:
        """Sets every stream back."""
        states, saved = snapshot
        for generator, state in zip([*self._defaults, *self.generators()], states, strict=True):
            generator.set_state(state)
        for source, streams in zip(self._sources, saved, strict=True):
            if streams:
                tracker = source()
                tracker.set_states({**tracker.get_states(), **streams})

    def has_moved(self, one: Snapshot, other: Snapshot) -> bool:
        """Whether a stream is elsewhere in one than in the other."""
        return not all(map(torch.equal, one[0], other[0]))

    def drew_unsafely(self, snapshot: Snapshot) -> bool:
        """Whether a stream that no graph can advance has moved since `snapshot`."""
        now = self.snapshot()
        pairs = [] if self._is_host_drawn else [(snapshot[0][0], now[0][0])]
        for before, after in zip(snapshot[1], now[1], strict=True):
            pairs += [(before[name], state) for name, state in after.items() if name in before]
        return not all(torch.equal(*pair) for pair in pairs)
