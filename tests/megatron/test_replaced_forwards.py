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


def _doubled(trainer: ExpertTrainer, child: str, name: str) -> Callable[[], None]:
    """Sets a forward of the second layer that doubles what Megatron's makes. Returns what takes it away."""
    owner = trainer.chunk.decoder.layers[1].get_submodule(child)
    megatrons = getattr(owner, name)

    @functools.wraps(megatrons)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = megatrons(*args, **kwargs)
        return (out[0] * 2, out[1]) if isinstance(out, tuple) else out * 2

    setattr(owner, name, doubled)
    return functools.partial(delattr, owner, name)


@pytest.mark.parametrize(("scopes", "child", "name"), CASES)
def test_from_the_beginning_away_and_back_again(scopes: Sequence[str], child: str, name: str) -> None:
    """Bugs: a wrapper was taken for Megatron's, whose name and module it has; and after a capture of a layer
    as it was, the next one split it as before, and passed over the new forward."""
    pair = Pair(ExpertTrainer, plugin={"cuda_graph_modules": scopes})
    steps = [[micro] for micro, *_others in steps_of(7)]
    takers = [_doubled(trainer, child, name) for trainer in pair.both]
    report = pair.train(steps[:3])
    assert report["eager"] == {"WARMING_UP": 2, "SCOPE_UNSUPPORTED": 2}
    assert (child, name) == ("", "forward") or "so that its router cannot run alone" in report["failures"][0]
    for take in takers:
        take()
    away = pair.train(steps[3:5])
    assert away["replays"] - report["replays"] >= 2
    for trainer in pair.both:
        _doubled(trainer, child, name)
    back = pair.train(steps[5:])
    assert back["eager"]["SCOPE_UNSUPPORTED"] >= 2 + 1
    assert set(back["eager"]) <= {"WARMING_UP", "STATE_CHANGED", "SCOPE_UNSUPPORTED"}


ALL = [BOTH, ("moe_router", "moe_preprocess"), ("attn", "moe"), ()]


@pytest.mark.parametrize(
    ("scopes", "how"),
    [(BOTH, "a patch of the class"), *((scopes, "its own choices") for scopes in ALL)],
    ids=str,
)
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
