# SPDX-License-Identifier: Apache-2.0
"""Attention captured for many documents of any length is launched for those that a pack has.

What a launch leaves out must be what would have done nothing: every bit is compared with eager attention
over all of the capacity's document slots.
"""

import copy

import pytest
import torch
from bank_pair import new_bank
from offsets import offsets
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.bank import Bank
from megagraph.bank.sites import MetadataSpec, SiteSpec, VariantSpec
from megagraph.packs import ops

TOKENS, NUM_SEQS, HEADS, DIM = 1024, 16, 2, 32
WIDTH = HEADS * DIM
LAYERS = 2
KERNELS = 4  # of FlashAttention, one forward and three backward

# From one document to another of every kind, so that grids shrink and grow again.
PACKS = [
    [TOKENS],
    [1],
    [5, 500, 3],
    [64] * NUM_SEQS,
    [0, 0, 9, 0, 900],
    [0],
    [700, 300],
    [3] * 7,
    [128, 256, 129],
    [TOKENS],
]


class Attention(nn.Module):
    """Residual attention inside documents."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.project(hidden).view(-1, 3, HEADS, DIM).unbind(1)
        out: Tensor = hidden + ops.varlen_attention(q, k, v, cu_seqlens, TOKENS, causal=True).flatten(1)
        return out


def variant(device: str, *, training: bool = True) -> VariantSpec:
    example = offsets([TOKENS // NUM_SEQS] * NUM_SEQS, device)
    return VariantSpec(
        key="train" if training else "eval",
        training=training,
        rows=TOKENS,
        row_shape=(WIDTH,),
        dtype=torch.bfloat16,
        metadata={"cu_seqlens": MetadataSpec(kind=_C.SegmentKind.OFFSETS, example=example, source=0)},
        end_source=0,
        end_buffer="cu_seqlens",
        fewer_rows=True,
        arguments=lambda buffers: {"cu_seqlens": buffers["cu_seqlens"]},
    )


def captured(device: str, *variants: VariantSpec, num_slots: int = 1) -> tuple[Bank, list[nn.Module]]:
    layers: list[nn.Module] = [Attention().to(device, torch.bfloat16) for _ in range(LAYERS)]
    sites = [SiteSpec(name=f"attention {index}", module=layer) for index, layer in enumerate(layers)]
    bank = new_bank(sites, device, num_slots=num_slots)
    bank.capture(list(variants))
    return bank, layers


class MicroBatch:
    """One pack through the graphs, and through eager copies of the layers."""

    def __init__(self, bank: Bank, layers: list[nn.Module], lengths: list[int], device: str) -> None:
        self.layers, self.eager_layers = layers, copy.deepcopy(layers)
        self.end = sum(lengths)
        hidden = torch.randn(TOKENS, WIDTH, device=device).to(torch.bfloat16)
        hidden[self.end :] = 0
        self.x, self.eager_x = (hidden.clone().requires_grad_() for _ in range(2))
        with bank.micro_batch("train", [offsets(lengths, device)]) as reason:
            assert reason is None
            self.out = bank(self.x)
        self.eager_out = self.eager_x
        for layer in self.eager_layers:
            self.eager_out = layer(self.eager_out, offsets(lengths, device, NUM_SEQS + 1))
        assert_same_bits(self.out, self.eager_out, "output")

    def backward(self) -> None:
        for layer in self.layers:
            layer.zero_grad()
        grad = torch.randn_like(self.eager_out)
        grad[self.end :] = 0
        self.out.backward(grad)
        self.eager_out.backward(grad)
        del self.out
        assert_same_bits(self.x.grad, self.eager_x.grad, "gradient of the input")
        for layer, eager in zip(self.layers, self.eager_layers, strict=True):
            for param, eager_param in zip(layer.parameters(), eager.parameters(), strict=True):
                assert_same_bits(param.grad, eager_param.grad, "gradient of a parameter")


def test_packs_of_all_kinds_have_the_bits_of_attention_over_every_slot(device: str) -> None:
    bank, layers = captured(device, variant(device))
    for lengths in PACKS * 2:
        MicroBatch(bank, layers, lengths, device).backward()


def test_slots_in_flight_keep_their_own_grids(device: str) -> None:
    bank, layers = captured(device, variant(device), num_slots=3)
    for first, second, third in zip(PACKS, PACKS[3:], PACKS[6:], strict=False):
        running = [MicroBatch(bank, layers, lengths, device) for lengths in (first, second, third)]
        for index in (1, 0, 2):
            running[index].backward()


def test_a_variant_without_gradients_has_its_grids_too(device: str) -> None:
    bank, layers = captured(device, variant(device), variant(device, training=False))
    for lengths in PACKS:
        hidden = torch.randn(TOKENS, WIDTH, device=device).to(torch.bfloat16)
        hidden[sum(lengths) :] = 0
        with torch.no_grad(), bank.micro_batch("eval", [offsets(lengths, device)]) as reason:
            assert reason is None
            out = bank(hidden)
        eager = hidden
        with torch.no_grad():
            for layer in layers:
                eager = layer(eager, offsets(lengths, device, NUM_SEQS + 1))
        assert_same_bits(out, eager, "output")
        del out
        MicroBatch(bank, layers, lengths, device).backward()


@pytest.mark.gpu
def test_every_attention_kernel_is_launched_for_the_documents_that_are_there() -> None:
    bank, _layers = captured("cuda", variant("cuda"), variant("cuda", training=False), num_slots=2)
    for slot in range(2):
        assert bank.core.num_document_grids(bank.variants["train"], slot) == LAYERS * KERNELS
        assert bank.core.num_document_grids(bank.variants["eval"], slot) == LAYERS


def test_attention_captured_by_others_is_left_as_it_is(device: str) -> None:
    if device == "cpu":
        pytest.skip("the host captures nothing")
    q = torch.randn(TOKENS, HEADS, DIM, device=device).to(torch.bfloat16)
    cu_seqlens = offsets([64] * NUM_SEQS, device)
    expected = ops.varlen_attention(q, q, q, cu_seqlens, TOKENS, causal=True)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = ops.varlen_attention(q, q, q, cu_seqlens, TOKENS, causal=True)
    for _ in range(2):  # a second instantiation is refused where a node is marked
        graph.instantiate()
        graph.replay()
        assert_same_bits(out, expected, "output")
