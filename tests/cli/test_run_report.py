# SPDX-License-Identifier: Apache-2.0
"""The report of `megagraph run`, where it cannot be written: found before the run, or no harm after it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_scripts import WITNESS

from megagraph.cli import main
from megagraph.megatron.patch.installation import installed_plugin

pytestmark = pytest.mark.megatron


def run(*arguments: str | Path) -> int:
    return main(["run", *map(str, arguments)])


@pytest.mark.parametrize("end", ["pass", "raise RuntimeError('its own')"])
def test_a_run_does_not_fail_for_a_report_that_cannot_be_written_at_its_end(
    script: Callable[..., Path],
    toml: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    end: str,
) -> None:
    """A folder that was gone at the end turned a finished run into exit code 1, without the report."""
    report = tmp_path / "reports" / "report.json"
    # The folder is there at the beginning; when the run ends, a file has taken its place.
    report.parent.mkdir()
    there = f"import pathlib; folder = pathlib.Path({str(report.parent)!r})"
    lines = f"{there}; folder.rmdir(); folder.touch()\n{end}"
    if end == "pass":
        assert run("--config", toml(report=report), script(lines)) == 0
    else:
        with pytest.raises(RuntimeError, match="its own"):
            run("--config", toml(report=report), script(lines))
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert f"the report could not be written to {report}" in record.getMessage()
    assert json.loads(capsys.readouterr().err) == {"models": []}
    assert installed_plugin() is None


@pytest.mark.parametrize("target", [".", "file/report.json"])
def test_a_bad_report_path_ends_with_2_before_the_script_runs(
    script: Callable[..., Path],
    toml: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    target: str,
) -> None:
    """`report = "."` was found after the training: exit code 1, and no report."""
    (tmp_path / "file").write_text("no folder")
    path = script(WITNESS)
    assert run("--config", toml(report=tmp_path / target), path) == 2
    assert capsys.readouterr().err.startswith("megagraph run: report: expected a file")
    assert not path.with_name("seen.json").exists()
