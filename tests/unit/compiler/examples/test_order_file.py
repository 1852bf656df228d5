"""What a third party does to check a slice: the checkpoint, the bundle, numpy and safetensors; nothing of ours."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.examples.order_file import permuted
from safetensors import safe_open
from safetensors.numpy import load_file
from support.tiny_compile import board, save_tiniest
from support.tiny_matlm import save_tiny_matlm
from support.tiny_mixer import save_tiny_mixer


def compiled(folder: Path, name: str = "bundle", sequence: int = 8) -> Path:
    profile = board(budgets={"full": {}})
    return compile_bundle(folder, profile, folder.with_name(name), buckets=[Bucket(1, sequence)])


def tensor_of(folder: Path, parameter: str) -> np.ndarray:
    """The checkpoint's own tensor, with or without a base model's prefix."""
    tensors = load_file(folder / "model.safetensors")
    (found,) = [array for name, array in tensors.items() if name == parameter or name.endswith(f".{parameter}")]
    return found.astype(np.float32)


def stated(bundle: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, np.ndarray]]:
    with safe_open(bundle / "ranking.safetensors", framework="np") as file:
        slices = json.loads(file.metadata()["slices"])
    return slices, load_file(bundle / "ranking.safetensors")


def in_order(array: np.ndarray, slices: list[dict[str, Any]], orders: dict[str, np.ndarray]) -> np.ndarray:
    for entry in slices:
        steps = np.moveaxis(array, entry["dim"], 0)
        blocks = steps.reshape(-1, entry["unit"], *steps.shape[1:])[orders[entry["order"]]]
        array = np.moveaxis(blocks.reshape(steps.shape), 0, entry["dim"])
    return array


@pytest.fixture(
    scope="module",
    params=[
        lambda folder: save_tiniest(folder),
        lambda folder: save_tiny_matlm(
            folder, nested=False, nested_heads=True, position="relative_bias", bias=True, norm_weights=True
        ),
        lambda folder: save_tiny_mixer(folder),
    ],
    ids=["bert", "matlm", "sparse-mixer"],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("ranked") / "m")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    mixer = config["model_type"] == "sparse_mixer"
    return compiled(folder, sequence=config["max_position_embeddings"] if mixer else 8)


def test_every_weight_is_the_checkpoints_in_the_order_that_the_bundle_states(folder: Path, bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["ranking"]["order_file"] == "ranking.safetensors"
    listed = {entry["path"]: entry["sha256"] for entry in manifest["files"]}
    assert listed["ranking.safetensors"] == hashlib.sha256((bundle / "ranking.safetensors").read_bytes()).hexdigest()
    slices, orders = stated(bundle)
    assert {order.dtype for order in orders.values()} == {np.dtype(np.int32)}
    assert all(sorted(order) == list(range(len(order))) for order in orders.values())
    stored = {k: v for k, v in load_file(bundle / "weights.safetensors").items() if not k.startswith("table.")}
    moved = 0
    for name, array in stored.items():
        parameter = name.removesuffix(".T")
        own = tensor_of(folder, parameter)
        expected = in_order(own, slices.get(parameter, []), orders)
        assert np.ascontiguousarray(expected.T if name.endswith(".T") else expected).tobytes() == array.tobytes(), name
        moved += expected.tobytes() != own.tobytes()
    assert moved > 4
    assert slices.keys() <= {name.removesuffix(".T") for name in stored}


def test_an_engine_reads_the_first_steps_of_them(folder: Path, bundle: Path) -> None:
    """The bytes of the store that the least submodel's engine names are those steps of the checkpoint."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    slices, orders = stated(bundle)
    graph = onnx.load(bundle / manifest["engines"][0]["file"], load_external_data=False).graph
    store, checked = (bundle / "weights.safetensors").read_bytes(), 0
    for tensor in graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        parameter = tensor.name.removesuffix(".T")
        if parameter not in slices or not place:
            continue
        whole = in_order(tensor_of(folder, parameter), slices[parameter], orders)
        kept = np.ascontiguousarray(whole.T if tensor.name.endswith(".T") else whole)[: tensor.dims[0]]
        offset, length = int(place["offset"]), int(place["length"])
        assert store[offset : offset + length] == kept.tobytes(), tensor.name
        checked += 1
    assert checked > 2


def test_the_file_is_the_same_every_time(folder: Path, bundle: Path) -> None:
    again = compiled(folder, "again", _sequence(bundle))
    assert (again / "ranking.safetensors").read_bytes() == (bundle / "ranking.safetensors").read_bytes()


def test_nothing_permuted_no_file(tmp_path: Path) -> None:
    bundle = compiled(save_tiny_matlm(tmp_path / "m"))
    assert not (bundle / "ranking.safetensors").exists()
    assert json.loads((bundle / "manifest.json").read_text())["ranking"] == {"method": "none"}


def test_an_order_that_moves_nothing_is_left_out() -> None:
    places = {"still": torch.arange(3), "moved": torch.tensor([1, 0])}
    found = permuted(places)
    assert list(found) == ["moved"]
    assert (found["moved"].tolist(), found["moved"].dtype) == ([1, 0], np.int32)


def _sequence(bundle: Path) -> int:
    sequence: int = json.loads((bundle / "manifest.json").read_text())["engines"][0]["bucket"]["sequence"]
    return sequence
