# SPDX-License-Identifier: Apache-2.0
"""Rotary positions have Megatron's meaning: graphed, as the eager reference, and in models that are not ours.
A table of `max_seqlen` rows that is as long as the pack maps row to row, so that positions go on from
document to document: such packs run as given. In all others positions begin anew in each document."""

import dataclasses
import functools
import inspect
import itertools
import logging
import types
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import megatron_rig as rig
import pytest
import rope_rig
import torch
from host_rig import HostTrainer, OwnBlock, OwnModel, PerTokenModel, host_pair, only
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from moe_rig import ExpertTrainer
from rope_rig import run
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph._C import Capacity

Steps = list[list[rig.Micro]]
COUNT = 7 if rig.ON_GPU else 3  # of steps that have each of these shapes
HALF = Capacity(tokens=64, num_seqs=5, max_seqlen=32)
# Megatron's interleaved RoPE takes no empty documents.
WITHOUT_EMPTY = [(10, 30, 20, 3, 1), (32, 2, 20, 2, 8), (12, 13, 13, 13, 13), (1, 29, 1, 32, 1)]
steps_of = functools.partial(rope_rig.canonical_steps, count=COUNT)
PICTURES = [rope_rig.Pictures(lengths=(9, 20)), rope_rig.Pictures(lengths=(3, 30, 8), seed=1, tail=5)]


class Keys(rope_rig.Declared):
    """Its keys declare another length. Megatron makes its table of the larger of the two."""

    def params(self, device: torch.device) -> Any:
        params = super().params(device)
        params.max_seqlen_q = max(self.lengths)
        return params


class Full(rope_rig.Pictures, rope_rig.Declared):
    """As canonical packs are."""


def declared(cls: type[rope_rig.Declared], max_seqlen: int = 64) -> Steps:
    return [
        [cls(lengths=it, seed=place, max_seqlen=max_seqlen, num_seqs=5) for place, it in enumerate(two)]
        for two in itertools.pairwise(rope_rig.SHAPES)
    ]


def fix_rows(model: Any, rows: int) -> None:
    rope_rig.scatter(model)
    model.rotary_pos_emb.get_rotary_seq_len = lambda *args, **given: rows


def before_call(number: int, model: Any, change: Callable[[Any], Any]) -> None:
    """Changes the table of a model."""
    calls = itertools.count(1)

    def hook(*_: Any) -> None:
        if next(calls) == number:
            change(model.rotary_pos_emb)

    model.register_forward_pre_hook(hook)


def change_table(model: Any) -> None:
    """In the third step, and only in place."""
    before_call(7, model, lambda it: (it.inv_freq.mul_(0.5), it.forward.cache_clear()))


def learn_table(model: Any, since: int = 1) -> None:
    table = model.rotary_pos_emb
    table.inv_freq = nn.Parameter(table.inv_freq.clone(), requires_grad=since == 1)
    table.forward = functools.partial(inspect.unwrap(type(table).forward), table)  # not out of a cache
    before_call(since, model, lambda it: it.inv_freq.requires_grad_(True))


def weigh_table(model: Any) -> None:
    model.weight = nn.Parameter(torch.ones(()))
    rig.hands(model.decoder, lambda it: {**it, "rotary_pos_emb": it["rotary_pos_emb"] * model.weight})


class Case(NamedTuple):
    """A run, and what of it does not replay."""

    steps: Steps
    as_given: str = ""  # why all of it runs so
    later: str = ""  # why all but the first steps run eager, where that is no reason of the packs'
    first: int = 1  # as many of them
    given: dict[str, Any] | None = None  # to what makes the model
    make: Callable[..., Any] = rig.ModelTrainer
    capacity: Capacity = rig.CAPACITY
    layers: int = rig.LAYERS
    failure: str = ""


half = functools.partial(Case, capacity=HALF)
GOES_ON = "SIGNATURE_CHANGED"
OF_HYBRID: dict[str, Any] = {"make": rig.HybridTrainer, "layers": len(rig.HYBRID_PATTERN)}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}
FEW = Capacity(tokens=64, num_seqs=2, max_seqlen=64)
CASES = {
    # Bug: with a `max_seqlen` of all tokens, positions began anew in each document in both modes.
    "all tokens": Case(steps_of(rig.CAPACITY), GOES_ON),
    "half": half(steps_of(HALF, aliased=True)),
    "half, interleaved": half(steps_of(HALF, shapes=WITHOUT_EMPTY), given={"rotary_interleaved": True}),
    "multi-latent attention, half": half(steps_of(HALF), given={"mla": "low rank, YaRN"}),
    "hybrid, half": half(steps_of(HALF), **OF_HYBRID),
    "keys of another length": Case(declared(Keys), GOES_ON),
    # Bug: positions began anew in each document, since the wrapper acted in every model.
    "refused": Case(steps_of(rig.CAPACITY), "SCOPE_UNSUPPORTED", given=SINKHORN, make=ExpertTrainer),
    "no capacity": Case(steps_of(rig.CAPACITY), "TOO_MANY_SEQUENCES", capacity=FEW),
    # Of each token, or a table of the longest document?
    "frequencies": Case(steps_of(HALF), later=GOES_ON, given={"prepare": rope_rig.hand_out_frequencies}),
    "multimodal": Case(declared(Full), given=rope_rig.MROPE),
    # Positions begin anew in each document, of a table that Megatron's rule does not foresee.
    "a longer table": half(
        steps_of(HALF),
        later="CAPTURE_FAILED",
        given={"prepare": functools.partial(fix_rows, rows=48)},
        failure="expected a rotary table of max_seqlen, 32 rows, got 48",
    ),
    # Bug: what the table is made of got no gradient, in both modes.
    "learned": half(steps_of(HALF), "SCOPE_UNSUPPORTED", given={"prepare": learn_table}),
    "learned later": half(
        steps_of(HALF), later=GOES_ON, first=2, given={"prepare": functools.partial(learn_table, since=5)}
    ),
    "a table with a learned weight": half(steps_of(HALF), later=GOES_ON, given={"prepare": weigh_table}),
    # As long as each pack here: positions go on, so that each token has a row.
    "a table of all tokens": half(steps_of(HALF), given={"prepare": functools.partial(fix_rows, rows=64)}),
    # As long as the pack, and no frequencies of each token: the pack itself declares fewer rows.
    "another table of its own": Case(
        declared(rope_rig.Declared, 32), later=GOES_ON, first=3, given={"prepare": change_table}
    ),
}


@pytest.mark.both
@pytest.mark.usefixtures("experts")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of multi-latent attention
@pytest.mark.parametrize("name", CASES)
def test_packs_that_need_no_padding_have_the_bits_of_an_unpatched_run(name: str) -> None:
    case = CASES[name]
    if "hybrid" in name:
        pytest.importorskip("megatron.core.models.hybrid.hybrid_model")
    runs = rope_rig.three_modes(case.steps, case.make, capacities=(case.capacity,), **(case.given or {}))
    calls, warm_up = 2 * len(case.steps) * case.layers, 2 * case.layers
    later = calls - case.first * warm_up
    graphed = {"WARMING_UP": warm_up, **({case.later: later} if case.later else {})}
    report = runs["graph"].report
    assert report["eager"] == ({case.as_given: calls} if case.as_given else graphed)
    assert runs["eager"].report["eager"] == {case.as_given or "DISABLED": calls}
    if case.as_given != "SCOPE_UNSUPPORTED":
        assert len(report["failures"]) == bool(case.failure) and case.failure in "".join(report["failures"])


def test_the_two_meanings_differ() -> None:
    """Or the tests here would compare nothing: by roundings, as attention sees distances alone."""
    whole, half = (run("off", rope_rig.canonical_steps(c, 1)).steps[0].losses for c in (rig.CAPACITY, HALF))
    assert not torch.equal(whole[0], half[0])


@pytest.mark.parametrize("of_each_token", [False, True])
def test_a_pack_of_fewer_rows_than_the_capacity_keeps_its_own_meaning(of_each_token: bool) -> None:
    """Bug: frequencies of each token were taken for a table of positions in each document."""
    longest = 20 if of_each_token else 29
    steps: Steps = []
    for index in range(5):
        first = rope_rig.Declared(lengths=(9, 20 + index), max_seqlen=longest + index, seed=index)
        steps.append([first, rope_rig.Declared(lengths=(15, 8, 3 + index), max_seqlen=15, seed=50 + index)])
    prepare = rope_rig.scatter_frequencies if of_each_token else rope_rig.scatter
    _eager, graphed = rope_rig.padded_modes(steps, prepare=prepare)
    goes_on = {"WARMING_UP": rig.LAYERS, GOES_ON: 5 * rig.LAYERS}
    rig.ran(graphed.report, **({"WARMING_UP": 2 * rig.LAYERS} if of_each_token else goes_on))


def test_a_model_that_never_enters_keeps_megatrons_own_rope(install: rig.Install) -> None:
    """A host's forward in place of the model's, which knows of nothing."""

    def bypass(model: Any) -> None:
        model.forward = inspect.unwrap(GPTModel.forward).__get__(model)

    steps = rope_rig.canonical_steps(rig.CAPACITY, 2)
    off = run("off", steps, given={"prepare": bypass})
    install()
    trainer = rig.ModelTrainer(prepare=bypass)
    for index, micros in enumerate(steps):
        assert_same_bits(off.steps[index], rig.step(trainer, micros))


def test_a_rope_that_a_host_has_put_in_place_of_megatrons_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours stands for it, so its model is refused, by name."""
    original = rope_utils._apply_rotary_pos_emb_thd
    calls: list[int] = []

    def of_a_host(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(t.size(0))
        return 0.5 * original(t, *args, **kwargs)

    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", of_a_host)
    report = rope_rig.three_modes(rope_rig.canonical_steps(rig.CAPACITY, 2))["graph"].report
    assert len(calls) == 3 * (2 * 2 * rig.LAYERS * 2)  # runs of micro-batches of layers of queries and keys
    rig.ran(report, failures=1, SCOPE_UNSUPPORTED=2 * 2 * rig.LAYERS)
    assert "of_a_host" in report["failures"][0]


def _import_rope(model: Any) -> None:
    """As Llama4SelfAttention of Megatron-Bridge does: its forward is in a module of its own."""
    for layer in model.decoder.layers:
        theirs: Any = type(layer.self_attention)
        plain = inspect.unwrap(theirs.forward)
        names = {**plain.__globals__, "apply_rotary_pos_emb": rope_utils.apply_rotary_pos_emb}
        forward = types.FunctionType(plain.__code__, {**names, "__name__": "a host's"}, "forward")
        forward.__defaults__, forward.__kwdefaults__ = plain.__defaults__, plain.__kwdefaults__
        layer.self_attention.__class__ = type("HostsAttention", (theirs,), {"forward": forward})


@pytest.mark.both
def test_attention_that_has_imported_megatrons_rope_itself_replays() -> None:
    """Bug: it got Megatron's, which takes no rows behind the last document."""
    steps: Steps = [[rig.ONE, rig.TWO]] * 3
    _eager, graphed = rope_rig.padded_modes(steps, prepare=_import_rope)
    rig.ran(graphed.report, WARMING_UP=2 * rig.LAYERS)
    assert_same_bits(graphed, run("graph", steps))


@pytest.fixture
def pair() -> rig.Pair:
    """Of multimodal models, of which one has graphs."""
    pair = rig.Pair(**rope_rig.MROPE)
    pair.step(*PICTURES, times=2)
    return pair


def _handing(pair: rig.Pair, change: Callable[[Any], Any]) -> None:
    """From now on the layers of both are handed other frequencies."""
    for trainer in pair.both:
        rig.hands(trainer.chunk.decoder, lambda it: {**it, "rotary_pos_emb": change(it["rotary_pos_emb"])})


@pytest.mark.parametrize(
    "change",
    [
        *(Tensor.double, lambda freqs: freqs[..., :8].contiguous(), lambda freqs: freqs.expand(-1, 1, 2, -1)),
        *(lambda freqs: freqs.clone().requires_grad_(), lambda freqs: (freqs, freqs), lambda freqs: None),
    ],
    ids=["another dtype", "fewer angles", "not contiguous", "with a gradient", "a pair", "none"],
)
def test_frequencies_unlike_the_captures_run_as_given(change: Callable[[Any], Any], pair: rig.Pair) -> None:
    before = pair.report()["replays"]
    _handing(pair, change)
    pair.step(*(dataclasses.replace(micro, tail=0) for micro in PICTURES), times=2)
    assert before > 0
    pair.ran(before, WARMING_UP=2 * rig.LAYERS, SIGNATURE_CHANGED=2 * 2 * rig.LAYERS)


def test_a_pair_of_frequencies_is_staged_as_one() -> None:
    """Of queries and of keys."""
    pair = rig.Pair(**rope_rig.MROPE)
    _handing(pair, lambda freqs: (freqs, freqs * 0.5))
    pair.train([[dataclasses.replace(PICTURES[0], seed=seed)] for seed in range(4)])
    pair.ran(3 * rig.LAYERS, WARMING_UP=rig.LAYERS)


def test_nothing_is_captured_until_frequencies_are_known() -> None:
    """Bug: graphs without any were captured, and replayed for micro-batches that have some."""
    pair, micros = rig.Pair(**rope_rig.MROPE), [dataclasses.replace(micro, tail=0) for micro in PICTURES]
    hooks = [rig.hands(it.chunk, lambda given: {**given, "extra_block_kwargs": {}}) for it in pair.both]
    pair.step(*micros, times=2)
    for hook in hooks:
        hook.remove()
    pair.step(*micros, times=2)
    pair.ran(SIGNATURE_CHANGED=2 * 2 * rig.LAYERS, WARMING_UP=rig.LAYERS)


def test_frequencies_past_the_pack_never_reach_a_result(pair: rig.Pair) -> None:
    """Those of rows past the last offset may be anything, in graphs and in eager."""
    left = pair.step(PICTURES[1], update=False)
    end = sum(PICTURES[1].lengths)

    def spoil(freqs: Any) -> Tensor:
        spoiled: Tensor = freqs.clone()
        spoiled[end:] = float("nan")
        return spoiled

    _handing(pair, spoil)
    assert_same_bits(left, pair.step(PICTURES[1], update=False))
    assert pair.report()["eager"] == {"WARMING_UP": 2 * rig.LAYERS}


# -- a host's RoPE for them, as mcore-bridge has it ------------------------------------------------


def _apply(original: Any, t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, **further: Any) -> Any:
    if freqs.shape[0] != t.shape[0]:
        return original(t, cu_seqlens, freqs, *args, **further)
    further.pop("cp_group")
    return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs, *args, **further).squeeze(1)


class ScalingLayer(TransformerLayer):
    """Scales rotated rows while it runs, as YaRN asks for."""

    def forward(self, *args: Any, **given: Any) -> Any:
        plain = rope_utils._apply_rotary_pos_emb_bshd

        def scaling(*args: Any, **given: Any) -> Tensor:
            return plain(*args, **{**given, "mscale": 1.25})

        with mock.patch.object(rope_utils, "_apply_rotary_pos_emb_bshd", scaling):
            return super().forward(*args, **given)


def _scale(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.__class__ = ScalingLayer


class StretchedModel(OwnModel):
    """Its table goes by the longest document, as of dynamic NTK in mcore-bridge."""

    longest = 16

    def tables(self, *given: Any) -> Any:
        hidden, tables = super().tables(*given)
        self.longest = max(int(given[-1].max_seqlen_q), 16)
        return hidden, {**tables, "rotary_pos_emb": tables["rotary_pos_emb"] * (16 / self.longest)}


class StretchedPerTokenModel(StretchedModel, PerTokenModel):
    """So do its frequencies of each token."""


def _by_longest(count: int) -> Steps:
    """Steps of packs that are canonical but for the longest document, which is their own."""
    steps: Steps = rope_rig.canonical_steps(HALF, count)
    return [[dataclasses.replace(it, max_seqlen=max(it.lengths)) for it in micros] for micros in steps]


def test_tables_that_go_by_the_longest_document_are_refused_by_name() -> None:
    """Bug: layers replayed with the table of the capacity's longest document; its own forward made it so."""
    given = {"model_class": StretchedModel, "capacities": (HALF,)}
    report = rope_rig.three_modes(_by_longest(COUNT), HostTrainer, **given)["graph"].report
    (failure,) = report["failures"]
    assert "go by the longest document" in failure and report["replays"] == 0


@pytest.fixture
def swifts_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = functools.partial(_apply, rope_utils._apply_rotary_pos_emb_thd)
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", replaced)


@pytest.mark.usefixtures("swifts_rope")
@pytest.mark.parametrize(
    ("model", "block"), [(PerTokenModel, None), (PerTokenModel, OwnBlock), (StretchedPerTokenModel, OwnBlock)]
)
def test_a_hosts_rope_runs_in_graphs_of_frequencies_of_each_token(model: type, block: type | None) -> None:
    """Bug: a model whose frequencies go by the longest document was told the capacity's."""
    given = {"model_class": model, "block_class": block, "prepare": _scale}
    steps = rope_rig.canonical_steps(HALF, COUNT) if model is PerTokenModel else _by_longest(COUNT)
    runs = rope_rig.three_modes(steps, HostTrainer, **given)
    # The first step shows where the model is entered, the second one warms up.
    assert runs["graph"].report["eager"] == {"WARMING_UP": 2 * 2 * rig.LAYERS}
    report = host_pair(times=4, **given).report()
    assert only(report, "WARMING_UP") and report["failures"] == []
    assert report["verification"]["unverified"] == 0


@pytest.mark.usefixtures("swifts_rope")
def test_a_hosts_rope_is_refused_if_its_model_hands_out_tables() -> None:
    report = host_pair(OwnModel, OwnBlock, times=3).report()
    assert report["replays"] == 0 and {*report["eager"]} == {"WARMING_UP", "SCOPE_UNSUPPORTED"}
    (failure,) = report["failures"]
    assert "in place of Megatron's RoPE is not supported yet" in failure


@pytest.mark.usefixtures("swifts_rope")
def test_packs_of_one_document_do_not_show_what_frequencies_are(caplog: pytest.LogCaptureFixture) -> None:
    """Which may be a table, too; so the model stays eager, and says so once."""
    pair = host_pair(PerTokenModel)
    with caplog.at_level(logging.WARNING, logger="megagraph"):
        pair.step(rig.Micro(lengths=(29,)), times=25)
    assert caplog.text.count("until a pack of several documents shows") == 2  # models
    assert pair.report()["eager"] == {"WARMING_UP": 25 * rig.LAYERS}
    pair.step(rig.Micro(lengths=(9, 20)), times=3)
    assert pair.report()["replays"] == rig.LAYERS


def test_packs_of_another_length_than_their_table_run_as_given_where_each_token_had_a_row() -> None:
    """Positions begin anew in their documents."""
    short = rope_rig.Declared(lengths=(20, 9), max_seqlen=20)
    steps = [[*micros, short] for micros in rope_rig.canonical_steps(HALF, COUNT)]
    given = {"prepare": functools.partial(fix_rows, rows=64)}
    off, graphed = (run(mode, steps, given=given, capacities=(HALF,)) for mode in ("off", "graph"))
    assert_same_bits(off, graphed)
    assert graphed.report["eager"] == {"WARMING_UP": 2 * rig.LAYERS, GOES_ON: COUNT * rig.LAYERS}
