# SPDX-License-Identifier: Apache-2.0
"""Mamba layers of hybrid models, real but for their mixer, by scope: the bits of eager, what is counted."""

import dataclasses
from typing import Any

import torch
from mamba_rig import PATTERN, Documented, mamba
from megatron_rig import Install, Pair, report_of, step, steps_of
from torch import Tensor

import megagraph
from megagraph._C import mark_canonical
from megagraph.megatron import seams
from megagraph.megatron.patch.inside_layers import documents_of_rows, wrap_documents

LAYERS = len(PATTERN)


def packs(count: int, says_documents: bool = True, tails: bool = True) -> list[list[Documented]]:
    """Steps of three packs, no two alike: padded documents, empty ones, tails, a full capacity."""
    steps = steps_of(count, align=4, make=Documented, tails=tails, says_documents=says_documents)
    for index, micros in enumerate(steps):
        lengths = (5, 7, 0, 5) if index % 2 else (30, 3, 31)
        micros[index % 3] = Documented(lengths=lengths, seed=index, says_documents=says_documents)
    return steps


def test_of_a_canonical_packs_rows_those_that_were_given_have_the_losses_of_an_unpatched_run(
    install: Install,
) -> None:
    """Tail rows are no part of the last document, and follow all others."""
    micros = [micro for step_ in packs(4) for micro in step_ if not micro.tail]  # RoPE of Megatron takes none

    def losses() -> list[Tensor]:
        trainer = mamba()
        return [step(trainer, [micro], update=False).losses[0] for micro in micros]

    unpatched = losses()
    install()
    graphed = losses()
    assert megagraph.reports()[0]["replays"] > 0
    for one, other in zip(unpatched, graphed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherFirst(Documented):
    """Has other tokens in its first document, and the same in all others."""

    def documents(self) -> list[Tensor]:
        first, *others = super().documents()
        return [first.flip(0), *others]


def test_no_document_sees_another_nor_the_rows_past_the_pack(install: Install) -> None:
    install()
    trainer = mamba()
    step(trainer, [Documented(lengths=(9, 20))])

    def last_twenty(micro: Documented) -> Tensor:
        return step(trainer, [micro], update=False).losses[0].flatten()[9:29]

    wanted = last_twenty(Documented(lengths=(9, 20), seed=1))
    assert torch.equal(wanted, last_twenty(OtherFirst(lengths=(9, 20), seed=1)))
    assert torch.equal(wanted, last_twenty(Documented(lengths=(9, 20), seed=1, tail=5, tail_token=3)))
    assert report_of(trainer)["replays"] == 3 * LAYERS


def test_packs_that_say_no_documents_are_what_eager_makes_of_them() -> None:
    """Since 0.17 a mixer that is told of no documents carries its state through all of them, in eager too."""
    pair = Pair(mamba)
    assert pair.train(packs(4, says_documents=False))["eager"] == {"WARMING_UP": 3 * LAYERS}
    told, untold = (
        step(pair.graphed, [Documented(lengths=(9, 20), says_documents=says)], update=False).losses[0]
        for says in (True, False)
    )
    assert torch.equal(told, untold) == (not seams.packs_say_documents())


def test_a_padding_mask_and_other_tables_reach_no_mamba_layer(install: Install) -> None:
    install()
    masked = [Documented(lengths=(9, 20), mask_seed=seed, seed=seed) for seed in range(2)]
    pair = Pair(mamba)
    pair.step(*masked, times=4)
    assert set(pair.report()["eager"]) == {"WARMING_UP"}
    for trainer in pair.both:
        trainer.chunk.rotary_pos_emb.inv_freq.mul_(0.5)
        type(trainer.chunk.rotary_pos_emb).forward.cache_clear()
    pair.step(*masked)
    assert pair.report()["eager"]["SIGNATURE_CHANGED"] == 2 * LAYERS


def test_a_stack_whose_forward_is_not_megatrons() -> None:
    """Its layers are replaced one by one, and hand out what each kind of layer hands out."""

    def forward(
        stack: Any,
        hidden_states: Tensor,
        attention_mask: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> Tensor:
        arguments = {"attention_mask": attention_mask, "packed_seq_params": packed_seq_params}
        for layer in stack.layers:
            if not hasattr(layer, "mixer"):
                hidden_states, _ = layer(hidden_states, **arguments, rotary_pos_emb=rotary_pos_emb)
            else:
                hidden_states = layer(hidden_states, **arguments)
        out: Tensor = stack.final_norm(hidden_states)
        return out

    pair = Pair(mamba, plugin={"cuda_graph_modules": ["mamba", "attn"]})
    for trainer in pair.both:
        stack = trainer.chunk.decoder
        stack.forward = forward.__get__(stack)
    report = pair.train(packs(4, tails=False))
    assert report["replays"] > 0 and set(report["eager"]) <= {"WARMING_UP", "SCOPE_UNSUPPORTED", "NESTING"}


def test_what_only_decoding_reads_of_a_mixer_is_no_part_of_its_state() -> None:
    pair = Pair(mamba)
    mixers = [trainer.chunk.decoder.layers[0].mixer for trainer in pair.both]
    for is_stale in (True, True, False, True):
        for mixer in mixers:
            mixer._A_neg_exp_cache_stale = is_stale
        pair.step(Documented(lengths=(9, 20)))
    assert pair.report()["eager"] == {"WARMING_UP": LAYERS}


def test_the_documents_of_rows_are_those_that_megatron_makes() -> None:
    """Of offsets with empty documents and tails; where packs say documents, by their constructor."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.ssm.mamba_mixer import MambaMixer

    for offsets, rows in (((0, 5, 7, 11), 16), ((0, 0, 4, 4, 9), 9), ((0, 3, 3, 3), 8), ((0, 6), 6)):
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        if seams.packs_say_documents():
            wanted = PackedSeqParams(cu_seqlens_q=cu_seqlens, total_tokens=rows).seq_idx
        else:
            params = PackedSeqParams(cu_seqlens_q=cu_seqlens)
            wanted = MambaMixer._create_packed_seq_idx(None, params, rows)
        found = documents_of_rows(cu_seqlens, rows)
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_only_canonical_packs_have_their_documents_made_anew() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    asked: list[Any] = []

    def original(mixer: Any, packed_seq_params: Any, total_tokens: int) -> Tensor:
        asked.append(packed_seq_params)
        return torch.zeros(1, total_tokens)

    wrapped = wrap_documents(original)
    params = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 3, 5], dtype=torch.int32))
    wrapped(None, params, 7)
    mark_canonical(params)
    assert wrapped(None, params, 7).tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    assert asked == [params]
