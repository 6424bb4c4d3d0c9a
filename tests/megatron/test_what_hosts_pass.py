# SPDX-License-Identifier: Apache-2.0
"""What hosts pass to a model beside a plain pack is kept, or the call runs eager as it was given."""

import dataclasses
import inspect
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import megatron_rig as rig
import pytest
import torch
from host_rig import Holder, OwnModel, frozen_model, host_pair
from mamba_rig import Documented
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from notes import told
from same_bits import assert_same_bits
from torch import Tensor, distributed, nn

import megagraph
from megagraph._C import Constants
from megagraph.demo.trainer import Trainer
from megagraph.megatron.parallel.ddp import find_ddp

pytestmark = pytest.mark.both
NEEDS_EXTRACTION = pytest.mark.skipif(
    "extract_layer_indices" not in inspect.signature(TransformerBlock.forward).parameters,
    reason="this release of megatron-core has no extract_layer_indices",
)
has_seq_idx = pytest.mark.skipif(not hasattr(PackedSeqParams, "seq_idx"), reason="the release has no seq_idx")


def trained(install: rig.Install, **changes: Any) -> Trainer:
    """A model whose training and forward-only kinds are captured."""
    install(**changes)
    trainer = Trainer(rig.OPTIONS)
    for _ in range(3):
        rig.step(trainer, [rig.ONE], update=False)
        with torch.no_grad():
            rig.forward(trainer.model, rig.ONE, trainer.device)
    return trainer


@torch.no_grad()
def call(trainer: Trainer, **arguments: Any) -> Any:
    return trainer.chunk(**{**rig.ONE.given(trainer.device), **arguments})


def given_to(module: Any) -> list[dict[str, Any]]:
    """What calls of a module are given by name from now on."""
    seen: list[dict[str, Any]] = []
    module.register_forward_pre_hook(lambda _module, _args, given: seen.append(given), with_kwargs=True)
    return seen


def test_a_schedule_that_is_told_of_no_length_learns_from_packs_alone(install: rig.Install) -> None:
    """Bug: `seq_length=None`, which Megatron takes for packs, was a TypeError at the second step."""
    install(capacities=())
    trainer = Trainer(rig.OPTIONS)

    def forward_step(data: Any, chunk: Any) -> Any:
        return rig.forward(chunk, next(data), trainer.device)

    for _ in range(3):
        rig.run_schedule(trainer.model, forward_step, [rig.ONE], 1, seq_length=None)
    rig.ran(rig.report_of(trainer), 2 * rig.LAYERS, WARMING_UP=rig.LAYERS)


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_mask_beside_a_pack_reaches_the_layers(install: rig.Install, mode: str, is_behind: bool) -> None:
    """Bug: it was dropped without a word, in both modes; later one that a hook gave the block still was."""
    trainer = trained(install, mode=mode)
    before = rig.report_of(trainer)
    mask = torch.zeros(1, 1, rig.ONE.physical, rig.ONE.physical, dtype=torch.bool, device=trainer.device)
    seen = given_to(trainer.chunk.decoder.layers[0])
    asked = {"attention_mask": mask}
    if is_behind:
        rig.hands(trainer.chunk.decoder, lambda given: {**given, **asked})
    call(trainer, **({} if is_behind else asked))
    assert [given["attention_mask"] is mask for given in seen] == [True]
    assert rig.eager_since(rig.report_of(trainer), before) == {"SIGNATURE_CHANGED": rig.LAYERS}


@pytest.mark.parametrize("field", ["local_cp_size", "cp_group"])
def test_a_pack_with_its_own_context_parallel_group_runs_as_given(install: rig.Install, field: str) -> None:
    """Bug: both fields were dropped, so that a rank attended to its own share of the pack alone."""
    trainer = trained(install)
    before, says_size = rig.report_of(trainer), field == "local_cp_size"
    given = {field: 2 if says_size else distributed.group.WORLD}
    error = pytest.raises(ValueError, match="expected a cp_group of local_cp_size 2, got none")
    with error if says_size else nullcontext():
        call(trainer, packed_seq_params=dataclasses.replace(rig.ONE.params(trainer.device), **given))
    assert rig.eager_since(rig.report_of(trainer), before) == {"CP_SIZE_NOT_CAPTURED": rig.LAYERS}


@dataclasses.dataclass
class OfHost(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    temperature: float = 1.0


class Tempered(SelfAttention):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        scale = getattr(given["packed_seq_params"], "temperature", 1.0)
        return super().forward(hidden_states * scale, *args, **given)


def tempered(chunk: Any) -> None:
    chunk.decoder.layers[1].self_attention.__class__ = Tempered


def marked(made: Any, **values: Any) -> Any:
    """A pack on which a host has put values."""
    vars(made).update(values)
    return made


hot = partial(marked, temperature=3.0)


def test_what_others_set_on_a_pack_is_on_the_pack_that_the_model_sees(install: rig.Install) -> None:
    """And changes nothing; `seq_idx` is below. Bug: canonical packs were made of the class's fields alone."""
    trainer = trained(install)
    before, expected = rig.report_of(trainer)["replays"], call(trainer).clone()
    params = rig.ONE.params(trainer.device)
    params = OfHost(**vars(params), temperature=3.0)
    params.seq_lens, params.tokens_per_sample = [9, 20], rig.ONE.physical
    seen = given_to(trainer.chunk.decoder)
    assert_same_bits(call(trainer, packed_seq_params=params), expected)
    assert rig.report_of(trainer)["replays"] == before + 2 * rig.LAYERS
    (given,) = seen
    pack = given["packed_seq_params"]
    assert pack is not params and pack.seq_lens == [9, 20] and pack.temperature == 3.0


class WithSlots(namedtuple("WithSlots", list(rig.ONE.params("cpu").__dict__))):
    """No class of which a canonical pack can be made."""


class AnyNames(PackedSeqParams):
    """Its constructor names none of the fields."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize(("kind", "taken"), [(WithSlots, False), (SimpleNamespace, False), (AnyNames, True)])
def test_a_pack_of_a_hosts_class_replays_or_runs_as_given(kind: Any, taken: bool, pair: rig.Pair) -> None:
    """Bug: training ended in an AttributeError, a ValueError or a TypeError."""
    own = dataclasses.replace(rig.ONE, pack=lambda params: kind(**vars(params)))
    pair.step(rig.ONE, times=4)
    assert pair.costs(own) == ({} if taken else {"SIGNATURE_CHANGED": rig.LAYERS})


@pytest.mark.parametrize("is_other", [False, True])
def test_a_pack_that_is_put_behind_the_models_forward_is_the_layers(is_other: bool, pair: rig.Pair) -> None:
    """Bug: the block's was dropped without a word. A copy of what the model has handed on replays."""

    def another(given: dict[str, Any]) -> dict[str, Any]:
        pack = given["packed_seq_params"]
        whole = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), pack.cu_seqlens_q[[0, -1]])
        whole |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), rig.ONE.physical)
        return {**given, "packed_seq_params": dataclasses.replace(pack, **(whole if is_other else {}))}

    for trainer in pair.both:
        rig.hands(trainer.chunk.decoder, another)
    pair.step(rig.ONE, times=4)
    assert pair.costs(rig.ONE) == ({"SIGNATURE_CHANGED": rig.LAYERS} if is_other else {})


def test_what_is_put_behind_the_models_forward_once_is_of_one_micro_batch(pair: rig.Pair) -> None:
    """Bug: beside it the table seemed to have a row for each token, so that nothing replayed any more."""
    full, other = rig.Micro(lengths=(40, 24)), rig.Micro(lengths=(30, 34))
    pair.step(full, rig.ONE, times=3)
    put = {"packed_seq_params": other.params(pair.eager.device)}
    for trainer in pair.both:
        handle = rig.hands(trainer.chunk.decoder, lambda given: {**given, **put})
        rig.step(trainer, [full], update=False, eager=trainer is pair.eager)
        handle.remove()
    assert pair.costs(full, rig.ONE) == {}


@pytest.mark.parametrize(("more", "reason"), [(2, None), (6, "TOO_MANY_SEQUENCES")])
def test_padded_offsets_may_have_more_documents(more: int, reason: str | None, pair: rig.Pair) -> None:
    """Bug: they were counted by the actual ones, and more than the capacity's were an error."""

    def longer(made: Any) -> Any:
        padded = torch.cat([made.cu_seqlens_q_padded, made.cu_seqlens_q_padded[-1:].repeat(more)])
        return dataclasses.replace(made, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)

    micro = rig.Micro(lengths=(3, 5), padded=(4, 8), pack=longer)
    pair.step(micro, rig.ONE, times=4)
    assert pair.costs(micro, rig.ONE) == ({} if reason is None else {reason: rig.LAYERS})


@pytest.mark.parametrize("is_field", [False, True])
def test_a_layer_that_reads_what_a_host_puts_on_packs_stays_eager(is_field: bool, monkeypatch: Any) -> None:
    """Bug: its graphs read the default, verified against it. The model around the layers may read it."""
    preprocess, seen = GPTModel._preprocess, list[float]()

    def looks(model: Any, *args: Any, packed_seq_params: Any = None, **given: Any) -> Any:
        seen.append(getattr(packed_seq_params, "temperature", 1.0))
        return preprocess(model, *args, packed_seq_params=packed_seq_params, **given)

    pack = (lambda made: OfHost(**vars(made), temperature=3.0)) if is_field else hot
    steps = [[dataclasses.replace(it, pack=pack) for it in (rig.ONE, rig.TWO)]] * 3
    monkeypatch.setattr(GPTModel, "_preprocess", looks)
    graphed = rig.compare_runs(steps, prepare=tempered)
    without = rig.train(None, steps, prepare=tempered)
    torch.testing.assert_close(graphed.steps[0].losses, without.steps[0].losses)
    report = rig.ran(graphed.report, 2 * 2, failures=1, WARMING_UP=2 * 2, CAPTURE_FAILED=2 * 2)
    assert 3.0 in seen
    assert "reads `temperature`, which the host has put on its packs" in report["failures"][0]


def test_what_a_host_puts_on_packs_once_there_are_graphs_has_these_captured_anew() -> None:
    """Bug: a layer went on to read the default. Other names that nobody reads change nothing."""
    cold, warm = (dataclasses.replace(rig.ONE, pack=pack) for pack in (partial(marked, name="a"), hot))
    report = rig.compare_runs([[cold]] * 2 + [[cold, warm]] + [[warm]] * 2, prepare=tempered).report
    # The pack that it shows on, and the step behind it.
    eager = {"WARMING_UP": 2, "SIGNATURE_CHANGED": 2 * 2, "CAPTURE_FAILED": 1}
    rig.ran(report, 2 * 2 + 1, failures=1, **eager)


@NEEDS_EXTRACTION
@pytest.mark.parametrize("at_block", [False, True])
def test_layers_that_a_caller_wants_to_see_run_eager(at_block: bool, pair: rig.Pair) -> None:
    """Bugs: `extract_layer_indices` ended in an AttributeError, and from a hook in a RuntimeError."""
    asks: dict[str, Any] = {"extract_layer_indices": {0}}
    pair.step(rig.ONE, times=4)
    before = pair.report()
    seen: list[Tensor] = []

    def keep(_block: Any, _args: Any, out: Any) -> Any:
        seen.extend([out[0], *out[1]])
        return out[0]

    for trainer in pair.both:
        # Megatron's rows have a history even here: the model would keep itself in memory.
        with trainer.chunk.decoder.register_forward_hook(keep):
            if at_block:
                rig.hands(trainer.chunk.decoder, lambda given: {**given, **asks})
            call(trainer, **({} if at_block else {"extra_block_kwargs": asks}))
    assert len(seen) == 2 * 2 and all(map(torch.equal, seen[:2], seen[2:]))
    assert rig.eager_since(pair.report(), before) == {"SIGNATURE_CHANGED": rig.LAYERS}


class ExtractingModel(OwnModel):
    """Sees what its first layer leaves in each call."""

    asked: ClassVar = {"extract_layer_indices": {0}}

    def tables(self, *given: Any) -> Any:
        hidden, tables = super().tables(*given)
        return hidden, {**tables, **self.asked}

    def run(self, *given: Any) -> Any:
        rows = lambda _block, _args, out: sum(out[1], out[0])  # noqa: E731
        with self.decoder.register_forward_hook(rows):
            return super().run(*given)


@NEEDS_EXTRACTION
def test_layers_that_a_hosts_own_forward_sees_run_eager() -> None:
    """Bug: the first canonical pack ended in a TypeError."""
    pair = host_pair(ExtractingModel)
    pair.step(rig.ONE, rig.TWO, times=3)
    report = pair.ran(0, failures=1, WARMING_UP=4 * rig.LAYERS, SCOPE_UNSUPPORTED=2 * rig.LAYERS)
    assert "extract_layer_indices" in report["failures"][0]


def test_threads_that_call_one_model_take_turns(install: rig.Install) -> None:
    """Bug: their calls raised, or met one another's rows."""
    micros = [rig.Micro(lengths=(9, 20), seed=seed) for seed in range(4)]

    def answers(threads: int) -> list[Tensor]:
        model, called = frozen_model(seed=3)
        device = next(model.parameters()).device

        def ask(micro: rig.Micro) -> Tensor:
            with torch.no_grad():
                return rig.forward(called, micro, device)[0].clone()

        with ThreadPoolExecutor(threads) as pool:
            return [*pool.map(ask, micros * 20)]

    install()
    expected = answers(1)
    with told(sys.setswitchinterval, 1e-5, before=sys.getswitchinterval()):
        assert_same_bits(answers(2), expected)
    rig.ran(megagraph.reports()[-1], WARMING_UP=rig.LAYERS)


def test_what_keeps_a_capture_from_every_step_is_said_once(pair: rig.Pair) -> None:
    """Bug: all of it ran eager, warming up for ever, without a word."""
    with torch.autograd.graph.save_on_cpu():
        pair.step(rig.ONE, times=30)
    report = pair.ran(0, failures=1, WARMING_UP=30 * rig.LAYERS)
    assert report["failures"] == ["nothing is captured: each step begins under RECOMPUTING"]
    pair.step(rig.ONE)
    assert pair.report()["failures"] == []


def test_a_search_for_a_ddp_runs_no_code_of_other_modules() -> None:
    """Bug: what it raised ended the first call of a model outside of a schedule."""

    class Strict(nn.Module):
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    strict = Strict()
    assert find_ddp([], strict) is None


class BufferedTable(RotaryEmbedding):
    """Its frequencies are a buffer of the checkpoint."""

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        return self.freqs if max_seq_len == len(self.freqs) else self.freqs[:max_seq_len]


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_rotary_table_that_is_written_is_read_anew(mode: str, install: rig.Install) -> None:
    """Bug: graphs and canonical packs went on with the old one. Graphs are made anew, four times at most."""

    def prepared(chunk: Any) -> None:
        own = chunk.rotary_pos_emb
        own.register_buffer("freqs", RotaryEmbedding.forward(own, rig.CAPACITY.tokens).clone())
        own.__class__ = BufferedTable

    def losses() -> list[Tensor]:
        trainer, found = rig.ModelTrainer(prepare=prepared), list[Tensor]()
        for index in range(19):
            if index % 3 == 0:
                trainer.chunk.rotary_pos_emb.freqs.mul_(0.9)
            found += rig.step(trainer, [rig.ONE]).losses
        return found

    expected = losses()
    install(mode=mode)
    assert_same_bits(losses(), expected)
    (report,) = megagraph.reports()
    if mode == "graph":
        assert report["eager"]["SIGNATURE_CHANGED"] == (2 * 4 + 3 + 1) * rig.LAYERS, report["eager"]


def test_a_table_that_equalled_the_captures_is_compared_again_once_either_is_written() -> None:
    """Bug: both were known by identity: with other frequencies in the same memory the old ones replayed."""
    captured = torch.linspace(0, 1, 8)
    constants = Constants({"rotary_pos_emb": captured})
    own = captured.clone()
    for value, factor, is_same in ((None, 1, True), (own, 2, False), (own, 0.5, True), (captured, 1, False)):
        if value is not None:
            value.mul_(factor)
        assert constants.are({"rotary_pos_emb": own}) is is_same
        assert constants.are({"rotary_pos_emb": own}) is is_same  # by what is known
        assert constants.are({"rotary_pos_emb": captured}) is (value is not captured)
    captured = captured.clone()
    constants.set("rotary_pos_emb", captured)
    with torch.inference_mode():  # Bug: where no write is counted
        own = captured.clone()
        assert constants.are({"rotary_pos_emb": own})
        own.mul_(2)
        assert not constants.are({"rotary_pos_emb": own})


def test_a_model_that_takes_another_ones_place_in_a_wrapper_is_captured(install: rig.Install) -> None:
    """Bug: what a wrapper holds was looked up once; the next model was a guest in its own steps."""
    install(cuda_graph_warmup_steps=1)
    models = [frozen_model(seed=seed)[1] for seed in range(2)]
    around, device = Holder(models[0]), next(models[0].parameters()).device
    for model in models:
        around.module = model
        for _ in range(3):
            with torch.no_grad():
                rig.schedule(around, [rig.ONE], 1, device, forward_only=True)
    assert [report["replays"] for report in megagraph.reports()] == [2 * rig.LAYERS, 2 * rig.LAYERS]


# -- packs that say of each row which document it is of: layers that read it are in test_model_bits.py ---


@has_seq_idx
def test_a_seq_idx_that_cannot_be_staged_runs_as_given(trainer: Trainer) -> None:
    """Of other rows, of another type, of one dimension, of columns, and no tensor."""
    zeros = partial(torch.zeros, dtype=torch.int32, device=trainer.device)
    given = zeros(1, 12), zeros(1, 29).long(), zeros(29), zeros(29, 1), [0] * 29
    micros = [rig.Micro(lengths=(9, 20), pack=partial(dataclasses.replace, seq_idx=it)) for it in given]
    rig.step(trainer, micros, times=3)
    assert rig.report_of(trainer)["eager"] == {"SIGNATURE_CHANGED": 3 * len(micros) * rig.LAYERS}


@has_seq_idx
def test_the_rows_past_a_pack_are_no_documents(install: rig.Install) -> None:
    """They have the number after the last one that the capacity holds."""
    install(mode="eager")
    trainer = rig.ModelTrainer()
    seen = given_to(trainer.chunk.decoder.layers[0])
    rig.evaluate(trainer, [Documented(lengths=(5, 0, 6), tail=4)])  # no history of what is seen
    rows = [*[0] * 5, *[2] * 6, *[3] * 4, *[rig.CAPACITY.num_seqs] * (rig.CAPACITY.tokens - 15)]
    assert seen[0]["packed_seq_params"].seq_idx.tolist() == [rows]
