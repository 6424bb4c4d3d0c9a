# SPDX-License-Identifier: Apache-2.0
"""The list of known faults fits the tree, and `.ci/mutants` says which of them no test finds."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from ci_scripts import FOLDER, load

ROOT = FOLDER.parent
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="is no part of the source distribution")


@pytest.fixture
def script() -> ModuleType:
    return load("mutants")


def test_every_fault_of_the_list_fits_the_tree(script: ModuleType) -> None:
    """Each quotes its file, and names a test that there is."""
    faults = script.read(script.LIST.read_text(encoding="utf-8"))
    assert len(faults) == len(set(faults)) > 0
    for fault in faults:
        file, _, name = fault.test.partition("::")
        function = name.partition("[")[0]
        tests = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", tests, re.MULTILINE), fault
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert script.applied(fault, text) != text, fault


MODULE = """
def largest(numbers):
    if numbers:
        return max(numbers)
    return 0
"""
TESTS = """
import module

def test_the_largest(): assert module.largest([1, 3, 2]) == 3
def test_nothing(): assert module.largest([]) == 0
"""
ENTRY = "file: module.py\nleft: return max(numbers)\nright: return numbers[-1]\ntest: test_module.py::"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A program and its tests."""
    (tmp_path / "module.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "test_module.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("test", "is_found"), [("test_the_largest", True), ("test_nothing", False)])
def test_a_fault_is_found_if_its_test_fails(
    script: ModuleType, tree: Path, capsys: pytest.CaptureFixture[str], test: str, is_found: bool
) -> None:
    (fault,) = script.read(f"# What tests overlooked.\n\n{ENTRY}{test}\n", tree)
    assert script.is_found(fault, tree, "1/1") == is_found
    assert ("found" if is_found else "SURVIVES") in capsys.readouterr().out
    assert (tree / "module.py").read_text(encoding="utf-8") == MODULE


def test_lines_keep_their_indentation(script: ModuleType, tree: Path) -> None:
    entry = "file: module.py\nleft: if numbers:\nleft:     return max(numbers)\nright: for it in numbers:\n"
    (fault,) = script.read(f"{entry}right:     return it\ntest: test_module.py::test_nothing", tree)
    changed = MODULE.replace("if numbers:", "for it in numbers:").replace("return max(numbers)", "return it")
    assert script.applied(fault, MODULE) == changed
    (gone,) = script.read("file: module.py\nleft: return 0\nright:\ntest: test_module.py::test_nothing", tree)
    assert script.applied(gone, MODULE) == MODULE.replace("    return 0\n", "")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (ENTRY.replace("max(numbers)", "min(numbers)"), "expected this once in module.py, found it 0 times"),
        (ENTRY.replace("file: module.py\n", ""), "expected one file, one test and some left"),
        (ENTRY.replace("left: ", "before: "), "expected file, left, right or test, got: before: return max"),
    ],
)
def test_an_entry_that_does_not_fit_is_an_error(
    script: ModuleType, tree: Path, entry: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        script.read(f"{entry}test_nothing", tree)
