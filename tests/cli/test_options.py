# SPDX-License-Identifier: Apache-2.0
"""`megagraph config`: what it says of the options is what the parser takes."""

import json
import re
from typing import Any

import pytest
from test_config import OPTIONS

from megagraph.cli import main
from megagraph.config import GraphConfig, tomllib


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """As JSON Schema has it, of what ours uses."""
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    types = {"integer": int, "string": str, "boolean": bool, "array": list, "object": dict}
    if type(value) is not types[schema["type"]]:
        return False
    if schema["type"] == "object":
        known = schema["properties"]
        is_whole = set(schema.get("required", ())) <= set(value) <= set(known)
        return is_whole and all(fits(it, known[key]) for key, it in value.items())
    if schema["type"] == "array":
        return all(fits(it, schema["items"]) for it in value)
    if schema["type"] == "integer":
        return bool(schema["minimum"] <= value <= schema["maximum"])
    return re.search(schema.get("pattern", ""), str(value)) is not None


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["config", "--schema"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["required"] == ["megagraph"]
    return document["properties"]["megagraph"]


def test_the_schema_takes_what_every_option_may_be_and_its_default(schema: dict[str, Any]) -> None:
    for name, (toml, _variable, _value) in OPTIONS.items():
        assert fits(tomllib.loads(f"{name} = {toml}"), schema), name
        of_option = schema["properties"][name]
        assert of_option["description"]
        assert "default" not in of_option or fits(of_option["default"], of_option), name
    assert fits(
        {"cuda_graph_scope": "attn", "capacities": "8192:20", "cuda_graph_max_packed_seqs": 8}, schema
    )


WRONG = """
mode = "fast"
moed = "eager"
log_interval = -1
cuda_graph_slots = 65
cp_sizes = [0]
capacities = "64"
capacities = [{ tokens = 64 }]
cuda_graph_modules = ["lm_head"]
verify = 0
progress = 2.5
max_seqlen = 2147483648
"""


def test_the_schema_refuses_what_the_parser_refuses(schema: dict[str, Any]) -> None:
    for toml in WRONG.strip().splitlines():
        values = tomllib.loads(toml)
        assert not fits(values, schema), toml
        with pytest.raises(ValueError, match=r"^here: "):
            GraphConfig.from_mapping(values, source="here")


def test_the_table_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in OPTIONS)
