# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario on two ranks, each of which compares its own bits."""

import re
import time

from streams import make_groups, makes_groups
from worlds import World

from .models import LAYOUTS
from .scenarios import Scenario
from .twins import Outcome, run

__all__ = ["run_on_ranks"]

SECONDS = 40.0  # of one scenario, which takes ten: one that hangs is to be found
LATE_SECONDS = 10.0  # that one rank may take longer


@makes_groups
def of_each_rank(*, scenario: str) -> Outcome:
    """Raises what has failed, so that nobody waits for this rank."""
    found = Scenario.from_json(scenario)
    sizes = {name: size for name, size in LAYOUTS[found.layout].items() if name.endswith("_size")}
    make_groups(**sizes)
    outcome = run(found)
    if outcome.has_failed:
        raise RuntimeError(f"FAILED {outcome.failure} at {outcome.at}\n{outcome.text}")
    return outcome


def run_on_ranks(world: World, scenario: Scenario) -> Outcome:
    """What the first one says, or what any of them fails with."""
    start = time.monotonic()
    try:
        outcome: Outcome = world.run(
            of_each_rank, scenario=scenario.as_json(), timeout_seconds=SECONDS, late_seconds=LATE_SECONDS
        )[0]
    except AssertionError as error:
        said = re.search(r"FAILED (\w+) at (-?\d+)", str(error))
        kind, at = (said[1], int(said[2])) if said else ("RankFailed", -1)
        outcome = Outcome(failure=kind, text=str(error), at=at)
    outcome.seconds = time.monotonic() - start
    return outcome
