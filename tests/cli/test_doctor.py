# SPDX-License-Identifier: Apache-2.0
"""`megagraph doctor`: the installation, a report in words, and what of a script's models would be graphed."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from run_scripts import MADE, TRAINING, Files

import megagraph
from megagraph.cli import main
from megagraph.megatron import seams

AS_JSON = "doctor", "--json"


@pytest.mark.megatron
def test_an_installation_is_told_with_versions_and_whether_it_fits(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("MEGAGRAPH_MODE", "eager")
    monkeypatch.setenv("MEGAGRAPH_CAPACITIES", "8:2")
    assert main([*AS_JSON]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {it["what"]: it["found"] for it in document["findings"]}
    assert (document["format"], document["verdict"]) == (2, "all fits")
    assert found["megagraph"].startswith(megagraph.__version__)
    assert found["torch"].startswith(str(torch.__version__))
    assert found["megatron-core"].endswith(", tested") and found["its seams"] == "all as expected"
    assert "MEGAGRAPH_MODE=eager" in found["variables"].splitlines()
    assert found["options"] == "mode = eager\ncapacities = ['8:2:8']"
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "megagraph: all fits"
    monkeypatch.setattr(seams.BLOCK_FORWARD.owner(), "forward", lambda self, hidden_states: None)
    rope = seams.ATTENTION_ROPE
    monkeypatch.setattr(rope.owner(), rope.name, lambda t, freqs, config: t)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("megagraph: does not fit: megatron-core: megatron-core ")
    assert "TransformerBlock.forward has no parameter attention_mask, rotary_pos_emb" in said
    assert "apply_rotary_pos_emb has no parameter cu_seqlens, mscale, cp_group" in said


def test_a_report_is_explained_by_reason_with_what_to_do(tmp_path: Path, capsys: Any) -> None:
    model = {
        **{"model": "GPTModel", "calls": 100, "replays": 60, "capacities": [], "capture_seconds": 1.0},
        **{"eager": {"WARMING_UP": 10, "TOO_MANY_SEQUENCES": 30}, "padding_share": 0.1},
        **{"most_needed": {"tokens": 64, "num_seqs": 7, "max_seqlen": 64}, "failures": ["layer 3: a hook"]},
    }
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"format": 2, "models": [model]}))
    assert main([*AS_JSON, "--report", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["models"] == [model]
    remedy = "raise cuda_graph_max_packed_seqs (num_seqs in capacities) to 8 (packs held up to 7)"
    nothing = "nothing to do in the first steps (layer 3: a hook)"
    assert document["explained"] == [
        {"model": "GPTModel", "reason": reason, "calls": calls, "share": calls / 100, "remedy": what}
        for reason, calls, what in (("TOO_MANY_SEQUENCES", 30, remedy), ("WARMING_UP", 10, nothing))
    ]
    assert main(["doctor", "--report", str(path)]) == 0
    shown = capsys.readouterr().out
    assert remedy in shown and "layer 3: a hook" in shown and "30 (30.0%)" in shown


@pytest.mark.megatron
@pytest.mark.parametrize(("command", "code"), [("doctor", 1), ("advise", 3)])
def test_json_is_where_it_was_asked_for(files: Files, monkeypatch: Any, command: str, code: int) -> None:
    """Bug: a script that changed its folder took the file with it."""
    monkeypatch.chdir(files.folder)
    away = files.script("import os; os.chdir(os.path.dirname(__file__))")
    assert main([command, "--json", "out.json", str(away)]) == code
    assert (files.folder / "out.json").is_file()


def rehearsed(files: Files, capsys: pytest.CaptureFixture[str], script: str, code: int) -> dict[str, Any]:
    out = files.folder / "out.json"
    command = ["doctor", "--json", str(out), "--config", str(files.toml()), str(files.script(script)), "9"]
    assert main([*command, "open(__file__ + '.end', 'w')"]) == code
    assert "loss" not in capsys.readouterr().out
    assert not files.script(script).with_name("script.py.end").exists()
    return json.loads(out.read_text())


@pytest.mark.megatron
def test_a_script_runs_one_step_and_its_layers_are_told_apart(files: Files, capsys: Any) -> None:
    whole = rehearsed(files, capsys, TRAINING, 0)
    (model,) = whole["rehearsed"]
    assert whole["verdict"] == "2 of 2 layers would be graphed"
    assert (len(model["graphed"]), model["stays_eager"], model["slots"]) == (2, [], 1)
    assert model["capacities"] == [{"tokens": 64, "num_seqs": 6, "max_seqlen": 64}]
    least, most = model["pool_bytes"]
    assert 0 < least <= most

    hook = f"{MADE}        trainer.chunk.decoder.layers[1].register_forward_hook(lambda *given: None)\n"
    half = rehearsed(files, capsys, TRAINING.replace(MADE, hook), 0)
    (model,) = half["rehearsed"]
    assert half["verdict"] == "1 of 2 layers would be graphed"
    assert model["graphed"] == ["layer 0 (TransformerLayer)"]
    (sentence,) = model["stays_eager"]
    assert sentence.startswith("layer 1 (TransformerLayer) stays eager (FOREIGN_HOOK): ")
    assert abs(2 * model["pool_bytes"][0] - least) < 1024


@pytest.mark.megatron
def test_how_to_profile_a_script_has_the_options_that_were_given(files: Files, capsys: Any) -> None:
    config, script = str(files.toml()), str(files.script(TRAINING))
    given = ["--config", config, "--set", "verify=off"]
    assert main(["doctor", *given, script, "9", "print('the end')"]) == 0
    words = shlex.join([*given, "--set", "cuda_graph_nvtx=true", script, "9", "print('the end')"])
    assert capsys.readouterr().out.endswith(f" python -m megagraph run {words}\n")


@pytest.mark.megatron
def test_a_refused_model_and_a_script_without_any_say_so(files: Files, capsys: Any) -> None:
    refused = TRAINING.replace(MADE, MADE.replace("tiny)", "tiny, config={'qk_clip': True})"))
    document = rehearsed(files, capsys, refused, 1)
    (model,) = document["rehearsed"]
    assert document["verdict"] == "0 of 2 layers would be graphed" and model["pool_bytes"] == [0, 0]
    assert "clipping of attention's queries and keys" in model["stays_eager"][0]
    document = rehearsed(files, capsys, "raise SystemExit", 1)
    assert document["rehearsed"] == []
    assert document["verdict"].startswith("nothing would be graphed: no model")
    assert main(["doctor", str(files.script("pass"))]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("megagraph: nothing would be graphed")
