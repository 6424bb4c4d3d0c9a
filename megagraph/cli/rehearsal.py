# SPDX-License-Identifier: Apache-2.0
"""A user's script up to the end of its first training step, and what a capture would then graph.

Nothing is captured: every layer is warmed up as before a capture, which finds what no graph can replace.
"""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import megagraph
from megagraph.cli.scripts import log_to_stderr, run_script
from megagraph.config import GraphConfig
from megagraph.megatron import seams
from megagraph.megatron.graphs.model import GraphedModel
from megagraph.megatron.patch.installation import installed_plugin

__all__ = ["rehearse"]


class _EnoughError(BaseException):
    """Ends the script; no Exception, which it might handle."""


def rehearse(options: argparse.Namespace, config: GraphConfig) -> list[dict[str, Any]]:
    """What would become of each model; nothing of a script that trains none."""
    log_to_stderr()
    megagraph.install(dataclasses.replace(config, mode="graph", cuda_graph_warmup_steps=1, report=None))
    found: list[dict[str, Any]] = []
    plugin = installed_plugin()
    assert plugin is not None

    def ending(schedule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(schedule)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = schedule(*args, **kwargs)
            if not kwargs.get("forward_only", False):
                # Here, where the script has set up all that its models need.
                found.extend(_look(graphs) for graphs in plugin.all_graphs())
                raise _EnoughError
            return result

        return step

    with contextlib.ExitStack() as undo:
        undo.callback(megagraph.uninstall)
        with contextlib.ExitStack() as schedules, contextlib.suppress(_EnoughError, SystemExit):
            for schedule in seams.SCHEDULES:
                seams.stand_in(schedules, schedule.owner(), schedule.name, ending(schedule.function()))
            run_script(options)
    return found


def _look(graphs: GraphedModel) -> dict[str, Any]:
    graphs.rehearses = True
    graphs.at_step_boundary(is_skipped=False)
    captures, bank = graphs.captures, graphs.captures.bank
    names = [site.name for site in bank.specs]
    graphed = [] if graphs.refusal is not None else [names[index] for index in bank.graphable()]
    kept, beside = captures.rehearsed or (0, 0)
    report = graphs.report()
    return {
        "model": graphs.name,
        "layers": report["layers"],
        "graphed": graphed,
        "cuda_graph_modules": report["cuda_graph_modules"],
        "stays_eager": report["failures"],
        "capacities": report["capacities"],
        "slots": bank.num_slots,
        # Without a GPU nobody counts what a layer needs beside.
        "pool_bytes": [kept, kept + beside] if graphed else [0, 0],
    }
