# SPDX-License-Identifier: Apache-2.0
"""What ranks run that call a model with something that fits the rows that were given, and no others."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import megatron_rig as rig
import torch
from host_rig import HostPair, OwnBlock, OwnModel
from parallel_jobs import OPTIONS
from torch import Tensor

import megagraph
from megagraph.bank.capture import CapturePlan
from megagraph.demo.trainer import Trainer

PACKS = (rig.Micro(lengths=(20, 8)), rig.Micro(lengths=(40, 24), seed=1))  # the second fills its capacity


def given_hidden_states(chunk: Any, micro: rig.Micro, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The decoder's input in place of token ids. Returns the losses, and what else has a gradient."""
    tokens, labels, _mask, positions = (rows[None].to(device) for rows in micro.row_lists())
    with torch.no_grad():
        hidden = chunk.embedding(input_ids=tokens, position_ids=positions)
    hidden = hidden.detach().requires_grad_()
    losses = chunk(
        input_ids=None,
        position_ids=positions,
        attention_mask=None,
        decoder_input=hidden,
        labels=labels,
        packed_seq_params=micro.params(device),
    )
    assert losses.shape == (1, micro.physical)
    return losses, [hidden]


def given_output_processor(chunk: Any, micro: rig.Micro, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A function in place of the output layer, which sees this rank's rows of hidden states."""
    tokens, labels, _mask, positions = (rows[None].to(device) for rows in micro.row_lists())
    out = chunk(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=None,
        labels=labels,
        packed_seq_params=micro.params(device),
        output_processor=lambda hidden_states, **unused: hidden_states.square(),
    )
    assert out.shape == (micro.physical // 2, 1, OPTIONS.hidden)
    return out, []


WAYS: dict[str, Callable[..., tuple[Tensor, list[Tensor]]]] = {
    "decoder_input": given_hidden_states,
    "output_processor": given_output_processor,
}


def calls(*, way: str, transformer: dict[str, Any]) -> dict[str, Any]:
    """Calls a model whose graphs have been captured, with a pack below its capacity and one that fills it.

    Returns:
        The report. What the calls gave and their gradients have been compared with those of Megatron alone.
    """
    megagraph.install(rig.graph_config())
    trainer = Trainer(OPTIONS, config=transformer)
    for _ in range(2):
        rig.step(trainer, PACKS, update=False)

    def run(micro: rig.Micro) -> list[Tensor]:
        trainer.model.zero_grad_buffer()
        out, leaves = WAYS[way](trainer.chunk, micro, trainer.device)
        out.sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves), *rig.grads(trainer.chunk).values()]

    found = [run(micro) for micro in PACKS]
    (report,) = megagraph.reports()
    megagraph.uninstall()
    for micro, ours in zip(PACKS, found, strict=True):
        for one, other in zip(ours, run(micro), strict=True):
            torch.testing.assert_close(one, other)
    return report


def left_eager(*, transformer: dict[str, Any]) -> dict[str, Any]:
    """Steps of a model of whose layers none can be captured.

    Returns:
        Its report. The bits of the last step have been compared with those of Megatron alone.
    """
    megagraph.install(rig.graph_config())
    with mock.patch.object(CapturePlan, "_empty_rows", side_effect=RuntimeError("nobody captures")):
        trainer = Trainer(OPTIONS, config=transformer)
        found = [rig.step(trainer, PACKS, update=False) for _ in range(3)]
    report = rig.report_of(trainer)
    megagraph.uninstall()
    rig.assert_same(found[-1], rig.step(trainer, PACKS, update=False))
    return report


def overridden(*, transformer: dict[str, Any]) -> dict[str, Any]:
    """Trains a host's model, eager and with graphs, on a pack below its capacity and one that fills it.

    Returns:
        The graphed one's report. Their bits have been compared.
    """
    megagraph.install(rig.graph_config())
    pair = HostPair(OwnModel, OwnBlock, options=OPTIONS, config=transformer)
    pair.step(*PACKS, times=5)
    report = pair.report()
    megagraph.uninstall()
    return report
