# SPDX-License-Identifier: Apache-2.0
"""Options: what the parser takes and refuses, and that `megagraph config` says the same of them."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import CaptureFixture, MonkeyPatch

from megagraph._C import Capacity
from megagraph.cli import main
from megagraph.config import GraphConfig, tomllib
from megagraph.packs.ops import TailConvention

PAIR = {"cuda_graph_max_packed_seqs": (16,), "max_seqlen_per_dp_cp_rank": 512}

# Each option: as TOML, as an environment variable, and what both mean. No value is a default.
OPTIONS: dict[str, tuple[str, str, Any]] = {
    "mode": ("'eager'", "eager", "eager"),
    "cuda_graph_max_packed_seqs": ("[8, 32]", "8, 32", (8, 32)),
    "max_seqlen_per_dp_cp_rank": ("1024", "1024", 1024),
    "max_seqlen": ("256", "256", 256),
    "capacities": (
        "[{tokens = 64, num_seqs = 4, max_seqlen = 32}, '128:8']",
        "64:4:32, 128:8",
        (Capacity(tokens=64, num_seqs=4, max_seqlen=32), Capacity(tokens=128, num_seqs=8, max_seqlen=128)),
    ),
    "cp_sizes": ("[1, 2, 4]", "1,2,4", (1, 2, 4)),
    "cuda_graph_warmup_steps": ("7", "7", 7),
    "cuda_graph_max_states": ("3", "3", 3),
    "cuda_graph_slots": ("2", "2", 2),
    "verify": ("'off'", "off", "off"),
    "cuda_graph_modules": ("['attn', 'mlp']", "attn,mlp", ("attn", "mlp")),
    "cuda_graph_granularity": ("'chunk'", "chunk", "chunk"),
    "tail": ("'empty-dummy'", "empty-dummy", TailConvention.EMPTY_DUMMY),
    "progress": ("false", "false", False),
    "poison": ("true", "true", True),
    "report": ("'out/graphs.json'", "out/graphs.json", Path("out/graphs.json")),
    "log_interval": ("10", "10", 10),
    "cuda_graph_nvtx": ("true", "true", True),
}
# What an option needs beside it.
COMPANIONS = {"cuda_graph_max_packed_seqs", "max_seqlen_per_dp_cp_rank", "max_seqlen"}


def written(text: str, folder: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return path


def variables(**options: str) -> dict[str, str]:
    return {f"MEGAGRAPH_{name.upper()}": value for name, value in options.items()}


def test_the_table_of_this_file_lists_every_option() -> None:
    fields = dataclasses.fields(GraphConfig)
    assert set(OPTIONS) == {field.name for field in fields}
    assert not [field.name for field in fields if field.default == OPTIONS[field.name][2]]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_read_from_toml_and_from_the_environment(name: str, tmp_path: Path) -> None:
    names = sorted(COMPANIONS) if name in COMPANIONS else [name]
    lines = [f"{option} = {OPTIONS[option][0]}" for option in names]
    expected = {option: OPTIONS[option][2] for option in names}
    of_toml = GraphConfig.from_toml(written("\n".join(["[megagraph]", *lines]), tmp_path))
    of_env = GraphConfig.from_env(variables(**{option: OPTIONS[option][1] for option in names}))
    for config in (of_toml, of_env):
        for field in dataclasses.fields(GraphConfig):
            assert getattr(config, field.name) == expected.get(field.name, field.default), field.name


def test_other_tables_and_other_variables_are_left_alone(tmp_path: Path) -> None:
    toml = "[tool]\nmode = 'fast'\n[megagraph]\nmode = 'off'\n[megatron]\nx = 1"
    assert GraphConfig.from_toml(written(toml, tmp_path)) == GraphConfig(mode="off")
    ours = dict.fromkeys(("MEGAGRAPH_COMMIT", "MEGAGRAPH_TEST_BRIDGE", "MEGAGRAPH_WERROR"), "1")
    assert GraphConfig.from_env(ours | {"MODE": "off", "XMEGAGRAPH_MODE": "off"}) == GraphConfig()


def test_switches_understand_the_usual_words_and_an_empty_variable_is_an_unset_one() -> None:
    """Compose files and schedulers set variables so: MEGAGRAPH_MODE= was an error."""
    for words, value in (("1 true YES On", True), ("0 false NO Off", False)):
        for word in words.split():
            assert GraphConfig.from_env(variables(progress=word)).progress is value
    base = GraphConfig(mode="off", capacities="64:4", report="base.json")
    assert GraphConfig.from_env(variables(mode="", capacities="", report=""), base) == base


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_variable_goes_before_the_base_leaves_its_other_options_and_may_lean_on_them(name: str) -> None:
    """MEGAGRAPH_MAX_SEQLEN over a file that holds the other two was refused: 'expected together with'."""
    others = {"mode": "off", "progress": False, "poison": True, "cuda_graph_warmup_steps": 5}
    base = GraphConfig(**(PAIR if name in COMPANIONS else others), report=Path("base"))
    config = GraphConfig.from_env(variables(**{name: OPTIONS[name][1]}), base)
    assert config == dataclasses.replace(base, **{name: OPTIONS[name][2]})


def test_one_way_of_naming_capacities_takes_the_place_of_the_other() -> None:
    capacities = (Capacity(tokens=64, num_seqs=4, max_seqlen=64),)
    short, outright = GraphConfig(max_seqlen=100, **PAIR), GraphConfig(capacities=capacities)
    assert GraphConfig.from_env(variables(capacities="64:4"), short) == outright
    both = variables(cuda_graph_max_packed_seqs="16", max_seqlen_per_dp_cp_rank="512", max_seqlen="100")
    assert GraphConfig.from_env(both, outright) == short
    expected = r"environment: MEGAGRAPH_TAIL: 'empty-dummy' .* needs a max_seqlen of 512, got 100"
    with pytest.raises(ValueError, match=expected):
        GraphConfig.from_env(variables(tail="empty-dummy"), short)


def test_a_variable_names_the_file_where_nothing_else_does(tmp_path: Path) -> None:
    path = written("[megagraph]\nmode = 'off'\npoison = true", tmp_path)
    environ = variables(config=str(path), mode="eager")
    assert GraphConfig.from_env(environ) == GraphConfig(mode="eager", poison=True)
    assert GraphConfig.from_env(environ, GraphConfig()) == GraphConfig(mode="eager")
    with pytest.raises(ValueError, match=r"^environment: MEGAGRAPH_CONFIG: gone: expected TOML, No such"):
        GraphConfig.from_env(variables(config="gone"))


def test_the_older_name_of_modules_is_taken_from_all_sources_not_beside_the_other(tmp_path: Path) -> None:
    """It was a TypeError in Python: files and variables alone had it. It takes the place of a base."""
    toml = written("[megagraph]\ncuda_graph_scope = 'attn'", tmp_path)
    assert GraphConfig.from_toml(toml) == GraphConfig(cuda_graph_modules=("attn",))
    assert GraphConfig.from_env(variables(cuda_graph_scope="mlp")) == GraphConfig(cuda_graph_modules=("mlp",))
    with pytest.raises(ValueError, match=r"^environment: MEGAGRAPH_CUDA_GRAPH_SCOPE: expected none .*'x'"):
        GraphConfig.from_env(variables(cuda_graph_scope="x"))
    both = "MEGAGRAPH_CUDA_GRAPH_MODULES and MEGAGRAPH_CUDA_GRAPH_SCOPE"
    with pytest.raises(ValueError, match=f"^environment: {both}: expected one of them, got both"):
        GraphConfig.from_env(variables(cuda_graph_scope="mlp", cuda_graph_modules="mlp"))
    config = GraphConfig(cuda_graph_scope="attn,mlp", mode="eager")
    assert config.cuda_graph_modules == ("attn", "mlp")
    assert dataclasses.replace(config, mode="off").cuda_graph_modules == ("attn", "mlp")
    assert GraphConfig.from_env(variables(cuda_graph_scope="moe"), config).cuda_graph_modules == ("moe",)


COUNTS, GRANULARITY = "cuda_graph_max_packed_seqs", "cuda_graph_granularity"
SHORT_FORM = f"{COUNTS} and max_seqlen_per_dp_cp_rank: expected both or neither, got "
NOT_BOTH = f"capacities: expected either this or {COUNTS}"
TAILS = "tail: expected one of hidden, empty-dummy, got"
KNOWN = "or of attn, mlp, moe, moe_router, moe_preprocess, mamba; "
A_TABLE = "capacities: expected a table of tokens, num_seqs, max_seqlen, got {'tokens': 64, "


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "fast"}, "mode: expected one of graph, eager, off, got 'fast'"),
        ({"mode": None}, "mode: expected one of graph, eager, off, got None"),
        ({GRANULARITY: "model"}, f"{GRANULARITY}: expected one of layer, chunk, got 'model'"),
        ({"cuda_graph_modules": ["attn", "full_iteration"]}, KNOWN + "'full_iteration' is not supported yet"),
        ({"cuda_graph_modules": ["lm_head"]}, "'lm_head' is not one of full_iteration, full, attn, "),
        *(({"tail": it}, f"{TAILS} {it!r}") for it in ("none", ["hidden"], None)),
        ({"progress": "maybe"}, "progress: expected true or false, got 'maybe'"),
        ({"poison": 2}, "poison: expected true or false, got 2"),
        *(({"max_seqlen": it}, f"max_seqlen: expected an integer, got {it!r}") for it in ("1k", 1.5, True)),
        ({COUNTS: "8,x"}, f"{COUNTS}: expected an integer, got 'x'"),
        ({COUNTS: (8, 2.5)}, f"{COUNTS}: expected an integer, got 2.5"),
        ({"cuda_graph_warmup_steps": 0}, "cuda_graph_warmup_steps: expected at least 1, got 0"),
        ({"log_interval": -1}, "log_interval: expected at least 0, got -1"),
        *(({"report": it}, f"report: expected a path, got {it!r}") for it in (3, "x\0.json")),
        *(
            ({"capacities": it}, f"capacities: expected tokens:num_seqs[:max_seqlen], got {got}")
            for it, got in (("64", "'64'"), ("1:2:3:4", "'1:2:3:4'"), ((3,), "3"), ([[64, 1]], "[64, 1]"))
        ),
        ({"capacities": "64:many"}, "capacities: '64:many': num_seqs: expected an integer, got 'many'"),
        # It named `a capacity's num_seqs`, also for an entry of cuda_graph_max_packed_seqs.
        ({"capacities": "64:0"}, "capacities: '64:0': num_seqs: expected at least 1, got 0"),
        (PAIR | {COUNTS: (8, 0)}, f"{COUNTS}: expected at least 1, got 0"),
        (
            {"capacities": "64:8,32:4,64:8:64"},
            "expected each once, got 64 tokens, 8 documents of up to 64 twice",
        ),
        # They passed, and failed in the core.
        *(
            (PAIR | {it: 2**31}, f"{it}: expected at most 2147483647, got 2147483648")
            for it in ("max_seqlen_per_dp_cp_rank", "max_seqlen", COUNTS)
        ),
        ({"cuda_graph_slots": 65}, "cuda_graph_slots: expected at most 64, got 65"),
        ({"capacities": f"{2**30}:8", "cp_sizes": 2}, "less than 2**31 tokens, got 2 x 1073741824"),
        ({"capacities": [{"tokens": 64, "max_seqlen": 1}]}, A_TABLE + "'max_seqlen': 1}"),
        ({"capacities": [{"tokens": 64, "documents": 1}]}, A_TABLE + "'documents': 1}"),
        ({"cp_sizes": [1, 3]}, "cp_sizes: expected ascending powers of two, got (1, 3)"),
        ({"cp_sizes": "2,1"}, "cp_sizes: expected ascending powers of two, got (2, 1)"),
        ({"cp_sizes": 0}, "cp_sizes: expected at least 1, got 0"),
        # 0 quietly meant all tokens of a pack.
        *((PAIR | {"max_seqlen": it}, f"max_seqlen: expected at least 1, got {it}") for it in (-1, 0)),
        ({COUNTS: 8}, SHORT_FORM + "(8,) and None"),
        ({"max_seqlen_per_dp_cp_rank": 512}, SHORT_FORM + "None and 512"),
        ({"max_seqlen": 64}, "max_seqlen: expected together with cuda_graph_max_packed_seqs"),
        *((it | {"capacities": "64:4"}, NOT_BOTH) for it in (PAIR, {"max_seqlen": 64})),
        (
            PAIR | {"max_seqlen": 100, "tail": "empty-dummy"},
            "tail: 'empty-dummy' makes a document as long as the tail, which needs a max_seqlen of 512",
        ),
        ({"capacities": "64:4:63", "tail": "empty-dummy"}, "needs a max_seqlen of 64, got 63"),
    ],
)
def test_a_refused_value_is_named_with_option_and_source(values: Mapping[str, Any], message: str) -> None:
    """Python's values were not checked: 2.5 warm-up steps and documents longer than a pack passed."""
    with pytest.raises(ValueError, match=rf"^run\.toml: .*{re.escape(message)}"):
        GraphConfig.from_mapping(values, source="run.toml")
    with pytest.raises(ValueError, match=rf"^.*{re.escape(message)}"):
        GraphConfig(**values)


def test_an_unknown_option_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    known = re.escape(", ".join(sorted(OPTIONS)))
    with pytest.raises(ValueError, match=rf"run\.toml: unknown option 'warmup'; choose from {known}$"):
        GraphConfig.from_toml(written("[megagraph]\nwarmup = 3", tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[megagraph]\nmode = eager", "expected TOML, .*line 2"),
        ("x = " + "[" * 10_000, "expected TOML, "),  # a RecursionError
        ("x = " + "1" * 10_000, "expected TOML, "),  # these two named no file
        ("mode = '\udcff'", "expected TOML, .*utf-8"),
        ("", r"expected a table \[megagraph\], found none$"),
        ("[graphs]\n[megatron]", r"expected a table \[megagraph\], found graphs, megatron$"),
        # It ended in a TypeError that named no file.
        ("megagraph = 3", r"expected a table \[megagraph\]"),
        ("[[megagraph]]\nmode = 'off'", r"expected a table \[megagraph\]"),
    ],
)
def test_a_file_without_our_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"run\.toml: {message}"):
        GraphConfig.from_toml(written(text, tmp_path))


def test_a_config_is_frozen_and_its_capacities_come_sorted_and_each_once() -> None:
    config = GraphConfig(cuda_graph_max_packed_seqs=(32, 8, 32), max_seqlen_per_dp_cp_rank=512)
    expected = tuple(Capacity(tokens=512, num_seqs=n, max_seqlen=512) for n in (8, 32))
    assert config.all_capacities() == expected
    assert GraphConfig(capacities=expected[::-1]).all_capacities() == expected
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mode = "off"


def test_documents_as_long_as_a_ranks_tokens_may_be_as_long_as_the_pack_that_ranks_share() -> None:
    """Bug: what needs several ranks ran eager, as the default was one rank's tokens."""
    (as_long,) = GraphConfig(capacities="512:8").all_capacities(cp_size=2)
    assert as_long == Capacity(tokens=512, num_seqs=8, max_seqlen=1024)
    (shorter,) = GraphConfig(capacities="512:8:100").all_capacities(cp_size=2)
    assert shorter == Capacity(tokens=512, num_seqs=8, max_seqlen=100)
    config = GraphConfig(**PAIR)
    assert config.all_capacities(4) == (Capacity(tokens=512, num_seqs=16, max_seqlen=2048),)
    capped = dataclasses.replace(config, max_seqlen=100)
    assert capped.all_capacities(4) == (Capacity(tokens=512, num_seqs=16, max_seqlen=100),)
    assert GraphConfig().all_capacities() == ()


MODULES = "cuda_graph_modules"
NINE = {"tokens": 9, "num_seqs": 2, "max_seqlen": 9}


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [
        ("report", "out/graphs.json", Path("out/graphs.json")),
        ("report", "~/graphs.json", Path.home() / "graphs.json"),  # it made a folder of that name
        ("tail", "empty-dummy", TailConvention.EMPTY_DUMMY),
        ("capacities", ("256:8",), (Capacity(tokens=256, num_seqs=8, max_seqlen=256),)),
        ("capacities", ["256:8:64"], (Capacity(tokens=256, num_seqs=8, max_seqlen=64),)),
        ("capacities", Capacity(**NINE), (Capacity(**NINE),)),
        ("capacities", NINE, (Capacity(**NINE),)),
        ("capacities", {"tokens": 9, "num_seqs": 2}, (Capacity(**NINE),)),  # it was an error
        ("cuda_graph_warmup_steps", np.int64(5), 5),
        # As upstream: `cuda_graph_max_packed_seqs=32` was `TypeError: 'int' object is not iterable`.
        *(("cuda_graph_max_packed_seqs", given, (32,)) for given in (32, [32], "32", (32,))),
        *((MODULES, it, ("mlp", "attn")) for it in ("mlp attn", ["mlp", "attn"], "mlp, attn,mlp")),
        *((MODULES, it, ()) for it in (None, "full", ["full"], ("full",), "", [])),
    ],
)
def test_python_may_spell_a_value_as_toml_does(option: str, given: Any, expected: object) -> None:
    """A path as text failed after the training; a tail or a capacity as text crashed at the first forward."""
    others = {"max_seqlen_per_dp_cp_rank": 512} if option == "cuda_graph_max_packed_seqs" else {}
    found = getattr(GraphConfig(**{option: given}, **others), option)
    assert found == expected and type(found) is type(expected)


def test_what_is_set_is_spelled_as_toml_has_it() -> None:
    """A tail was spelled `TailConvention.EMPTY_DUMMY`, in reports too, and a capacity in a sentence."""
    config = GraphConfig(tail="empty-dummy", cuda_graph_modules="attn", verify=5, report="out/graphs.json")
    config = dataclasses.replace(config, capacities="64:5", cp_sizes=(1, 2))
    given = config.spelled()
    assert (given["capacities"], given["cp_sizes"]) == (["64:5:64"], [1, 2])
    assert given["tail"] == "empty-dummy" and given["report"] == "out/graphs.json"
    assert GraphConfig.from_mapping(given, source="itself") == config


# -- `megagraph config` ----------------------------------------------------------------------------


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
def schema(capsys: CaptureFixture[str]) -> dict[str, Any]:
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
    assert fits({"cuda_graph_scope": "attn", "capacities": "8192:20", COUNTS: 8}, schema)


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


def test_the_table_has_every_option(capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in OPTIONS)
