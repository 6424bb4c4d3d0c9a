# SPDX-License-Identifier: Apache-2.0
"""The package itself: whether its core fits the installed torch, how it is built, and who speaks."""

import contextlib
import importlib
import logging
import os
import re
import runpy
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch
from run_scripts import ROOT, run_python

import megagraph
from megagraph.cli import main
from megagraph.log import about, log, rank

build_info = importlib.import_module("megagraph._build_info")
INSTALLED = metadata.version("torch")
Build = Callable[[], SimpleNamespace]


def test_a_core_for_another_torch_names_both_and_its_build_is_no_other(monkeypatch: MonkeyPatch) -> None:
    """Another patch release was let in, and its objects may be laid out in another way."""
    for place in (1, 2):  # its minor, its patch
        numbers = [int(re.match(r"\d+", number)[0]) for number in INSTALLED.split("+")[0].split(".")]
        numbers[place] += 1
        built = ".".join(map(str, numbers))
        monkeypatch.setattr(build_info, "TORCH_VERSION", built)
        expected = f"built against torch {built}, and torch {INSTALLED} is installed: reinstall"
        with pytest.raises(ImportError, match=re.escape(expected)):
            megagraph._check_torch()
    for suffix in ("", "+cpu", "+cu130"):
        monkeypatch.setattr(build_info, "TORCH_VERSION", INSTALLED.split("+")[0] + suffix)
        megagraph._check_torch()


def test_a_core_goes_with_its_cuda_major(monkeypatch: MonkeyPatch) -> None:
    cuda_of_torch = mock.Mock()
    monkeypatch.setattr(megagraph, "_cuda_of_torch", cuda_of_torch)
    for built, cuda_of_torch.return_value, message in (
        ("12.8", "13.0", r"built for CUDA 12\.8, .* is for CUDA 13\.0: reinstall"),
        ("13.0", None, r"built for CUDA 13\.0, .* is without CUDA: reinstall"),
        *((built, "13.0", None) for built in ("13.0", "13.2", None)),  # the last one has no kernels
    ):
        monkeypatch.setattr(build_info, "CUDA_VERSION", built)
        with pytest.raises(ImportError, match=message) if message else contextlib.nullcontext():
            megagraph._check_torch()


def test_the_cuda_of_torch_is_known_before_torch_is_imported(monkeypatch: MonkeyPatch) -> None:
    expected = torch.version.cuda
    monkeypatch.delitem(sys.modules, "torch")
    assert megagraph._cuda_of_torch() == expected
    assert "torch" not in sys.modules


def test_the_public_names_are_listed_and_the_version_is_the_cores(capsys: CaptureFixture[str]) -> None:
    """`dir()` listed what the module imports and no public name; there was no version."""
    names = [name for name in dir(megagraph) if not name.startswith("__")]
    assert names == sorted(megagraph._HOME) and all(hasattr(megagraph, name) for name in names)
    assert megagraph.__version__ == build_info.VERSION and "__version__" in dir(megagraph)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"megagraph {build_info.VERSION}\n"


def test_the_module_shows_its_commands_without_megatron(capsys: CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    for words in ("usage: megagraph", "demo", "run a training script", "show the report"):
        assert words in said
    command = [sys.executable, "-X", "importtime", "-m", "megagraph", "run", "gone.py"]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 2 and shown.stdout == "" and "Traceback" not in shown.stderr
    assert "megagraph run: expected a script, gone.py is no file" in shown.stderr.splitlines()
    assert re.search(r"\|\s+torch$", shown.stderr, re.MULTILINE)
    assert not re.search(r"\|\s+megatron\b", shown.stderr)


def test_an_sdist_holds_every_source_and_the_license_and_no_tests_and_nothing_built(tmp_path: Path) -> None:
    """Built without a GPU and a former build's list of files. It held no header, without CUDA no kernel, and
    ten tests without their conftest. That it builds, installs and runs is checked by `make sdist`."""
    pytest.importorskip("setuptools")
    folders = "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path
    folders += "build_py", "--build-lib", tmp_path / "built"
    run_python("setup.py", "-q", *folders, cwd=ROOT, env={**os.environ, "MEGAGRAPH_CUDA": "0"})
    assert {"megagraph_auto.pth", "megagraph_auto.py"} <= {it.name for it in (tmp_path / "built").iterdir()}
    points = (tmp_path / "megagraph.egg-info" / "entry_points.txt").read_text()
    assert "[verl.plugins]\nmegagraph = megagraph.auto\n" in points
    (archive,) = tmp_path.glob("megagraph-0.1.0.tar.gz")
    with tarfile.open(archive) as file:
        info = file.extractfile("megagraph-0.1.0/PKG-INFO").read().decode()
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert {Path(source).suffix for source in sources} == {".h", ".cuh", ".cpp", ".cu"}
    assert sources <= names
    others = "LICENSE README.md pyproject.toml setup.py megagraph/py.typed megagraph/auto.pth"
    assert {*others.split()} <= names
    assert not [it for it in names if it.startswith("tests/") or it.endswith((".so", "_build_info.py"))]
    assert {
        "License-Expression: Apache-2.0",
        "Author: megagraph developers",
        "Requires-Dist: torch<2.16,>=2.11",
        'Requires-Dist: megatron-core<0.20,>=0.16; extra == "megatron"',
        "Classifier: Programming Language :: Python :: 3.13",
    } <= {*info.splitlines()}


@pytest.fixture
def build(monkeypatch: MonkeyPatch) -> Build:
    """Runs setup.py as for a wheel, up to where setuptools begins."""
    setuptools = pytest.importorskip("setuptools")
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    monkeypatch.setattr(sys, "argv", ["setup.py", "bdist_wheel"])
    return lambda: SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py")), given=given)


@pytest.mark.parametrize("has_nvcc", [False, True])
def test_a_wheel_requires_the_torch_that_it_was_built_for_and_its_version_says_so(
    build: Build, monkeypatch: MonkeyPatch, tmp_path: Path, has_nvcc: bool
) -> None:
    """It required torch 2.11 or newer, of which one patch release loads; all builds had one file name."""
    release = INSTALLED.split("+")[0]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    if has_nvcc:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\necho compute_90\n")
        (tmp_path / "bin" / "nvcc").chmod(0o755)
    for wanted, cuda in (("", has_nvcc), ("auto", has_nvcc), ("0", False), ("1", True)):
        monkeypatch.setenv("MEGAGRAPH_CUDA", wanted)
        if cuda and not has_nvcc:
            with pytest.raises(SystemExit, match=r"^MEGAGRAPH_CUDA=1 asks for kernels, and no "):
                build()
            continue
        given = build().given
        assert given["version"] == f"0.1.0+torch{release}.{'cu130' if cuda else 'cpu'}"
        assert given["install_requires"][0] == f"torch=={release}"
    monkeypatch.setenv("MEGAGRAPH_CUDA", "yes")
    with pytest.raises(SystemExit, match=r"^MEGAGRAPH_CUDA: expected 0, 1 or auto, got 'yes'"):
        build()


def test_what_a_build_lacks_is_said_in_one_sentence(build: Build, monkeypatch: MonkeyPatch) -> None:
    """`pip install .` said that no torch was found, and a missing compiler took 84 lines."""
    built = build()
    monkeypatch.setenv("CXX", "/nonexistent/c++ -m64")
    with pytest.raises(SystemExit, match=r"^megagraph needs a C\+\+17 compiler, and /nonexistent/c"):
        built.BuildExtension.build_extensions(SimpleNamespace(extensions=[]))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="pip hides your torch while it builds: add --no-build-isolation"):
        build()
    monkeypatch.setattr("setuptools.__version__", "64.0.3")
    with pytest.raises(SystemExit, match=r"setuptools 77 or newer, found 64\.0\.3: run `pip install"):
        build()


def test_a_warning_is_seen_without_any_logging_set_up() -> None:
    """A NullHandler disabled Python's handler of last resort: nobody saw a refusal or a failed capture."""
    code = "from megagraph.log import log; log.warning('layer %d stays eager', 3); log.info('not asked for')"
    assert run_python("-c", code).stderr.splitlines() == ["megagraph: layer 3 stays eager"]


def test_other_ranks_keep_to_labelled_warnings(caplog: LogCaptureFixture, monkeypatch: MonkeyPatch) -> None:
    """Under torchrun every rank wrote every line, and none said whose it was."""
    caplog.set_level(logging.INFO, logger="megagraph")
    for number in ("0", "3"):
        monkeypatch.setenv("RANK", number)
        assert rank() == int(number)
        log.info("captured")
        log.warning("%d %% eager", 5)
    assert caplog.messages == ["captured", "5 % eager", "[rank 3] 5 % eager"]
    monkeypatch.delenv("RANK")
    assert rank() == 0


def test_inside_a_models_turn_its_name_comes_first(caplog: LogCaptureFixture) -> None:
    with about("GPTModel #2"):
        log.warning("stays eager")
    log.warning("outside")
    assert caplog.messages == ["GPTModel #2: stays eager", "outside"]
