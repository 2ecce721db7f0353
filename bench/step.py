"""What one forward costs, and how much of it is matrix products: python -m bench.step MODEL [threads].

Prints best-of times in milliseconds for decode, verify and prefill shapes. `products` is the same
sequence of products with the same weights with nothing between them: the floor.
"""

import sys
import time
from collections.abc import Callable

import torch

from engine.batch import ForwardBatch, Span
from engine.layout import PoolSpec, build_layout
from engine.loaders import load_model
from engine.models.llama import LlamaModel
from engine.pool import PagePool

PAGE_SIZE = 16
SECONDS_PER_SHAPE = 2.0
# requests, context tokens, rows per request
STEPS = ((1, 200, 1), (1, 200, 6), (1, 2000, 1), (16, 200, 1), (16, 500, 1), (16, 500, 6))
PROMPT_TOKENS = 1000
CHUNKS = (256, 512, 1000)


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]) if len(sys.argv) > 2 else 2)
    loaded = load_model(sys.argv[1], dtype="auto", device="cpu")
    pool = _pool(loaded.model)
    print(f"{loaded.model.dtype}, {torch.get_num_threads()} threads, page size {PAGE_SIZE}")
    print(f"{'shape':<28}{'step':>9}{'products':>10}{'rest':>8}")
    for num_requests, context, rows in STEPS:
        spans = [_span(i, context, rows, rows) for i in range(num_requests)]
        name = f"{num_requests} x {rows} rows at {context}"
        _report(name, loaded.model, pool, [ForwardBatch(spans=spans)])
    for chunk in CHUNKS:
        starts = range(0, PROMPT_TOKENS, chunk)
        batches = [
            ForwardBatch(spans=[_span(0, start, min(chunk, PROMPT_TOKENS - start), 1)]) for start in starts
        ]
        _report(f"prompt {PROMPT_TOKENS} by {chunk}", loaded.model, pool, batches)


def _report(name: str, model: LlamaModel, pool: PagePool, batches: list[ForwardBatch]) -> None:
    def steps() -> None:
        for batch in batches:
            model.forward(batch, pool)

    def products() -> None:
        for batch in batches:
            num_rows = sum(len(span.token_ids) for span in batch.spans)
            _products(model, num_rows, sum(len(span.logit_rows) for span in batch.spans))

    step_ms, product_ms = best_ms(steps), best_ms(products)
    print(f"{name:<28}{step_ms:>9.2f}{product_ms:>10.2f}{step_ms - product_ms:>8.2f}", flush=True)


@torch.inference_mode()
def _products(model: LlamaModel, num_rows: int, num_wanted: int) -> None:
    config = model.config
    hidden = torch.zeros(num_rows, config.hidden_size, dtype=model.dtype)
    attended = torch.zeros(num_rows, config.num_heads * config.head_dim, dtype=model.dtype)
    inner = torch.zeros(num_rows, config.intermediate_size, dtype=model.dtype)
    for layer in model.weights.layers:
        layer.qkv(hidden)
        layer.output(attended)
        layer.gate_up(hidden)
        layer.down(inner)
    model.head(hidden[:num_wanted])


def best_ms(run: Callable[[], None]) -> float:
    """The fastest of as many runs as fit, after two to warm up."""
    run()
    run()
    best = float("inf")
    end = time.perf_counter() + SECONDS_PER_SHAPE
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def _pool(model: LlamaModel) -> PagePool:
    config = model.config
    spec = PoolSpec(
        pool=model.pool_name,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    dtype = str(model.dtype).removeprefix("torch.")
    layout = build_layout(page_size=PAGE_SIZE, dtype=dtype, pools=[spec])
    return PagePool(layout, 1024, model.device)


def _span(index: int, context: int, num_rows: int, num_wanted: int) -> Span:
    """Contexts differ a little, as in a running batch, and pages lie scattered."""
    committed = context + 3 * index
    num_pages = -(-(committed + num_rows) // PAGE_SIZE)
    return Span(
        token_ids=[5] * num_rows,
        num_committed=committed,
        pages=[(index * 61 + page * 17) % 1024 for page in range(num_pages)],
        positions=range(committed, committed + num_rows),
        logit_rows=range(num_rows - num_wanted, num_rows),
    )


if __name__ == "__main__":
    main()
