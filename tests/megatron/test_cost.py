# SPDX-License-Identifier: Apache-2.0
"""What a replay and a further layer cost the host, in calls: the same on every machine, unlike times."""

import dataclasses
import sys
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from megatron_rig import CAPACITY, LAYERS, OPTIONS, Micro, forward, graph_config, report_of, step, the_plugin
from notes import told

import megagraph
from megagraph.bank import capture
from megagraph.demo.trainer import Trainer

has_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="counts calls of the host backend's thread")
pytestmark = [has_no_gpu, pytest.mark.usefixtures("no_collection")]  # in which Hypothesis is called
PACKAGE = str(Path(megagraph.__file__).parent)
MICRO = Micro(lengths=(9, 20, 11))
BODIES = ("_forward", "_backward", "_finish")  # of passes, in place of their graphs
# The modules that an eager call passes through.
ENTRY = ("forwards", "decision", "plugin", "model", "captures", "bank", "dispatcher", "entry", "seams")


class Calls:
    """Counts calls of this thread, less those inside what the host backend replays."""

    def __init__(self) -> None:
        self.ours: Counter[str] = Counter()
        self.all = 0
        self._depth = 0  # of bodies that stand for graphs

    def _see(self, frame: FrameType, event: str, function: Any) -> None:
        code = frame.f_code
        is_body = code.co_filename == capture.__file__ and code.co_name in BODIES
        if event == "return" and is_body:
            self._depth -= 1
        if event in ("call", "c_call") and self._depth == 0 and not is_body:
            self.all += 1
            # A tensor's hash is Python's as well: Bug: three of them for each gradient told to DDP.
            by = frame.f_back if code.co_name == "__hash__" else frame
            if event == "call" and by is not None and by.f_code.co_filename.startswith(PACKAGE):
                self.ours[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1
        if event == "call" and is_body:
            self._depth += 1

    def counted(self) -> AbstractContextManager[None]:
        return told(sys.setprofile, self._see, None)


def _count(layers: int, ddp: dict[str, Any] | None = None, **plugin: Any) -> tuple[Calls, Calls, Calls]:
    """Calls of a micro-batch's forward, of its backward, which DDP takes for the last, and of a boundary."""
    megagraph.uninstall()
    megagraph.install(graph_config(**plugin))
    trainer = Trainer(dataclasses.replace(OPTIONS, layers=layers), ddp=ddp)
    step(trainer, [MICRO, MICRO], times=3)
    trainer.zero_grad()
    for group in trainer.model.bucket_groups:
        group.start_grad_sync = lambda **how: None  # the reduction itself is Megatron's
    (graphs,) = the_plugin().all_graphs()
    in_forward, in_backward, at_boundary = Calls(), Calls(), Calls()
    with at_boundary.counted():
        graphs.at_step_boundary()
    with in_forward.counted():
        losses, _ = forward(trainer.model, MICRO, trainer.device)
    with in_backward.counted():
        losses.sum().backward()
    (report,) = megagraph.reports()
    bare = {"GROUP_DISAGREED": layers} if plugin else {}  # where ranks may share packs
    assert report["eager"] == {"WARMING_UP": 2 * layers, **bare}
    return in_forward, in_backward, at_boundary


def _of_plugin(calls: Calls) -> int:
    # What lets megatron-core run on the CPU is not there on a GPU.
    return sum(count for name, count in calls.ours.items() if not name.startswith("cpu."))


def test_a_micro_batch_costs_few_calls_and_a_further_layer_none() -> None:
    """Raise a bound only with a reason: it is paid in every micro-batch, or before every step."""
    _count(2)  # fills what is cached for as long as the process
    of_two, of_six = _count(2), _count(6)
    for few, many in zip(of_two, of_six, strict=True):
        assert few.all == many.all, many.ours - few.ours
    in_forward, in_backward, at_boundary = map(_of_plugin, of_six)
    assert in_forward <= 14 and in_backward == 0 and at_boundary <= 4


def test_a_boundary_costs_as_few_calls_where_packs_say_who_shares_them() -> None:
    """Bug: it walked over all modules of the model, milliseconds of them."""
    few, many = (_count(layers, cp_sizes=(1,))[2] for layers in (2, 6))
    assert few.all == many.all, many.ours - few.ours
    assert _of_plugin(many) <= 13


def test_the_last_micro_batch_costs_no_call_of_ours_for_a_further_layer() -> None:
    """All of its parameters are in one bucket: Python is entered once, and calls Megatron for each."""
    few, many = (_count(layers, {"overlap_grad_reduce": True})[1] for layers in (2, 6))
    assert few.ours == many.ours, many.ours - few.ours
    assert _of_plugin(many) <= 4


@pytest.mark.parametrize("reason", ["NO_PACK_METADATA", "TOO_MANY_SEQUENCES"])
def test_a_call_that_runs_as_it_was_given_costs_a_few_calls(trainer: Trainer, reason: str) -> None:
    """While there are graphs. What the layers themselves call of the plugin is not counted."""
    step(trainer, [MICRO], times=3)
    calls, micro = Calls(), Micro(lengths=(1,) * (CAPACITY.num_seqs + 1))
    given = micro.given(trainer.device)
    if reason == "NO_PACK_METADATA":
        given["packed_seq_params"] = None

    def one_call(**_of_schedule: Any) -> None:
        calls.ours.clear()
        with calls.counted():
            trainer.model(**given)

    def assert_few() -> None:
        entered = {name: count for name, count in calls.ours.items() if name.split(".")[0] in ENTRY}
        assert sum(entered.values()) <= 5, entered

    with torch.no_grad():
        the_plugin().schedule(one_call)(model=[trainer.model], forward_only=True)
        assert_few()
        for _ in range(2):  # outside of any schedule; the first one ends the step that it began to count
            one_call()
        assert_few()
    assert report_of(trainer)["eager"] == {"WARMING_UP": LAYERS, reason: 3 * LAYERS}


def test_a_router_of_no_model_is_sought_once_until_models_may_change(trainer: Any, monkeypatch: Any) -> None:
    """Bug: each call of a router of multi-token prediction walked over all modules of all models."""
    step(trainer, [MICRO])
    plugin, router = the_plugin(), torch.nn.Identity()
    found, looks = plugin.all_graphs(), []
    monkeypatch.setattr(plugin, "all_graphs", lambda: looks.append(None) or found)
    assert [plugin.graphs_around(router) for _ in range(3)] == [None] * 3 and len(looks) == 1
    trainer.chunk.decoder.layers[0].router = router
    step(trainer, [MICRO])
    assert plugin.graphs_around(router) is found[0]
