"""Who else generates on a processor, with the same weights and threads: ONNX Runtime GenAI and OpenVINO where they are
installed (neither is among nestforge's requirements), and transformers with its own cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from .harness import CACHE
from .subjects import CORES


class Timed(NamedTuple):
    """Milliseconds until the first token, and of each after it."""

    first_ms: float
    step_ms: list[float]


_FIRST_ROW = np.zeros(1, np.int32)

# From a prompt's ids and a number of tokens.
Generate = Callable[[Sequence[int], int], Timed]


def genai(folder: Path, precision: str) -> Generate | None:
    """ONNX Runtime GenAI (``pip install onnxruntime-genai``) on the checkpoint in ``folder``; None where it is
    missing."""
    if find_spec("onnxruntime_genai") is None:
        return None
    library: Any = import_module("onnxruntime_genai")
    model = library.Model(str(genai_folder(folder, precision)))

    def generate(prompt: Sequence[int], tokens: int) -> Timed:
        options = library.GeneratorParams(model)
        options.set_search_options(max_length=len(prompt) + tokens + 1, do_sample=False)
        generator = library.Generator(model, options)
        began = perf_counter()
        generator.append_tokens(list(prompt))
        generator.generate_next_token()
        first = 1e3 * (perf_counter() - began)
        return Timed(first, [_milliseconds(generator.generate_next_token) for _ in range(tokens - 1)])

    return generate


def genai_folder(folder: Path, precision: str) -> Path:
    """Its own form of the checkpoint in ``folder``, made once by its builder, for as many threads as ours have."""
    made = CACHE / f"{folder.name}-genai-{precision}"
    if not made.exists():
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(made)]
        subprocess.run([*builder, "-p", precision, "-e", "cpu", "-c", str(CACHE / "genai")], check=True)
    config = made / "genai_config.json"
    stated = json.loads(config.read_text())
    stated["model"]["decoder"]["session_options"]["intra_op_num_threads"] = CORES
    config.write_text(json.dumps(stated))
    return made


def openvino(folder: Path) -> Generate | None:
    """OpenVINO with its cache as state, in float32 throughout; None where it is missing, or its form of the checkpoint:
    ``optimum-cli export openvino --task text-generation-with-past -m FOLDER FOLDER-openvino``, which needs another
    version of transformers."""
    made = folder.with_name(f"{folder.name}-openvino") / "openvino_model.xml"
    if find_spec("openvino") is None or not made.exists():
        return None
    library: Any = import_module("openvino")
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": CORES}
    settings |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    request = library.Core().compile_model(str(made), "CPU", settings).create_infer_request()

    def generate(prompt: Sequence[int], tokens: int) -> Timed:
        request.reset_state()
        state, read = list(prompt), 0

        def step() -> None:
            nonlocal state, read
            total = read + len(state)
            feeds = {"input_ids": [state], "attention_mask": [[1] * total], "position_ids": [range(read, total)]}
            request.infer({name: np.array(value, np.int64) for name, value in feeds.items()} | {"beam_idx": _FIRST_ROW})
            state, read = [int(request.get_tensor("logits").data[0, -1].argmax())], total

        first = _milliseconds(step)
        return Timed(first, [_milliseconds(step) for _ in range(tokens - 1)])

    return generate


def transformers(folder: Path) -> Generate:
    """The checkpoint's own class, in PyTorch with a cache that it allocates as it likes."""
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(CORES)
    loaded: Any = AutoModelForCausalLM
    model = loaded.from_pretrained(folder).eval()

    def generate(prompt: Sequence[int], tokens: int) -> Timed:
        cache = DynamicCache()
        state = torch.tensor([list(prompt)])

        def step() -> None:
            nonlocal state
            with torch.inference_mode():
                answer = model(input_ids=state, past_key_values=cache, use_cache=True, logits_to_keep=1)
            state = answer.logits[:, -1].argmax(-1, keepdim=True)

        first = _milliseconds(step)
        return Timed(first, [_milliseconds(step) for _ in range(tokens - 1)])

    return generate


def _milliseconds(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return 1e3 * (perf_counter() - began)
