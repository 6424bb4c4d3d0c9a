# SPDX-License-Identifier: Apache-2.0
"""Scenarios as plain data: how a seed draws one."""

import json
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from .events import EVENTS
from .models import KINDS, SHARES_PACKS, draw_plugin

__all__ = ["Scenario", "draw"]


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
        """Plain text, which `from_json()` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Scenario":
        """Of such a text."""
        given = json.loads(text)
        given["scopes"] = tuple(given["scopes"])
        given["events"] = tuple((name, values) for name, values in given["events"])
        return cls(**given)


def draw(seed: int, num_events: int, ranks: int = 1) -> Scenario:
    """The scenario of a seed."""
    rng = Random(seed)
    kind = rng.choice([name for name, it in KINDS.items() if ranks == 1 or it.layouts])
    names = [name for name, it in EVENTS.items() if ranks == 1 or it.of_ranks]
    chosen = rng.choices(names, [EVENTS[name].weight for name in names], k=num_events)
    layouts = sorted(KINDS[kind].layouts)
    return Scenario(
        seed=seed,
        kind=kind,
        scopes=rng.choice(KINDS[kind].scopes),
        plugin=draw_plugin(rng),
        events=tuple((name, EVENTS[name].draw(rng)) for name in chosen),
        layout=rng.choices(layouts, [1 + 2 * (it in SHARES_PACKS) for it in layouts])[0] if ranks > 1 else "",
    )
