import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.matformer.config import MatformerConfig
from nestforge.exporters.families.matformer.model import MatformerLM
from nestforge.exporters.published_slices import read_slice
from nestforge.exporters.source import ModelSource, open_source
from safetensors.torch import load_file, save_file
from support.cost_eff_models import save_tiny
from support.tiny_matlm import matlm_config, save_tiny_matlm, tiny_matlm
from support.tiny_models import cut_ffn, edit_config, save_tiny_encoder, save_tiny_vit

WIDTHS = (16, 64, 40)
UP = "layers.2.ffn.up.weight"


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return open_source(save_tiny_matlm(tmp_path / "universal"))


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return _sliced(tmp_path / "published", matlm_config(intermediate_size=WIDTHS))


def _sliced(folder: Path, config: MatformerConfig) -> Path:
    """The universal model's first neurons as a folder of their own."""
    whole = dict(tiny_matlm(matlm_config()).named_parameters())
    model = MatformerLM(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.copy_(whole[name][tuple(slice(0, extent) for extent in parameter.shape)])
    return save_model(model, config, folder)


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")


def test_a_slice_is_a_submodel(source: ModelSource, published: Path) -> None:
    assert read_slice(source, published) == source.spec.from_kinds({"ffn": WIDTHS})


def test_the_model_is_a_slice_of_itself(source: ModelSource) -> None:
    assert read_slice(source, source.checkpoint.folder).is_universal


def _swap_neurons(weights: dict[str, torch.Tensor]) -> None:
    order = torch.tensor([1, 0, *range(2, 40)])
    weights[UP] = weights[UP][order]
    weights["layers.2.ffn.down.weight"] = weights["layers.2.ffn.down.weight"][:, order]


def _nudge(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        value = weights[name].view(torch.int32)
        value[-1, -1] += 1  # the last bit of the last weight

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _swap_neurons,
            f"tensor {UP} is not the first part (layers.2.ffn 40) of universal's: the levels are not nested; compile "
            "it as a model of its own",
        ),
        (
            _nudge(UP),
            f"tensor {UP} is not the first part (layers.2.ffn 40) of universal's: the levels are not nested; compile "
            "it as a model of its own",
        ),
        (
            _nudge("layers.0.attention.key.weight"),
            "tensor layers.0.attention.key.weight differs from universal's, which submodels share whole: the levels "
            "are not nested; compile it as a model of its own",
        ),
        (
            lambda weights: weights.update({UP: weights[UP].to(torch.float16)}),
            f"tensor {UP} is stored as F16, that of universal as F32; a slice shares its bits",
        ),
    ],
)
def test_weights_that_are_not_the_models_are_named(
    source: ModelSource, published: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    _rewrite(published, change)
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'{published}: {message}')}$"):
        read_slice(source, published)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"intermediate_size": (16, 65, 64)},
            "axis layers.1.ffn: expected 1..64, got 65; it is no slice of universal",
        ),
        ({"num_hidden_layers": 4}, "unknown axis 'layers.3.ffn': this model has ffn per layer"),
        ({"num_hidden_layers": 2}, "tensor layers.2.attention.key.weight is missing; it is no slice of universal"),
        (
            {"tie_word_embeddings": False},
            "tensor lm_head.weight has no place in universal; it is no slice of universal",
        ),
        ({"vocab_size": 65}, "tensor embed_tokens.weight has shape [65, 32]; expected [64, 32] of universal"),
    ],
)
def test_a_model_of_other_sizes_is_no_slice(
    source: ModelSource, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    other = save_tiny_matlm(tmp_path / "other", **changes)
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'{other}: {message}')}"):
        read_slice(source, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "squared_relu"}, "activation: expected 'gelu' as universal has, got 'squared_relu'"),
        ({"num_attention_heads": 8}, "num_attention_heads: expected 4 as universal has, got 8"),
    ],
)
def test_equal_weights_of_another_function_are_no_slice(
    source: ModelSource, published: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(published, **changes)
    problem = f"{published}/config.json: {message}; it is no slice of it"
    with pytest.raises(CheckpointError, match=f"^{re.escape(problem)}$"):
        read_slice(source, published)


def test_a_slice_may_say_otherwise_how_it_was_trained(source: ModelSource, published: Path) -> None:
    edit_config(published, nested=False, granularities={"ffn": [1.0]}, _name_or_path="slices/M")
    assert read_slice(source, published) == source.spec.from_kinds({"ffn": WIDTHS})


def test_tensors_that_files_call_by_other_names_are_compared(tmp_path: Path) -> None:
    universal = save_tiny_vit(tmp_path / "universal", task="ForImageClassification")
    part = cut_ffn(save_tiny_vit(tmp_path / "part", task="ForImageClassification"), [24, 32])
    assert read_slice(open_source(universal), part).id == "ffn24x1_32x1-heads2"
    _rewrite(part, _nudge("vit.encoder.layer.0.intermediate.dense.weight"))
    with pytest.raises(CheckpointError, match=r"tensor vit\.layers\.0\.mlp\.fc1\.weight is not the first part"):
        read_slice(open_source(universal), part)


def test_a_model_that_uses_part_of_its_stored_tensors_is_not_compared(tmp_path: Path) -> None:
    heads, ffn = {str(layer): [1, 3] for layer in range(4)}, {str(layer): [0, 2] for layer in range(4)}
    folder = save_tiny(
        tmp_path / "m", {"num_attention_heads": 4, "intermediate_size": 64}, {"kept_heads": heads, "kept_ffn": ffn}
    )
    with pytest.raises(CheckpointError, match=r"is not stored as the model has it.*save the model as it is loaded$"):
        read_slice(open_source(folder), folder)


def test_a_slice_is_of_the_same_family_and_has_weights(source: ModelSource, published: Path, tmp_path: Path) -> None:
    bert = save_tiny_encoder(tmp_path / "bert")
    with pytest.raises(CheckpointError, match="a slice of universal must be of family matformer_lm, got bert"):
        read_slice(source, bert)
    (published / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        read_slice(source, published)


def test_encoders_have_slices_too(tmp_path: Path) -> None:
    """The axes alone say which tensors are compared."""
    universal = save_tiny_encoder(tmp_path / "bert")
    part = save_tiny_encoder(tmp_path / "part", intermediate_size=24)
    whole = load_file(universal / "model.safetensors")

    def cut(weights: dict[str, torch.Tensor]) -> None:
        for name, value in weights.items():
            weights[name] = whole[name][tuple(slice(0, extent) for extent in value.shape)]

    _rewrite(part, cut)
    assert read_slice(open_source(universal), part).id == "ffn24-heads4"
    edit_config(part, num_attention_heads=2)
    with pytest.raises(
        CheckpointError, match=r"attention\.self\.query\.weight has shape \[32, 32\]; expected \[16, 32\] of bert"
    ):
        read_slice(open_source(universal), part)
