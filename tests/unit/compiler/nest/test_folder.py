from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nestforge.compiler.nest.folder import refuse_unwritable, write_folder
from nestforge.compiler.work.staging import Stage
from nestforge.errors import CheckpointError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from safetensors.torch import load_file, save_file
from support.gated_decoders import save_decoder
from support.tiny_models import add_pooling, save_tiny_encoder

from .conftest import Ordinary


def test_sharded_weights_become_one_file_and_only_companions_are_copied(tmp_path: Path) -> None:
    model = save_tiny_encoder(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    for name, part in (("a", list(weights)[:9]), ("b", list(weights)[9:])):
        save_file({key: weights[key] for key in part}, model / f"{name}.safetensors")
    listed = {key: "a.safetensors" if key in list(weights)[:9] else "b.safetensors" for key in weights}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    for name in ("README.md", "vocab.txt", "pytorch_model.bin"):
        (model / name).write_text("x")
    add_pooling(model)
    (model / "1_Pooling").rename(model / "pooling")
    modules = (model / "modules.json").read_text().replace("1_Pooling", "pooling")
    modules = modules.replace("2_Normalize", "2_Dense").replace("Normalize", "Dense")
    (model / "modules.json").write_text(modules)
    (model / "2_Dense").mkdir()
    (model / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 32, "out_features": 8, "bias": False}))
    save_file({"linear.weight": torch.ones(8, 32)}, model / "2_Dense" / "model.safetensors")
    (model / "onnx").mkdir()
    (model / "onnx" / "model.onnx").write_text("x")
    (tmp_path / "out").mkdir()
    universal = load_universal(open_source(model))
    refuse_unwritable(universal)  # the modules behind the model are not trained, so their files stay
    write_folder(universal, {"ffn": (0.5, 1.0)}, Stage(tmp_path / "out", tmp_path))
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {
        *("config.json", "model.safetensors", "tokenizer.json", "vocab.txt", "modules.json"),
        *("pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    }
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)


def test_parameters_that_share_a_tensor_are_written_into_it(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "model", "phi3")
    universal = load_universal(open_source(folder))
    universal.parameters()["model.layers.0.mlp.up_proj.weight"].data += 1
    refuse_unwritable(universal)
    (tmp_path / "out").mkdir()
    write_folder(universal, {"ffn": (0.5, 1.0)}, Stage(tmp_path / "out", tmp_path))
    expected = load_file(folder / "model.safetensors")
    expected["model.layers.0.mlp.gate_up_proj.weight"][32:] += 1
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_what_the_module_has_not_is_kept_as_it_was(tmp_path: Path) -> None:
    model = save_tiny_encoder(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    more = {"cls.seq_relationship.weight": torch.ones(2, 32).half(), "embeddings.position_ids": torch.arange(40)}
    save_file({**weights, **more}, model / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    write_folder(load_universal(open_source(model)), {"ffn": (0.5, 1.0)}, Stage(tmp_path / "out", tmp_path))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["cls.seq_relationship.weight"].dtype == torch.float32
    assert torch.equal(written["embeddings.position_ids"], torch.arange(40))


def test_a_weight_is_written_back_under_the_name_that_the_files_give_it(tmp_path: Path) -> None:
    model = save_tiny_encoder(tmp_path / "model")
    stored = {
        f"bert.{name.replace('LayerNorm.weight', 'LayerNorm.gamma')}": tensor
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    universal = load_universal(open_source(model))
    for parameter in universal.parameters().values():
        parameter.data += 1
    refuse_unwritable(universal)
    (tmp_path / "out").mkdir()
    write_folder(universal, {"ffn": (0.5, 1.0)}, Stage(tmp_path / "out", tmp_path))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], tensor + 1) for name, tensor in stored.items())


def test_a_weight_that_the_checkpoint_does_not_have_is_refused(ordinary: Ordinary) -> None:
    universal = ordinary.universal
    refuse_unwritable(universal)
    checkpoint = universal.source.checkpoint
    renamed = {re.sub("LayerNorm.weight", "LayerNorm.scale", name): h for name, h in checkpoint.tensors.items()}
    other = replace(universal, source=replace(universal.source, checkpoint=replace(checkpoint, tensors=renamed)))
    with pytest.raises(CheckpointError, match=r"parameter embeddings\.LayerNorm\.weight of the loaded model is not"):
        refuse_unwritable(other)
