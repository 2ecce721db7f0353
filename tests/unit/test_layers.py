"""Who may import whom, beyond what the import linter can say."""

import subprocess
import sys

from tests.unit import source_tree

VALUE_MODULES = {
    "engine.grammar_spec",
    "engine.json_schema",
    "engine.layout",
    "engine.page_hash",
    "engine.params",
    "engine.vocabulary",
    "kv_transfer.ids",
    "kv_transfer.messages",
}
NODE_SIDE = {
    "wire/arrivals.py",
    "wire/core_counts.py",
    "wire/desk.py",
    "wire/intake.py",
    "wire/node_app.py",
    "wire/node_facts.py",
    "wire/peering.py",
    "wire/reports.py",
}  # what both nodes share; no router module may reach it
NOT_FOR_THE_ROUTER = ("torch", "transformers", "safetensors", "gguf", "nixl", "triton")


def test_wire_imports_only_value_modules_of_engine_and_kv_transfer() -> None:
    assert {
        f"{source_tree.name(path)} imports {module}"
        for path in source_tree.modules("wire")
        if source_tree.name(path) not in NODE_SIDE
        for module in source_tree.imported(source_tree.parse(path))
        if module.startswith(("engine.", "kv_transfer.")) and not _is_value(module)
    } == set()


def test_importing_every_router_module_loads_neither_torch_nor_a_model_library() -> None:
    assert sorted(loaded_by(router_modules()) & set(NOT_FOR_THE_ROUTER)) == []


def test_importing_every_router_module_loads_only_value_modules_of_the_node_packages() -> None:
    packages = {"engine", "kv_transfer", "speculative", "prefill_node", "decode_node"}
    loaded = {name for name in loaded_by(router_modules()) if name.split(".")[0] in packages}
    assert loaded - packages - VALUE_MODULES == set()


def test_the_command_line_starts_without_torch() -> None:
    assert sorted(loaded_by(["deploy.cli"]) & set(NOT_FOR_THE_ROUTER)) == []


def router_modules() -> list[str]:
    return [
        source_tree.name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in source_tree.modules("router")
    ]


def loaded_by(modules: list[str]) -> set[str]:
    """What a fresh interpreter holds after importing `modules`."""
    program = f"import sys\nimport {', '.join(modules)}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=source_tree.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def _is_value(module: str) -> bool:
    return ".".join(module.split(".")[:2]) in VALUE_MODULES
