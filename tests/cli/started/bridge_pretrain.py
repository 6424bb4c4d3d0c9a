# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's pretrain() on packs, of a model that AutoBridge makes of a folder."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import megatron.bridge.training.initialize
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training import config as of
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

TOKENS = 128


class Packs(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        ends = torch.randperm(TOKENS - 1, generator=draw)[: 2 + index % 4].sort().values + 1
        offsets = torch.cat([torch.tensor([0]), ends, torch.tensor([TOKENS])])
        tokens = torch.randint(0, 256, (TOKENS,), generator=draw)
        return {
            "tokens": tokens,
            "labels": tokens.roll(-1),
            "loss_mask": torch.ones(TOKENS),
            "position_ids": torch.cat([torch.arange(n) for n in offsets.diff().tolist()]),
            "attention_mask": torch.ones(1),
            "cu_seqlens": torch.cat([offsets, torch.tensor([-1])]).int(),
            "cu_seqlens_argmin": torch.tensor(len(offsets)),
            "max_seqlen": offsets.diff().max(),
        }

    def collate_fn(self, items):
        return {name: torch.stack([item[name] for item in items]) for name in items[0]}


@dataclass
class OwnPacks(of.DatasetProvider):
    seq_length: int = TOKENS

    def build_datasets(self, context):
        return Packs(), Packs(), Packs()


in_bf16 = {"bf16": True, "params_dtype": torch.bfloat16}
model = AutoBridge.from_hf_pretrained(sys.argv[1]).to_megatron_provider(load_weights=False)
fusions = ("gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm", "apply_rope_fusion")
fusions += ("bias_dropout_fusion", "cross_entropy_loss_fusion")
settings = {**dict.fromkeys(fusions, False), **in_bf16, "use_cpu_initialization": True, "seq_length": TOKENS}
for name, value in settings.items():
    setattr(model, name, value)
container = of.ConfigContainer(
    model=model,
    train=of.TrainingConfig(
        micro_batch_size=1, global_batch_size=4, train_iters=6, eval_iters=1, eval_interval=3
    ),
    optimizer=of.OptimizerConfig(
        optimizer="adam", lr=1e-2, min_lr=1e-3, use_distributed_optimizer=False, **in_bf16
    ),
    scheduler=of.SchedulerConfig(lr_decay_iters=10, start_weight_decay=0.0, end_weight_decay=0.0),
    dataset=OwnPacks(dataloader_type="single", num_workers=0, pin_memory=False),
    logger=of.LoggerConfig(log_interval=1),
    tokenizer=of.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=319),
    checkpoint=of.CheckpointConfig(),
    ddp=of.DistributedDataParallelConfig(
        use_distributed_optimizer=False, grad_reduce_in_fp32=True, overlap_param_gather=False
    ),
)
# It asserts that there is a GPU, and compiles helpers for files of tokens.
beginning = megatron.bridge.training.initialize
cuda = SimpleNamespace(**{**vars(torch.cuda), "is_available": lambda: True})
there = SimpleNamespace(**{**vars(torch), "cuda": cuda})
with mock.patch.multiple(beginning, torch=there, compile_helpers=lambda: None):
    pretrain(container, forward_step)
