# SPDX-License-Identifier: Apache-2.0
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from offsets import offsets
from same_bits import assert_same_bits
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megagraph.packs.ops import (
    thd_context_keys,
    thd_partition_indices,
    varlen_attention,
)

# The error that a result may have against float64, in units of eps(dtype) * max(1, max|expected|):
# sums of up to 300 products in float32, and FlashAttention's bfloat16 probabilities.
ERROR_UNITS = {"cpu": 32, "cuda": 8}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


def keyed_inputs(rows: int, keys: int, heads: int, groups: int, dim: int, device: str) -> list[Tensor]:
    """q, k, v and a gradient of the output."""
    shapes = (rows, heads), (keys, groups), (keys, groups), (rows, heads)
    return [torch.randn(*shape, dim, device=device).to(DTYPE[device]) for shape in shapes]


def inputs(rows: int, heads: int, groups: int, dim: int, device: str) -> list[Tensor]:
    """As many keys as queries."""
    return keyed_inputs(rows, rows, heads, groups, dim, device)


def attend_alone(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lengths: list[int], *, scale: float | None, causal: bool
) -> list[Tensor]:
    """Output and gradients in float64 on the host, each document attended to by itself."""
    leaves = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    parts = [leaves[0][:0]]
    for start, stop in pairwise(accumulate(lengths, initial=0)):
        if start < stop:
            q_HTD, k_GTD, v_GTD = (leaf[None, start:stop].transpose(1, 2) for leaf in leaves)
            attended = scaled_dot_product_attention(
                q_HTD, k_GTD, v_GTD, is_causal=causal, scale=scale, enable_gqa=True
            )
            parts.append(attended[0].transpose(0, 1))
    out = torch.cat(parts)
    grad_out = grad.cpu().double()[: sum(lengths)]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out, materialize_grads=True)]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    lengths: list[int],
    max_seqlen: int,
    *,
    scale: float | None = None,
    causal: bool = True,
) -> list[Tensor]:
    """Output and gradients of the op."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    cu_seqlens = offsets(lengths, q.device.type)
    out = varlen_attention(*leaves, cu_seqlens, max_seqlen, softmax_scale=scale, causal=causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def seen_keys(queries: list[int], keys: list[int], *, causal: bool) -> Tensor:
    """Which query sees which key, bool [queries, keys]: of its own document, the last query all of them."""
    mask = torch.zeros(sum(queries), sum(keys), dtype=torch.bool)
    row = column = 0
    for count, seen in zip(queries, keys, strict=True):
        block = torch.ones(count, seen, dtype=torch.bool)
        mask[row : row + count, column : column + seen] = block.tril(seen - count) if causal else block
        row, column = row + count, column + seen
    return mask


def attend_to_keys_in_float64(
    tensors: list[Tensor], queries: list[int], keys: list[int], *, causal: bool
) -> list[Tensor]:
    """Output and gradients on the host, of one score matrix of all documents, without their tails."""
    ends = (sum(queries), sum(keys), sum(keys), sum(queries))
    *leaves, grad = (
        t.detach()[:end].cpu().double().requires_grad_() for t, end in zip(tensors, ends, strict=True)
    )
    out = scaled_dot_product_attention(
        *(leaf[None].transpose(1, 2) for leaf in leaves),
        attn_mask=seen_keys(queries, keys, causal=causal),
        enable_gqa=True,
    )[0].transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.detach())]


def attend_to_keys(
    tensors: list[Tensor], queries: list[int], keys: list[int], *, causal: bool = True, slack: int = 0
) -> list[Tensor]:
    """Output and gradients of the op."""
    *leaves, grad = (t.detach().requires_grad_(place < 3) for place, t in enumerate(tensors))
    of_queries, of_keys = (
        (offsets(lengths, grad.device.type), max(lengths) + slack) for lengths in (queries, keys)
    )
    out = varlen_attention(*leaves, *zip(of_queries, of_keys, strict=True), causal=causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_close_to_float64(actual: list[Tensor], expected: list[Tensor], device: str) -> None:
    assert len(actual) == len(expected)
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=False):
        if e.numel() == 0:
            continue
        bound = ERROR_UNITS[device] * torch.finfo(a.dtype).eps * max(1.0, e.abs().max().item())
        error = (a[: e.size(0)].cpu().double() - e).abs().max().item()
        assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}"


@settings(max_examples=25)
@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 2, 17, 64]), max_size=6),
    tail=st.sampled_from([0, 1, 130]),
    slack=st.sampled_from([0, 3, 100]),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
)
# FlashAttention took this for decoding, and refused the tail.
@example(lengths=[1], tail=1, slack=0, heads=(4, 2), causal=False, scale=None)
@example(lengths=[], tail=0, slack=0, heads=(4, 2), causal=True, scale=None)
@example(lengths=[], tail=130, slack=100, heads=(4, 2), causal=True, scale=None)
@example(lengths=[0, 0], tail=0, slack=3, heads=(4, 2), causal=True, scale=None)
@example(lengths=[0, 0], tail=1, slack=0, heads=(4, 2), causal=True, scale=None)
def test_each_document_attends_alone_and_poison_in_the_tail_changes_no_bit(
    device: str,
    lengths: list[int],
    tail: int,
    slack: int,
    heads: tuple[int, int],
    causal: bool,
    scale: float | None,
) -> None:
    end = sum(lengths)
    max_seqlen = max(lengths, default=0) + slack
    clean = inputs(end + tail, *heads, 16, device)
    poisoned = [t.clone() for t in clean]
    for t in poisoned:
        t[end:] = torch.nan
    actual = attend(*clean, lengths, max_seqlen, scale=scale, causal=causal)
    expected = attend_alone(*clean, lengths, scale=scale, causal=causal)
    assert_close_to_float64(actual, expected, device)
    for from_clean, from_poisoned in zip(
        actual, attend(*poisoned, lengths, max_seqlen, scale=scale, causal=causal), strict=True
    ):
        assert torch.equal(from_poisoned, from_clean)
        assert torch.equal(from_clean[end:], torch.zeros_like(from_clean[end:]))


@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 2, 64), (2, 2, 128), (1, 1, 8)])
def test_one_giant_document(device: str, heads: int, groups: int, dim: int) -> None:
    tensors = inputs(300, heads, groups, dim, device)
    actual = attend(*tensors, [300], 300)
    assert_close_to_float64(actual, attend_alone(*tensors, [300], scale=None, causal=True), device)


def test_empty_slots_change_no_bit_of_the_output(device: str) -> None:
    q, k, v, _ = inputs(40, 2, 2, 16, device)
    tight = varlen_attention(q, k, v, offsets([10, 20], device), 20)
    padded = varlen_attention(q, k, v, offsets([10, 20, 0, 0, 0], device), 20)
    assert torch.equal(tight, padded)


def test_padding_inside_a_document_changes_no_valid_row_under_the_causal_mask(device: str) -> None:
    tensors = inputs(20, 2, 2, 16, device)
    tensors[-1][15:] = 0
    padded = attend(*tensors, [20], 20)
    tight = attend(*tensors, [15], 20)
    for with_padding, without in zip(padded, tight, strict=True):
        torch.testing.assert_close(with_padding[:15], without[:15])


def test_views_of_a_fused_projection_attend_like_their_copies(device: str) -> None:
    qkv = torch.randn(24, 4, 3 * 16, device=device).to(DTYPE[device])
    fused = list(qkv.split(16, -1))
    heads_first = [
        torch.randn(4, 30, 16, device=device).to(DTYPE[device]).transpose(0, 1)[:24] for _ in range(3)
    ]
    unaligned = [torch.randn(24, 4, 20, device=device).to(DTYPE[device])[..., 3:19] for _ in range(3)]
    grad = torch.ones(1, device=device, dtype=DTYPE[device]).expand(24, 4, 16)
    for views in (fused, heads_first, unaligned):
        copies = [view.contiguous() for view in views]
        assert_same_bits(attend(*views, grad, [9, 10], 10), attend(*copies, grad.contiguous(), [9, 10], 10))


@settings(max_examples=25)
@given(
    documents=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 17, 64]), st.sampled_from([0, 1, 130])), min_size=1
    ),
    tails=st.sampled_from([(0, 0), (1, 3), (130, 0)]),
    slack=st.sampled_from([0, 100]),
    heads=st.sampled_from([(4, 4), (4, 2)]),
    causal=st.booleans(),
)
# One query a document, as the smallest chunks of context parallelism have.
@example(documents=[(1, 0), (1, 2), (1, 1)], tails=(1, 0), slack=0, heads=(4, 2), causal=True)
def test_queries_see_keys_up_to_the_end_and_poison_in_the_tails_changes_no_bit(
    device: str,
    documents: list[tuple[int, int]],
    tails: tuple[int, int],
    slack: int,
    heads: tuple[int, int],
    causal: bool,
) -> None:
    """Each document has as many keys as queries, or more in front of them."""
    queries = [count for count, _ in documents]
    keys = [count + (before if count else 0) for count, before in documents]
    ends = (sum(queries), sum(keys), sum(keys), sum(queries))
    clean = keyed_inputs(ends[0] + tails[0], ends[1] + tails[1], *heads, 16, device)
    poisoned = [t.clone() for t in clean]
    for t, end in zip(poisoned, ends, strict=True):
        t[end:] = torch.nan
    actual = attend_to_keys(clean, queries, keys, causal=causal, slack=slack)
    if ends[0]:
        expected = attend_to_keys_in_float64(clean, queries, keys, causal=causal)
        assert_close_to_float64(actual, expected, device)
    from_poisoned = attend_to_keys(poisoned, queries, keys, causal=causal, slack=slack)
    for one, other, end in zip(actual, from_poisoned, (ends[0], *ends[:3]), strict=True):
        assert torch.equal(one, other)
        assert not one[end:].any()


@pytest.mark.parametrize("cp_rank", [0, 1, 3])
def test_a_context_parallel_rank_has_its_rows_of_the_whole(device: str, cp_rank: int) -> None:
    """Multi-latent attention's head dimension, keys taken out of rows that are gathered rank by rank."""
    lengths, cp_size = [64, 0, 8, 24], 4
    total = sum(lengths) + 2 * cp_size
    q, k, v, grad = keyed_inputs(total, total, 4, 2, 192, device)
    packed = offsets(lengths, device)
    held = [thd_partition_indices(packed, total, cp_size, rank) for rank in range(cp_size)]
    gathered = torch.cat(held)
    of_queries, of_keys, keys, _ = thd_context_keys(packed, total, cp_size, cp_rank)
    seen_key, seen_value = (t[gathered][keys] for t in (k, v))
    chunk = max(lengths) // (2 * cp_size)
    longest = chunk * (2 * cp_size - cp_rank)
    ours = varlen_attention(q[held[cp_rank]], seen_key, seen_value, (of_queries, of_keys), (chunk, longest))
    whole = attend_alone(q, k, v, grad, lengths, scale=None, causal=True)[0]
    rows = held[cp_rank].cpu().long()[: sum(lengths) // cp_size]
    assert_close_to_float64([ours[: rows.numel()]], [whole[rows]], device)
    assert not ours[rows.numel() :].any()


@pytest.mark.gpu
def test_runs_repeat_bit_for_bit_in_deterministic_mode() -> None:
    assert torch.are_deterministic_algorithms_enabled()
    queries, keys = [500, 500, 0, 24, 24], [1500, 2500, 0, 72, 120]
    to_keys, lengths = keyed_inputs(1100, 4300, 8, 2, 128, "cuda"), [1000, 0, 1, 2047, 512]
    tensors = inputs(4096, 8, 2, 128, "cuda")
    first, first_to_keys = attend(*tensors, lengths, 2048), attend_to_keys(to_keys, queries, keys)
    for _ in range(5):
        assert_same_bits(attend(*tensors, lengths, 2048), first)
        assert_same_bits(attend_to_keys(to_keys, queries, keys), first_to_keys)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_gradcheck_of_the_cpu_reference(causal: bool, groups: int) -> None:
    q, k, v = (torch.randn(7, n, 3, dtype=torch.float64, requires_grad=True) for n in (2, groups, groups))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, offsets([1, 0, 4], "cpu"), 4, causal=causal)

    assert torch.autograd.gradcheck(run, (q, k, v))
