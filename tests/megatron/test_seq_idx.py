# SPDX-License-Identifier: Apache-2.0
"""Packs that say of each row which document it is of (`seq_idx`), and layers that read it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from megatron_rig import CAPACITY, LAYERS, Install, Micro, ModelTrainer, Pair, report_of, step
from torch import Tensor

import megagraph
from megagraph.demo.trainer import Trainer

pytestmark = pytest.mark.both


@pytest.fixture(autouse=True)
def _has_field() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    if not hasattr(PackedSeqParams, "seq_idx"):
        pytest.skip("this release of megatron-core has no seq_idx")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Indexed(Micro):
    """A micro-batch whose pack has `seq_idx`, made by Megatron, or whatever `fields` say."""

    fields: Mapping[str, Any] | None = None

    def params(self, device: torch.device) -> Any:
        fields = {"total_tokens": self.physical} if self.fields is None else self.fields
        return dataclasses.replace(super().params(device), **fields)


def layer_by_document() -> Any:
    """A layer that treats the rows of each document in another way."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class LayerByDocument(TransformerLayer):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
            index = packed_seq_params.seq_idx
            if index is not None:
                assert index.shape == (1, hidden_states.size(0)) and index.dtype is torch.int32
                assert packed_seq_params.total_tokens == hidden_states.size(0)
                hidden_states = hidden_states * (1 + 0.125 * index.view(-1, 1, 1)).to(hidden_states.dtype)
            return super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)

    spec = megagraph.get_gpt_layer_varlen_spec()
    spec.module = LayerByDocument
    return spec


PACKS = (
    Indexed(lengths=(9, 20)),
    Indexed(lengths=(30, 3, 31), seed=1),  # fills the capacity
    Indexed(lengths=(5, 0, 6), seed=2, tail=4),
    Indexed(lengths=(1, 2, 3, 4, 5), seed=3, padded=(4, 4, 4, 4, 8)),  # as many documents as may be
)


def test_a_layer_that_reads_seq_idx_has_the_bits_of_eager() -> None:
    """Bug: the canonical pack had none, so that such a layer did something else."""
    pair = Pair(spec=layer_by_document())
    for shift in range(4):
        pair.step(*(PACKS[(shift + place) % len(PACKS)] for place in range(3)))
        pair.evaluate(PACKS[shift % len(PACKS)])
    report = pair.report()
    assert set(report["eager"]) == {"WARMING_UP"}
    assert report["replays"] >= 2 * 4 * LAYERS


def test_valid_rows_have_the_losses_of_an_unpatched_run(install: Install) -> None:
    def losses() -> list[list[Tensor]]:
        trainer = ModelTrainer(spec=layer_by_document())
        return [step(trainer, PACKS[:2]).losses for _ in range(4)]  # Megatron's RoPE takes no tail

    unpatched = losses()
    install()
    patched = losses()
    (report,) = megagraph.reports()
    assert report["replays"] >= 3 * 2 * LAYERS - LAYERS
    torch.testing.assert_close(patched, unpatched)


def test_packs_with_and_without_are_of_two_kinds() -> None:
    pair = Pair(spec=layer_by_document())
    plain = Micro(lengths=(9, 20))
    pair.step(PACKS[0], times=3)
    pair.step(plain, times=3)
    pair.step(PACKS[0], plain)
    report = pair.report()
    assert set(report["eager"]) == {"WARMING_UP"}
    assert report["replays"] == (2 + 2 + 2) * LAYERS


@pytest.mark.parametrize(
    "seq_idx",
    [
        torch.zeros(1, 12, dtype=torch.int32),
        torch.zeros(1, 29, dtype=torch.int64),
        torch.zeros(29, dtype=torch.int32),
        torch.zeros(29, 1, dtype=torch.int32),
        [0] * 29,
    ],
    ids=["of other rows", "of another type", "of one dimension", "of columns", "no tensor"],
)
def test_a_seq_idx_that_cannot_be_staged_runs_as_given(trainer: Trainer, seq_idx: Any) -> None:
    placed = seq_idx.to(trainer.device) if isinstance(seq_idx, Tensor) else seq_idx
    step(trainer, [Indexed(lengths=(9, 20), fields={"seq_idx": placed})], times=3)
    assert report_of(trainer)["eager"] == {"SIGNATURE_CHANGED": 3 * LAYERS}


def test_the_rows_past_a_pack_are_no_documents(install: Install) -> None:
    """They have the number after the last one that the capacity holds."""
    install(mode="eager")
    trainer = ModelTrainer()
    seen: list[Tensor] = []

    def look(_layer: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["packed_seq_params"].seq_idx)

    trainer.chunk.decoder.layers[0].register_forward_pre_hook(look, with_kwargs=True)
    step(trainer, [PACKS[2]])
    rows = [*[0] * 5, *[2] * 6, *[3] * 4, *[CAPACITY.num_seqs] * (CAPACITY.tokens - 15)]
    assert seen[0].tolist() == [rows]
