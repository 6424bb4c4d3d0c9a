# SPDX-License-Identifier: Apache-2.0
"""Options in Python: spelled and checked as in TOML."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagraph.config import GraphConfig
from megagraph.decide.dispatch import Capacity
from megagraph.packs.packing import TailConvention

PAIR = {"cuda_graph_max_packed_seqs": (16,), "max_seqlen_per_dp_cp_rank": 512}


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [
        ("report", "out/graphs.json", Path("out/graphs.json")),
        ("tail", "empty-dummy", TailConvention.EMPTY_DUMMY),
        ("capacities", ("256:8",), (Capacity(tokens=256, num_seqs=8, max_seqlen=256),)),
        ("capacities", ["256:8:64"], (Capacity(tokens=256, num_seqs=8, max_seqlen=64),)),
        (
            "capacities",
            Capacity(tokens=9, num_seqs=2, max_seqlen=9),
            (Capacity(tokens=9, num_seqs=2, max_seqlen=9),),
        ),
        ("cuda_graph_warmup_steps", np.int64(5), 5),
        ("cuda_graph_modules", [], ()),
    ],
)
def test_python_may_spell_a_value_as_toml_does(option: str, given: Any, expected: object) -> None:
    """A path as text failed after the training; a tail or a capacity as text crashed at the first forward."""
    found = getattr(GraphConfig(**{option: given}), option)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("given", [32, [32], "32", (32,)])
def test_the_number_of_documents_may_be_spelled_as_upstream_does(given: Any) -> None:
    """`cuda_graph_max_packed_seqs=32` was `TypeError: 'int' object is not iterable`."""
    config = GraphConfig(cuda_graph_max_packed_seqs=given, max_seqlen_per_dp_cp_rank=512)
    assert config.cuda_graph_max_packed_seqs == (32,)
    assert config.all_capacities() == (Capacity(tokens=512, num_seqs=32, max_seqlen=512),)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuda_graph_warmup_steps": 2.5}, "cuda_graph_warmup_steps: expected an integer, got 2.5"),
        (
            PAIR | {"cuda_graph_max_packed_seqs": (8, 2.5)},
            "cuda_graph_max_packed_seqs: expected an integer, got 2.5",
        ),
        (PAIR | {"max_seqlen": 1024}, "max_seqlen: expected at most the 512 tokens of a pack, got 1024"),
        ({"report": 3}, "report: expected a path, got 3"),
        ({"tail": None}, "tail: expected one of hidden, empty-dummy, got None"),
        ({"mode": None}, "mode: expected one of graph, eager, off, got None"),
        ({"progress": "perhaps"}, "progress: expected true or false, got 'perhaps'"),
        ({"capacities": (3,)}, "capacities: expected tokens:num_seqs[:max_seqlen], got 3"),
        ({"log_interval": -1}, "log_interval: expected at least 0, got -1"),
    ],
)
def test_python_is_checked_as_toml_is(values: Mapping[str, Any], message: str) -> None:
    """Python's values were not checked: 2.5 warm-up steps and documents longer than a pack passed."""
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        GraphConfig(**values)


@pytest.mark.parametrize("given", ["mlp, attn", ["mlp", "attn"], ("mlp", "attn", "mlp")])
def test_scopes_may_be_spelled_as_upstream_does(given: Any) -> None:
    assert GraphConfig(cuda_graph_modules=given).cuda_graph_modules == ("mlp", "attn")
    with pytest.raises(
        ValueError, match=r"cuda_graph_modules: expected .* 'full_iteration' is not supported"
    ):
        GraphConfig(cuda_graph_modules=["attn", "full_iteration"])


@pytest.mark.parametrize("given", [None, "full", ["full"], ("full",), "", []])
def test_whole_layers_may_be_spelled_as_upstream_does(given: Any) -> None:
    assert GraphConfig(cuda_graph_modules=given).cuda_graph_modules == ()
