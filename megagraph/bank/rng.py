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
import functools
import operator
import pickle
import random
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn

__all__ = [
    *("HostStreams", "Rewinds", "RngSources", "Snapshot", "TrackerSource"),
    *("kept_streams", "no_tracker", "rewinds_of"),
]


_Made = TypeVar("_Made")


class Rewinds(torch.Generator):
    """Takes a default generator's place for Python, which sets it through here; shares its state.

    Follows the stream past the places where it is set. To swap generators, and not states, is not noticed.
    """

    real: torch.Generator
    _reached: Tensor | None = None  # how far the stream had got, while it is set elsewhere
    _set_to: Tensor | None = None
    _has_drawn = False

    def set_state(self, new_state: Tensor) -> torch.Generator:
        return self._set(self.real.set_state, new_state)

    def set_offset(self, offset: int) -> torch.Generator:
        return self._set(self.real.set_offset, offset)

    def manual_seed(self, seed: int) -> torch.Generator:
        return self._set(self.real.manual_seed, seed)

    def seed(self) -> int:
        return self._set(self.real.seed)

    def graphsafe_set_state(self, state: torch.Generator) -> torch.Generator:
        super().graphsafe_set_state(state)
        return self.real.graphsafe_set_state(state)

    def _set(self, change: Callable[..., _Made], *to: Any) -> _Made:
        before = self.real.get_state()
        self._look(before)
        made = change(*to)
        after = self.real.get_state()
        if self._reached is None:
            self._reached = None if torch.equal(before, after) else before
        elif torch.equal(after, self._reached):
            self._reached = None
        self._set_to = after
        return made

    def _look(self, now: Tensor) -> None:
        if self._reached is not None and self._set_to is not None:
            self._has_drawn = self._has_drawn or not torch.equal(now, self._set_to)

    def has_drawn(self) -> bool:
        """Whether anybody drew while the stream was elsewhere than it had got to."""
        self._look(self.real.get_state())
        return self._has_drawn


@contextlib.contextmanager
def rewinds_of(device: torch.device) -> Iterator[Rewinds]:
    """Follows a device's default generator: Note [Draws after a rewind].

    torch, Megatron and Transformer Engine all look it up in `torch.cuda.default_generators` to set it. The
    host backend runs Python again in each replay, so that nothing is noticed there.
    """
    rewinds = Rewinds(device)
    if device.type != "cuda":
        rewinds.real = torch.default_generator
        yield rewinds
        return
    cuda: Any = torch.cuda
    generators = cuda.default_generators
    rewinds.real = generators[device.index]
    torch.Generator.graphsafe_set_state(rewinds, rewinds.real)
    cuda.default_generators = tuple(
        rewinds if index == device.index else generator for index, generator in enumerate(generators)
    )
    try:
        yield rewinds
    finally:
        cuda.default_generators = generators


class HostStreams:
    """Where Python's and numpy's default generators were: a capture draws from them once for all replays."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), numpy.random.get_state(legacy=False)

    def put_back(self) -> bool:
        """Sets them back; returns whether they had moved."""
        now = random.getstate(), pickle.dumps(numpy.random.get_state(legacy=False))
        has_moved = now != (self._python, pickle.dumps(self._numpy))
        if has_moved:
            random.setstate(self._python)
            numpy.random.set_state(self._numpy)
        return has_moved


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


# Asks for a tracker, which may be replaced: named random streams, as Megatron and Transformer Engine keep
# them behind `get_states()` and `set_states()`. A graph can advance one that is a generator, and none that is
# a saved state: a tensor, swapped into the default generator for a while.
TrackerSource = Callable[[], Any]
Snapshot = tuple[list[Tensor], dict[str, Tensor]]  # of generators, and of the tracker's saved states

no_tracker: TrackerSource = functools.partial(types.SimpleNamespace, get_states=dict)  # of no streams


class RngSources:
    """What random numbers are drawn from: the default generators of a device and the CPU, and a tracker."""

    def __init__(self, device: torch.device, tracker: TrackerSource = no_tracker) -> None:
        self._tracker = tracker
        self._is_host_drawn = device.type == "cpu"  # the host backend draws from it in each replay
        self._defaults = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self._defaults.append(torch.cuda.default_generators[device.index])
        # What graphs draw from, once there are any, and every stream when that was last compared.
        self._captured: list[torch.Generator] | None = None
        self._seen: list[Any] = []

    def generators(self) -> list[torch.Generator]:
        """The graph-safe streams of the tracker; a capture has to register them."""
        return [it for it in self._tracker().get_states().values() if isinstance(it, torch.Generator)]

    def expect_streams(self) -> None:
        """Remembers the generators of now; before the first capture."""
        self._captured = self.generators() if self._captured is None else self._captured

    def has_other_streams(self) -> bool:
        """Whether the tracker draws from other generators than the graphs: its states were set, say."""
        if self._captured is None:
            return False
        # Before each step, so by no function of ours.
        seen = [*self._tracker().get_states().values()]
        if len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen)):
            return False
        now = self.generators()
        are_same = len(now) == len(self._captured) and all(map(_is_same_stream, self._captured, now))
        self._seen = seen if are_same else self._seen
        return not are_same

    def snapshot(self) -> Snapshot:
        """The state of every stream now."""
        streams = self._tracker().get_states()
        states = [generator.get_state() for generator in [*self._defaults, *self.generators()]]
        return states, {name: stream for name, stream in streams.items() if isinstance(stream, Tensor)}

    def restore(self, snapshot: Snapshot) -> None:
        """Sets every stream back."""
        states, saved = snapshot
        for generator, state in zip([*self._defaults, *self.generators()], states, strict=True):
            generator.set_state(state)
        if saved:
            tracker = self._tracker()
            tracker.set_states({**tracker.get_states(), **saved})

    def has_moved(self, one: Snapshot, other: Snapshot) -> bool:
        """Whether a stream is elsewhere in one than in the other."""
        return not all(map(torch.equal, one[0], other[0]))

    def drew_unsafely(self, snapshot: Snapshot) -> bool:
        """Whether a stream that no graph can advance has moved since `snapshot`."""
        (states, saved), (states_now, saved_now) = snapshot, self.snapshot()
        pairs = [] if self._is_host_drawn else [(states[0], states_now[0])]
        pairs += [(saved[name], saved_now[name]) for name in saved.keys() & saved_now.keys()]
        return not all(torch.equal(*pair) for pair in pairs)


def kept_streams(module: nn.Module) -> contextlib.ExitStack:
    """Puts default streams back when it is closed, the host's too: a module is asked, and does not run."""
    sources, afterwards = RngSources(next(module.parameters()).device), contextlib.ExitStack()
    afterwards.callback(sources.restore, sources.snapshot())
    afterwards.callback(HostStreams().put_back)
    return afterwards
