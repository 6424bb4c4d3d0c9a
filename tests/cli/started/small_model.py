# SPDX-License-Identifier: Apache-2.0
"""Leaves a small Qwen3 with weights and a tokenizer of bytes in `model`, and conversations beside it."""

import json
import random

import pandas
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

torch.manual_seed(0)
config = transformers.Qwen3Config(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    vocab_size=320,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=256,
    eos_token_id=257,
    pad_token_id=258,
)
transformers.Qwen3ForCausalLM(config).float().save_pretrained("model")
letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
fast.chat_template = "{% for it in messages %}{{ it['role'][0] }}:{{ it['content'] }}\n{% endfor %}"
fast.save_pretrained("model")
draw = random.Random(0)
roles = [("user", "question "), ("assistant", "answer ")]
talks = [
    {"messages": [{"role": role, "content": word * draw.randint(1, 3)} for role, word in roles]}
    for _ in range(96)
]
pandas.DataFrame(talks).to_parquet("talks.parquet")
with open("talks.jsonl", "w", encoding="utf-8") as file:
    file.writelines(json.dumps(talk) + "\n" for talk in talks)
