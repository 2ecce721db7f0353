"""The report as a picture. Must never measure; says so where the plotting library is missing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

INCHES = (12.0, 4.0)
PALETTE = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")


def draw(result: Mapping[str, Any], path: Path) -> str:
    """Write a PNG with a panel for each part; what to tell the user. Writes nothing without data."""
    panels = [panel for key, panel in _PANELS.items() if key in result]
    if not panels:
        return "no plot: nothing was measured that can be drawn"
    try:
        import matplotlib as mpl
    except ImportError:
        return "no plot: matplotlib is not installed (pip install paceline[bench])"
    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(INCHES[0] * len(panels) / len(_PANELS), INCHES[1]), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes, result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return f"plot: {path}"


def _tokens(axes: Any, result: Mapping[str, Any]) -> None:
    """Single-stream tokens/s, a group of bars for each contender, a bar for each algorithm."""
    phases = result["by_algorithm"]
    names = list(next(iter(phases.values()))["contenders"])
    width = 0.8 / len(phases)
    for index, (algorithm, phase) in enumerate(phases.items()):
        values = [phase["contenders"][name]["streams"]["1"]["tokens_per_s"] for name in names]
        places = [place + index * width for place in range(len(names))]
        axes.bar(places, values, width, label=algorithm, color=PALETTE[index % len(PALETTE)])
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], names, rotation=30, ha="right")
    axes.set_title("tokens/s, one stream")
    axes.legend(title="drafting")


def _transfers(axes: Any, result: Mapping[str, Any]) -> None:
    labels, values = [], []
    for name, sizes in result["transfer"].items():
        for pages, speed in sizes.items():
            labels.append(f"{name} {pages}")
            values.append(speed["gb_per_s"])
            if name == "nixl" and speed["raw_gb_per_s"] is not None:
                labels.append(f"contiguous {pages}")
                values.append(speed["raw_gb_per_s"])
    axes.bar(labels, values, color=PALETTE[2])
    axes.tick_params(axis="x", rotation=30)
    axes.set_title("KV transfer, GB/s")


def _router(axes: Any, result: Mapping[str, Any]) -> None:
    loads = {
        name.replace("_", " "): result["router"][name]["requests_per_s"] for name in ("at_once", "paced")
    }
    axes.bar(list(loads), list(loads.values()), color=PALETTE[1])
    axes.axhline(300, color="grey", linestyle="--", linewidth=1)
    axes.set_title(f"router, requests/s; adds {result['router']['added_ms_median']:.2f} ms")


_PANELS = {"by_algorithm": _tokens, "transfer": _transfers, "router": _router}
