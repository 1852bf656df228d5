"""Who else generates on a processor, with the same weights and threads: ONNX Runtime GenAI and OpenVINO where they are
installed (neither is among nestforge's requirements), and transformers with its own cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ..bucket import Bucket
from ..compiler.compile import compile_bundle
from ..profiles.budget import BudgetSpec
from ..profiles.precision import Precision
from .harness import CACHE, milliseconds
from .subjects import CORES, elsewhere


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
        return Timed(first, [milliseconds(generator.generate_next_token) for _ in range(tokens - 1)])

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

        first = milliseconds(step)
        return Timed(first, [milliseconds(step) for _ in range(tokens - 1)])

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

        first = milliseconds(step)
        return Timed(first, [milliseconds(step) for _ in range(tokens - 1)])

    return generate


# Eight widths of its FFNs, the largest last.
WIDTHS = tuple(f"ffn{width}" for width in range(256, 2049, 256))


def llama_folder() -> Path:
    """12 layers of 768, FFN 2048, 12 heads that share 4 of keys and values, 32,000 tokens, 4096 positions."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    return _checkpoint("llama-100m", "Llama", num_key_value_heads=4, max_position_embeddings=4096, **sizes)


def llama_bundle(precision: Precision = "fp32") -> Path:
    """The whole of it alone, as others have it."""
    return _bundle(llama_folder(), precision)


def llama_halves_bundle() -> Path:
    """The whole of it, and half of its FFNs."""
    return _bundle(llama_folder(), "fp32", ("ffn1024",), "-halves")


def llama_widths_bundle(precision: Precision) -> Path:
    """All of WIDTHS."""
    return _bundle(llama_folder(), precision, WIDTHS[:-1], "-widths")


def tiny_llama_bundle() -> Path:
    """One layer of 64 and 32,000 tokens, whose steps are so short that work beside them shows."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = _checkpoint("llama-tiny", "Llama", num_key_value_heads=2, max_position_embeddings=512, **sizes)
    return _bundle(folder, "fp32")


def _checkpoint(name: str, kind: str, /, **sizes: int) -> Path:
    import transformers

    library: Any = transformers
    folder = CACHE / f"{name}-checkpoint"
    if not folder.exists():
        torch.manual_seed(0)
        config = getattr(library, f"{kind}Config")(vocab_size=32_000, tie_word_embeddings=True, **sizes)
        getattr(library, f"{kind}ForCausalLM")(config).save_pretrained(folder)
        letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        library.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def _bundle(folder: Path, precision: Precision, submodels: Sequence[str] = (), kind: str = "") -> Path:
    path = CACHE / f"{folder.name}{kind}-{precision}.bundle"
    if not path.exists():
        device = replace(elsewhere(), buckets=(Bucket(1, 16),), budgets={"full": BudgetSpec()}, precisions=(precision,))
        compile_bundle(folder, device, path, submodels=submodels, levels={"ffn": (1.0,)}, generate=True)
    return path
