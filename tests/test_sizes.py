# SPDX-License-Identifier: Apache-2.0
"""`.ci/sizes`: the project grows in no figure."""

from unittest import mock

import pytest
from ci_scripts import FOLDER, load

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="is no part of the source distribution")


def test_every_figure_is_within_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("sys.argv", [".ci/sizes"]):
        code = load("sizes").main()
    assert code == 0, capsys.readouterr().out
