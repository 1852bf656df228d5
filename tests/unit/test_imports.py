"""Imports point one way: a module imports from its own room, and from rooms that come before it in ``ROOMS``.

A room is a folder's own modules; a folder inside it is a room of its own. No two files import each other, however long
the way. What the device runs imports nothing that only a compiling machine has.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support.gpu_modules import ON_A_GPU

ROOT = Path(__file__).resolve().parents[2]
BASE = (
    "argument_types",
    "bucket",
    "elastic",
    "errors",
    "file_lock",
    "optional",
    "notebook",
    "outside",
    "outside_file",
    "ownership",
    "path_kinds",
    "strict",
    "whole_file",
    "workload",
)
# Each may import those above it.
ROOMS = (
    "profiles",
    "runtime.bundle.entries",
    "runtime.bundle",
    "runtime.bundle.device_files",
    "runtime.summary",
    "runtime.inputs",
    "runtime.graphs",
    "runtime.device",
    "runtime.engines.contract",
    "runtime.engines.onnxruntime",
    "runtime.engines.onnxruntime_gpu",
    "runtime.engines.tensorrt",
    "runtime.engines",
    "runtime.exits",
    "runtime.choosing",
    "runtime.consistency",
    "runtime.generation.sources",
    "runtime.generation",
    "runtime.generation.calls",
    "runtime.generation.drafting",
    "runtime.generation.loop",
    "runtime",
    "runtime.calibrate",
    "runtime.retrieval",
    "integrations",
    "exporters.checkpoints",
    "exporters.sentence_transformers",
    "exporters.tasks",
    "exporters",
    "exporters.for_tasks",
    "exporters.modules",
    "exporters.hugging_face",
    "exporters.tracing",
    "exporters.families.bert",
    "exporters.families.coda.architecture",
    "exporters.families.coda.model",
    "exporters.families.coda",
    "exporters.families.cost_eff",
    "exporters.families.gated_decoder",
    "exporters.families.gpt2",
    "exporters.families.matformer.architecture",
    "exporters.families.matformer.model",
    "exporters.families.matformer",
    "exporters.families.mhe.architecture",
    "exporters.families.mhe.model",
    "exporters.families.mhe",
    "exporters.families.sparse_mixer.architecture",
    "exporters.families.sparse_mixer.model",
    "exporters.families.sparse_mixer",
    "exporters.families.t5",
    "exporters.families.vit",
    "exporters.families.coda_encoder_decoder",
    "exporters.families.coda.conversion",
    "compiler.work",
    "compiler.planning",
    "compiler.graph.passes",
    "compiler.graph.passes.cached",
    "compiler.graph",
    "compiler.graph.precision",
    "compiler.examples",
    "compiler.parity.evidence",
    "compiler.parity",
    "compiler.tensorrt",
    "compiler.build",
    "compiler.generation",
    "compiler.publish",
    "compiler.tasks",
    "compiler.nest",
    "compiler",
    "tools",
    "tools.commands.compiling",
    "tools.commands.answering",
    "tools.commands.measuring",
    "tools.commands",
)
LAYERS = ("profiles", "runtime", "integrations", "exporters", "compiler", "tools")
# Third-party packages per layer; torch and what comes with it stand only where a compiling machine is needed anyway.
DEVICE = {"numpy", "psutil", "yaml", "onnxruntime", "tensorrt", "cuda", "tokenizers"}
BUILD = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "ml_dtypes"}
OUTSIDE = {
    # onnx only to measure this host through ONNX Runtime, where it is installed: see test_lazy_imports
    "profiles": {"numpy", "psutil", "yaml", "onnxruntime", "onnx"},
    "runtime": {*DEVICE, "jinja2"} - {"yaml"},
    # what else they need is imported by name where it is asked for: see optional.py
    "integrations": {"numpy", "rich"},
    "exporters": {"numpy", *BUILD} - {"onnx"},
    "compiler": {"numpy", "onnxruntime", "tensorrt", *BUILD} - {"transformers"},
    "tools": DEVICE | {"click", "rich", "matplotlib"},
}
# Imported where an engine is opened in ONNX Runtime.
IN_ONNX_RUNTIME = {
    *(f"runtime.engines.onnxruntime.{name}" for name in ("runner", "session", "task_inputs")),
    *(f"runtime.engines.onnxruntime_gpu.{name}" for name in ("runner", "session", "bound")),
}
# `nestforge plan` reads headers, and of MHE models a few tensors in numpy: what it imports must not load torch.
TORCH_FREE = {
    *("exporters.family", "exporters.source", "exporters.exits", "exporters.presets"),
    *("exporters.families.matformer.architecture", "exporters.families.sparse_mixer.architecture"),
    *("exporters.families.mhe.architecture", "exporters.families.coda.architecture"),
}
# Run from a checkout and not shipped, so they may use whatever a developer has.
DEVELOPER = {"bench", "demo", "train"}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for layer in LAYERS
    for path in sorted((ROOT / layer).rglob("*.py"))
    if not DEVELOPER & set(path.relative_to(ROOT).parts)
}


def room_of(module: str) -> str:
    """The room of a module, or the module itself where it is one of those that everything shares."""
    name = module.removesuffix(".__init__")
    if name in ROOMS:
        return name
    return name.rpartition(".")[0] or name


@cache
def imports(module: str) -> tuple[tuple[str, str, bool], ...]:
    """(own or outside, dotted name below nestforge or outside it, whether it runs when the module is imported)."""
    return tuple(_imports(module))


def _imports(module: str) -> Iterator[tuple[str, str, bool]]:
    tree = ast.parse((FILES[module] if module in FILES else ROOT / f"{module}.py").read_text())
    lazy = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    typing_only = {
        id(n)
        for f in ast.walk(tree)
        if isinstance(f, ast.If) and "TYPE_CHECKING" in ast.unparse(f.test)
        for n in ast.walk(f)
    }
    package = module.split(".")[:-1]
    for node in ast.walk(tree):
        eager = id(node) not in lazy | typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield "outside", alias.name, eager
        elif isinstance(node, ast.ImportFrom) and node.level:
            parent = package[: len(package) - node.level + 1]
            target = ".".join([*parent, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                below = f"{target}.{alias.name}".removeprefix(".")
                yield "own", below if below in FILES or below in BASE else target, eager
        elif isinstance(node, ast.ImportFrom):
            yield "outside", node.module or "", eager


def outside(module: str, only_eager: bool = False) -> set[str]:
    """Top-level packages that ``module`` imports."""
    found = [(name, eager) for kind, name, eager in imports(module) if kind == "outside"]
    return {name.split(".")[0] for name, eager in found if eager or not only_eager}


def test_the_architecture_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [room.replace(".", "/") for room in ROOMS if not room.startswith("exporters.families.")]
    places = [text.rindex(f"`{room}`") for room in rooms]
    assert places == sorted(places), "another order than ROOMS"


def test_every_module_is_in_a_room() -> None:
    assert {room_of(module) for module in FILES} == set(ROOMS)
    assert {path.stem for path in ROOT.glob("*.py")} == {*BASE, "__init__", "__main__"}
    assert set(FILES) > ON_A_GPU


@pytest.mark.parametrize("module", FILES)
def test_imports_point_one_way(module: str) -> None:
    room = room_of(module)
    allowed = {*BASE, *ROOMS[: ROOMS.index(room) + 1]} | ({""} if room.startswith("tools") else set())
    for kind, name, _ in imports(module):
        if kind == "own":
            assert name in allowed or room_of(name) in allowed, f"{module} imports {name}"


def test_no_circle_between_files() -> None:
    graph = {module: {name for kind, name, _ in imports(module) if kind == "own"} - {module} for module in FILES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("room", [room for room in ROOMS if not room.startswith("tools")])
def test_a_room_has_about_a_dozen_modules(room: str) -> None:
    modules = [module for module in FILES if room_of(module) == room and not module.endswith("__init__")]
    assert len(modules) <= 16


@pytest.mark.parametrize("module", FILES)
def test_packages_from_outside_stay_in_their_layer(module: str) -> None:
    assert outside(module) <= sys.stdlib_module_names | OUTSIDE[module.split(".")[0]]


@pytest.mark.parametrize("name", BASE)
def test_what_everything_shares_needs_nothing(name: str) -> None:
    known = {"own": set(BASE), "outside": sys.stdlib_module_names}
    for kind, found, _ in imports(name):
        assert found.split(".")[0] in known[kind]


@pytest.mark.parametrize("module", FILES)
def test_what_a_device_may_lack_is_imported_where_it_is_used(module: str) -> None:
    eager, layer = outside(module, only_eager=True), module.split(".")[0]
    if layer in {"profiles", "runtime", "integrations", "tools"} and module not in IN_ONNX_RUNTIME:
        assert not eager & {*BUILD, "onnxruntime", "matplotlib", "jinja2"}
    if module not in ON_A_GPU:
        assert not eager & {"tensorrt", "cuda"}, "needs a GPU's libraries to import"
    if layer == "tools":
        own = {name.split(".")[0] for kind, name, now in imports(module) if kind == "own" and now}
        assert not own & {"compiler", "exporters"}, "`nestforge run` would need torch"


def test_families_describe_without_torch() -> None:
    found = [m for m in FILES if m in TORCH_FREE or room_of(m) in TORCH_FREE or m.endswith("family")]
    assert len(found) > len(TORCH_FREE)
    for module in found:
        assert not outside(module, only_eager=True) & {"torch", "transformers", "onnx_ir"}
