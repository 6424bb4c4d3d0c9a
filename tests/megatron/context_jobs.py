# SPDX-License-Identifier: Apache-2.0
"""What ranks do that share packs: their attention beside that of one process."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, distributed

from megagraph.modules import VarlenAttention
from megagraph.packs.ops import thd_partition_indices


class Heads(NamedTuple):
    """Sizes of an attention.

    Args:
        queries: heads.
        groups: of queries that share a key.
        dim: of queries and keys.
        values: dimensions of values.
    """

    queries: int
    groups: int
    dim: int
    values: int


def _attention(comm_type: str | None) -> VarlenAttention:
    config = SimpleNamespace(
        attention_dropout=0.0, context_parallel_size=1, apply_query_key_layer_scaling=False
    )
    return VarlenAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type=comm_type)


def _pack(lengths: tuple[int, ...], device: str, **shared: Any) -> Any:
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return SimpleNamespace(
        **{"qkv_format": "thd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets},
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), None),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(lengths)),
        **shared,
    )


def _run(module: VarlenAttention, qkv: list[Tensor], grad: Tensor, pack: Any) -> list[Tensor]:
    leaves = [rows.clone().requires_grad_() for rows in qkv]
    out = module(*leaves, None, packed_seq_params=pack)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def attend(
    *, comm_type: str | None, heads: Heads, lengths: tuple[int, ...], tail: int
) -> dict[str, tuple[float, bool]]:
    """Attends for this rank's rows of a pack, and for all of them alone.

    Args:
        comm_type: how rows travel.
        heads: sizes.
        lengths: of the documents.
        tail: rows past the last one, NaN in everything that goes in.

    Returns:
        Of the output and of each gradient: how far it is from the same rows of one process, over the largest
        entry; and whether it has the same bits a second time. Tails are zero.
    """
    group = distributed.group.WORLD
    assert group is not None
    size, rank = group.size(), group.rank()
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    end, generator = sum(lengths), torch.Generator().manual_seed(11)
    shapes = (heads.queries, heads.dim), (heads.groups, heads.dim), (heads.groups, heads.values)
    rows = [torch.randn(end + tail, *shape, generator=generator) for shape in shapes]
    rows.append(torch.randn(end + tail, heads.queries * heads.values, generator=generator))
    for tensor in rows:
        tensor[end:] = float("nan")
    *qkv, grad = (tensor.to(device, dtype) for tensor in rows)
    alone = _run(_attention(comm_type), qkv, grad, _pack(lengths, device))
    mine = thd_partition_indices(_pack(lengths, device).cu_seqlens_q, end + tail, size, rank).long()
    shared = _pack(lengths, device, local_cp_size=size, cp_group=group)
    local = [tensor[mine] for tensor in qkv]
    ours, again = (_run(_attention(comm_type), local, grad[mine], shared) for _ in range(2))
    found = {}
    for name, one, other, whole in zip(("out", "q", "k", "v"), ours, again, alone, strict=True):
        assert not one[end // size :].any(), f"the tail of {name}"
        distance = (one.double() - whole[mine].double()).abs().max() / whole.double().abs().max()
        found[name] = float(distance), torch.equal(one, other)
    return found
