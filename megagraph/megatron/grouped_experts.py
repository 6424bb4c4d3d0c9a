# SPDX-License-Identifier: Apache-2.0
"""A dropless mixture of experts on one rank that never waits for the device, for Megatron's specs.

It is Megatron's `MoELayer` with another dispatcher and other experts: router, losses, metrics, the experts'
bias, shared experts and recomputing are Megatron's. Needs neither Transformer Engine nor the plugin.

Rows of padding are sorted behind all experts, where no product writes: they hold whatever the memory held,
NaN at worst, until rows come back together, and are zeroed there, forward and backward.
"""

import functools
import types
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megagraph.modules.experts import GroupedLinear, SortedRows

__all__ = ["SortingDispatcher", "grouped_experts", "grouped_layer", "is_grouped"]

# Options that are not served, and their values that are. Older releases lack some.
_SERVED: Mapping[str, Any] = {
    "expert_model_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "add_bias_linear": False,
    "moe_expert_capacity_factor": None,
    "moe_shared_expert_overlap": False,
    "moe_latent_size": None,
    "moe_mlp_glu_interleave_size": None,
    "delay_wgrad_compute": False,
    "use_te_activation_func": False,
    "fp8": None,
    "fp4": None,
}
_PROJECTIONS = ("linear_fc1", "linear_fc2")


def _check(config: Any) -> None:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    for option, served in _SERVED.items():
        value = getattr(config, option, served)
        if value != served and not (served == 1 and value is None):
            raise ValueError(f"grouped experts: expected {option} {served}, got {value!r}")
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        what = "expected moe_router_topk 1 with moe_apply_probs_on_input"
        raise ValueError(f"grouped experts: {what}, got {config.moe_router_topk}")
    is_fused_gate = config.gated_linear_unit and config.activation_func in (F.silu, quick_gelu)
    if config.bias_activation_fusion and not is_fused_gate:
        what = "expected bias_activation_fusion False where the activation is neither SwiGLU nor quick GEGLU"
        raise ValueError(f"grouped experts: {what}")
    if config.params_dtype is torch.bfloat16:
        for option in ("hidden_size", "moe_ffn_hidden_size"):
            if (value := getattr(config, option)) % 8:
                raise ValueError(f"grouped experts: expected {option} a multiple of 8, got {value}")


class SortingDispatcher:
    """Sorts rows by expert and back, `topk` of each; has the methods that Megatron's layer calls.

    Between dispatch and combine it holds where rows lie, and nothing outside of a call.
    """

    shared_experts = None

    def __init__(self, topk: int) -> None:
        self._topk = topk
        self._rows: SortedRows | None = None
        self._shape: torch.Size | None = None

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows [..., H] to [T, H], which experts sort; probabilities [T, experts] to [T * topk], sorted."""
        self._shape = hidden_states.shape
        self._rows = SortedRows.of(routing_map, self._topk)
        return hidden_states.reshape(-1, hidden_states.size(-1)), self._rows.permute_probs(probs)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing, and so in the two steps behind the experts: all of these are here."""
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, SortedRows, Tensor]:
        """What experts take: rows, where those of each lie (and not how many there are), probabilities."""
        assert self._rows is not None
        return hidden_states, self._rows, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    token_combine = combine_preprocess

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[T * topk, H] back to the rows that came in; zeros for those of no expert."""
        assert self._rows is not None and self._shape is not None
        out = self._rows.combine(hidden_states).view(self._shape)
        self._rows = self._shape = None
        return out

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """None: experts allocate what they hand out."""
        return None, None


class _Through(nn.Module):
    """A projection that is none."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


_THROUGH = _Through()


def _adopt(module: Any, state_dict: MutableMapping[str, Any], prefix: str, *_of_loading: Any) -> None:
    """Before a state is loaded: weights of Megatron's modules of experts take our names and shapes."""
    own = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
    tensors = {name: state_dict[key] for name, key in own.items() if isinstance(state_dict[key], Tensor)}
    experts, hidden = module.num_local_experts, module.config.hidden_size
    found: dict[str, Tensor] = {}  # [experts, out, in] each
    for index, projection in enumerate(_PROJECTIONS, start=1):
        for pattern in ("local_experts.{}." + projection + ".weight", projection + ".weight{}"):
            names = [pattern.format(expert) for expert in range(experts)]
            if all(name in tensors for name in names):
                found[projection] = torch.stack([tensors.pop(name) for name in names])
        if (legacy := tensors.pop(f"weight{index}", None)) is not None:
            shape = (experts, hidden, -1) if index == 1 else (experts, -1, hidden)
            found[projection] = legacy.view(shape).transpose(1, 2)
    if found:
        for key in [own[name] for name in own if name not in tensors or "_extra_state" in name]:
            del state_dict[key]
    for projection, weight in found.items():
        state_dict[f"{prefix}{projection}.weight"] = weight


@functools.cache
def grouped_experts() -> type[Any]:
    """Megatron's kind of module for experts, of all of them in two grouped products."""
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.module import MegatronModule

    class GroupedExperts(MegatronModule):  # type: ignore[misc]  # of an untyped package
        """Gated or plain MLPs without biases; each row is weighted in the activation, as Megatron does.

        Weights of all experts are one parameter for each projection, [experts, out, in]: one by one they
        would have to be copied together in each call. Seeds give the weights that they give `SequentialMLP`.
        With `moe_act` in `recompute_modules` both products' inputs are made again in the backward.
        Takes what Megatron's modules of experts take, and raises `ValueError` for an option of the config
        that is not served; on a GPU it needs `params_dtype=torch.bfloat16`.
        """

        def __init__(
            self,
            num_local_experts: int,
            config: Any,
            submodules: Any = None,  # not read
            pg_collection: Any = None,
            name: str | None = None,  # not read
        ) -> None:
            _check(config)
            super().__init__(config=config)
            self.num_local_experts = num_local_experts
            modules = getattr(config, "recompute_modules", None) or ()
            self._recomputes = config.recompute_granularity == "selective" and "moe_act" in modules
            # Not the group itself: what a module holds counts as used in its forward.
            of_copies = getattr(pg_collection, "expt_dp", None)
            self._copy = 0 if of_copies is None else of_copies.rank()
            hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
            device: Any = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            place: Any = {"dtype": config.params_dtype, "device": device}
            columns = 2 * inner if config.gated_linear_unit else inner
            self.linear_fc1 = GroupedLinear(num_local_experts, hidden, columns, **place)
            self.linear_fc2 = GroupedLinear(num_local_experts, inner, hidden, **place)
            for param in self.parameters():
                # As Megatron's DDP asks: all ranks that share the data share these experts.
                param.allreduce = True
            if config.perform_initialization:
                self._initialize()
            self._register_load_state_dict_pre_hook(_adopt, with_module=True)

        @torch.no_grad()
        def _initialize(self) -> None:
            """Draws expert by expert, as Megatron does where each is a module."""
            from megatron.core.tensor_parallel import random

            config, stream = self.config, random.get_expert_parallel_rng_tracker_name()
            inits = config.init_method, config.output_layer_init_method
            for expert in range(self.num_local_experts):
                for projection, init in zip(_PROJECTIONS, inits, strict=True):
                    weight = getattr(self, projection).weight[expert]
                    if config.use_cpu_initialization:
                        drawn = torch.empty(weight.shape, dtype=torch.float)
                        init(drawn)
                        weight.copy_(drawn)
                    else:
                        with random.get_cuda_rng_tracker().fork(stream):
                            init(weight)

        def forward(
            self, hidden_states: Tensor, rows: SortedRows, permuted_probs: Tensor
        ) -> tuple[Tensor, None]:
            """Runs rows [T, H] through their experts, to [T * topk, H] sorted by expert.

            Probabilities [T * topk] are sorted, too. Past the last offset results hold anything.
            """
            config, given, weights = self.config, [hidden_states], permuted_probs
            if config.moe_apply_probs_on_input:
                given, weights = [hidden_states, weights], torch.ones_like(weights)

            def sort(hidden: Tensor, weights: Tensor | None = None) -> Tensor:
                hidden = rows.permute(hidden)
                return hidden if weights is None else (weights.unsqueeze(-1) * hidden).to(hidden.dtype)

            # Between the projections happens what happens there in Megatron's.
            steps: Any = types.SimpleNamespace(config=config, activation_func=config.activation_func)
            steps.linear_fc1 = steps.linear_fc2 = _THROUGH

            def activate(inner: Tensor, weights: Tensor) -> Any:
                return MLP.forward(steps, inner, weights)[0]

            inner = self._multiply(self.linear_fc1, rows.offsets, sort, *given)
            return self._multiply(self.linear_fc2, rows.offsets, activate, inner, weights), None

        def _multiply(
            self, linear: GroupedLinear, offsets: Tensor, make: Callable[..., Tensor], *given: Tensor
        ) -> Tensor:
            if self._recomputes:
                return linear.of_made(offsets, make, *given)
            out: Tensor = linear(make(*given), offsets)
            return out

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> dict[str, Any]:
            """For Megatron's distributed checkpoints; the tensors are those of its own modules of experts."""
            from megatron.core.dist_checkpointing import ShardedTensor

            if (metadata or {}).get("singleton_local_shards", False):
                raise ValueError("grouped experts: expected singleton_local_shards False, got True")
            return {
                f"{prefix}{projection}.weight": ShardedTensor.from_rank_offsets(
                    f"{prefix}experts.{projection}.weight",
                    getattr(self, projection).weight,
                    *sharded_offsets,
                    replica_id=(0, 0, self._copy),
                    prepend_axis_num=len(sharded_offsets),
                )
                for projection in _PROJECTIONS
            }

    return GroupedExperts


@functools.cache
def grouped_layer() -> type[Any]:
    """Megatron's layer of experts, with a `SortingDispatcher`."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    class GroupedMoELayer(MoELayer):  # type: ignore[misc]  # of an untyped package
        """Takes what Megatron's takes; `moe_token_dispatcher_type` is not read."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            _check(config)
            super().__init__(config, *args, **kwargs)
            self.token_dispatcher = SortingDispatcher(config.moe_router_topk)

    return GroupedMoELayer


def is_grouped(mixture: Any) -> bool:
    """Whether a layer of experts is such a one, and nothing derived from it."""
    return isinstance(mixture, nn.Module) and type(mixture) is grouped_layer()
