# SPDX-License-Identifier: Apache-2.0
"""Attention of ranks that share a pack agrees with that of one process."""

from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, distributed
from worlds import Worlds

from megagraph.modules import VarlenAttention
from megagraph.packs.ops import thd_partition_indices

pytestmark = pytest.mark.megatron

ON_GPU = torch.cuda.is_available()
# Over the largest entry: sums in another order, in float32 on the CPU; in bfloat16 on a GPU, where partial
# gradients are rounded before they travel.
BOUND = 2e-2 if ON_GPU else 2e-6


class Heads(NamedTuple):
    """Sizes of an attention."""

    queries: int  # heads
    groups: int  # of queries that share a key
    dim: int  # of queries and keys
    values: int  # dimensions of values


HEADS = {"grouped queries": Heads(8, 4, 16, 16), "mla": Heads(4, 4, 48, 32)}
PACKS = {
    "one document": ((64,), 0),
    "some, of which a few are empty": ((8, 0, 40, 16, 0), 0),
    "rows past the end": ((16, 8), 24),
}


def _pack(lengths: tuple[int, ...], device: str, **shared: Any) -> Any:
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return SimpleNamespace(
        **{"qkv_format": "thd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets},
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), None),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(lengths)),
        **shared,
    )


def _run(comm_type: str | None, qkv: list[Tensor], grad: Tensor, pack: Any) -> list[Tensor]:
    config = SimpleNamespace(
        attention_dropout=0.0, context_parallel_size=1, apply_query_key_layer_scaling=False
    )
    module = VarlenAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type=comm_type)
    leaves = [rows.clone().requires_grad_() for rows in qkv]
    out = module(*leaves, None, packed_seq_params=pack)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def attend(comm_type: str | None, heads: Heads, lengths: tuple[int, ...], tail: int) -> None:
    """For this rank's rows of a pack, and for all of them alone."""
    group = distributed.group.WORLD
    assert group is not None
    size, rank = group.size(), group.rank()
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    end, generator = sum(lengths), torch.Generator().manual_seed(11)
    shapes = (heads.queries, heads.dim), (heads.groups, heads.dim), (heads.groups, heads.values)
    rows = [torch.randn(end + tail, *shape, generator=generator) for shape in shapes]
    rows.append(torch.randn(end + tail, heads.queries * heads.values, generator=generator))
    for tensor in rows:
        tensor[end:] = float("nan")
    *qkv, grad = (tensor.to(device, dtype) for tensor in rows)
    alone = _run(comm_type, qkv, grad, _pack(lengths, device))
    mine = thd_partition_indices(_pack(lengths, device).cu_seqlens_q, end + tail, size, rank).long()
    shared = _pack(lengths, device, local_cp_size=size, cp_group=group)
    local = [tensor[mine] for tensor in qkv]
    ours, again = (_run(comm_type, local, grad[mine], shared) for _ in range(2))
    for name, one, other, whole in zip(("out", "q", "k", "v"), ours, again, alone, strict=True):
        assert not one[end // size :].any(), f"the tail of {name}"
        assert torch.equal(one, other), name
        distance = (one.double() - whole[mine].double()).abs().max() / whole.double().abs().max()
        assert distance <= BOUND, f"{name}: {distance}"


def attend_in_each() -> None:
    for (lengths, tail), heads, comm_type in product(PACKS.values(), HEADS.values(), (None, "a2a")):
        attend(comm_type, heads, lengths, tail)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_has_its_rows_of_the_whole(worlds: Worlds, ranks: int) -> None:
    worlds.of(ranks).run(attend_in_each)
