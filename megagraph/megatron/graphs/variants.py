# SPDX-License-Identifier: Apache-2.0
"""What a GPTModel's block is captured for: from a capacity and a kind to a `VariantSpec`.

Captures nothing.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megagraph import _C
from megagraph.bank.sites import MetadataSpec, VariantSpec
from megagraph.decide.dispatch import Capacity, PackShape
from megagraph.megatron.graphs.micro_batch import Kind, new_params
from megagraph.packs.packing import OffsetsRule, TailConvention, canonical_fields, offsets_rules

__all__ = ["example_offsets", "learn_capacities", "variant_spec"]


def example_offsets(capacity: Capacity, device: torch.device) -> Tensor:
    """Offsets of a legal pack that fills the capacity, int32 [num_seqs + 1]."""
    ends = [min(i * capacity.max_seqlen, capacity.tokens) for i in range(capacity.num_seqs + 1)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _offsets_spec(rule: OffsetsRule, example: Tensor, source: int) -> MetadataSpec:
    return MetadataSpec(
        kind=_C.SegmentKind.OFFSETS,
        example=example,
        source=source,
        fill=rule.fill,
        extend_last=rule.extend_last,
    )


def variant_spec(
    capacity: Capacity,
    kind: Kind,
    *,
    rows: int,
    tail: TailConvention,
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    valid_tokens: Tensor,
    params_type: type[Any],
    block_arguments: Callable[[Any, Tensor], Mapping[str, Any]],
    context: Callable[[], contextlib.AbstractContextManager[None]],
) -> VariantSpec:
    """Describes one variant.

    Args:
        capacity: its shapes.
        kind: the packs it takes and how the model runs.
        rows: of the hidden states on this rank; fewer than the capacity's tokens where ranks share them.
        tail: convention of the canonical offsets.
        row_shape: of the hidden states, without their first dimension.
        dtype: of the hidden states.
        valid_tokens: int64 [1], counts the valid tokens of replayed packs.
        params_type: `PackedSeqParams`.
        block_arguments: from a pack and hidden states to the layers' arguments.
        context: entered around the warm-up and the capture.
    """
    rules = offsets_rules(tail, capacity.tokens, has_padded=kind.form.has_padded)
    physical = int(kind.form.has_padded)
    example = example_offsets(capacity, valid_tokens.device)
    metadata = {
        name: _offsets_spec(rule, example, source=physical if name == "padded" else 0)
        for name, rule in rules.items()
    }
    metadata["valid_tokens"] = MetadataSpec(
        kind=_C.SegmentKind.COUNT, example=valid_tokens, source=0, shared=True
    )

    def arguments(buffers: Mapping[str, Tensor]) -> Mapping[str, Any]:
        fields = canonical_fields(buffers, kind.form, tail, capacity)
        hidden = torch.empty((rows, *row_shape), dtype=dtype, device="meta")
        return block_arguments(new_params(params_type, fields), hidden)

    # Rows that ranks share come padded from the embedding: no rank's rows end where the pack does.
    is_whole = rows == capacity.tokens
    mode = "training" if kind.training else "evaluation"
    return VariantSpec(
        key=(capacity, kind),
        name=f"{mode}{'' if kind.grad else ', forward only'}, {capacity}",
        training=kind.grad,
        rows=rows,
        row_shape=row_shape,
        dtype=dtype,
        metadata=metadata,
        end_source=physical if is_whole else -1,
        end_buffer=("padded" if "padded" in rules else "actual") if is_whole else None,
        fewer_rows=is_whole,
        arguments=arguments,
        context=context,
    )


def _power_of_two(value: float) -> int:
    return 1 << (max(int(value), 1) - 1).bit_length()


def learn_capacities(observed: Iterable[PackShape], tail: TailConvention) -> tuple[Capacity, ...]:
    """Capacities that would have held every observed pack: one for most packs, one for the rest.

    The longest document is taken to be as long as a pack, since a later one may be; the number of
    documents is rounded up to a power of two.
    """
    shapes: Sequence[PackShape] = list(observed)
    tokens = max(shape.tokens for shape in shapes)
    counts = [shape.num_seqs - tail.extra_seqs for shape in shapes]
    buckets = {_power_of_two(statistics.median_high(counts)), _power_of_two(max(counts))}
    return tuple(
        Capacity(tokens=tokens, num_seqs=bucket + tail.extra_seqs, max_seqlen=tokens)
        for bucket in sorted(buckets)
    )
