# SPDX-License-Identifier: Apache-2.0
"""The house stands: arrows point down, files stay short, each carries its license."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPDX = {"#": "# SPDX-License-Identifier: Apache-2.0", "//": "// SPDX-License-Identifier: Apache-2.0"}
COMMENTS = {".py": "#", ".pyi": "#", ".h": "//", ".cpp": "//", ".cu": "//", ".cuh": "//"}
MAX_LINES = 350

# csrc/torch/version.h, Note [The seam to torch]: headers that torch changes as it likes. Of torch/csrc/
# only these are for extensions.
SEAM = "csrc/torch/"
PRIVATE_HEADERS = (
    "ATen/Context.h",
    "ATen/autocast_mode.h",
    "ATen/core/CachingHostAllocator.h",
    "ATen/cuda/CUDAContext.h",
    "ATen/cuda/CUDAGeneratorImpl.h",
    "ATen/cuda/CUDAGraph.h",
    "c10/core/StorageImpl.h",
    "c10/core/TensorImpl.h",
    "c10/cuda/CUDACachingAllocator.h",
    "c10/cuda/CUDAGraphsC10Utils.h",
    "torch/version.h",
)
PUBLIC_HEADERS = (
    "torch/csrc/autograd/autograd_not_implemented_fallback.h",
    "torch/csrc/autograd/custom_function.h",
    "torch/csrc/python_headers.h",
    "torch/csrc/utils/pybind.h",
)


def source_files(*folders: str) -> list[Path]:
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return [path for path in paths if path.suffix in COMMENTS and path.name != "_build_info.py"]


def test_imports_point_down_only() -> None:
    pytest.importorskip("importlinter")
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    run = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_no_source_file_is_over_a_few_pages() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in source_files("csrc", "megagraph")
    }
    assert lengths
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_every_source_file_starts_with_its_license() -> None:
    paths = [ROOT / "setup.py", *source_files("csrc", "megagraph", "tests", "benchmarks")]
    without = [
        str(path.relative_to(ROOT))
        for path in paths
        if path.read_text(encoding="utf-8").partition("\n")[0] != SPDX[COMMENTS[path.suffix]]
    ]
    assert without == []


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include [<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.MULTILINE)


def is_private(header: str) -> bool:
    return header in PRIVATE_HEADERS or (header.startswith("torch/csrc/") and header not in PUBLIC_HEADERS)


def test_only_the_seam_knows_torch_s_private_headers_and_its_release() -> None:
    """Whatever changes between releases of torch lies in one folder."""
    outside, inside = {}, set()
    for path in source_files("csrc"):
        name = path.relative_to(ROOT).as_posix()
        private = sorted(filter(is_private, includes(path)))
        if name.startswith(SEAM):
            inside.update(private)
        elif private or re.search(r"\bTORCH_VERSION|MEGAGRAPH_TORCH_SINCE", path.read_text(encoding="utf-8")):
            outside[name] = private
    assert outside == {}
    assert inside


def includes_of_ours() -> dict[str, list[str]]:
    return {
        path.relative_to(ROOT).as_posix(): [name for name in includes(path) if name.startswith("csrc/")]
        for path in source_files("csrc")
    }


def test_the_seam_is_the_lowest_floor_of_the_core() -> None:
    graph = includes_of_ours()
    headers = {header for name in graph if name.startswith(SEAM) for header in graph[name]}
    assert {header for header in headers if not header.startswith(SEAM)} == set()


def test_no_headers_include_each_other_in_a_circle() -> None:
    graph = includes_of_ours()
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for header in graph[name]:
                visit(header, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_every_place_names_the_same_releases_of_torch() -> None:
    """The build, the metadata, the matrix and the README promise one range."""

    def found(pattern: str, file: str) -> tuple[str, ...]:
        match = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"))
        assert match, f"{file} has no {pattern}"
        return match.groups()

    minors = found(r"MINORS \?= (.+)", "Makefile")[0].split()
    oldest, newest = minors[0], minors[-1]
    assert found(r"MIN_TORCH = \((\d+), (\d+)\)", "setup.py") == tuple(oldest.split("."))
    assert found(r"NEWEST_TESTED_TORCH = \((\d+), (\d+)\)", "setup.py") == tuple(newest.split("."))
    assert found(r'"torch>=([\d.]+)"', "pyproject.toml") == (oldest,)
    assert found(r"torch ([\d.]+) to ([\d.]+) ", "README.md") == (oldest, newest)
