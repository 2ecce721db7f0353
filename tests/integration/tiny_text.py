"""A tiny random Llama that has a tokenizer of bytes and a chat template: a whole cluster of it is fast."""

import functools
import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from tests.scratch import new_folder
from tests.tiny_models import save_tiny

MAX_MODEL_LEN = 8192
BOS, EOS = 256, 257
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "
)


@functools.cache
def tiny_text_folder() -> Path:
    """Its layers are many enough for a request to last while something is done to it."""
    folder = save_tiny(
        "llama",
        new_folder("tiny-0.1"),
        vocab_size=258,
        num_hidden_layers=8,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def greedy_reference(prompt: list[int], count: int) -> list[int]:
    """The continuation by transformers."""
    return list(_reference(tuple(prompt), count))


@functools.cache
def _reference(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    model = AutoModelForCausalLM.from_pretrained(tiny_text_folder(), dtype=torch.float32)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
    return tuple(output[0, len(prompt) :].tolist())
