"""Depth as an axis of encoders, against sentence-transformers with the same transformer cut to its first layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.errors import PlanError
from nestforge.exporters.depth import outermost_products
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.gated_decoders import save_text_decoder
from support.sentence_folders import HIDDEN, TEXTS, TINY, Layout, classes
from support.tiny_models import save_tiny_encoder
from support.tokenizer_files import word_tokenizer

LAYERS = 3
SIZES = {**TINY, "num_hidden_layers": LAYERS, "vocab_size": 64, "max_position_embeddings": 48}

BART = {"vocab_size": 64, "max_position_embeddings": 48, "d_model": 16, "pad_token_id": 0, "eos_token_id": 2}
for _side in ("encoder", "decoder"):
    BART |= {f"{_side}_ffn_dim": 32, f"{_side}_attention_heads": 2}


def save_any(model_type: str, **own: Any) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        import transformers

        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(model_type, **own))
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        word_tokenizer(64).save(str(folder / "tokenizer.json"))
        return folder

    return save


def bert(folder: Path) -> Path:
    return save_tiny_encoder(folder, **SIZES)


# With the list of layers that a user of sentence-transformers cuts; of the last two a norm stands behind it.
MODELS = {
    "bert": (bert, "encoder.layer"),
    "mpnet": (save_any("mpnet", **SIZES), "encoder.layer"),
    "distilbert": (
        save_any("distilbert", vocab_size=64, dim=HIDDEN, n_layers=LAYERS, n_heads=2, hidden_dim=32),
        "transformer.layer",
    ),
    "modernbert": (save_any("modernbert", **SIZES, pad_token_id=0, cls_token_id=1, sep_token_id=2), "layers"),
    "qwen3": (lambda folder: save_text_decoder(folder, "qwen3", num_hidden_layers=LAYERS), "layers"),
}


def folder_of(path: Path, save: Callable[[Path], Path]) -> Path:
    return Layout("any", lambda m: [m.Pooling(HIDDEN), m.Normalize()], save=save).write(path)


@pytest.mark.parametrize("name", MODELS)
def test_fewer_layers_answer_as_the_transformer_cut_by_hand(name: str, tmp_path: Path) -> None:
    save, listed = MODELS[name]
    folder = folder_of(tmp_path / "m", save)
    universal = load_universal(open_source(folder, (1, 2)))
    encoder, spec = universal.source.encoder, universal.spec
    assert spec.axes[0].choices == (1, 2, LAYERS)
    theirs = classes().SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    owner = theirs[0].auto_model.get_submodule(listed.rpartition(".")[0])
    layers = getattr(owner, listed.rpartition(".")[2])
    feeds = encoder.encode(TEXTS, 40, truncate=True, prompt="").feeds
    inputs = [torch.from_numpy(feeds[spec.name]) for spec in universal.source.signature.inputs]
    for depth in spec.axes[0].choices:
        submodel = spec.submodel({"depth": depth})
        setattr(owner, listed.rpartition(".")[2], layers[:depth])
        with torch.no_grad():
            found = universal.narrow(submodel)(*inputs)[-1].numpy()
        expected = theirs.encode(list(TEXTS))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert (found * expected).sum(1).min() > 1 - 1e-6
        own = sum(each.numel() for each in theirs[0].auto_model.parameters())
        assert abs(universal.source.parameters(submodel) - own) <= HIDDEN * (HIDDEN + 1)  # a pooler that nothing reads


def test_layers_behind_the_depth_cost_nothing(tmp_path: Path) -> None:
    for name in ("bert", "distilbert"):
        source = open_source(folder_of(tmp_path / name, MODELS[name][0]), (1, 2))
        costs = [
            sum(op.flops for op in source.workload(source.spec.submodel({"depth": depth}), Bucket(1, 8)))
            for depth in (1, 2, 3)
        ]
        layer = costs[2] - costs[1]
        assert layer > 0
        assert costs[1] - costs[0] == layer
        assert costs[0] >= layer


@pytest.mark.parametrize(
    ("save", "layers", "message"),
    [
        (bert, (0,), "exits: expected layers from 1 to 3, got 0"),
        (bert, (2, 4), "exits: expected layers from 1 to 3, got 4"),
        (
            save_any("bart", encoder_layers=LAYERS, decoder_layers=2, **BART),  # two lists, of which one has as many
            (1,),
            r"exits \[1\] requested, but it is not known what of this model they leave out",
        ),
        (
            save_any("albert", **SIZES, embedding_size=HIDDEN),  # one layer, run three times
            (1,),
            r"exits \[1\] requested, but it is not known what of this model they leave out; expected one list of 3 la",
        ),
    ],
)
def test_refused(save: Callable[[Path], Path], layers: tuple[int, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        open_source(save(tmp_path / "m"), layers)


def decoder(layers: int, prefix: str = "model.layers") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (512, 32)}
    for layer in range(layers):
        shapes[f"{prefix}.{layer}.self_attn.k_proj.weight"] = (16, 32)
        shapes[f"{prefix}.{layer}.mlp.up_proj.weight"] = (64, 32)
        shapes[f"{prefix}.{layer}.mlp.down_proj.weight"] = (32, 64)
        shapes[f"{prefix}.{layer}.norm.weight"] = (128,)
    return shapes


def test_the_last_product_of_the_first_and_the_last_eighth_of_the_layers() -> None:
    assert outermost_products(decoder(7)) == frozenset()
    assert outermost_products(decoder(15)) == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 14)}
    expected = {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1, 2, 27, 28, 29)}
    assert outermost_products(decoder(30)) == expected


def test_every_list_of_layers_has_its_own_ends() -> None:
    two = decoder(8, "encoder.block") | decoder(4, "decoder.block")
    assert outermost_products(two) == {f"encoder.block.{layer}.mlp.down_proj.weight" for layer in (0, 7)}


def test_stacks_of_experts_are_weights_and_lists_of_them_are_no_layers() -> None:
    stacks = {f"layers.{layer}.experts.{name}": (4, *shape) for layer in range(8) for name, shape in EXPERT.items()}
    assert outermost_products(stacks) == {"layers.0.experts.down", "layers.7.experts.down"}
    listed = {f"layers.{layer}.experts.{e}.down": EXPERT["down"] for layer in range(8) for e in range(16)}
    assert outermost_products(listed) == frozenset(), "none has more inputs than the others of its layer"


def test_products_of_one_value_are_never_told_apart() -> None:
    narrow = decoder(8) | {f"model.layers.{layer}.mlp.down_proj.weight": (32, 32) for layer in range(8)}
    assert outermost_products(narrow) == frozenset(), "queries, keys and values are one product in some engines"


EXPERT = {"up": (64, 32), "down": (32, 64)}
