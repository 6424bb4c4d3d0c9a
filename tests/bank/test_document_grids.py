# SPDX-License-Identifier: Apache-2.0
"""Attention captured for many documents of any length is launched for those that a pack has.

What a launch leaves out must be what would have done nothing: every bit is compared with eager attention
over all of the capacity's document slots.
"""

import pytest
import torch
from bank_pair import PackPair
from offsets import offsets
from same_bits import assert_same_bits
from torch import Tensor, nn

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


def attention(device: str = "cuda", num_slots: int = 1) -> PackPair:
    layers = [Attention() for _ in range(LAYERS)]
    sizes = {"tokens": TOKENS, "num_seqs": NUM_SEQS, "width": WIDTH}
    return PackPair(device, layers, **sizes, dtype=torch.bfloat16, num_slots=num_slots)


def test_slots_in_flight_keep_their_own_grids_and_offsets(device: str) -> None:
    """The next forwards stage other offsets before the first backward has read its own."""
    pair = attention(device, num_slots=3).capture()
    for packs in zip(PACKS, PACKS[3:], PACKS[6:], strict=False):
        running = [pair.pack(lengths) for lengths in packs]
        for index in (1, 0, 2):
            running[index].backward()
        pair.check_state()
        del running


@pytest.mark.gpu
def test_packs_of_all_kinds_have_the_bits_of_attention_over_every_slot() -> None:
    """With gradients and without: each variant has its own grids."""
    pair = attention()
    pair.capture(pair.variant(), pair.variant("eval", training=False))
    for lengths in PACKS:
        with torch.no_grad():
            assert pair.pack(lengths, key="eval", requires_grad=False).reason is None
        pair.pack(lengths).backward()
        pair.check_state()


@pytest.mark.gpu
def test_every_attention_kernel_is_launched_for_the_documents_that_are_there() -> None:
    pair = attention(num_slots=2)
    bank = pair.capture(pair.variant(), pair.variant("eval", training=False)).bank
    for slot in range(2):
        assert bank.num_document_grids(bank.variants["train"], slot) == LAYERS * KERNELS
        assert bank.num_document_grids(bank.variants["eval"], slot) == LAYERS


@pytest.mark.gpu
def test_attention_captured_by_others_is_left_as_it_is() -> None:
    q = torch.randn(TOKENS, HEADS, DIM, device="cuda").to(torch.bfloat16)
    cu_seqlens = offsets([64] * NUM_SEQS, "cuda")
    expected = ops.varlen_attention(q, q, q, cu_seqlens, TOKENS, causal=True)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = ops.varlen_attention(q, q, q, cu_seqlens, TOKENS, causal=True)
    for _ in range(2):  # a second instantiation is refused where a node is marked
        graph.instantiate()
        graph.replay()
        assert_same_bits(out, expected, "output")
