# SPDX-License-Identifier: Apache-2.0
"""The nesting rule of csrc/bank/replay/slot_ring.h against a model of the pool that a slot's graphs share."""

import random
from collections.abc import Iterator

import pytest
from pool_model import Graphs, Kind, Replay, captured

from megagraph import _C

NUM_POOLS = 200
SEQUENCES_PER_POOL = 125


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


def wishes(num_sites: int, rng: random.Random) -> Iterator[tuple[str, int]]:
    """What a schedule might ask for, sensible or not."""
    for _ in range(rng.randint(4, 14)):
        yield rng.choice("FFFFBBBD"), rng.randrange(num_sites)


class Readers:
    """Somebody who goes on reading outputs and gradients for a while, each at most once."""

    def __init__(self, replay: Replay, slot: _C.Slot, rng: random.Random) -> None:
        self.replay, self.slot, self.rng = replay, slot, rng

    def take(self, kind: Kind, site: int) -> None:
        has_memory = (
            kind is Kind.OUTPUT
            or (self.replay.graphs.transient if kind is Kind.TRANSIENT else self.replay.graphs.gradient)[site]
        )
        if has_memory and self.rng.random() < 0.5 and (kind, site) not in self.replay.held:
            self.slot.retain_tensor(site, kind)
            self.replay.hold(kind, site)

    def leave(self, probability: float = 1) -> None:
        for kind, site in list(self.replay.held):
            if self.rng.random() < probability:
                assert (kind, site) not in self.replay.hit_held, f"a held {kind} of {site} was overwritten"
                del self.replay.held[kind, site]
                self.slot.release_tensor(site, kind)


def run_what_the_slot_allows(graphs: Graphs, slot: _C.Slot, rng: random.Random) -> tuple[int, int]:
    """One lease. Returns how many backwards read their saved tensors, and how many wishes were refused."""
    replay, reads, refused = Replay(graphs), 0, 0
    readers = Readers(replay, slot, rng)
    assert slot.lease(0, True)

    def backward(site: int) -> None:
        nonlocal reads
        assert replay.backward(site), f"the saved tensors of site {site} were overwritten"
        readers.take(Kind.GRADIENT, site)
        slot.node_done(site)
        reads += 1

    for kind, site in wishes(graphs.num_sites, rng):
        if kind == "F":
            is_read = (Kind.OUTPUT, site - 1) in replay.held and site - 1 not in replay.live
            if is_read and site - 1 not in graphs.gaps:
                continue  # the site itself refuses to stage into an output that is still read
            if slot.enter(site):
                replay.forward(site)
                readers.take(Kind.OUTPUT, site)
                readers.take(Kind.TRANSIENT, site)
            else:
                refused += 1
        elif site not in replay.live:
            continue
        elif kind == "D":
            slot.drop(site)
            replay.drop(site)
        elif slot.await_transients(0) and slot.leave(site):
            backward(site)
        else:
            refused += 1
        assert not replay.hit, f"saved tensors of sites {replay.hit} were overwritten"
        assert not replay.hit_held, f"{replay.hit_held} were overwritten"
        readers.leave(0.4)
    slot.end_micro_batch()
    if not slot.await_transients(0):
        readers.leave()
    for site in sorted(replay.live, reverse=True):
        assert slot.leave(site)
        backward(site)
    readers.leave()
    assert slot.is_free
    return reads, refused


@pytest.mark.parametrize("has_gaps", [False, True])
def test_every_replay_order_that_the_rule_allows_keeps_saved_and_held_tensors_intact(has_gaps: bool) -> None:
    rng = random.Random(0)
    sequences = reads = refused = 0
    for seed in range(NUM_POOLS):
        graphs = captured(2 + seed % 5, seed, has_gaps=has_gaps)
        slot = _C.Slot(0, graphs.num_sites)
        for _ in range(SEQUENCES_PER_POOL):
            more_reads, more_refused = run_what_the_slot_allows(graphs, slot, rng)
            sequences += more_reads > 0
            reads += more_reads
            refused += more_refused
    assert sequences >= 20_000
    assert reads > sequences  # most of them have several backwards,
    assert refused > sequences  # and most had to be told no


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
}


@pytest.mark.parametrize(("passes", "share"), ORDERS.values(), ids=ORDERS)
def test_the_rule_allows_just_those_orders_that_corrupt_no_pool(passes: str, share: float) -> None:
    assert is_allowed(4, passes) == (share == 0)
    num_sites = 1 + max(int(step[1:]) for step in passes.split())
    corrupt = sum(is_corrupt(captured(num_sites, seed), passes) for seed in range(NUM_POOLS)) / NUM_POOLS
    assert corrupt >= share if share else corrupt == 0
