# SPDX-License-Identifier: Apache-2.0
"""The one line that a run ends with: what was replayed, what ran eager, and what to do about it."""

import re
from pathlib import Path
from typing import Any

import pytest
from run_scripts import TOML, TRAINING, Files

from megagraph.cli import main
from megagraph.cli.run import saved
from megagraph.reasons import EagerReason, verdict

REASONS = Path(__file__).parents[2] / "docs" / "reasons.md"


def test_every_reason_has_a_remedy_and_its_section_begins_with_it() -> None:
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", REASONS.read_text(encoding="utf-8")).replace("`", "")
    sections = dict(re.findall(r"^## (\w+)\n\n(.+)$", text, re.MULTILINE))
    for reason in EagerReason:
        assert sections[reason.name].startswith(reason.remedy[0].upper() + reason.remedy[1:]), reason


def model(replays: int, needed: tuple[int, int, int] | None = None, **eager: int) -> dict[str, Any]:
    most = None if needed is None else dict(zip(("tokens", "num_seqs", "max_seqlen"), needed, strict=True))
    calls = replays + sum(eager.values())
    return {"calls": calls, "replays": replays, "eager": eager, "most_needed": most}


UNINSTALL = "import megagraph; megagraph.uninstall()"
RAISE_IT = "TOO_MANY_SEQUENCES: raise cuda_graph_max_packed_seqs to 8 (packs held up to 7)"
NO_MODEL = "nothing replayed: no GPTModel or HybridModel ran a forward"
REFUSED = model(0, SCOPE_UNSUPPORTED=9) | {"failures": ["GPTModel with fp8 is not supported yet"]}


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        *((reports, f"{NO_MODEL} through get_forward_backward_func()") for reports in ([], [model(0)])),
        ([model(10)], "100 % of layer calls replayed"),
        ([model(999, WARMING_UP=1)], "99 % of layer calls replayed; the rest warmed up"),
        (
            [model(82, (60, 7, 9), WARMING_UP=3, TOO_MANY_SEQUENCES=15)],
            f"82 % of layer calls replayed; 15 % eager, {RAISE_IT}",
        ),
        (
            [model(9, (60, 8, 9), TOO_MANY_SEQUENCES=1), model(9, (60, 33, 9), NESTING=1)],
            "90 % of layer calls replayed; 5 % eager, TOO_MANY_SEQUENCES: raise cuda_graph_max_packed_",
        ),
        (
            [model(0, (640, 7, 9), TOO_MANY_TOKENS=15)],
            "nothing replayed: 100 % eager, TOO_MANY_TOKENS: raise max_seqlen_per_dp_cp_rank to 640 (packs",
        ),
        ([model(0, NO_PACK_METADATA=2)], "nothing replayed: 100 % eager, NO_PACK_METADATA: pass the pack"),
        ([model(0, WARMING_UP=2)], "nothing replayed: 100 % eager, WARMING_UP: nothing to do in the first"),
        (
            [REFUSED],
            "nothing replayed: 100 % eager, SCOPE_UNSUPPORTED: change what the log and the report name "
            "(GPTModel with fp8 is not supported yet)",
        ),
        (
            [model(999, OF_LATER=1)],
            "99 % of layer calls replayed; under 1 % eager, OF_LATER: see docs/reasons",
        ),
    ],
)
def test_what_is_said(reports: list[dict[str, Any]], said: str) -> None:
    assert verdict(reports).startswith(said)
    assert "\n" not in verdict(reports)


def test_what_graphs_save_is_told_if_eager_steps_were_measured() -> None:
    times = {kind: {"host_ms": [ms, ms + 1, ms + 2]} for kind, ms in (("eager", 8.0), ("graphed", 2.0))}
    assert saved(times).endswith("9.0 ms (8.0 to 10.0) eager, 3.0 ms (2.0 to 4.0) graphed")
    assert saved({**times, "eager": {"host_ms": None}}) == saved({}) == ""


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("script", "toml", "said"),
    [
        (UNINSTALL, "", "nothing is known: the script has called uninstall()"),
        ("pass", "mode = 'off'", "nothing is known: mode is off"),
        (
            TRAINING.replace("(documents, 64, 6)", "(documents, 64, 7)"),
            "",
            f"60 % of layer calls replayed; 20 % eager, {RAISE_IT}",
        ),
    ],
    ids=["uninstalled", "off", "too many documents"],
)
def test_a_run_ends_with_it(files: Files, capsys: Any, script: str, toml: str, said: str) -> None:
    config, path = files.toml(TOML + toml), files.script(script)
    assert main(["run", "--config", str(config), str(path), "5", "pass"]) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"megagraph: {said}")
