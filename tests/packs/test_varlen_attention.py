# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from offsets import offsets
from same_bits import assert_close_to_float64, assert_same_bits
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megagraph.packs.ops import thd_partition_indices, varlen_attention

DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
Keys = list[int] | None


def inputs(rows: int, heads: int, groups: int, dim: int, device: str, keys: int = -1) -> list[Tensor]:
    """q, k, v and a gradient of the output; unless it is said, as many keys as queries."""
    keys = rows if keys < 0 else keys
    shapes = (rows, heads), (keys, groups), (keys, groups), (rows, heads)
    return [torch.randn(*shape, dim, device=device).to(DTYPE[device]) for shape in shapes]


def in_float64(
    tensors: list[Tensor], queries: list[int], keys: Keys = None, *, causal: bool = True, **how: Any
) -> list[Tensor]:
    """Output and gradients on the host, of one score matrix of all documents, without their tails."""
    keys = queries if keys is None else keys
    ends = (sum(queries), sum(keys), sum(keys), sum(queries))
    cut = (t.detach()[:end].cpu().double() for t, end in zip(tensors, ends, strict=True))
    *leaves, grad = (t.requires_grad_() for t in cut)
    # Which query sees which key: of its own document, the last query all of them.
    seen = (torch.ones(*each, dtype=torch.bool) for each in zip(queries, keys, strict=True))
    mask = torch.block_diag(*(it.tril(it.size(1) - it.size(0)) if causal else it for it in seen))
    heads_first = (leaf[None].transpose(1, 2) for leaf in leaves)
    attended = scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True, **how)
    out = attended[0].transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.detach())]


def attend(
    tensors: list[Tensor], queries: list[int], keys: Keys = None, *, slack: int = 0, **how: Any
) -> list[Tensor]:
    """As `in_float64()`; `slack` is by what the longest document might be longer."""
    *leaves, grad = (t.detach().requires_grad_(place < 3) for place, t in enumerate(tensors))
    options = {"softmax_scale": how.get("scale"), "causal": how.get("causal", True)}

    def packed(lengths: list[int]) -> tuple[Tensor, int]:
        return offsets(lengths, grad.device.type), max(lengths, default=0) + slack

    ends = packed(queries) if keys is None else zip(packed(queries), packed(keys), strict=True)
    out = varlen_attention(*leaves, *ends, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


USUAL: dict[str, Any] = {"slack": 0, "heads": (4, 2), "how": {"causal": True}}


@settings(max_examples=50)
@given(
    documents=st.lists(
        st.tuples(st.sampled_from([0, 0, 1, 2, 17, 64]), st.sampled_from([0, 1, 130, -1, -30])), max_size=6
    ),
    has_keys=st.booleans(),
    tails=st.sampled_from([(0, 0), (1, 3), (130, 0)]),
    slack=st.sampled_from([0, 3, 100]),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    how=st.fixed_dictionaries({"causal": st.booleans(), "scale": st.sampled_from([None, 0.3])}),
)
# FlashAttention took this for decoding, and refused the tail.
@example(documents=[(1, 0)], has_keys=False, tails=(1, 0), **{**USUAL, "how": {"causal": False}})
# One query a document, as the smallest chunks of context parallelism have.
@example(documents=[(1, 0), (1, 2), (1, 1)], has_keys=True, tails=(1, 0), **USUAL)
@example(documents=[], has_keys=False, tails=(0, 0), **USUAL)
@example(documents=[], has_keys=False, tails=(130, 0), **{**USUAL, "slack": 100})
@example(documents=[(0, 0)] * 2, has_keys=False, tails=(0, 0), **{**USUAL, "slack": 3})
@example(documents=[(0, 0)] * 2, has_keys=False, tails=(1, 0), **USUAL)
def test_documents_attend_alone_up_to_the_end_and_poison_in_the_tails_changes_no_bit(
    device: str, documents: Any, has_keys: bool, tails: tuple[int, int], slack: int, heads: Any, how: Any
) -> None:
    """Each document has as many keys as queries, or keys of its own: more in front of them, or fewer, which
    the first queries do not see."""
    queries = [count for count, _ in documents]
    keys = [max(count + (before if count else 0), 0) for count, before in documents] if has_keys else None
    num_queries, num_keys = sum(queries), sum(keys or queries)
    ends = (num_queries, num_keys, num_keys, num_queries)
    clean = inputs(num_queries + tails[0], *heads, 16, device, keys=num_keys + tails[has_keys])
    poisoned = [t.clone() for t in clean]
    for t, end in zip(poisoned, ends, strict=True):
        t[end:] = torch.nan
    actual = attend(clean, queries, keys, slack=slack, **how)
    if num_queries:
        assert_close_to_float64(actual, in_float64(clean, queries, keys, **how), device)
    from_poisoned = attend(poisoned, queries, keys, slack=slack, **how)
    for one, other, end in zip(actual, from_poisoned, (num_queries, *ends[:3]), strict=True):
        assert torch.equal(one, other)
        assert not one[end:].any()


@pytest.mark.parametrize("sizes", [(4, 2, 64), (2, 2, 128), (1, 1, 8)])
def test_one_giant_document(device: str, sizes: tuple[int, int, int]) -> None:
    tensors = inputs(300, *sizes, device)
    assert_close_to_float64(attend(tensors, [300]), in_float64(tensors, [300]), device)


def test_empty_slots_change_no_bit_of_the_output(device: str) -> None:
    q, k, v, _ = inputs(40, 2, 2, 16, device)
    tight = varlen_attention(q, k, v, offsets([10, 20], device), 20)
    padded = varlen_attention(q, k, v, offsets([10, 20, 0, 0, 0], device), 20)
    assert torch.equal(tight, padded)


def test_views_of_a_fused_projection_attend_like_their_copies(device: str) -> None:
    qkv = torch.randn(24, 4, 3 * 16, device=device).to(DTYPE[device])
    fused = list(qkv.split(16, -1))
    swapped = [it.transpose(0, 1)[:24] for it in torch.randn(3, 4, 30, 16, device=device).to(DTYPE[device])]
    unaligned = [it[..., 3:19] for it in torch.randn(3, 24, 4, 20, device=device).to(DTYPE[device])]
    grad = torch.ones(1, device=device, dtype=DTYPE[device]).expand(24, 4, 16)
    for views in (fused, swapped, unaligned):
        copies = [view.contiguous() for view in views]
        assert_same_bits(attend([*views, grad], [9, 10]), attend([*copies, grad.contiguous()], [9, 10]))


@pytest.mark.parametrize("cp_rank", [0, 1, 3])
def test_a_context_parallel_rank_has_its_rows_of_the_whole(device: str, cp_rank: int) -> None:
    """Multi-latent attention's head dimension, keys taken out of rows that are gathered rank by rank."""
    lengths, cp_size = [64, 0, 8, 24], 4
    total = sum(lengths) + 2 * cp_size
    q, k, v, grad = inputs(total, 4, 2, 192, device)
    packed = offsets(lengths, device)
    held = [thd_partition_indices(packed, total, cp_size, rank) for rank in range(cp_size)]
    gathered = torch.cat(held)
    of_queries, of_keys, keys, _ = torch.ops.megagraph.thd_context_keys(packed, total, cp_size, cp_rank)
    seen_key, seen_value = (t[gathered][keys] for t in (k, v))
    chunk = max(lengths) // (2 * cp_size)
    longest = chunk * (2 * cp_size - cp_rank)
    ours = varlen_attention(q[held[cp_rank]], seen_key, seen_value, (of_queries, of_keys), (chunk, longest))
    whole = in_float64([q, k, v, grad], lengths)[0]
    rows = held[cp_rank].cpu().long()[: sum(lengths) // cp_size]
    assert_close_to_float64([ours[: rows.numel()]], [whole[rows]], device)
    assert not ours[rows.numel() :].any()


@pytest.mark.gpu
def test_runs_repeat_bit_for_bit_in_deterministic_mode() -> None:
    assert torch.are_deterministic_algorithms_enabled()
    queries, keys = [500, 500, 0, 24, 24], [1500, 2500, 0, 72, 120]
    to_keys, lengths = inputs(1100, 8, 2, 128, "cuda", keys=4300), [1000, 0, 1, 2047, 512]
    tensors = inputs(4096, 8, 2, 128, "cuda")
    first, first_to_keys = attend(tensors, lengths, slack=1), attend(to_keys, queries, keys)
    for _ in range(5):
        assert_same_bits(attend(tensors, lengths, slack=1), first)
        assert_same_bits(attend(to_keys, queries, keys), first_to_keys)


def test_gradcheck_of_the_cpu_reference() -> None:
    q, k, v = (torch.randn(7, n, 3, dtype=torch.float64, requires_grad=True) for n in (2, 1, 1))

    ends = offsets([1, 0, 4])
    assert torch.autograd.gradcheck(lambda *qkv: varlen_attention(*qkv, ends, 4, causal=True), (q, k, v))
