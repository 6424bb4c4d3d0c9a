# SPDX-License-Identifier: Apache-2.0
"""Rotary positions have Megatron's meaning: graphed, as the eager reference, and in models that are not ours.

Megatron makes a table of `max_seqlen` rows. One as long as the pack maps row to row, so that positions go on
from document to document: packs of several documents run as they were given then. In all others positions
begin anew in each document.
"""

import dataclasses
import functools
import inspect
import itertools
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from host_rig import HostTrainer, OwnBlock, OwnModel, PerTokenModel, host_pair, only
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron_rig import (
    CAPACITY,
    HYBRID_PATTERN,
    LAYERS,
    ON_GPU,
    HybridTrainer,
    Install,
    Micro,
    ModelTrainer,
    Pair,
    step,
)
from moe_rig import ExpertTrainer
from rope_rig import (
    MODES,
    MROPE,
    SHAPES,
    Declared,
    Pictures,
    assert_close_losses,
    canonical_steps,
    hand_out_frequencies,
    run,
    scatter,
    three_modes,
)
from same_bits import assert_same_bits
from torch import Tensor
from worlds import on_ranks

from megagraph.decide.dispatch import Capacity

COUNT = 7 if ON_GPU else 3  # of steps that have each of these shapes
HALF = Capacity(tokens=64, num_seqs=5, max_seqlen=32)
# Megatron's interleaved RoPE takes no empty documents.
WITHOUT_EMPTY = [(10, 30, 20, 3, 1), (32, 2, 20, 2, 8), (12, 13, 13, 13, 13), (1, 29, 1, 32, 1)]


@pytest.mark.parametrize(
    ("capacity", "interleaved", "aliased"),
    [(CAPACITY, False, False), (CAPACITY, True, True), (HALF, False, True), (HALF, True, False)],
    ids=str,
)
def test_canonical_packs_have_the_bits_of_an_unpatched_run(
    capacity: Capacity, interleaved: bool, aliased: bool
) -> None:
    """Bug: with a `max_seqlen` of all tokens, positions began anew in each document in both modes."""
    shapes = WITHOUT_EMPTY if interleaved else SHAPES
    steps = canonical_steps(capacity, COUNT, shapes, aliased=aliased)
    runs = three_modes(steps, capacities=(capacity,), rotary_interleaved=interleaved)
    as_given = {"SIGNATURE_CHANGED": COUNT * 2 * LAYERS}
    goes_on = capacity is CAPACITY
    assert runs["eager"].report["eager"] == (as_given if goes_on else {"DISABLED": COUNT * 2 * LAYERS})
    assert runs["graph"].report["eager"] == (as_given if goes_on else {"WARMING_UP": 2 * LAYERS})
    assert runs["graph"].report["failures"] == []


def test_the_two_meanings_differ() -> None:
    """Or the tests here would compare nothing: by roundings, as attention sees distances alone."""
    all_rows, half = (run("off", canonical_steps(c, 1)).steps[0].losses for c in (CAPACITY, HALF))
    assert not torch.equal(all_rows[0], half[0])


def test_each_pack_keeps_its_own_meaning_beside_packs_of_the_other() -> None:
    """One replays, although its canonical pack's table is as long as itself; the other runs as given."""
    steps: list[list[Micro]] = []
    for index in range(6):
        lengths = SHAPES[index]
        all_rows, longest = (
            Declared(lengths=lengths, max_seqlen=declared, num_seqs=5, seed=index) for declared in (64, 32)
        )
        steps.append([all_rows, longest] if index % 2 else [longest, all_rows])
    eager, graphed = run("eager", steps), run("graph", steps)
    assert_same_bits(eager, graphed)
    assert graphed.report["eager"] == {"WARMING_UP": LAYERS, "SIGNATURE_CHANGED": 6 * LAYERS}
    assert graphed.report["graphs"] == 2 * LAYERS
    assert_same_bits(run("off", steps), graphed)


def test_a_pack_of_fewer_rows_than_the_capacity_keeps_its_own_meaning() -> None:
    """The table has the capacity's rows where it is padded."""
    steps: list[list[Micro]] = [
        [
            Declared(lengths=(9, 20 + index), max_seqlen=29 + index, seed=index),
            Declared(lengths=(15, 8, 3 + index), max_seqlen=15, seed=50 + index),
        ]
        for index in range(5)
    ]
    off, eager, graphed = (run(mode, steps, given={"prepare": scatter}) for mode in MODES)
    assert_same_bits(eager, graphed)
    assert graphed.report["eager"] == {"WARMING_UP": LAYERS, "SIGNATURE_CHANGED": 5 * LAYERS}
    assert_close_losses(off, graphed)  # padding changes roundings


def test_one_document_alone_needs_no_graphs_of_its_own() -> None:
    """Its table is as long as the pack, and both meanings are the same."""
    steps: list[list[Micro]] = [[Micro(lengths=(9, 20), seed=i), Micro(lengths=(30 + i,))] for i in range(4)]
    graphed = run("graph", steps)
    assert_same_bits(run("eager", steps), graphed)
    assert graphed.report["graphs"] == 2 * LAYERS


def test_a_hybrid_model_has_the_bits_of_an_unpatched_run() -> None:
    pytest.importorskip("megatron.core.models.hybrid.hybrid_model")
    runs = three_modes(canonical_steps(HALF, COUNT), HybridTrainer, capacities=(HALF,))
    assert runs["graph"].report["eager"] == {"WARMING_UP": 2 * len(HYBRID_PATTERN)}
    runs = three_modes(canonical_steps(CAPACITY, COUNT), HybridTrainer)
    assert runs["graph"].report["eager"] == {"SIGNATURE_CHANGED": COUNT * 2 * len(HYBRID_PATTERN)}


def test_packs_whose_keys_declare_another_length_run_as_they_were_given() -> None:
    """Megatron makes its table of the larger of the two."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Keys(Declared):
        def params(self, device: torch.device) -> Any:
            params = super().params(device)
            params.max_seqlen_q = max(self.lengths)
            return params

    steps: list[list[Micro]] = [
        [Keys(lengths=lengths, max_seqlen=64, num_seqs=5)] for lengths in (*SHAPES, *SHAPES[:1])
    ]
    runs = three_modes(steps)
    assert runs["graph"].report["eager"] == {"SIGNATURE_CHANGED": 7 * LAYERS}


# -- models that are not ours --------------------------------------------------------------------


@pytest.mark.usefixtures("experts")
def test_a_refused_model_keeps_megatrons_own_rope() -> None:
    """Bug: positions began anew in each document, since the wrapper acted in every model."""
    refused = {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}
    runs = three_modes(canonical_steps(CAPACITY, COUNT), ExpertTrainer, **refused)
    assert runs["graph"].report["eager"] == {"SCOPE_UNSUPPORTED": COUNT * 2 * LAYERS}


def test_packs_that_fit_no_capacity_keep_megatrons_own_rope() -> None:
    small = Capacity(tokens=64, num_seqs=2, max_seqlen=64)
    runs = three_modes(canonical_steps(CAPACITY, COUNT), capacities=(small,))
    assert runs["graph"].report["eager"] == {"TOO_MANY_SEQUENCES": COUNT * 2 * LAYERS}


def test_a_model_that_never_enters_keeps_megatrons_own_rope(install: Install) -> None:
    """A host's forward in place of the model's, which knows of nothing."""

    def bypass(model: Any) -> None:
        model.forward = inspect.unwrap(GPTModel.forward).__get__(model)

    steps = canonical_steps(CAPACITY, 2)
    off = run("off", steps, given={"prepare": bypass})
    install()
    trainer = ModelTrainer(prepare=bypass)
    for index, micros in enumerate(steps):
        assert_same_bits(off.steps[index], step(trainer, micros))


def test_a_rope_that_a_host_has_put_in_place_of_megatrons_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours stands for it, so its model is refused, by name."""
    original = rope_utils._apply_rotary_pos_emb_thd
    calls: list[int] = []

    def of_a_host(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(t.size(0))
        out: Tensor = 0.5 * original(t, *args, **kwargs)
        return out

    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", of_a_host)
    runs = three_modes(canonical_steps(CAPACITY, 2))
    assert len(calls) == 3 * (2 * 2 * LAYERS * 2)  # runs of micro-batches of layers of queries and keys
    report = runs["graph"].report
    assert report["eager"] == {"SCOPE_UNSUPPORTED": 2 * 2 * LAYERS}
    (failure,) = report["failures"]
    assert "of_a_host" in failure


# -- frequencies of each token -------------------------------------------------------------------


def test_frequencies_of_each_token_replay() -> None:
    """Bug: they were taken for a table of positions in each document."""
    steps: list[list[Micro]] = [
        [Micro(lengths=(9, 20 + index), seed=index), Micro(lengths=(15, 8, 3 + index))] for index in range(4)
    ]
    given = {"prepare": lambda it: hand_out_frequencies(scatter(it))}
    off, eager, graphed = (run(mode, steps, given=given) for mode in MODES)
    assert_same_bits(eager, graphed)
    assert_close_losses(off, graphed)  # padding changes roundings
    assert graphed.report["eager"] == {"WARMING_UP": 2 * LAYERS} and graphed.report["failures"] == []


def test_frequencies_that_may_be_a_table_of_the_longest_document_run_as_they_were_given() -> None:
    runs = three_modes(canonical_steps(HALF, COUNT), prepare=hand_out_frequencies)
    assert runs["eager"].report["eager"] == {"DISABLED": COUNT * 2 * LAYERS}
    assert runs["graph"].report["eager"] == {
        "WARMING_UP": 2 * LAYERS,
        "SIGNATURE_CHANGED": (COUNT - 1) * 2 * LAYERS,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(Pictures, Declared):
    """As canonical packs are."""


def test_multimodal_rope_has_the_bits_of_an_unpatched_run() -> None:
    steps: list[list[Micro]] = [
        [Full(lengths=lengths, seed=place, max_seqlen=64, num_seqs=5) for place, lengths in enumerate(pair)]
        for pair in itertools.pairwise(SHAPES)
    ]
    report = three_modes(steps, **MROPE)["graph"].report
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS} and report["failures"] == []


def _pair(**given: Any) -> Pair:
    pair = Pair(**given)
    pair.step(*PICTURES, times=2)
    return pair


def _handing(pair: Pair, change: Callable[[Any], Any]) -> None:
    """From now on the layers of both are handed other frequencies."""

    def hand(_block: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**given, "rotary_pos_emb": change(given["rotary_pos_emb"])}

    for trainer in pair.both:
        trainer.chunk.decoder.register_forward_pre_hook(hand, with_kwargs=True)


PICTURES = [Pictures(lengths=(9, 20)), Pictures(lengths=(3, 30, 8), seed=1, tail=5)]


@pytest.mark.parametrize(
    "change",
    [
        lambda freqs: freqs.double(),
        lambda freqs: freqs[..., :8].contiguous(),
        lambda freqs: freqs.expand(-1, 1, 2, -1),
        lambda freqs: freqs.clone().requires_grad_(),
        lambda freqs: (freqs, freqs),
        lambda freqs: None,
    ],
    ids=["another dtype", "fewer angles", "not contiguous", "with a gradient", "a pair", "none"],
)
def test_frequencies_that_differ_from_those_of_the_capture_run_as_they_were_given(
    change: Callable[[Any], Any],
) -> None:
    pair = _pair(**MROPE)
    before = pair.report()["replays"]
    _handing(pair, change)
    for _ in range(2):
        pair.step(*(dataclasses.replace(micro, tail=0) for micro in PICTURES))
    report = pair.report()
    assert report["replays"] == before > 0 and report["failures"] == []
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "SIGNATURE_CHANGED": 2 * 2 * LAYERS}


def test_a_pair_of_frequencies_is_staged_as_one() -> None:
    """Of queries and of keys."""
    pair = Pair(**MROPE)
    _handing(pair, lambda freqs: (freqs, freqs * 0.5))
    report = pair.train([[dataclasses.replace(PICTURES[0], seed=seed)] for seed in range(4)])
    assert report["eager"] == {"WARMING_UP": LAYERS} and report["replays"] == 3 * LAYERS


def test_nothing_is_captured_until_frequencies_are_known() -> None:
    """Bug: graphs without any were captured, and replayed for micro-batches that have some."""
    pair, micros = Pair(**MROPE), [dataclasses.replace(micro, tail=0) for micro in PICTURES]

    def ask_more(_model: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**given, "extra_block_kwargs": {}}

    hooks = [it.chunk.register_forward_pre_hook(ask_more, with_kwargs=True) for it in pair.both]
    pair.step(*micros, times=2)
    for hook in hooks:
        hook.remove()
    pair.step(*micros, times=2)
    report = pair.report()
    assert report["eager"] == {"SIGNATURE_CHANGED": 2 * 2 * LAYERS, "WARMING_UP": 2 * LAYERS}
    assert report["failures"] == []


def test_frequencies_past_the_pack_never_reach_a_result() -> None:
    """Those of rows past the last offset may be anything, in graphs and in eager."""
    pair = _pair(**MROPE)
    left = pair.step(PICTURES[1], update=False)
    end = sum(PICTURES[1].lengths)

    def spoil(freqs: Any) -> Tensor:
        spoiled: Tensor = freqs.clone()
        spoiled[end:] = float("nan")
        return spoiled

    _handing(pair, spoil)
    assert_same_bits(left, pair.step(PICTURES[1], update=False))
    assert pair.report()["eager"] == {"WARMING_UP": 2 * LAYERS}


# -- a host's RoPE for them, as mcore-bridge has it ------------------------------------------------

SCALING = 1.25


def _apply_to_tokens(
    original: Any, t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, **further: Any
) -> Any:
    if freqs.shape[0] != t.shape[0]:
        return original(t, cu_seqlens, freqs, *args, **further)
    further.pop("cp_group")
    return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs, *args, **further).squeeze(1)


class ScalingLayer(TransformerLayer):  # type: ignore[misc]  # megatron-core has no types
    """Scales rotated rows while it runs, as YaRN asks for."""

    def forward(self, *args: Any, **given: Any) -> Any:
        plain = rope_utils._apply_rotary_pos_emb_bshd
        scaling = functools.partial(_scaled, plain)
        with mock.patch.object(rope_utils, "_apply_rotary_pos_emb_bshd", scaling):
            return super().forward(*args, **given)


def _scaled(plain: Any, *args: Any, **given: Any) -> Tensor:
    out: Tensor = plain(*args, **{**given, "mscale": SCALING})
    return out


def _scale(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.__class__ = ScalingLayer


@pytest.fixture
def swifts_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = functools.partial(_apply_to_tokens, rope_utils._apply_rotary_pos_emb_thd)
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", replaced)


@pytest.mark.usefixtures("swifts_rope")
@pytest.mark.parametrize("block", [None, OwnBlock])
def test_a_hosts_rope_runs_in_the_graphs_of_frequencies_of_each_token(block: type | None) -> None:
    given = {"model_class": PerTokenModel, "block_class": block, "prepare": _scale}
    runs = three_modes(canonical_steps(HALF, COUNT), HostTrainer, **given)
    # The first step shows where the model is entered, the second one warms up.
    assert runs["graph"].report["eager"] == {"WARMING_UP": 2 * 2 * LAYERS}
    report = host_pair(times=4, **given).report()
    assert only(report, "WARMING_UP") and report["failures"] == []
    assert report["verification"]["unverified"] == 0


@pytest.mark.usefixtures("swifts_rope")
@pytest.mark.parametrize("block", [None, OwnBlock])
def test_a_hosts_rope_is_refused_if_its_model_hands_out_tables(block: type | None) -> None:
    pair = host_pair(OwnModel, block, times=3)
    report = pair.report()
    assert report["replays"] == 0 and {*report["eager"]} == {"WARMING_UP", "SCOPE_UNSUPPORTED"}
    (failure,) = report["failures"]
    assert "in place of Megatron's RoPE is not supported yet" in failure


@pytest.mark.usefixtures("swifts_rope")
def test_packs_of_one_document_do_not_show_what_frequencies_are(caplog: pytest.LogCaptureFixture) -> None:
    """Which may be a table, too; so the model stays eager, and says so once."""
    pair = host_pair(PerTokenModel)
    with caplog.at_level(logging.WARNING, logger="megagraph"):
        pair.step(Micro(lengths=(29,)), times=25)
    assert caplog.text.count("until a pack of several documents shows") == 2  # models
    assert pair.report()["eager"] == {"WARMING_UP": 25 * LAYERS}
    pair.step(Micro(lengths=(9, 20)), times=3)
    assert pair.report()["replays"] == LAYERS


SHARED_ROWS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


@on_ranks(2, tensor_parallel=2)
def test_ranks_that_share_rows_pad_packs_with_frequencies_of_each_token() -> None:
    """Where the model is entered, positions too, as soon as a pack has shown what its layers are handed."""
    steps: list[list[Micro]] = [
        [
            Declared(lengths=(20, 8), max_seqlen=20 if index % 2 == 0 else 28, seed=index),
            Declared(lengths=(9, 40, 15), max_seqlen=40 if index % 2 == 0 else 64, seed=50 + index),
        ]
        for index in range(5)
    ]
    given = {"prepare": lambda it: hand_out_frequencies(scatter(it)), **SHARED_ROWS}
    off, eager, graphed = (run(mode, steps, given=given) for mode in MODES)
    assert_same_bits(eager, graphed)
    assert_close_losses(off, graphed)  # padding changes roundings
    assert eager.report["eager"] == {"WARMING_UP": LAYERS, "DISABLED": 9 * LAYERS}
    assert graphed.report["eager"] == {"WARMING_UP": 2 * LAYERS} and graphed.report["failures"] == []


@on_ranks(2, tensor_parallel=2)
def test_another_table_for_rows_that_were_added_is_an_error() -> None:
    """With sequence parallelism, of a host that hands the model's own tables on until its third step."""
    calls: list[Any] = []

    def change(_block: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        calls.append(None)
        factor = 1.0 if len(calls) < 3 else 0.5
        return args, {**given, "rotary_pos_emb": given["rotary_pos_emb"] * factor}

    def prepare(chunk: Any) -> None:
        chunk.decoder.register_forward_pre_hook(change, with_kwargs=True)

    with pytest.raises(RuntimeError, match="a rotary table that is not the model's own"):
        run(
            "graph",
            [[Declared(lengths=(20, 8), max_seqlen=20)]] * 4,
            given={"prepare": prepare, **SHARED_ROWS},
        )


def _fix_rows(rows: int, model: Any) -> None:
    scatter(model)
    model.rotary_pos_emb.get_rotary_seq_len = lambda *args, **given: rows


@pytest.mark.parametrize(
    ("rows", "eager", "failure"),
    [
        # Positions begin anew in each document, of a table that Megatron's rule does not foresee.
        (
            48,
            {"WARMING_UP": 2 * LAYERS, "CAPTURE_FAILED": (COUNT - 1) * 2 * LAYERS},
            "expected a rotary table of max_seqlen, 32 rows, got 48",
        ),
        # As long as each pack here: positions go on, so that each token has a row.
        (64, {"WARMING_UP": 2 * LAYERS}, ""),
    ],
)
def test_a_table_may_have_a_length_of_its_own(rows: int, eager: dict[str, int], failure: str) -> None:
    """Whatever packs declare."""

    prepare = functools.partial(_fix_rows, rows)
    report = three_modes(canonical_steps(HALF, COUNT), capacities=(HALF,), prepare=prepare)["graph"].report
    assert report["eager"] == eager
    assert len(report["failures"]) == bool(failure) and failure in "".join(report["failures"])


def test_packs_of_another_length_than_their_table_run_as_given_where_each_token_had_a_row() -> None:
    """Positions begin anew in their documents."""

    short = Declared(lengths=(20, 9), max_seqlen=20)
    steps = [[*micros, short] for micros in canonical_steps(HALF, COUNT)]
    given = {"prepare": functools.partial(_fix_rows, 64)}
    off, graphed = (run(mode, steps, given=given, capacities=(HALF,)) for mode in ("off", "graph"))
    assert_same_bits(off, graphed)
    assert graphed.report["eager"] == {"WARMING_UP": 2 * LAYERS, "SIGNATURE_CHANGED": COUNT * LAYERS}


def test_a_models_own_table_that_has_changed_is_still_its_own() -> None:
    """As long as the pack, and no frequencies of each token: the pack itself declares fewer rows."""

    def prepare(model: Any) -> None:
        calls = itertools.count(1)

        def change(given: Any, _args: Any) -> None:
            if next(calls) == 4:
                given.rotary_pos_emb.inv_freq *= 0.5
                given.rotary_pos_emb.forward.cache_clear()

        model.register_forward_pre_hook(change)

    steps: list[list[Micro]] = [
        [Declared(lengths=lengths, max_seqlen=max(lengths), num_seqs=5)] for lengths in SHAPES
    ]
    runs = three_modes(steps, prepare=prepare)
    assert runs["graph"].report["eager"] == {"WARMING_UP": LAYERS, "SIGNATURE_CHANGED": 3 * LAYERS}
