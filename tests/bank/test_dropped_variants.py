# SPDX-License-Identifier: Apache-2.0
"""Graphs of some variants go, between steps; those of the others go on."""

import pytest
import torch
from bank_pair import ROWS, Block, Pair, blocks, new_bank, variant

from megagraph.decide.reasons import EagerReason

LAYERS = 3


def _forward_only(pair: Pair) -> EagerReason | None:
    with torch.no_grad():
        return pair.forward(key="eval", requires_grad=False).reason


@pytest.mark.parametrize("main_grad", [False, True])
def test_the_others_replay_and_the_dropped_one_is_captured_again(device: str, main_grad: bool) -> None:
    pair = Pair(device, blocks(LAYERS), main_grad=main_grad)
    both = variant(), variant("eval", training=False)
    pair.capture(*both)
    for _ in range(3):
        assert pair.step() is None and _forward_only(pair) is None
        pair.bank.drop(["train"])
        assert pair.bank.num_graphs == LAYERS
        assert pair.forward().reason is EagerReason.WARMING_UP
        assert _forward_only(pair) is None
        pair.update_weights()
        pair.capture(both[0])
        assert pair.bank.num_graphs == 3 * LAYERS
    assert pair.step() is None and _forward_only(pair) is None
    assert pair.eager_calls() == {"WARMING_UP": 3 * LAYERS}


def test_a_variant_that_is_captured_again_has_the_later_graphs(device: str) -> None:
    pair = Pair(device, blocks(LAYERS)).capture()
    torch.use_deterministic_algorithms(False)
    assert pair.forward().reason is EagerReason.NUMERICS_CHANGED
    pair.capture()
    assert pair.bank.num_graphs == 2 * LAYERS
    assert pair.forward().reason is None


def test_nothing_is_dropped_while_a_slot_is_held(device: str) -> None:
    pair = Pair(device, blocks(LAYERS)).capture()
    waiting = pair.forward()
    with pytest.raises(RuntimeError, match="still held: "):
        pair.bank.drop(["train"])
    waiting.backward()
    del waiting
    assert pair.step() is None
    pair.bank.drop(["train"])
    pair.bank.drop(["train", "never captured"])
    assert pair.bank.num_graphs == 0


@pytest.mark.gpu
def test_the_next_capture_takes_the_memory_of_what_was_dropped() -> None:
    rows = 1 << 14
    layers = [Block(256).to("cuda") for _ in range(LAYERS)]
    bank = new_bank(layers, "cuda")
    train, evaluate = (
        variant(key, training=key == "train", rows=rows, row_shape=(256,)) for key in ("train", "eval")
    )
    bank.capture([train, evaluate])
    held = bank.pool_bytes()
    assert held > ROWS
    for _ in range(5):
        bank.drop(["train"])
        bank.capture([train])
    assert bank.pool_bytes() <= 1.1 * held
