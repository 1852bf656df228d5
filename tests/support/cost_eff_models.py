"""Multi-exit model folders as a user would hold them: tiny ones with random weights, the published ones as headers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "model_type": "cost_eff",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": [3, 4, 0, 2],
    "head_size": 8,
    "intermediate_size": [48, 64, 40, 0],
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
SIDECAR: dict[str, Any] = {
    "schema_version": 1,
    "backbone": "bert-post-ln",
    "embedding": {"mode": "factorised", "rank": 16},
    "exits": {"layers": [1, 3, 4], "pool": "cls", "activation": "tanh", "classes": 3},
    "gate": {"criterion": "entropy", "compare": "<=", "tau": [0.4, 0.3], "rule": "per_row"},
}


def changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``; None removes a key, and ``exits.pool`` reaches into a mapping."""
    result: dict[str, Any] = json.loads(json.dumps(base))
    for key, value in changes.items():
        *path, last = key.split(".")
        target = result
        for part in path:
            target = target[part]
        target[last] = value
        if value is None:
            del target[last]
    return result


def shapes_of(config: Mapping[str, Any], sidecar: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the stored weights, spelled out from the two files without any code of the family."""
    h, depth, rank = config["hidden_size"], config["num_hidden_layers"], sidecar["embedding"].get("rank")
    heads, ffn = (
        value if isinstance(value := config[key], list) else [value] * depth
        for key in ("num_attention_heads", "intermediate_size")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], rank or h),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], h),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], h),
        "embeddings.LayerNorm.weight": (h,),
        "embeddings.LayerNorm.bias": (h,),
    }
    if rank:
        shapes["embeddings.word_projection.weight"] = (h, rank)
    for layer in range(depth):
        at, inner = f"encoder.layer.{layer}", heads[layer] * config["head_size"]
        linear = {
            **{f"attention.self.{part}": (inner, h) for part in ("query", "key", "value")},
            "attention.output.dense": (h, inner),
            "intermediate.dense": (ffn[layer], h),
            "output.dense": (h, ffn[layer]),
        }
        shapes |= {f"{at}.{name}.weight": shape for name, shape in linear.items() if 0 not in shape}
        shapes |= {f"{at}.{name}.bias": shape[:1] for name, shape in linear.items() if shape[0]}
        for name in ("attention.output", "output"):
            shapes |= {f"{at}.{name}.LayerNorm.{kind}": (h,) for kind in ("weight", "bias")}
    for layer in sidecar["exits"]["layers"]:
        classes = sidecar["exits"]["classes"]
        shapes |= {f"exits.{layer}.weight": (classes, h), f"exits.{layer}.bias": (classes,)}
    return shapes


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Values under which every part of the model matters to its outputs."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        data = torch.randn(shape, generator=generator)
        spread = 0.1 if name.endswith("bias") or "LayerNorm" in name else 0.3
        weights[name] = spread * data + (1.0 if name.endswith("LayerNorm.weight") else 0.0)
    return weights


def save_folder(
    folder: Path, config: Mapping[str, Any], sidecar: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> Path:
    """The three files of a model folder."""
    _save_texts(folder, config, sidecar)
    save_file(dict(weights), folder / "model.safetensors")
    return folder


def save_tiny(folder: Path, config: Mapping[str, Any] | None = None, sidecar: Mapping[str, Any] | None = None) -> Path:
    """Four layers of hidden 32, heads of 8 and unequal widths, one without heads, one without FFN; three exits.

    ``config`` and ``sidecar`` change CONFIG and SIDECAR as ``changed`` says; the weights follow.
    """
    configuration, manifest = changed(CONFIG, config or {}), changed(SIDECAR, sidecar or {})
    return save_folder(folder, configuration, manifest, random_weights(shapes_of(configuration, manifest)))


def published(heads: int, ffn: int, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and sidecar of a published setting: 12 layers of hidden 768, an exit after each, two classes."""
    config = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "head_size": 64}
    config |= {"num_attention_heads": heads, "intermediate_size": ffn, "max_position_embeddings": 512}
    exits = {"layers": list(range(1, 13)), "pool": "cls", "activation": "tanh", "classes": 2}
    sidecar = {"embedding": {"mode": "factorised", "rank": rank}, "exits": exits, "gate": None}
    return changed(CONFIG, config), changed(SIDECAR, sidecar)


def save_headers(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A folder whose weights are a header and a hole: everything that is known without reading them."""
    _save_texts(folder, config, None)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return folder


def save_published(folder: Path, heads: int, ffn: int, rank: int) -> Path:
    """A published setting as headers."""
    config, sidecar = published(heads, ffn, rank)
    save_headers(folder, config, shapes_of(config, sidecar))
    (folder / "cost_eff.json").write_text(json.dumps(sidecar))
    return folder


def _save_texts(folder: Path, config: Mapping[str, Any], sidecar: Mapping[str, Any] | None) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if sidecar is not None:
        (folder / "cost_eff.json").write_text(json.dumps(sidecar))
