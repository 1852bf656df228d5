"""Folders that PEFT 0.21 wrote (tests/golden/peft), and what is refused of others, by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.adapter_folder import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterConfig,
    is_adapter,
    read_adapter,
    read_adapter_config,
)
from nestforge.exporters.source import open_source
from safetensors.torch import load_file, save_file

PEFT = Path(__file__).parents[2] / "golden" / "peft"
LAYER = "encoder.layer.1."


@pytest.fixture(scope="module")
def shapes() -> dict[str, tuple[int, ...]]:
    return dict(open_source(PEFT / "bert" / "base").architecture.parameter_shapes)


def test_pairs_by_module_with_their_scale(shapes: dict[str, tuple[int, ...]]) -> None:
    """Ranks and alphas of patterns, rank-stabilized: ``alpha / sqrt(r)``."""
    adapter = read_adapter(PEFT / "bert" / "b", shapes)
    raw = load_file(PEFT / "bert" / "b" / WEIGHTS_NAME)
    for module, rank, scale in (
        (f"{LAYER}intermediate.dense", 6, 8 / 6**0.5),
        (f"{LAYER}output.dense", 3, 3 / 3**0.5),
        (f"{LAYER}attention.self.key", 3, 8 / 3**0.5),
    ):
        down, up = adapter.pairs[module]
        assert len(down) == rank
        own = raw[f"base_model.model.{module}.lora_B.weight"].double() * scale
        np.testing.assert_array_equal(up, own.float().numpy())
        np.testing.assert_array_equal(down, raw[f"base_model.model.{module}.lora_A.weight"].numpy())
    assert not adapter.saved


def test_modules_that_were_trained_whole() -> None:
    shapes = open_source(PEFT / "classifier" / "base").architecture.parameter_shapes
    adapter = read_adapter(PEFT / "classifier" / "a", shapes)
    assert adapter.saved.keys() == {"classifier.weight", "classifier.bias"}
    assert adapter.config.modules_to_save == ("classifier", "score")


@pytest.mark.parametrize("saved", ["encoder.layer.1", "ayer.1.output", "output"])
def test_a_saved_module_has_others_in_it(folder: Path, shapes: dict[str, tuple[int, ...]], saved: str) -> None:
    """PEFT takes every module whose name ends so, also where it holds modules, and within a name."""
    modules = {"encoder.layer.1": ("layer.1.",), "ayer.1.output": ("layer.1.output",), "output": ("output",)}[saved]
    path = folder / CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "modules_to_save": [saved]}))
    whole = {name: shape for name, shape in shapes.items() if any(part in name for part in modules)}
    tensors = load_file(folder / WEIGHTS_NAME)
    tensors |= {f"base_model.model.{name}": torch.ones(shape) for name, shape in whole.items()}
    save_file(tensors, folder / WEIGHTS_NAME)
    assert read_adapter(folder, shapes).saved.keys() == whole.keys()


def test_what_is_an_adapter() -> None:
    assert is_adapter(PEFT / "bert" / "a")
    assert not is_adapter(PEFT / "bert" / "base")


@pytest.mark.parametrize(
    ("name", "expected"), [("x.layer.1.out", 4.0), ("layer.1.out", 4.0), ("xlayer.1.out", 8.0), ("layer.1.out.y", 8.0)]
)
def test_patterns_name_ends_of_modules(name: str, expected: float) -> None:
    config = AdapterConfig(peft_type="LORA", lora_alpha=64.0, alpha_pattern={"layer.1.out": 32.0})
    assert config.scale_of(name) == expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PEFT / "bert" / "a", tmp_path / "a"))


@pytest.mark.parametrize("other", ["base_model.model.bert.", ""])
def test_two_pairs_for_one_module_are_refused(folder: Path, shapes: dict[str, tuple[int, ...]], other: str) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    own = f"base_model.model.{LAYER}attention.self.query.lora_"
    twice = {f"{other}{name.removeprefix('base_model.model.')}": tensors[name] + 1 for name in tensors if own in name}
    assert len(twice) == 2
    save_file(tensors | twice, folder / WEIGHTS_NAME)
    first, second = sorted([f"{own}A.weight", *(name for name in twice if "lora_A" in name)])
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder, shapes)
    assert str(caught.value) == (
        f"{folder / WEIGHTS_NAME}: tensors {first} and {second} are both of {LAYER}attention.self.query; expected one"
    )


def test_two_tensors_for_one_parameter_are_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(PEFT / "classifier" / "a", tmp_path / "a"))
    tensors = load_file(folder / WEIGHTS_NAME)
    save_file(tensors | {"x.classifier.bias": tensors["base_model.model.classifier.bias"] + 1}, folder / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=r"tensors .*classifier\.bias and .* are both of classifier\.bias; expec"):
        read_adapter(folder, open_source(PEFT / "classifier" / "base").architecture.parameter_shapes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type: got 'IA3'; expected one of LORA"),
        ({"use_dora": True}, "use_dora: True; expected plain LoRA, without it"),
        ({"use_rslora": 1}, "use_rslora: expected true or false, got int 1"),
        ({"bias": "all"}, "bias: got 'all'; expected one of none"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base"),
        ({"lora_bias": True}, "lora_bias: True; expected plain LoRA, without it"),
        ({"layer_replication": [[0, 2]]}, r"layer_replication: \[\[0, 2\]\]; expected plain LoRA"),
        ({"use_something_new": {"a": 1}}, "use_something_new"),
        ({"r": 0}, "r: expected at least 1, got 0"),
        ({"rank_pattern": {"query": 2**17}}, "rank_pattern.query: expected at most 65536, got 131072"),
        ({"lora_alpha": "8"}, "lora_alpha: expected a number, got str '8'"),
        ({"alpha_pattern": {"(a+)+b": 2}}, r"alpha_pattern: '\(a\+\)\+b': expected names of modules, no expression"),
        (
            {"target_modules": ["query", "gate_proj"]},
            "target_modules: the model has no linear layer 'gate_proj'; it has",
        ),
        (
            {"target_modules": ["query", "lm_head"]},
            r"no linear layer 'lm_head' of its own \(one that it ties to its table of tokens is none\); it has dense, "
            "key, query, value$",
        ),
        ({"target_modules": ["query", "value", "key"]}, "no pair beside 'key', which adapter_config.json names"),
        (
            {"modules_to_save": ["intermediate.dense"]},
            r"no tensor encoder\.layer\.0\.intermediate\.dense\.weight, of a module that .* names in modules_to_save",
        ),
        ({"target_modules": [1]}, r"target_modules\[0\]: expected text, got int 1"),
        ({"r": 5}, r"lora_A.weight has shape \[4, 16\]; expected \[5, 16\] as adapter_config.json and the model say"),
    ],
)
def test_other_adapters_are_refused(
    folder: Path, shapes: dict[str, tuple[int, ...]], changes: dict[str, Any], said: str
) -> None:
    path = folder / CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=said):
        read_adapter(folder, shapes)


Tensors = dict[str, torch.Tensor]
QUERY = "base_model.model.encoder.layer.0.attention.self.query"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{QUERY}.lora_B.weight"), "lora_B.weight is missing"),
        (lambda t: t.pop(f"{QUERY}.lora_A.weight"), "has no lora_A.weight beside it"),
        (
            lambda t: t.update({"base_model.model.encoder.layer.9.query.lora_A.weight": torch.ones(4, 16)}),
            "has no linear",
        ),
        (lambda t: t.update({"base_model.model.x.bias": torch.ones(3)}), "x.bias is no pair of LoRA"),
        (lambda t: t.update({f"{QUERY}.lora_magnitude_vector": torch.ones(3)}), "is no pair of LoRA"),
        (lambda t: t.update({f"{QUERY}.lora_B.weight": torch.full((16, 4), torch.nan)}), "NaN or infinite"),
        (
            lambda t: t.update({"base_model.model.x.lora_embedding_A": torch.ones(4, 3)}),
            "tensor x.lora_embedding_A is LoRA of an embedding; expected pairs",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.ones(3, 3)}),
            r"is a base weight in the adapter; save it with .*save_embedding_layers=False",
        ),
        (lambda t: t.clear(), "no tensor ends in .lora_A.weight"),
    ],
)
def test_other_tensors_are_refused(
    folder: Path, shapes: dict[str, tuple[int, ...]], change: Callable[[Tensors], object], said: str
) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=said):
        read_adapter(folder, shapes)


def test_pickles_and_no_json_are_refused(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    (folder / WEIGHTS_NAME).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin: pickled weights are refused"):
        read_adapter(folder, shapes)
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        read_adapter_config(folder / "nowhere")
    (folder / CONFIG_NAME).write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: not JSON"):
        read_adapter_config(folder)
