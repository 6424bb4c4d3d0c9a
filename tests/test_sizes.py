# SPDX-License-Identifier: Apache-2.0
"""`.ci/sizes`: the project grows in no figure, and one over its bound is named."""

import json
from types import ModuleType
from unittest import mock

import pytest
from ci_scripts import FOLDER, load

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="is no part of the source distribution")


@pytest.fixture
def script() -> ModuleType:
    return load("sizes")


def test_every_figure_is_within_its_bound(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("sys.argv", [".ci/sizes"]):
        code = script.main()
    assert code == 0, capsys.readouterr().out


def test_one_over_its_bound_is_named(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        script.Size(name="lines", value=11, bound=10, target=5),
        script.Size(name="files", value=2, bound=2),
    ]
    with mock.patch.object(script, "sizes", lambda: found), mock.patch("sys.argv", [".ci/sizes"]):
        assert script.main() == 1
    _head, lines, files = capsys.readouterr().out.splitlines()
    assert lines.split() == ["lines", "11", "10", "5", "over", "its", "bound"]
    assert files.split() == ["files", "2", "2"]
    with mock.patch.object(script, "sizes", lambda: found), mock.patch("sys.argv", [".ci/sizes", "--json"]):
        assert script.main() == 1
    assert json.loads(capsys.readouterr().out)[0] == {"name": "lines", "value": 11, "bound": 10, "target": 5}
