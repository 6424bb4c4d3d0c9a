# SPDX-License-Identifier: Apache-2.0
"""The nesting rule of csrc/bank/replay/slot_ring.h against a model of the pool that a slot's graphs share.

It captures as megagraph/bank/capture.py does: forwards in order, then backwards in reverse, from one pool.
That fixes which units of memory each pass of a graph writes and reads, which are bits of masks here. A
backward may leave something to a third pass, captured right behind it. Behind a site there may be a gap, in
which something eager runs: then the next site has an input of its own, gradients on both sides go back to the
pool with the pass that is captured, and so may an output.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from megagraph import _C

NUM_POOLS = 200
SEQUENCES_PER_POOL = 125
Kind = _C.LeaseKind
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


class Graphs:
    """What the captured passes of each site touch, as masks, of one capture into a fresh pool.

    Of a site: what its `forward`, `backward` and `rest` write; what is `saved` for the backward, and `left`
    for the third pass; `input`, `output`, `transient`, `gradient`; and what is `given`, staged before a
    backward whose gradient comes from elsewhere.
    """

    def __init__(self, num_sites: int, seed: int, *, has_gaps: bool = False, has_rests: bool = False) -> None:
        self.rng = random.Random(seed)
        self.pool = Pool(self.rng.choice(list(PICKS.values())), self.rng)
        self.gaps = {site for site in range(num_sites) if has_gaps and self.rng.random() < 0.6}
        self.of = [Counter[str]() for _ in range(num_sites)]
        # Boundaries stay allocated until the last capture: a site's output is the next one's input.
        self.outputs: list[Block] = []
        self.grad_inputs: dict[int, Block] = {}
        self.kept: dict[int, list[Block]] = {}
        self.left: dict[int, list[Block]] = {}
        for site in range(num_sites):  # in the order of a bank's plan
            self._forward(site)
        for site in reversed(range(num_sites)):
            self._backward(site, leaves_some=has_rests)
            if has_rests:
                self._rest(site)

    def _some(self, most: int) -> list[Block]:
        return [self.pool.allocate() for _ in range(self.rng.randint(1, most))]

    def _free_in_any_order(self, blocks: list[Block]) -> None:
        self.pool.free(self.rng.sample(blocks, len(blocks)))

    def _forward(self, site: int) -> None:
        is_chained = site > 0 and site - 1 not in self.gaps
        given = self.outputs[site - 1] if is_chained else self.pool.allocate()
        temporaries, self.kept[site], later = self._some(3), self._some(3), self._some(2)
        self.outputs.append(self.pool.allocate())
        transient = self._some(2) if site in self.gaps else []
        self._free_in_any_order(temporaries + later)
        self.pool.free(transient)
        self.of[site].update(
            forward=mask([*temporaries, *self.kept[site], *later, self.outputs[site], *transient]),
            input=mask([given]),
            output=mask([self.outputs[site]]),
            transient=mask(transient),
            saved=mask([*self.kept[site], given, self.outputs[site]]),
        )

    def _backward(self, site: int, *, leaves_some: bool = False) -> None:
        after = self.grad_inputs.get(site + 1) if site not in self.gaps else None
        grad_output = self.pool.allocate() if after is None else after
        temporaries, grad_input = self._some(4), self.pool.allocate()  # the gradient is a boundary too
        done = temporaries + self.kept[site]
        if leaves_some:
            self.left[site] = [done.pop(), self.pool.allocate()]
            temporaries.append(self.left[site][-1])
            self.of[site]["left"] = mask(self.left[site])
        self._free_in_any_order(done)
        self.of[site].update(backward=mask([*temporaries, grad_input]), given=mask([grad_output]))
        if after is None:
            self.pool.free([grad_output])
        if site > 0 and site - 1 in self.gaps:
            self.pool.free([grad_input])  # handed out as a copy
        else:
            self.grad_inputs[site] = grad_input
            self.of[site]["gradient"] = mask([grad_input])

    def _rest(self, site: int) -> None:
        temporaries = self._some(3)
        self.of[site]["rest"] = mask(temporaries)
        self._free_in_any_order(temporaries)
        self.pool.free(self.left[site])


class Replay:
    """Replays passes, with sites that wait for a backward; `held` is what somebody else may still read."""

    def __init__(self, graphs: Graphs) -> None:
        self.of, self.gaps = graphs.of, graphs.gaps
        self.live: set[int] = set()
        self.unfinished: set[int] = set()
        self.held: dict[tuple[Kind, int], int] = {}

    def _write(self, units: int) -> None:
        """Where nobody reads any more."""
        saved = [self.of[site]["saved"] for site in self.live]
        left = [self.of[site]["left"] for site in self.unfinished]
        assert not any(where & units for where in (*saved, *left, *self.held.values()))

    def forward(self, site: int) -> None:
        self.live.discard(site)  # what it has saved is made anew
        # What came before ran eager: its result is staged.
        if site - 1 not in self.live or site - 1 in self.gaps:
            self._write(self.of[site]["input"])
        self._write(self.of[site]["forward"])
        self.live.add(site)

    def backward(self, site: int) -> None:
        self.live.discard(site)
        if site in self.gaps or (Kind.GRADIENT, site + 1) not in self.held:
            self._write(self.of[site]["given"])  # it comes from elsewhere and is staged
        self._write(self.of[site]["backward"])
        if self.of[site]["left"]:
            self.unfinished.add(site)

    def rest(self, site: int) -> None:
        self.unfinished.remove(site)
        self._write(self.of[site]["rest"])


def is_corrupt(graphs: Graphs, passes: str) -> bool:
    """Replays "F0 F1 B1 B0" without asking anyone; whether a pass wrote over what another one still reads."""
    replay = Replay(graphs)
    runs = {"F": replay.forward, "B": replay.backward, "W": replay.rest}
    try:
        for step in passes.split():
            runs[step[0]](int(step[1:]))
    except AssertionError:
        return True
    return False


def is_allowed(num_sites: int, passes: str) -> bool:
    """What the slot says to the same passes."""
    slot, has_rests = _C.Slot(0, num_sites), "W" in passes
    assert slot.lease(0, True)
    for kind, site in ((step[0], int(step[1:])) for step in passes.split()):
        if kind == "W":
            slot.finish(site)
        elif not (slot.enter if kind == "F" else slot.leave)(site):
            return False
        elif kind == "B" and has_rests:
            slot.await_finish(site)
    return True


def run_what_the_slot_allows(graphs: Graphs, slot: _C.Slot, rng: random.Random) -> tuple[int, int]:
    """One lease. Returns how many backwards read their saved tensors, and how many wishes were refused."""
    replay, reads, refused = Replay(graphs), 0, 0
    assert slot.lease(0, True)

    def take(kind: Kind, site: int) -> None:
        """Somebody may go on reading an output or a gradient for a while, each at most once."""
        units = replay.of[site][kind.name.lower()]
        if units and rng.random() < 0.5 and (kind, site) not in replay.held:
            slot.retain_tensor(site, kind)
            replay.held[kind, site] = units

    def let_go(probability: float = 1) -> None:
        for kind, site in list(replay.held):
            if rng.random() < probability:
                del replay.held[kind, site]
                slot.release_tensor(site, kind)

    def backward(site: int) -> None:
        nonlocal reads
        replay.backward(site)
        take(Kind.GRADIENT, site)
        slot.node_done(site)
        reads += 1

    for _wish in range(rng.randint(4, 14)):
        kind, site = rng.choice("FFFFBBBD"), rng.randrange(len(graphs.of))  # sensible or not
        if kind == "F":
            is_read = (Kind.OUTPUT, site - 1) in replay.held and site - 1 not in replay.live
            if is_read and site - 1 not in graphs.gaps:
                continue  # the site itself refuses to stage into an output that is still read
            if slot.enter(site):
                replay.forward(site)
                take(Kind.OUTPUT, site)
                take(Kind.TRANSIENT, site)
            else:
                refused += 1
        elif site not in replay.live:
            continue
        elif kind == "D":
            slot.drop(site)
            replay.live.discard(site)
        elif slot.await_transients(0) and slot.leave(site):
            backward(site)
        else:
            refused += 1
        let_go(0.4)
    slot.end_micro_batch()
    if not slot.await_transients(0):
        let_go()
    for site in sorted(replay.live, reverse=True):
        assert slot.leave(site)
        backward(site)
    let_go()
    assert slot.is_free
    return reads, refused


def test_every_replay_order_that_the_rule_allows_keeps_saved_and_held_tensors_intact() -> None:
    """In every other pool there are gaps."""
    rng, counts = random.Random(0), list[tuple[int, int]]()
    for seed in range(NUM_POOLS):
        graphs = Graphs(2 + seed % 5, seed, has_gaps=seed % 2 == 1)
        slot = _C.Slot(0, len(graphs.of))
        counts += (run_what_the_slot_allows(graphs, slot, rng) for _ in range(SEQUENCES_PER_POOL))
    reads, refused = map(sum, zip(*counts, strict=True))
    sequences = sum(more_reads > 0 for more_reads, _ in counts)
    assert sequences >= 20_000
    assert reads > sequences and refused > sequences  # most have several backwards, and were told no


ORDERS = {  # of passes, and the share of pools that they corrupt at least
    "as captured": ("F0 F1 F2 F3 B3 B2 B1 B0", 0.0),
    "a site skipped": ("F0 F2 F3 B3 B2 B0", 0.0),
    "forwards run again": ("F0 F1 F2 F3 B3 F3 B3 B2 B1 F1 B1 B0", 0.0),
    "recomputed one by one": ("F3 B3 F2 B2 F1 B1 F0 B0", 0.0),
    "recomputed in blocks": ("F0 F1 F2 F3 B3 B2 F2 F3 B3 B2 B1 B0", 0.0),
    "B1 before B3": ("F0 F1 F2 F3 B1 B3 B2 B0", 0.3),
    "B0 before B3": ("F0 F1 F2 F3 B0 B3 B2 B1", 0.3),
    "F0 again while later sites are live": ("F0 F1 F2 F3 F0 B3 B2 B1 B0", 0.5),
    "an earlier site after a later one": ("F3 F0 B0 B3", 0.3),
    "forwards swapped": ("F1 F0 B1 B0", 0.3),
    "all finished at once": ("F0 F1 F2 F3 B3 W3 B2 W2 B1 W1 B0 W0", 0.0),
    "finished, and recomputed": ("F0 F1 F2 F3 B3 W3 F3 B3 W3 B2 W2 B1 W1 B0 W0", 0.0),
    "finished a layer late": ("F0 F1 F2 F3 B3 B2 W3 B1 W2 B0 W1 W0", 0.9),
    "finished behind a forward": ("F0 F1 F2 F3 B3 F3 W3", 0.9),
}


@pytest.mark.parametrize(("passes", "share"), ORDERS.values(), ids=ORDERS)
def test_the_rule_allows_just_those_orders_that_corrupt_no_pool(passes: str, share: float) -> None:
    assert is_allowed(4, passes) == (share == 0)
    num_sites = 1 + max(int(step[1:]) for step in passes.split())
    pools = (Graphs(num_sites, seed, has_rests="W" in passes) for seed in range(NUM_POOLS))
    corrupt = sum(is_corrupt(graphs, passes) for graphs in pools) / NUM_POOLS
    assert corrupt >= share if share else corrupt == 0
