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


def test_an_sdist_holds_every_source_and_the_license_and_no_tests_and_nothing_built(tmp_path: Path) -> None:
    """Built as without a GPU and without a former build's list of files.

    It held no header, and of a build without CUDA no kernel; and ten test files without their conftest.
    """
    done = subprocess.run(
        [
            sys.executable,
            "setup.py",
            "-q",
            "egg_info",
            "--egg-base",
            tmp_path,
            "sdist",
            "--dist-dir",
            tmp_path,
        ],
        cwd=ROOT,
        env={**os.environ, "MEGAGRAPH_CPU_ONLY": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert {Path(source).suffix for source in sources} == {".h", ".cuh", ".cpp", ".cu"}
    assert sources <= names
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py", "megagraph/py.typed"} <= names
    assert not [it for it in names if it.startswith("tests/") or it.endswith((".so", "_build_info.py"))]
