# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes a model of the lab: a random Qwen3 (1 MB) with a byte-level BPE tokenizer and a chat template.

Arguments: directory, number of attention heads (4; another number gives a model that tensor parallel 2 cannot split).
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEXT = [
    "Two nodes, one cable, one model. The head asks, the worker answers, and both ranks reduce over the fabric.",
    "What is served here? A tiny random model: its words have no meaning, but every token is really computed.",
    "spark-1 spark-2 rail rank shard snapshot revision digest tensor parallel ready stable verified 0123456789",
]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main(out: str, heads: int) -> None:
    torch.manual_seed(20261130)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT
    fast.save_pretrained(out)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=2 if heads % 2 == 0 else 1,
        head_dim=32, max_position_embeddings=2048, eos_token_id=2, bos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(out, max_shard_size="500KB")


main(sys.argv[1], int(sys.argv[2]))
