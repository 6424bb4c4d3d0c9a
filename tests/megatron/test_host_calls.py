# SPDX-License-Identifier: Apache-2.0
"""The calls of verl, Megatron-Bridge and ms-swift replay, or run eager for a reason that is counted."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import host_rig as hosts
import megatron_rig as rig
import pytest
import torch
from host_rig import HostTrainer, OwnBlock, OwnModel, PerTokenModel
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_rig import LAYERS, OPTIONS, Install, Micro, forward, graph_config, ran, report_of, step
from same_bits import assert_same_bits
from torch import Tensor

import megagraph
from megagraph.demo.trainer import Trainer, in_half_precision

pytestmark = pytest.mark.both

ROUNDS = 4
PADDED = Micro(lengths=(5, 7), seed=3, padded=(8, 8))
PACKS = (rig.ONE, rig.TWO, rig.OTHER, PADDED, Micro(lengths=(40, 20), seed=4))
MICRO_BATCHES = sum(1 + index % 3 for index in range(ROUNDS))  # of each phase
TRAIN, LOG_PROBS, BARE = "train", "log_probs", "bare_log_probs"


@dataclass(frozen=True, kw_only=True)
class Case:
    pack: Callable[[Micro, Any], Any]  # of a micro-batch
    call: hosts.Call  # of the model
    phases: tuple[str, ...] = (LOG_PROBS, TRAIN)  # of each round
    classes: tuple[type, type | None] = (GPTModel, None)  # of the model and its block
    prepare: Callable[[Any], None] = lambda model: None  # done to the model before anything wraps it
    reasons: tuple[str, ...] = ("WARMING_UP",)  # why calls may run eager
    offload: Callable[[], hosts.Offload | None] = lambda: None  # moves memory between the phases
    announces: bool = False  # and says so
    reference: str | None = None  # whom the policy's forward step asks beside it

    @property
    def replays(self) -> bool:
        return "WARMING_UP" in self.reasons


VERL: dict[str, Any] = {"pack": hosts.verl_pack, "call": hosts.verl_call}
BRIDGE: dict[str, Any] = {"pack": hosts.bridge_pack, "call": hosts.labels_call}
SWIFT = {"pack": hosts.swift_pack, "call": hosts.labels_call, "classes": (OwnModel, OwnBlock)}
# As DPO of ms-swift: without gradients, in training mode, in the same micro-batch. The policy's own slot is
# held meanwhile.
DPO: dict[str, Any] = {**SWIFT, "phases": (TRAIN,), "reasons": ("WARMING_UP", "NESTING", "NO_FREE_SLOT")}
CASES = {
    "verl": Case(**VERL),
    "verl, log-probabilities alone": Case(**VERL, phases=(LOG_PROBS,)),
    "verl, everything away between phases": Case(
        **VERL, offload=hosts.Offload, reasons=("WARMING_UP", "ADDRESS_MOVED")
    ),
    "verl, away through Megatron, and announced": Case(
        **VERL, offload=partial(hosts.Offload, megatrons_own=True), announces=True
    ),
    "verl, fused": Case(**{**VERL, "call": hosts.fused_hook_call}),
    "Bridge": Case(**BRIDGE, phases=(TRAIN, TRAIN, LOG_PROBS)),
    "Bridge, padded to one count": Case(pack=hosts.bridge_padded_pack, call=hosts.full_rows_call),
    # Positions of unfused RoPE go on from document to document in packs that declare all their tokens.
    "Bridge, padded to all tokens": Case(
        pack=hosts.bridge_whole_pack, call=hosts.full_rows_call, reasons=("SIGNATURE_CHANGED",)
    ),
    "Bridge, LoRA": Case(**BRIDGE, prepare=hosts.adapt),
    "ms-swift": Case(**SWIFT),
    "ms-swift, GRPO": Case(**SWIFT, phases=(BARE, TRAIN)),
    "ms-swift, DPO": Case(**DPO, reference="another model"),
    "ms-swift, DPO with its own policy": Case(**DPO, reference="the policy itself"),
    "ms-swift, RoPE unfused": Case(**{**SWIFT, "classes": (PerTokenModel, OwnBlock)}),
}


def _loop(case: Case, mode: str) -> tuple[list[Tensor], Any]:
    """What each phase of each round left, and the reports."""
    megagraph.install(graph_config(mode=mode))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    bridges = {"seq_length": OPTIONS.max_tokens, "p2p_communicator": None, "pg_collection": groups}
    try:
        trainer = HostTrainer(*case.classes, prepare=case.prepare)
        reference: Any = trainer.chunk if case.reference else None
        if case.reference == "another model":
            model, reference = hosts.frozen_model(3, *case.classes)
            model.train()
        host = hosts.Host(
            trainer=trainer,
            schedule=bridges if case.pack in (hosts.bridge_pack, hosts.bridge_padded_pack) else {},
            reference=reference,
            offload=case.offload(),
            **{name: getattr(case, name) for name in ("pack", "call", "announces")},
        )
        for index in range(ROUNDS):
            micros = [PACKS[(index + place) % len(PACKS)] for place in range(1 + index % 3)]
            for phase in case.phases:
                host.run(phase, micros)
        return host.left, megagraph.reports()
    finally:
        megagraph.uninstall()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # Megatron's
@pytest.mark.parametrize("name", CASES)
def test_a_hosts_calls_replay_with_the_bits_of_eager_or_are_refused_by_a_sentence(name: str) -> None:
    case = CASES[name]
    if case.call is hosts.fused_hook_call and not hosts.HAS_OUTPUT_PROCESSOR:
        pytest.skip("this release of megatron-core has no output processor")
    graphed, reports = _loop(case, "graph")
    eager, eager_reports = _loop(case, "eager")
    assert_same_bits(graphed, eager)
    calls = MICRO_BATCHES * len(case.phases) * LAYERS
    of_each = {None: [calls], "another model": [calls, calls], "the policy itself": [2 * calls]}
    for found in (reports, eager_reports):
        assert [report["calls"] for report in found] == of_each[case.reference]
    assert all(report["replays"] == 0 for report in eager_reports)
    assert all({*report["eager"]} <= {*case.reasons} for report in reports), reports
    report = reports[0]
    assert report["failures"] == []
    assert report["replays"] >= calls // 3 if case.replays else report["replays"] == 0, report
    # A frozen model that is called inside of another one's step alone.
    assert all(frozen["replays"] >= calls - 2 * LAYERS for frozen in reports[1:]), reports
    if "ADDRESS_MOVED" in case.reasons:  # the first move alone costs a step, of training, in the second round
        assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "ADDRESS_MOVED": 2 * LAYERS}
    if "away" in name:  # those of the last phase: nothing piles up
        assert report["graphs"] == 2 * LAYERS


def test_calls_before_the_first_schedule_replay_although_a_ddp_is_around(trainer: Trainer) -> None:
    """As GRPO's. Bug: nobody had shown the plugin the DDP, whose hooks were somebody's (FOREIGN_HOOK)."""
    for _ in range(4):
        with torch.no_grad():
            forward(trainer.chunk, PACKS[0], trainer.device)
    ran(report_of(trainer), WARMING_UP=LAYERS)
    step(trainer, [PACKS[0]], update=False, times=3)
    ran(report_of(trainer), (3 + 2) * LAYERS, WARMING_UP=2 * LAYERS)


def test_what_hooks_of_a_ddp_were_taken_for_is_no_failure_once_a_schedule_shows_it(install: Install) -> None:
    """The model has been called before there was a DDP, and is called before the first schedule."""

    def call(chunk: Any) -> None:
        in_half_precision(chunk.to(device))
        for _ in range(2):
            with torch.no_grad():
                forward(chunk, PACKS[0], device)

    install()
    device = torch.device("cuda" if rig.ON_GPU else "cpu")
    trainer = rig.ModelTrainer(prepare=call)
    for _ in range(2):
        forward(trainer.chunk, PACKS[0], trainer.device)[0].sum().backward()
    (before,) = megagraph.reports()
    step(trainer, [PACKS[0]], update=False, times=3)
    (report,) = megagraph.reports()
    assert len(before["failures"]) == LAYERS == before["eager"]["FOREIGN_HOOK"] // 2
    assert report["failures"] == [] and report["eager"] == before["eager"] and report["graphs"]
