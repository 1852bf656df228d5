"""An adapter of PEFT on an encoder of base width: its pairs as inputs of the engine, or merged into the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...bucket import Bucket
from ...bundle.device_files.task_index import read_tasks
from ...bundle.open_bundle import Bundle, open_bundle
from ...compiler.compile import compile_bundle
from ...exporters.source import open_source
from ...runtime.engines.onnxruntime.runner import OnnxRuntimeRunner
from ...runtime.graphs.task_tensors import read_task_tensors
from ...runtime.inputs.feeds import random_feeds
from ...runtime.merged_tasks import merged_bundles, merged_bytes
from ..harness import Row, interleaved, milliseconds, ratio
from ..kept import CACHE
from ..subjects import CORES, elsewhere

_LAYERS, _WORDS, _RANK, _TASK = 4, 1000, 16, "reviews"
_TARGETS = ("query", "key", "value", "dense")
_BUCKET = Bucket(1, 128)
_ROUNDS, _OPENED = 12, 5
_SPEED = 0.95
_MODEL = f"BERT, {_LAYERS} layers of base width, rank {_RANK} beside every linear layer"


def run() -> list[Row]:
    taking, plain = open_bundle(_bundle(with_task=True)), open_bundle(_bundle(with_task=False))
    merged = merged_bundles(taking, [_TASK])[_TASK]
    tensors = read_task_tensors(taking, read_tasks(taking)[0])
    with _runner(taking) as inputs, _runner(merged) as own, _runner(plain) as base:
        feeds = random_feeds(plain.manifest.inputs, _BUCKET)
        task = inputs.for_task(tensors)
        calls = {
            "plain": lambda: base.run(feeds),
            "inputs": lambda: task.run(feeds),
            "merged": lambda: own.run(feeds),
        }
        times = interleaved(calls, _ROUNDS)
    return [_speed(times, "merged"), _speed(times, "inputs"), _opening(merged, plain)]


def _speed(times: Mapping[str, list[float]], ours: str) -> Row:
    found, is_merged = ratio(times, "plain", ours), ours == "merged"
    return Row(
        "an adapter merged into the weights" if is_merged else "the same adapter as inputs",
        f"{found:.2f}x the speed without one (best {min(times[ours]):.2f} against {min(times['plain']):.2f} ms)",
        f">= {_SPEED}x" if is_merged else "none",
        not is_merged or found >= _SPEED,
        f"{_MODEL}; median ratio of {_ROUNDS} interleaved rounds, 1 x 128, packed, {CORES} threads",
    )


def _opening(merged: Bundle, plain: Bundle) -> Row:
    """An engine opened and closed; the merged one also sums its weights."""
    ours, other = (min(milliseconds(partial(_open, one)) for _ in range(_OPENED)) for one in (merged, plain))
    return Row(
        "opening the merged engine",
        f"{ours:.0f} ms, {other:.0f} ms without an adapter; it holds {merged_bytes([merged]) / 1e6:.0f} MB",
        "none",
        True,
        f"best of {_OPENED}, packed",
    )


def _open(bundle: Bundle) -> None:
    with _runner(bundle):
        pass


def _runner(bundle: Bundle) -> OnnxRuntimeRunner:
    return OnnxRuntimeRunner(bundle, bundle.manifest.engines[0], "packed", CORES)


def _base() -> Path:
    import transformers

    folder = CACHE / "adapters-base"
    if not folder.exists():
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=_WORDS, num_hidden_layers=_LAYERS)
        transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def _adapter() -> Path:
    """A folder as PEFT writes it, of random pairs."""
    folder = CACHE / "adapters-reviews"
    if not folder.exists():
        torch.manual_seed(1)
        tensors = {}
        for name, shape in open_source(_base()).architecture.parameter_shapes.items():
            module = name.removesuffix(".weight")
            if len(shape) == 2 and module.rpartition(".")[2] in _TARGETS:
                at = f"base_model.model.{module}"
                tensors[f"{at}.lora_A.weight"] = 0.05 * torch.randn(_RANK, shape[1])
                tensors[f"{at}.lora_B.weight"] = 0.05 * torch.randn(shape[0], _RANK)
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        stated = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": list(_TARGETS)}
        (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def _bundle(with_task: bool) -> Path:
    path = CACHE / f"adapters-{'reviews' if with_task else 'none'}.bundle"
    if not path.exists():
        tasks = {_TASK: _adapter()} if with_task else {}
        compile_bundle(
            _base(),
            elsewhere(),
            path,
            buckets=[_BUCKET],
            budgets={},
            levels={"ffn": (1.0,), "heads": (1.0,)},
            measure=False,
            tasks=tasks,
            mergeable=with_task,
        )
    return path
