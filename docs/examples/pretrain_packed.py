# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT on packs of real documents in Megatron-LM's own loop, `megatron.training.pretrain`.

Brings what Megatron-LM asks of a script: a model, a dataset, a batch, a forward step and a loss.
Checkpoints, evaluation, the log and every option but two are Megatron's. The script does not know
whether the plugin is there:

    python docs/examples/pretrain_packed.py --num-layers 12 ...
    megagraph run docs/examples/pretrain_packed.py --num-layers 12 ...

Both also under torchrun. Needs megatron-core 0.19, whose wheel has `megatron.training`, and psutil for
its checkpoints. Does not handle context parallelism, and a micro-batch is one pack.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from packed_documents import PackedDocuments, read_packs, split_packs
from torch import Tensor

import megagraph

VOCAB_SIZE = 256  # one token a byte


def get_batch(samples: Iterator[dict[str, Tensor]], device: torch.device | int) -> dict[str, Any]:
    """The next micro-batch on the device, without waiting for it.

    Args:
        samples: collated samples, each field with one leading dimension of size 1, in pinned memory.
        device: where the model is.

    Returns:
        `tokens`, `labels`, `position_ids` and `loss_mask`, each [1, T]; `packed_seq_params`.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    sample = next(samples)
    longest = int(sample["max_seqlen"])  # on the host
    # One tensor: the plugin, and Transformer Engine, ask whether both are the same.
    offsets = sample["cu_seqlens"][0].to(device, non_blocking=True)
    batch: dict[str, Any] = {
        name: sample[name].to(device, non_blocking=True)
        for name in ("tokens", "labels", "position_ids", "loss_mask")
    }
    batch["packed_seq_params"] = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return batch


def forward_step(samples: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """What Megatron's schedule calls for each micro-batch: the losses, and what reduces them."""
    from megatron.training import get_timers

    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = get_batch(samples, torch.cuda.current_device())
    timer.stop()
    losses = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
        packed_seq_params=batch["packed_seq_params"],
    )
    return losses, partial(loss_func, batch["loss_mask"])


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sums the losses of a micro-batch; Megatron divides by the tokens.

    Returns:
        The sum, the number of tokens that have a loss, and both together for the log.
    """
    total = (losses.float().view(-1) * loss_mask.view(-1)).sum()
    num_tokens = loss_mask.sum()
    # Stacked, and so copied: the schedule divides the sum in place.
    return total, num_tokens.to(torch.int), {"lm loss": torch.stack([total.detach(), num_tokens])}


def model_provider(
    pre_process: bool = True, post_process: bool = True, config: Any = None, **further: Any
) -> torch.nn.Module:
    """Makes this rank's part of the model, from Megatron's arguments.

    Args:
        pre_process: the part has the embedding.
        post_process: the part has the output layer.
        config: a `TransformerConfig` in place of the arguments' own.
        further: what Megatron hands through: process groups, the virtual stage.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    config = core_transformer_config_from_args(args) if config is None else config
    if args.transformer_impl == "local":
        # A block, not a layer: its final norm takes sequence parallelism, too.
        stage = further.get("vp_stage")
        spec = megagraph.get_gpt_block_varlen_spec(config, vp_stage=stage, normalization=args.normalization)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        **further,
    )
    return model


def datasets_provider(
    num_samples: Sequence[int | None], vp_stage: int | None = None
) -> list[PackedDocuments]:
    """The datasets to train on, to validate with and to test with. Every rank makes them for itself."""
    from megatron.core.datasets.utils import Split
    from megatron.training import get_args

    args = get_args()
    canonical = None if args.pack_canonical is None else (args.seq_length, args.pack_canonical)
    # The rows that fill a canonical pack up are one more document.
    packs = read_packs(args.documents, args.seq_length, None if canonical is None else canonical[1] - 1)
    return [
        PackedDocuments(part, count, seed=args.seed, canonical=canonical, split=split)
        for part, count, split in zip(
            split_packs(packs), num_samples, (Split.train, Split.valid, Split.test), strict=True
        )
    ]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the script's own options to Megatron's."""
    group = parser.add_argument_group("packs")
    group.add_argument(
        "--documents",
        type=Path,
        help=".jsonl; the text of Python's own library by default",
    )
    group.add_argument(
        "--pack-canonical",
        type=int,
        metavar="N",
        help="pad every pack to --seq-length tokens and N documents, as a graph would see it",
    )
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Refuses what packs cannot do.

    Raises:
        ValueError: naming the option.
    """
    if args.micro_batch_size != 1 or (args.eval_micro_batch_size or 1) != 1:
        raise ValueError("--micro-batch-size: a micro-batch is one pack, expected 1")
    if args.context_parallel_size != 1:
        raise ValueError(f"--context-parallel-size: expected 1, got {args.context_parallel_size}")
    if args.pack_canonical is not None and args.pack_canonical < 2:
        raise ValueError(f"--pack-canonical: expected at least 2 documents, got {args.pack_canonical}")
    if args.pack_canonical is None and (args.sequence_parallel or args.pipeline_model_parallel_size > 1):
        raise ValueError(
            "--pack-canonical: needed with sequence and pipeline parallelism, which want packs of one size"
        )


def _without_launcher() -> None:
    """Lets one process start that no torchrun has started."""
    if "WORLD_SIZE" not in os.environ:
        # Port 0 is any free one.
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0"), ("GLOO_SOCKET_IFNAME", "lo")):
            os.environ.setdefault(name, value)


def _without_index_builder() -> None:
    """Skips the build of Megatron's index of token files, which our packs do not use.

    megatron-core's wheel has no Makefile for it, and `pretrain` ends the process where make fails.
    """
    from megatron.core.datasets import utils

    if not Path(utils.__file__).with_name("Makefile").exists():
        utils.compile_helpers = lambda: None


def main() -> None:
    """Parses Megatron's arguments and trains."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    _without_launcher()
    _without_index_builder()
    defaults = {"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB_SIZE, "micro_batch_size": 1}
    args = parse_and_validate_args(extra_args_provider=add_arguments, args_defaults=defaults)
    check_arguments(args)
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        pretrain_cfg_container_from_args(args),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )


if __name__ == "__main__":
    main()
