# SPDX-License-Identifier: Apache-2.0
"""What a GPTModel's block is captured for: from the key of a variant to a `VariantSpec`.

Captures nothing. csrc/python/variant_layout.h says which buffers of metadata there are.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megagraph import _C
from megagraph.bank.sites import VariantSpec
from megagraph.decide.dispatch import VariantKey
from megagraph.megatron.parallel.model_parallel import has_experts

__all__ = ["variant_spec"]


def variant_spec(
    key: VariantKey,
    model: Any,
    hidden: Tensor,
    freqs: Tensor | tuple[Tensor, ...] | None,
    packs: _C.CanonicalPacks,
    valid_tokens: Tensor,
    block_arguments: Callable[[Tensor, Tensor | None, Tensor | None], Mapping[str, Any]],
) -> VariantSpec:
    """Describes one variant of a model's block, for hidden states [T, 1, H] like those on the meta device.

    `block_arguments` makes a canonical pack of its offsets, padded offsets and documents of rows, and gives
    what the layers are called with. `valid_tokens`, int64 [1], counts those of replayed packs. `freqs` are
    like frequencies of each token, without rows.
    """
    capacity, rows = key.capacity, hidden.size(0)
    assert capacity is not None
    layout = packs.layout(
        rows=rows, valid_tokens=valid_tokens, freqs=freqs, masks_tail=has_experts(model.config)
    )

    def arguments(buffers: Mapping[str, Tensor]) -> Mapping[str, Any]:
        own = {name: buffer.detach() for name, buffer in buffers.items()}  # objects of its own
        documents = own.get("seq_idx")
        index = None if documents is None else documents.view(1, capacity.tokens)
        given = {**block_arguments(own["actual"], own.get("padded"), index)}
        if staged := tuple(it for name, it in own.items() if name.startswith("rotary_pos_emb.")):
            given["rotary_pos_emb"] = staged if isinstance(freqs, tuple) else staged[0]
        if (mask := own.get("padding_mask")) is not None:
            given["padding_mask"] = mask.view(1, rows)
        return given

    mode = "training" if model.decoder.training else "evaluation"
    # What sets its graphs apart from those of plain training packs.
    apart = "" if key.grad else "forward only", "with a padding mask" if key.has_mask else ""
    return VariantSpec(
        key=key,
        name=", ".join(filter(None, (mode, *apart, str(capacity)))),
        training=key.grad,
        rows=rows,
        row_shape=tuple(hidden.shape[1:]),
        dtype=hidden.dtype,
        metadata=dict(layout.metadata),
        end_source=layout.end_source,
        end_buffer=layout.end_buffer,
        fewer_rows=layout.is_whole,
        arguments=arguments,
    )
