# SPDX-License-Identifier: Apache-2.0
"""A user's script up to the end of its first training step, and what a capture would then graph.

Nothing is captured: every layer is warmed up as before a capture, which finds what no graph can replace.
"""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megagraph.bank.bank import Bank
from megagraph.bank.sites import CapturedVariant, VariantSpec
from megagraph.cli.scripts import EnoughError, run_steps
from megagraph.config import GraphConfig
from megagraph.megatron.graphs.model import GraphedModel
from megagraph.megatron.plugin import Plugin
from megagraph.megatron.seams import stand_in

__all__ = ["rehearse", "warm_up"]


def rehearse(options: argparse.Namespace, config: GraphConfig) -> list[dict[str, Any]]:
    """What would become of each model; nothing of a script that trains none."""
    found: list[dict[str, Any]] = []

    def look(plugin: Plugin, step: Callable[[], Any]) -> None:
        step()
        # Here, where the script has set up all that its models need.
        found.extend(_look(graphs) for graphs in plugin.all_graphs())
        raise EnoughError

    run_steps(options, config, look, mode="graph", cuda_graph_warmup_steps=1, report=None)
    return found


def _look(graphs: GraphedModel) -> dict[str, Any]:
    captures, found = graphs.captures, [(0, 0)]
    with stand_in(captures, capture=lambda variants: found.append(warm_up(captures.bank, variants))):
        graphs.at_step_boundary()
    bank, (kept, beside) = captures.bank, found[-1]
    captures.failures += bank.take_failures()
    names = [site.name for site in bank.specs]
    graphed = [] if graphs.refusal is not None else [names[index] for index in bank.graphable()]
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


def warm_up(bank: Bank, variants: Iterable[VariantSpec]) -> tuple[int, int]:
    """Warms variants up as `Bank.capture()` does, and captures nothing: sites that fail stay eager.

    Returns the bytes that the pools would keep between passes, and the most that one site needed beside
    them, which only a GPU's allocator counts.
    """
    bank.rng.expect_streams()
    kept = most = 0
    for spec in variants:
        variant = CapturedVariant(spec, bank.num_slots)
        before = _most_bytes(bank.backend.device, anew=True)
        with spec.context():
            bank.warm_up(variant)
        of_sites = [variant.kept_bytes[index] for index in bank.graphable()]
        kept = max(kept, sum(of_sites))
        most = max(most, _most_bytes(bank.backend.device) - before - max(of_sites, default=0))
    return kept * bank.num_slots, most


def _most_bytes(device: torch.device, *, anew: bool = False) -> int:
    """The most that was allocated since this was last asked `anew`, or is, if it is now."""
    if device.type != "cuda":
        return 0
    if anew:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)
