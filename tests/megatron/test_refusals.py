# SPDX-License-Identifier: Apache-2.0
"""What keeps a whole model eager, each by its name; and models without Megatron's DDP."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import megatron_rig as rig
import pytest
import torch
from host_rig import frozen_model
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from moe_rig import ExpertTrainer
from same_bits import assert_same_bits
from test_hybrid_model import prediction
from torch import Tensor, nn

import megagraph
from megagraph.demo.trainer import Trainer
from megagraph.megatron.graphs.refusals import refusal_of

pytestmark = pytest.mark.both

MAKES: dict[str, Callable[[], Trainer]] = {
    "dense": partial(Trainer, rig.OPTIONS),
    "hybrid": rig.HybridTrainer,
    "experts": ExpertTrainer,
    "replayed": partial(ExpertTrainer, moe_enable_routing_replay=True),
    "grouped": partial(ExpertTrainer, is_grouped=True),
    "prediction": prediction,
}
PIPELINE, SHARED = {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
IN_STAGE, IN_SHARE = "with pipeline parallelism", "with context parallelism"
EQUAL_ROWS = {"expert_model_parallel_size": 2, "moe_pad_expert_input_to_capacity": True}
SPREAD = {"num_moe_experts": 4, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"}
DEFERRED = "deferred gradients of the output layer's weight (defer_embedding_wgrad_compute)"
NEED_EQUAL = "over several ranks that need equal rows"
OF_EXPERTS = "mixture of experts"
TOLD = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
# By kind of model: what a config says, whose last option is named; what it is called; what it may say before.
REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "dense": [
        ({"fp8": "hybrid"}, "fp8"),
        ({"fp4": "e2m1"}, "fp4"),
        ({"quant_recipe": "recipe"}, "quantization by recipe"),
        ({"use_kitchen": True}, "quantization by Kitchen"),
        ({"cpu_offloading": True}, "CPU activation offload"),
        ({"fine_grained_activation_offloading": True}, "fine-grained activation offload"),
        ({"qk_clip": True}, "clipping of attention's queries and keys"),
        ({"log_max_attention_logit": True}, "logging of attention's largest logit"),
        ({"mtp_num_layers": 1, **PIPELINE}, f"multi-token prediction {IN_STAGE}", PIPELINE),
        ({"defer_embedding_wgrad_compute": True, **PIPELINE}, f"{DEFERRED} {IN_STAGE}", PIPELINE),
        ({**SPREAD, **SHARED}, f"experts {NEED_EQUAL} {IN_SHARE}", SHARED),
    ],
    "hybrid": [(PIPELINE, f"a HybridModel {IN_STAGE}")],
    "prediction": [({"sequence_parallel": True}, "multi-token prediction with sequence parallelism")],
    "experts": [
        ({"expert_tensor_parallel_size": 2}, f"{OF_EXPERTS} each over several ranks"),
        ({"moe_router_fusion": True}, f"{OF_EXPERTS} whose router is fused, and takes no padding mask"),
        ({"mlp_chunks_for_training": 2}, f"{OF_EXPERTS} in chunks, which are given no padding mask"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, f"{OF_EXPERTS} whose routing looks at all rows"),
        ({"mtp_num_layers": 1}, f"{OF_EXPERTS} {NEED_EQUAL}, with multi-token prediction", EQUAL_ROWS),
    ],
    "replayed": [(TOLD, f"{OF_EXPERTS} whose routing is replayed or a host's, and recomputed")],
}
Change = Callable[[Any], None]
OF_TWO, OWN = f"{IN_SHARE} (context_parallel_size=2)", f"{OF_EXPERTS} in a layer of class Own"
BEHIND = "behind a forward of its own, in a router of class Own"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# What is switched on, the reason that it counts as, and words of why.
SWITCHED = [
    ({"quant_recipe": "recipe"}, "SCOPE_UNSUPPORTED", "quantization by recipe"),
    (FULL, "RECOMPUTING", "R14"),
]


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize(("kind", "case"), [(kind, it) for kind, cases in REFUSED.items() for it in cases])
def test_what_a_config_asks_for_is_refused_by_name(kind: str, case: Any, monkeypatch: Any) -> None:
    options, name, *built = case
    trainer = MAKES[kind]()
    for given in (*built, options):
        assert refusal_of(trainer.chunk, trainer.model) is None
        for option, value in given.items():
            monkeypatch.setattr(trainer.chunk.config, option, value, raising=False)
    option, value = [*options.items()][-1]
    assert rig.refused(trainer.chunk, trainer.model) == f"{name} ({option}={value!r}) is not supported yet"


def own(owner: Any, **methods: Any) -> None:
    """Makes what a model has one of a host's class."""
    owner.__class__ = type("Own", (type(owner),), methods)


def own_layer(chunk: Any) -> None:
    own(chunk.decoder.layers[1].mlp)


def own_router(chunk: Any) -> None:
    own(chunk.decoder.layers[0].mlp.router, forward=lambda *_args, **_given: None)


def shared(chunk: Any) -> None:
    chunk.config.context_parallel_size = 2


def predict(*_args: Any, **_given: Any) -> None:
    """Of a host's, which could not be handed the pack as it was given."""


NOT_BUILT = {"G": "a gated delta net", "D": "sparse attention", "?": "an unknown kind of layer"}
# Where there is an MLP.
NOT_BUILT |= {"M": "MLPLayer as a layer of Mamba", "E": "MLPLayer as a layer of experts"}
# Of a kind of model what is refused, and the changes of which the last one does it.
CHANGED: list[tuple[str, str, list[Change]]] = [
    (
        *("dense", f"attention of class Identity {OF_TWO}"),
        [shared, lambda it: setattr(it.decoder.layers[0].self_attention, "core_attention", nn.Identity())],
    ),
    (
        "dense",
        f"multimodal RoPE {IN_SHARE} (position_embedding_type='mrope')",
        [lambda it: setattr(it, "position_embedding_type", "mrope"), shared],
    ),
    # Bug: the config alone was asked, and a host may have quantized single modules.
    *(
        (
            *("dense", "quantization (ColumnParallelLinear at layers.1.mlp.linear_fc1)"),
            [lambda it, to=to: setattr(it.decoder.layers[1].mlp.linear_fc1, *to) for to in marks],
        )
        for marks in ([(name, None), (name, True)] for name in ("te_quant_params", "primary_weights_in_fp8"))
    ),
    # Bug: the config alone was asked, and dense layers of a pipeline's stage were called so.
    *(
        (
            *("dense", f"{OF_EXPERTS} in layers of a foreign kind (num_moe_experts=4)"),
            [lambda it: setattr(it.config, "num_moe_experts", 4), hides],
        )
        for hides in (
            lambda it: setattr(it.decoder.layers[0], "mlp", nn.Identity()),
            lambda it: delattr(it.decoder.layers[0], "mlp"),
        )
    ),
    # Bug: it wants offsets that reach the last row, so that its canonical pack raised in the first step.
    (
        *("dense", "a gated delta net (GatedDeltaNet at layers.1.self_attention)"),
        [lambda it: setattr(it.decoder.layers[1].self_attention, "__class__", GatedDeltaNet)],
    ),
    # By the pattern alone: most of these cannot be built without further packages.
    *(
        (
            *("hybrid", f"{name} ({symbol!r} in the hybrid layer pattern)"),
            [lambda it, symbol=symbol: setattr(it.decoder, "layer_type_list", ["*", symbol, "-"])],
        )
        for symbol, name in NOT_BUILT.items()
    ),
    # A router's own forward could not be shown the rows that were given, where its routing is replayed.
    *(("grouped", OWN, [own_layer]), ("experts", OWN, [own_router, own_layer])),
    ("replayed", f"{OF_EXPERTS} whose routing is replayed or a host's, {BEHIND}", [own_router]),
    (
        *("prediction", f"multi-token prediction by {__name__}.{predict.__name__}"),
        [lambda it: own(it.mtp, forward=predict)],
    ),
    (
        *("experts", f"{OF_EXPERTS} with another dispatcher (moe_token_dispatcher_type='alltoall')"),
        [lambda it: own(it.decoder.layers[1].mlp.token_dispatcher)],
    ),
]


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize(("kind", "said", "changes"), CHANGED)
def test_what_is_changed_of_a_model_is_refused_by_name(kind: str, said: str, changes: list[Change]) -> None:
    trainer = MAKES[kind]()
    for change in changes:
        assert refusal_of(trainer.chunk, trainer.model) is None
        change(trainer.chunk)
    assert rig.refused(trainer.chunk, trainer.model) == f"{said} is not supported yet"


@pytest.mark.usefixtures("recompute_on_cpu")
@pytest.mark.parametrize(("options", "reason", "said"), SWITCHED)
def test_what_is_switched_on_is_refused_while_it_is_on(
    options: Any, reason: str, said: str, pair: Any
) -> None:
    """Bug: only a new model was asked. One that had graphs got others, and one that was refused stayed so."""
    off, calls = dict.fromkeys(options), 2 * rig.LAYERS
    for value, expected in (
        (options, {reason: 2 * calls}),  # from the beginning
        (off, {"WARMING_UP": calls}),
        *2
        * (
            (options, {reason: 2 * calls}),  # in a state that is new, and in one that is known
            (off, {}),
        ),
    ):
        for name, each in value.items():
            for trainer in pair.both:
                setattr(trainer.chunk.config, name, each)
        assert pair.costs(rig.ONE, rig.TWO, times=2) == expected
        assert [said in failure for failure in pair.report()["failures"]] == [True] * (value is options)


def test_what_is_switched_on_inside_of_a_step_is_refused_before_the_next_one(trainer: Trainer) -> None:
    """Bug: a call had met the state, so that it was no new one at the step boundary, and nothing asked."""

    def switch_on(pack: Any) -> Any:
        trainer.chunk.config.quant_recipe = "recipe"
        return pack

    rig.step(trainer, [rig.ONE, rig.TWO], times=3)
    rig.step(trainer, [rig.ONE, replace(rig.TWO, pack=switch_on)])
    before = rig.report_of(trainer)
    rig.step(trainer, [rig.ONE, rig.TWO])
    assert rig.eager_since(rig.report_of(trainer), before) == {"SCOPE_UNSUPPORTED": 2 * rig.LAYERS}


@pytest.mark.parametrize("kind", [FullyShardedDataParallel, TorchFullyShardedDataParallel])
def test_other_data_parallelism_is_refused_by_name(kind: type[nn.Module], install: rig.Install) -> None:
    """Bug: Megatron-FSDP alone was known, and under torch's the first capture raised."""
    install()
    model, _called = frozen_model(seed=7)
    ddp: Any = kind.__new__(kind)  # as such a one looks, but that it shards nothing
    nn.Module.__init__(ddp)
    ddp.module, ddp.config = model.train().requires_grad_(), model.config
    ddp.ddp_config = DistributedDataParallelConfig()
    for _step in range(4):
        rig.schedule(ddp, [rig.ONE, rig.TWO], 2, next(model.parameters()).device)
    report = rig.ran(megagraph.reports()[-1], 0, failures=1, SCOPE_UNSUPPORTED=4 * 2 * rig.LAYERS)
    what = f"data parallelism by {kind.__name__} is not supported yet"
    assert report["failures"] == [f"GPTModel stays eager (SCOPE_UNSUPPORTED): {what}"]


def test_megatrons_own_graphs_are_an_error(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    impl, old = "cuda_graph_impl", "enable_cuda_graph"
    for name, value, got in (
        (impl, "local", "'local'"),
        (impl, "transformer_engine", "'transformer_engine'"),
        (old, True, ""),
    ):
        told = rf"expected cuda_graph_impl 'none'.*{got}"
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=told):
            patch.setattr(trainer.chunk.config, name, value, raising=False)
            rig.step(trainer, [rig.ONE])


class OtherParams(PackedSeqParams):
    """Of a host's class, which is not made of a pack's fields alone."""

    def __init__(self, further: str, **fields: Any) -> None:
        super().__init__(**fields)
        self.further = further


def test_micro_batches_that_no_graph_takes_run_eager_and_say_nothing_of_others(pair: rig.Pair) -> None:
    """Bug: graphs were captured for packs of a host's class, which could not be made."""
    none, halves = (rig.Micro(lengths=(30,), pack=it) for it in (lambda _pack: None, rig.split))
    others = rig.Micro(lengths=(4,) * 9, pack=lambda made: OtherParams("a host's", **vars(made)))
    pair.step(rig.ONE, none, halves, others, times=3)
    reasons = ("NO_PACK_METADATA", "SIGNATURE_CHANGED", "TOO_MANY_SEQUENCES")
    pair.ran(2 * rig.LAYERS, WARMING_UP=rig.LAYERS, **dict.fromkeys(reasons, 3 * rig.LAYERS))


def test_a_model_without_ddp_accumulates_plain_gradients_with_eager_bits(install: rig.Install) -> None:
    install()

    def train(eager: bool) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
        model, called = frozen_model(seed=7)
        model.train().requires_grad_()
        device, left = next(model.parameters()).device, []
        for index in range(4):
            for param in model.parameters():
                # Gradients of the first two steps add up.
                param.grad = param.grad if index == 1 else None
            with megagraph.disable_cuda_graphs_this_step() if eager else nullcontext():
                losses = rig.schedule(called, [rig.ONE, rig.TWO], 2, device)
            left.append((losses, rig.grads(model)))
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
        assert left[0][1].keys() == {name for name, _ in model.named_parameters()}
        return left

    assert_same_bits(train(eager=True), train(eager=False))
    rig.ran(megagraph.reports()[-1], 3 * 2 * rig.LAYERS, WARMING_UP=2 * rig.LAYERS)
