"""Imports point one way: a layer imports from itself and from layers before it, and no packages or files form a circle.

A package is a folder's own modules; a folder inside it is a package of its own. The runtime imports nothing that only a
compiling machine has.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from nestforge.profiles.backends import BACKENDS
from support.fake_cuda import ON_A_GPU

ROOT = Path(__file__).resolve().parents[2]
# Modules of the root, which everything shares, come before them all.
LAYERS = ("profiles", "bundle", "runtime", "integrations", "serving", "exporters", "compiler", "parity", "tools")
# Third-party packages per layer; torch and what comes with it stand only where a compiling machine is needed anyway.
DEVICE = {"numpy", "psutil", "yaml", "cuda", "tokenizers", *(backend.module for backend in BACKENDS.values())}
BUILD = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "ml_dtypes"}
OUTSIDE = {
    # onnx only to measure this host through ONNX Runtime, where it is installed: see test_lazy_imports
    "profiles": {"numpy", "psutil", "yaml", "onnxruntime", "onnx"},
    "bundle": {"numpy"},
    "runtime": {*DEVICE, "jinja2"} - {"yaml"},
    # what else they need is imported by name where it is requested: see optional.py
    "integrations": {"numpy", "rich"},
    "serving": {
        *("numpy", "starlette", "uvicorn", "grpc", "google", "tritonclient", "uvloop", "prometheus_client"),
        *("ray", "pydantic"),
    },
    "exporters": {"numpy", "huggingface_hub", *BUILD} - {"onnx"},
    "compiler": {"numpy", "onnxruntime", "tensorrt", "ray", *BUILD} - {"transformers"},
    # onnx, onnxruntime, openvino by name where an export is of their kind
    "parity": {"numpy", "psutil", "torch"},
    "tools": DEVICE | {"click", "rich", "gevent", "mlperf_loadgen", "tritonclient", "matplotlib"},
}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for layer in LAYERS
    for path in sorted((ROOT / layer).rglob("*.py"))
}


BASE = tuple(sorted(path.stem for path in ROOT.glob("*.py") if not path.stem.startswith("__")))


def layer_of(module: str) -> int:
    """The place of a module's layer; the root comes before all, and what names the public functions behind them."""
    first = module.split(".")[0]
    return LAYERS.index(first) if first in LAYERS else -1 if first in BASE else len(LAYERS)


def package_of(module: str) -> str:
    return (module.removesuffix(".__init__") if module.endswith("__init__") else module.rpartition(".")[0]) or module


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((FILES[module] if module in FILES else ROOT / f"{module}.py").read_text())


@cache
def imports(module: str) -> tuple[tuple[str, str, bool], ...]:
    """(own or outside, dotted name below nestforge or outside it, whether it runs when the module is imported)."""
    return tuple(_imports(tree_of(module), module.split(".")[:-1]))


def _imports(within: ast.AST, package: list[str], eager: bool = True) -> Iterator[tuple[str, str, bool]]:
    for node in ast.iter_child_nodes(within):
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
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            )
            yield from _imports(node, package, eager and not later)


def outside(module: str, only_eager: bool = False) -> set[str]:
    """Top-level packages that ``module`` imports."""
    found = [(name, eager) for kind, name, eager in imports(module) if kind == "outside"]
    return {name.split(".")[0] for name, eager in found if eager or not only_eager}


def test_imports_point_one_way() -> None:
    for module in FILES:
        for kind, name, _ in imports(module):
            if kind == "own" and name:  # without a name: the public functions, for the commands
                assert layer_of(name) <= layer_of(module), f"{module} imports {name}"
            assert kind != "own" or name or module.startswith("tools.")


def test_packages_form_no_circle() -> None:
    graph = defaultdict(set)
    for module in FILES:
        graph[package_of(module)] |= {package_of(name) for kind, name, _ in imports(module) if kind == "own"}
    TopologicalSorter({package: above - {package} for package, above in graph.items()}).prepare()


def test_files_form_no_circle() -> None:
    graph = {module: {name for kind, name, _ in imports(module) if kind == "own"} - {module} for module in FILES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_packages_from_outside_stay_in_their_layer() -> None:
    for module in FILES:
        assert outside(module) <= sys.stdlib_module_names | OUTSIDE[module.split(".")[0]]


def test_what_everything_shares_needs_nothing() -> None:
    for name in BASE:
        known = {"own": set(BASE), "outside": sys.stdlib_module_names}
        for kind, found, _ in imports(name):
            assert found.split(".")[0] in known[kind]


def test_what_a_device_may_lack_is_imported_where_it_is_used() -> None:
    for module in FILES:
        eager, layer = outside(module, only_eager=True), module.split(".")[0]
        if layer in {"profiles", "bundle", "runtime", "integrations", "tools"} and ".engines.onnxruntime" not in module:
            assert not eager & {*BUILD, "onnxruntime", "jinja2"}
        if module not in ON_A_GPU:
            assert not eager & {"tensorrt", "cuda"}, "needs a GPU's libraries to import"
        if layer == "tools":
            own = {name.split(".")[0] for kind, name, now in imports(module) if kind == "own" and now}
            assert not own & {"serving", "compiler", "exporters", "parity"}, "`nestforge run` would need torch"


def test_families_describe_without_torch() -> None:
    """`nestforge plan` reads headers, and of MHE models a few tensors in numpy: nothing that it loads loads torch."""
    families = "exporters.families"
    waiting = [m for m in FILES if package_of(m) == families or (m.startswith(families) and m.endswith("family"))]
    assert len(waiting) > 10
    waiting += ["exporters.source", "exporters.tasks"]
    seen = set(waiting)
    while waiting:
        module = waiting.pop()
        assert not outside(module, only_eager=True) & {"torch", "transformers", "onnx_ir"}, module
        reached = {name for kind, name, eager in imports(module) if kind == "own" and eager and name in FILES} - seen
        seen |= reached
        waiting += reached


def test_the_name_of_a_back_end_or_provider_is_tested_nowhere() -> None:
    """Differences between them are in their entries (profiles/backends.py, onnxruntime_gpu/provider.py)."""
    names = {*BACKENDS, "cuda", "cpu"}
    entries = {name.upper() for name in BACKENDS}
    for module in FILES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                each = [one for side in sides for one in (side.elts if isinstance(side, ast.Tuple) else [side])]
                compared = {one.value for one in each if isinstance(one, ast.Constant)}
                if not isinstance(node.ops[0], ast.In | ast.NotIn):
                    compared |= entries & {
                        part.id for one in each for part in ast.walk(one) if isinstance(part, ast.Name)
                    }
                assert not compared & (names | entries) or ".kind" in ast.unparse(node), (
                    f"{module}: {ast.unparse(node)}"
                )


def test_private_names_of_other_libraries_stand_in_few_modules() -> None:
    """Whoever moves to another release of a library looks there. Operators of ATen are called by their names."""
    may = {
        "exporters.torch_internals",  # torch
        "exporters.faster_export",  # torch.export and torch.onnx
        "exporters.hugging_face.transformers_internals",  # transformers
    }
    own = {name for module in FILES for name in _defined(tree_of(module))}
    own |= {"_asdict", "_exit", "_getframe", "_check"}  # of named tuples, os, sys and torch: documented
    for module in FILES:
        found = set()
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and _is_private(node.attr) and "aten" not in ast.unparse(node.value):
                is_register = node.attr in ("_buffers", "_modules", "_parameters") and not _is_self(node.value)
                found |= {f"x.{node.attr}"} if is_register or node.attr not in own else set()
        private = {name for name in found if any(map(_is_private, name.split(".")))}
        assert not private or module in may, f"{module} uses {private}"


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
