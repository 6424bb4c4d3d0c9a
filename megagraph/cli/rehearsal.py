# SPDX-License-Identifier: Apache-2.0
"""A user's script up to the end of its first training step, and what a capture would then graph.

Nothing is captured: every layer is warmed up as before a capture, which finds what no graph can replace.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from megagraph.cli.scripts import EnoughError, run_steps
from megagraph.config import GraphConfig
from megagraph.megatron.graphs.model import GraphedModel
from megagraph.megatron.plugin import Plugin

__all__ = ["rehearse"]


def rehearse(options: argparse.Namespace, config: GraphConfig) -> list[dict[str, Any]]:
    """What would become of each model; nothing of a script that trains none."""
    found: list[dict[str, Any]] = []

    def look(plugin: Plugin, step: Callable[[], Any]) -> None:
        step()
        # Here, where the script has set up all that its models need.
        found.extend(_look(graphs) for graphs in plugin.all_graphs())
        raise EnoughError

    config = dataclasses.replace(config, mode="graph", cuda_graph_warmup_steps=1, report=None)
    run_steps(options, config, look)
    return found


def _look(graphs: GraphedModel) -> dict[str, Any]:
    graphs.rehearses = True
    graphs.at_step_boundary()
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
