import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from nestforge.errors import CheckpointError
from nestforge.exporters.adapter_folder import read_adapter_config
from nestforge.exporters.checkpoints.checkpoint import Checkpoint, TensorHeader, compare_with_headers, open_checkpoint
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def _edit(folder: Path, change) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _shard(folder: Path) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        safetensors.numpy.save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_headers_are_read_without_loading(copy: Path) -> None:
    checkpoint = open_checkpoint(copy)
    header = checkpoint.tensors["encoder.layer.1.intermediate.dense.weight"]
    assert (header.shape, header.dtype, header.elements) == ((64, 32), "F32", 2048)


def test_a_sharded_checkpoint_is_the_same_model(copy: Path, tiny_folder: Path) -> None:
    _shard(copy)
    whole, sharded = load_universal(open_source(tiny_folder)), load_universal(open_source(copy))
    assert all((whole.parameters()[name] == value).all() for name, value in sharded.parameters().items())


def _lose_a_shard(folder: Path) -> None:
    _shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _index(weight_map: dict[str, str]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose_a_shard, "model-00002-of-00002.safetensors: no such file"),
        (_index({"a": "../x.safetensors"}), "leaves the model folder"),
        (_index({}), "expected a weight_map of tensor names to files$"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: no such file"),
        (_truncate, "not a whole safetensors file"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "pytorch_model.bin: pickled weights are refused .*save_pretrained",
        ),
    ],
)
def test_weights_that_are_damaged_or_refused(copy: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(copy)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(copy)


@pytest.mark.parametrize("content", [b"{", b"[1]", b'"text"'])
def test_a_config_that_is_no_object(copy: Path, content: bytes) -> None:
    (copy / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config.json"):
        open_checkpoint(copy)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "endless"])
def test_a_config_without_an_end_is_refused_at_once(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a file, not a folder, a pipe or a device"):
        open_checkpoint(tmp_path)
    make(tmp_path / "adapter_config.json")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: expected a file, not a folder, a pipe"):
        read_adapter_config(tmp_path)


def test_nan_weights(copy: Path) -> None:
    name = "encoder.layer.2.attention.self.key.bias"
    _edit(copy, lambda tensors: tensors[name].__setitem__(3, np.nan))
    with pytest.raises(CheckpointError, match=f"{name} holds NaN"):
        load_universal(open_source(copy))


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ("org/model/", "model"),
        ("/", "folder"),
        ("two\nlines", "folder"),
        ("\x1b[31mred", "folder"),
        ("x" * 121, "folder"),
        ({"a": "b"}, "folder"),
        (None, "folder"),
    ],
)
def test_a_name_is_one_short_line(tmp_path: Path, stated: object, name: str) -> None:
    assert Checkpoint(tmp_path / "folder", {"_name_or_path": stated}, {}).name == name


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("owner/some-model.v2", "hub:owner/some-model.v2"),
        ("nowhere", "hub:OWNER/NAME"),
        ("here/missing", "hub:OWNER/NAME"),  # a path: its parent is a folder
        ("owner/name/more", "hub:OWNER/NAME"),
    ],
)
def test_a_missing_folder_is_answered_with_how_to_download(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(Path(name))
    message = str(refused.value)
    assert message.startswith(f"{name}: no such folder; expected config.json and model.safetensors in it")
    assert f"`{command}`" in message
    assert "\n" not in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


UNUSED = re.compile(r"pooler\..+").fullmatch


def _checkpoint(**headers: tuple[tuple[int, ...], str]) -> Checkpoint:
    tensors = {name: TensorHeader(shape, dtype, "model.safetensors") for name, (shape, dtype) in headers.items()}
    return Checkpoint(Path("m"), {}, tensors)


def test_exactly_the_parameters_fit() -> None:
    checkpoint = _checkpoint(a=((2, 3), "F32"), b=((), "BF16"), p=((4,), "I64"))
    names = {"layer.a": "a", "layer.b": "b", "pooler.bias": "p"}
    compare_with_headers(checkpoint, {"layer.a": (2, 3), "layer.b": ()}, names, UNUSED)


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"a": (2, 3), "b": (1,)}, "tensor b is missing from the weights"),
        ({"a": (3, 2)}, "tensor a has shape [2, 3]; expected [3, 2] as config.json says"),
        ({"a": (2, 3), "i": (2,)}, "tensor i holds I8; expected F32, F16 or BF16"),
        ({"a": (2, 3)}, "tensor 'i' has no place in the model that config.json describes"),
    ],
)
def test_the_first_misfit_is_named(shapes: dict[str, tuple[int, ...]], problem: str) -> None:
    checkpoint = _checkpoint(a=((2, 3), "F32"), i=((2,), "I8"))
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'm: {problem}')}$"):
        compare_with_headers(checkpoint, shapes)
