"""Who may import whom, beyond what the import linter can say."""

import subprocess
import sys

from tests.unit import source_tree

VALUE_MODULES = {
    "engine.params",
    "engine.layout",
    "kv_transfer.ids",
    "kv_transfer.messages",
}
NOT_FOR_THE_ROUTER = ("torch", "transformers", "safetensors", "gguf", "nixl", "triton")


def test_wire_imports_only_value_modules_of_engine_and_kv_transfer() -> None:
    assert {
        f"{source_tree.name(path)} imports {module}"
        for path in source_tree.modules("wire")
        for module in source_tree.imported(source_tree.parse(path))
        if module.startswith(("engine.", "kv_transfer.")) and not _is_value(module)
    } == set()


def test_importing_every_router_module_loads_neither_torch_nor_a_model_library() -> None:
    modules = [
        source_tree.name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in source_tree.modules("router", "wire")
        if path.name not in {"__main__.py", "generate.py"}
    ]
    assert _loaded_by(modules) == []


def test_the_command_line_starts_without_torch() -> None:
    assert _loaded_by(["deploy.cli"]) == []


def _loaded_by(modules: list[str]) -> list[str]:
    """Which forbidden packages a fresh interpreter holds after importing `modules`."""
    program = (
        f"import sys\nimport {', '.join(modules)}\n"
        f"print(*(name for name in {NOT_FOR_THE_ROUTER!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=source_tree.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def _is_value(module: str) -> bool:
    return ".".join(module.split(".")[:2]) in VALUE_MODULES
