"""Every call that the TensorRT back end makes exists in NVIDIA's own bindings, of 10.3, 10.16 and 11.4.

What this proves: each class, enumerator, property, method, keyword and number of arguments that our modules use is
there, with types that fit, and methods that TensorRT calls back have the names and parameters that it calls. mypy
infers them, so no list of them can be forgotten. The interface of 11.4 is read from the installed bindings, those of
10.3 and 10.16 are records of their bindings (see tests/support/tensorrt_api.py).

What it does not prove: that TensorRT does what the names promise. No library of TensorRT is loaded, no plan is built
or run, and what its docstrings leave out, such as which calls may return None, is our reading of its documentation.
CUDA's functions are checked by name and number of arguments alone.
"""

import ast
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tensorrt_api import RECORDS, ROOT, importers, surface_of, touched, write_stubs

RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's bindings exist for Linux")


# One of each kind: what was removed in 11, a wrong name, keyword, count, type, and a wrong callback.
MISTAKES = """
import tensorrt as trt

class Monitor(trt.IProgressMonitor):
    def step_complete(self, phase_name: str) -> bool:
        return True

def use(builder: trt.Builder, config: trt.IBuilderConfig, context: trt.IExecutionContext) -> None:
    config.set_flag(trt.BuilderFlag.FP16)
    context.execute_async_v4(0)
    builder.create_network(flag=0)
    context.set_tensor_address("input")
    config.builder_optimization_level = "high"
    config.max_threads = 4
    context.engine.num_layers = 3
"""


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    return surface_of()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, installed: dict[str, Any]) -> dict[str, list[str]]:
    """Findings of mypy, by release, in our modules as they would be with that release; one run for all of them."""
    ours = {path.relative_to(ROOT).as_posix(): path.read_text() for path in importers("tensorrt")}
    # As a record holds it.
    surfaces = {"installed": touched(installed, ours.values()), **RECORDED, "mistakes": installed}
    assert len(surfaces["installed"]["classes"]) < len(installed["classes"]) / 3
    folder = tmp_path_factory.mktemp("contract")
    for number, (release, surface) in enumerate(surfaces.items()):
        stub = f"tensorrt{number}"
        write_stubs(surface, folder / stub)
        for name, text in {"mistakes.py": MISTAKES}.items() if release == "mistakes" else ours.items():
            assert text.count("import tensorrt as trt") == 1, name
            copy = folder / f"release{number}" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text.replace("import tensorrt as trt", f"import {stub} as trt"))
    said = mypy(folder)
    return {
        release: [line for line in said if line.startswith((f"release{number}/", f"tensorrt{number}/"))]
        for number, release in enumerate(surfaces)
    }


def mypy(folder: Path) -> list[str]:
    """One line for each error in ``folder``, and how many there are."""
    config = folder / "mypy.ini"
    # Their other imports do not matter here, and reading numpy's types alone takes half a minute.
    config.write_text(
        "[mypy]\nfollow_imports = skip\nignore_missing_imports = true\ncheck_untyped_defs = true\n"
        "namespace_packages = true\nexplicit_package_bases = true\n"
        + "".join(f"[mypy-{stub.name}.*]\nfollow_imports = normal\n" for stub in folder.glob("tensorrt*"))
    )
    modules = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", os.devnull, *modules]
    done = subprocess.run(
        command, cwd=folder, env={"MYPYPATH": str(folder)}, capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).splitlines()
    assert lines[-1].endswith(f"(checked {len(modules)} source files)"), lines
    return lines


def test_the_installed_release_has_what_we_use(installed: dict[str, Any], found: dict[str, list[str]]) -> None:
    assert installed["version"].startswith("11.4.")
    assert found["installed"] == []


@pytest.mark.parametrize("release", RECORDED)
def test_older_releases_have_what_we_use(release: str, found: dict[str, list[str]]) -> None:
    """After a change of the back end that fails here alone, record again: see tests/support/tensorrt_api.py."""
    assert found[release] == []


def test_mistakes_are_found(found: dict[str, list[str]]) -> None:
    lines = [line.partition(": error: ")[2] for line in found["mistakes"] if ": error: " in line]
    assert [line.rpartition("  [")[2].rstrip("]") for line in lines] == [
        *("override", "attr-defined", "attr-defined", "call-arg", "call-arg", "assignment", "attr-defined", "misc")
    ]


def test_records_are_of_the_oldest_release_that_we_name_and_of_the_last_10() -> None:
    assert {release: surface["version"] for release, surface in RECORDED.items()} == {
        "10.16.1.11": "10.16.1.11",
        "10.3.0": "10.3.0",
    }
    assert '"tensorrt>=10.3,<12"' in (ROOT / "pyproject.toml").read_text()


def test_every_level_of_compatibility_exists_or_is_refused_by_name(installed: dict[str, Any]) -> None:
    """These are looked up by name, which no type shows; 10.3 lacks one, and ``build_plan`` says so."""
    source = ast.parse((ROOT / "compiler" / "tensorrt" / "build_plan.py").read_text())
    (table,) = (
        n.value
        for n in source.body
        if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "_COMPATIBILITY_LEVELS"
    )
    assert table is not None
    levels = set(ast.literal_eval(table).values())
    assert levels <= installed["classes"]["HardwareCompatibilityLevel"]["members"].keys()
    oldest = RECORDED["10.3.0"]["classes"]["HardwareCompatibilityLevel"]["members"].keys()
    assert levels - oldest == {"SAME_COMPUTE_CAPABILITY"}


def test_types_of_tensors_are_those_of_the_bindings(installed: dict[str, Any]) -> None:
    from nestforge.bundle.entries.tensor_spec import DTYPES as in_manifest
    from nestforge.runtime.engines.tensorrt.layout import DTYPES

    assert tuple(DTYPES) == in_manifest
    for name in DTYPES.values():
        assert name in installed["classes"]["DataType"]["members"]


def cuda_calls() -> Iterator[tuple[str, int | None]]:
    """Names that we take from CUDA's bindings, with the number of arguments where they are called."""
    for path in importers("cuda"):
        tree = ast.parse(path.read_text())
        called = {id(node.func): len(node.args) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("cudart."):
                yield ast.unparse(node).removeprefix("cudart."), called.get(id(node))


def test_cuda_has_what_we_use() -> None:
    from cuda.bindings import runtime as cudart

    calls = sorted(set(cuda_calls()), key=str)
    assert len(calls) > 20
    for name, arguments in calls:
        value: Any = cudart
        for part in name.split("."):
            value = getattr(value, part)
        if arguments is not None:
            assert len(inspect.signature(value).parameters) == arguments, name


def test_without_a_gpu_cuda_says_so_in_one_line() -> None:
    from cuda.bindings import runtime as cudart
    from nestforge.errors import BundleError
    from nestforge.runtime.device.cuda_memory import checked, use_device

    if cudart.cudaGetDeviceCount()[1]:
        pytest.skip("this host has a GPU")
    with pytest.raises(BundleError, match=r"^CUDA: choosing the GPU: [^\n]+$"):
        use_device(0)
    with pytest.raises(BundleError, match=r"^CUDA: copying inputs: invalid argument$"):
        checked("copying inputs", (cudart.cudaError_t.cudaErrorInvalidValue,))
