# SPDX-License-Identifier: Apache-2.0
"""Grouped experts: whole layers of experts in graphs, and what they compute beside Megatron's own."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import moe_rig
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron_rig import Install, compare_runs, ran, report_of, schedule, step, steps_of
from moe_rig import BIAS, EXPERTS, GROUPED, SHARED, Config, ExpertTrainer, recompute
from notes import noting
from same_bits import assert_same_bits
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from megagraph.megatron.grouped_experts import SortingDispatcher, is_grouped
from megagraph.megatron.specs import get_gpt_layer_varlen_spec, with_grouped_experts
from megagraph.modules import GroupedLinear

pytestmark = [
    pytest.mark.usefixtures("experts"),
    # Of torch's compiler, which Megatron's fused activations run through on a GPU.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

SWIGLU, FUSED = GROUPED["swiglu"], GROUPED["fused swiglu"]
# Of sums in another order; in bfloat16 Megatron rounds after each expert, and here once.
BOUND = {"rtol": 2e-2, "atol": 2e-2} if torch.cuda.is_available() else {"rtol": 1e-5, "atol": 1e-6}
# Of the gate above, and of the linear part on both sides, of which two thirds lie outside.
CLAMPED = {"activation_func_clamp_value": 0.5, "glu_linear_offset": 0.25, "init_method_std": 0.2}
AGREEING = {name: case for name, case in GROUPED.items() if name != "jitter" and "recomputed" not in name}
AGREEING["clamp"] = {**SWIGLU, **CLAMPED}


@pytest.mark.gpu
def test_a_hundred_steps() -> None:
    given = {"kinds": "E-E", "is_grouped": True, **FUSED, **BIAS, **SHARED}
    ran(compare_runs(steps_of(100, masks=True), ExpertTrainer, **given).report, WARMING_UP=3 * 3)


@pytest.mark.gpu
def test_a_step_copies_nothing_to_the_host(install: Install) -> None:
    install()
    trainer = ExpertTrainer(is_grouped=True, **BIAS)
    for micros in steps_of(3):
        step(trainer, micros)
    replays, micros = report_of(trainer)["replays"], steps_of(1)[0]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as trace:
        schedule(trainer.model, micros, len(micros), trainer.device)
        torch.cuda.synchronize()
    assert report_of(trainer)["replays"] == replays + 3 * 2
    assert [event.name for event in trace.events() if "DtoH" in event.name] == []


def _rows(count: int) -> Tensor:
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    rows = torch.randn(count, 1, 32, generator=torch.Generator().manual_seed(3))
    return rows.to(device, dtype).requires_grad_()


def both(**changes: Any) -> list[Any]:
    """A layer of grouped experts, and one of Megatron's `SequentialMLP` of the same weights."""
    trainers = [ExpertTrainer("E", is_grouped=is_grouped, **changes) for is_grouped in (True, False)]
    return [trainer.chunk.decoder.layers[0].mlp for trainer in trainers]


def run_mixture(mixture: Any, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of a layer of experts, those of Megatron's experts stacked."""
    out, bias = mixture(rows)
    assert bias is None
    grad = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    named = dict(mixture.named_parameters())
    found = torch.autograd.grad(out, [rows, *named.values()], grad, materialize_grads=True)
    grads = dict(zip(("rows", *named), found, strict=True))
    for projection in ("linear_fc1", "linear_fc2"):
        names = [f"experts.local_experts.{index}.{projection}.weight" for index in range(EXPERTS)]
        if names[0] in grads:
            grads[f"experts.{projection}.weight"] = torch.stack([grads.pop(name) for name in names])
    return out, grads


@pytest.mark.parametrize(
    "case", [pytest.param(it, marks=pytest.mark.gpu if it == "fused swiglu" else ()) for it in AGREEING]
)
def test_agrees_with_sequential_experts(case: str) -> None:
    ours, theirs = both(**AGREEING[case])
    assert is_grouped(ours) and not is_grouped(theirs)
    stacked = _stacked(theirs.experts)
    for name, param in ours.experts.named_parameters():  # of one seed
        assert torch.equal(param, stacked[name]) and param.allreduce is True
    (one, one_grads), (other, other_grads) = (run_mixture(it, _rows(40)) for it in (ours, theirs))
    torch.testing.assert_close(one, other, **BOUND)
    torch.testing.assert_close(one_grads, other_grads, **BOUND)


def test_a_dispatcher_holds_nothing_outside_of_a_call() -> None:
    """Rows would stay in memory until the layer is called again."""
    mixture, _theirs = both()
    topk = mixture.config.moe_router_topk
    assert vars(mixture.token_dispatcher) == vars(SortingDispatcher(topk))
    mixture(_rows(12))
    assert vars(mixture.token_dispatcher) == vars(SortingDispatcher(topk))


@pytest.mark.parametrize("case", ["top 2", "swiglu", "on the input", "shared experts"])
def test_inputs_of_products_are_made_again_with_the_same_bits(case: str, monkeypatch: Any) -> None:
    note = lambda _linear, x, _offsets: StorageWeakRef(x.untyped_storage())  # noqa: E731
    inputs = noting(monkeypatch, GroupedLinear, "forward", note)
    found: list[Any] = []
    for changes, is_kept in (({}, True), (recompute("moe_act", moe_grouped_gemm=True), False)):
        inputs.clear()
        layer = ExpertTrainer("E", is_grouped=True, **GROUPED[case], **changes).chunk.decoder.layers[0].mlp
        out, _bias = layer(_rows(40))
        assert [not it.expired() for it in inputs] == [is_kept] * 2
        del out
        found.append(run_mixture(layer, _rows(40)))
    assert_same_bits(*found)


def _stacked(module: Any) -> dict[str, Tensor]:
    return {
        f"{name}.weight": torch.stack([getattr(it, name).weight.detach() for it in module.local_experts])
        for name in ("linear_fc1", "linear_fc2")
    }


@pytest.mark.parametrize("kind", ["sequential", "Transformer Engine's", "legacy", "our own"])
def test_weights_of_megatrons_modules_are_taken(kind: str) -> None:
    module, other = (mixture.experts for mixture in both(**SWIGLU))
    for param in other.parameters():
        torch.nn.init.normal_(param)
    stacked = _stacked(other)
    engines = {f"{name}{index}": weight for name, of in stacked.items() for index, weight in enumerate(of)}
    one, two = (weights.transpose(1, 2) for weights in stacked.values())
    hidden = one.size(1)
    state = {
        "sequential": other.state_dict(),
        "Transformer Engine's": {**engines, "linear_fc1._extra_state": torch.empty(0)},
        "legacy": {"weight1": one.reshape(hidden, -1), "weight2": two.reshape(-1, hidden)},
        "our own": stacked,
    }[kind]
    module.load_state_dict(state)
    assert module.state_dict().keys() == stacked.keys()
    for name, param in module.named_parameters():
        assert torch.equal(param, stacked[name])


def test_what_a_state_has_beside_weights_is_unexpected() -> None:
    """Bug: biases of each expert were left out in silence."""
    module = both()[0].experts
    state = {f"linear_fc1.weight{it}": weight.detach() for it, weight in enumerate(module.linear_fc1.weight)}
    state |= {"linear_fc1.bias0": torch.zeros(4), "linear_fc2.weight": module.linear_fc2.weight.detach()}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"linear_fc1.bias0\"\."):
        module.load_state_dict({**state, "linear_fc1._extra_state": torch.zeros(0)})


@pytest.mark.parametrize("sharded_offsets", [(), ((0, 1, 3),)], ids=str)
def test_distributed_checkpoints_hold_the_tensors_of_sequential_experts(sharded_offsets: Any) -> None:
    module, other = (mixture.experts for mixture in both(**SWIGLU))
    mine = module.sharded_state_dict("mlp.experts.", sharded_offsets)
    found: dict[str, tuple[Any, ...]] = {}
    for sharded in other.sharded_state_dict("mlp.experts.", sharded_offsets).values():
        parts = sharded.build() if hasattr(sharded, "build") else sharded
        for part in parts if isinstance(parts, list) else [parts]:
            if not part.key.endswith("_extra_state"):  # which core's linear layers leave empty
                found[part.key] = part.global_shape
    assert {part.key: part.global_shape for part in mine.values()} == found
    assert mine.keys() == {f"mlp.experts.{name}" for name in module.state_dict()}
    with pytest.raises(ValueError, match="singleton_local_shards"):
        module.sharded_state_dict("mlp.experts.", metadata={"singleton_local_shards": True})


def test_of_copies_on_several_ranks_one_writes_its_weights() -> None:
    experts, writers = both()[0].experts, []
    for rank in range(3):
        groups = SimpleNamespace(expt_dp=SimpleNamespace(rank=lambda rank=rank: rank))
        copy = type(experts)(EXPERTS, experts.config, pg_collection=groups)
        writers.append({is_main_replica(part.replica_id) for part in copy.sharded_state_dict().values()})
    assert writers == [{True}, {False}, {False}]


UNSERVED: dict[str, Config] = {
    "moe_expert_capacity_factor": moe_rig.DROPS,
    "moe_shared_expert_overlap": moe_rig.OVERLAPPED,
    "add_bias_linear": {"add_bias_linear": True},
    "moe_router_topk": {"moe_apply_probs_on_input": True},
    "bias_activation_fusion": {"bias_activation_fusion": True, "gated_linear_unit": True},
}


@pytest.mark.parametrize("option", UNSERVED)
def test_an_option_that_is_not_served_is_named(option: str) -> None:
    with pytest.raises(ValueError, match=f"grouped experts: expected {option}"):
        ExpertTrainer("E", is_grouped=True, **UNSERVED[option])


def test_a_spec_stays_as_it_was_and_one_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="without"):
        with_grouped_experts(get_gpt_layer_varlen_spec())
    spec = get_gpt_layer_varlen_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    before = dataclasses.replace(spec)
    assert with_grouped_experts(spec) is not spec
    assert spec == before and not is_grouped(ExpertTrainer("E").chunk.decoder.layers[0].mlp)
