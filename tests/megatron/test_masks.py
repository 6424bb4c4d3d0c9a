# SPDX-License-Identifier: Apache-2.0
"""Padding masks: metadata that changes with each micro-batch, as the pack's offsets do."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import megatron_rig as rig
import pytest
import torch
from host_rig import HostTrainer, OwnBlock, OwnModel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from same_bits import assert_same_bits
from torch import Tensor

import megagraph
from megagraph.demo.trainer import Trainer

ONE = rig.Micro(lengths=(9, 20), tail=7, mask_seed=1)
TWO = rig.Micro(lengths=(3, 30, 8), seed=1, mask_seed=2)
PLAIN = rig.Micro(lengths=(5, 40), seed=2)
# As many rows and documents as the capacity: Megatron alone makes the very same bits.
FULL = rig.Micro(lengths=(40, 9, 7, 5, 3), seed=3, mask_seed=3)
UNMASKED = dataclasses.replace(FULL, mask_seed=None)


@contextlib.contextmanager
def mlps_that_read_masks() -> Iterator[list[Tensor]]:
    """While inside, masked rows of an MLP count half. Yields copies, on the host, of the masks seen."""
    original, seen = MLP.forward, []

    def forward(mlp: Any, hidden_states: Tensor, *args: Any, padding_mask: Any = None, **further: Any) -> Any:
        out, bias = original(mlp, hidden_states, *args, **further)
        if padding_mask is None:
            return out, bias
        if not (padding_mask.is_cuda and torch.cuda.is_current_stream_capturing()):
            seen.append(padding_mask.to("cpu", copy=True))  # memory of a call may not be kept
        assert padding_mask.shape == (1, out.size(0))
        # The mask itself is kept for the backward pass.
        return out.masked_fill(padding_mask.bool().transpose(0, 1)[..., None], 0) + 0.5 * out, bias

    with mock.patch.object(MLP, "forward", forward):
        yield seen


@pytest.fixture(autouse=True)
def seen() -> Iterator[list[Tensor]]:
    """MLPs read their mask, as routers of experts do; the masks that they have seen."""
    with mlps_that_read_masks() as masks:
        yield masks


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replayed CUDA graph runs no Python")
@pytest.mark.parametrize("micro", [ONE, TWO, FULL])
def test_layers_see_the_same_mask_in_eager_and_in_replays(pair: rig.Pair, seen: Any, micro: Any) -> None:
    """The user's, and every row at or past the pack's end."""
    pair.step(PLAIN, ONE, times=2)
    given = micro.padding_mask()
    assert given is not None
    wanted = torch.ones(1, rig.CAPACITY.tokens, dtype=torch.bool)
    wanted[0, : sum(micro.rows)] = given[0, : sum(micro.rows)]
    for trainer in pair.both:
        seen.clear()
        rig.step(trainer, [micro], update=False, eager=trainer is pair.eager)
        assert len(seen) == rig.LAYERS and all(torch.equal(mask, wanted.cpu()) for mask in seen)
    assert pair.report()["replays"] == (2 + 1) * rig.LAYERS


def test_a_later_table_of_another_kind_keeps_the_mask(trainer: Trainer) -> None:
    """Layers that are handed another table run eager, with the mask of the rows that they get."""
    rig.step(trainer, [TWO], update=False, times=2)
    wanted = rig.step(trainer, [TWO], update=False)
    rig.hands(trainer.chunk.decoder, lambda it: {**it, "rotary_pos_emb": it["rotary_pos_emb"] * (1.0 + 1e-6)})
    found = rig.step(trainer, [TWO], update=False)
    torch.testing.assert_close(found.losses, wanted.losses)
    assert rig.report_of(trainer)["eager"] == {"WARMING_UP": rig.LAYERS, "SIGNATURE_CHANGED": rig.LAYERS}


def _every_third(mask: Tensor | None, micro: rig.Micro) -> Tensor:
    return torch.arange(micro.physical, device="cuda" if rig.ON_GPU else "cpu")[None] % 3 == 0


# Who changes the block's mask, of which pack, into what.
CHANGED: dict[str, tuple[str, rig.Micro, Callable[[Any, rig.Micro], Any]]] = {
    "another dtype": ("hook", FULL, lambda mask, micro: mask.long()),
    "gone": ("hook", TWO, lambda _mask, _micro: None),
    "out of nowhere": ("hook", PLAIN, _every_third),
    "another": ("forward", FULL, _every_third),
    "none": ("forward", FULL, lambda _mask, _micro: None),
    "one more": ("forward", UNMASKED, _every_third),
    "another of a small pack": ("forward", dataclasses.replace(PLAIN, mask_seed=4), _every_third),
}


@pytest.mark.parametrize(
    ("mode", "case"), [*(("graph", it) for it in CHANGED), ("eager", "gone"), ("eager", "out of nowhere")]
)
def test_an_unexpected_mask_is_the_layers_as_given(install: Any, seen: Any, mode: str, case: str) -> None:
    """Bug: layers got the mask that the block had been given, and replayed where they were to get none."""
    whose, micro, change = CHANGED[case]
    original, handed = TransformerBlock.forward, []

    def changed(kwargs: dict[str, Any]) -> dict[str, Any]:
        handed.append(change(kwargs.get("padding_mask"), micro))
        return {**kwargs, "padding_mask": handed[-1]}

    @functools.wraps(original)
    def forward(block: Any, *args: Any, **kwargs: Any) -> Any:
        return original(block, *args, **(changed(kwargs) if changes and whose == "forward" else kwargs))

    changes = False
    with mock.patch.object(TransformerBlock, "forward", forward):
        install(mode=mode)
        try:
            trainer = rig.ModelTrainer()
            rig.step(trainer, [FULL, PLAIN, micro], update=False, times=3)
            before, changes = rig.report_of(trainer), True
            if whose == "hook":
                rig.hands(trainer.chunk.decoder, changed)
            seen.clear()
            ours = rig.step(trainer, [micro], update=False)
            assert rig.eager_since(rig.report_of(trainer), before) == {"SIGNATURE_CHANGED": rig.LAYERS}
            assert len(seen) == (0 if handed[0] is None else rig.LAYERS)
            for mask in seen:
                mask = mask if whose == "hook" else mask[:, : micro.physical]
                assert torch.equal(mask, handed[0].cpu())
        finally:
            megagraph.uninstall()
        alone = rig.step(trainer, [micro], update=False)
    if micro.physical == rig.CAPACITY.tokens:
        assert_same_bits(ours, alone)
    torch.testing.assert_close(ours.losses, alone.losses)


class HandingModel(OwnModel):
    """Calls its decoder itself, and hands it the mask."""

    def forward(self, *args: Any, padding_mask: Tensor | None = None, **given: Any) -> Any:
        self.given = [padding_mask]
        return super().forward(*args, **given)

    def tables(self, *args: Any) -> Any:
        hidden, tables = super().tables(*args)
        return hidden, {**tables, "padding_mask": self.given[0]}


class HandingBlock(OwnBlock):
    """Hands its second layer a mask of its own."""

    def further_arguments(self, index: int) -> dict[str, Any]:
        return {"padding_mask": _every_third(None, FULL)} if index == 1 else {}


HANDED = {"model": (HandingModel, None), "block": (GPTModel, HandingBlock)}


@pytest.mark.parametrize("whose", HANDED)
def test_masks_that_a_hosts_forwards_hand_on_reach_layers_as_given(install: rig.Install, whose: str) -> None:
    """Bug: RoPE took a table as long as the capacity for one of the pack's rows, where there are as many."""
    install()
    trainer = HostTrainer(*HANDED[whose])
    micro = FULL if whose == "model" else UNMASKED
    found = [rig.step(trainer, [micro], update=False) for _ in range(4)]
    report = rig.report_of(trainer)
    assert report["eager"]["SIGNATURE_CHANGED"] >= (2 * rig.LAYERS if whose == "model" else 2)
    assert report["replays"] == (0 if whose == "model" else 2)
    megagraph.uninstall()
    alone = rig.step(trainer, [micro], update=False)
    for left in found:
        assert_same_bits(alone, left)
