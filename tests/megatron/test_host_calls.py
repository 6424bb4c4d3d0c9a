# SPDX-License-Identifier: Apache-2.0
"""The calls of verl, Megatron-Bridge and ms-swift: each replays, or runs eager for a reason that is counted.

`graph` against `eager` bit for bit, in rounds of the host's phases whose packs change.
"""

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import host_calls_rig as hosts
import pytest
import torch
from host_rig import HostTrainer, OwnBlock, OwnModel, PerTokenModel, bare_model
from megatron.core.models.gpt import GPTModel
from megatron_rig import LAYERS, Micro, graph_config
from same_bits import assert_same_bits
from torch import Tensor

import megagraph

pytestmark = [pytest.mark.megatron, pytest.mark.both]

ROUNDS = 5
PACKS = (
    Micro(lengths=(9, 20)),
    Micro(lengths=(3, 30, 8), seed=1),
    Micro(lengths=(50,), seed=2),
    Micro(lengths=(5, 7), seed=3, padded=(8, 8)),
    Micro(lengths=(40, 20), seed=4),
)
HAS_OUTPUT_PROCESSOR = "output_processor" in inspect.signature(GPTModel.forward).parameters
TRAIN, LOG_PROBS, BARE = "train", "log_probs", "bare_log_probs"


def _patched(model: Any) -> None:
    model.forward = types.MethodType(hosts.fused_forward, model)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A host's way, and what becomes of it."""

    pack: Callable[[Micro, Any], Any]  # of a micro-batch
    call: hosts.Call  # of the model
    phases: tuple[str, ...] = (LOG_PROBS, TRAIN)  # of each round
    classes: tuple[type, type | None] = (GPTModel, None)  # of the model and its block
    prepare: Callable[[Any], None] | None = None  # what the host does to the model before anything wraps it
    reasons: tuple[str, ...] = ()  # why calls may run eager beside the warm-up
    failure: str | None = None  # part of the sentence with which the model is refused; then nothing replays
    offloads: bool = False  # memory moves between the phases


class DeepModel(OwnModel):
    """Hands features of some tokens to its block, beside Megatron's arguments, as Bridge's Qwen3-VL does."""

    features: tuple[Tensor, Tensor] | None = None

    def run(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None,
        labels: Tensor | None,
        packed_seq_params: Any,
    ) -> Any:
        features = None
        if input_ids is not None:  # an image in each pack that begins with an even token
            chosen = (input_ids[0] % 5 == 0) & (input_ids[0, 0] % 2 == 0)
            table = torch.linspace(-1, 1, self.config.hidden_size, device=input_ids.device)
            features = chosen, table.to(self.config.params_dtype)
        self.decoder.features = features
        return super().run(input_ids, position_ids, attention_mask, decoder_input, labels, packed_seq_params)


class DeepBlock(OwnBlock):
    """Adds them to the rows of those tokens after its first layer."""

    features: tuple[Tensor, Tensor] | None = None

    def between(self, index: int, hidden_states: Tensor, features: Any) -> Tensor:
        if index > 0 or self.features is None:
            return hidden_states
        chosen, added = self.features
        rows = hidden_states.transpose(0, 1).contiguous()
        rows[0, chosen] = rows[0, chosen].clone() + added
        return rows.transpose(0, 1).contiguous()


CASES = {
    "verl": Case(pack=hosts.verl_pack, call=hosts.verl_call),
    "verl, log-probabilities alone": Case(pack=hosts.verl_pack, call=hosts.verl_call, phases=(LOG_PROBS,)),
    "verl, everything away between phases": Case(
        pack=hosts.verl_pack, call=hosts.verl_call, offloads=True, reasons=("ADDRESS_MOVED",)
    ),
    "verl, fused by the instance": Case(
        pack=hosts.verl_pack, call=hosts.fused_instance_call, prepare=_patched
    ),
    "verl, fused by the output processor": Case(pack=hosts.verl_pack, call=hosts.fused_hook_call),
    "Bridge": Case(pack=hosts.bridge_pack, call=hosts.labels_call, phases=(TRAIN, TRAIN, LOG_PROBS)),
    "Bridge, padded to one count": Case(pack=hosts.bridge_padded_pack, call=hosts.full_rows_call),
    "Bridge, LoRA": Case(pack=hosts.bridge_pack, call=hosts.labels_call, prepare=hosts.adapt),
    "Bridge, features between layers": Case(
        pack=hosts.bridge_pack, call=hosts.labels_call, classes=(DeepModel, DeepBlock), reasons=("NESTING",)
    ),
    "ms-swift": Case(pack=hosts.swift_pack, call=hosts.labels_call, classes=(OwnModel, OwnBlock)),
    "ms-swift, logits": Case(pack=hosts.swift_pack, call=hosts.verl_call, classes=(OwnModel, OwnBlock)),
    "ms-swift, GRPO": Case(
        pack=hosts.swift_pack, call=hosts.labels_call, classes=(OwnModel, OwnBlock), phases=(BARE, TRAIN)
    ),
    "ms-swift, RoPE unfused": Case(
        pack=hosts.swift_pack,
        call=hosts.labels_call,
        classes=(PerTokenModel, OwnBlock),
        failure="what its forward hands to the layers depends on more than the pack's capacity",
    ),
}


def _loop(
    case: Case, mode: str, reference: Callable[[hosts.Host], Any] | None = None
) -> tuple[list[Tensor], Any]:
    """What each phase of each round left, and the reports."""
    megagraph.install(graph_config(mode=mode))
    try:
        trainer = HostTrainer(*case.classes, case.prepare)
        host = hosts.Host(
            trainer=trainer,
            pack=case.pack,
            call=case.call,
            schedule=hosts.bridge_schedule()
            if case.pack in (hosts.bridge_pack, hosts.bridge_padded_pack)
            else {},
            offloads=case.offloads,
        )
        if reference is not None:
            host.reference = reference(host)
        for index in range(ROUNDS):
            micros = [PACKS[(index + place) % len(PACKS)] for place in range(1 + index % 3)]
            for phase in case.phases:
                getattr(host, phase)(micros)
        reports = megagraph.reports()
    finally:
        megagraph.uninstall()
    for report in reports:
        assert report["calls"] == report["replays"] + sum(report["eager"].values())
    return host.left, reports


@pytest.mark.parametrize("name", CASES)
def test_a_hosts_calls_replay_with_the_bits_of_eager_or_are_refused_by_a_sentence(name: str) -> None:
    case = CASES[name]
    if case.call is hosts.fused_hook_call and not HAS_OUTPUT_PROCESSOR:
        pytest.skip("this release of megatron-core has no output processor")
    graphed, (report,) = _loop(case, "graph")
    eager, (eager_report,) = _loop(case, "eager")
    assert_same_bits(graphed, eager)
    calls = sum(1 + index % 3 for index in range(ROUNDS)) * len(case.phases) * LAYERS
    assert report["calls"] == eager_report["calls"] == calls
    assert eager_report["replays"] == 0
    allowed = {"WARMING_UP", *case.reasons, *(() if case.failure is None else ("SCOPE_UNSUPPORTED",))}
    assert {*report["eager"]} <= allowed, report
    if case.failure is not None:
        assert report["replays"] == 0 and case.failure in report["failures"][-1]
        return
    assert report["failures"] == []
    assert report["replays"] >= calls // 3, report
    if case.offloads:  # the first move alone costs a step, of training, which it meets in the second round
        assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "ADDRESS_MOVED": 2 * LAYERS}


def test_packs_that_declare_all_their_tokens_run_as_given() -> None:
    """Positions of unfused RoPE go on from document to document in them."""
    case = Case(pack=hosts.bridge_whole_pack, call=hosts.full_rows_call)
    graphed, (report,) = _loop(case, "graph")
    eager, _reports = _loop(case, "eager")
    assert_same_bits(graphed, eager)
    assert {*report["eager"]} == {"SIGNATURE_CHANGED"} and report["replays"] == 0


@pytest.mark.parametrize("of", ["another model", "the policy itself"])
def test_a_reference_that_is_asked_inside_the_policys_forward_step(of: str) -> None:
    """As DPO of ms-swift: without gradients, in training mode, in the same micro-batch."""
    case = Case(pack=hosts.swift_pack, call=hosts.labels_call, classes=(OwnModel, OwnBlock), phases=(TRAIN,))

    def reference(host: hosts.Host) -> Any:
        if of == "the policy itself":
            return host.trainer.chunk
        torch.manual_seed(3)
        model, called = bare_model(OwnModel, OwnBlock)
        model.requires_grad_(False).train()
        return called

    graphed, reports = _loop(case, "graph", reference)
    eager, _reports = _loop(case, "eager", reference)
    assert_same_bits(graphed, eager)
    calls = sum(1 + index % 3 for index in range(ROUNDS)) * LAYERS
    for report in reports:
        assert {*report["eager"]} <= {"WARMING_UP", "NESTING", "NO_FREE_SLOT"}
    if of == "the policy itself":
        assert [report["calls"] for report in reports] == [2 * calls]
    else:
        assert [report["calls"] for report in reports] == [calls, calls]
    assert reports[0]["replays"] >= calls // 3
