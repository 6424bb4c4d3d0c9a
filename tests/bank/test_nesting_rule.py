# SPDX-License-Identifier: Apache-2.0
"""The nesting rule of csrc/bank/slot_ring.h against a model of the pool that all graphs of a slot share.

The model captures as megagraph/capture.py does: forwards in order, then backwards in reverse, each
pass allocating from one pool. A graph replays with the addresses that its capture was given, so the
capture fixes which units of memory each pass writes and reads; memory is a bit mask of units.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from megagraph import _C

NUM_POOLS = 400
SEQUENCES_PER_POOL = 300

Block = tuple[int, int]  # first unit, number of units
Pick = Callable[[list[Block], random.Random], Block]

PICKS: dict[str, Pick] = {
    "best fit": lambda fitting, _: min(fitting, key=lambda block: (block[1], block[0])),
    "first fit": lambda fitting, _: min(fitting),
    "last freed": lambda fitting, _: fitting[-1],
    "any": lambda fitting, rng: rng.choice(fitting),
}


@dataclass
class Pool:
    """Memory that grows at its end; freed blocks are split, merged and handed out again."""

    pick: Pick
    rng: random.Random
    end: int = 0
    free_blocks: list[Block] = field(default_factory=list)  # the last freed one last

    def allocate(self) -> Block:
        size = self.rng.choice((1, 1, 2, 3, 4, 6, 8))
        fitting = [block for block in self.free_blocks if block[1] >= size]
        if not fitting:
            self.end += size
            return self.end - size, size
        start, available = chosen = self.pick(fitting, self.rng)
        self.free_blocks.remove(chosen)
        if available > size:
            self.free_blocks.append((start + size, available - size))
        return start, size

    def free(self, blocks: Sequence[Block]) -> None:
        for start, size in blocks:
            for neighbour in [b for b in self.free_blocks if b[0] + b[1] == start or start + size == b[0]]:
                self.free_blocks.remove(neighbour)
                start, size = min(start, neighbour[0]), size + neighbour[1]
            self.free_blocks.append((start, size))


def mask(blocks: Sequence[Block]) -> int:
    return sum(((1 << size) - 1) << start for start, size in blocks)


@dataclass
class Graphs:
    """What the captured passes of each site touch, as masks; `saved` is what its backward reads."""

    forward_writes: list[int]
    backward_writes: list[int]
    saved: list[int]
    input: list[int]

    @property
    def num_sites(self) -> int:
        return len(self.saved)


class Capture:
    """One capture into a fresh pool, pass by pass."""

    def __init__(self, num_sites: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = Pool(self.rng.choice(list(PICKS.values())), self.rng)
        # Boundaries stay allocated until the last capture: a site's output is the next one's input.
        self.boundary = [self.pool.allocate()]
        zeros = [0] * num_sites
        self.graphs = Graphs(list(zeros), list(zeros), list(zeros), list(zeros))
        self.kept: list[list[Block]] = [[] for _ in zeros]

    def _some(self, most: int) -> list[Block]:
        return [self.pool.allocate() for _ in range(self.rng.randint(1, most))]

    def forward(self, site: int) -> None:
        temporaries, self.kept[site], later = self._some(3), self._some(3), self._some(2)
        self.boundary.append(self.pool.allocate())
        self.pool.free(self.rng.sample(temporaries + later, len(temporaries + later)))
        written = [*temporaries, *self.kept[site], *later, self.boundary[site + 1]]
        self.graphs.forward_writes[site] = mask(written)
        self.graphs.input[site] = mask([self.boundary[site]])
        self.graphs.saved[site] = mask([*self.kept[site], *self.boundary[site : site + 2]])

    def backward(self, site: int) -> None:
        temporaries, grad_input = self._some(4), self.pool.allocate()  # the gradient is a boundary too
        self.pool.free(self.rng.sample(temporaries + self.kept[site], len(temporaries + self.kept[site])))
        self.graphs.backward_writes[site] = mask([*temporaries, grad_input])


def captured_in_plan_order(num_sites: int, seed: int) -> Graphs:
    capture = Capture(num_sites, seed)
    for site in range(num_sites):
        capture.forward(site)
    for site in reversed(range(num_sites)):
        capture.backward(site)
    return capture.graphs


def captured_layer_by_layer(num_sites: int, seed: int) -> Graphs:
    capture = Capture(num_sites, seed)
    for site in range(num_sites):
        capture.forward(site)
        capture.backward(site)
    return capture.graphs


class Replay:
    """Replays passes; remembers which sites wait for a backward and whose saved tensors were hit."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self.live: set[int] = set()
        self.hit: set[int] = set()

    def _write(self, units: int) -> None:
        saved = self.graphs.saved
        for site in self.live:
            if saved[site] & units:
                self.hit.add(site)

    def forward(self, site: int) -> None:
        if site - 1 not in self.live:  # what came before ran eager: its result is staged
            self._write(self.graphs.input[site])
        self._write(self.graphs.forward_writes[site])
        self.live.add(site)
        self.hit.discard(site)

    def backward(self, site: int) -> bool:
        """Whether the saved tensors were intact."""
        intact = site not in self.hit
        self.drop(site)
        self._write(self.graphs.backward_writes[site])
        return intact

    def drop(self, site: int) -> None:
        self.live.discard(site)
        self.hit.discard(site)


def is_corrupt(graphs: Graphs, passes: str) -> bool:
    """Replays "F0 F1 B1 B0" without asking anyone; whether a backward read what was overwritten."""
    replay, intact = Replay(graphs), True
    for kind, site in ((step[0], int(step[1:])) for step in passes.split()):
        if kind == "F":
            replay.forward(site)
        else:
            intact &= replay.backward(site)
    return not intact


def is_allowed(num_sites: int, passes: str) -> bool:
    """What the slot says to the same passes."""
    slot = _C.Slot(0, num_sites)
    assert slot.lease(0, True)
    return all(
        slot.enter(int(step[1:])) if step[0] == "F" else slot.leave(int(step[1:])) for step in passes.split()
    )


def share_of_corrupt_pools(
    passes: str, capture: Callable[[int, int], Graphs] = captured_in_plan_order
) -> float:
    num_sites = 1 + max(int(step[1:]) for step in passes.split())
    return sum(is_corrupt(capture(num_sites, seed), passes) for seed in range(NUM_POOLS)) / NUM_POOLS


def wishes(num_sites: int, rng: random.Random) -> Iterator[tuple[str, int]]:
    """What a schedule might ask for, sensible or not."""
    for _ in range(rng.randint(4, 14)):
        yield rng.choice("FFFFBBBD"), rng.randrange(num_sites)


def run_what_the_slot_allows(graphs: Graphs, slot: _C.Slot, rng: random.Random) -> tuple[int, int]:
    """One lease. Returns how many backwards read their saved tensors, and how many wishes were refused."""
    replay, reads, refused = Replay(graphs), 0, 0
    assert slot.lease(0, True)

    def backward(site: int) -> None:
        nonlocal reads
        assert replay.backward(site), f"the saved tensors of site {site} were overwritten"
        slot.node_done(site)
        reads += 1

    for kind, site in wishes(graphs.num_sites, rng):
        if kind == "F":
            if slot.enter(site):
                replay.forward(site)
            else:
                refused += 1
        elif site not in replay.live:
            continue
        elif kind == "D":
            slot.drop(site)
            replay.drop(site)
        elif slot.leave(site):
            backward(site)
        else:
            refused += 1
        assert not replay.hit, f"saved tensors of sites {replay.hit} were overwritten"
    slot.end_micro_batch()
    for site in sorted(replay.live, reverse=True):
        assert slot.leave(site)
        backward(site)
    assert slot.is_free
    return reads, refused


def test_every_replay_order_that_the_rule_allows_keeps_saved_tensors_intact() -> None:
    rng = random.Random(0)
    sequences = reads = refused = 0
    for seed in range(NUM_POOLS):
        graphs = captured_in_plan_order(2 + seed % 5, seed)
        slot = _C.Slot(0, graphs.num_sites)
        for _ in range(SEQUENCES_PER_POOL):
            more_reads, more_refused = run_what_the_slot_allows(graphs, slot, rng)
            sequences += more_reads > 0
            reads += more_reads
            refused += more_refused
    assert sequences >= 100_000
    assert reads > sequences  # most of them have several backwards,
    assert refused > sequences  # and most had to be told no


@pytest.mark.parametrize(
    "passes",
    [
        pytest.param("F0 F1 F2 F3 B3 B2 B1 B0", id="as captured"),
        pytest.param("F0 F2 F3 B3 B2 B0", id="a site skipped"),
        pytest.param("F0 F1 F2 F3 B3 F3 B3 B2 B1 F1 B1 B0", id="forwards run again"),
        pytest.param("F3 B3 F2 B2 F1 B1 F0 B0", id="recomputed one by one"),
        pytest.param("F0 F1 F2 F3 B3 B2 F2 F3 B3 B2 B1 B0", id="recomputed in blocks"),
    ],
)
def test_sound_orders_are_allowed(passes: str) -> None:
    assert is_allowed(4, passes)
    assert share_of_corrupt_pools(passes) == 0


@pytest.mark.parametrize(
    ("passes", "corrupt_at_least"),
    [
        pytest.param("F0 F1 F2 F3 B1 B3 B2 B0", 0.3, id="B1 before B3"),
        pytest.param("F0 F1 F2 F3 B0 B3 B2 B1", 0.3, id="B0 before B3"),
        pytest.param("F0 F1 F2 F3 F0 B3 B2 B1 B0", 0.5, id="F0 again while later sites are live"),
        pytest.param("F3 F0 B0 B3", 0.3, id="an earlier site after a later one"),
        pytest.param("F1 F0 B1 B0", 0.3, id="forwards swapped"),
    ],
)
def test_what_the_rule_refuses_would_corrupt(passes: str, corrupt_at_least: float) -> None:
    assert not is_allowed(4, passes)
    assert share_of_corrupt_pools(passes) >= corrupt_at_least


def test_capture_layer_by_layer_corrupts_even_the_plain_order() -> None:
    plain = "F0 F1 F2 F3 B3 B2 B1 B0"
    assert share_of_corrupt_pools(plain, captured_layer_by_layer) > 0.95
    assert share_of_corrupt_pools(plain, captured_in_plan_order) == 0
