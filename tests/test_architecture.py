# SPDX-License-Identifier: Apache-2.0
"""The house stands: arrows point down, files stay short, each carries its license."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPDX = {"#": "# SPDX-License-Identifier: Apache-2.0", "//": "// SPDX-License-Identifier: Apache-2.0"}
COMMENTS = {".py": "#", ".pyi": "#", ".h": "//", ".cpp": "//", ".cu": "//", ".cuh": "//"}
MAX_LINES = 350


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
