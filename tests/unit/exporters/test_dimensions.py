"""To how many numbers an embedding may be cut, and keys of a model card."""

from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.errors import CheckpointError, InputError, NestforgeError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.dimensions import read_card, read_depths, trained_by_layer, with_dimensions
from nestforge.exporters.signature import Signature

EMBEDDING = TensorSpec("vector", "float32", ("batch", 16), role="embedding")
LISTED = {"is_matryoshka": True, "matryoshka_dimensions": [4, 32, 8]}


def stated(config: dict[str, Any], requested: tuple[int, ...] | None = None, output: TensorSpec = EMBEDDING) -> Any:
    found = with_dimensions(Signature((), (output,)), Checkpoint(Path("m"), config, {}), None, requested)
    return found.outputs[0].dimensions


@pytest.mark.parametrize(
    ("config", "requested", "expected"),
    [
        ({}, None, None),
        ({"is_matryoshka": True}, None, None),
        ({"is_matryoshka": False}, None, (16,)),
        (LISTED, None, (16, 8, 4)),
        (LISTED, (2, 16), (16, 2)),
        ({}, (12,), (16, 12)),
    ],
)
def test_a_request_goes_before_the_folder(config: dict[str, Any], requested: Any, expected: Any) -> None:
    assert stated(config, requested) == expected


def test_other_models_have_none() -> None:
    logits = TensorSpec("logits", "float32", ("batch", 16), role="classes")
    assert stated(LISTED, output=logits) is None
    with pytest.raises(InputError, match=r"no output is said to be the embedding; .* the model has logits"):
        stated({}, (4,), output=logits)


@pytest.mark.parametrize(
    ("config", "requested", "error", "message"),
    [
        ({}, (), InputError, r"`dimensions`: expected numbers from 1 to 16, the width of vector, got \[\]"),
        ({}, (8, 17), InputError, r"`dimensions`: expected numbers from 1 to 16, the width of vector, got \[8, 17\]"),
        ({"matryoshka_dimensions": [8, 0]}, None, CheckpointError, "matryoshka_dimensions: expected numbers of at l"),
        ({"matryoshka_dimensions": 8}, None, CheckpointError, "matryoshka_dimensions: expected a list"),
        ({"is_matryoshka": "yes"}, None, CheckpointError, "is_matryoshka: expected"),
    ],
)
def test_refused(config: dict[str, Any], requested: Any, error: type[NestforgeError], message: str) -> None:
    with pytest.raises(error, match=message):
        stated(config, requested)


def depths(folder: Path, config: dict[str, Any], card: str = "", **asked: Any) -> Any:
    (folder / "README.md").write_text(f"---\n{card}\n---\n")
    return read_depths(Checkpoint(folder, config, {}), **asked)


def test_layers_and_pairs_are_requested_or_stated_by_config_or_card(tmp_path: Path) -> None:
    layers, pairs = {"matryoshka_layers": [4, 2]}, {"matryoshka_pairs": [[4, 8], [2, 4]]}
    assert depths(tmp_path, {}) == (None, None)
    assert depths(tmp_path, layers) == ((2, 4), None)
    assert depths(tmp_path, {}, "matryoshka_layers: [3]") == ((3,), None)
    assert depths(tmp_path, layers, "matryoshka_layers: [3]") == ((2, 4), None), "config.json goes first"
    assert depths(tmp_path, pairs) == ((2, 4), ((2, 4), (4, 8)))
    assert depths(tmp_path, pairs, layers=[1]) == ((1,), None)
    assert depths(tmp_path, pairs, dimensions=[4]) == (None, None)
    assert depths(tmp_path, layers, pairs=((1, 2),)) == ((1,), ((1, 2),))
    for wrong in ({"matryoshka_pairs": [[1, 2, 3]]}, {"matryoshka_pairs": []}):
        with pytest.raises(CheckpointError, match="matryoshka_pairs: expected pairs of layers and dimensions"):
            depths(tmp_path, wrong)
    with pytest.raises(CheckpointError, match=r"README.md: matryoshka_layers: expected a list"):
        depths(tmp_path, {}, "matryoshka_layers: 3")


def test_pairs_lie_within_the_embedding() -> None:
    def found(pairs: Any) -> TensorSpec:
        checkpoint = Checkpoint(Path("m"), {}, {})
        return with_dimensions(Signature((), (EMBEDDING,)), checkpoint, None, None, pairs).outputs[0]

    assert (found(((1, 4), (2, 8))).dimensions, found(((1, 4),)).pairs) == ((16, 8, 4), ((1, 4),))
    with pytest.raises(InputError, match=r"`pairs`: expected numbers from 1 to 16, the width of vector, got \[17\]"):
        found(((1, 17),))


def test_the_loss_is_read_off_the_card(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\ntags:\n- sentence-transformers\n- loss:Matryoshka2dLoss\n---\n")
    assert trained_by_layer(Checkpoint(tmp_path, {}, {})) == "Matryoshka2dLoss"
    assert trained_by_layer(Checkpoint(tmp_path / "none", {}, {})) is None


KEY = "matryoshka_layers"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nmatryoshka_layers: [2, 4]\ntags:\n- loss:AdaptiveLayerLoss\n---\n# A model\n---\n", {KEY: [2, 4]}),
        ("---\nmatryoshka_layers:\n- 2\n  # half\n\n- 4\nlicense: mit\n---\n", {KEY: [2, 4]}),
        ("---\nmatryoshka_layers:\n  - 2\n---\n", {KEY: [2]}),
        ("---\nmodel-index: [1\n  {\nmatryoshka_layers: [2]\nmodel-index: &a\n---\n", {KEY: [2]}),  # not ours to read
        ("# A model\n---\nmatryoshka_layers: [2]\n---\n", {}),
        ("---\nmatryoshka_layers: [2]\n", {}),
        ("---\nnested:\n  matryoshka_layers: [2]\n---\n", {}),
        ("---\n- 1\n---\n", {}),
        ("---\n---\n", {}),
        ("", {}),
    ],
)
def test_keys_stand_between_two_lines(text: str, expected: dict[str, list[int]], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert read_card(tmp_path, (KEY,)) == expected


def test_none_without_a_card(tmp_path: Path) -> None:
    assert read_card(tmp_path, (KEY,)) == {}


@pytest.mark.parametrize(
    "value", ["[1", "!!python/object:os.system x", "[" * 5000, "[2]\nmatryoshka_layers: [3]", "*a"]
)
def test_no_yaml(value: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\nmatryoshka_layers: {value}\n---\n")
    with pytest.raises(CheckpointError, match=r"README.md: not a readable YAML file"):
        read_card(tmp_path, (KEY,))
