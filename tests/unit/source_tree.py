"""Reads our own source for the tests that hold it to its budgets."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = (
    "engine",
    "wire",
    "speculative",
    "kv_transfer",
    "prefill_node",
    "decode_node",
    "router",
    "deploy",
    "bench",
)
GENERATED = ROOT / "wire" / "gen"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(*packages: str) -> list[Path]:
    """Hand-written modules of the packages (all of ours by default), in order."""
    found = [path for package in packages or PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if GENERATED not in path.parents]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.Module) -> set[str]:
    """Dotted names of every module a tree imports; `from a import b` counts as `a` and `a.b`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found
