# SPDX-License-Identifier: Apache-2.0
"""Rows that a caller hands in or takes out where two ranks share those of each pack."""

import inspect
from typing import Any

import megatron_rig as rig
import pytest
import torch
from host_rig import HostTrainer, OwnBlock, OwnModel
from megatron.core.models.gpt import GPTModel
from parallel_jobs import OPTIONS
from torch import Tensor, distributed
from worlds import on_ranks

import megagraph
from megagraph.demo.trainer import Trainer
from megagraph.megatron.parallel.model_parallel import splits

pytestmark = pytest.mark.megatron

LAYERS = OPTIONS.layers
SHARED_ROWS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
has_output_processor = pytest.mark.skipif(
    "output_processor" not in inspect.signature(GPTModel.forward).parameters,
    reason="this megatron-core has no output_processor",
)
PACKS = (rig.Micro(lengths=(20, 8)), rig.Micro(lengths=(40, 24), seed=1))  # the second fills its capacity
LOPSIDED = rig.Micro(lengths=(33, 9), seed=2)  # of the capacity's rows, both ranks have some of its own


def _rows(micro: rig.Micro, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    tokens, labels, _mask, positions = (rows[None].to(device) for rows in micro.row_lists())
    return tokens, labels, positions


def call(
    chunk: Any,
    micro: rig.Micro,
    device: torch.device,
    *,
    is_embedded: bool = False,  # the decoder's input comes in place of token ids
    on_one_rank_alone: bool = False,  # nobody asks for the gradient of the other rank's rows
    is_processed: bool = False,  # a function, in place of the output layer, sees this rank's rows
) -> tuple[Tensor, Tensor | None]:
    """What a model hands out, and the leaf that its gradient reaches, if there is one."""
    tokens, labels, positions = _rows(micro, device)
    with torch.no_grad():
        hidden: Tensor = chunk.embedding(input_ids=tokens, position_ids=positions)
    hidden.requires_grad_(is_embedded and not (on_one_rank_alone and distributed.get_rank() != 0))
    given = {
        "input_ids": None if is_embedded else tokens,
        "position_ids": positions,
        "labels": labels,
        "packed_seq_params": micro.params(device),
    }
    seen = []

    def process(
        *,
        hidden_states: Tensor,
        output_layer: Any,
        context: float,
        compute_language_model_loss: Any,
        **other: Any,
    ) -> Tensor:
        seen.append(other)
        assert hidden_states.shape == other["decoder_input"].shape == hidden.shape
        losses = compute_language_model_loss(other["labels"], output_layer(hidden_states)[0] / context)
        assert losses.shape == (1, micro.physical)
        # The rows themselves count, too, as does what went in.
        rows = hidden_states.square().sum(-1) + other["decoder_input"].detach().mean(-1)
        return torch.cat([losses.view(-1), rows.view(-1)])

    processor = {"output_processor": process, "output_processor_context": 2.0} if is_processed else {}
    out = chunk(**given, attention_mask=None, decoder_input=hidden if is_embedded else None, **processor)
    assert is_processed or out.shape == (1, micro.physical)
    for other in seen:
        assert all(other[name] is value for name, value in given.items())
        assert torch.equal(other["decoder_input"], hidden)
    assert len(seen) == is_processed
    return out, hidden if hidden.requires_grad else None


WAYS: dict[str, dict[str, bool]] = {
    "decoder_input": {"is_embedded": True},
    "decoder_input, its gradient on one rank alone": {"is_embedded": True, "on_one_rank_alone": True},
    "output_processor": {"is_processed": True},
    "output_processor beside decoder_input": {"is_embedded": True, "is_processed": True},
}


def _summed(chunk: Any, left: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the gradients of norms and biases over all rows summed, as Megatron does at the end of a step.

    Each rank has the part of its own rows, which are others where a pack is padded.
    """
    shared = [name for name, param in chunk.named_parameters() if getattr(param, "sequence_parallel", False)]
    assert shared
    summed = {name: value.clone() for name, value in left.items()}
    for name in shared:
        distributed.all_reduce(summed[name])
    return summed


def _captured() -> Trainer:
    megagraph.install(rig.graph_config())
    trainer = Trainer(OPTIONS, config=SHARED_ROWS)
    for _ in range(2):
        rig.step(trainer, PACKS, update=False)
    return trainer


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[has_output_processor, pytest.mark.both] if "processor" in way else [])
        for way in WAYS
    ],
)
@on_ranks(2, tensor_parallel=2)
def test_rows_that_a_caller_hands_in_or_takes_out_keep_no_pack_eager(way: str) -> None:
    """Under sequence parallelism packs are padded where the model is entered. There each rank has rows of its
    own, of the capacity's others than of the pack's: they are handed round."""
    trainer = _captured()

    def run(micro: rig.Micro) -> dict[str, Tensor]:
        trainer.model.zero_grad_buffer()
        out, leaf = call(trainer.chunk, micro, trainer.device, **WAYS[way])
        out.sum().backward()
        left = {"out": out.detach().clone(), **rig.grads(trainer.chunk)}
        if leaf is not None:
            assert leaf.grad is not None
            left["input"] = leaf.grad.clone()
        return left

    micros = (*PACKS, LOPSIDED)
    graphed = [run(micro) for micro in micros]
    with megagraph.disable_cuda_graphs_this_step():
        eager = [run(micro) for micro in micros]
    (report,) = megagraph.reports()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "DISABLED": 3 * LAYERS}
    assert report["replays"] == (2 + 3) * LAYERS
    megagraph.uninstall()
    for micro, replayed, canonical in zip(micros, graphed, eager, strict=True):
        alone = run(micro)
        assert alone.keys() == replayed.keys() == canonical.keys()
        assert [name for name in replayed if not torch.equal(replayed[name], canonical[name])] == []
        if trainer.device.type == "cpu":  # a GPU chooses its kernels by the number of rows
            exact = {"out", "input"} & alone.keys()
            assert [name for name in exact if not torch.equal(alone[name], replayed[name])] == []
        # Gradients of parameters are sums over rows: in other parts, of which added ones are zero.
        _assert_close(_summed(trainer.chunk, replayed), _summed(trainer.chunk, alone))


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """As the type of the parameters allows: bfloat16 on a GPU, where single entries may cancel out."""
    if all(value.device.type == "cpu" for value in found.values()):
        torch.testing.assert_close(found, expected)
        return
    far = [
        name
        for name, value in expected.items()
        if not (value - found[name]).norm() <= 2**-6 * value.norm()  # NaN is far from everything
    ]
    assert far == []


@has_output_processor
@on_ranks(2, tensor_parallel=2)
def test_a_pack_that_ranks_cannot_share_is_megatrons_error_as_ever() -> None:
    """An output processor has no rows to see there; padding would have hidden it."""
    trainer = _captured()
    with pytest.raises(AssertionError, match="divisible by tensor parallel size"):
        call(trainer.chunk, rig.Micro(lengths=(20, 7)), trainer.device, is_processed=True)


@on_ranks(2, tensor_parallel=2)
def test_a_stage_that_others_follow_keeps_the_rows_that_were_given_outside_of_schedules() -> None:
    """Bug: the block's output got as many rows on each rank as they have together."""
    megagraph.install(rig.graph_config())
    trainer = rig.ModelTrainer(
        heads=4, prepare=lambda chunk: setattr(chunk, "post_process", False), config=SHARED_ROWS
    )
    for micro in PACKS * 3:
        tokens, _labels, positions = _rows(micro, trainer.device)
        out = trainer.chunk(tokens, positions, None, packed_seq_params=micro.params(trainer.device))
        assert out.shape == (micro.physical // 2, 1, OPTIONS.hidden)
        out.sum().backward()
    (report,) = megagraph.reports()
    assert report["eager"]["FOREIGN_HOOK"] > 0 and report["replays"] == 0


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(("given", "wanted"), [(7, 16), (16, 7), (1, 8), (5, 5)])
def test_what_a_rank_sends_is_what_its_peers_expect(size: int, given: int, wanted: int) -> None:
    sent, got = zip(*(splits(given, wanted, rank, size) for rank in range(size)), strict=True)
    assert [list(column) for column in zip(*sent, strict=True)] == list(got)
    total = min(given, wanted) * size  # of which each rank has those from its own multiple on
    assert [sum(rows) for rows in sent] == [min(given, max(0, total - rank * given)) for rank in range(size)]
    assert [sum(rows) for rows in got] == [min(wanted, max(0, total - rank * wanted)) for rank in range(size)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2, tensor_parallel=2)
def test_a_model_with_forwards_of_its_own_on_several_ranks(sequence_parallel: bool) -> None:
    """Under sequence parallelism it gets no rows that were not given: what it does with them is unknown."""
    megagraph.install(rig.graph_config())
    config = {**SHARED_ROWS, "sequence_parallel": sequence_parallel}
    pair = rig.Pair(HostTrainer, model_class=OwnModel, block_class=OwnBlock, options=OPTIONS, config=config)
    pair.step(*PACKS, times=4)
    report = pair.report()
    assert report["calls"] == 4 * 2 * LAYERS and report["failures"] == []
    assert {*report["eager"]} == {"WARMING_UP", *["SIGNATURE_CHANGED"] * sequence_parallel}
    assert report["replays"] >= 2 * (1 if sequence_parallel else 2) * LAYERS
