# SPDX-License-Identifier: Apache-2.0
"""Makes a scenario that fails as short and as plain as it can be."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from .models import PLUGIN
from .scenarios import Scenario

__all__ = ["shrink"]

PACK = {"lengths": [9, 20]}


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], seconds: float) -> Scenario:
    """The plainest one found in that time that fails in the same way."""
    deadline = time.monotonic() + seconds

    def still_fails(candidate: Scenario) -> bool:
        return time.monotonic() < deadline and fails(candidate)

    before = None
    while scenario != before:
        before = scenario
        size = len(scenario.events)
        while size:  # ever smaller pieces, the last one first
            for start in range(len(scenario.events) - size, -1, -size):
                events = scenario.events[:start] + scenario.events[start + size :]
                candidate = dataclasses.replace(scenario, events=events)
                if still_fails(candidate):
                    scenario = candidate
            size //= 2
        for candidate in _plainer(scenario):
            if still_fails(candidate):
                scenario = candidate
                break
    return scenario


def _plainer(scenario: Scenario) -> Iterator[Scenario]:
    """With one thing that is plainer."""
    if scenario.kind != "dense":
        yield dataclasses.replace(scenario, kind="dense", scopes=())
    for name, (plain, *_) in PLUGIN.items():
        if scenario.plugin[name] != plain:
            yield dataclasses.replace(scenario, plugin={**scenario.plugin, name: plain})
    for index, (name, given) in enumerate(scenario.events):
        for value in _plainer_values(given):
            events = (*scenario.events[:index], (name, value), *scenario.events[index + 1 :])
            yield dataclasses.replace(scenario, events=events)


def _plainer_values(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    packs = given.get("packs", [])
    for index in range(len(packs) if len(packs) > 1 else 0):
        yield {**given, "packs": [*packs[:index], *packs[index + 1 :]]}
    if any(each != PACK for each in packs):
        yield {**given, "packs": [PACK] * len(packs)}
    if given.get("ranks", [0, 1]) != [0, 1]:
        yield {**given, "ranks": [0, 1]}
    if given.get("model"):
        yield {**given, "model": 0}
