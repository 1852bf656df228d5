"""Memory of a process that generates: one width against others, and eight widths against the largest alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from .. import load
from ..profiles.precision import Precision
from ..runtime.engines.residency import Residency
from .harness import Row, benchmark
from .peers import WIDTHS, genai_folder, llama_bundle, llama_folder, llama_widths_bundle
from .subjects import CORES

_PROMPT, _NEW = 64, 64
_ROUNDS = 5
# Growth of resident memory from before the model is loaded to the last token; libraries are imported before.
_OURS = """
import json, sys
from nestforge import load
from nestforge.runtime.engines.measure import _memory_of_this_process
path, residency, submodels, threads, prompt, tokens = json.loads(sys.argv[1])
import onnxruntime, tokenizers
before = _memory_of_this_process()
with load(path, threads=threads, residency=residency) as model:
    for submodel in submodels:
        model.generate(prompt, max_tokens=tokens, stop=[], submodel=submodel)
    after = _memory_of_this_process()
print(after[1] - before[1])
"""
_GENAI = """
import json, sys
import onnxruntime_genai as library
from nestforge.runtime.engines.measure import _memory_of_this_process
path, prompt, tokens = json.loads(sys.argv[1])
before = _memory_of_this_process()
model = library.Model(path)
options = library.GeneratorParams(model)
options.set_search_options(max_length=len(prompt) + tokens + 1, do_sample=False)
generator = library.Generator(model, options)
generator.append_tokens(prompt)
for _ in range(tokens):
    generator.generate_next_token()
after = _memory_of_this_process()
print(after[1] - before[1])
"""


@benchmark
def bench_generate_memory() -> list[Row]:
    """Memory of a process that generates: one width against others, and eight widths against the largest alone."""
    rows = [row for precision in ("fp32", "int4") for row in _against_genai(precision)]
    return [*rows, *_eight_widths("fp32"), *_eight_widths("int8-dynamic")]


def _against_genai(precision: Precision) -> list[Row]:
    """One width generating, over ONNX Runtime GenAI; nothing where that is not installed."""
    if find_spec("onnxruntime_genai") is None:
        return []
    ours = _grown(_OURS, _asked(llama_bundle(precision), "auto", WIDTHS[-1:]))
    theirs = _grown(_GENAI, [str(genai_folder(llama_folder(), precision)), _prompt(), _NEW])
    return [
        Row(
            f"resident memory generating, one width, over onnxruntime-genai, {precision}",
            f"{ours / theirs:.2f}x ({ours / 1e6:.0f} MB against {theirs / 1e6:.0f} MB)",
            "<= 1.00x",
            ours <= theirs,
            f"growth of a process each, prompt of {_PROMPT}, {_NEW} tokens, Llama shape of 100 M parameters",
        )
    ]


def _eight_widths(precision: Precision) -> list[Row]:
    """All widths generating in turn over one weight store, against the largest alone as it is loaded by default; and
    what a step of the largest then takes."""
    bundle = llama_widths_bundle(precision)
    alone = _grown(_OURS, _asked(bundle, "auto", WIDTHS[-1:]))
    together = _grown(_OURS, _asked(bundle, "shared", WIDTHS))
    slower = median(a / b for a, b in zip(*_step_ms(bundle, ("shared", "packed")), strict=True))
    return [
        Row(
            f"{len(WIDTHS)} widths generating, over the largest alone with its cache, {precision}",
            f"{together / alone:.2f}x ({together / 1e6:.0f} MB against {alone / 1e6:.0f} MB)",
            "<= 1.15x",
            together <= 1.15 * alone,
            "growth of resident memory, a process each; all shared, against the largest packed",
        ),
        Row(
            f"a step of the largest, shared over packed, {precision}",
            f"{slower:.2f}x",
            "stated",
            True,
            f"{_ROUNDS} rounds in turn, medians of {_NEW} steps",
        ),
    ]


def _step_ms(bundle: Path, residencies: Sequence[Residency]) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in residencies]
    models = [load(bundle, threads=CORES, residency=residency) for residency in residencies]
    for round_number in range(_ROUNDS + 1):
        for model, times in zip(models, found, strict=True):
            row = model.generate(_prompt(), max_tokens=_NEW, stop=[]).rows[0]
            if round_number:  # the first opens the engine
                times.append(median(row.token_ms))
    for model in models:
        model.close()
    return found


def _asked(bundle: Path, residency: str, submodels: Sequence[str]) -> list[object]:
    return [str(bundle), residency, list(submodels), CORES, _prompt(), _NEW]


def _prompt() -> list[int]:
    return [3 + 11 * number for number in range(_PROMPT)]


def _grown(code: str, given: list[object]) -> int:
    """Bytes that ``code`` prints, in a process of its own."""
    command = [sys.executable, "-c", code, json.dumps(given)]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)
