# SPDX-License-Identifier: Apache-2.0
"""The house stands: arrows point down, files stay short, each carries its license."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPDX = {"#": "# SPDX-License-Identifier: Apache-2.0", "//": "// SPDX-License-Identifier: Apache-2.0"}
COMMENTS = {".py": "#", ".pyi": "#", ".h": "//", ".cpp": "//", ".cu": "//", ".cuh": "//"}
MAX_LINES = 350
MAX_PARAMETERS = 7


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


def parsed(folder: str) -> Iterator[tuple[str, ast.Module]]:
    for path in (ROOT / folder).rglob("*.py"):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def reach(node: ast.Attribute) -> tuple[ast.expr, list[str]]:
    """Where a chain of attributes begins, and its names."""
    names: list[str] = []
    root: ast.expr = node
    while isinstance(root, ast.Attribute):
        names.insert(0, root.attr)
        root = root.value
    return root, names


def test_nothing_reaches_further_than_one_dot_past_a_collaborator() -> None:
    """`self.a.b` at most: what lies behind that is the collaborator's own business."""
    far = []
    for path, module in parsed("megagraph/megatron"):
        for node in ast.walk(module):
            root, names = reach(node) if isinstance(node, ast.Attribute) else (None, [])
            if isinstance(root, ast.Name) and root.id == "self" and len(names) > 2:
                far.append(f"{path}:{root.lineno}: self.{'.'.join(names)}")
    assert far == []


def test_no_function_has_more_than_a_handful_of_parameters() -> None:
    long = []
    for path, module in parsed("megagraph"):
        for node in ast.walk(module):
            if not isinstance(node, ast.FunctionDef):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if len([name for name in given if name.arg not in ("self", "cls")]) > MAX_PARAMETERS:
                long.append(f"{path}:{node.lineno}: {node.name}")
    assert long == []


def includes(path: Path) -> set[Path]:
    lines = path.read_text(encoding="utf-8").splitlines()
    named = [line.split('"')[1] for line in lines if line.startswith('#include "csrc/')]
    return {ROOT / name for name in named}


def test_headers_include_one_another_in_one_direction_only() -> None:
    headers = {path: includes(path) for path in source_files("csrc") if path.suffix in (".h", ".cuh")}
    while leaves := {path for path, needed in headers.items() if not needed & headers.keys()}:
        headers = {path: needed for path, needed in headers.items() if path not in leaves}
    assert headers == {}


# What each folder of the core may include, beside itself; the torch seam and eager_reason.h know nobody.
MAY_INCLUDE = {
    "csrc/ops": (),
    "csrc/bank": ("csrc/ops",),
    "csrc/python": ("csrc/ops", "csrc/bank"),
}


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_the_core_includes_downwards_only(folder: str) -> None:
    allowed = (folder, "csrc/torch", *MAY_INCLUDE[folder])
    upward = {
        f"{path.relative_to(ROOT)} -> {needed.relative_to(ROOT)}"
        for path in source_files(folder)
        for needed in includes(path)
        if not str(needed.relative_to(ROOT)).startswith(allowed)
    }
    assert upward == set()
