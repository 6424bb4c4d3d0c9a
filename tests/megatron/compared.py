# SPDX-License-Identifier: Apache-2.0
"""Sees to it that no graph is used that was neither compared with its module nor named in the report."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from megagraph.bank.sites import CapturedVariant
from megagraph.bank.verify import Verification
from megagraph.megatron.graphs.model import GraphedModel


def _compared(captured: CapturedVariant) -> set[int]:
    """The sites, by index, whose graphs of a variant have been compared."""
    return vars(captured).setdefault("compared", set())


@contextlib.contextmanager
def every_graph_is_compared_or_named() -> Iterator[None]:
    """Inside, a report raises `AssertionError` for any other graph, but where verification is off. What was
    compared is noted where that happens, and not taken from what the plugin counts."""
    compare, report = Verification._compare, GraphedModel.report

    def noting(verification: Verification, flight: Any, *args: Any) -> None:
        compare(verification, flight, *args)
        _compared(verification._variant).add(flight.index)

    def checking(graphs: GraphedModel) -> dict[str, Any]:
        found, bank = report(graphs), graphs.captures.bank
        named = {(it["variant"], it["site"]) for it in found["verification"]["unverified_sites"]}
        missing = [
            (str(captured.spec), site.name)
            for captured in bank.captured.values()
            for index, site in bank.graphable().items()
            if index not in _compared(captured) and (str(captured.spec), site.name) not in named
        ]
        assert graphs._config.verify == "off" or not missing, f"neither compared nor named: {missing}"
        return found

    with (
        mock.patch.object(Verification, "_compare", noting),
        mock.patch.object(GraphedModel, "report", checking),
    ):
        yield
