"""`transformers.generate`, the yardstick, as a process: JSON lines in, timings out.

Owns the model as transformers runs it. Must never know what it is compared with.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList


class FirstToken(StoppingCriteria):  # type: ignore[misc]  # transformers is not followed by mypy
    """Stops nothing; notes when the first token was there."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if self.at is None:
            self.at = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def answer(model: Any, tokenizer: Any, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Generate exactly `max_tokens` greedy tokens for each prompt, as one batch padded on the left."""
    started = time.perf_counter()
    inputs = tokenizer(prompts, return_tensors="pt", padding=len(prompts) > 1)
    first = FirstToken()
    with torch.inference_mode():
        model.generate(
            **inputs,
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            pad_token_id=tokenizer.pad_token_id,
            stopping_criteria=StoppingCriteriaList([first]),
        )
    ended = time.perf_counter()
    return {
        "num_prompt_tokens": inputs["attention_mask"].sum(dim=1).tolist(),
        "ttft_s": (first.at or ended) - started,
        "total_s": ended - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("dtype")
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval()
    print("{}", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        reply = answer(model, tokenizer, question["prompts"], question["max_tokens"])
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
