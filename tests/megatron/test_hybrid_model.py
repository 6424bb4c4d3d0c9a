# SPDX-License-Identifier: Apache-2.0
"""HybridModel (MambaModel before 0.18), its Mamba layers with a mixer of ours: graphed, or refused. Models
that predict further tokens: by layers that run eager on packs as they were given, behind graphed layers."""

import dataclasses
import importlib
from typing import Any

import megatron_rig as rig
import pytest
import torch
from mamba_rig import PATTERN, Documented, mamba
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron_rig import Install, Pair, step, steps_of
from model_specs import spec_of
from moe_rig import ExpertTrainer
from same_bits import assert_same_bits
from test_scope_cells import DENSE
from torch import Tensor

import megagraph
from megagraph._C import mark_canonical
from megagraph.demo.trainer import Trainer
from megagraph.megatron import seams
from megagraph.megatron.patch.inside_layers import wrap_documents
from megagraph.modules import Norm

HYBRID = seams.hybrid_seams() or ()
LAYERS = len(rig.HYBRID_PATTERN)

pytestmark = [pytest.mark.both, pytest.mark.usefixtures("experts")]
OF_PATTERN = len(PATTERN)
NORMS = ("enorm", "hnorm", "layer_norm")  # of prediction
HAS_DETACHED = hasattr(TransformerConfig, "mtp_detach_heads")
GIVEN: dict[str, rig.Micro] = {
    "as many rows as the capacity": rig.Micro(lengths=(20, 14, 30), seed=3),
    "fewer rows": rig.Micro(lengths=(9, 20), seed=5),
    "padded documents": rig.Micro(lengths=(20, 10, 22), padded=(24, 12, 28), seed=7),
}


def test_the_stack_of_our_spec_ends_in_our_norm_and_patches_nothing() -> None:
    owner = HYBRID[1].owner()
    block = importlib.import_module(owner.__module__)
    before = dict(vars(block)), dict(vars(owner))
    stack = rig.HybridTrainer().chunk.decoder
    assert isinstance(stack, owner) and type(stack.final_norm) is Norm
    assert [type(layer).__name__ for layer in stack.layers] == ["TransformerLayer", "MLPLayer"] * 2
    assert (dict(vars(block)), dict(vars(owner))) == before
    assert megagraph.get_hybrid_stack_varlen_spec().module is type(stack)
    headless = rig.HybridTrainer(pattern="-", arguments=lambda _: {"post_process": False}).chunk.decoder
    assert not hasattr(headless, "final_norm")
    by_position = megagraph.get_hybrid_stack_varlen_spec(None, False, True, False)  # as Megatron's function
    assert by_position.module is type(stack)


def test_a_hybrid_model_is_the_gpt_model_of_its_halves() -> None:
    """The same function of the same weights: attention and MLP in layers of their own or in one."""
    pair, gpt = rig.HybridTrainer(), Trainer(rig.OPTIONS)
    state = {}
    for name, tensor in gpt.chunk.state_dict().items():
        if name.startswith("decoder.layers."):
            _, _, number, *rest = name.split(".")
            half = int(rest[0] in ("pre_mlp_layernorm", "mlp"))
            name = ".".join(("decoder.layers", str(2 * int(number) + half), *rest))
        state[name.replace("final_layernorm", "final_norm")] = tensor
    assert state.keys() == pair.chunk.state_dict().keys()
    pair.chunk.load_state_dict(state)
    one, other = (rig.step(trainer, [rig.ONE, rig.TWO], update=False) for trainer in (pair, gpt))
    assert_same_bits(one.losses, other.losses)


def test_a_core_without_hybrid_models_is_patched_without_them(install: rig.Install, monkeypatch: Any) -> None:
    absent = seams.Seam("megatron.core.absent", "Model.forward")
    monkeypatch.setattr(seams, "HYBRID_FORWARD", absent)
    monkeypatch.setattr(seams, "MAMBA_FORWARD", absent)
    before = [seam.function() for seam in HYBRID]
    install()
    assert [seam.function() for seam in HYBRID] == before
    with pytest.raises(ImportError, match="neither HybridModel nor MambaModel"):
        megagraph.get_hybrid_stack_varlen_spec()


def packs(count: int, make: Any = Documented, tails: bool = True) -> list[list[rig.Micro]]:
    """Steps of three packs, no two alike: padded documents, empty ones, tails, a full capacity."""
    steps = steps_of(count, align=4, make=make, tails=tails)
    for index, micros in enumerate(steps):
        lengths = (5, 7, 0, 5) if index % 2 else (30, 3, 31)
        micros[index % 3] = make(lengths=lengths, seed=index)
    return steps


def test_rows_that_were_given_have_the_losses_of_an_unpatched_run(install: Install) -> None:
    """Tail rows are no part of the last document, and follow all others."""
    micros = [micro for step_ in packs(4) for micro in step_ if not micro.tail]  # RoPE of Megatron takes none

    def losses() -> list[Tensor]:
        trainer = mamba()
        return [step(trainer, [micro], update=False).losses[0] for micro in micros]

    unpatched = losses()
    install()
    graphed = losses()
    assert megagraph.reports()[0]["replays"] > 0
    for one, other in zip(unpatched, graphed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_packs_that_say_no_documents_are_what_eager_makes_of_them() -> None:
    """Since 0.17 a mixer that is told of no documents carries its state through all of them, in eager too."""
    pair = Pair(mamba)
    assert pair.train(packs(4, rig.Micro))["eager"] == {"WARMING_UP": 3 * OF_PATTERN}
    told, untold = (
        step(pair.graphed, [it(lengths=(9, 20))], update=False).losses[0] for it in (Documented, rig.Micro)
    )
    assert torch.equal(told, untold) == (not seams.packs_have("seq_idx"))


def test_a_padding_mask_and_other_tables_reach_no_mamba_layer() -> None:
    """And what only decoding reads of a mixer is no part of its state."""
    masked = [Documented(lengths=(9, 20), mask_seed=seed, seed=seed) for seed in range(2)]
    pair = Pair(mamba)
    for is_stale in (True, True, False, True):
        for trainer in pair.both:
            trainer.chunk.decoder.layers[0].mixer._A_neg_exp_cache_stale = is_stale
        pair.step(*masked)
    assert pair.report()["eager"] == {"WARMING_UP": 2 * OF_PATTERN}
    for trainer in pair.both:
        trainer.chunk.rotary_pos_emb.inv_freq.mul_(0.5)
        type(trainer.chunk.rotary_pos_emb).forward.cache_clear()
    pair.step(*masked)
    assert pair.report()["eager"]["SIGNATURE_CHANGED"] == 2 * OF_PATTERN


def test_a_stack_whose_forward_is_not_megatrons() -> None:
    """Its layers are replaced one by one, and hand out what each kind of layer hands out."""

    def forward(stack, hidden_states, attention_mask, rotary_pos_emb=None, packed_seq_params=None, **_):
        arguments = {"attention_mask": attention_mask, "packed_seq_params": packed_seq_params}
        for layer in stack.layers:
            if not hasattr(layer, "mixer"):
                hidden_states, _ = layer(hidden_states, **arguments, rotary_pos_emb=rotary_pos_emb)
            else:
                hidden_states = layer(hidden_states, **arguments)
        return stack.final_norm(hidden_states)

    pair = Pair(mamba, plugin={"cuda_graph_modules": ["mamba", "attn"]})
    for trainer in pair.both:
        stack = trainer.chunk.decoder
        stack.forward = forward.__get__(stack)
    report = pair.train(packs(4, tails=False))
    assert report["replays"] > 0 and set(report["eager"]) <= {"WARMING_UP", "SCOPE_UNSUPPORTED", "NESTING"}


def test_only_canonical_packs_have_their_documents_made_anew() -> None:
    asked: list[Any] = []

    def original(mixer: Any, packed_seq_params: Any, total_tokens: int) -> Tensor:
        asked.append(packed_seq_params)
        return torch.zeros(1, total_tokens)

    wrapped = wrap_documents(original)
    params = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 3, 5], dtype=torch.int32))
    wrapped(None, params, 7)
    mark_canonical(params)
    assert wrapped(None, params, 7).tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    assert asked == [params]


# -- multi-token prediction ----------------------------------------------------------------------------


def prediction(kinds: str = "--", *, position: str = "rope", **changes: Any) -> ExpertTrainer:
    """A GPTModel that predicts two further tokens, by layers that are like the last one of its decoder."""

    def arguments(config: Any) -> dict[str, Any]:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        layers = spec_of(config, kinds)
        block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
        for spec in block.layer_specs:
            vars(spec.submodules).update(dict.fromkeys(NORMS, layers.layer_norm))
        return {"position_embedding_type": position, "mtp_block_spec": block}

    further = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5, **({} if "E" in kinds else DENSE)}
    return ExpertTrainer(kinds, arguments=arguments, **{**further, **changes})


def hybrid_prediction() -> rig.ModelTrainer:
    """The same of a HybridModel, of which `/` begins the layers of one further token."""
    norms = dict.fromkeys(NORMS, Norm)
    parts = mtp.MultiTokenPredictionLayerSubmodules(**norms, eh_proj=ColumnParallelLinear)
    layer = ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=parts)
    layers = mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    block = ModuleSpec(module=mtp.MultiTokenPredictionBlock, submodules=layers)
    stack = megagraph.get_hybrid_stack_varlen_spec()
    stack.submodules = dataclasses.replace(stack.submodules, mtp_block_spec=block)
    return rig.ModelTrainer(pattern="*-*-/*-/*-", spec=stack, mtp_num_layers=2)


@pytest.mark.parametrize("case", GIVEN)
def test_megatron_alone_leaves_the_same(case: str) -> None:
    """Bug: a table as long as the pack's rows, the capacity's, was taken for one of its rows."""
    micro = GIVEN[case]
    given = [[micro, rig.Micro(lengths=(40, 40), seed=8)]] * 3
    alone = rig.train(None, given, prediction)
    graphed = rig.compare_runs(given, prediction)
    rig.ran(graphed.report, 2 * rig.LAYERS, WARMING_UP=rig.LAYERS, TOO_MANY_TOKENS=3 * rig.LAYERS)
    for one, other in zip(alone.steps, graphed.steps, strict=True):
        if micro.physical == rig.CAPACITY.tokens:
            assert_same_bits(one, other)
        torch.testing.assert_close(one.losses, other.losses)
        torch.testing.assert_close(one.grads, other.grads, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(one.logged, other.logged)


def test_where_no_layer_is_graphed_packs_run_as_given(install: rig.Install) -> None:
    """Rotary positions are ours there, too, where tails would raise."""
    install()
    trainer = prediction()
    for layer in trainer.chunk.decoder.layers:
        layer.register_forward_hook(lambda *_: None)
    micros = rig.steps_of(1, tails=False)[0]
    ours = rig.step(trainer, micros, update=False, times=2)
    rig.ran(rig.report_of(trainer), 0, failures=2, WARMING_UP=3 * rig.LAYERS, FOREIGN_HOOK=3 * rig.LAYERS)
    megagraph.uninstall()
    assert_same_bits(ours, rig.step(trainer, micros, update=False))
