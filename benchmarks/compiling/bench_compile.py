"""CPU seconds of a compile of one submodel at one range, over those of ``torch.onnx.export`` alone."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from ...examples.encoder.corpus import demo_checkpoint
from ...profiles.probe_host import host_profile
from ..harness import Row

_ROUNDS = 3
_RANGE = "1x1..512"
# The same module, exported and saved as most people do it, with the same dimensions free.
_EXPORT = """
import sys, torch
from torch.export import Dim
from nestforge.bucket import Bucket
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
model, output, shapes = sys.argv[1:]
universal, bucket = load_universal(open_source(model)), Bucket.parse(shapes)
signature = universal.source.signature
dims = {1: Dim("sequence", min=1, max=bucket.sequence)}
program = torch.onnx.export(
    universal.module,
    tuple(torch.ones(1, 9, dtype=torch.int64) for _ in signature.inputs),
    dynamo=True,
    input_names=[spec.name for spec in signature.inputs],
    output_names=[spec.name for spec in signature.outputs],
    dynamic_shapes=(tuple(dict(dims) for _ in signature.inputs),),
    verbose=False,
)
program.save(output, external_data=True)
"""


def run() -> list[Row]:
    host_profile()  # measured once and kept: no part of a compile
    taken = [(_cpu_seconds(_exported), _cpu_seconds(_compiled), _cpu_seconds(_unmeasured)) for _ in range(_ROUNDS)]
    export = median(each[0] for each in taken)
    rows = []
    for place, what in ((1, ""), (2, ", --no-measure")):
        ratio = median(each[place] / each[0] for each in taken)
        ours = median(each[place] for each in taken)
        rows.append(
            Row(
                f"compile MiniLM, one submodel at {_RANGE}{what}: CPU seconds over torch.onnx.export's",
                f"{ratio:.2f}x ({ours:.0f} s against {export:.0f} s)",
                "<= 2x",
                ratio <= 2,
                f"user and system time of whole processes, in turns, median of {_ROUNDS}",
            )
        )
    return rows


def _exported(output: Path) -> list[str]:
    return ["-c", _EXPORT, str(demo_checkpoint()), str(output), _RANGE]


def _compiled(output: Path) -> list[str]:
    one = ("--include", "budgets", "--budget", "parameters<=100 %", "--bucket", _RANGE)
    return ["-m", "nestforge", "compile", str(demo_checkpoint()), "--output", str(output), *one]


def _unmeasured(output: Path) -> list[str]:
    return [*_compiled(output), "--no-measure"]


def _cpu_seconds(command: Callable[[Path], Sequence[str]]) -> float:
    """Of one Python process that writes its output to a new path, all threads and its imports included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, *command(Path(folder) / "output")]
        # As `nestforge compile` has it of itself: threads that spin would count against torch.onnx.export alone.
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        subprocess.run(arguments, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
