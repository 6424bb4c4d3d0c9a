# SPDX-License-Identifier: Apache-2.0
"""A training on packs that change every micro-batch has the bits of the same run without graphs."""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import megatron_rig as rig
import pytest
import torch
from same_bits import assert_same_bits

import megagraph
from megagraph.decide.dispatch import Capacity
from megagraph.demo.trainer import Trainer
from megagraph.packs.ops import TailConvention

STEPS, MICROS, WARM_UP = 32 if rig.ON_GPU else 12, 3, 3
SMALL = Capacity(tokens=64, num_seqs=4, max_seqlen=48)


def _cut(rng: random.Random, tokens: int, documents: int) -> tuple[int, ...]:
    """`documents` lengths that add up to `tokens`."""
    cuts = sorted(rng.sample(range(1, tokens), documents - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True))


def _fitting(rng: random.Random) -> tuple[int, ...]:
    while True:
        lengths = _cut(rng, rng.randint(6, 64), rng.randint(1, 4))
        if max(lengths) <= SMALL.max_seqlen:
            return lengths


def _job(steps: int = STEPS, *, seed: int = 0, misfits: float = 0.3) -> list[list[rig.Micro]]:
    """Packs that all differ; a share of `misfits` is too large, each kind as often."""
    rng = random.Random(seed)

    def lengths() -> tuple[int, ...]:
        if rng.random() >= misfits:
            return _fitting(rng)
        return rng.choice(
            [
                lambda: _cut(rng, rng.randint(65, 80), 3),
                lambda: _cut(rng, rng.randint(20, 64), rng.randint(5, 6)),
                lambda: (rng.randint(49, 60), 2),
            ]
        )()

    return [
        [rig.Micro(lengths=lengths(), seed=rng.randrange(1 << 30)) for _ in range(MICROS)]
        for _ in range(steps)
    ]


def _eager_reason(micro: rig.Micro) -> str | None:
    """By hand: why a pack does not fit `SMALL`."""
    if micro.physical > 64:
        return "TOO_MANY_TOKENS"
    if len(micro.lengths) > 4:
        return "TOO_MANY_SEQUENCES"
    return "SEQUENCE_TOO_LONG" if micro.longest > 48 else None


MAIN: dict[str, Any] = {"capacities": (SMALL,), "cuda_graph_warmup_steps": WARM_UP}


@pytest.fixture(scope="module")
def graphed(megatron: None) -> rig.Run:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    run = rig.train(rig.graph_config(**MAIN), _job())
    torch.use_deterministic_algorithms(before)
    return run


@pytest.mark.parametrize(
    "how", [{"eager": True}, {"mode": "eager"}, {}], ids=["switched off", "mode", "again"]
)
def test_a_graphed_run_has_the_bits_of_the_eager_run_and_repeats_itself(
    graphed: rig.Run, how: dict[str, Any]
) -> None:
    other = rig.train(
        rig.graph_config(**MAIN, mode=how.get("mode", "graph")), _job(), eager=how.get("eager", False)
    )
    assert (other.report["replays"] == other.report["graphs"] == 0) == bool(how)
    assert_same_bits(graphed, other)


def test_every_call_replays_or_has_the_reason_that_a_hand_count_gives(graphed: rig.Run) -> None:
    expected: Counter[str] = Counter()
    for index, micros in enumerate(_job()):
        for micro in micros:
            why = _eager_reason(micro) or ("WARMING_UP" if index < WARM_UP else "replays")
            expected[why] += rig.LAYERS
    replays = expected.pop("replays")
    assert graphed.report["calls"] == STEPS * MICROS * rig.LAYERS
    assert graphed.report["replays"] == replays > 0
    assert graphed.report["eager"] == dict(expected)
    assert graphed.report["failures"] == [] and graphed.report["graphs"] == 2 * rig.LAYERS
    replayed = [m for micros in _job()[WARM_UP:] for m in micros if _eager_reason(m) is None]
    valid = sum(sum(micro.lengths) for micro in replayed)
    assert graphed.report["padding_share"] == pytest.approx(1 - valid / (64 * len(replayed)), abs=1e-12)
    assert set(expected) == {"WARMING_UP", "TOO_MANY_TOKENS", "TOO_MANY_SEQUENCES", "SEQUENCE_TOO_LONG"}


def test_a_bank_of_several_capacities_pads_each_pack_to_the_smallest_that_holds_it() -> None:
    bank = tuple(Capacity(tokens=t, num_seqs=n, max_seqlen=t) for t, n in ((32, 2), (64, 2), (64, 4)))
    steps = _job(6, seed=1, misfits=0.0)
    run = rig.compare_runs(steps, plugin={"capacities": bank})
    rows = valid = 0
    for micro in (micro for micros in steps[1:] for micro in micros):
        fitting = [c for c in bank if micro.physical <= c.tokens and len(micro.lengths) <= c.num_seqs]
        rows += min(capacity.tokens for capacity in fitting)
        valid += sum(micro.lengths)
    assert run.report["replays"] == 5 * MICROS * rig.LAYERS
    assert run.report["graphs"] == 2 * rig.LAYERS * len(bank)
    assert run.report["padding_share"] == pytest.approx(1 - valid / rows, abs=1e-12)


def test_capacities_learned_from_the_warm_up_hold_what_was_seen_there() -> None:
    steps = _job(7, seed=2, misfits=0.0)
    run = rig.compare_runs(steps, plugin={**MAIN, "capacities": ()})
    learned = run.report["capacities"]
    warm_up = [micro for micros in steps[:WARM_UP] for micro in micros]
    assert {c["tokens"] for c in learned} == {max(micro.physical for micro in warm_up)}

    def fits(micro: rig.Micro) -> bool:
        return any(
            micro.physical <= c["tokens"]
            and len(micro.lengths) <= c["num_seqs"]
            and micro.longest <= c["max_seqlen"]
            for c in learned
        )

    assert all(map(fits, warm_up))
    later = [micro for micros in steps[WARM_UP:] for micro in micros]
    assert run.report["replays"] == rig.LAYERS * sum(map(fits, later)) > 0
    assert run.report["eager"]["WARMING_UP"] == rig.LAYERS * len(warm_up)


def test_capacities_learned_in_eager_mode_are_those_of_graph_mode() -> None:
    steps = _job(6, seed=2, misfits=0.0)
    config = {**MAIN, "capacities": ()}
    graph, eager = (rig.train(rig.graph_config(mode=mode, **config), steps) for mode in ("graph", "eager"))
    assert graph.report["capacities"] == eager.report["capacities"] != []
    assert_same_bits(graph, eager)


_PLAIN = [
    [rig.Micro(lengths=(5 + i, 7, 20 - i), seed=i), rig.Micro(lengths=(3 * i + 2,), seed=-i)]
    for i in range(4)
]
_PADDED = [
    [
        rig.Micro(lengths=(5 + i, 7, 20), padded=(8 + i, 8, 24), seed=i),
        rig.Micro(lengths=(9, 11 + i), padded=(12, 24), tail=4, seed=-i),
    ]
    for i in range(4)
]
_MIXED = [[plain[0], padded[1]] for plain, padded in zip(_PLAIN, _PADDED, strict=True)]
_TAILED = [
    [rig.Micro(lengths=(5 + i, 7), seed=i, tail=9 + i), rig.Micro(lengths=(30 + i,), tail=34 - i)]
    for i in range(4)
]


@pytest.mark.parametrize("tail", TailConvention)
@pytest.mark.parametrize(
    "steps", [_PLAIN, _PADDED, _MIXED, _TAILED], ids=["plain", "padded", "both", "with-a-tail"]
)
def test_every_tail_convention_and_form_of_pack_has_eager_bits(
    tail: TailConvention, steps: Sequence[Sequence[rig.Micro]]
) -> None:
    run = rig.compare_runs(steps, plugin={"tail": tail})
    assert run.report["replays"] == 2 * 3 * rig.LAYERS
    assert run.report["eager"] == {"WARMING_UP": 2 * rig.LAYERS}


def test_the_convention_of_the_tail_changes_no_loss_beyond_rounding() -> None:
    runs = [
        rig.train(rig.graph_config(tail=tail), _PADDED[:3], eager=True).steps[0].losses
        for tail in TailConvention
    ]
    for losses in runs[1:]:
        for one, other in zip(runs[0], losses, strict=True):
            bound = 2**-7 if rig.OPTIONS.bf16 else 1e-5
            assert (one - other).abs().max() <= bound * one.abs().max()


@pytest.mark.parametrize(
    "lengths",
    [(64,), (1,), (16, 16, 16, 16), (1, 1, 1, 1), (0, 20, 0, 5)],
    ids=["full", "one-token", "all-documents", "shortest", "empty-documents"],
)
def test_a_pack_at_an_edge_of_its_capacity_replays_with_eager_bits(lengths: tuple[int, ...]) -> None:
    capacity = Capacity(tokens=64, num_seqs=4, max_seqlen=64)
    steps = [[rig.Micro(lengths=(9, 9)), rig.Micro(lengths=lengths, seed=i)] for i in range(3)]
    run = rig.compare_runs(steps, plugin={"capacities": (capacity,)})
    assert run.report["replays"] == 2 * 2 * rig.LAYERS


# -- figures of padding ----------------------------------------------------------------------------


PADDED = (
    rig.Micro(lengths=(9, 20), padded=(12, 24)),
    rig.Micro(lengths=(1, 2, 3), padded=(8, 8, 8), seed=1),
    rig.Micro(lengths=(30,), padded=(32,), tail=5, seed=2),
)


def _share(replayed: Sequence[rig.Micro]) -> float:
    """By hand: rows of the capacities that hold no valid token."""
    rows = rig.CAPACITY.tokens * len(replayed)
    return (rows - sum(sum(micro.lengths) for micro in replayed)) / rows


def _approx(share: float) -> object:
    return pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("layer", range(3))
def test_tokens_count_once_however_many_layers_stay_eager(layer: int, install: rig.Install) -> None:
    """The others are replayed one by one; the first of them stages the pack, and counts it."""
    install()
    trainer = Trainer(dataclasses.replace(rig.OPTIONS, layers=3))
    trainer.chunk.decoder.layers[layer].register_forward_hook(lambda *unused: None)
    rig.step(trainer, [rig.ONE, *PADDED], times=3)
    report = rig.report_of(trainer)
    assert report["replays"] == 2 * 4 * 2 and report["eager"]["FOREIGN_HOOK"] == 2 * 4
    assert report["padding_share"] == _approx(_share((rig.ONE, *PADDED) * 2))


def _other_tables(trainer: Trainer) -> None:
    """Rotary tables of half the frequencies, from now on."""
    trainer.chunk.rotary_pos_emb.inv_freq.mul_(0.5)
    type(trainer.chunk.rotary_pos_emb).forward.cache_clear()


@pytest.mark.parametrize("make", [Trainer, rig.HybridTrainer], ids=["GPTModel", "HybridModel"])
def test_other_rotary_tables_than_those_of_the_capture_run_eager_and_count_no_token(
    make: Callable[..., Any], install: rig.Install
) -> None:
    """The call is refused after its slot was leased."""
    left = []
    for eager in (True, False):
        install()
        trainer = make(rig.OPTIONS) if make is Trainer else make()
        layers = len(trainer.chunk.decoder.layers)
        rig.step(trainer, [rig.ONE], times=2)
        before = rig.report_of(trainer)
        _other_tables(trainer)
        left.append(rig.step(trainer, [rig.ONE, rig.TWO], eager=eager))
        after = rig.report_of(trainer)
        if not eager:
            assert after["eager"] == {"WARMING_UP": layers, "SIGNATURE_CHANGED": 2 * layers}
            assert after["replays"] == before["replays"] == layers
            assert after["padding_share"] == before["padding_share"] == _approx(_share([rig.ONE]))
        megagraph.uninstall()
    assert_same_bits(*left)
