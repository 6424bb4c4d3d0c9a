# SPDX-License-Identifier: Apache-2.0
"""The padding share that is reported is that of a hand count over the packs that replayed."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from megatron_rig import CAPACITY, LAYERS, ONE, OPTIONS, TWO, HybridTrainer, Install, Micro, report_of, step
from same_bits import assert_same_bits

import megagraph
from megagraph.demo.trainer import Trainer

PADDED = (
    Micro(lengths=(9, 20), padded=(12, 24)),
    Micro(lengths=(1, 2, 3), padded=(8, 8, 8), seed=1),
    Micro(lengths=(30,), padded=(32,), tail=5, seed=2),
)


def _share(replayed: Sequence[Micro]) -> float:
    """By hand: rows of the capacities that hold no valid token."""
    rows = CAPACITY.tokens * len(replayed)
    return (rows - sum(sum(micro.lengths) for micro in replayed)) / rows


def _approx(share: float) -> object:
    return pytest.approx(share, abs=1e-12)


def test_padding_inside_a_pack_counts_as_padding(trainer: Trainer) -> None:
    step(trainer, PADDED, times=3)
    report = report_of(trainer)
    assert report["replays"] == 2 * len(PADDED) * LAYERS
    assert report["padding_share"] == _approx(_share(PADDED * 2))


@pytest.mark.parametrize("layer", range(3))
def test_tokens_count_once_however_many_layers_stay_eager(layer: int, install: Install) -> None:
    """The others are replayed one by one; the first of them stages the pack, and counts it."""
    install()
    trainer = Trainer(dataclasses.replace(OPTIONS, layers=3))
    trainer.chunk.decoder.layers[layer].register_forward_hook(lambda *unused: None)
    step(trainer, [ONE, *PADDED], times=3)
    report = report_of(trainer)
    assert report["replays"] == 2 * 4 * 2 and report["eager"]["FOREIGN_HOOK"] == 2 * 4
    assert report["padding_share"] == _approx(_share((ONE, *PADDED) * 2))


def _other_tables(trainer: Trainer) -> None:
    """Rotary tables of half the frequencies, from now on."""
    trainer.chunk.rotary_pos_emb.inv_freq.mul_(0.5)
    type(trainer.chunk.rotary_pos_emb).forward.cache_clear()


@pytest.mark.parametrize("make", [Trainer, HybridTrainer], ids=["GPTModel", "HybridModel"])
def test_other_rotary_tables_than_those_of_the_capture_run_eager_and_count_no_token(
    make: Callable[..., Any], install: Install
) -> None:
    """The call is refused after its slot was leased."""
    left = []
    for eager in (True, False):
        install()
        trainer = make(OPTIONS) if make is Trainer else make()
        layers = len(trainer.chunk.decoder.layers)
        step(trainer, [ONE], times=2)
        before = report_of(trainer)
        _other_tables(trainer)
        left.append(step(trainer, [ONE, TWO], eager=eager))
        after = report_of(trainer)
        if not eager:
            assert after["eager"] == {"WARMING_UP": layers, "SIGNATURE_CHANGED": 2 * layers}
            assert after["replays"] == before["replays"] == layers
            assert after["padding_share"] == before["padding_share"] == _approx(_share([ONE]))
        megagraph.uninstall()
    assert_same_bits(*left)
