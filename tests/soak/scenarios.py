# SPDX-License-Identifier: Apache-2.0
"""Scenarios as plain data: how a seed draws one, and how one that fails is made short and plain."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from .events import EVENTS
from .models import KINDS, PLUGIN, SHARES_PACKS, draw_plugin


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model, options of the plugin, and what happens to them, in order."""

    seed: int
    kind: str  # of the first model
    scopes: tuple[str, ...]
    plugin: dict[str, Any]  # further options
    events: tuple[tuple[str, dict[str, Any]], ...]  # names in the table, and what they are given
    layout: str = ""  # how ranks share the model

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Scenario":
        given = json.loads(text)
        given["scopes"] = tuple(given["scopes"])
        given["events"] = tuple((name, values) for name, values in given["events"])
        return cls(**given)


def draw(seed: int, num_events: int, ranks: int = 1) -> Scenario:
    rng = Random(seed)
    kind = rng.choice([name for name, it in KINDS.items() if ranks == 1 or it.layouts])
    names = [name for name, it in EVENTS.items() if ranks == 1 or it.of_ranks]
    chosen = rng.choices(names, [EVENTS[name].weight for name in names], k=num_events)
    layouts = sorted(KINDS[kind].layouts)
    weights = [1 + 2 * (it in SHARES_PACKS) for it in layouts]
    given: dict[str, Any] = {"scopes": rng.choice(KINDS[kind].scopes), "plugin": draw_plugin(rng)}
    given["events"] = tuple((name, EVENTS[name].draw(rng)) for name in chosen)
    given["layout"] = rng.choices(layouts, weights)[0] if ranks > 1 else ""
    return Scenario(seed=seed, kind=kind, **given)


# -- what fails ----------------------------------------------------------------------------------------

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
