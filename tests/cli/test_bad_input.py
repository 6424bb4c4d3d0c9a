# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong is one sentence that names it as it was typed; exit code 2, and nothing is touched. Rows
of documents, values and parts of a report: demo/test_documents.py, test_config.py, test_report.py."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pytest import CaptureFixture, MonkeyPatch

import megagraph
from megagraph.cli import main

Refused = Callable[..., str]
# What is typed, and how the sentence begins behind `megagraph COMMAND: `. {big} is 2**31.
COMMAND_LINES = """
 -> expected a command; see megagraph --help
train -> argument demo | run
--versoin -> unrecognized arguments: --versoin
demo --layres 2 -> unrecognized arguments: --layres 2; see megagraph demo --help
demo --layers two -> argument --layers: invalid int value: 'two'
demo --layers 0 -> --layers: expected at least 1, got 0
demo --layers 99999999999 -> --layers: expected at most 1000, got 99999999999
demo --hidden 60 --heads 20 -> --hidden: expected for each head a multiple of
demo --hidden 4096 -> --hidden: expected for each head a multiple of
demo --heads 0 -> --heads: expected at least 1, got 0
demo --heads 3 -> --heads: expected a divisor of --hidden (64), got 3
demo --query-groups 3 -> --query-groups: expected a divisor of --heads (4), got 3
demo --query-groups 0 -> --query-groups: expected at least 1, got 0
demo --pack-tokens 1 -> --pack-tokens: expected at least 2, got 1
demo --max-packed-seqs 8 0 -> --max-packed-seqs: expected at least 1, got 0
demo --timed-steps -1 -> --timed-steps: expected at least 0, got -1
demo --max-document 999999 -> --max-document: expected at most --pack-tokens (512), got 999999
demo --data long.jsonl -> long.jsonl:1: document of 600 tokens is over the limit of 512; shorten
demo --data long.jsonl --max-document 30 -> long.jsonl:1: document of 600 tokens is over the limit of 30;
demo --data short.jsonl -> short.jsonl:2: document of 1 tokens is under the minimum of 2
demo --json . -> --json: expected a file, . is a folder
demo --json script.py -> --json: expected a file for the JSON, got script.py; for none write --json -
demo --json text.txt/new.json -> --json: expected a file that can be written, got text.txt/new.json
demo --json text.txt/deeper/new.json -> --json: expected a file that can be written, got text.txt/deeper/
run -> the following arguments are required: script; see megagraph run --help
run gone.py -> expected a script, gone.py is no file
run --config gone.toml script.py -> --config: expected a TOML file, gone.toml is no file
run --config bytes script.py -> bytes: expected TOML, 'utf-8' codec can't decode byte 0xff
run --config text.txt script.py -> text.txt: expected TOML,
run --config empty.jsonl script.py -> empty.jsonl: expected a table [megagraph], found none
run --set mode script.py -> --set: expected KEY=VALUE, got 'mode'
run --set moed=eager script.py -> --set: unknown option 'moed'; choose from capacities,
run --set mode=fast script.py -> --set: mode: expected one of graph, eager, off, got 'fast'
run --set mode= script.py -> --set: mode: expected one of graph, eager, off, got ''
run --set report=folder script.py -> --set: report: expected a file, folder is a folder
run --set cuda_graph_scope=mlp --set cuda_graph_modules=mlp script.py -> --set: cuda_graph_modules and
doctor gone.py -> expected a script, gone.py is no file
doctor --report gone.json -> --report: expected the file of a report, gone.json is no file
doctor --report list.json -> list.json: expected an object with a list 'models'
doctor --report report.json script.py -> --report: expected this or a script, got both: script.py
doctor --json script.py -> --json: expected a file for the JSON, got script.py; for none write --json -
doctor --json text.txt script.py -> --json: expected a new file or one of JSON, got text.txt
doctor --set mode=fast -> --set: mode: expected one of graph, eager, off, got 'fast'
doctor -m -> -m: expected a module
run --json script.py other.py -> --json: expected a file for the JSON, got script.py; for none write --json -
run -m gone.module -> -m: expected a module, found none named gone.module
run -m script.py/ -> -m: expected a module, found none named script.py/
advise gone.py -> expected a script, gone.py is no file
advise --steps 23 script.py -> --steps: expected at least 24, got 23
advise --steps {big} script.py -> --steps: expected at most 100000, got {big}
advise --json script.py other.py -> --json: expected a file for the JSON, got script.py; for none write
advise --set mode=fast script.py -> --set: mode: expected one of graph, eager, off, got 'fast'
config --schema --markdown -> argument --markdown: not allowed with argument --schema
report full.json --json full.json -> --json: expected another file than the report that is read
report gone.json -> expected the file of a report, gone.json is no file
report deep.json -> deep.json: expected JSON,
"""
# MEGAGRAPH_..., and what is said after `environment: `.
VARIABLES = """
MOED=eager -> unknown option 'MEGAGRAPH_MOED'; choose from MEGAGRAPH_CAPACITIES, MEGAGRAPH_
MODE=fast -> MEGAGRAPH_MODE: expected one of graph, eager, off, got 'fast'
CAPACITIES={big}:8 -> MEGAGRAPH_CAPACITIES: '{big}:8': tokens: expected at most 2147483647, got {big}
CUDA_GRAPH_MAX_PACKED_SEQS=8 -> MEGAGRAPH_CUDA_GRAPH_MAX_PACKED_SEQS and max_seqlen_per_dp_cp_rank: expected
REPORT=folder -> MEGAGRAPH_REPORT: expected a file, folder is a folder
REPORT=text.txt/new.json -> MEGAGRAPH_REPORT: expected a file that can be written, got text.txt/new.json:
VERIFY=0 -> MEGAGRAPH_VERIFY: expected capture, off or an integer of at least 1, got '0'
"""
# Lines of a table [megagraph], and what is said after the file's name.
TOML = """
report = 1979-05-27 -> report: expected a path, got datetime.date(1979, 5, 27)
cuda_graph_scope = "full_iteration" -> cuda_graph_scope: expected none (whole layers), or of attn,
"""
PYTHON = """
GraphConfig(cuda_graph_scope="lm_head") -> cuda_graph_scope: expected none (whole layers), or of attn,
GraphConfig(cuda_graph_scope="mlp", cuda_graph_modules="mlp") -> cuda_graph_modules and
install({{"mode": "eager"}}) -> install(): expected megagraph.GraphConfig(...), the path of a TOML
install(name=7) -> install(): name: expected text or a function of a model, got 7
install(name="") -> install(): name: expected text or a function of a model, got ''
watch(5, key=len) -> watch(): expected a torch.nn.Module, got int
watch(__import__("torch").nn.Module(), key=5) -> watch(): key: expected a function without arguments, got int
install(GraphConfig(report="folder")) -> report: expected a file, folder is a folder
install("text.txt") -> text.txt: expected TOML,
install("gone.toml") -> gone.toml: expected TOML, No such file or directory
install("folder") -> folder: expected TOML, Is a directory
get_gpt_block_varlen_spec(None) -> get_gpt_block_varlen_spec: expected Megatron's TransformerConfig, got None
with_grouped_experts(None) -> with_grouped_experts: expected a spec with a MoELayer, got one without
"""


def cases(text: str) -> list[Any]:
    rows = [line.format(big=2**31).partition(" -> ") for line in text.strip("\n").split("\n")]
    return [pytest.param(typed.strip(), said, id=typed or "nothing") for typed, _arrow, said in rows]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Path]:
    """Where the commands run, which leave it as it is and install nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    files = {
        **{"text.txt": b"some text", "bytes": b"\xff\xfe", "empty.jsonl": b"", "list.json": b"[]"},
        **{"deep.json": b"[" * 100_000, "full.json": b'{"format": 2, "models": []}'},
        **{"long.jsonl": b'{"length": 600}\n', "short.jsonl": b'{"length": 9}\n{"length": 1}\n'},
        **{"script.py": b"open('it-ran', 'w')\n", "report.json": b"an older report"},
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    before = snapshot(tmp_path)
    yield tmp_path
    assert snapshot(tmp_path) == before


def snapshot(folder: Path) -> dict[str, object]:
    return {str(it): it.read_bytes() if it.is_file() else None for it in folder.rglob("*")}


@pytest.fixture
def refused(capsys: CaptureFixture[str]) -> Refused:
    """Runs a command, which must end with 2 and one line on standard error alone. Returns it."""

    def run(*words: str) -> str:
        try:
            code: object = main(words)
        except SystemExit as end:  # argparse's
            code = end.code
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1) and "Traceback" not in err
        return err

    return run


@pytest.mark.parametrize(("typed", "said"), cases(COMMAND_LINES))
def test_of_the_command_line(refused: Refused, typed: str, said: str) -> None:
    program, _, sentence = refused(*typed.split()).partition(": ")
    assert program.split()[0] == "megagraph" and sentence.startswith(said)


def test_the_cpu_is_not_asked_for_beside_a_gpu(refused: Refused, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    said = "megagraph run: --cpu: this machine has a GPU; hide it with CUDA_VISIBLE_DEVICES=\n"
    assert refused("run", "--cpu", "script.py") == said


def test_a_script_that_nobody_may_read_is_bad_input(refused: Refused, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda _path, _mode: False)  # for root, too
    assert refused("run", "script.py") == "megagraph run: expected a script, script.py cannot be read\n"


@pytest.mark.parametrize("typed", ["run script.py", "doctor script.py", "advise script.py", "demo"])
def test_a_machine_without_megatron_says_so(refused: Refused, monkeypatch: MonkeyPatch, typed: str) -> None:
    """Bug: each ended in a traceback."""
    monkeypatch.setattr("megagraph.megatron.seams.check_core", mock.Mock(side_effect=RuntimeError("none")))
    assert refused(*typed.split()) == f"megagraph {typed.split()[0]}: none\n"


@pytest.mark.parametrize(("typed", "said"), cases(VARIABLES))
def test_of_variables(refused: Refused, monkeypatch: MonkeyPatch, typed: str, said: str) -> None:
    name, _, value = typed.partition("=")
    monkeypatch.setenv(f"MEGAGRAPH_{name}", value)
    assert refused("run", "script.py").startswith(f"megagraph run: environment: {said}")


@pytest.mark.parametrize(("typed", "said"), cases(TOML))
def test_of_a_file(refused: Refused, tmp_path_factory: Any, monkeypatch: Any, typed: str, said: str) -> None:
    path = tmp_path_factory.mktemp("config") / "bad.toml"
    path.write_text(f"[megagraph]\n{typed}\n")
    assert refused("run", "--config", str(path), "script.py").startswith(f"megagraph run: {path}: {said}")
    monkeypatch.setenv("MEGAGRAPH_CONFIG", str(path))  # "None: report: ..." was said of it
    assert f"{path}: {said}" in refused("run", "script.py")


@pytest.mark.megatron
@pytest.mark.parametrize(("typed", "said"), cases(PYTHON))
def test_of_python(typed: str, said: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        eval(typed, {name: getattr(megagraph, name) for name in megagraph.__all__})
    assert str(raised.value).startswith(said) and "\n" not in str(raised.value)
