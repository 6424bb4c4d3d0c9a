# SPDX-License-Identifier: Apache-2.0
"""The packs that `pretrain_packed.py` trains on: read, split, and numbered as samples.

Knows no Megatron.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.data import Dataset

from megagraph.demo.documents import load_documents
from megagraph.demo.packs import Pack, next_token_labels, position_ids, stream_packs

# Of every so many packs one is kept for validation, and one for the test.
HELD_OUT_EVERY = 20


def read_packs(documents: Path | None, tokens: int, max_num_seqs: int | None) -> list[Pack]:
    """Packs the documents, in their order; the same arguments give the same packs.

    Args:
        documents: a .jsonl, whose rows are documents, or None for the text of Python's own library.
        tokens: the most tokens of a pack.
        max_num_seqs: the most documents of a pack, or None.

    Raises:
        DocumentError: for a document that cannot be used.
    """
    rows = load_documents(documents, min_length=2, max_length=tokens)
    return list(stream_packs(rows, tokens, max_num_seqs))


def split_packs(packs: Sequence[Pack]) -> tuple[list[Pack], list[Pack], list[Pack]]:
    """The packs to train on, to validate with and to test with.

    Raises:
        ValueError: where there are too few to hold any out.
    """
    if len(packs) < HELD_OUT_EVERY:
        raise ValueError(f"expected documents for at least {HELD_OUT_EVERY} packs, got {len(packs)} packs")
    places = range(len(packs))
    return (
        [packs[place] for place in places if place % HELD_OUT_EVERY > 1],
        [packs[place] for place in places if place % HELD_OUT_EVERY == 0],
        [packs[place] for place in places if place % HELD_OUT_EVERY == 1],
    )


class PackedDocuments(Dataset[dict[str, Any]]):
    """Packs by the number of the sample: as many as are asked for, in a new order in each epoch.

    A sample depends on its number alone, so a run that resumes at a number goes on as if it had never
    stopped.

    Args:
        packs: what there is.
        num_samples: what is asked for; None for each pack once.
        seed: of the orders.
        canonical: tokens and documents of a canonical pack, see `canonical_sample`; None leaves each
            pack its own.
        split: Megatron's `Split`, from which it chooses the batch size.
    """

    def __init__(
        self,
        packs: Sequence[Pack],
        num_samples: int | None,
        *,
        seed: int,
        canonical: tuple[int, int] | None = None,
        split: Any = None,
    ) -> None:
        self._packs = packs
        self._num_samples = len(packs) if num_samples is None else num_samples
        self._seed = seed
        self._canonical = canonical
        self.split = split
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Sample `number`, on the host; see `pack_sample` for what it holds."""
        if not 0 <= number < self._num_samples:
            raise IndexError(f"expected a sample in [0, {self._num_samples}), got {number}")
        epoch, place = divmod(number, len(self._packs))
        if epoch != self._order[0]:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._order = epoch, torch.randperm(len(self._packs), generator=generator).tolist()
        sample = pack_sample(self._packs[self._order[1][place]])
        return sample if self._canonical is None else canonical_sample(sample, *self._canonical)


def pack_sample(pack: Pack) -> dict[str, Any]:
    """A pack as the model takes it.

    Returns:
        `tokens`, `labels` and `position_ids`, int64 [T]; `loss_mask`, float32 [T]; `cu_seqlens`, int32
        [N + 1]; `max_seqlen`, an integer.
    """
    labels, mask = next_token_labels(pack)
    return {
        "tokens": pack.tokens,
        "labels": labels,
        "loss_mask": mask,
        "position_ids": position_ids(pack),
        "cu_seqlens": pack.cu_seqlens,
        "max_seqlen": pack.max_seqlen,
    }


def canonical_sample(sample: dict[str, Any], tokens: int, num_seqs: int) -> dict[str, Any]:
    """Pads a sample to `tokens` rows and `num_seqs` documents.

    The rows that are added are a document of their own without any loss: kernels leave rows that belong
    to no document undefined. Further documents are empty. One document of all rows stays alone: beside
    empty ones its length says that positions go on through the pack, if RoPE is not fused.

    Args:
        sample: of fewer than `num_seqs` documents, or of `tokens` rows.
        tokens: rows afterwards.
        num_seqs: documents afterwards.
    """
    offsets = sample["cu_seqlens"]
    if sample["max_seqlen"] == tokens:
        return sample
    rows, missing = sample["tokens"].numel(), num_seqs + 1 - offsets.numel()
    if rows > tokens or missing < 0 or (rows < tokens and missing == 0):
        raise ValueError(
            f"expected at most {tokens} tokens and fewer than {num_seqs} documents, "
            f"got {rows} and {offsets.numel() - 1}"
        )
    padded = {name: pad(sample[name], (0, tokens - rows)) for name in ("tokens", "labels", "loss_mask")}
    return {
        **padded,
        "position_ids": torch.cat([sample["position_ids"], torch.arange(tokens - rows)]),
        "cu_seqlens": pad(offsets, (0, missing), value=tokens),
        "max_seqlen": max(sample["max_seqlen"], tokens - rows),
    }
