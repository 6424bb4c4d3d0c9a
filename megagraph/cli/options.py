# SPDX-License-Identifier: Apache-2.0
"""The plugin's own options as every command takes them: a file, variables over it, and `--set` over both.

`megagraph config` shows what there is.
"""

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from rich.table import Table
from rich.text import Text

from megagraph.cli.ends import Screen
from megagraph.config import MODULES, Capacity, GraphConfig
from megagraph.packs.ops import TailConvention

__all__ = ["add_config_options", "add_parser", "config_of"]


def _or_list(of: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"anyOf": [of, {"type": "array", "items": of}]}


_INTEGER: Mapping[str, Any] = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_KEYS = "tokens", "num_seqs", "max_seqlen"
_TABLE = {
    "type": "object",
    "properties": dict.fromkeys(_KEYS, _INTEGER),
    "required": [*_KEYS[:2]],
    "additionalProperties": False,
}
_CAPACITY = {"anyOf": [{"type": "string", "pattern": r"^\d+:\d+(:\d+)?$"}, _TABLE]}
# What each type of an option is called, and may be in a TOML file.
_TYPES: Mapping[Any, tuple[str, Mapping[str, Any]]] = {
    bool: ("boolean", {"type": "boolean"}),
    int: ("integer", _INTEGER),
    int | None: ("integer", _INTEGER),
    str: ("text", {"type": "string"}),
    str | int: ("text or integer", {"anyOf": [{"enum": ["capture", "off"]}, _INTEGER]}),
    Path | None: ("path", {"type": "string"}),
    TailConvention: ("text", {"enum": [it.value for it in TailConvention]}),
    tuple[int, ...]: ("integers", _or_list(_INTEGER)),
    tuple[str, ...]: ("texts", _or_list({"enum": [*MODULES]})),
    tuple[Capacity, ...]: ("capacities", _or_list(_CAPACITY)),
}
_COLUMNS = "key", "variable", "type", "default", "meaning"


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Adds them."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with a table [megagraph]")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option, before file and variables; again for others (megagraph config shows all)",
    )


def config_of(options: argparse.Namespace) -> GraphConfig:
    """What they come to."""
    base = None
    if options.config is not None:
        if not options.config.is_file():
            raise ValueError(f"--config: expected a TOML file, {options.config} is no file")
        base = GraphConfig.from_toml(options.config)
    config = GraphConfig.from_env(base=base)
    given = {}
    for it in options.set:
        key, is_there, value = it.partition("=")
        if not is_there:
            raise ValueError(f"--set: expected KEY=VALUE, got {it!r}")
        given[key.strip()] = value
    return GraphConfig.from_mapping(given, source="--set", base=config)


# -- megagraph config ------------------------------------------------------------------------------


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command."""
    parser = commands.add_parser("config", help="show every option, as a table or a JSON schema")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--schema", action="store_true", help="print the JSON schema of the TOML file")
    instead.add_argument("--markdown", action="store_true", help="print the table of docs/configuration.md")
    parser.set_defaults(prepare=_prepare)


def _prepare(options: argparse.Namespace) -> Callable[[], int]:
    return _print_schema if options.schema else _print_markdown if options.markdown else _print_table


def _options() -> Iterator[tuple[dataclasses.Field[Any], str, Mapping[str, Any], str]]:
    """Each with the name and the schema of its type, and its meaning."""
    meanings = dict(re.findall(r"^ {4}(\w+): (.+)$", inspect.getdoc(GraphConfig) or "", re.MULTILINE))
    for option in dataclasses.fields(GraphConfig):
        of, parse = get_args(option.type)
        limits = getattr(parse, "keywords", {})
        name, schema = _TYPES[of]
        if "names" in limits:
            schema = {"enum": [*limits["names"]]}
        elif of is not tuple[int, ...]:  # whose parser takes another one
            names = {"at_least": "minimum", "at_most": "maximum"}
            schema = {**schema, **{names[limit]: value for limit, value in limits.items() if limit in names}}
        yield option, name, schema, meanings.get(option.name, "")


def _rows() -> Iterator[tuple[str, ...]]:
    spelled = {"None": "none", "()": "empty", "True": "true", "False": "false"}
    for option, kind, _schema, meaning in _options():
        default = str(getattr(option.default, "value", option.default))
        variable = f"MEGAGRAPH_{option.name.upper()}"
        yield option.name, variable, kind, spelled.get(default, default), meaning


def _print_table() -> int:
    table = Table("key", "type", "default", "meaning", caption="as a variable: MEGAGRAPH_KEY, in capitals")
    table.columns[0].no_wrap = True
    for name, _variable, *rest in _rows():
        table.add_row(*map(Text, (name, *rest)))
    Screen().print(table)
    return 0


def _print_markdown() -> int:
    print(f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", sep="\n")
    for name, variable, kind, default, meaning in _rows():
        is_word = kind == "text" or kind.startswith("text or")
        shown = f"`{default}`" if is_word else default
        print(f"| `{name}` | `{variable}` | {kind} | {shown} | {meaning} |")
    return 0


def _print_schema() -> int:
    properties: dict[str, Any] = {}
    for option, _name, schema, meaning in _options():
        default = getattr(option.default, "value", option.default)
        has_default = {} if default is None else {"default": [] if default == () else default}
        properties[option.name] = {**schema, **has_default, "description": meaning}
    properties["cuda_graph_scope"] = {**properties["cuda_graph_modules"], "deprecated": True}
    table = {"type": "object", "properties": properties, "additionalProperties": False}
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A TOML file with the options of megagraph",
        "type": "object",
        "properties": {"megagraph": table},
        "required": ["megagraph"],
    }
    print(json.dumps(document, indent=2))
    return 0
