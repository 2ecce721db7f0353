"""The report as text for a terminal. Pure: must never measure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

AIMS = {
    "pair_over_transformers": "at least 1.3",
    "ttft_pair_over_colocated": "at most 1.15",
    "pair_over_vllm_pair": "at least 2",
}


def text(result: Mapping[str, Any]) -> str:
    """Every part that was measured, one table each."""
    parts = [
        *(_engine(name, phase) for name, phase in result.get("by_algorithm", {}).items()),
        *([_transfer(result["transfer"])] if "transfer" in result else []),
        *([_router(result["router"])] if "router" in result else []),
    ]
    return "\n".join(["", *parts])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def _engine(name: str, phase: Mapping[str, Any]) -> str:
    rows = [["", "streams", "tokens/s", "decode/s", "TTFT ms", "tokens/round", "long prompt TTFT ms"]]
    for contender, numbers in phase["contenders"].items():
        for streams, wave in numbers["streams"].items():
            accepted = wave["acceptance_length"]
            rows.append(
                [
                    contender,
                    streams,
                    f"{wave['tokens_per_s']:.1f}",
                    f"{wave['decode_tokens_per_s']:.1f}",
                    f"{1000 * wave['ttft_s']:.0f}",
                    "" if accepted is None else f"{accepted:.2f}",
                    f"{1000 * numbers['long_prompt_ttft_s']:.0f}" if streams == "1" else "",
                ]
            )
    ratios = [[key, f"{value:.3f}", _aim(key)] for key, value in phase["ratios"].items()]
    return f"Engine, drafting: {name}\n{columns(rows)}\n{columns(ratios) if ratios else ''}"


def _aim(key: str) -> str:
    return f"aim: {AIMS[key]}" if key in AIMS else ""


def _transfer(transfer: Mapping[str, Any]) -> str:
    rows = [["", "pages", "GB/s", "contiguous NIXL GB/s", "ratio", "by pair"]]
    for name, sizes in transfer.items():
        rows += [[name, pages, *_speeds(speed)] for pages, speed in sizes.items()]
    return f"KV transfer, scattered pages (aim: ratio of nixl at least 0.9)\n{columns(rows)}"


def _speeds(speed: Mapping[str, Any]) -> Iterator[str]:
    for key in ("gb_per_s", "raw_gb_per_s", "transfer_over_raw"):
        yield "-" if speed[key] is None else f"{speed[key]:.2f}"
    by_pair = speed["transfer_over_raw_range"]
    yield "-" if by_pair is None else "{:.2f} to {:.2f}".format(*by_pair)


def _router(router: Mapping[str, Any]) -> str:
    added = [
        ["added to the first token, median", f"{router['added_ms_median']:.2f} ms", "aim: at most 2 ms"],
        ["added to the first token, p99", f"{router['added_ms_p99']:.2f} ms", ""],
    ]
    loads = [["load", "requests/s", "tokens/s", "events/request", "CPU ms/request", "client CPU", "stub CPU"]]
    for name in ("at_once", "paced"):
        load = router[name]
        loads.append(
            [
                name,
                f"{load['requests_per_s']:.0f}",
                f"{load['tokens_per_s']:.0f}",
                f"{load['events_per_request']:.0f}",
                f"{load['cpu_ms_per_request']:.2f}",
                f"{load['client_cpu_ms_per_request']:.2f}",
                f"{load['stub_cpu_ms_per_request']:.2f}",
            ]
        )
    title = f"Router, {router['concurrency']} streams, {router['tokens_per_request']} tokens each"
    return f"{title} (aim: at least 300 requests/s)\n{columns(added)}\n{columns(loads)}"
