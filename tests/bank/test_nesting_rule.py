# SPDX-License-Identifier: Apache-2.0
"""The nesting rule of csrc/bank/replay/slot_ring.h against a model of the pool that a slot's graphs share."""

import random
from collections.abc import Callable, Iterator

import pytest
from pool_model import (
    Graphs,
    Kind,
    Replay,
    captured_in_plan_order,
    captured_layer_by_layer,
    captured_with_gaps,
)

from megagraph import _C

NUM_POOLS = 400
SEQUENCES_PER_POOL = 300


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


@pytest.mark.parametrize("capture", [captured_in_plan_order, captured_with_gaps])
def test_every_replay_order_that_the_rule_allows_keeps_saved_and_held_tensors_intact(
    capture: Callable[[int, int], Graphs],
) -> None:
    rng = random.Random(0)
    sequences = reads = refused = 0
    for seed in range(NUM_POOLS):
        graphs = capture(2 + seed % 5, seed)
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


@pytest.mark.parametrize(
    ("passes", "held"),
    [
        pytest.param("F2 F3 B3", (Kind.GRADIENT, 3), id="a gradient"),
        pytest.param("F2 F3 B3 B2", (Kind.OUTPUT, 3), id="the output of a later site"),
    ],
)
def test_a_forward_would_overwrite_what_later_passes_left_for_somebody(
    passes: str, held: tuple[Kind, int]
) -> None:
    kind, site = held
    slot = _C.Slot(0, 4)
    assert slot.lease(0, True)
    slot.retain_tensor(site, kind)
    assert not slot.enter(1)
    slot.release_tensor(site, kind)
    assert slot.enter(1)

    overwritten = 0
    for seed in range(NUM_POOLS):
        replay = Replay(captured_in_plan_order(4, seed))
        for step in passes.split():
            (replay.forward if step[0] == "F" else replay.backward)(int(step[1:]))
        replay.hold(kind, site)
        replay.forward(1)
        overwritten += bool(replay.hit_held)
    assert overwritten / NUM_POOLS > 0.2


def test_capture_layer_by_layer_corrupts_even_the_plain_order() -> None:
    plain = "F0 F1 F2 F3 B3 B2 B1 B0"
    assert share_of_corrupt_pools(plain, captured_layer_by_layer) > 0.95
    assert share_of_corrupt_pools(plain, captured_in_plan_order) == 0


def _share_overwritten(passes: str, held_after: str) -> float:
    """How often a transient output of the first site, held from then on, is overwritten."""
    overwritten = tried = 0
    for seed in range(NUM_POOLS):
        replay = Replay(captured_with_gaps(4, seed))
        if 0 not in replay.graphs.gaps:
            continue
        tried += 1
        for step in passes.split():
            (replay.forward if step[0] == "F" else replay.backward)(int(step[1:]))
            if step == held_after:
                replay.hold(Kind.TRANSIENT, 0)
        overwritten += bool(replay.hit_held)
    assert tried > NUM_POOLS / 4
    return overwritten / tried


@pytest.mark.parametrize("passes", ["F0 F1", "F0 B0", "F0 F1 F2 F3 B3 B2 B1 B0"])
def test_later_passes_would_overwrite_a_transient_output(passes: str) -> None:
    slot = _C.Slot(0, 4)
    assert slot.lease(0, True) and slot.enter(0)
    slot.retain_tensor(0, Kind.TRANSIENT)
    assert not slot.enter(1) and not slot.await_transients(0)
    slot.release_tensor(0, Kind.TRANSIENT)
    assert slot.enter(1) and slot.await_transients(0)
    assert _share_overwritten(passes, "F0") > 0.4
