# SPDX-License-Identifier: Apache-2.0
"""Models and blocks that override Megatron's forward: served where they can be, else refused and counted."""

import dataclasses
import logging
import random
import types
from collections.abc import Callable
from typing import Any

import megatron_rig as rig
import pytest
import torch
from host_rig import FULL, HostTrainer, OwnBlock, OwnModel, PerTokenModel, frozen_model, host_pair, only
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron_rig import LAYERS, ONE, OTHER, TWO, Install, Micro, Pair, evaluate, forward, hands, step
from same_bits import assert_same_bits
from state_changes import Probe, scaled
from torch import Tensor, nn

import megagraph

pytestmark = pytest.mark.both

OWN_FORWARD = vars(OwnModel)["forward"]  # before anything wraps it
OTHER_FULL = Micro(lengths=(30, 19, 8, 4, 3), seed=3)
# The rows of `FULL`, in a pack of other documents.
FULL_OF_OTHER = dataclasses.replace(FULL, pack=lambda made: OTHER_FULL.params(made.cu_seqlens_q.device))


def _handing_on(cls: Any) -> type:
    class Super(cls):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    return Super


SuperModel, SuperBlock, OwnSuper = (_handing_on(cls) for cls in (GPTModel, TransformerBlock, OwnModel))


class CallingModel(OwnModel):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class NamelessBlock(OwnBlock):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Any = kwargs["hidden_states"]
        names = ("packed_seq_params", "rotary_pos_emb", "attention_mask")
        for layer in self.layers:
            hidden, _ = layer(hidden, **{name: kwargs[name] for name in names})
        return self.final_layernorm(hidden)


@pytest.mark.parametrize(
    ("model", "block"),
    [(SuperModel, SuperBlock), (OwnSuper, OwnBlock), (CallingModel, OwnBlock), (GPTModel, NamelessBlock)],
)
def test_an_overridden_forward_replays_with_the_bits_of_eager(model: type, block: type | None) -> None:
    """Bug: such a model never entered, its calls were counted nowhere, and nothing was said."""
    report = host_pair(model, block, times=3).report()
    assert only(report, "WARMING_UP"), report
    assert report["failures"] == [] and report["calls"] == 3 * 4 * LAYERS
    assert report["replays"] >= 4 * LAYERS


def test_what_is_entered_is_named_once_and_left_alone_and_called_itself_it_runs_as_given(caplog: Any) -> None:
    """Such a call passes no door: right, and counted nowhere."""
    before = {cls: vars(cls)["forward"] for cls in (OwnModel, OwnBlock)}
    with caplog.at_level(logging.INFO, logger="megagraph"):
        pair = host_pair(OwnModel, OwnBlock, times=4)
    assert only(pair.report(), "WARMING_UP")
    said = [text for text in caplog.messages if "in place of" in text]
    assert [text.split(": ")[-1] for text in said] == 2 * [
        "host_rig.OwnModel.forward is entered in place of GPTModel.forward",
        "host_rig.OwnBlock.forward is entered in place of TransformerBlock.forward",
    ]
    assert {cls: vars(cls)["forward"] for cls in before} == before
    calls = pair.report()["calls"]
    with torch.no_grad():
        out = [
            forward(called, FULL, trainer.device)[0]
            for trainer in pair.both
            for called in (trainer.chunk, trainer.chunk.forward)
        ]
    assert all(torch.equal(out[0], other) for other in out)
    assert pair.report()["calls"] == calls + LAYERS
    megagraph.uninstall()
    assert "forward" not in vars(pair.graphed.chunk.decoder.layers[0])


def test_a_class_that_is_defined_after_install_is_found_where_it_runs(install: Install) -> None:
    install()

    class Later(OwnModel):
        def forward(self, *_args: Any, **given: Any) -> Any:
            return self.run(given["input_ids"], *[None] * 3, given["labels"], given["packed_seq_params"])

    class LaterBlock(OwnBlock):
        forward = vars(OwnBlock)["forward"]

    assert only(host_pair(GPTModel, LaterBlock, times=3).report(), "WARMING_UP")
    step(HostTrainer(Later), [ONE], times=3)
    report = megagraph.reports()[-1]
    assert report["calls"] == 3 * LAYERS and report["replays"] == 0
    assert "depends on more than the pack's capacity (TypeError: " in report["failures"][0]


def test_a_forward_that_replaces_megatrons_on_its_class_replays(install: Install, monkeypatch: Any) -> None:
    """As a host patches megatron-core itself, after the plugin was installed."""
    install()
    with monkeypatch.context() as patch:
        for name in ("forward", "run", "tables"):
            patch.setattr(GPTModel, name, vars(OwnModel)[name], raising=False)
        assert only(host_pair(times=3).report(), "WARMING_UP")


@pytest.mark.parametrize("block", [None, OwnBlock])
def test_a_pack_that_a_hook_puts_in_place_of_the_given_one_is_the_one_that_runs(block: type | None) -> None:
    """Around the call of a model the plugin decides before its hooks run."""
    pair = host_pair(OwnModel, block)
    pair.step(FULL, OTHER_FULL, times=3)
    before = pair.report()["replays"]
    expected = step(pair.graphed, [FULL_OF_OTHER], update=False)
    seen: list[Any] = []

    def swap(given: dict[str, Any]) -> dict[str, Any]:
        """For another one of the same rows."""
        seen.append(given["packed_seq_params"])
        return {**given, "packed_seq_params": OTHER_FULL.params(pair.graphed.device)}

    hands(pair.graphed.chunk, swap)
    assert_same_bits(step(pair.graphed, [FULL], update=False), expected)
    report = pair.report()
    assert len(seen) == 1 and report["eager"]["SIGNATURE_CHANGED"] == LAYERS
    assert report["replays"] == before + LAYERS


@pytest.mark.parametrize("model", [OwnModel, SuperModel])
def test_a_stage_without_layers_runs_as_given(model: type, install: Install) -> None:
    """Bug: the call of a model that overrides Megatron's forward made a bank of no layer, and raised."""
    install()
    made, called = frozen_model(0, model)
    made.requires_grad_()
    del made.decoder.layers[:]
    for _ in range(2):
        assert torch.isfinite(forward(called, FULL, next(made.parameters()).device)[0]).all()
    assert megagraph.reports() == []


def test_arguments_whose_names_are_not_known_run_as_given(install: Install) -> None:
    install()
    trainer = HostTrainer(OwnSuper)
    step(trainer, [ONE], times=3)
    given, before = ONE.given(trainer.device), megagraph.reports()[0]
    with torch.no_grad():
        trainer.chunk(given["input_ids"], given["position_ids"], packed_seq_params=given["packed_seq_params"])
    (report,) = megagraph.reports()
    assert before["replays"] == report["replays"] == LAYERS
    assert report["eager"] == {**before["eager"], "SCOPE_UNSUPPORTED": LAYERS}


class ShortModel(OwnModel):
    """Calls its block by other names than Megatron's."""

    def run(self, tokens: Any, positions: Any, mask: Any, given: Any, labels: Any, pack: Any) -> Any:
        hidden, tables = self.tables(tokens, positions, given, pack)
        out = self.decoder(hidden, pack, tables["rotary_pos_emb"])
        return self.compute_language_model_loss(labels, self.output_layer(out)[0])


class EmbeddedModel(OwnModel):
    def tables(self, *given: Any) -> Any:
        hidden, tables = super().tables(*given)
        return hidden, {**tables, "sequence_len_offset": hidden.detach()}


def test_a_forward_whose_layers_get_what_is_made_of_hidden_states_is_refused_by_name() -> None:
    """Bug: the first pack that filled its capacity was compared with what has no memory, and raised."""
    pair = host_pair(EmbeddedModel)
    pair.step(ONE, FULL, times=3)
    (failure,) = pair.ran(0, failures=1, WARMING_UP=8, SCOPE_UNSUPPORTED=4)["failures"]
    assert "(ValueError: sequence_len_offset is made of hidden states)" in failure


class RenamedBlock(NamelessBlock):
    def forward(self, hidden_states: Any, pack: Any, table: Any) -> Any:
        given = {"packed_seq_params": pack, "rotary_pos_emb": table, "attention_mask": None}
        return super().forward(hidden_states=hidden_states, **given)


def test_a_block_without_the_parameters_of_megatrons_is_refused_by_name(caplog: Any) -> None:
    pair = host_pair(ShortModel, RenamedBlock)
    pair.step(ONE, TWO, times=3)
    report = pair.ran(0, failures=1, WARMING_UP=2 * LAYERS, SCOPE_UNSUPPORTED=2 * 2 * LAYERS)
    assert report["failures"] == [
        "ShortModel #2 stays eager (SCOPE_UNSUPPORTED): test_overridden_forwards.RenamedBlock.forward "
        "overrides TransformerBlock.forward and has no parameter attention_mask, rotary_pos_emb, "
        "packed_seq_params"
    ]
    assert caplog.text.count("ShortModel #2: stays eager") == 1


def test_a_forward_that_steps_aside_and_calls_the_model_anew_is_counted_once(pair: Pair, caplog: Any) -> None:
    """Bug: the call around and the one inside counted each."""

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


class SometimesModel(GPTModel):
    """Runs what has one document by a way of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs["packed_seq_params"].cu_seqlens_q.numel() == 2:
            return OwnModel.forward(self, *args, **kwargs)
        return super().forward(*args, **kwargs)

    run, tables = OwnModel.run, OwnModel.tables


class DrawingModel(OwnModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch.rand(()), random.random()
        return super().forward(*args, **kwargs)


def test_what_a_forward_hands_on_is_asked_without_a_trace() -> None:
    """Bug: random numbers that it draws moved on, for each capacity."""
    left = []
    for config in (None, rig.graph_config()):
        torch.manual_seed(3), random.seed(3)
        run = rig.train(config, [[FULL]] * 4, HostTrainer, model_class=DrawingModel)
        left.append((run, random.getstate()))
    assert left[1][0].report["replays"] > 0
    assert_same_bits(*((run.rng, stream) for run, stream in left))


def test_calls_that_go_another_way_are_counted_and_the_others_replay(caplog: Any) -> None:
    """Bug: the first such call kept what followed in its step eager, for the sake of a sentence."""
    pair = host_pair(SometimesModel)
    pair.step(ONE, TWO, times=3)
    for _ in range(3):
        replays = pair.report()["replays"]
        with caplog.at_level(logging.INFO, logger="megagraph"):
            assert pair.costs(OTHER, ONE) == {"SCOPE_UNSUPPORTED": LAYERS}
        assert pair.report()["replays"] == replays + LAYERS
    assert caplog.text.count("some calls of test_overridden_forwards.SometimesModel.forward") == 2


class SometimesBlock(OwnBlock):
    """Runs its layers itself in evaluations."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (TransformerBlock if self.training else OwnBlock).forward(self, *args, **kwargs)


@torch.no_grad()
def _enlarge(chunk: nn.Module) -> None:
    """So that positions show in the loss."""
    for parameter in chunk.parameters():
        parameter.mul_(20 if parameter.dim() == 2 else 1)


@pytest.mark.parametrize("model", [GPTModel, OwnModel])
def test_a_call_that_passes_a_door_of_its_block_runs_on_the_given_pack(model: type, install: Install) -> None:
    """Bug: on that of the capacity, through which Megatron's RoPE counts on: other losses."""
    trainer = HostTrainer(model, SometimesBlock, prepare=_enlarge)
    (expected,) = evaluate(trainer, [FULL])
    install()
    step(trainer, [ONE, FULL], times=3, update=False)
    before = rig.report_of(trainer)
    (found,) = evaluate(trainer, [FULL])
    assert_same_bits(found, expected)
    report = rig.report_of(trainer)
    assert before["replays"] > 0 and rig.eager_since(report, before) == {"SCOPE_UNSUPPORTED": LAYERS}


def _patched(model: Any) -> None:
    """As verl patches a model for its fused kernels where megatron-core has no hook for them."""
    model.tables, model.run = (types.MethodType(f, model) for f in (OwnModel.tables, OwnModel.run))
    model.forward = types.MethodType(OWN_FORWARD, model)


def _wrapped(model: Any) -> None:
    """Nobody else keeps what it sets."""
    inner = type(model).forward
    model.forward = types.MethodType(lambda self, *args, **kwargs: inner(self, *args, **kwargs), model)


def _backed_up(model: Any) -> None:
    model.forward_backup = model.forward
    _patched(model)


COMINGS: dict[str, tuple[str, Callable[[Any], None], Callable[[Any], None]]] = {
    # Bug: layers in chunks stayed joined, and the model eager for as long as it was there.
    **{
        granularity: (granularity, _backed_up, lambda model: setattr(model, "forward", model.forward_backup))
        for granularity in ("layer", "chunk")
    },
    # Bug: it was gone with the instance's attribute, and nothing told it from one that was never set.
    "deleted": ("layer", _wrapped, lambda model: delattr(model, "forward")),
    "put back": ("layer", _wrapped, lambda it: setattr(it, "forward", type(it).forward.__get__(it))),
}


@pytest.mark.parametrize("which", COMINGS)
def test_a_forward_that_comes_and_goes_on_the_instance_is_noticed(which: str) -> None:
    granularity, come, go = COMINGS[which]
    pair = host_pair(plugin={"cuda_graph_granularity": granularity})
    pair.step(ONE, times=2)
    replays = [pair.report()["replays"]]
    for change in (come, go):
        pair.each(lambda trainer, change=change: change(trainer.chunk))
        pair.step(ONE, times=4)
        replays.append(pair.report()["replays"])
    for _ in range(3):  # what is captured from now on asks the forward of now
        pair.evaluate(ONE)
    report = pair.report()
    assert report["calls"] == (2 + 4 + 4 + 3) * LAYERS and report["failures"] == []
    assert {*report["eager"]} == {"WARMING_UP"}
    assert replays[0] > 0 and report["replays"] >= replays[2] + LAYERS
    assert replays[1] >= replays[0] + 2 * LAYERS and replays[2] >= replays[1] + 2 * LAYERS


class ScaledBlock(OwnBlock):
    """Between layers it works on every row; autograd keeps the rows for that."""

    def between(self, index: int, hidden_states: Tensor) -> Tensor:
        return hidden_states * hidden_states.tanh() if index % 2 == 0 else hidden_states


class SettingBlock(OwnBlock):
    """Sets a value of each layer right before its call."""

    scale = 1.0

    def between(self, index: int, hidden_states: Tensor) -> Tensor:
        if index + 1 < len(self.layers):
            self.layers[index + 1].mlp.number = self.scale
        return hidden_states


def test_what_a_block_sets_between_its_layers_is_heard(monkeypatch: Any) -> None:
    """Bug: such a layer replayed with the value that it had where the block was entered."""
    pair = host_pair(GPTModel, SettingBlock, prepare=rig.around_mlps(Probe))
    pair.step(ONE, times=4)
    monkeypatch.setattr(SettingBlock, "scale", 0.5)
    assert pair.costs(ONE, TWO) == {"STATE_CHANGED": 1 + LAYERS}
    pair.step(ONE, TWO)
    assert pair.costs(ONE, TWO) == {}


def test_work_between_layers_is_done_and_no_layer_is_replayed_over_what_it_needs() -> None:
    """A layer that would be staged into the former one's output runs eager; without gradients none is."""
    pair = host_pair(GPTModel, ScaledBlock, options=dataclasses.replace(rig.OPTIONS, layers=4))
    pair.step(ONE, TWO, times=5)
    trained = pair.report()
    assert only(trained, "WARMING_UP", "NESTING") and trained["eager"]["NESTING"] > 0
    for _ in range(4):
        pair.evaluate(OTHER)
    report = pair.report()
    assert report["replays"] - trained["replays"] == 3 * 4
    assert report["eager"]["NESTING"] == trained["eager"]["NESTING"]


def _run_parts(block, hidden_states, attention_mask, rotary_pos_emb, packed_seq_params, **_) -> Any:
    """Parts of its layers, and no layer."""
    for layer in block.layers:
        out, bias = layer.mlp(hidden_states)
        hidden_states = hidden_states + out + bias
    return block.final_layernorm(hidden_states)


def _move_memory(layers: Any) -> None:
    weight = layers[0].mlp.linear_fc1.weight
    weight.data = weight.data.clone()


def test_a_block_that_a_host_takes_over_is_counted_and_replays_once_it_is_given_back() -> None:
    """Bug: a model that was refused for a forward stayed so without it, and was let go when memory moved."""
    pair = host_pair()
    pair.step(FULL, times=3)
    replays = pair.report()["replays"]
    blocks = [trainer.chunk.decoder for trainer in pair.both]
    for block in blocks:
        block.forward = types.MethodType(_run_parts, block)
    pair.step(FULL, times=5)
    taken = pair.report()
    assert taken["replays"] == replays == 2 * LAYERS and taken["calls"] == 8 * LAYERS
    assert taken["eager"]["SCOPE_UNSUPPORTED"] >= 2 * LAYERS and taken["graphs"] == 0
    assert "some calls do not reach" in taken["failures"][0]
    for block in blocks:
        _move_memory(block.layers)
    assert pair.costs(FULL) == {"SCOPE_UNSUPPORTED": LAYERS}
    assert pair.report()["failures"] == taken["failures"]
    for block in blocks:
        del block.forward
    pair.step(FULL, times=4)
    report = pair.report()
    assert report["replays"] >= replays + 2 * LAYERS and report["failures"] == []


def test_a_block_replays_the_layers_that_it_is_given_back_and_needs_none_that_are_gone(pair: Pair) -> None:
    """Bug: without its layers its calls were counted nowhere."""
    pair.step(ONE, times=3)
    taken = [nn.ModuleList() for _ in pair.both]
    for has_layers, is_last in ((False, False), (True, False), (False, True)):
        for index, block in enumerate(trainer.chunk.decoder for trainer in pair.both):
            taken[index], block.layers = block.layers, taken[index]
            _move_memory(block.layers or taken[index])
        if is_last:
            taken.clear()
        assert pair.costs(ONE, times=2) == ({} if has_layers else {"SCOPE_UNSUPPORTED": 2 * LAYERS})
        report = pair.report()
        said = ["has no layers any more" in failure for failure in report["failures"]]
        assert said == [True] * (not has_layers) and bool(report["graphs"]) is has_layers


@pytest.mark.parametrize("scopes", [(), ("attn",), ("mlp",)], ids=str)
def test_a_hosts_own_forward_of_a_layer_is_still_there_after_a_micro_batch(scopes: tuple[str, ...]) -> None:
    """Bug: of a layer that is graphed in parts the parts ran, and not what a host had set later."""
    pair = host_pair(GPTModel, OwnBlock, plugin={"cuda_graph_modules": scopes})
    pair.step(ONE)
    layers = [trainer.chunk.decoder.layers for trainer in pair.both]
    forwards = [scaled(second.forward, lambda: 1.5) for _first, second in layers]
    for (_first, second), scales in zip(layers, forwards, strict=True):
        second.forward = scales
    for micro in (ONE, TWO, FULL):
        pair.step(micro)
        assert [second.forward for _first, second in layers] == forwards
        assert all("forward" not in vars(first) for first, _second in layers)
    assert only(pair.report(), "WARMING_UP", "SCOPE_UNSUPPORTED" if scopes else "STATE_CHANGED")


class ScaledModel(OwnModel):
    """Makes its table itself in each call."""

    def tables(self, *given: Any) -> Any:
        hidden, tables = super().tables(*given)
        return hidden, {**tables, "rotary_pos_emb": tables["rotary_pos_emb"] * 0.5}


@pytest.mark.parametrize("model", [ScaledModel, PerTokenModel])
def test_tables_of_states_that_have_no_graphs_do_not_pile_up(model: type[GPTModel], install: Install) -> None:
    """Bug: one of each state stayed for ever, in a run whose layers count their calls one a micro-batch."""
    install()
    trainer = HostTrainer(model)
    step(trainer, [ONE], times=4)
    for index in range(12):
        trainer.chunk.decoder.layers[0].scale_of_step = 0.1 * index
        step(trainer, [ONE])
    (graphs,) = rig.the_plugin().all_graphs()
    constants = {id(it): it for it in graphs._arguments.values()}.values()
    assert len(constants) <= len(graphs.captures.bank.variants) + 1
