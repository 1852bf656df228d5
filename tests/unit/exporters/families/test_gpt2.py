"""GPT-2 from its folder: axes, parameters, its own way to store matrices, loading, narrowing, compiling, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.nest import refuse_unwritable, write_folder
from nestforge.compiler.work.staging import Stage
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.families.gpt2 import FAMILY
from nestforge.exporters.published_slices import read_slice
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.workload import macs
from safetensors.torch import load_file, save_file
from support.hugging_face_classes import rename
from support.tiny_compile import BUCKET, assert_tensorrt_takes, board, builder_in, template_of
from support.tiny_models import edit_config, make_gpt2, narrowed_gpt2, save_gpt2

IDS = torch.randint(3, 48, (2, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt2(tmp_path_factory.mktemp("gpt2") / "m")


FLAGS: list[dict[str, Any]] = [
    {},
    {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True},
    {"reorder_and_upcast_attn": True, "attn_implementation": "eager"},
    {"n_inner": None, "activation_function": "relu", "layer_norm_epsilon": 1e-2},
    {"tie_word_embeddings": False},
]


@pytest.mark.parametrize("keys", FLAGS, ids=str)
def test_what_config_json_says_is_what_transformers_computes(tmp_path: Path, keys: dict[str, Any]) -> None:
    source = open_source(edit_config(save_gpt2(tmp_path / "m", **keys), **keys))
    universal = load_universal(source)
    expected = make_gpt2(**keys)(input_ids=IDS).logits
    torch.testing.assert_close(universal.module(IDS)[0], expected, rtol=0, atol=2e-6)
    assert universal.module.double()(IDS)[0].dtype == torch.float64, "as the gate computes"
    (tmp_path / "m" / "model.safetensors").unlink()
    untrained = open_source(tmp_path / "m")
    assert (dict(untrained.shapes), untrained.spec) == (dict(source.shapes), source.spec)


def test_sizes_by_their_general_names(folder: Path) -> None:
    """transformers takes them too, and prefers them."""
    config = {"model_type": "gpt2", "hidden_size": 24, "n_embd": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    checkpoint = Checkpoint(Path("m"), {**config, "max_position_embeddings": 9}, {}, missing="not trained")
    architecture = FAMILY.read(checkpoint)
    assert [axis.size for axis in architecture.spec.axes] == [96] * 3
    assert architecture.parameter_shapes["wpe.weight"] == (9, 24)


def test_a_narrowed_module_is_one_really_made_narrow(folder: Path) -> None:
    universal = load_universal(open_source(folder))
    (found,) = universal.narrow(universal.spec.from_kinds({"ffn": [8, 24]}))(IDS)
    torch.testing.assert_close(found, narrowed_gpt2(make_gpt2(), [8, 24])(IDS).logits, rtol=0, atol=2e-6)


def test_widths_per_layer_and_a_published_slice(folder: Path, tmp_path: Path) -> None:
    """Files hold matrices transposed; a slice is compared as files have it."""
    sliced, expected = tmp_path / "slice", narrowed_gpt2(make_gpt2(), [8, 24])
    expected.save_pretrained(sliced)
    edit_config(sliced, n_inner=[8, 24])
    universal = load_universal(open_source(sliced))
    torch.testing.assert_close(universal.module(IDS)[0], expected(IDS).logits, rtol=0, atol=2e-6)
    source = open_source(folder)
    assert read_slice(source, sliced).id == "ffn8x1_24x1"
    tensors = load_file(sliced / "model.safetensors")
    tensors["transformer.h.1.mlp.c_proj.weight"] = tensors["transformer.h.1.mlp.c_proj.weight"].roll(1, 0)
    save_file(tensors, sliced / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"h.1.mlp.c_proj.weight is not the first part \(layers.1.ffn 24"):
        read_slice(source, sliced)


def test_a_nested_folder_has_matrices_as_the_original(folder: Path, tmp_path: Path) -> None:
    universal = load_universal(open_source(folder))
    universal.parameters()["transformer.h.0.mlp.c_fc.weight"].data[3] += 1
    refuse_unwritable(universal)
    (tmp_path / "out").mkdir()
    write_folder(universal, {"ffn": (0.5, 1.0)}, Stage(tmp_path / "out", tmp_path))
    expected, written = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    expected["transformer.h.0.mlp.c_fc.weight"][:, 3] += 1
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_names_and_masks_of_old_files(folder: Path, tmp_path: Path) -> None:
    """The published folder is of the base model, with the masks that modules had then."""
    other = save_gpt2(tmp_path / "m")
    rename(other, lambda name: name.removeprefix("transformer."))
    tensors = load_file(other / "model.safetensors")
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    found, expected = load_universal(open_source(other)), load_universal(open_source(folder))
    assert dict(found.source.shapes) == dict(expected.source.shapes)
    assert torch.equal(found.module(IDS)[0], expected.module(IDS)[0])


def test_a_bias_of_its_own_head_has_no_place_and_is_not_dropped(tmp_path: Path) -> None:
    folder = save_gpt2(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.bias": torch.ones(48)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'lm_head.bias' has no place in the model"):
        open_source(folder)
    save_file({**tensors, "score.weight": torch.ones(2, 16)}, folder / "model.safetensors", {"format": "pt"})
    open_source(folder)  # a head of another class


def test_parameters_and_multiply_adds_by_hand(folder: Path) -> None:
    published = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}  # the class's sizes are gpt2's
    checkpoint = Checkpoint(Path("m"), published, {}, missing="not trained")
    shapes = FAMILY.read(checkpoint).parameter_shapes
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 124_439_808
    source, tokens = open_source(folder), 2 * 8
    layer = 4 * 16 * 16 + 2 * 8 * 16 + 2 * 16 * 24
    assert macs(source.workload(source.spec.parse("ffn24"), Bucket(2, 8))) == tokens * (2 * layer + 16 * 48)


def test_it_is_sliced_and_equals_pytorch(folder: Path, tmp_path: Path) -> None:
    universal = load_universal(open_source(folder))
    template = template_of(universal)
    assert template.slice_problem is None
    builder = builder_in(tmp_path / "bundle", universal, template, board(budgets={"full": {}}))
    for widths in ([8, 16], [32, 32]):
        entry = builder.build(universal.spec.from_kinds({"ffn": widths}), BUCKET)
        assert (entry.emitted, entry.slice_problem) == ("sliced", None)
        assert entry.parity is not None
    assert_tensorrt_takes(tmp_path / "bundle")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_head": 3}, "n_head: 16 features cannot be split into 3 heads"),
        ({"n_inner": [32]}, "n_inner: expected 2 numbers, one per layer, got 1"),
        ({"n_layer": 10**9}, "n_layer: expected at most 1024, got 1000000000"),
        ({"add_cross_attention": True}, "add_cross_attention: a second sequence to attend to is not supported"),
        (
            {"architectures": ["GPT2DoubleHeadsModel"]},
            "is not supported; supported are GPT2Model, GPT2LMHeadModel, GPT2For",
        ),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    folder = edit_config(save_gpt2(tmp_path / "m"), **changes)
    with pytest.raises(CheckpointError) as failure:
        open_source(folder)
    assert str(failure.value).startswith(f"{folder / 'config.json'}: ")
    assert expected in str(failure.value)
