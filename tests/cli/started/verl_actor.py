# SPDX-License-Identifier: Apache-2.0
"""verl's actor and its reference without Ray and rollout: by the worker's methods and configuration."""

import sys

import torch
from hydra import compose, initialize_config_module
from verl.protocol import DataProto
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

PROMPT, RESPONSE, ROWS, PAD = 32, 32, 16, 258
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", sys.argv[1:]).actor_rollout_ref


def rollouts(seed):
    """As if they had been generated: prompts end where responses begin."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (ROWS, PROMPT + RESPONSE), generator=draw)
    mask = torch.zeros_like(tokens)
    for row, (prompt, response) in enumerate(torch.randint(2, 31, (ROWS, 2), generator=draw).tolist()):
        mask[row, PROMPT - prompt : PROMPT + response] = 1
    tokens, answered = tokens.where(mask == 1, PAD), mask[:, PROMPT:]
    fields = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "prompts": tokens[:, :PROMPT],
        "responses": tokens[:, PROMPT:],
        "response_mask": answered,
        "advantages": torch.randn(ROWS, RESPONSE, generator=draw) * answered,
    }
    return DataProto.from_single_dict(fields, meta_info={"temperature": 0.7})


def asked(data, **options):
    packed = left_right_2_no_padding(data.to_tensordict())
    tensordict_utils.assign_non_tensor(packed, calculate_entropy=False, **options)
    return packed


def log_probs(run, data):
    packed = asked(data, calculate_sum_pi_squared=False, compute_loss=False)
    return no_padding_2_padding(tensordict_utils.get(run(packed), "log_probs"), packed).float()


actor, reference = (ActorRolloutRefWorker(config, role=role) for role in ("actor", "ref"))
actor.init_model()
reference.init_model()
update = {"distillation_use_topk": False, "distillation_only": False, "compute_loss": True, "epochs": 1}
update |= {"global_batch_size": 8, "mini_batch_size": 8, "seed": 1, "dataloader_kwargs": {"shuffle": False}}
for step in range(5):
    data = rollouts(step)
    data.batch["old_log_probs"] = log_probs(actor.compute_log_prob, data)
    data.batch["ref_log_prob"] = log_probs(reference.compute_ref_log_prob, data)
    actor.update_actor(asked(data, **update))
