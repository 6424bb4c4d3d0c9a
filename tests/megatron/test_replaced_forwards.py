# SPDX-License-Identifier: Apache-2.0
"""Forwards that a host sets, at first or later: no layer is split where one would be passed over."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import moe_rig
import pytest
from moe_rig import ExpertTrainer, expert_step, steps_of
from same_bits import assert_same_bits

import megagraph
from megagraph.config import GraphConfig
from megagraph.megatron.specs import with_grouped_experts

pytestmark = [pytest.mark.megatron, pytest.mark.both]

Install = Callable[..., GraphConfig]
BOTH = ("attn", "moe_router")
# What is graphed, and which forward is set, by the child that has it and its name.
CASES = [
    (("attn",), "", "forward"),
    (BOTH, "", "forward"),
    (BOTH, "", "_forward_mlp"),
    (BOTH, "mlp", "forward"),
]


@pytest.fixture(autouse=True)
def experts() -> Iterator[None]:
    moe_rig.forget_metrics()
    with moe_rig.experts_on_cpu():
        yield


def replaced(trainer: ExpertTrainer, child: str, name: str, *, wraps: bool) -> Callable[[], None]:
    """Sets a forward of the second layer that doubles what Megatron's makes. Returns what takes it away."""
    owner = trainer.chunk.decoder.layers[1].get_submodule(child)
    megatrons = getattr(owner, name)

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = megatrons(*args, **kwargs)
        return (out[0] * 2, out[1]) if isinstance(out, tuple) else out * 2

    setattr(owner, name, functools.wraps(megatrons)(doubled) if wraps else doubled)
    return functools.partial(delattr, owner, name)


def train(trainer: ExpertTrainer, changes: dict[int, Callable[[], Any]], **options: Any) -> list[Any]:
    moe_rig.metrics()
    found = []
    for index, micros in enumerate(steps_of(8)):
        changes.get(index, lambda: None)()
        found.append(expert_step(trainer, micros, **options))
    return found


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "by functools.wraps"])
@pytest.mark.parametrize(("scopes", "child", "name"), CASES)
def test_from_the_beginning(
    install: Install, scopes: Sequence[str], child: str, name: str, wraps: bool
) -> None:
    """Bug that was: a wrapper was taken for Megatron's, whose name and module it has."""
    install(cuda_graph_modules=scopes)
    trainers = [ExpertTrainer() for _ in range(2)]
    for trainer in trainers:
        replaced(trainer, child, name, wraps=wraps)
    for one, other in zip(train(trainers[0], {}, eager=True), train(trainers[1], {}), strict=True):
        assert_same_bits(one, other)
    assert megagraph.reports()[1]["eager"] == {"WARMING_UP": 3 * 2, "SCOPE_UNSUPPORTED": 7 * 3}


@pytest.mark.parametrize(("scopes", "child", "name"), CASES)
def test_after_captures_and_away_again(
    install: Install, scopes: Sequence[str], child: str, name: str
) -> None:
    """Bug that was: the next capture split the layer as before, and passed over the new forward."""
    install(cuda_graph_modules=scopes)
    trainers = [ExpertTrainer() for _ in range(2)]
    found = []
    for trainer in trainers:
        takers: list[Callable[[], None]] = []

        def put(trainer: ExpertTrainer = trainer, takers: list[Callable[[], None]] = takers) -> None:
            takers.append(replaced(trainer, child, name, wraps=True))

        def take(takers: list[Callable[[], None]] = takers) -> None:
            takers.pop()()

        found.append(train(trainer, {3: put, 6: take}, eager=trainer is trainers[0]))
    assert_same_bits(*found, "steps")
    report = megagraph.reports()[1]
    assert report["eager"].get("SCOPE_UNSUPPORTED", 0) >= 2 * 3 and report["replays"] >= 2 * 3 * 2 + 2 * 3
    assert set(report["eager"]) <= {"WARMING_UP", "STATE_CHANGED", "SCOPE_UNSUPPORTED"}


@pytest.mark.parametrize("how", ["a patch of the class", "its own choices"])
@pytest.mark.parametrize("scopes", [BOTH, ("moe_router", "moe_preprocess"), ("attn", "moe"), ()], ids=str)
def test_routing_that_is_replayed_from_some_step_on(
    install: Install, scopes: Sequence[str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug that might be: graphs go on choosing, or choose for ever what some micro-batch was told to.

    Where no scope is named, experts are grouped, and layers with them graphed whole.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    class Replay:
        def get_replay_topk(self, scores: Any, topk: int, groups: Any, of_groups: Any, choose: Any) -> Any:
            return choose(scores.flip(1), topk)

    install(cuda_graph_modules=(*scopes, "mlp") if scopes else ())
    changes: dict[str, Any] = {"spec": with_grouped_experts(moe_rig.block_spec("E-"))}
    if scopes:
        changes = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    trainers = [ExpertTrainer("E-", **changes) for _ in range(2)]
    found = []
    routing = TopKRouter.routing
    for trainer in trainers:

        def tell(trainer: ExpertTrainer = trainer) -> None:
            if how == "its own choices":
                for router in moe_rig.routers(trainer):
                    router.router_replay = Replay()
                return
            flipped = functools.wraps(routing)(lambda router, it, **how: routing(router, it.flip(-1), **how))
            monkeypatch.setattr(TopKRouter, "routing", flipped)

        found.append(train(trainer, {4: tell}, eager=trainer is trainers[0]))
        monkeypatch.undo()
    assert_same_bits(*found, "steps")
    report = megagraph.reports()[1]
    assert report["eager"] == {"WARMING_UP": 6, "STATE_CHANGED": 6, "SCOPE_UNSUPPORTED": 3 * 3}
    assert "may be told what to choose" in report["failures"][0]
