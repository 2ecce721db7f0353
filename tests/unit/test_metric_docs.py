"""The dashboard and the page on operations name exactly what the processes export."""

import json
import re

import pytest

from deploy.metric_docs import PAGE, TABLES, page
from tests.unit.source_tree import ROOT
from wire.metric import Metric

EVERY = [metric for table in TABLES.values() for metric in table]
NAME = re.compile(r"(?:paceline_|vllm:)\w+")
_CONSTANT = {"role", "model_name", "instance", "le"}


def scraped(metric: Metric) -> set[str]:
    """The names under which a metric's samples appear."""
    if metric.kind == "histogram":
        return {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    return {metric.name}


def expressions() -> list[str]:
    board = json.loads((ROOT / "deploy/grafana/paceline.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("expression", expressions())
def test_every_name_and_label_of_the_dashboard_is_exported(expression: str) -> None:
    exported = {name: metric for metric in EVERY for name in scraped(metric)}
    names = set(NAME.findall(expression))
    assert names
    assert names <= exported.keys()
    labels = {label for name in names for label in exported[name].labels} | _CONSTANT
    asked = re.findall(r"by \(([^)]*)\)", expression)
    assert {word.strip() for words in asked for word in words.split(",")} <= labels
    assert set(re.findall(r"(\w+)=~?\"", expression)) <= labels


def test_the_dashboard_has_panels_that_do_not_overlap() -> None:
    board = json.loads((ROOT / "deploy/grafana/paceline.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_page_on_metrics_is_what_the_code_says() -> None:
    assert PAGE.read_text() == page(), "run: python -m deploy.metric_docs"
