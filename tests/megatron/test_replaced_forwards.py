# SPDX-License-Identifier: Apache-2.0
"""Forwards that a host sets, at first or later: no layer is split where one would be passed over."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from megatron_rig import Install, Pair, steps_of
from moe_rig import ExpertTrainer

pytestmark = [pytest.mark.megatron, pytest.mark.both, pytest.mark.usefixtures("experts")]

BOTH = ("attn", "moe_router")
# What is graphed, and which forward is set, by the child that has it and its name.
CASES = [
    (("attn",), "", "forward"),
    (BOTH, "", "forward"),
    (BOTH, "", "_forward_mlp"),
    (BOTH, "mlp", "forward"),
]


def replaced(trainer: ExpertTrainer, child: str, name: str, *, wraps: bool) -> Callable[[], None]:
    """Sets a forward of the second layer that doubles what Megatron's makes. Returns what takes it away."""
    owner = trainer.chunk.decoder.layers[1].get_submodule(child)
    megatrons = getattr(owner, name)

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = megatrons(*args, **kwargs)
        return (out[0] * 2, out[1]) if isinstance(out, tuple) else out * 2

    setattr(owner, name, functools.wraps(megatrons)(doubled) if wraps else doubled)
    return functools.partial(delattr, owner, name)


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "by functools.wraps"])
@pytest.mark.parametrize(("scopes", "child", "name"), CASES)
def test_from_the_beginning(
    install: Install, scopes: Sequence[str], child: str, name: str, wraps: bool
) -> None:
    """Bug that was: a wrapper was taken for Megatron's, whose name and module it has."""
    install(cuda_graph_modules=scopes)
    pair = Pair(ExpertTrainer)
    for trainer in pair.both:
        replaced(trainer, child, name, wraps=wraps)
    report = pair.train(steps_of(3))
    assert report["eager"] == {"WARMING_UP": 3 * 2, "SCOPE_UNSUPPORTED": 2 * 3}
    assert (child, name) == ("", "forward") or "so that its router cannot run alone" in report["failures"][0]


@pytest.mark.parametrize(("scopes", "child", "name"), CASES)
def test_after_captures_and_away_again(
    install: Install, scopes: Sequence[str], child: str, name: str
) -> None:
    """Bug that was: the next capture split the layer as before, and passed over the new forward."""
    install(cuda_graph_modules=scopes)
    pair = Pair(ExpertTrainer)
    first, second, last = (steps_of(8)[part] for part in (slice(3), slice(3, 6), slice(6, None)))
    pair.train(first)
    takers = [replaced(trainer, child, name, wraps=True) for trainer in pair.both]
    pair.train(second)
    for take in takers:
        take()
    report = pair.train(last)
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
    changes: dict[str, Any] = {"is_grouped": True}
    if scopes:
        changes = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    pair = Pair(ExpertTrainer, kinds="E-", **changes)
    pair.train(steps_of(5)[:2])
    if how == "its own choices":
        for router in (router for trainer in pair.both for router in trainer.routers()):
            router.router_replay = Replay()
    else:
        routing = TopKRouter.routing
        flipped = functools.wraps(routing)(lambda router, it, **how: routing(router, it.flip(-1), **how))
        monkeypatch.setattr(TopKRouter, "routing", flipped)
    report = pair.train(steps_of(5)[2:])
    assert report["eager"] == {"WARMING_UP": 6, "STATE_CHANGED": 6, "SCOPE_UNSUPPORTED": 2 * 3}
    assert "may be told what to choose" in report["failures"][0]
