# SPDX-License-Identifier: Apache-2.0
"""Who speaks, and that it is heard."""

import logging
import subprocess
import sys

import pytest

from megagraph.log import about, log, rank


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_warning_is_seen_without_any_logging_set_up() -> None:
    """A NullHandler disabled Python's handler of last resort: nobody saw a refusal or a failed capture."""
    script = (
        "import megagraph\n"
        "from megagraph.log import log\n"
        "log.warning('layer %d stays eager', 3)\n"
        "log.info('not asked for')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["megagraph: layer 3 stays eager"]


def test_rank_0_says_everything_and_others_keep_to_labelled_warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun every rank wrote every line, and none said whose it was."""
    caplog.set_level(logging.INFO, logger="megagraph")
    for number in ("0", "3"):
        monkeypatch.setenv("RANK", number)
        assert rank() == int(number)
        log.info("captured")
        log.warning("%d %% eager", 5)
    assert lines(caplog) == ["captured", "5 % eager", "[rank 3] 5 % eager"]
    monkeypatch.delenv("RANK")
    assert rank() == 0


def test_inside_a_models_turn_its_name_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    with about("GPTModel #2"):
        log.warning("stays eager")
    log.warning("outside")
    assert lines(caplog) == ["GPTModel #2: stays eager", "outside"]
