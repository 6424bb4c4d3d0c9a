# SPDX-License-Identifier: Apache-2.0
"""Many scenarios in a row, what they did, and how what failed is run again."""

import argparse
import contextlib
import faulthandler
import gc
import itertools
import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress
from watched import every_graph_is_compared_or_named
from worlds import World

from megagraph.demo.cpu import megatron_on_cpu
from megagraph.demo.trainer import process_groups

from .ranks import run_on_ranks
from .scenarios import Scenario, draw, shrink
from .twins import Outcome, run

OUT = Path(".ci/out/soak")  # what failed
SHRINK_SECONDS = 60.0
MOST_SHRUNK = 8  # of one campaign


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """What the fixtures of tests/megatron give a test."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    warnings.simplefilter("ignore")
    for name in ("megatron", "megagraph"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.use_deterministic_algorithms(True)
    faulthandler.enable()
    gc.collect()
    gc.freeze()  # or each collection, before a capture, would go over all modules
    with megatron_on_cpu(), process_groups(), every_graph_is_compared_or_named():
        yield


class Campaign:
    """Scenarios of seeds in a row, or the one of a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._run: Callable[[Scenario], Outcome] = run
        self._outcomes: list[Outcome] = []
        self._failed: list[int] = []  # seeds

    def run(self) -> int:
        """All of them. Returns the exit code: 1 if one has failed."""
        path = self._options.replay
        given = None if path is None else Scenario.from_json(path.read_text(encoding="utf-8"))
        with contextlib.ExitStack() as around:
            if self._options.ranks > 1 or (given is not None and given.layout):
                world = World(2)
                around.callback(world.close)
                self._run = partial(run_on_ranks, world)
            else:
                around.enter_context(surroundings())
            if given is None:
                self._seeds()
            else:
                self._one(given)
        unfinished = Counter(it.failure for it in self._outcomes if it.failure and not it.has_failed)
        ended = ", ".join(f"{count} {why}" for why, count in unfinished.items())
        print(f"{self._summary()}; unfinished: {ended or 'none'}; failed: {self._failed or 'none'}")
        return int(bool(self._failed))

    def _seeds(self) -> None:
        start, seconds = time.monotonic(), self._options.seconds
        with Progress() as bar:
            task = bar.add_task("", total=seconds)
            for seed in itertools.count(self._options.seed):
                bar.update(task, description=f"seed {seed}: {self._summary()}")
                self._one(draw(seed, self._options.events, self._options.ranks))
                bar.update(task, completed=time.monotonic() - start)
                if time.monotonic() - start >= seconds:
                    return

    def _one(self, scenario: Scenario) -> None:
        outcome = self._run(scenario)
        self._outcomes.append(outcome)
        if not outcome.has_failed:
            return
        self._failed.append(scenario.seed)
        if len(self._failed) <= MOST_SHRUNK and self._options.replay is None:
            print(f"seed {scenario.seed} fails ({outcome.failure}); shrinking\n{outcome.text}", flush=True)
            small = shrink(scenario, lambda it: self._run(it).failure == outcome.failure, SHRINK_SECONDS)
            again = self._run(small)
            if again.has_failed:
                scenario, outcome = small, again
        OUT.mkdir(parents=True, exist_ok=True)
        path = OUT / f"{scenario.seed}.json"
        path.write_text(scenario.as_json() + "\n", encoding="utf-8")
        lines = [f"seed {scenario.seed}: {outcome.failure}", outcome.text]
        lines.append(f"{scenario.kind} {scenario.layout}, scopes {scenario.scopes}, {scenario.plugin}")
        for index, (name, given) in enumerate(scenario.events):
            lines.append(f"{'->' if index == outcome.at else '  '} {name} {given or ''}")
        lines.append(f"python -m tests.soak --device {self._options.device} --replay {path}")
        print("\n".join(lines), flush=True)

    def _summary(self) -> str:
        ran = self._outcomes
        events, calls = sum(it.done.total() for it in ran), sum(it.calls for it in ran)
        share = 100 * sum(it.replays for it in ran) / max(calls, 1)
        return f"{len(ran)} scenarios, {events} events, {share:.0f} % replayed"
