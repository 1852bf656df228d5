import re
from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.errors import CheckpointError
from nestforge.exporters.families.matformer.config import MatformerVitConfig
from nestforge.exporters.families.matformer.family import vision_parameters
from nestforge.exporters.families.matformer.model import MatformerViT
from nestforge.exporters.source import ModelSource, open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from support.tiny_models import CLASSES, TINY_VIT, edit_config, save_tiny_matvit
from torch.nn import functional

IMAGES = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(1))
ACTIVATIONS = {"gelu": functional.gelu, "squared_relu": lambda x: functional.relu(x) ** 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_matvit(tmp_path_factory.mktemp("matvit") / "m")


@pytest.fixture
def source(folder: Path) -> ModelSource:
    return open_source(folder)


@pytest.fixture
def universal(source: ModelSource) -> UniversalModel:
    return load_universal(source)


@pytest.mark.parametrize(
    "changes", [{}, {"intermediate_size": (32, 24)}, {"num_channels": 1, "patch_size": 2}, {"nested_heads": False}]
)
def test_the_modules_parameters_are_those_that_its_config_says(changes: dict[str, Any]) -> None:
    settings = {**TINY_VIT, "num_labels": CLASSES, "activation": "gelu", "nested": True, "nested_heads": True}
    config = MatformerVitConfig(**{**settings, **changes})
    with torch.device("meta"):
        model = MatformerViT(config)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == vision_parameters(config).shapes


@pytest.mark.parametrize("activation", ["gelu", "squared_relu"])
def test_the_model_computes_a_vision_transformer(tmp_path: Path, activation: str) -> None:
    """Written out once more from its parameters alone, patch by patch."""
    model = load_universal(open_source(save_tiny_matvit(tmp_path / "m", activation=activation)))
    p = model.parameters()
    patches = IMAGES.unfold(2, 4, 4).unfold(3, 4, 4).movedim(1, 3).reshape(3, 4, 2 * 4 * 4)  # rows of patches first
    tokens = patches @ p["patch.weight"].reshape(16, -1).T + p["patch.bias"]
    x = torch.cat((p["cls_token"].expand(3, 1, 16), tokens), 1) + p["position_embedding"]
    for at in ("layers.0", "layers.1"):
        q, k, v = (
            _linear(p, f"{at}.attention.{part}", _norm(p, f"{at}.attention_norm", x)).reshape(3, 5, 2, 8).movedim(2, 1)
            for part in ("query", "key", "value")
        )
        context = torch.softmax(q @ k.mT / 8**0.5, -1) @ v
        x = x + _linear(p, f"{at}.attention.output", context.movedim(1, 2).reshape(3, 5, 16))
        inner = ACTIVATIONS[activation](_linear(p, f"{at}.ffn.up", _norm(p, f"{at}.ffn_norm", x)))
        x = x + _linear(p, f"{at}.ffn.down", inner)
    embedding = _norm(p, "norm", x)[:, 0]
    logits, found = model.module(IMAGES)
    torch.testing.assert_close(found, embedding, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, _linear(p, "head", embedding), atol=1e-5, rtol=1e-5)


def test_axes_levels_and_signature(source: ModelSource) -> None:
    assert source.spec.universal().id == "ffn32-heads2"
    assert source.spec.trained_nested
    assert source.spec.granularities == {"ffn": (0.125, 0.25, 0.5, 1.0), "heads": (0.25, 0.5, 0.75, 1.0)}
    assert [(s.name, s.dims, s.pad) for s in source.signature.inputs] == [("pixel_values", ("batch", 2, 8, 8), 0)]
    assert [(s.name, s.dims, s.role) for s in source.signature.outputs] == [
        ("logits", ("batch", CLASSES), "classes"),
        ("embedding", ("batch", 16), "embedding"),
    ]
    assert source.signature.buckets(None, [Bucket(4, 64), Bucket(1, 128)]) == (Bucket(4, 1), Bucket(1, 1))


def test_narrowing_equals_masking_what_was_cut(universal: UniversalModel) -> None:
    """Independent of any slicing code: zero the down columns of cut neurons and the output columns of cut heads."""
    submodel = universal.spec.parse("ffn8x1_16x1-heads1x1_2x1")
    narrowed = universal.narrow(submodel)
    for index, layer in enumerate(universal.module.model.layers):
        layer.ffn.down.weight.data[:, submodel[f"layers.{index}.ffn"] :] = 0
        layer.attention.output.weight.data[:, 8 * submodel[f"layers.{index}.heads"] :] = 0
    for expected, found in zip(universal.module(IMAGES), narrowed(IMAGES), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_attention_is_counted_over_patches_and_class_token(source: ModelSource) -> None:
    rows, tokens, hidden, patches = 3, 5, 16, 4
    ops = source.workload(source.spec.parse("ffn8-heads1"), Bucket(rows, 1))
    linear = 2 * rows * tokens * (4 * hidden * 8 + 2 * hidden * 8)
    attention = 2 * rows * 2 * tokens * tokens * 8
    ends = 2 * rows * patches * (2 * 4 * 4) * hidden + 2 * rows * hidden * CLASSES
    assert sum(op.flops for op in ops if op.kind != "elementwise") == 2 * (linear + attention) + ends
    read = sum(op.weight_bytes for op in ops)
    left_out = 16 + 5 * 16 + (2 * 2 + 1) * 2 * 16  # [CLS], positions, norms
    assert read == 4 * (source.parameters(source.spec.parse("ffn8-heads1")) - left_out)


def test_weights_start_as_documented() -> None:
    config = MatformerVitConfig(
        **{**TINY_VIT, "hidden_size": 64, "intermediate_size": 256}, num_labels=CLASSES, activation="gelu", nested=True
    )
    torch.manual_seed(0)
    parameters = {name: value.detach() for name, value in MatformerViT(config).named_parameters()}
    assert all(not value.any() for name, value in parameters.items() if name.endswith("bias"))
    assert all(value.eq(1).all() for name, value in parameters.items() if name.endswith("norm.weight"))
    spread = {name: float(value.std()) for name, value in parameters.items() if name.startswith("layers.1.ffn.")}
    assert spread["layers.1.ffn.up.weight"] == pytest.approx(0.02, rel=0.05)
    assert spread["layers.1.ffn.down.weight"] == pytest.approx(0.02 / 2, rel=0.05)  # 1 / sqrt(2 * 2 layers)
    assert float(parameters["patch.weight"].std()) == pytest.approx((2 * 4 * 4) ** -0.5 / 3**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"patch_size": 3}, "config.json: image_size: 8 is no multiple of patch_size 3"),
        ({"intermediate_size": [32, 64]}, "tensor layers.1.ffn.up.weight has shape [32, 16]; expected [64, 16]"),
        ({"num_labels": 4}, ": tensor head.weight has shape [3, 16]; expected [4, 16] as config.json says"),
        ({"image_sise": 8}, "config.json: unknown key 'image_sise'; did you mean 'image_size'?"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    folder = edit_config(save_tiny_matvit(tmp_path / "m"), **changes)
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        open_source(folder)


def _linear(parameters: dict[str, torch.nn.Parameter], name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]


def _norm(parameters: dict[str, torch.nn.Parameter], name: str, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return scaled * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]
