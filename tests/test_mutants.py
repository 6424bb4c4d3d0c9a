# SPDX-License-Identifier: Apache-2.0
"""The list of known faults fits the tree; `.ci/mutants` says which of them no test finds."""

import re

import pytest
from ci_scripts import FOLDER, load

ROOT = FOLDER.parent
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="is no part of the source distribution")


def test_every_fault_of_the_list_fits_the_tree() -> None:
    """Each quotes its file, and names a test that there is."""
    script = load("mutants")
    faults = script.read(script.LIST.read_text(encoding="utf-8"))
    assert len(faults) == len(set(faults)) > 0
    for fault in faults:
        file, _, name = fault.test.partition("::")
        function = name.partition("[")[0]
        tests = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", tests, re.MULTILINE), fault
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert script.applied(fault, text) != text, fault
