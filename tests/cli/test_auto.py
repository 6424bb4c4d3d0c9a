# SPDX-License-Identifier: Apache-2.0
"""MEGAGRAPH_AUTO: processes that nobody launches for us get the plugin, and others cost nothing."""

import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_scripts import ROOT, TRAINING, Files, add_to_packages, environment_with, patience

import megagraph
from megagraph import auto
from megagraph.cli.reports import read_report
from megagraph.megatron.patch.installation import installed_plugin

AUTO = ROOT / "megagraph" / "auto.pth"
Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a Python whose packages hold our `.pth`, as after an installation."""
    site = tmp_path / "site"
    site.mkdir()
    add_to_packages(site)

    def run(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        named = {f"MEGAGRAPH_{name}": value for name, value in variables.items()}
        command = [sys.executable, "-W", "ignore", *map(str, words)]
        environment, seconds = environment_with(site) | named, 300 * patience()
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)

    return run


def test_an_interpreter_without_the_variable_pays_less_than_a_millisecond(monkeypatch: Any) -> None:
    monkeypatch.delenv("MEGAGRAPH_AUTO", raising=False)
    (line,) = AUTO.read_text().splitlines()
    assert line.startswith("import ")  # or it would be a path
    assert min(timeit.repeat(lambda: exec(line), number=1, repeat=20)) < 1e-3


def test_a_process_without_megatron_imports_nothing_of_ours(start: Start) -> None:
    names = "[name for name in sys.modules if name.startswith(('megagraph', 'torch'))]"
    wrong = "megagraph: MEGAGRAPH_AUTO=maybe: expected true or false\n"
    for switch, said in (("", ""), ("1", ""), ("maybe", wrong)):
        done = start("-c", f"import sys; print({names})", AUTO=switch)
        found = ["megagraph_auto"] if switch else []
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{found}\n", said)


ASKS = """
import megagraph
megagraph.install()
import megatron.core as core
from megagraph.megatron.patch.installation import installed_plugin
print(installed_plugin().config.verify, installed_plugin().config.max_seqlen_per_dp_cp_rank, core.__name__)
try:
    megagraph.install(megagraph.GraphConfig(mode="eager"))
except RuntimeError as error:
    print(error)
"""
# Bug: such a probe, as verl's, took the finder away, and the import behind it installed nothing. The parent
# has a finder more, as verl makes one; what it spawns has one alone.
PROBES = """
if __name__ == "__main__": import megagraph.auto
import importlib.util, sys
asked = [importlib.util.find_spec("megatron.core") is not None for _time in range(2)]
import megatron.core
from megagraph.megatron.patch.installation import installed_plugin
left = [it for it in sys.meta_path if "megagraph" in type(it).__module__]
print(asked, installed_plugin() is not None, left)
"""
PROBED = "[True, True] True []"
ASKED = "3 64 megatron.core"
REFUSED = "megagraph is installed already, with other options (mode is graph, not eager)"


@pytest.mark.megatron
def test_a_script_replays_and_may_ask_for_what_is_there_and_nothing_else(start: Start, files: Files) -> None:
    """If the first install() is what imports Megatron, the other one waits for that."""
    variables = {"CONFIG": str(files.toml()), "VERIFY": "3", "REPORT": str(files.folder / "report.json")}
    done = start(files.script(ASKS + TRAINING), "4", "pass", AUTO="1", **variables)
    assert done.returncode == 0, done.stderr
    asked, refused = (line for line in done.stdout.splitlines() if not line.startswith("loss "))
    assert asked == ASKED and refused.startswith(REFUSED)
    assert "under `megagraph run` or MEGAGRAPH_AUTO leave install() out of the script" in refused
    assert [model["replays"] for model in read_report(files.folder / "report.json")] == [6]


CHILDREN = """
import atexit, multiprocessing, os
from pathlib import Path
import megagraph
report = Path(os.environ["MEGAGRAPH_REPORT"])
before, child = report.read_text(), multiprocessing.get_context("spawn").Process(target=print)
child.start(); child.join()
print(report.read_text() == before, flush=True)
report.unlink()
if not os.fork():  # a fork's end has torch wait for threads that it does not have: ours alone, then
    atexit.register(lambda: (megagraph.uninstall(), os._exit(0)))
    sys.exit()
print(os.wait()[1], report.exists(), flush=True)
os._exit(0)
"""


@pytest.mark.megatron
@pytest.mark.parametrize("under", [[], ["-m", "megagraph", "run"]], ids=["auto", "run"])
def test_children_leave_the_report_to_their_parent(start: Start, files: Files, under: list[str]) -> None:
    """Bug: what was spawned left an empty one, a fork its parent's. To ask for Megatron imports nothing."""
    report = str(files.folder / "report.json")
    variables = {"CONFIG": str(files.toml()), "VERIFY": "3", "LOG_INTERVAL": "1", "REPORT": report}
    done = start(*under, files.script(PROBES + TRAINING), "3", ASKS + CHILDREN, AUTO="1", **variables)
    said = [line for line in done.stdout.splitlines() if line and not line.startswith("loss ")]
    assert (done.returncode, said[:2]) == (0, [PROBED, ASKED]), done.stderr
    assert said[2].startswith(REFUSED) and said[3:] == [PROBED, "True", "0 False"]
    assert "replayed; the rest" not in done.stderr  # the fork does not end the command


@pytest.mark.megatron
def test_in_mode_off_a_script_installs_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megagraph.cli", raising=False)  # which would decide for itself
    monkeypatch.setenv("MEGAGRAPH_AUTO", "1")
    monkeypatch.setenv("MEGAGRAPH_MODE", "off")
    auto._begin()
    megagraph.install(megagraph.GraphConfig())
    assert installed_plugin() is None


def test_what_does_not_fit_is_one_sentence_and_the_process_goes_on(start: Start, tmp_path: Path) -> None:
    core = tmp_path / "site" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("__version__ = '9.9'\n")
    (tmp_path / "site" / "transformer_engine.py").touch()
    done = start("-c", "import megatron.core as core; print(core.__version__)", AUTO="1")
    assert (done.returncode, done.stdout) == (0, "9.9\n")
    (said,) = (line for line in done.stderr.splitlines() if "MEGAGRAPH" in line)
    assert said.startswith("megagraph: MEGAGRAPH_AUTO=1: not installed: megatron-core 9.9 does not fit")
