# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario on two ranks, each of which compares its own bits."""

import re
import time
from datetime import timedelta
from random import Random
from typing import Any
from unittest import mock

from streams import make_groups, makes_groups
from torch import distributed
from worlds import World

from megagraph.megatron.parallel import peers
from megagraph.megatron.parallel.peers import HostGroup, Peers

from .models import LAYOUTS
from .scenarios import Scenario
from .twins import AsGiven, EagerRaises, Named, Outcome, run

__all__ = ["run_on_ranks"]

SECONDS = 40.0  # of one scenario, which takes ten: one that hangs is to be found
ORDER = {EagerRaises.__name__: 0, AsGiven.__name__: 0, Named.__name__: 2}  # of failures in one event
FOUND_SECONDS = 3.0  # that one waits inside of a step for those who share its pack
LATE_SECONDS = 10.0  # that one rank may take longer


@makes_groups
def of_each_rank(*, scenario: str) -> Outcome:
    """Raises what has failed, so that nobody waits for this rank."""
    found = Scenario.from_json(scenario)
    sizes = {name: size for name, size in LAYOUTS[found.layout].items() if name.endswith("_size")}
    make_groups(**sizes)
    # Ranks come late, by chance, when they ask each other. One that finds something does not wait long.
    rng = Random(found.seed + distributed.get_rank())
    asks, finds = HostGroup.max_over_ranks, Peers.run_eager_alike

    def ask(*args: Any) -> list[int]:
        time.sleep(rng.choice((0, 0, 0, 0.02)))
        return asks(*args)

    def find(*args: Any) -> None:
        with mock.patch.object(peers, "patience_of_job", lambda: timedelta(seconds=FOUND_SECONDS)):
            finds(*args)

    with (
        mock.patch.object(HostGroup, "max_over_ranks", ask),
        mock.patch.object(Peers, "run_eager_alike", find),
    ):
        outcome = run(found)
    if outcome.failure is not None:
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
        said = re.findall(r"FAILED (\w+) at (-?\d+)", str(error)) or [("RankFailed", -1)]
        # What eager or its packs do on one rank explains the others; what one finds alone, that they wait.
        kind, at = min(said, key=lambda it: (int(it[1]), ORDER.get(it[0], 1)))
        outcome = Outcome(failure=kind, text=str(error), at=int(at))
    outcome.seconds = time.monotonic() - start
    return outcome
