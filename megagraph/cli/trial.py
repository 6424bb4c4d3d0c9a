# SPDX-License-Identifier: Apache-2.0
"""Training steps of a user's script, eager and graphed by turns: how long they take, what packs they have.

Note [Blocks]
Once graphs are captured, blocks of four steps come in pairs: eager and graphed, graphed and eager, and so on,
so that what drifts does not favour one kind. In an eager block everything runs on the packs as they were
given, as without the plugin; graphs stay. The first step of each block is not timed: it finds the caches of
the device and of the allocator as the other kind has left them. The device is waited for before the others
and after them, and not in between, so that the host runs ahead as it always does.

Which block a step is in, and which step ends the script, follows from how many steps there were. So ranks do
the same without asking one another. A block that was not what it was to be is left out, with its pair.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megagraph._C import PackShape
from megagraph.cli.advice import FEWEST_PAIRS, Block, Findings, Packs
from megagraph.cli.scripts import EnoughError
from megagraph.config import GraphConfig
from megagraph.megatron.graphs.model import GraphedModel
from megagraph.megatron.plugin import Plugin, disable_cuda_graphs_this_step
from megagraph.reasons import EagerReason

__all__ = ["FEWEST_STEPS", "Trial"]

_BLOCK = 4  # steps
_IS_EAGER = (True, False, False, True)  # of one block after another
FEWEST_STEPS = 2 * _BLOCK * FEWEST_PAIRS
# After the warm-up: the capture, and a step in case it comes late.
_CAPTURE = 2
# A matrix product computes so many rows at once.
_TILE = 128


class Trial:
    """Runs them (`run_steps()`).

    Args:
        steps: after the capture, at most; rounded down to pairs of blocks.
        progress: called after each step that is not timed with how many there were, and are to be.
        is_timed: whether some of them are eager, and all are timed; else all are graphed.
    """

    def __init__(self, steps: int, progress: Callable[[int, int], None], *, is_timed: bool) -> None:
        self._steps, self._progress = steps - steps % (2 * _BLOCK), progress
        self._is_timed = is_timed
        self._done, self._first = 0, -1  # steps; the first one of a block, -1 while that is not known
        self._models: dict[GraphedModel, None] = {}  # in the order in which they ran
        self._reports: list[dict[str, Any]] = []
        self._as_given = contextlib.ExitStack()  # in an eager block
        self._blocks: dict[int, Block] = {}  # by their number
        self._begin = self._host = 0.0
        self._replays = 0

    def __call__(self, plugin: Plugin, step: Callable[[], Any]) -> Any:
        """Runs a training step."""
        place = self._done - self._first if self._first >= 0 else -1
        if place >= 0 and self._is_timed:
            self._at(plugin, *divmod(place, _BLOCK))
        if place == self._steps:
            self._reports = plugin.reports()  # while the graphs are there
            raise EnoughError
        is_eager = self._is_timed and place >= 0 and _IS_EAGER[place // _BLOCK % 4]
        begin = time.perf_counter()
        with disable_cuda_graphs_this_step() if is_eager else contextlib.nullcontext():
            result = step()
        self._host += time.perf_counter() - begin
        self._done += 1
        for graphs in plugin.all_graphs():
            if graphs not in self._models:
                self._models[graphs] = None
                graphs.dispatcher.count_packs()
        if self._first < 0:
            self._first = _CAPTURE + max((it.dispatcher.warm_up_steps for it in self._models), default=0)
        if not self._is_timed or place < 0 or place % _BLOCK == 0:  # the others are timed
            self._progress(self._done, self._first + self._steps)
        return result

    def _at(self, plugin: Plugin, block: int, step: int) -> None:
        """Before a step of a block."""
        if step == 0:
            if block:
                self._end_block(plugin, block - 1)
            self._as_given.close()
            if block * _BLOCK < self._steps and _IS_EAGER[block % 4]:
                self._as_given.enter_context(_packs_as_given(plugin))
        elif step == 1:
            self._replays = _replays(plugin)
            _wait()
            self._host, self._begin = 0.0, time.perf_counter()

    def _end_block(self, plugin: Plugin, block: int) -> None:
        _wait()
        seconds = time.perf_counter() - self._begin
        if (_replays(plugin) == self._replays) is _IS_EAGER[block % 4]:
            self._blocks[block] = Block(seconds / (_BLOCK - 1), self._host / (_BLOCK - 1))

    def close(self) -> None:
        """After a script, also one that raised in an eager block."""
        self._as_given.close()

    def findings(self, config: GraphConfig, reports: Sequence[Mapping[str, Any]]) -> Findings:
        """What came out; with `reports` of the models, if the script has ended by itself."""
        pairs = []
        for block in range(0, self._steps // _BLOCK, 2):
            if {block, block + 1} <= self._blocks.keys():
                first, second = self._blocks[block], self._blocks[block + 1]
                pairs.append((first, second) if _IS_EAGER[block % 4] else (second, first))
        others = [*map(_without_blocks, self._reports or reports)]
        return Findings(reports=others, pairs=pairs, packs=self._packs(config), is_timed=self._is_timed)

    def _packs(self, config: GraphConfig) -> Packs | None:
        counts: Counter[PackShape] = Counter()
        room = [1, 1]
        for graphs in self._models:
            counts.update(graphs.dispatcher.observed)
            tokens, _usual, num_seqs = graphs.dispatcher.needs()
            room = [max(room[0], tokens), max(room[1], num_seqs + config.tail.extra_seqs)]
        if not counts:
            return None
        seen = [max(getattr(shape, name) for shape in counts) for name in ("tokens", "num_seqs")]
        # Somebody who has set capacities knows how large packs get.
        known = [(it.tokens, it.num_seqs) for it in config.all_capacities()]
        limits = [*map(max, zip(*known, strict=True))] if known else room
        tokens, num_seqs = (
            max(has, min(may, limit)) for has, may, limit in zip(seen, room, limits, strict=True)
        )
        return Packs(counts=counts, room=(tokens, num_seqs), multiple=self._multiple(tokens))

    def _multiple(self, tokens: int) -> int:
        if any(graphs.dispatcher.needs_equal_rows for graphs in self._models):
            return tokens
        usual = min(_TILE, 1 << max(tokens // 64, 1).bit_length() - 1)
        return math.lcm(usual, *(graphs.dispatcher.multiple for graphs in self._models))


@contextlib.contextmanager
def _packs_as_given(plugin: Plugin) -> Iterator[None]:
    """Packs run as they were given, also in evaluations; a step whose graphs are merely disabled pads them.

    But for models that do not take them so.
    """
    models = [*filter(_takes_packs_as_given, plugin.all_graphs())]
    for graphs in models:
        graphs.dispatcher.refuse(EagerReason.DISABLED)
    try:
        yield
    finally:
        for graphs in models:
            graphs.dispatcher.refuse(None if graphs.refusal is None else graphs.refusal.reason)


def _takes_packs_as_given(graphs: GraphedModel) -> bool:
    """Whether Megatron alone would run its packs, which ranks may have to share, or need equal rows of."""
    tensor, dispatcher = graphs.tensor, graphs.dispatcher
    are_shared = not any(shape.tokens % tensor.row_shares for shape in dispatcher.observed)
    return graphs.refusal is None and are_shared and not dispatcher.needs_equal_rows


def _replays(plugin: Plugin) -> int:
    return sum(graphs.captures.bank.counters()["replays"] for graphs in plugin.all_graphs())


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _without_blocks(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report without the calls of eager blocks."""
    eager = dict(report["eager"])
    asked = eager.pop(EagerReason.DISABLED.name, 0)
    return {**report, "eager": eager, "calls": report["calls"] - asked}
