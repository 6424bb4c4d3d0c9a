# SPDX-License-Identifier: Apache-2.0
"""Models and blocks that override Megatron's forward: served where they can be, else refused and counted."""

import dataclasses
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_rig import (
    FULL,
    ONE,
    OTHER,
    TWO,
    HostTrainer,
    OwnBlock,
    OwnModel,
    bare_model,
    host_pair,
    only,
    trained,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron_rig import LAYERS, Install, Micro, Pair, forward, graph_config, step, the_plugin
from same_bits import assert_same_bits
from torch import Tensor

import megagraph

pytestmark = [pytest.mark.megatron, pytest.mark.both]

OWN_FORWARD = vars(OwnModel)["forward"]  # before anything wraps it
OTHER_FULL = Micro(lengths=(30, 19, 8, 4, 3), seed=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Swapped(Micro):
    """The rows of `FULL`, in a pack of other documents."""

    def params(self, device: torch.device) -> Any:
        return OTHER_FULL.params(device)


FULL_OF_OTHER = _Swapped(lengths=FULL.lengths, seed=3)


class SuperModel(GPTModel):  # type: ignore[misc]
    """Hands everything on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class SuperBlock(TransformerBlock):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OwnSuperModel(OwnModel):
    """Calls a forward that does not call Megatron's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class CallingModel(OwnModel):
    """Has a call of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class NamelessBlock(OwnBlock):
    """Takes all of its arguments by whatever name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Any = kwargs["hidden_states"]
        names = ("packed_seq_params", "rotary_pos_emb", "attention_mask")
        for layer in self.layers:
            hidden, _ = layer(hidden, **{name: kwargs[name] for name in names})
        return self.final_layernorm(hidden)


@pytest.mark.parametrize(
    ("model", "block"),
    [
        (OwnModel, None),
        (GPTModel, OwnBlock),
        (OwnModel, OwnBlock),
        (SuperModel, None),
        (GPTModel, SuperBlock),
        (SuperModel, SuperBlock),
        (OwnSuperModel, OwnBlock),
        (CallingModel, OwnBlock),
        (GPTModel, NamelessBlock),
    ],
)
def test_an_overridden_forward_replays_with_the_bits_of_eager(
    model: type, block: type | None, install: Install
) -> None:
    """Bug: such a model never entered, its calls were counted nowhere, and nothing was said."""
    install()
    report = trained(host_pair(model, block))
    assert only(report, "WARMING_UP"), report
    assert report["failures"] == []
    assert report["calls"] == 5 * 4 * LAYERS
    assert report["replays"] >= 2 * 4 * LAYERS


def test_a_class_that_is_defined_after_install_is_found_where_it_runs(install: Install) -> None:
    install()

    class Later(OwnModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(
                kwargs["input_ids"], None, None, None, kwargs["labels"], kwargs["packed_seq_params"]
            )

    class LaterBlock(OwnBlock):
        forward = vars(OwnBlock)["forward"]

    pair = host_pair(GPTModel, LaterBlock)
    assert only(trained(pair), "WARMING_UP")
    refused = HostTrainer(Later)
    for _ in range(3):
        step(refused, [ONE])
    report = megagraph.reports()[-1]
    assert report["calls"] == 3 * LAYERS and report["replays"] == 0
    assert "depends on more than the pack's capacity (TypeError: " in report["failures"][0]


def test_what_is_entered_is_named_once(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install()
    with caplog.at_level(logging.INFO, logger="megagraph"):
        trained(host_pair(OwnModel, OwnBlock))
    said = [record.getMessage() for record in caplog.records if "in place of" in record.getMessage()]
    assert [text.split(": ")[-1] for text in said] == 2 * [
        "host_rig.OwnModel.forward is entered in place of GPTModel.forward",
        "host_rig.OwnBlock.forward is entered in place of TransformerBlock.forward",
    ]


def test_forwards_that_override_are_left_alone(install: Install) -> None:
    before = {cls: vars(cls)["forward"] for cls in (OwnModel, OwnBlock)}
    for _ in range(2):
        install()
        pair = host_pair(OwnModel, OwnBlock)
        pair.step(ONE, times=4)
        assert only(pair.report(), "WARMING_UP")
        assert {cls: vars(cls)["forward"] for cls in before} == before
        megagraph.uninstall()
        assert "forward" not in vars(pair.graphed.chunk.decoder.layers[0])


def test_a_forward_that_replaces_megatrons_on_its_class_replays(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a host patches megatron-core itself, after the plugin was installed."""
    install()
    for name in ("forward", "run", "tables"):
        monkeypatch.setattr(GPTModel, name, vars(OwnModel)[name], raising=False)
    try:
        assert only(trained(host_pair(GPTModel)), "WARMING_UP")
    finally:
        monkeypatch.undo()
        megagraph.uninstall()


def test_a_forward_that_is_called_in_place_of_the_model_runs_as_given(install: Install) -> None:
    """It passes no door: right, and counted nowhere."""
    install()
    pair = host_pair(OwnModel, OwnBlock)
    pair.step(ONE, times=4)
    before = pair.report()
    out = []
    for trainer in pair.both:
        for called in (trainer.chunk, trainer.chunk.forward):
            with torch.no_grad():
                out.append(forward(called, FULL, trainer.device)[0])
    assert all(torch.equal(out[0], other) for other in out)
    assert pair.report()["calls"] == before["calls"] + LAYERS


def _with_hook(trainer: HostTrainer, seen: list[Any]) -> None:
    """Swaps the pack that the model was given for another one of the same rows."""

    def swap(_model: Any, args: Any, kwargs: Any) -> Any:
        seen.append(kwargs["packed_seq_params"])
        return args, {**kwargs, "packed_seq_params": OTHER_FULL.params(trainer.device)}

    trainer.chunk.register_forward_pre_hook(swap, with_kwargs=True)


@pytest.mark.parametrize("block", [None, OwnBlock])
def test_a_pack_that_a_hook_puts_in_place_of_the_given_one_is_the_one_that_runs(
    install: Install, block: type | None
) -> None:
    """Around the call of a model the plugin decides before its hooks run."""
    install()
    pair = host_pair(OwnModel, block)
    pair.step(FULL, OTHER_FULL, times=3)
    before = pair.report()["replays"]
    expected = step(pair.graphed, [FULL_OF_OTHER], update=False)
    seen: list[Any] = []
    _with_hook(pair.graphed, seen)
    assert_same_bits(step(pair.graphed, [FULL], update=False), expected)
    report = pair.report()
    assert len(seen) == 1 and report["eager"]["SIGNATURE_CHANGED"] == LAYERS
    assert report["replays"] == before + LAYERS


class RenamedModel(OwnModel):
    def forward(self, tokens: Tensor, pack: Any, labels: Tensor) -> Any:  # type: ignore[override]
        return self.run(tokens, None, None, None, labels, pack)


@pytest.mark.parametrize("model", [OwnModel, SuperModel])
def test_a_stage_without_layers_runs_as_given(model: type, install: Install) -> None:
    """Bug: the call of a model that overrides Megatron's forward made a bank of no layer, and raised."""
    install()
    made, called = bare_model(model)
    del made.decoder.layers[:]
    for _ in range(2):
        losses, _ = forward(called, FULL, next(made.parameters()).device)
        assert torch.isfinite(losses).all()
    assert megagraph.reports() == []


class PositionalModel(OwnModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return OwnModel.forward(self, *args, **kwargs)


def test_arguments_whose_names_are_not_known_run_as_given(install: Install) -> None:
    install()
    trainer = HostTrainer(PositionalModel)
    for _ in range(3):
        step(trainer, [ONE])
    tokens, _labels, _mask, positions = (rows[None].to(trainer.device) for rows in ONE.row_lists())
    before = megagraph.reports()[0]
    with torch.no_grad():
        trainer.chunk(tokens, positions, packed_seq_params=ONE.params(trainer.device))
    (report,) = megagraph.reports()
    assert before["replays"] == report["replays"] == LAYERS
    assert report["eager"] == {**before["eager"], "SCOPE_UNSUPPORTED": LAYERS}


class ShortModel(OwnModel):
    """Calls its block by other names than Megatron's."""

    def run(
        self,
        input_ids: Tensor,
        position_ids: Any,
        attention_mask: Any,
        decoder_input: Any,
        labels: Any,
        packed_seq_params: Any,
    ) -> Any:
        hidden, tables = self.tables(input_ids, position_ids, decoder_input, packed_seq_params)
        out = self.decoder(hidden, packed_seq_params, tables["rotary_pos_emb"])
        return self.compute_language_model_loss(labels, self.output_layer(out)[0])


class RenamedBlock(OwnBlock):
    def forward(self, hidden_states: Any, pack: Any, table: Any) -> Any:  # type: ignore[override]
        hidden: Any = hidden_states
        for layer in self.layers:
            hidden, _ = layer(hidden, attention_mask=None, packed_seq_params=pack, rotary_pos_emb=table)
        return self.final_layernorm(hidden)


def test_a_block_without_the_parameters_of_megatrons_is_refused_by_name(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install()
    pair = host_pair(ShortModel, RenamedBlock)
    pair.step(ONE, TWO, times=3)
    report = pair.report()
    assert report["calls"] == 3 * 2 * LAYERS and report["replays"] == 0
    assert report["eager"]["SCOPE_UNSUPPORTED"] == 2 * 2 * LAYERS
    (failure,) = report["failures"]
    assert failure == (
        "ShortModel #2 stays eager (SCOPE_UNSUPPORTED): test_overridden_forwards.RenamedBlock.forward "
        "overrides TransformerBlock.forward and has no parameter attention_mask, rotary_pos_emb, "
        "packed_seq_params"
    )
    assert caplog.text.count("ShortModel #2: stays eager") == 1


def test_a_model_whose_arguments_have_other_names_is_refused_and_counted(install: Install) -> None:
    install()
    trainer = HostTrainer(RenamedModel)
    tokens, labels, *_ = (rows[None].to(trainer.device) for rows in ONE.row_lists())

    def call() -> None:
        trainer.chunk(tokens, ONE.params(trainer.device), labels).sum().backward()

    for _ in range(3):
        step_of(trainer, call)
    (report,) = megagraph.reports()
    assert report["eager"] == {"SCOPE_UNSUPPORTED": 3 * LAYERS}
    (failure,) = report["failures"]
    assert "RenamedModel.forward overrides GPTModel.forward and has no parameter input_ids" in failure


def step_of(trainer: HostTrainer, call: Callable[[], None]) -> None:
    """A schedule's step around a call that no schedule of Megatron's would make."""
    the_plugin().schedule(lambda **_given: call())(model=[trainer.model])


def test_a_forward_that_steps_aside_and_calls_the_model_anew_is_counted_once(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the call around and the one inside counted each."""
    install()
    pair = Pair()

    def around(model: Any, *args: Any, **kwargs: Any) -> Any:
        own = vars(model).pop("forward")
        try:
            return model(*args, **kwargs)
        finally:
            model.forward = own

    for trainer in pair.both:
        trainer.chunk.forward = types.MethodType(around, trainer.chunk)
    pair.step(ONE, TWO, times=4)
    report = pair.report()
    assert report["calls"] == 4 * 2 * LAYERS and only(report, "WARMING_UP")
    assert "do not reach" not in caplog.text


class SometimesModel(GPTModel):  # type: ignore[misc]
    """Runs what has one document by a way of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs["packed_seq_params"].cu_seqlens_q.numel() == 2:
            return OwnModel.forward(self, *args, **kwargs)
        return super().forward(*args, **kwargs)

    run, tables = OwnModel.run, OwnModel.tables


def test_calls_that_go_another_way_are_counted_and_the_others_replay(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install()
    pair = host_pair(SometimesModel)
    with caplog.at_level(logging.INFO, logger="megagraph"):
        for _ in range(8):
            pair.step(ONE, OTHER)
    report = pair.report()
    assert report["calls"] == 8 * 2 * LAYERS
    assert report["eager"]["SCOPE_UNSUPPORTED"] == 8 * LAYERS
    assert report["replays"] >= 4 * LAYERS
    assert caplog.text.count("some calls of test_overridden_forwards.SometimesModel.forward") == 2


def _patched(model: Any) -> None:
    model.tables, model.run = (types.MethodType(f, model) for f in (OwnModel.tables, OwnModel.run))
    model.forward = types.MethodType(OWN_FORWARD, model)


def test_a_forward_on_the_instance_replays_and_stays(install: Install) -> None:
    """As verl patches a model for its fused kernels where megatron-core has no hook for them."""
    install()
    pair = Pair(HostTrainer, prepare=_patched)
    given = vars(pair.graphed.chunk)["forward"]
    report = trained(pair)
    assert only(report, "WARMING_UP") and report["calls"] == 5 * 4 * LAYERS
    megagraph.uninstall()
    assert vars(pair.graphed.chunk)["forward"] is given


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_a_forward_that_comes_and_goes_on_the_instance_is_noticed(install: Install, granularity: str) -> None:
    """Bug: layers in chunks stayed joined, and the model eager for as long as it was there."""
    install(cuda_graph_granularity=granularity)
    pair = Pair(HostTrainer)
    pair.step(ONE, times=3)
    before = pair.report()["replays"]
    assert before > 0
    for trainer in pair.both:
        trainer.chunk.forward_backup = trainer.chunk.forward
        _patched(trainer.chunk)
    pair.step(ONE, times=4)
    patched = pair.report()
    assert patched["calls"] == 7 * LAYERS and patched["replays"] >= before + 2 * LAYERS
    for trainer in pair.both:
        trainer.chunk.forward = trainer.chunk.forward_backup
    pair.step(ONE, times=3)
    after = pair.report()
    assert after["calls"] == 10 * LAYERS and after["replays"] >= patched["replays"] + 2 * LAYERS
    assert {*after["eager"]} == {"WARMING_UP"}


@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "put back"])
def test_a_forward_that_nobody_else_keeps_is_noticed_when_it_goes(install: Install, is_deleted: bool) -> None:
    """Bug: it was gone with the instance's attribute, and nothing told it from one that was never set."""
    install()
    pair = Pair(HostTrainer)

    def patch(chunk: Any) -> Any:
        before, inner = vars(chunk).get("forward"), type(chunk).forward
        chunk.forward = types.MethodType(lambda self, *args, **kwargs: inner(self, *args, **kwargs), chunk)
        return before

    before = [patch(trainer.chunk) for trainer in pair.both]
    pair.step(ONE, times=4)
    patched = pair.report()
    assert patched["replays"] >= 2 * LAYERS
    for trainer, forward_before in zip(pair.both, before, strict=True):
        if is_deleted:
            del trainer.chunk.forward
        else:
            trainer.chunk.forward = types.MethodType(type(trainer.chunk).forward, trainer.chunk)
        assert forward_before is None
    pair.step(ONE, times=3)
    after = pair.report()
    assert after["calls"] == 7 * LAYERS and after["replays"] >= patched["replays"] + 2 * LAYERS
    for _ in range(3):  # what is captured from now on asks the forward of now
        pair.evaluate(ONE)
    last = pair.report()
    assert last["failures"] == [] and last["replays"] >= after["replays"] + LAYERS
    assert {*last["eager"]} == {"WARMING_UP"}


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_an_overridden_model_trains_as_without_the_plugin(mode: str) -> None:
    """Not bit for bit: a canonical pack has more rows, over which torch sums in another order."""
    left = []
    for installed in (False, True):
        if installed:
            megagraph.install(graph_config(mode=mode))
        trainer = HostTrainer(OwnModel, OwnBlock)
        left.append([step(trainer, [ONE, TWO], update=False) for _ in range(5)])
    for plain, ours in zip(*left, strict=True):
        torch.testing.assert_close(ours.losses, plain.losses, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(ours.grads, plain.grads, rtol=1e-2, atol=1e-2)
