# SPDX-License-Identifier: Apache-2.0
"""The norm for Megatron's specs, with torch's bits; grouped products, beside each expert on all rows; and
attention over a pack, each document as if it were alone."""

import enum
from collections.abc import Callable
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from offsets import pack_of
from same_bits import assert_close_to_float64, assert_same_bits
from torch import Tensor, nn

from megagraph.modules import GroupedLinear, Norm, SortedRows, VarlenAttention

HIDDEN = 48
EPS = 1e-3
TORCH = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

each_kind = pytest.mark.parametrize("normalization", TORCH)


def config(normalization: str = "LayerNorm", **changes: Any) -> Any:
    """The fields of Megatron's config that a norm reads."""
    flags = ("layernorm_zero_centered_gamma", "memory_efficient_layer_norm", "persist_layer_norm")
    fields = dict.fromkeys((*flags, "sequence_parallel"), False)
    return SimpleNamespace(normalization=normalization, **{**fields, **changes})


def results(norm: nn.Module, hidden_states: Tensor) -> list[Tensor]:
    """The output, the input's gradient and those of the parameters."""
    given = hidden_states.clone().requires_grad_()
    out = norm(given)
    grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, (given, *norm.parameters()), grad)]


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(7, 1, HIDDEN), (5, 4, 3, HIDDEN), (0, 1, HIDDEN)], ids=str)
def test_it_has_torchs_bits(normalization: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ours, theirs = Norm(config(normalization), HIDDEN, eps=EPS), TORCH[normalization](HIDDEN, eps=EPS)
    torch.manual_seed(3)
    for param in theirs.parameters():
        nn.init.normal_(param)
    ours.load_state_dict(theirs.state_dict())
    hidden_states = 3 * torch.randn(shape, device=DEVICE, dtype=dtype) + 1
    assert_same_bits(*(results(norm.to(DEVICE, dtype), hidden_states) for norm in (ours, theirs)))


@each_kind
def test_fresh_and_reset_parameters_are_torchs(normalization: str) -> None:
    ours, theirs = Norm(config(normalization), HIDDEN), TORCH[normalization](HIDDEN)
    for _ in range(2):
        assert_same_bits(dict(ours.state_dict()), dict(theirs.state_dict()))
        for param in ours.parameters():
            nn.init.normal_(param)
        ours.reset_parameters()


@each_kind
def test_a_zero_centred_scale_is_one_more_than_its_parameter(normalization: str) -> None:
    centered = Norm(config(normalization, layernorm_zero_centered_gamma=True), HIDDEN, eps=EPS)
    for _ in range(2):
        assert not any(param.any() for param in centered.parameters())
        nn.init.normal_(centered.weight)
        centered.reset_parameters()
    plain = Norm(config(normalization), HIDDEN, eps=EPS)
    offsets = torch.arange(HIDDEN) / 64  # exact, also with one added
    centered.weight.data.copy_(offsets)
    plain.weight.data.copy_(offsets + 1)
    hidden_states = torch.randn(7, 1, HIDDEN, device=DEVICE)
    assert_same_bits(*(results(norm.to(DEVICE), hidden_states) for norm in (centered, plain)))


@each_kind
@pytest.mark.parametrize("is_parallel", [False, True])
def test_parameters_are_marked_for_sequence_parallelism(normalization: str, is_parallel: bool) -> None:
    norm = Norm(config(normalization, sequence_parallel=is_parallel), HIDDEN)
    assert all(param.sequence_parallel is is_parallel for param in norm.parameters())
    # As Megatron moves models and turns them into half precision.
    norm = norm.to(DEVICE).bfloat16()
    assert all(param.sequence_parallel is is_parallel for param in norm.parameters())


def test_what_it_does_not_do_is_refused_by_name_and_a_kernel_of_apex_is_not_asked_for() -> None:
    """Megatron-LM sets `persist_layer_norm` unless it is told not to."""
    assert isinstance(Norm(config(persist_layer_norm=True), HIDDEN), Norm)
    with pytest.raises(ValueError, match="expected normalization 'LayerNorm' or 'RMSNorm', got 'L2Norm'"):
        Norm(config("L2Norm"), HIDDEN)
    with pytest.raises(ValueError, match="expected memory_efficient_layer_norm False, got True"):
        Norm(config(memory_efficient_layer_norm=True), HIDDEN)


def test_it_prints_what_it_is() -> None:
    assert repr(Norm(config("RMSNorm"), 8, eps=1e-6)) == "Norm(RMSNorm, 8, eps=1e-06)"
    norm = Norm(config(layernorm_zero_centered_gamma=True), 8)
    assert repr(norm) == "Norm(LayerNorm, 8, eps=1e-05, zero-centered)"


# -- rows sorted by expert, and grouped products -----------------------------------------------------

ROWS, EXPERTS, FEATURES, INNER = 13, 5, 8, 16
UNROUTED = (3, 11, 12)


def choices(topk: int) -> Tensor:
    """Of random experts, never of the last one; some rows have none."""
    generator = torch.Generator().manual_seed(topk)
    chosen = torch.zeros(ROWS, EXPERTS, dtype=torch.bool)
    for row in set(range(ROWS)) - set(UNROUTED):
        chosen[row, torch.randperm(EXPERTS - 1, generator=generator)[:topk]] = True
    return chosen


def linear(in_features: int, out_features: int) -> GroupedLinear:
    made = GroupedLinear(EXPERTS, in_features, out_features, dtype=torch.float32, device="cpu")
    torch.nn.init.normal_(made.weight)
    return made


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_grouped_products_are_those_of_every_expert(topk: int) -> None:
    torch.manual_seed(0)
    chosen, first, second = choices(topk), linear(FEATURES, INNER), linear(INNER, FEATURES)
    x, probs = torch.randn(ROWS, FEATURES, requires_grad=True), torch.rand(ROWS, EXPERTS, requires_grad=True)
    rows = SortedRows.of(chosen, topk)
    inner = F.gelu(first(rows.permute(x), rows.offsets)) * rows.permute_probs(probs)[:, None]
    out = rows.combine(second(inner, rows.offsets))

    expected = torch.zeros_like(out)
    for expert in range(EXPERTS):
        weighted = F.gelu(x @ first.weight[expert].T) * probs[:, expert : expert + 1]
        expected = expected + weighted @ second.weight[expert].T * chosen[:, expert : expert + 1]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert not out[list(UNROUTED)].any()
    inputs, grad = (x, probs, first.weight, second.weight), torch.randn_like(out)
    found, of_all = torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    torch.testing.assert_close(found, of_all, rtol=1e-5, atol=1e-5)
    assert not found[0][list(UNROUTED)].any() and not found[1][~chosen].any()
    assert not found[2][-1].any() and not found[3][-1].any()


def test_products_under_autocast_are_those_of_linear_layers() -> None:
    """Bug: torch's grouped product has no rule of autocast's, and refused rows that came from one with."""
    made, x = linear(FEATURES, INNER), torch.randn(EXPERTS, FEATURES)
    with torch.autocast("cpu", torch.bfloat16):
        out = made(x.bfloat16(), torch.arange(1, EXPERTS + 1, dtype=torch.int32))
        expected = [F.linear(x[i], made.weight[i]) for i in range(EXPERTS)]
    torch.testing.assert_close(out, torch.stack(expected))
    out.backward(torch.ones_like(out))
    assert made.weight.grad is not None and made.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_product_makes_its_input_again_unless_autocast_would_make_another(dtype: Any) -> None:
    made, offsets = linear(FEATURES, INNER), torch.arange(1, EXPERTS + 1, dtype=torch.int32)
    x, calls = torch.randn(EXPERTS, FEATURES, requires_grad=True), list[Tensor]()

    def doubled(x: Tensor) -> Tensor:
        calls.append(x)
        return F.linear(x, 2 * torch.eye(FEATURES))

    def grads(run: Callable[[], Tensor]) -> Any:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            out = run()
        return torch.autograd.grad(out, (x, made.weight), torch.ones_like(out))

    again = grads(lambda: made.of_made(offsets, doubled, x))
    assert len(calls) == (2 if dtype is None else 1)
    assert_same_bits(again, grads(lambda: made(doubled(x), offsets)))


def test_a_product_does_not_make_its_input_of_what_was_written_since() -> None:
    made, x = linear(FEATURES, INNER), torch.randn(EXPERTS, FEATURES)
    out = made.of_made(torch.arange(1, EXPERTS + 1, dtype=torch.int32), torch.sin, x)
    x.zero_()  # bug: the weight's gradient was another one, silently
    with pytest.raises(RuntimeError, match="was written since the forward"):
        out.sum().backward()


def test_what_lies_past_the_rows_of_experts_reaches_nothing() -> None:
    rows = SortedRows.of(choices(2), 2)
    y = torch.full((2 * ROWS, FEATURES), torch.nan)
    y[: int(rows.offsets[-1])] = 1
    out = rows.combine(y)
    assert (out[list(UNROUTED)] == 0).all() and out.isfinite().all()
    x, probs = (torch.zeros(ROWS, columns, requires_grad=True) for columns in (FEATURES, EXPERTS))
    for unsorted, permuted in ((x, rows.permute(x)), (probs, rows.permute_probs(probs))):
        grad = torch.full_like(permuted, torch.nan)
        grad[: int(rows.offsets[-1])] = 1
        (found,) = torch.autograd.grad(permuted, unsorted, grad)
        assert found.isfinite().all() and not found[list(UNROUTED)].any()


def test_rows_are_sorted_in_second_derivatives_too() -> None:
    """Bug: those that `torch.autograd.grad()` was asked for left out what had been sorted."""
    rows = SortedRows.of(choices(2)[: UNROUTED[0]], 2)
    for move, shape in ((rows.permute, (3, 1)), (lambda y: rows.combine(y * 1), (6, 1))):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(lambda x, move=move: move(x).pow(3) + x.sum(), x)


def test_gradients_of_probabilities_stay_as_they_came() -> None:
    """Bug: they were zeroed past the rows of experts, and so was the same gradient of another tensor."""
    rows, other = SortedRows.of(choices(2), 2), torch.zeros(2 * ROWS, requires_grad=True)
    beside = other * 1
    permuted = rows.permute_probs(torch.zeros(ROWS, EXPERTS, requires_grad=True))
    ((permuted + beside) * torch.ones(2 * ROWS)).sum().backward()
    assert other.grad is not None and (other.grad == 1).all()


@pytest.mark.gpu
def test_other_dtypes_are_refused_where_torch_would_wait() -> None:
    made = linear(FEATURES, INNER).cuda()
    with pytest.raises(ValueError, match="bfloat16"):
        made(torch.zeros(4, FEATURES, device="cuda"), torch.zeros(EXPERTS, dtype=torch.int32, device="cuda"))


# -- attention -------------------------------------------------------------------------------------

SCALING = "apply_query_key_layer_scaling"
# As Megatron's `AttnMaskType`.
Mask: Any = enum.Enum("Mask", "padding causal no_mask padding_causal arbitrary causal_bottom_right")


def options(**changes: Any) -> Any:
    fields = {"attention_dropout": 0.0, "context_parallel_size": 1, SCALING: False}
    return SimpleNamespace(**fields | {"window_size": None, "softmax_type": "vanilla"} | changes)


def attention(mask: Any = Mask.causal, **changes: Any) -> VarlenAttention:
    arguments = {"config": options(), "layer_number": 1, "attn_mask_type": mask, "attention_type": "self"}
    return VarlenAttention(**(arguments | changes))


def inputs(*rows: int, heads: int = 4, groups: int = 2, dim: int = 8) -> list[Tensor]:
    return [torch.randn(*rows, n, dim, requires_grad=True) for n in (heads, groups, groups)]


def run(module: VarlenAttention, qkv: list[Tensor], grad: Tensor, **arguments: Any) -> list[Tensor]:
    out = module(*qkv, None, **arguments)
    return [out, *torch.autograd.grad(out, qkv, grad)]


NO_GROUP = "expected a pg_collection with the context-parallel group of context_parallel_size 2, got none"


@pytest.mark.parametrize(
    ("of_config", "of_call", "message"),
    [
        ({"attention_dropout": 0.1}, {}, "expected attention_dropout 0, got 0.1"),
        ({"context_parallel_size": 2}, {}, NO_GROUP),
        ({SCALING: True}, {}, f"expected {SCALING} False, got True"),
        ({"window_size": (64, 0)}, {}, r"expected window_size None, got \(64, 0\)"),
        ({"softmax_type": "learnable"}, {}, "expected softmax_type vanilla, got learnable"),
        ({}, {"attention_dropout": 0.5}, "expected attention_dropout 0, got 0.5"),
        ({}, {"cp_comm_type": "a2a+p2p"}, r"expected cp_comm_type of p2p, all_gather, a2a, got a2a\+p2p"),
        ({}, {"attention_type": "cross"}, "expected self attention, got 'cross'"),
        ({}, {"mask": Mask.arbitrary}, "expected a causal mask or none, got arbitrary"),
        ({}, {"mask": Mask.causal_bottom_right}, "expected a causal mask or none, got causal_bottom_right"),
    ],
)
def test_what_it_lacks_is_refused(of_config: dict[str, Any], of_call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^VarlenAttention: {message}$"):
        attention(config=options(**of_config), **of_call)


def test_the_arguments_dropout_goes_before_the_configs() -> None:
    overruled = attention(config=options(attention_dropout=0.1), attention_dropout=0.0)
    given = (*inputs(8, 1), None)
    assert torch.equal(overruled(*given), attention()(*given))


def test_what_a_call_may_not_ask_for_is_refused() -> None:
    """Without a causal mask, valid rows of a pack would see the padding after them."""

    def refuse(message: str, rows: Any, pack: Any, mask: Any = Mask.causal, **asked: Any) -> None:
        with pytest.raises(ValueError, match=message):
            attention(mask)(*inputs(*rows), None, packed_seq_params=pack, **asked)

    for rows, pack in (((4, 2), None), ((8,), pack_of([3, 5]))):
        expected = "VarlenAttention: expected no attention_bias, got one"
        refuse(expected, rows, pack, attention_bias=torch.zeros(1))
    refuse("expected a causal mask or none, got arbitrary", (8,), pack_of([8]), attn_mask_type=Mask.arbitrary)
    padded, expected = pack_of([3, 5], [4, 8]), "padding inside a pack needs a causal mask, got none"
    refuse(expected, (12,), padded, Mask.no_mask)
    refuse(expected, (12,), padded, attn_mask_type=Mask.padding)
    # Of dynamic context parallelism the config says 1 and each pack says its own size.
    refuse("expected a cp_group of local_cp_size 2, got none", (8,), pack_of([8], local_cp_size=2))
    for alone in (None, 1):
        attention()(*inputs(8), None, packed_seq_params=pack_of([8], local_cp_size=alone))


@pytest.mark.parametrize(
    ("of_config", "layer", "expected"),
    [("a2a", 3, "a2a"), (["all_gather", "a2a"], 1, "all_gather"), (["all_gather", "a2a"], 2, "a2a")],
)
def test_if_packs_say_who_shares_them_the_config_says_how(of_config: Any, layer: int, expected: str) -> None:
    """Megatron hands layers no `cp_comm_type` where context_parallel_size is 1."""
    assert attention(config=options(cp_comm_type=of_config), layer_number=layer).cp_comm_type == expected


def test_a_way_to_share_that_it_lacks_is_refused_when_a_pack_is_shared() -> None:
    """A config may name one that its other layers have, and share no pack."""
    module = attention(config=options(cp_comm_type="a2a+p2p"))
    module(*inputs(8), None, packed_seq_params=pack_of([8]))
    pack = pack_of([8], local_cp_size=2, cp_group=SimpleNamespace(size=lambda: 2))
    with pytest.raises(ValueError, match=r"expected cp_comm_type of p2p, all_gather, a2a, got a2a\+p2p"):
        module(*inputs(4), None, packed_seq_params=pack)


@pytest.mark.parametrize("mask", [Mask.padding, Mask.padding_causal])
def test_a_padding_mask_outside_packs_is_refused(mask: Any) -> None:
    """It was ignored: rows attended to the padding that the mask hides."""
    padding = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    for module, mask_type in ((attention(mask), None), (attention(), mask)):
        with pytest.raises(ValueError, match=f"VarlenAttention: .*{mask.name}"):
            module(*inputs(4, 2), padding, attn_mask_type=mask_type)


@settings(max_examples=20)
@given(
    actual=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    paddings=st.lists(st.integers(0, 3), min_size=5, max_size=5) | st.none(),
    tail=st.integers(0, 5),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.5]),
)
def test_each_document_of_a_pack_is_attended_to_as_if_alone(
    actual: list[int], paddings: list[int] | None, tail: int, causal: bool, scale: float | None
) -> None:
    """Bit for bit, in the output and in all gradients; rows of no document are zero."""
    causal = causal or paddings is not None
    padded = None if paddings is None else [a + p for a, p in zip(actual, paddings, strict=False)]
    physical = padded or actual
    module = attention(Mask.causal if causal else Mask.no_mask, softmax_scale=scale)
    qkv = inputs(sum(physical) + tail)
    grad = torch.randn(sum(physical) + tail, 32)
    packed = run(module, qkv, grad, packed_seq_params=pack_of(actual, padded))
    for start, stop in pairwise(accumulate(physical, initial=0)):
        if start < stop:
            one = [t.detach()[start:stop, None].requires_grad_() for t in qkv]
            for whole, part in zip(packed, run(module, one, grad[start:stop, None]), strict=True):
                assert torch.equal(whole[start:stop], part[:, 0])
    for whole in packed:
        assert not whole[sum(physical) :].any()


@settings(max_examples=20)
@given(
    length=st.integers(1, 12),
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.7]),
)
def test_an_unpacked_batch_equals_torchs_attention(
    length: int, batch: int, heads: tuple[int, int], causal: bool, scale: float | None
) -> None:
    qkv = inputs(length, batch, heads=heads[0], groups=heads[1])
    grad = torch.randn(length, batch, heads[0] * 8)
    actual = run(attention(Mask.causal if causal else Mask.no_mask, softmax_scale=scale), qkv, grad)

    leaves = [t.detach().double().requires_grad_() for t in qkv]
    heads_first = (leaf.permute(1, 2, 0, 3) for leaf in leaves)
    out = F.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=scale, enable_gqa=True)
    out = out.permute(2, 0, 1, 3).flatten(2)
    expected = [out, *torch.autograd.grad(out, leaves, grad.double())]
    assert actual[0].is_contiguous() and [it.shape for it in actual] == [it.shape for it in expected]
    assert_close_to_float64(actual, expected)


def test_a_calls_mask_type_goes_before_the_constructors() -> None:
    qkv, pack = [t.detach() for t in inputs(6)], pack_of([2, 4])
    causal = attention(Mask.causal)(*qkv, None, packed_seq_params=pack)
    full = attention(Mask.no_mask)(*qkv, None, packed_seq_params=pack)
    assert not torch.equal(causal, full)
    for asked, expected in ((Mask.padding, full), (Mask.padding_causal, causal)):
        for module in (attention(Mask.causal), attention(Mask.no_mask)):
            assert torch.equal(module(*qkv, None, asked, packed_seq_params=pack), expected)


def test_the_longest_document_may_be_a_constant_or_a_tensor_and_nothing_is_kept() -> None:
    qkv, module = [t.detach() for t in inputs(6)], attention()
    expected = module(*qkv, None, packed_seq_params=pack_of([2, 4]))
    for longest in (100, torch.tensor(4, dtype=torch.int32)):
        pack = pack_of([2, 4], max_seqlen_q=longest)
        assert torch.equal(module(*qkv, None, packed_seq_params=pack), expected)
    assert dict(module.state_dict()) == {}


@pytest.mark.parametrize("packed", [True, False])
def test_values_of_fewer_dimensions_have_the_bits_of_values_padded_with_zeros(packed: bool) -> None:
    """As multi-latent attention has them; later releases of Megatron pad them themselves, in packs."""
    rows = (11,) if packed else (6, 2)
    arguments = {"packed_seq_params": pack_of([4, 7])} if packed else {}
    query, key, value = inputs(*rows, heads=4, groups=4, dim=12)
    few = value.detach()[..., :8].clone().requires_grad_()
    whole = F.pad(few.detach(), (0, 4)).requires_grad_()
    grad = torch.randn(*rows, 4, 12)
    grad[..., 8:] = 0
    narrow = run(attention(), [query, key, few], grad[..., :8].flatten(-2), **arguments)
    wide = run(attention(), [query, key, whole], grad.flatten(-2), **arguments)
    assert narrow[0].shape == (*rows, 4 * 8)
    assert torch.equal(narrow[0].unflatten(-1, (4, 8)), wide[0].unflatten(-1, (4, 12))[..., :8])
    assert_same_bits(narrow[1:], [*wide[1:3], wide[3][..., :8]])
