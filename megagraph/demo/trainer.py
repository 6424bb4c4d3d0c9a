# SPDX-License-Identifier: Apache-2.0
"""A small Megatron training loop: GPTModel in Megatron's DDP, its optimizer, its schedule.

Written as a host would write it; the plugin reaches it through Megatron alone.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.demo.packs import Pack, next_token_labels, position_ids
from megagraph.megatron.specs import get_gpt_block_varlen_spec

__all__ = [
    "ModelOptions",
    "Trainer",
    "gpt_model",
    "in_half_precision",
    "mean_loss",
    "packed_seq_params",
    "process_groups",
    "transformer_config",
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Shape of the demo's GPTModel.

    Args:
        layers: transformer layers.
        hidden: hidden size.
        heads: attention heads.
        query_groups: key and value heads; None for as many as heads.
        vocab: vocabulary size.
        max_tokens: physical tokens of a pack.
        bf16: train in bfloat16, with float32 main gradients.
        learning_rate: of Adam.
        seed: of the weights.
    """

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    query_groups: int | None = None
    vocab: int = 256
    max_tokens: int = 512
    bf16: bool = False
    learning_rate: float = 1e-3
    seed: int = 1234


@contextlib.contextmanager
def process_groups() -> Iterator[None]:
    """torch.distributed and Megatron's groups; leaves existing ones alone.

    Under `torchrun` for its processes, else for this one alone.
    """
    from megatron.core import parallel_state

    made_dist = not torch.distributed.is_initialized()
    if made_dist:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ:
            torch.distributed.init_process_group(backend)
        else:
            # It takes a free port itself; one that was found free before may be taken by now.
            store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    made_groups = not parallel_state.model_parallel_is_initialized()
    if made_groups:
        parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        if made_groups:
            parallel_state.destroy_model_parallel()
        if made_dist:
            torch.distributed.destroy_process_group()


def transformer_config(options: ModelOptions, **changes: Any) -> Any:
    """Megatron's `TransformerConfig` of a model that draws no random numbers and needs no extension.

    `MLATransformerConfig` where `multi_latent_attention` is among the changes.
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    dtype = torch.bfloat16 if options.bf16 else torch.float32
    fields: dict[str, Any] = {
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": options.heads,
        "num_query_groups": options.query_groups,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": options.bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }
    kind = MLATransformerConfig if changes.get("multi_latent_attention") else TransformerConfig
    return kind(**{**fields, **changes})


def packed_seq_params(cu_seqlens: Tensor, max_seqlen: int) -> Any:
    """Megatron's `PackedSeqParams` of a pack without padding, whose offsets are int32 [documents + 1]."""
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )


def gpt_model(options: ModelOptions, config: Any, spec: Any = None, **further: Any) -> nn.Module:
    """A GPTModel on the host, by default of the local spec with a core attention for packs."""
    from megatron.core.models.gpt import GPTModel

    model: nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_block_varlen_spec(config) if spec is None else spec,
        vocab_size=options.vocab,
        max_sequence_length=options.max_tokens,
        position_embedding_type="rope",
        rotary_percent=1.0,
        **further,
    )
    return model


def in_half_precision(model: nn.Module) -> nn.Module:
    """What is called in place of a model: itself, or Megatron's wrapper if its config says bf16."""
    from megatron.core.transformer.module import Float16Module

    config: Any = model.config
    wrapped: nn.Module = Float16Module(config, model) if config.bf16 else model
    return wrapped


class Trainer:
    """One model with its optimizer, trained on packs.

    Args:
        options: the model's shape.
        config: further fields of Megatron's `TransformerConfig`.
        ddp: further fields of Megatron's `DistributedDataParallelConfig`.
        spec: of a layer or a block; by default the local one with a core attention for packs.
    """

    def __init__(
        self,
        options: ModelOptions,
        *,
        config: dict[str, Any] | None = None,
        ddp: dict[str, Any] | None = None,
        spec: Any = None,
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.options = options
        torch.manual_seed(options.seed)
        transformer = transformer_config(options, **(config or {}))
        self.chunk: Any = self.make_chunk(transformer, spec).to(self.device)
        module = in_half_precision(self.chunk)
        self.model: Any = DistributedDataParallel(
            config=transformer,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(ddp or {})),
            module=module,
        )
        if transformer.finalize_model_grads_func is None:
            from megatron.core.distributed import finalize_model_grads

            transformer.finalize_model_grads_func = finalize_model_grads
        transformer.no_sync_func = self.model.no_sync
        self.optimizer: Any = self.make_optimizer()

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        """The model itself."""
        return gpt_model(self.options, config, spec)

    def make_optimizer(self) -> Any:
        """Megatron's optimizer for the model, distributed if its DDP is."""
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        ddp: Any = self.model.ddp_config
        config = OptimizerConfig(
            optimizer="adam",
            lr=self.options.learning_rate,
            bf16=self.options.bf16,
            params_dtype=torch.bfloat16 if self.options.bf16 else torch.float32,
            use_distributed_optimizer=ddp.use_distributed_optimizer,
            overlap_param_gather=ddp.overlap_param_gather,
            # megatron-core clips on a GPU only.
            clip_grad=1.0 if self.device.type == "cuda" else 0.0,
        )
        return get_megatron_optimizer(config, [self.model])

    def named_main_grads(self) -> list[tuple[str, Tensor]]:
        """Every parameter's accumulated gradient, by name."""
        return [(name, param.main_grad) for name, param in self.chunk.named_parameters()]

    def zero_grad(self) -> None:
        """Before a step: in the DDP's buffers, and of what the optimizer was given."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def schedule(self) -> Callable[..., Any]:
        """Megatron's, with what is installed now."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        schedule: Callable[..., Any] = get_forward_backward_func()
        return schedule

    def forward_backward(self, packs: Sequence[Pack], *, forward_only: bool = False) -> list[Tensor]:
        """Runs Megatron's schedule over the packs of one step, and leaves the gradients in place.

        Returns the mean loss of each micro-batch, on the device.
        """
        if not forward_only:
            self.zero_grad()
        losses: list[dict[str, Tensor]] = self.schedule()(
            forward_step_func=self._forward_step,
            data_iterator=iter(packs),
            model=[self.model],
            num_microbatches=len(packs),
            seq_length=self.options.max_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return [loss["loss"] for loss in losses]

    def update(self) -> None:
        """Lets the optimizer step."""
        self.optimizer.step()

    def _forward_step(self, packs: Iterator[Pack], model: Any) -> tuple[Tensor, Any]:
        pack = next(packs)
        labels, mask = next_token_labels(pack)
        offsets = pack.cu_seqlens.to(self.device, non_blocking=True)
        params = packed_seq_params(offsets, pack.max_seqlen)
        tokens, positions, labels, mask = (
            t.unsqueeze(0).to(self.device, non_blocking=True)
            for t in (pack.tokens, position_ids(pack), labels, mask)
        )
        losses = model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=None,
            labels=labels,
            packed_seq_params=params,
        )
        return losses, partial(mean_loss, mask=mask)


def mean_loss(losses: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the tokens that count, as Megatron's schedules take it."""
    loss = (losses.float() * mask).sum() / mask.sum().clamp(min=1)
    # A copy: the schedule divides the loss in place.
    return loss, {"loss": loss.detach().clone()}
