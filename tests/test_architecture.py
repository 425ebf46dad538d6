"""The import rules of the house, read from the source: who may import whom, and what must stay lazy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("chorus", "gateway", "engine", "adapters", "tenants")
ORDER = {"chorus": 4, "gateway": 3, "engine": 2, "adapters": 1, "tenants": 0}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _walk(node: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if _is_type_checking(child):
            continue
        if not lazy and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        yield child
        yield from _walk(child, lazy)


@cache
def imports(module: str, lazy: bool) -> frozenset[str]:
    """Names that `module` imports, those inside functions too if `lazy`; never those for type checking only."""
    names: set[str] = set()
    for node in _walk(ast.parse(modules()[module].read_text()), lazy):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in modules() else node.module or "")
    return frozenset(names)


def reached(module: str, lazy: bool) -> set[str]:
    """Everything that importing `module` may load, directly or not. A package that is loaded on the way to one of its
    modules runs its top level only."""
    seen: set[tuple[str, bool]] = set()
    todo = [(module, lazy)]
    while todo:
        current, is_lazy = todo.pop()
        for name in imports(current, is_lazy):
            parts = name.split(".")
            parents = [".".join(parts[:end]) for end in range(1, len(parts))]
            for found in [(parent, False) for parent in parents if parent in modules()] + [(name, lazy)]:
                if found not in seen:
                    seen.add(found)
                    if found[0] in modules():
                        todo.append(found)
    return {name for name, _ in seen}


def hits(names: set[str], *roots: str) -> set[str]:
    return {name for name in names if any(name == root or name.startswith(root + ".") for root in roots)}


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_downwards(module: str) -> None:
    """gateway → engine → adapters → tenants, never upwards."""
    level = ORDER[module.split(".")[0]]
    for name in imports(module, lazy=True):
        top = name.split(".")[0]
        assert ORDER.get(top, -1) <= level, f"{module} imports {name}"


@pytest.mark.parametrize("module", sorted(name for name in modules() if name.split(".")[0] == "engine"))
def test_engine_is_blind_to_tenants(module: str) -> None:
    """The engine never reaches SQL, Redis, HTTP or tenants, not even indirectly."""
    found = hits(
        reached(module, lazy=True), "tenants", "adapters.registry", "sqlalchemy", "redis", "fastapi", "starlette"
    )

    assert not found


@pytest.mark.parametrize(
    "name",
    [
        "spec",
        "storage",
        "stages",
        "bucket",
        "bucket_store",
        "disk_cache",
        "sources",
        "validation",
        "loader",
        "residency",
    ],
)
def test_adapter_files_are_blind_to_the_database(name: str) -> None:
    """Everything about adapter files works without the database."""
    assert not hits(reached(f"adapters.{name}", lazy=True), "adapters.registry", "tenants", "sqlalchemy")


@pytest.mark.parametrize(
    "module",
    ["engine.scheduler", "engine.admission", "engine.preemption", "engine.ageing", "engine.progress",
     "engine.lanes", "engine.block_pool", "engine.sequence", "engine.protocol", "engine.step",
     "engine.kv_tiers", "engine.kv_traffic", "engine.kv_host_pool", "engine.kv_disk_index", "engine.cost_model",
     "engine.params", "adapters.residency"],
)  # fmt: skip
def test_policy_needs_no_torch(module: str) -> None:
    """Scheduling and residency are numbers only."""
    assert not hits(reached(module, lazy=True), "torch", "numpy")


@pytest.mark.parametrize("module", sorted(modules()))
def test_kernels_and_sockets_stay_in_their_rooms(module: str) -> None:
    """triton only in engine/ops and lazily; zmq only at the two ends of the border; nothing global at import."""
    if not module.startswith("engine.ops"):
        assert not hits(set(imports(module, lazy=True)), "triton")
    if module not in ("engine.server", "engine.client"):
        assert not hits(set(imports(module, lazy=True)), "zmq")


@pytest.mark.parametrize("module", sorted(modules()))
def test_environment_is_read_in_two_places(module: str) -> None:
    """Only gateway/settings.py and the CLI read the environment."""
    if module in ("gateway.settings", "gateway.cli") or module.startswith("gateway.cli."):
        return
    used = [
        node.lineno
        for node in ast.walk(ast.parse(modules()[module].read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and ast.unparse(node.value) == "os"
    ]

    assert not used


def test_core_order_inside_the_engine() -> None:
    """llm, server > core > scheduler, runner > the rest; model > ops."""
    assert not hits(reached("engine.core", lazy=True), "engine.llm", "engine.server")
    assert not hits(reached("engine.scheduler", lazy=True), "engine.core", "engine.runner")
    assert not hits(reached("engine.runner", lazy=True), "engine.core", "engine.scheduler")
    for module in modules():
        if module.startswith("engine.ops"):
            assert not hits(reached(module, lazy=True), "engine.model", "engine.runner", "engine.scheduler")


@pytest.mark.parametrize("module", ["gateway.app", "engine.protocol", "engine.client", "engine", "chorus"])
def test_torch_is_never_loaded(module: str) -> None:
    """The gateway process, and whoever speaks the protocol, never pays for torch."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("module", sorted(modules()))
def test_every_module_says_what_it_is(module: str) -> None:
    """The first line of a file is its caption."""
    assert ast.get_docstring(ast.parse(modules()[module].read_text()))
