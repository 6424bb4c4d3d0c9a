# SPDX-License-Identifier: Apache-2.0
"""Ops over packs: refusals by name, sound registration, no graph break or wait; attention beside float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from notes import told
from offsets import offsets
from same_bits import assert_close_to_float64, assert_same_bits
from test_rope import LAYOUTS, frequencies, tables
from torch import Tensor, zeros
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from megagraph import _C as _C  # registers the ops
from megagraph.packs import ops
from megagraph.packs.ops import rope_mla, thd_partition_indices

CORE = torch.ops.megagraph
zero_tail = CORE.zero_tail
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}  # what there is attention for
int32, MOST = torch.int32, 2**31 - 1
Given = dict[str, Any]


def some(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, math.prod(shape)).view(shape)


def both_tables(*shape: int) -> dict[str, Tensor]:
    return {"cos": some(*shape), "sin": some(*shape)}


Q, KV, K_PE, QKV = some(9, 2, 12), some(9, 2, 10), some(9, 1, 8), some(9, 2, 16)
OFFSETS = offsets([4, 0, 3])
ROPE = {**both_tables(8, 8), "cu_seqlens_padded": OFFSETS}
WHOLE, SHARED = {"cu_seqlens_padded": offsets([8]), "total_tokens": 8, "cp_size": 2}, offsets([8, 0, 16])
# Of every op, arguments that fit.
FITTING: dict[str, Given] = {
    "pad_cu_seqlens": {"cu_seqlens": OFFSETS, "capacity": 8},
    "thd_partition_indices": {**WHOLE, "cp_rank": 0},
    "thd_gathered_rows": WHOLE,
    "thd_context_keys": {**WHOLE, "cp_rank": 0},
    "zero_tail": {"x": some(9, 2), "cu_seqlens": OFFSETS, "tokens": 3},
    "zero_tail_": {"xs": [some(9, 2), some(8)], "cu_seqlens": OFFSETS},
    "rope_thd": {"tensors": [Q, K_PE], **ROPE},
    "rope_thd_backward": {"grads": [Q, K_PE], **ROPE},
    "rope_mla_": {"q": Q, "kv": KV, "k_pe": K_PE, "v_dim": 6, **ROPE},
    "rope_mla_backward": {"dq": Q, "dk": Q, "dv": some(9, 2, 6), **ROPE},
    "varlen_attention": {
        **{"q": QKV, "k": QKV, "v": QKV, "cu_seqlens_q": offsets([4, 0, 5]), "max_seqlen_q": 8},
        **{"cu_seqlens_k": offsets([4, 0, 5]), "max_seqlen_k": 8},  # no tail: softmax_lse is undefined there
    },
}
MORE: list[tuple[str, Given]] = [
    *((op, {}) for op in FITTING),
    ("pad_cu_seqlens", {"end": 9}),
    ("thd_partition_indices", {"cp_size": 1}),
    ("thd_gathered_rows", {"cu_seqlens_padded": SHARED, "total_tokens": 32, "cp_size": 4}),
    ("thd_context_keys", {"cu_seqlens_padded": SHARED, "total_tokens": 32, "cp_size": 4, "cp_rank": 3}),
    ("zero_tail", {"tokens": 12}),
    *((op, LAYOUTS[layout]) for op in ("rope_thd", "rope_thd_backward") for layout in list(LAYOUTS)[1:]),
    ("varlen_attention", {"q": some(7, 4, 16), "cu_seqlens_q": offsets([2, 0, 5]), "max_seqlen_q": 5}),
]
LEAVES = {"zero_tail": ["x"], "rope_thd": ["tensors"], "varlen_attention": ["q", "k", "v"]}


def moved(value: Any, device: str, dtype: torch.dtype) -> Any:
    """With its strides; float32 becomes of the type."""
    if isinstance(value, list):
        return [moved(item, device, dtype) for item in value]
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    dtype = dtype if value.dtype is torch.float32 else value.dtype
    kept = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=device)
    return kept.copy_(value)  # `to()` would make a dense one of it


def arguments(op: str, change: Given, device: str) -> Given:
    """What fits but for a change."""
    dtype = DTYPE[device] if op.startswith("varlen_attention") else torch.float32
    return {name: moved(it, device, dtype) for name, it in {**FITTING[op], **change}.items()}


REFUSED: list[tuple[str, Given, str]] = [
    ("pad_cu_seqlens", {"capacity": 2}, "the pack holds 3 documents, more than the capacity of 2"),
    ("pad_cu_seqlens", {"end": 2**31}, "end must be a row that int32 can name, got 2147483648"),
    ("pad_cu_seqlens", {"cu_seqlens": zeros(2, 3, dtype=int32)}, r"must be 1-D with .* shape \[2, 3\]"),
    ("pad_cu_seqlens", {"cu_seqlens": zeros(0, dtype=int32)}, r"with at least one entry, got shape \[0\]"),
    ("pad_cu_seqlens", {"cu_seqlens": OFFSETS.long()}, "must be int32, got Long"),
    ("pad_cu_seqlens", {"cu_seqlens": OFFSETS[::2]}, "must be contiguous"),
    ("thd_partition_indices", {"cp_rank": 2}, "need 0 <= cp_rank < cp_size, got cp_rank 2 and cp_size 2"),
    ("thd_partition_indices", {"cp_rank": -1}, "need 0 <= cp_rank < cp_size, got cp_rank -1 and cp_size 2"),
    ("thd_partition_indices", {"cp_size": 0}, "need 0 <= cp_rank < cp_size, got cp_rank 0 and cp_size 0"),
    ("thd_partition_indices", {"total_tokens": 9}, "total_tokens 9 is not a multiple of cp_size 2"),
    ("thd_partition_indices", {"total_tokens": 2**31}, "total_tokens 2147483648 does not fit int32"),
    *(
        (op, change, message)
        for op in ("thd_gathered_rows", "thd_context_keys")
        for change, message in (
            ({"cp_size": 1}, "expected several ranks, got cp_size 1"),
            ({"total_tokens": 9}, "total_tokens 9 is not a multiple of"),
            ({"cp_size": 0}, "got cp_rank 0 and cp_size 0"),
        )
    ),
    ("thd_context_keys", {"cp_rank": 2}, "got cp_rank 2 and cp_size 2"),
    ("zero_tail", {"x": zeros(())}, "x must have a token dimension"),
    ("zero_tail", {"tokens": -1}, "tokens must not be negative, got -1"),
    ("zero_tail", {"cu_seqlens": OFFSETS.long()}, "cu_seqlens must be int32, got Long"),
    ("zero_tail_", {"xs": [zeros(2, device="meta")]}, "all tensors must be on one device, got meta and"),
    ("zero_tail_", {"xs": [some(4, 4).t()]}, "zero_tail_: tensors must be contiguous"),
    *(("rope_thd", {it: None}, f"rope_thd: {it} must be a tensor, got None") for it in ROPE),
    ("varlen_attention", {"v": None}, "varlen_attention: v must be a tensor, got None"),
    ("varlen_attention", {"cu_seqlens_k": None}, "cu_seqlens of keys must be a tensor, got None"),
    *(("rope_thd", {"tensors": [Q] * it}, f"between 1 and 4 tensors a call, got {it}") for it in (0, 5)),
    ("rope_thd", {"interleaved": True, "mla_interleaved": True}, "mla_interleaved exclude each other"),
    ("rope_thd", both_tables(8, 3), "rotary_dim must be even, got 3"),
    ("rope_thd", {"tensors": [Q[0]]}, r"expected \[tokens, heads, head_dim\], got shape \[2, 12\]"),
    ("rope_thd", {"tensors": [Q, Q[1:]]}, "all tensors need the same number of tokens, got 8 and 9"),
    ("rope_thd", both_tables(8, 10), "rotary_dim 10 is larger than head_dim 8"),
    ("rope_thd", {"tensors": [Q.bfloat16()]}, "the tensors' dtype BFloat16, got Float and Float"),
    *(
        (op, change, message)
        for op in ("rope_thd", "rope_mla_")
        for change, message in (
            ({"cos": zeros(8)}, r"must both be \[positions, rotary_dim\], got \[8\] and \[8, 8\]"),
            ({"cos": some(8, 8).t()}, "cos and sin must be contiguous"),
            (dict.fromkeys(("cos", "sin"), zeros(8, 8).int()), "expected a floating dtype, got Int"),
            ({"cp_rank": 1}, "need 0 <= cp_rank < cp_size, got cp_rank 1 and cp_size 1"),
            ({"cu_seqlens_padded": zeros(2)}, "cu_seqlens must be int32, got Float"),
            ({"sin": zeros(8, 8, device="meta")}, "all tensors must be on one device"),
        )
    ),
    ("rope_mla_", dict.fromkeys(("q", "kv", "k_pe")), "expected queries, or keys and values, or both"),
    ("rope_mla_", {"k_pe": None}, "kv and k_pe belong together"),
    ("rope_mla_", both_tables(8, 3), "rotary_dim must be even, positive and at most 256, got 3"),
    ("rope_mla_", both_tables(8, 258), "rotary_dim must be even, positive and at most 256, got 258"),
    ("rope_mla_", {"q": Q[0]}, r"expected \[tokens, heads, dim\], got shape \[2, 12\]"),
    ("rope_mla_", {"q": Q[1:]}, "all tensors need the same number of tokens, got 8 and 9"),
    ("rope_mla_", {"q": some(9, 2, 6)}, "rotary_dim 8 is larger than the queries' dimension 6"),
    ("rope_mla_", {"q": some(9, 2, 24)[..., ::2]}, "written in place and must be dense"),
    ("rope_mla_", {"q": some(12, 2, 9).permute(2, 1, 0)}, "last dimension must be contiguous"),
    ("rope_mla_", {"k_pe": some(9, 2, 8)}, r"k_pe must be \[tokens, 1, 8\]"),
    ("rope_mla_", {"v_dim": 11}, "v_dim must lie within kv's 10 dimensions, got 11"),
    ("rope_mla_", {"q": Q.bfloat16()}, "must have the tensors' dtype BFloat16, got Float and Float"),
    ("varlen_attention", {"q": QKV[:, 0]}, r"expected \[tokens, heads, head_dim\], got shape \[9, 16\]"),
    ("varlen_attention", {"k": QKV[1:]}, "need the same number of tokens, got 9, 8 and 9"),
    ("varlen_attention", {"k": some(9, 2, 8)}, "need one head_dim, got 16, 8 and 16"),
    ("varlen_attention", {"v": some(9, 1, 16)}, "k and v need as many heads, got 2 and 1"),
    ("varlen_attention", {"q": some(9, 3, 16)}, "3 query heads are no multiple of 2 key heads"),
    ("varlen_attention", {"k": QKV.double()}, r"q, k and v need one dtype, got \w+ and Double"),
    ("varlen_attention", dict.fromkeys("qkv", QKV.long()), "expected a floating dtype .*, got Long"),
    ("varlen_attention", {"cu_seqlens_q": OFFSETS.long()}, "cu_seqlens must be int32, got Long"),
    ("varlen_attention", {"max_seqlen_q": -1}, "max_seqlen must not be negative, got -1"),
    ("varlen_attention", {"cu_seqlens_k": offsets([9])}, "as many documents for .*, got 3 and 1"),
]


@pytest.mark.parametrize(("op", "change", "message"), REFUSED, ids=[str(at) for at in range(len(REFUSED))])
def test_arguments_that_do_not_fit_are_refused(device: str, op: str, change: Given, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(CORE, op)(**arguments(op, change, device))


UNCUT = r"document 0 has length 6, not a multiple of 2 \* cp_size = 4"
LONG = "row 4 has position 4, past the 4 positions of the tables"


@pytest.mark.parametrize(
    ("op", "ends", "change", "message"),
    [
        ("thd_partition_indices", [0, 6, 8], {}, UNCUT),
        ("thd_partition_indices", [0, 4, 2], {}, "document 1 has length -2; offsets must not decrease"),
        ("thd_partition_indices", [1, 8], {}, "the first offset must be 0, got 1"),
        ("thd_partition_indices", [0, 12], {}, "the last offset 12 is past the 8 physical tokens"),
        ("thd_gathered_rows", [0, 6], {}, UNCUT),
        ("thd_context_keys", [0, 6], {"cp_rank": 1}, UNCUT),
        ("rope_thd", [0, 11], {}, "the last offset 11 is past the 9 physical tokens"),
        ("rope_thd", [0, 6], {"cp_size": 2}, UNCUT),
        ("rope_thd", [0, 5], both_tables(4, 8), LONG),
        ("rope_mla_", [0, 5], both_tables(4, 8), LONG),
        ("varlen_attention", [0, 9], {}, "document 0 has length 9, more than max_seqlen 8"),
        ("varlen_attention", [0, 4, 11], {}, "the last offset 11 is past the 9 physical tokens"),
    ],
)
def test_offsets_that_misfit_raise_on_a_cpu(op: str, ends: list[int], change: Given, message: str) -> None:
    """On a GPU they stay on the device, unread."""
    names = [name for name in FITTING[op] if name.startswith("cu_seqlens")]
    packed = dict.fromkeys(names, torch.tensor(ends, dtype=int32))
    with pytest.raises(IndexError if message is LONG else ValueError, match=message):
        getattr(CORE, op)(**arguments(op, {**packed, **change}, "cpu"))


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layout: expected one of neox, interleaved, .*got 'gptj'"):
        ops.rope_thd([Q], ROPE["cos"], ROPE["sin"], OFFSETS, layout="gptj")


@pytest.mark.gpu
def test_what_flash_attention_cannot_do_is_refused() -> None:
    cu_seqlens = offsets([4], "cuda")
    single = zeros(6, 2, 16, device="cuda")
    with pytest.raises(ValueError, match="must be float16 or bfloat16, got Float"):
        ops.varlen_attention(single, single, single, cu_seqlens, 4)
    odd = zeros(6, 2, 12, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="must be a multiple of 8, at most 256, got 12"):
        ops.varlen_attention(odd, odd, odd, cu_seqlens, 4)


@pytest.mark.parametrize("lengths, spare, end", [([], 2, None), ([0, 7, 0], 0, 9), ([1] * 999, 1999, MOST)])
def test_added_offsets_repeat_the_last_one_or_the_physical_end(
    device: str, lengths: list[int], spare: int, end: int | None
) -> None:
    """Of more documents than one block of threads, too."""
    given = offsets(lengths, device)
    padded = CORE.pad_cu_seqlens(given, len(lengths) + spare, end)
    assert padded.tolist() == given.tolist() + [sum(lengths) if end is None else end] * spare
    assert (padded.dtype, padded.device) == (int32, given.device) and padded.data_ptr() != given.data_ptr()


# Of torch 2.15: it reads .grad of the copies that it makes of our tensors, and is told off by torch.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("op", "change"), MORE, ids=[f"{op}{at}" for at, (op, _) in enumerate(MORE)])
def test_opcheck(device: str, op: str, change: Given) -> None:
    given = arguments(op, change, device)
    for leaf in (given[name] for name in LEAVES.get(op, [])):
        for tensor in leaf if isinstance(leaf, list) else [leaf]:
            tensor.requires_grad_()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    checks = checks[:3] if op == "rope_mla_" else checks  # what both writes and returns a list is not traced
    torch.library.opcheck(getattr(CORE, op).default, (), given, test_utils=checks)
    if op == "varlen_attention":
        out, lse = (made.detach() for made in CORE.varlen_attention(**given))
        saved = {name: it.detach() if isinstance(it, Tensor) else it for name, it in given.items()}
        saved |= {"grad": torch.ones_like(out), "out": out, "softmax_lse": lse}
        torch.library.opcheck(CORE.varlen_attention_backward.default, (), saved)


STEPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "thd_partition_indices": lambda cu, x: ops.thd_partition_indices(cu, x.size(0), 2, 1),
    "rope_thd": lambda cu, x: torch.cat(
        ops.rope_thd([x * 2, x[:, :1]], *(it.contiguous() for it in x.detach()[..., :8].unbind(1)), cu), 1
    ),
    "varlen_attention": lambda cu, x: ops.varlen_attention(x * 2, x, x, cu, 16).square(),
}


@pytest.mark.parametrize("op", STEPS)
def test_compiles_without_a_graph_break(device: str, op: str) -> None:
    compiled = torch.compile(STEPS[op], fullgraph=True, backend="aot_eager")
    for lengths in ([4, 0, 8], [12], [4] * 5):
        x = torch.randn(sum(lengths) + 2, 2, 16, device=device).to(DTYPE[device]).requires_grad_()
        outs = [step(offsets(lengths, device), x) for step in (STEPS[op], compiled)]
        assert_same_bits(*outs)
        if isinstance(outs[0], Tensor) and outs[0].requires_grad:
            assert_same_bits(*(torch.autograd.grad(out.sum(), x) for out in outs))


ONCE: dict[str, Callable[..., Tensor]] = {
    "megagraph::rope_thd_backward is not implemented": lambda x, *how: ops.rope_thd([x], *how)[0],
    "megagraph::rope_mla_backward is not implemented": lambda x, *how: rope_mla(x * 1, None, None, how)[0],
    "megagraph::varlen_attention_backward is not implemented": (
        lambda x, _cos, _sin, ends: ops.varlen_attention(x, x, x, ends, 5)
    ),
}


@pytest.mark.parametrize("message", ONCE)
def test_a_second_derivative_is_an_error(device: str, message: str) -> None:
    x = torch.randn(6, 2, 16, device=device).to(DTYPE[device]).requires_grad_()
    how = *tables(frequencies(8, 8, "mla_interleaved", device), x.dtype), offsets([5], device)
    (grad,) = torch.autograd.grad(ONCE[message](x, *how).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=message):  # bug: of one op this was a zero, and no error
        torch.autograd.grad(grad.sum() + x.sum(), x)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_host_waits_for_nothing() -> None:
    few, shared, packed = (offsets(it, "cuda") for it in ([3, 0, 4], [8, 0, 16], [20, 30]))
    q, k, v = (torch.randn(64, n, 64, device="cuda").bfloat16().requires_grad_() for n in (4, 2, 2))
    grad = torch.randn_like(q)
    with told(torch.cuda.set_sync_debug_mode, "error", "default"):
        CORE.pad_cu_seqlens(few, 5, 9)
        CORE.thd_gathered_rows(shared, 32, 4)
        CORE.thd_context_keys(shared, 32, 4, 3)
        torch.autograd.grad(ops.varlen_attention(q, k, v, packed, 32), (q, k, v), grad)


def assert_cut(found: Tensor, given: Tensor, rows: int) -> None:
    """The first rows are those given, and the others zero."""
    assert torch.equal(found[:rows], given[:rows]) and not found[rows:].any()


@settings(max_examples=80)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 3, 300]), max_size=5),
    rows_past_the_pack=st.sampled_from([0, 1, 50]),
    tokens=st.sampled_from([0, 1, 7, 300, 1000]),
    width=st.sampled_from([0, 1, 3, 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_poison_in_the_tail_reaches_neither_the_result_nor_the_gradient(
    device: str, lengths: list[int], rows_past_the_pack: int, tokens: int, width: int, dtype: torch.dtype
) -> None:
    end = sum(lengths)
    x = torch.randn(end + rows_past_the_pack, width, device=device).to(dtype)
    x[end:] = torch.nan
    x.requires_grad_()
    kept = min(end, tokens)

    out = zero_tail(x, offsets(lengths, device), tokens)
    assert out.shape == (tokens, width)
    assert_cut(out, x, kept)
    grad = torch.randn(tokens, width, device=device).to(dtype)
    grad[kept:] = torch.nan
    (x_grad,) = torch.autograd.grad(out, x, grad)
    assert_cut(x_grad, grad, kept)


def test_strided_views_and_integers_are_copied_in_order(device: str) -> None:
    x = torch.arange(48, device=device).view(8, 6).t()[1:]  # [5, 8], neither contiguous nor aligned
    out = zero_tail(x, offsets([2, 1], device), 4)
    assert out.is_contiguous()
    assert out.tolist() == [*x[:3].tolist(), [0] * 8]


def test_second_derivative_is_zero_tail_again(device: str) -> None:
    x = torch.randn(6, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: zero_tail(x, offsets([4], device), 5), x)


def test_in_place_op_zeroes_several_tails_and_bumps_the_version(device: str) -> None:
    xs = [torch.full(shape, torch.nan, device=device) for shape in ((7, 4), (5, 3), (2, 2), (0, 2))]
    for x in xs:
        x[:3] = 1
    CORE.zero_tail_(xs, offsets([1, 2], device))
    for x in xs:
        assert_cut(x, torch.ones_like(x), 3)
    x, factor = torch.ones(4, device=device), torch.ones(4, device=device, requires_grad=True)
    product = (x * factor).sum()
    CORE.zero_tail_([x], offsets([1], device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_forward_mode_is_refused_and_so_is_what_has_no_backward(device: str) -> None:
    with pytest.raises(RuntimeError, match="has no backward: use zero_tail"):
        CORE.zero_tail_([zeros(4, device=device, requires_grad=True)], offsets([2], device))
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(torch.randn(3, 2, device=device), torch.ones(3, 2, device=device))
        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            zero_tail(dual, offsets([3], device), 4)


# -- index maps of packs that context-parallel ranks share, against plain Python ---------------------


def zigzag(document_lengths: list[int], tail: int, cp_size: int, cp_rank: int) -> list[int]:
    """The layout in plain Python: deal chunks r and 2 * cp_size - 1 - r of each document to rank r."""
    rows: list[int] = []
    start = 0
    for length in document_lengths:
        document = list(range(start, start + length))
        chunk = length // (2 * cp_size)
        chunks = [document[i * chunk : (i + 1) * chunk] for i in range(2 * cp_size)]
        rows += document if cp_size == 1 else chunks[cp_rank] + chunks[2 * cp_size - 1 - cp_rank]
        start += length
    piece = tail // cp_size
    return rows + list(range(start + cp_rank * piece, start + (cp_rank + 1) * piece))


@settings(max_examples=60)
@given(
    cp_size=st.sampled_from([1, 2, 3, 4, 8]),
    units=st.lists(st.sampled_from([0, 0, 1, 2, 5, 300]), max_size=7),
    tail_units=st.sampled_from([0, 1, 40]),
    empty_slots=st.integers(0, 4),
)
@example(cp_size=2, units=[], tail_units=0, empty_slots=0)
def test_rows_are_dealt_out_in_zigzag_each_exactly_once_and_gathered_rows_map_both_ways(
    device: str, cp_size: int, units: list[int], tail_units: int, empty_slots: int
) -> None:
    lengths = [unit * (1 if cp_size == 1 else 2 * cp_size) for unit in units] + [0] * empty_slots
    tail = tail_units * cp_size
    total = sum(lengths) + tail
    found = [thd_partition_indices(offsets(lengths, device), total, cp_size, rank) for rank in range(cp_size)]
    assert all(rows.dtype is torch.int32 for rows in found)
    expected = [zigzag(lengths, tail, cp_size, rank) for rank in range(cp_size)]
    assert [rows.tolist() for rows in found] == expected
    physical = [row for rows in expected for row in rows]
    assert sorted(physical) == list(range(total))
    if cp_size > 1:
        to_gathered, to_physical = CORE.thd_gathered_rows(offsets(lengths, device), total, cp_size).tolist()
        assert to_physical == physical
        assert [physical[row] for row in to_gathered] == list(range(total))


@settings(max_examples=60)
@given(
    cp_size=st.sampled_from([2, 3, 4, 8]),
    units=st.lists(st.sampled_from([0, 0, 1, 2, 5, 60]), max_size=7),
    tail_units=st.sampled_from([0, 1, 40]),
)
def test_each_chunk_sees_up_to_its_end(device: str, cp_size: int, units: list[int], tail_units: int) -> None:
    lengths, tail = [unit * 2 * cp_size for unit in units], tail_units * 2 * cp_size
    total = sum(lengths) + tail
    physical = [row for rank in range(cp_size) for row in zigzag(lengths, tail, cp_size, rank)]
    for rank in range(cp_size):
        maps = CORE.thd_context_keys(offsets(lengths, device), total, cp_size, rank)
        queries, seen, keys, places = (found.tolist() for found in maps)
        local = zigzag(lengths, tail, cp_size, rank)
        expected, start = [], 0
        for document, length in enumerate(lengths):
            chunk = length // (2 * cp_size)
            for half, at in enumerate((rank, 2 * cp_size - 1 - rank)):
                index = 2 * document + half
                rows = range(start + at * chunk, start + (at + 1) * chunk)
                assert local[queries[index] : queries[index + 1]] == list(rows)
                assert seen[index] == len(expected)
                expected += range(start, rows.stop)
            start += length
        assert (queries[-1], seen[-1]) == (len(local) - tail // cp_size, len(expected))
        assert [physical[row] for row in keys[: len(expected)]] == expected
        assert all(0 <= row < total for row in keys)
        assert len(keys) == total // (2 * cp_size) * (2 * cp_size + 1)
        # Each place leads back to its row, and each key is the place of one row of one chunk.
        for row, found in enumerate(zip(*places, strict=True)):
            assert all(keys[place] == row for place in found if place < len(keys))
        used = [place for of_chunk in places for place in of_chunk if place < len(keys)]
        assert sorted(used) == list(range(len(expected)))


# -- attention, beside one score matrix of all documents in float64 ------------------------------------

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
    out = ops.varlen_attention(*leaves, *ends, **options)
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
    """With as many keys as queries, or its own: more in front, or fewer, which first queries do not see."""
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
    tight = ops.varlen_attention(q, k, v, offsets([10, 20], device), 20)
    assert torch.equal(tight, ops.varlen_attention(q, k, v, offsets([10, 20, 0, 0, 0], device), 20))


def test_views_of_a_fused_projection_attend_like_their_copies(device: str) -> None:
    fused = list(torch.randn(24, 4, 3 * 16, device=device).to(DTYPE[device]).split(16, -1))
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
    of_queries, of_keys, keys, _ = torch.ops.megagraph.thd_context_keys(packed, total, cp_size, cp_rank)
    seen_key, seen_value = (t[torch.cat(held)][keys] for t in (k, v))
    chunk = max(lengths) // (2 * cp_size)
    most = chunk * (2 * cp_size - cp_rank)
    ours = ops.varlen_attention(q[held[cp_rank]], seen_key, seen_value, (of_queries, of_keys), (chunk, most))
    rows = held[cp_rank].cpu().long()[: sum(lengths) // cp_size]
    assert_close_to_float64([ours[: rows.numel()]], [in_float64([q, k, v, grad], lengths)[0][rows]], device)
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
    assert torch.autograd.gradcheck(lambda *qkv: ops.varlen_attention(*qkv, ends, 4, causal=True), (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):  # bug: its products were rounded
        rounded = ops.varlen_attention(*(it.float() for it in (q, k, v)), ends, 4, causal=True)
    torch.testing.assert_close(rounded, ops.varlen_attention(q, k, v, ends, 4, causal=True).float())
    ops.varlen_attention(q[:, :0], k, v, ends, 4).sum().backward()  # bug: without heads, the process ended
    assert k.grad is not None and not k.grad.any()
