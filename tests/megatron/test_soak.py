# SPDX-License-Identifier: Apache-2.0
"""Random models, hosts and changes (tests/soak): a few seeds, and what is said of one that fails."""

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from soak.changes import CHANGES
from soak.scenarios import Scenario, draw, shrink
from soak.twins import run
from torch import nn
from watched import go_in_time

import megagraph

EVENTS = 30
SEEDS = (1, 2, 5, 6, 9)  # of kinds of models that differ


def test_any_order_of_events_leaves_eager_bits() -> None:
    outcomes = [run(draw(seed, EVENTS)) for seed in SEEDS]
    assert {it.text for it in outcomes if it.has_failed} == set()
    assert all(it.replays for it in outcomes if it.failure is None)
    assert sum(it.done.total() for it in outcomes) > EVENTS


def test_a_scenario_is_plain_data() -> None:
    scenario = draw(5, EVENTS)
    assert Scenario.from_json(scenario.as_json()) == scenario == draw(5, EVENTS) != draw(6, EVENTS)


def test_what_fails_is_made_as_short_and_plain_as_it_can_be() -> None:
    seed = next(seed for seed in range(1000) if _fails(draw(seed, EVENTS)))
    small = shrink(draw(seed, EVENTS), _fails, 10.0)
    (one, first), (other, second) = small.events
    assert (one, other) == ("suspends", "trains") and first == {"ranks": [0, 1]}
    assert second == {"packs": [{"lengths": [9, 20]}], "model": 0, "how": None}
    assert small.kind == "dense" and small.scopes == () and small.plugin["verify"] == 3


def _fails(scenario: Scenario) -> bool:
    """Where steps are suspended and verified again and again."""
    names = [name for name, _ in scenario.events]
    at = names.index("suspends") if "suspends" in names else len(names)
    return "trains" in names[at:] and scenario.plugin["verify"] == 3


def test_a_difference_ends_a_scenario_and_is_told() -> None:
    scenario = draw(1, EVENTS)
    outcome = run(dataclasses.replace(scenario, events=(("trains", {"packs": [], "model": 0, "how": None}),)))
    assert outcome.failure == "EagerRaises" and not outcome.has_failed and outcome.at == 0


def test_an_error_of_the_plugins_own_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it counted as one of the host's, since the eager twin raises it as well."""
    nothing: Any = None
    monkeypatch.setitem(CHANGES, "watch of nothing", lambda _trainer: megagraph.watch(nothing, key=int))
    outcome = run(dataclasses.replace(draw(1, EVENTS), events=(("changes", {"name": "watch of nothing"}),)))
    assert outcome.failure == "TypeError" and outcome.has_failed


def test_what_only_history_led_to_is_no_leak() -> None:
    """Bug: a model was said to stay that the next collection took."""
    model, out = nn.Module(), torch.ones(1, requires_grad=True) * 2
    vars(model)["own"] = model
    out.grad_fn.register_hook(lambda *_, held=model: None)
    error = [out]
    error.append(error)
    gone = weakref.ref(model)
    del model, out, error
    assert go_in_time(lambda: gone() is None)
