# SPDX-License-Identifier: Apache-2.0
"""What somebody who watches a run sees: ranges of a profiler, a line of the log for each interval."""

import logging
import re

import pytest
from megatron_rig import LAYERS, ONE, OPTIONS, TWO, Install, evaluate, step
from torch.profiler import ProfilerActivity, profile

from megagraph.demo.trainer import Trainer


def _ranges_of_a_step(trainer: Trainer) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        step(trainer, [ONE, TWO])
    return [event.name for event in trace.events() if event.name.startswith("layer ")]


def test_replays_are_ranges_that_name_site_variant_and_slot(install: Install) -> None:
    install(cuda_graph_nvtx=True)
    trainer = Trainer(OPTIONS)
    step(trainer, [ONE, TWO], times=2)
    found = _ranges_of_a_step(trainer)
    variant = "training, 64 tokens, 5 documents of up to 64, slot 0"
    expected = [
        f"layer {index} (TransformerLayer), {variant} {way}"
        for index in range(LAYERS)
        for way in ("forward", "backward")
    ]
    assert sorted(found) == sorted(2 * expected)


def test_nobody_who_does_not_ask_gets_ranges(trainer: Trainer) -> None:
    step(trainer, [ONE, TWO], times=2)
    assert _ranges_of_a_step(trainer) == []


def test_each_interval_of_training_steps_has_a_line(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(log_interval=2)
    trainer = Trainer(OPTIONS)
    with caplog.at_level(logging.INFO, logger="megagraph"):
        for _ in range(4):
            step(trainer, [ONE, TWO])
            evaluate(trainer, [ONE])  # is no training step
    lines = [record.getMessage() for record in caplog.records if "layer calls" in record.getMessage()]
    calls = 2 * LAYERS
    guards = "- names left out; {0} verified in - s"
    assert [re.sub(r"in [\d.]+ s$", "in - s", re.sub(r"\d+ names", "- names", line)) for line in lines] == [
        f"steps 1-2: GPTModel: {calls} of {2 * calls + LAYERS} layer calls replayed, {calls + LAYERS} eager "
        f"(WARMING_UP {calls + LAYERS}); 1 state captured, {guards.format(1)}",
        f"steps 3-4: GPTModel: {2 * calls + 2 * LAYERS} of {2 * calls + 2 * LAYERS} layer calls replayed, "
        f"0 eager; 2 states captured, {guards.format(2)}",
    ]
