"""Size budgets and the habits that decay a codebase one parameter at a time."""

import ast
import re

from tests.unit import source_tree

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 7

ALGORITHMS = (
    "ngram",
    "eagle",
    "eagle3",
    "mtp",
    "nextn",
    "standalone",
    "frozen_kv",
    "dflash",
    "dspark",
    "uno",
)
MAY_NAME_ALGORITHMS = ("speculative/registry.py", "speculative/drafts/", "speculative/train/", "bench/")


def test_no_module_is_longer_than_500_lines() -> None:
    lengths = {source_tree.name(path): len(path.read_text().splitlines()) for path in source_tree.modules()}
    assert {name: length for name, length in lengths.items() if length > MAX_MODULE_LINES} == {}


def test_no_function_but_a_kernel_is_longer_than_60_lines() -> None:
    assert [
        f"{source_tree.name(path)}:{function.lineno} {function.name}: {_length(function)} lines"
        for path in source_tree.modules()
        for function in source_tree.functions(source_tree.parse(path))
        if _length(function) > MAX_FUNCTION_LINES and not _is_kernel(function)
    ] == []


def test_no_function_but_a_kernel_takes_more_than_7_arguments() -> None:
    assert [
        f"{source_tree.name(path)}:{function.lineno} {function.name}: {_arguments(function)} arguments"
        for path in source_tree.modules()
        for function in source_tree.functions(source_tree.parse(path))
        if _arguments(function) > MAX_ARGUMENTS and not _is_kernel(function)
    ] == []


def test_no_class_is_a_mixin() -> None:
    assert [
        f"{source_tree.name(path)}:{node.lineno} {node.name}"
        for path in source_tree.modules()
        for node in ast.walk(source_tree.parse(path))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Mixin")
    ] == []


def test_no_attribute_is_looked_up_by_a_literal_name() -> None:
    assert [
        f"{source_tree.name(path)}:{node.lineno} {node.func.id}"
        for path in source_tree.modules()
        for node in ast.walk(source_tree.parse(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"hasattr", "getattr"}
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    ] == []


def test_no_algorithm_is_named_outside_its_module_the_registry_and_configuration() -> None:
    pattern = re.compile(rf"(?<![a-z])({'|'.join(ALGORITHMS)})(?![a-z])", re.IGNORECASE)
    assert [
        f"{name}:{number} {match[0]}"
        for name, text in ((source_tree.name(path), path.read_text()) for path in source_tree.modules())
        if not name.startswith(MAY_NAME_ALGORITHMS) and not name.endswith("/config.py")
        for number, line in enumerate(text.splitlines(), start=1)
        for match in pattern.finditer(line)
        if not _is_own_module(name, match[0])
    ] == []


def _is_own_module(name: str, algorithm: str) -> bool:
    own = {"nextn": "mtp"}.get(algorithm.lower(), algorithm.lower())  # two names of one algorithm
    return name.startswith("speculative/") and own in name


def _length(function: source_tree.Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def _arguments(function: source_tree.Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in named if argument.arg not in {"self", "cls"}])


def _is_kernel(function: source_tree.Function) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)
