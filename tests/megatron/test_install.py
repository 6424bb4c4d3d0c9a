# SPDX-License-Identifier: Apache-2.0
"""Installing and uninstalling: what is patched, what is put back, what is refused."""

import gc
import inspect
import io
import json
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import megatron_rig as rig
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from moe_rig import ExpertTrainer
from run_scripts import run_python
from same_bits import assert_same_bits
from test_docs import FENCE, ROOT, named, read
from test_hybrid_model import prediction

import megagraph
from megagraph import _C
from megagraph.cli.reports import read_report
from megagraph.demo.trainer import Trainer
from megagraph.megatron import seams
from megagraph.megatron.graphs.refusals import refusal_of
from megagraph.megatron.patch.installation import installed_plugin

pytestmark = pytest.mark.both

CONFIGURATION = ROOT / "docs" / "configuration.md"

OF_GPT = (*seams.SCHEDULES, seams.GPT_FORWARD, seams.BLOCK_FORWARD, seams.PACKED_ROPE)
SEAMS = (*OF_GPT, *(seams.hybrid_seams() or ()))


def _where(seam: seams.Seam) -> str:
    return f"{seam.module}.{seam.path}"


def _held() -> dict[str, Any]:
    """The very objects that the owners hold, without any binding."""
    held = {_where(seam): vars(seam.owner())[seam.name] for seam in SEAMS}
    owners = (seams.GPT_FORWARD.owner(), seams.BLOCK_FORWARD.owner())
    return held | {f"call of {owner.__name__}": owner.__call__ for owner in owners}


def _namespaces() -> dict[str, set[str]]:
    return {_where(seam): set(vars(seam.owner())) for seam in SEAMS}


def test_patched_functions_keep_name_and_signature_and_uninstall_puts_the_very_ones_back() -> None:
    before, names = _held(), _namespaces()
    signatures = {_where(seam): inspect.signature(seam.function()) for seam in SEAMS}
    megagraph.install(rig.graph_config())
    patched = _held()
    assert all(patched[path] is not function for path, function in before.items())
    for seam in SEAMS:
        assert seam.function().__name__ == seam.name and seam.problem() is None
        assert inspect.signature(seam.function()) == signatures[_where(seam)]
    assert get_forward_backward_func() is get_forward_backward_func()  # hosts ask once
    megagraph.uninstall()
    after = _held()
    assert all(after[path] is function for path, function in before.items())
    assert _namespaces() == names


def test_uninstall_leaves_no_attribute_on_a_model_that_was_trained() -> None:
    def attributes(model: torch.nn.Module) -> dict[str, set[str]]:
        found = {f"module {name}": set(vars(module)) for name, module in model.named_modules()}
        return found | {f"parameter {name}": set(vars(param)) for name, param in model.named_parameters()}

    unpatched = Trainer(rig.OPTIONS)  # trained alike, without the plugin
    rig.step(unpatched, [rig.ONE])
    rig.evaluate(unpatched, [rig.ONE])
    megagraph.install(rig.graph_config())
    trainer = Trainer(rig.OPTIONS)
    for _ in range(3):
        rig.step(trainer, [rig.ONE])
        rig.evaluate(trainer, [rig.ONE])
    assert rig.report_of(trainer)["replays"] > 0
    megagraph.uninstall()
    assert attributes(trainer.model) == attributes(unpatched.model)
    assert list(trainer.chunk.decoder.layers) == list(trainer.chunk.decoder._modules["layers"])


def test_a_second_install_changes_nothing_and_is_refused_if_it_asks_otherwise(monkeypatch: Any) -> None:
    """Bug: one with equal options was refused, and no message named `megagraph run`, which installs first."""
    megagraph.install(rig.graph_config())
    before, installed = _held(), installed_plugin()
    megagraph.install(rig.graph_config())
    megagraph.install()  # whatever is there
    remedy = r"uninstall\(\) first, or under `megagraph run` or MEGA"
    message = rf"other options \(mode is graph, not eager\): {remedy}"
    with pytest.raises(RuntimeError, match=message):
        megagraph.install(rig.graph_config(mode="eager"))
    monkeypatch.setenv("MEGAGRAPH_MODE", "eager")
    with pytest.raises(RuntimeError, match=message):
        megagraph.install()
    assert _held() == before and installed_plugin() is installed
    megagraph.uninstall()
    megagraph.install()
    assert rig.the_plugin().config.mode == "eager"


def test_log_and_report_call_models_as_the_user_does(caplog: pytest.LogCaptureFixture) -> None:
    """Actor and reference were both "GPTModel" (the later one with a number), whichever ran first."""
    caplog.set_level("INFO")
    actor, reference, critic, other, same = (Trainer(rig.OPTIONS) for _ in range(5))
    own = {id(actor.chunk): "actor", id(reference.chunk): "reference"}
    megagraph.install(rig.graph_config(), name=lambda model: own.get(id(model)))
    for trainer in (reference, actor, critic):
        rig.step(trainer, [rig.ONE], times=2)
    megagraph.install()  # another name of none
    megagraph.install(name="draft")  # as a script under `megagraph run` may
    for trainer in (other, same):
        rig.step(trainer, [rig.ONE])
    names = ["reference", "actor", "GPTModel", "draft", "draft #2"]
    assert [report["model"] for report in megagraph.reports()] == names
    assert "actor: captured" in caplog.text


def test_what_others_have_put_over_a_wrapper_stays_and_reaches_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bugs: it was gone after `uninstall()`; a schedule that was wrapped went on to write an empty report."""
    before, over, calls, path = _held(), {}, list[seams.Seam](), tmp_path / "run.json"

    def covering(seam: seams.Seam, ours: Callable[..., Any]) -> Callable[..., Any]:
        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(seam)
            return ours(*args, **kwargs)

        return theirs

    trainer = Trainer(rig.OPTIONS)
    unpatched = rig.step(trainer, [rig.ONE], update=False)
    covered = (seams.SCHEDULES[0], seams.GPT_FORWARD, seams.GPT_PLAN, seams.BLOCK_FORWARD)
    with monkeypatch.context() as theirs:
        for seam in covered:  # which monkeypatch holds as it was, to put it back
            theirs.setattr(seam.owner(), seam.name, seam.function())
        megagraph.install(rig.graph_config(report=path, log_interval=1))
        for seam in covered:
            over[_where(seam)] = covering(seam, seam.function())
            setattr(seam.owner(), seam.name, over[_where(seam)])
        rig.step(trainer, [rig.ONE], update=False, times=3)
        assert rig.report_of(trainer)["replays"] > 0
        megagraph.uninstall()
        (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
        assert "GPTModel.forward" in said and "wrapped by somebody since install()" in said
        held = _held()
        assert all(held[path] is over[path] for path in over if path in held)
        assert all(held[path] is before[path] for path in held.keys() - over.keys())
        calls.clear()
        report = path.read_text()
        assert_same_bits(rig.step(trainer, [rig.ONE], update=False), unpatched)
        assert path.read_text() == report and len(read_report(path)) == 1
        assert {seams.SCHEDULES[0], seams.GPT_FORWARD, seams.BLOCK_FORWARD} <= {*calls}
        # Over theirs, ours of before included.
        megagraph.install(rig.graph_config())
        rig.step(trainer, [rig.ONE], update=False, times=3)
        assert rig.report_of(trainer)["replays"] > 0
        megagraph.uninstall()
        assert all(_held()[path] is over[path] for path in over if path in held)
    assert _held() == before


def test_mode_off_patches_nothing_from_the_environment_either(monkeypatch: Any) -> None:
    monkeypatch.setenv("MEGAGRAPH_MODE", "off")
    before, off = _held(), partial(megagraph.install, rig.graph_config(mode="off"))
    for nothing in (megagraph.uninstall, off, megagraph.install):
        nothing()
        assert _held() == before
        assert installed_plugin() is None and megagraph.reports() == []


def test_a_path_is_read_as_toml_and_variables_go_over_it(tmp_path: Path, monkeypatch: Any) -> None:
    """`install("c.toml")` was an AttributeError."""
    path = tmp_path / "c.toml"
    path.write_text("[megagraph]\nmode = 'eager'\ncuda_graph_warmup_steps = 7\n")
    monkeypatch.setenv("MEGAGRAPH_CUDA_GRAPH_WARMUP_STEPS", "9")
    for given in (path, str(path)):
        megagraph.install(given)
        config = rig.the_plugin().config
        assert (config.mode, config.cuda_graph_warmup_steps) == ("eager", 9)
        megagraph.uninstall()


def test_a_report_is_left_once_an_interval_by_name_of_its_process(tmp_path: Path, monkeypatch: Any) -> None:
    """Ray ends its actors without their exit handlers: nothing was left of a run."""
    monkeypatch.setenv("RANK", "1")  # which leaves none if all have one name
    megagraph.install(rig.graph_config(report=tmp_path / "%p" / "rank-%r.json", log_interval=2))
    trainer = Trainer(rig.OPTIONS)
    path = tmp_path / str(os.getpid()) / "rank-1.json"
    for expected in (None, 1, 1, 3):
        rig.step(trainer, [rig.ONE])
        assert path.exists() == (expected is not None)
        if expected is not None:
            (model,) = read_report(path)
            assert model["replays"] == expected * rig.LAYERS
    megagraph.uninstall()
    assert read_report(path)[0]["replays"] == 3 * rig.LAYERS


@pytest.mark.parametrize("target", ["out/run.json", "-"])
def test_no_step_fails_for_a_report_that_cannot_be_written_any_more(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bugs: a step raised whose report had a file for a folder, and `uninstall()` with a closed stdout."""
    monkeypatch.chdir(tmp_path)
    megagraph.install(rig.graph_config(report=target, log_interval=1))
    trainer = Trainer(rig.OPTIONS)
    (tmp_path / "out").touch()
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    rig.step(trainer, [rig.ONE], times=2)
    megagraph.uninstall()
    assert json.loads(capsys.readouterr().err)["steps"] == 2


def test_the_example_for_tensorboard_writes_what_each_model_did_in_the_interval() -> None:
    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written[step, name.removeprefix("megagraph/")] = value

    written: dict[tuple[int, str], float] = {}
    (code,) = (code for language, code in FENCE.findall(read(CONFIGURATION)) if language == "python")
    example: dict[str, Any] = {}
    exec(compile(code, named(CONFIGURATION), "exec"), example)
    actor, reference = Trainer(rig.OPTIONS), Trainer(rig.OPTIONS)
    megagraph.install(rig.graph_config(), name=lambda model: "actor" if model is actor.chunk else None)
    seen: Any = ()
    for step, times in enumerate((2, 3)):
        rig.step(actor, [rig.ONE, rig.TWO], times=times)
        rig.step(reference, [rig.ONE])
        seen = example["write_scalars"](Writer(), step, seen)
    replays = 2 * rig.LAYERS  # a step's
    assert (written[0, "actor/eager/WARMING_UP"], written[0, "actor/replays"]) == (replays, replays)
    assert (written[1, "actor/eager/WARMING_UP"], written[1, "actor/replays"]) == (0, 3 * replays)
    assert (written[0, "actor/replay_share"], written[1, "actor/replay_share"]) == (0.5, 1.0)
    rows = rig.CAPACITY.tokens
    valid = sum(rig.ONE.lengths) + sum(rig.TWO.lengths)
    assert written[1, "actor/padding_rows"] == 3 * (2 * rows - valid)
    assert written[1, "actor/padding_share"] == 1 - valid / (2 * rows)
    assert (written[0, "GPTModel/replays"], written[1, "GPTModel/replays"]) == (0, rig.LAYERS)


@pytest.mark.parametrize("target", [".", "file/report.json", "file"])
def test_a_bad_report_path_is_found_when_installing(target: str, tmp_path: Path, monkeypatch: Any) -> None:
    """`report = "."` was found when the training was over."""
    (tmp_path / "file").write_text("an older report")
    before, files = _held(), sorted(tmp_path.rglob("*"))
    if target == "file":
        megagraph.install(rig.graph_config(report=tmp_path / target))
    else:
        with pytest.raises(ValueError, match=r"^report: expected a file"):
            megagraph.install(rig.graph_config(report=tmp_path / target))
        assert _held() == before
        monkeypatch.setenv("RANK", "1")  # which writes none
        megagraph.install(rig.graph_config(report=tmp_path / target))
    assert sorted(tmp_path.rglob("*")) == files


def test_importing_imports_no_core_and_a_script_that_installs_leaves_or_says_a_report(tmp_path: Path) -> None:
    """The documentation said that such a script leaves no file; one that could not be written was lost."""
    script = """
import importlib, os, pkgutil, shutil, sys, megagraph
for module in pkgutil.walk_packages(megagraph.__path__, "megagraph."):
    if not module.name.endswith("__main__") and module.name != "megagraph._C":
        importlib.import_module(module.name)
bad = [name for name in sys.modules if name.split(".")[0] in ("megatron", "transformer_engine")]
assert "megagraph.megatron.patch.installation" in sys.modules and not bad, bad
reports = os.path.abspath("reports")
import megatron.core  # once for both
child = os.fork()  # one of the two scripts ends before the other, which then has nowhere to write
megagraph.install(megagraph.GraphConfig(report="reports/r.json"))
os.chdir("/")
if child:
    assert os.wait()[1] == 0
    print(open(reports + "/r.json").read())
    shutil.rmtree(reports)
    open(reports, "w").close()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCHDYNAMO_DISABLE": "1"}
    done = run_python("-c", script, cwd=tmp_path, env=environment)
    said = done.stderr.partition("megagraph: the report could not be written to ")[2]
    assert said.startswith(f"{tmp_path}/reports/r.json (")
    document = json.loads(done.stdout)
    assert document == json.loads(said.partition("\n")[2])
    assert (document["format"], document["models"], document["steps"]) == (2, [], 0)


@pytest.mark.parametrize("seam", OF_GPT, ids=_where)
def test_a_seam_that_is_missing_is_named_and_nothing_is_patched(seam: seams.Seam, monkeypatch: Any) -> None:
    monkeypatch.delattr(seam.owner(), seam.name)
    others = [other for other in SEAMS if other is not seam]
    before = [other.function() for other in others]
    with pytest.raises(RuntimeError, match=rf"does not fit.*{seam.module}\.{seam.path} (is missing|has no)"):
        megagraph.install(rig.graph_config())
    assert [other.function() for other in others] == before
    assert installed_plugin() is None


HYBRID, _STACK = seams.hybrid_seams() or (None, None)
OF_SOME: dict[str, tuple[seams.Seam, Callable[[], Any]]] = {
    "multi-token prediction": (seams.PREDICTION_FORWARD, prediction),
    "a router": (seams.ROUTER_FORWARD, ExpertTrainer),
    "a dispatcher": (seams.PERMUTATION, ExpertTrainer),
    **({"a hybrid model": (HYBRID, partial(rig.ModelTrainer, pattern="*-"))} if HYBRID else {}),
}


@pytest.mark.parametrize("kind", OF_SOME)
@pytest.mark.usefixtures("experts")
def test_what_a_host_has_put_where_some_models_look_keeps_these_eager(kind: str, monkeypatch: Any) -> None:
    """Bug: no process could install the plugin that had imported a host with such a function."""
    seam, make = OF_SOME[kind]
    theirs = lambda *given: None  # noqa: E731
    model, plain = make().chunk, Trainer(rig.OPTIONS).chunk
    monkeypatch.setattr(seam.owner(), seam.name, theirs)
    megagraph.install(rig.graph_config())
    assert seam.function() is theirs
    assert refusal_of(plain, None) is None
    lacks = f"{_where(seam)} has no parameter {', '.join(seam.takes.split())}"
    assert rig.refused(model) == f"a model of which {lacks} is not supported yet"


def test_a_function_that_takes_any_name_is_wrapped_like_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mcore-bridge's in place of multi-token prediction's. Bug: `install()` refused it."""
    seam = seams.PREDICTION_FORWARD
    theirs = lambda self, input_ids, position_ids, hidden_states, attention_mask, **kwargs: None  # noqa: E731
    monkeypatch.setattr(seam.owner(), seam.name, theirs)
    megagraph.install(rig.graph_config())
    assert seam.function().__wrapped__ is theirs and seam.problem() is None
    megagraph.uninstall()  # before theirs goes, or it would be put back for later tests


def test_an_unknown_release_whose_seams_fit_is_tried_with_a_warning(monkeypatch: Any, caplog: Any) -> None:
    import megatron.core

    megagraph.install(rig.graph_config())
    assert caplog.text == ""
    megagraph.uninstall()
    monkeypatch.setattr(megatron.core, "__version__", "0.99.0")
    seams.check_core()  # as commands do, before they set logging up
    megagraph.install(rig.graph_config())
    assert caplog.text.count("megatron-core 0.99.0 is untested") == 1
    assert installed_plugin() is not None


def test_a_build_without_a_compiler_is_refused_on_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_C, "WITH_CUDA", False)
    before = _held()
    with pytest.raises(RuntimeError, match=r"built without a CUDA compiler.*nvcc"):
        megagraph.install(rig.graph_config())
    assert _held() == before


@pytest.mark.parametrize(
    ("mode", "overlap", "uninstalls"),
    [("graph", False, False), ("graph", True, False), ("eager", False, False), ("graph", False, True)],
)
def test_a_model_that_nobody_holds_any_more_is_freed_and_its_figures_stay(
    mode: str, overlap: bool, uninstalls: bool, install: rig.Install
) -> None:
    install(mode=mode)
    trainer = Trainer(rig.OPTIONS, ddp={"overlap_grad_reduce": overlap})
    rig.step(trainer, [rig.ONE], times=3)
    before = rig.report_of(trainer)
    references = [*map(weakref.ref, (trainer.chunk, trainer.chunk.decoder, *trainer.chunk.parameters()))]
    if uninstalls:
        megagraph.uninstall()
    del trainer
    gc.collect()
    assert references[0]() is references[1]() is None
    frees = megagraph.suspend if overlap else partial(Trainer, rig.OPTIONS)
    frees()  # the memory of the former
    assert {reference() for reference in references} == {None}
    for after in megagraph.reports():
        assert after["calls"] == before["calls"] == 3 * rig.LAYERS and after["replays"] == before["replays"]
    assert len(megagraph.reports()) == (not uninstalls)
