# SPDX-License-Identifier: Apache-2.0
"""What ranks run that call a model with something that fits the rows that were given, and no others."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import megatron_rig as rig
import pytest
import torch
from host_rig import HostTrainer, OwnBlock, OwnModel
from parallel_jobs import OPTIONS
from same_bits import assert_same_bits
from torch import Tensor, distributed

import megagraph
from megagraph.bank.capture import CapturePlan
from megagraph.demo.trainer import Trainer
from megagraph.megatron.parallel.tensor import shared_anew

PACKS = (rig.Micro(lengths=(20, 8)), rig.Micro(lengths=(40, 24), seed=1))  # the second fills its capacity
LOPSIDED = rig.Micro(lengths=(33, 9), seed=2)  # of the capacity's rows, both ranks have some of its own


def _rows(micro: rig.Micro, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and positions."""
    tokens, labels, _mask, positions = (rows[None].to(device) for rows in micro.row_lists())
    return tokens, labels, positions


def _embedded(chunk: Any, micro: rig.Micro, device: torch.device) -> Tensor:
    """This rank's rows of the decoder's input, a leaf."""
    tokens, _labels, positions = _rows(micro, device)
    with torch.no_grad():
        hidden: Tensor = chunk.embedding(input_ids=tokens, position_ids=positions)
    return hidden.detach().requires_grad_()


def given_hidden_states(
    chunk: Any, micro: rig.Micro, device: torch.device, *, on_one_rank_alone: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The decoder's input in place of token ids. Returns the losses, and a leaf that has a gradient.

    With `on_one_rank_alone`, nobody asks for the gradient of the other rank's rows.
    """
    _tokens, labels, positions = _rows(micro, device)
    hidden = _embedded(chunk, micro, device)
    if on_one_rank_alone and distributed.get_rank() != 0:
        hidden.requires_grad_(False)
    losses = chunk(
        input_ids=None,
        position_ids=positions,
        attention_mask=None,
        decoder_input=hidden,
        labels=labels,
        packed_seq_params=micro.params(device),
    )
    assert losses.shape == (1, micro.physical)
    return losses, hidden if hidden.requires_grad else None


def given_output_processor(
    chunk: Any, micro: rig.Micro, device: torch.device, *, is_embedded: bool = False
) -> tuple[Tensor, Tensor | None]:
    """A function in place of the output layer, which sees what was given and this rank's rows.

    With `is_embedded`, beside a decoder's input.
    """
    tokens, labels, positions = _rows(micro, device)
    pack, hidden = micro.params(device), _embedded(chunk, micro, device)
    seen = []

    def process(
        *,
        hidden_states: Tensor,
        output_layer: Any,
        context: float,
        compute_language_model_loss: Any,
        **other: Any,
    ) -> dict[str, Tensor]:
        seen.append(other)
        assert hidden_states.shape == other["decoder_input"].shape == hidden.shape
        logits = output_layer(hidden_states)[0] / context
        # The rows themselves count, too, as does what went in.
        return {
            "losses": compute_language_model_loss(other["labels"], logits),
            "rows": hidden_states.square().sum(-1) + other["decoder_input"].detach().mean(-1),
        }

    handed: dict[str, Any] = {
        "input_ids": None if is_embedded else tokens,
        "position_ids": positions,
        "labels": labels,
    }
    handed["packed_seq_params"] = pack
    out = chunk(
        **handed,
        attention_mask=None,
        decoder_input=hidden if is_embedded else None,
        output_processor=process,
        output_processor_context=2.0,
    )
    (other,) = seen
    assert all(other[name] is given for name, given in handed.items())
    assert torch.equal(other["decoder_input"], hidden)
    assert out["losses"].shape == (1, micro.physical)
    return torch.cat([out["losses"].view(-1), out["rows"].view(-1)]), hidden if is_embedded else None


WAYS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "decoder_input": given_hidden_states,
    "decoder_input, its gradient on one rank alone": partial(given_hidden_states, on_one_rank_alone=True),
    "output_processor": given_output_processor,
    "output_processor beside decoder_input": partial(given_output_processor, is_embedded=True),
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


def _captured(config: dict[str, Any]) -> Trainer:
    """A model that has graphs."""
    megagraph.install(rig.graph_config())
    trainer = Trainer(OPTIONS, config=config)
    for _ in range(2):
        rig.step(trainer, PACKS, update=False)
    return trainer


def calls(*, way: str, config: dict[str, Any]) -> dict[str, Any]:
    """Calls a model whose graphs have been captured, with packs below its capacity and one that fills it."""
    trainer = _captured(config)

    def run(micro: rig.Micro) -> dict[str, Tensor]:
        trainer.model.zero_grad_buffer()
        out, leaf = WAYS[way](trainer.chunk, micro, trainer.device)
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
    megagraph.uninstall()
    for micro, replayed, canonical in zip(micros, graphed, eager, strict=True):
        alone = run(micro)
        assert alone.keys() == replayed.keys() == canonical.keys()
        assert [name for name in replayed if not torch.equal(replayed[name], canonical[name])] == []
        if trainer.device.type == "cpu":  # a GPU chooses its kernels by the number of rows
            assert [name for name in ("out", "input") if not _same(alone.get(name), replayed.get(name))] == []
        # Gradients of parameters are sums over rows: in other parts, of which added ones are zero.
        _assert_close(_summed(trainer.chunk, replayed), _summed(trainer.chunk, alone))
    return report


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


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def uneven(*, config: dict[str, Any]) -> str:
    """Hands an output processor a pack that ranks cannot share, once there are graphs. Returns the error."""
    trainer = _captured(config)
    with pytest.raises(AssertionError) as error:
        given_output_processor(trainer.chunk, rig.Micro(lengths=(20, 7)), trainer.device)
    return str(error.value)


def _ends_in_hidden_states(chunk: Any) -> None:
    chunk.post_process = False


def first_stage(*, in_schedule: bool, config: dict[str, Any]) -> dict[str, Any]:
    """Runs the first stage of a pipeline, whose output are this rank's rows. Returns its report.

    Each step has a pack below the capacity and one that fills it.
    """
    megagraph.install(rig.graph_config())
    trainer = rig.plain(heads=4, prepare=_ends_in_hidden_states, config=config)

    def forward(model: Any, micro: rig.Micro, device: torch.device) -> tuple[Tensor, Any]:
        tokens, _labels, positions = _rows(micro, device)
        out = model(tokens, positions, None, packed_seq_params=micro.params(device))
        assert out.shape == (micro.physical // 2, 1, OPTIONS.hidden)
        return out, lambda rows: (rows.sum(), {"losses": rows.detach()})

    for _ in range(3):
        if in_schedule:
            with mock.patch.object(rig, "forward", forward):
                rig.step(trainer, PACKS, update=False)
        else:
            for micro in PACKS:
                out, _loss = forward(trainer.chunk, micro, trainer.device)
                out.sum().backward()
    (report,) = megagraph.reports()
    return report


def left_eager(*, micros: tuple[rig.Micro, ...] = PACKS, config: dict[str, Any]) -> dict[str, Any]:
    """Steps of a model of whose layers none can be captured, which must leave what Megatron alone leaves."""
    megagraph.install(rig.graph_config())
    with mock.patch.object(CapturePlan, "_empty_rows", side_effect=RuntimeError("nobody captures")):
        trainer = Trainer(OPTIONS, config=config)
        found = [rig.step(trainer, micros, update=False) for _ in range(3)]
    report = rig.report_of(trainer)
    megagraph.uninstall()
    assert_same_bits(found[-1], rig.step(trainer, micros, update=False))
    return report


def overridden(*, config: dict[str, Any]) -> dict[str, Any]:
    """Trains a host's model, eager and graphed, on a pack below its capacity and one that fills it."""
    megagraph.install(rig.graph_config())
    pair = rig.Pair(HostTrainer, model_class=OwnModel, block_class=OwnBlock, options=OPTIONS, config=config)
    pair.step(*PACKS, times=5)
    return pair.report()


def share_anew(*, given: int, wanted: int) -> None:
    """Moves rows from `given` on each rank to `wanted`, and gradients back, and looks where they went."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(given)
    for dtype in (torch.float32, torch.bfloat16):
        rows, gradients = (
            torch.randn(each * size, 1, 3, generator=generator).to(device, dtype) for each in (given, wanted)
        )
        common = min(len(rows), len(gradients))
        expected, arrived = torch.zeros_like(gradients), torch.zeros_like(rows)
        expected[:common], arrived[:common] = rows[:common], gradients[:common]
        mine = rows.chunk(size)[rank].clone().requires_grad_()
        # Not contiguous, as transposed hidden states and expanded gradients are.
        moved = shared_anew(
            mine.transpose(0, 2).contiguous().transpose(0, 2), wanted, distributed.group.WORLD
        )
        assert torch.equal(moved, expected.chunk(size)[rank])
        moved.backward(gradients.chunk(size)[rank])
        assert torch.equal(mine.grad, arrived.chunk(size)[rank])
        with torch.no_grad():
            assert not shared_anew(mine, wanted, distributed.group.WORLD).requires_grad
