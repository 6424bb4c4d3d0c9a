# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario on two ranks, each of which compares its own bits. A rank whose other one has raised waits
inside of NCCL until it is killed. Under MPS that may end every other process of its server
(`cudaErrorIllegalAddress`): give pairs of ranks a GPU, or a server, of their own."""

import re
import time
from random import Random
from typing import Any
from unittest import mock

import megatron_rig as rig
from streams import make_groups, makes_groups
from torch import distributed
from worlds import World

from megagraph.megatron.parallel import peers
from megagraph.megatron.parallel.peers import HostGroup

from .models import LAYOUTS
from .scenarios import Scenario
from .twins import ENDS, Outcome, Twins, run

# Of one scenario, which takes ten, or sixty beside other work: one that hangs is to be found. Ranks that
# share a card take turns: eighty alone, if late gradients are verified over and over.
SECONDS = 240.0 if rig.ON_GPU else 90.0
LATE_SECONDS = 10.0  # that one rank may take longer


def _noted(tensors: list[Any], _op: Any) -> Any:
    """Stands for what is asked inside of a step: without a device nobody waits for the answer. All agree."""
    Twins.asked.append(tensors[0].tolist())
    return mock.Mock()


@makes_groups
def of_each_rank(*, scenario: str) -> Outcome:
    """Raises what has failed, so that nobody waits for this rank."""
    found = Scenario.from_json(scenario)
    make_groups(**{name: size for name, size in LAYOUTS[found.layout].items() if name.endswith("_size")})
    # Ranks come late, by chance, when they ask each other.
    rng = Random(found.seed + distributed.get_rank())
    asks, groups = HostGroup.max_over_ranks, peers._gloo_group

    def ask(*args: Any) -> list[int]:
        time.sleep(rng.choice((0, 0, 0, 0.005)))
        return asks(*args)

    def group(ranks: Any, when: str = "between steps") -> Any:
        return groups(ranks, when) if when == "between steps" else mock.Mock(allreduce=_noted)

    with mock.patch.object(HostGroup, "max_over_ranks", ask), mock.patch.object(peers, "_gloo_group", group):
        outcome = run(found)
    if outcome.failure is not None:
        raise RuntimeError(f"FAILED {outcome.failure} at {outcome.at}\n{outcome.text}")
    return outcome


def run_on_ranks(world: World, scenario: Scenario) -> Outcome:
    """What the first one says, or what any of them fails with."""
    try:
        outcome: Outcome = world.run(
            of_each_rank, scenario=scenario.as_json(), timeout_seconds=SECONDS, late_seconds=LATE_SECONDS
        )[0]
        return outcome
    except AssertionError as error:
        said = re.findall(r"FAILED (\w+) at (-?\d+)", str(error)) or [("RankFailed", -1)]
        # What eager or its packs do on one rank explains the others.
        kind, at = min(said, key=lambda it: (int(it[1]), it[0] not in ENDS))
        return Outcome(failure=kind, text=str(error), at=int(at))
