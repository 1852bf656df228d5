"""A device has numpy and a backend: nothing of the compiler may be needed, or even loaded where it is installed."""

import re
import subprocess
import sys
from pathlib import Path

import nestforge
import pytest
from nestforge import errors

FORBIDDEN = ["torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors"]
FORBIDDEN += ["nestforge.compiler", "nestforge.exporters", "nestforge.tools"]

HEADER = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {FORBIDDEN!r}:
            raise ImportError(name + " is not on this device")

sys.meta_path.insert(0, Absent())
"""

PROGRAMS = {
    "import": "import nestforge, nestforge.runtime",
    "answer": """
import nestforge, numpy as np
with nestforge.load(sys.argv[1], check="full", preload=True) as model:
    assert model("a nest of models", latency_ms=5).outputs
    assert model({"input_ids": np.zeros((1, 3), np.int64), "attention_mask": np.ones((1, 3), np.int64)}).padding
from nestforge.runtime.engines.measure import memory_use, measure
""",
    "compare": """
import pathlib, tempfile, nestforge
from nestforge.runtime.consistency.measure import consistency
with tempfile.TemporaryDirectory() as folder:
    texts = pathlib.Path(folder, "texts.txt")
    texts.write_text("\\n".join("a nest of models " * n + "a" for n in range(20)))
    assert consistency(nestforge.open_bundle(sys.argv[1]), text=texts).submodels[-1].figures["recall_at_10"] == 1
""",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_runtime_loads_nothing_of_the_compiler(tiny_bundle: Path, program: str) -> None:
    footer = f"print([name for name in {FORBIDDEN!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{HEADER}\n{program}\n{footer}", str(tiny_bundle)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_import_alone_loads_no_backend_either() -> None:
    program = """
import sys, nestforge, nestforge.runtime
nestforge.SelectionError
print([m for m in ("numpy", "onnxruntime") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_public_names_are_exactly_these() -> None:
    assert [name for name in sorted(nestforge.__all__) if not name.endswith("Error")] == [
        "Answer",
        "BudgetSpec",
        "Bundle",
        "CompileRequest",
        "ConversionSettings",
        "DraftedTokens",
        "ElasticModel",
        "Generated",
        "GeneratedRow",
        "Generation",
        "GenerationRequest",
        "Generator",
        "Index",
        "Limit",
        "ParityReport",
        "Piece",
        "Plan",
        "RowRun",
        "Run",
        "Session",
        "SubmodelInfo",
        "VerifyReport",
        "__version__",
        "add_task",
        "bench",
        "bench_requests",
        "calibrate",
        "calibrate_drafts",
        "check_parity",
        "compare",
        "compile",
        "consistency",
        "convert_coda",
        "index",
        "load",
        "measure",
        "nest",
        "open_bundle",
        "plan",
        "save_task",
        "search",
        "use_process_wide_threads",
        "verify",
    ]
    assert set(nestforge.__all__) <= set(dir(nestforge))
    assert sorted(nestforge.__all__) == nestforge.__all__
    of_compiling = {"VerifyReport", "add_task", "compile", "convert_coda", "nest", "save_task", "verify"}
    for name in set(nestforge.__all__) - of_compiling:  # these need the extra that brings torch
        assert getattr(nestforge, name) is not None
    with pytest.raises(AttributeError, match="module 'nestforge' has no attribute 'loads'"):
        nestforge.loads  # noqa: B018 - the access is the test


def test_every_error_is_a_public_name() -> None:
    tree = [errors.NestforgeError]
    for kind in tree:  # which grows as it is walked
        tree += [found for found in kind.__subclasses__() if found.__module__ == errors.__name__]
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert sorted(kind.__name__ for kind in tree) == sorted(["NestforgeError", *drawn])
    assert {name for name in nestforge.__all__ if name.endswith("Error")} == {kind.__name__ for kind in tree}
    for kind in tree:
        assert getattr(nestforge, kind.__name__) is kind
