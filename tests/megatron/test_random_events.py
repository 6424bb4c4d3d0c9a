# SPDX-License-Identifier: Apache-2.0
"""Training interrupted by whatever hosts do, in any order: after each event the bits are those of eager."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from host_rig import Offload
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from megatron_rig import Micro, Pair, around_mlps, graph_config, schedule
from state_changes import CHANGES, Probe, Undo

import megagraph
from megagraph.demo.trainer import Trainer

PACKS = (
    Micro(lengths=(9, 20)),
    Micro(lengths=(3, 30, 8), seed=1),
    Micro(lengths=(50,), seed=2),
    Micro(lengths=(5, 0, 7), seed=3, padded=(8, 4, 8)),
    Micro(lengths=(3,) * 9, seed=4),  # fits no capacity
)
# What lasts until it is taken back. Weights that are parametrized cannot be; tied ones would train apart.
LASTING = [name for name, change in CHANGES.items() if not change.lasts and name != "tied weights"]
EVENTS = int(os.environ.get("MEGAGRAPH_TEST_EVENTS", "150"))
_EVENTS_EACH = 50
steps = st.lists(st.sampled_from(PACKS), min_size=1, max_size=3)


class _Broken(Exception):
    """Raised in the middle of a step."""


class Events(RuleBasedStateMachine):
    """Two models of the same weights; every rule does the same to both."""

    def __init__(self) -> None:
        super().__init__()
        self.undos: dict[str, Undo] = {}
        self.held: list[Any] = []

    @initialize()
    def begin(self) -> None:
        megagraph.uninstall()
        megagraph.install(graph_config(cuda_graph_max_states=4))
        self.pair = Pair(prepare=around_mlps(Probe))
        self.pair.step(PACKS[0], times=2)

    def teardown(self) -> None:
        for undo in reversed(self.undos.values()):
            undo()
        torch.set_float32_matmul_precision("highest")
        megagraph.resume()
        megagraph.uninstall()

    @rule(micros=steps)
    def trains(self, micros: list[Micro]) -> None:
        self.pair.step(*micros)

    @rule(micros=steps)
    def evaluates(self, micros: list[Micro]) -> None:
        self.pair.evaluate(*micros)

    @rule(micros=steps)
    def breaks_off(self, micros: list[Micro]) -> None:
        """A step that raises before its last micro-batch, and whose gradients nobody uses."""

        def until_it_breaks() -> Iterator[Micro]:
            yield from micros
            raise _Broken

        def break_off(trainer: Trainer) -> None:
            with contextlib.suppress(_Broken):
                schedule(trainer.model, until_it_breaks(), len(micros) + 1, trainer.device)

        self.pair.each(break_off)

    @rule(name=st.sampled_from(LASTING))
    def changes(self, name: str) -> None:
        """Or takes back what was changed."""
        if name in self.undos:
            self.undos.pop(name)()
            return
        if not self._goes_with_what_lasts(name):
            return
        self.undos[name] = CHANGES[name].of_both(self.pair)

    def _goes_with_what_lasts(self, name: str) -> bool:
        """Changes are taken back one by one, so that no two may touch the same thing."""

        def touches(what: str) -> set[str]:
            words = {
                "layers": "layer layers list",
                "forward": "forward",
                "values": "adapter tensor buffer configuration function list",
                "class": "class",
                "weight": "weight merged parameter",
                "mode": "mode",
                "number": "float",
            }
            return {kind for kind, parts in words.items() if any(part in what for part in parts.split())}

        mine = touches(name)
        return not any(mine & touches(other) or "layer" in name or "layer" in other for other in self.undos)

    @rule()
    def moves_gradients(self) -> None:
        for trainer in self.pair.both:
            self.held.append(Offload())
            self.held[-1].move_gradients(trainer.model)

    @rule()
    def moves_a_weight(self) -> None:
        for trainer in self.pair.both:
            weight = trainer.chunk.decoder.layers[0].self_attention.linear_proj.weight
            self.held.append(weight.data)
            weight.data = weight.data.clone()

    @rule()
    def reloads(self) -> None:
        for trainer in self.pair.both:
            weights = {name: it.clone() for name, it in trainer.chunk.state_dict().items() if it is not None}
            trainer.chunk.load_state_dict(weights, strict=False)  # without what modules keep beside tensors

    @rule(precision=st.sampled_from(["highest", "high"]))
    def sets_a_precision(self, precision: str) -> None:
        torch.set_float32_matmul_precision(precision)

    @rule()
    def suspends(self) -> None:
        megagraph.suspend()

    @rule()
    def resumes(self) -> None:
        megagraph.resume()

    @rule()
    def counts(self) -> None:
        self.pair.report()


def test_any_order_of_events_leaves_eager_bits() -> None:
    run_state_machine_as_test(
        Events,
        settings=settings(
            max_examples=max(EVENTS // _EVENTS_EACH, 1),
            stateful_step_count=_EVENTS_EACH,
            suppress_health_check=list(HealthCheck),
        ),
    )
