"""`python -m deploy.metric_docs`: writes docs/metrics.md from the tables in the code.

Owns the look of the page. A test fails when the page is not what this would write.
"""

from pathlib import Path

from router.metrics import ROUTER_METRICS, VLLM_ROUTER_METRICS
from wire.metric import Metric
from wire.node_metrics import NODE_METRICS, VLLM_NODE_METRICS

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
TABLES = {"Router": (*ROUTER_METRICS, *VLLM_ROUTER_METRICS), "Node": (*NODE_METRICS, *VLLM_NODE_METRICS)}
_TOP = """# Metrics

Every metric that a process exports, written from the code by `python -m deploy.metric_docs`. How to
scrape them: [operations.md](operations.md#what-to-watch). Series named `vllm:` have the label `model_name`,
those of a node named `paceline_` the label `role`. Label values come from closed sets, so the number of
series does not grow with requests.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_TOP, *(_section(name, table) for name, table in TABLES.items())])


def _section(name: str, table: tuple[Metric, ...]) -> str:
    rows = (
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels) or '–'} | {metric.help} |\n"
        for metric in table
    )
    return f"## {name}\n\n| name | kind | labels | what |\n|---|---|---|---|\n{''.join(rows)}"


if __name__ == "__main__":
    PAGE.write_text(page())
