"""Imports point one way: what everything shares <- profiles <- runtime <- exporters <- compiler <- tools.

A package may import those before it in this row and itself, and no other. Of the runtime the exporters may use the
manifest's types alone. What the device runs imports nothing that only a compiling machine has.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE = ("elastic", "errors", "file_lock", "outside", "strict", "whole_file", "workload")
ROW = ("profiles", "runtime", "exporters", "compiler", "tools")
# Third-party packages per layer; torch and what comes with it stand only where a compiling machine is needed anyway.
DEVICE = {"numpy", "psutil", "yaml", "onnxruntime", "tensorrt", "cuda", "tokenizers"}
BUILD = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "ml_dtypes"}
OUTSIDE = {
    # onnx only to measure this host through ONNX Runtime, where it is installed: see test_lazy_imports
    "profiles": {"numpy", "psutil", "yaml", "onnxruntime", "onnx"},
    "runtime": DEVICE - {"yaml"},
    "exporters": {"numpy", "torch", "transformers", "onnx_ir", "onnxscript", "safetensors"},
    "compiler": {"numpy", "onnxruntime", "tensorrt", *BUILD} - {"transformers"},
    "tools": DEVICE | {"click", "rich", "matplotlib"},
}
# Imported where a plan is built or opened, never before TensorRT was found.
ON_A_GPU = {
    *("cuda_memory", "cuda_device", "tensorrt_engine", "tensorrt_lane", "tensorrt_bound", "tensorrt_runner"),
    *("build_plan", "timing_cache"),
}
# Imported where an engine is opened in ONNX Runtime.
IN_ONNX_RUNTIME = {
    *("onnxruntime_runner", "onnxruntime_gpu_runner", "onnxruntime_gpu_session", "onnxruntime_gpu_bound"),
}
# Run from a checkout and not shipped, so they may use whatever a developer has.
DEVELOPER = {"bench", "demo", "train"}
FILES = sorted(
    path for package in ROW for path in (ROOT / package).rglob("*.py") if not DEVELOPER & set(path.parts[-3:])
)


def imports(path: Path) -> Iterator[tuple[str, str, bool]]:
    """(own or outside, dotted name below nestforge or outside it, whether it runs when the module is imported)."""
    tree = ast.parse(path.read_text())
    lazy = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    typing_only = {
        id(n)
        for f in ast.walk(tree)
        if isinstance(f, ast.If) and "TYPE_CHECKING" in ast.unparse(f.test)
        for n in ast.walk(f)
    }
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        eager = id(node) not in lazy | typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield "outside", alias.name, eager
        elif isinstance(node, ast.ImportFrom) and node.level:
            parent = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                yield "own", ".".join((*parent, name)), eager
        elif isinstance(node, ast.ImportFrom):
            yield "outside", node.module or "", eager


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def test_every_folder_of_the_package_has_its_place_in_the_row() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "docs", "build", "dist", "demo"}
    assert packages == set(ROW)
    assert {path.stem for path in ROOT.glob("*.py")} == {*BASE, "__init__", "__main__"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    layer = layer_of(path)
    allowed = {*BASE, *ROW[: ROW.index(layer) + 1]} | ({"__version__", "__init__"} if layer == "tools" else set())
    for kind, name, _ in imports(path):
        if kind == "own":
            assert name.split(".")[0] in allowed, f"{layer} imports {name}"
            if layer == "exporters" and name.startswith("runtime"):
                assert name == "runtime.manifest"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_from_outside_stay_in_their_layer(path: Path) -> None:
    known = sys.stdlib_module_names | OUTSIDE[layer_of(path)]
    assert {name.split(".")[0] for kind, name, _ in imports(path) if kind == "outside"} <= known


@pytest.mark.parametrize("name", BASE)
def test_what_everything_shares_needs_nothing(name: str) -> None:
    known = {"own": set(BASE), "outside": sys.stdlib_module_names}
    for kind, found, _ in imports(ROOT / f"{name}.py"):
        assert found.split(".")[0] in known[kind]


def test_lazy_imports() -> None:
    """What a device may lack is imported where it is used: importing profiles, runtime or tools loads none of it."""
    for path in FILES:
        if layer_of(path) in {"profiles", "runtime", "tools"} and path.stem not in IN_ONNX_RUNTIME:
            eager = {name.split(".")[0] for kind, name, eager in imports(path) if kind == "outside" and eager}
            assert not eager & {*BUILD, "onnxruntime", "matplotlib"}, path
    for path in FILES:
        eager = {name.split(".")[0] for kind, name, eager in imports(path) if kind == "outside" and eager}
        assert not eager & {"tensorrt", "cuda"} or path.stem in ON_A_GPU, f"{path}: needs a GPU's libraries to import"
    for path in (ROOT / "tools").rglob("*.py"):
        eager = {name.split(".")[0] for kind, name, eager in imports(path) if kind == "own" and eager}
        if path in FILES:
            assert not eager & {"compiler", "exporters"}, f"{path}: `nestforge run` would need torch"


def test_families_describe_without_torch() -> None:
    """`nestforge plan` reads headers alone, so what it imports must not load torch."""
    torch_free = ["checkpoint", "family", "source", "families/bert"]
    for name in torch_free:
        eager = {found.split(".")[0] for _, found, eager in imports(ROOT / "exporters" / f"{name}.py") if eager}
        assert not eager & {"torch", "transformers", "onnx_ir"}
