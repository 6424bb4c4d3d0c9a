# SPDX-License-Identifier: Apache-2.0
"""What an sdist holds. That it builds, installs and runs is checked by `make sdist`."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Paths in an sdist of this tree, built as without a GPU and without a former build's list of files."""
    folder = str(tmp_path_factory.mktemp("sdist"))
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder],
        cwd=ROOT,
        env={**os.environ, "MEGAGRAPH_CPU_ONLY": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (archive,) = Path(folder).glob("*.tar.gz")
    with tarfile.open(archive) as file:
        return {member.name.partition("/")[2] for member in file if member.isfile()}


def test_an_sdist_holds_every_source_of_the_core_and_the_license(names: set[str]) -> None:
    """It held no header, and of a build without CUDA no kernel: it could not be built."""
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert {Path(source).suffix for source in sources} == {".h", ".cuh", ".cpp", ".cu"}
    assert sources <= names
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py", "megagraph/py.typed"} <= names


def test_an_sdist_holds_no_tests_and_nothing_built(names: set[str]) -> None:
    """It held ten test files without their conftest, and the facts of the build beside it."""
    assert not [
        name for name in names if name.startswith("tests/") or name.endswith((".so", "_build_info.py"))
    ]
