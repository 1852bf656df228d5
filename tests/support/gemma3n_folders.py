"""A small folder as Gemma 3n is published, its text model of random weights, and slices of it cut by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.gated_decoders import make_decoder
from support.tokenizer_files import word_tokenizer

# Layers 0 to 2 make keys and values, the others read those of the last of their type.
TYPES = [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full", "sliding", "full")]
SPARSE = [0.5, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0]
WIDTH = 32
TEXT: dict[str, Any] = {
    "num_hidden_layers": 7,
    "intermediate_size": WIDTH,
    "layer_types": TYPES,
    "activation_sparsity_pattern": SPARSE,
    "num_kv_shared_layers": 4,
    "head_dim": 8,
    "nested": True,
}
_PREFIX = "model.language_model."


def save_published(folder: Path, **text: Any) -> Path:
    """The folder, with tensors of the towers that read images and audio."""
    own = {key: value for key, value in {**TEXT, **text}.items() if key != "nested"}
    model = make_decoder("gemma3n_text", **own)
    folder.mkdir(parents=True)
    tensors = {
        _published(name): value.contiguous() for name, value in model.state_dict().items() if "lm_head" not in name
    }
    towers = (
        "vision_tower.timm_model.conv_stem.weight",
        "audio_tower.conformer.0.weight",
        "embed_vision.embedding.weight",
    )
    tensors |= {f"model.{name}": torch.ones(3) for name in towers}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": model.config.to_dict(),
        "vision_config": {"model_type": "gemma3n_vision"},
        "audio_config": {"model_type": "gemma3n_audio"},
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    word_tokenizer(48).save(str(folder / "tokenizer.json"))
    return folder


def cut_by_hand(folder: Path, widths: Sequence[int], skipped: Sequence[int]) -> Any:
    """The text model of the published ``folder`` with these layers left out and FFNs of so many neurons in the others,
    as Google's notebook cuts the files: every tensor by itself, and a configuration for what is left."""
    import transformers

    text = json.loads((folder / "config.json").read_text())["text_config"]
    layers, own = text["num_hidden_layers"], text["hidden_size_per_layer_input"]
    kept = [layer for layer in range(layers) if layer not in skipped]
    places = {old: new for new, old in enumerate(kept)}
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.startswith(_PREFIX):
            continue
        name = name.removeprefix(_PREFIX)
        if name.startswith("layers."):
            _, old, rest = name.split(".", 2)
            if int(old) not in places:
                continue
            new = places[int(old)]
            name = f"layers.{new}.{rest}"
            if rest in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
                tensor = tensor[: widths[new]].contiguous()
            elif rest == "mlp.down_proj.weight":
                tensor = tensor[:, : widths[new]].contiguous()
        elif name == "per_layer_model_projection.weight":
            tensor = tensor.reshape(layers, own, -1)[kept].reshape(len(kept) * own, -1)
        elif name == "embed_tokens_per_layer.weight":
            tensor = tensor.reshape(-1, layers, own)[:, kept].reshape(-1, len(kept) * own)
        found[f"model.{name}"] = tensor
    shared = layers - text["num_kv_shared_layers"]
    config = transformers.AutoConfig.for_model(
        **{
            **text,
            "num_hidden_layers": len(kept),
            "intermediate_size": list(widths),
            "layer_types": [text["layer_types"][layer] for layer in kept],
            "activation_sparsity_pattern": [text["activation_sparsity_pattern"][layer] for layer in kept],
            "num_kv_shared_layers": sum(layer >= shared for layer in kept),
        }
    )
    model = transformers.Gemma3nForCausalLM(config).eval().requires_grad_(False)
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert missing == ["lm_head.weight"], missing  # tied
    assert not unexpected, unexpected
    return model


def _published(name: str) -> str:
    return _PREFIX + name.removeprefix("model.")
