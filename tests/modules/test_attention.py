# SPDX-License-Identifier: Apache-2.0
import enum
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offsets import pack_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megagraph.modules import VarlenAttention

# Against float64, in units of eps(float32) * max(1, max|expected|): sums of up to 64 products.
ERROR_UNITS = 32
SCALING = "apply_query_key_layer_scaling"


class Mask(enum.Enum):
    """The names of Megatron's `AttnMaskType`."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


def config(**changes: Any) -> Any:
    fields = {"attention_dropout": 0.0, "context_parallel_size": 1, SCALING: False}
    return SimpleNamespace(**fields | {"window_size": None, "softmax_type": "vanilla"} | changes)


def attention(mask: Mask = Mask.causal, **changes: Any) -> VarlenAttention:
    arguments = {"config": config(), "layer_number": 1, "attn_mask_type": mask, "attention_type": "self"}
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
        *(
            ({"softmax_type": it}, {}, f"expected softmax_type vanilla, got {it}")
            for it in ("learnable", "off-by-one")
        ),
        ({}, {"attention_dropout": 0.5}, "expected attention_dropout 0, got 0.5"),
        ({}, {"cp_comm_type": "a2a+p2p"}, r"expected cp_comm_type of p2p, all_gather, a2a, got a2a\+p2p"),
        ({}, {"attention_type": "cross"}, "expected self attention, got 'cross'"),
        *(
            ({}, {"mask": it}, f"expected a causal mask or none, got {it.name}")
            for it in (Mask.arbitrary, Mask.causal_bottom_right)
        ),
    ],
)
def test_what_it_lacks_is_refused(of_config: dict[str, Any], of_call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^VarlenAttention: {message}$"):
        attention(config=config(**of_config), **of_call)


def test_the_arguments_dropout_goes_before_the_configs() -> None:
    overruled = attention(config=config(attention_dropout=0.1), attention_dropout=0.0)
    given = (*inputs(8, 1), None)
    assert torch.equal(overruled(*given), attention()(*given))


def test_what_a_call_may_not_ask_for_is_refused() -> None:
    """Without a causal mask, valid rows of a pack would see the padding after them."""

    def refused(message: str, rows: Any, pack: Any, mask: Mask = Mask.causal, **asked: Any) -> None:
        with pytest.raises(ValueError, match=message):
            attention(mask)(*inputs(*rows), None, packed_seq_params=pack, **asked)

    for rows, pack in (((4, 2), None), ((8,), pack_of([3, 5]))):
        expected = "VarlenAttention: expected no attention_bias, got one"
        refused(expected, rows, pack, attention_bias=torch.zeros(1))
    expected = "expected a causal mask or none, got arbitrary"
    refused(expected, (8,), pack_of([8]), attn_mask_type=Mask.arbitrary)
    padded, expected = pack_of([3, 5], [4, 8]), "padding inside a pack needs a causal mask, got none"
    refused(expected, (12,), padded, Mask.no_mask)
    refused(expected, (12,), padded, attn_mask_type=Mask.padding)
    # Of dynamic context parallelism the config says 1 and each pack says its own size.
    refused("expected a cp_group of local_cp_size 2, got none", (8,), pack_of([8], local_cp_size=2))
    for alone in (None, 1):
        attention()(*inputs(8), None, packed_seq_params=pack_of([8], local_cp_size=alone))


@pytest.mark.parametrize(
    ("of_config", "layer", "expected"),
    [("a2a", 3, "a2a"), (["all_gather", "a2a"], 1, "all_gather"), (["all_gather", "a2a"], 2, "a2a")],
)
def test_if_packs_say_who_shares_them_the_config_says_how(of_config: Any, layer: int, expected: str) -> None:
    """Megatron hands layers no `cp_comm_type` where context_parallel_size is 1."""
    module = attention(config=config(cp_comm_type=of_config), layer_number=layer)
    assert module.cp_comm_type == expected


def test_a_way_to_share_that_it_lacks_is_refused_when_a_pack_is_shared() -> None:
    """A config may name one that its other layers have, and share no pack."""
    module = attention(config=config(cp_comm_type="a2a+p2p"))
    module(*inputs(8), None, packed_seq_params=pack_of([8]))
    pack = pack_of([8], local_cp_size=2, cp_group=SimpleNamespace(size=lambda: 2))
    with pytest.raises(ValueError, match=r"expected cp_comm_type of p2p, all_gather, a2a, got a2a\+p2p"):
        module(*inputs(4), None, packed_seq_params=pack)


@pytest.mark.parametrize("mask", [Mask.padding, Mask.padding_causal])
def test_a_padding_mask_outside_packs_is_refused(mask: Mask) -> None:
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
    physical = actual if padded is None else padded
    module = attention(Mask.causal if causal else Mask.no_mask, softmax_scale=scale)
    qkv = inputs(sum(physical) + tail)
    grad = torch.randn(sum(physical) + tail, 32)
    packed = run(module, qkv, grad, packed_seq_params=pack_of(actual, padded))
    for start, stop in pairwise(accumulate(physical, initial=0)):
        if start < stop:
            one = [t.detach()[start:stop, None].requires_grad_() for t in qkv]
            alone = run(module, one, grad[start:stop, None])
            for whole, part in zip(packed, alone, strict=True):
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
    q_BHSD, k_BGSD, v_BGSD = (t.permute(1, 2, 0, 3) for t in leaves)
    out = scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=causal, scale=scale, enable_gqa=True)
    out = out.permute(2, 0, 1, 3).flatten(2)
    expected = [out, *torch.autograd.grad(out, leaves, grad.double())]
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert a.is_contiguous() or name != "out"
        assert a.shape == e.shape
        bound = ERROR_UNITS * torch.finfo(torch.float32).eps * max(1.0, e.abs().max().item())
        assert (a.double() - e).abs().max().item() <= bound, name


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
    whole = torch.nn.functional.pad(few.detach(), (0, 4)).requires_grad_()
    grad = torch.randn(*rows, 4, 12)
    grad[..., 8:] = 0
    narrow = run(attention(), [query, key, few], grad[..., :8].flatten(-2), **arguments)
    wide = run(attention(), [query, key, whole], grad.flatten(-2), **arguments)
    assert narrow[0].shape == (*rows, 4 * 8)
    assert torch.equal(narrow[0].unflatten(-1, (4, 8)), wide[0].unflatten(-1, (4, 12))[..., :8])
    assert torch.equal(narrow[1], wide[1]) and torch.equal(narrow[2], wide[2])
    assert torch.equal(narrow[3], wide[3][..., :8])
