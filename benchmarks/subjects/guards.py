# SPDX-License-Identifier: Apache-2.0
"""What the guards cost the host, what a verification costs, and hosts whose layers never change."""

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import host_seconds, wall_ms
from benchmarks.subjects.bits import HOSTS, LAYER_KINDS, measure_host, spec_of
from benchmarks.subjects.hosts import check_replays, install_for
from benchmarks.subjects.inside import graphs_of
from benchmarks.subjects.layers import made_quickly
from benchmarks.subjects.packs import a_pack, model_options
from megagraph import megatron
from megagraph.demo.trainer import ModelOptions, Trainer

ROUNDS, CALLS = 200, 10  # calls of each hot sample
IDLE_SECONDS = 0.002
MICRO_BATCHES = 4
DOCUMENTS = 8  # of the capacity
ALARM_STEPS, VERIFY_ONE_IN = 1000, 50
ALARM_MODEL = model_options(256, layers=3, tokens=512)


@dataclass(frozen=True, kw_only=True)
class Alarms:
    """A host that changes nothing in its layers.

    Args:
        host: of `HOSTS`.
        transformer_engine: layers of its modules, otherwise ours.
    """

    host: str
    transformer_engine: bool


ALARMS = {
    f"{host}, {ALARM_STEPS} steps, {layers}": Alarms(host=host, transformer_engine=is_engine)
    for host in HOSTS
    for layers, is_engine in LAYER_KINDS.items()
}


def measure_alarms(alarms: Alarms, options: ModelOptions = ALARM_MODEL, steps: int = ALARM_STEPS) -> Answer:
    """The report of a long training."""
    host = HOSTS[alarms.host]
    return measure_host(
        host, options, steps, transformer_engine=alarms.transformer_engine, verify=VERIFY_ONE_IN
    )


def _captured(options: ModelOptions, transformer_engine: bool) -> Trainer:
    trainer = made_quickly(Trainer, options, spec=spec_of(transformer_engine))
    for _ in range(3):  # one to warm up; before the second is the capture
        trainer.forward_backward([a_pack(options.max_tokens)] * MICRO_BATCHES)
    check_replays(graphs_of(trainer).report())
    return trainer


def measure_guards(options: ModelOptions, *, transformer_engine: bool) -> Answer:
    """Microseconds a layer that guards take before a call and before a step, and what a verification took.

    `hot`: one after another; `idle`: each after the host has slept. `eager`: seconds of a micro-batch.
    """
    install_for(options.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1)
    try:
        trainer = _captured(options, transformer_engine)
        watch = graphs_of(trainer).block.watch
        checks = {"call": lambda: watch.state(False), "step": watch.whole_state}
        times: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for name, check in checks.items():
                hot = host_seconds(lambda check=check: [check() for _ in range(CALLS)])  # type: ignore[misc]
                time.sleep(IDLE_SECONDS)
                idle = host_seconds(check)
                for how, seconds in (("hot", hot / CALLS), ("idle", idle)):
                    times.setdefault(f"{name}, {how}", []).append(seconds * 1e6 / options.layers)
        verification: dict[str, Any] = graphs_of(trainer).report()["verification"]
        return {"times": times, "verification": verification, "eager": _eager_seconds(trainer)}
    finally:
        megatron.uninstall()


def _eager_seconds(trainer: Trainer) -> float:
    with megatron.disable_cuda_graphs_this_step():
        return wall_ms(lambda: trainer.forward_backward([a_pack(trainer.options.max_tokens)])) / 1e3
