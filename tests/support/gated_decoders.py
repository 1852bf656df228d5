"""Small gated decoders, made with transformers and random weights, as a user's folder would hold them."""

import copy
from pathlib import Path
from typing import Any

import torch
from support.tokenizer_files import word_tokenizer

# Two layers, four heads on two pairs of keys and values, FFN 32; windows shorter than the buckets of the tests.
TINY: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALTERNATING = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "granite": {
        "attention_bias": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {},
    "phi3": {"sliding_window": 3, "partial_rotary_factor": 0.5},
    "gemma": {},
    "gemma2": {**_ALTERNATING, "query_pre_attn_scalar": 4, "final_logit_softcapping": 5.0},
    "gemma3_text": {**_ALTERNATING, "query_pre_attn_scalar": 4},
    "gemma3n_text": {
        "num_hidden_layers": 3,
        "intermediate_size": [32, 16, 32],
        "activation_sparsity_pattern": [0.5, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 3,
        "num_kv_shared_layers": 1,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
        "vocab_size_per_layer_input": 40,
        "hidden_size_per_layer_input": 8,
    },
}


def make_decoder(model_type: str, **overrides: Any) -> Any:
    """A transformers module whose logits really depend on every part."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy({**TINY, **OWN[model_type], **overrides}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases and norms start at constants; make every one matter
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


def save_decoder(folder: Path, model_type: str = "llama", **overrides: Any) -> Path:
    """A folder with ``config.json`` and ``model.safetensors``."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    make_decoder(model_type, **overrides).save_pretrained(folder)
    return folder


def narrowed(wide: Any, widths: list[int]) -> Any:
    """Another module of the same class, whose FFNs are really made with the first neurons of the wide one's."""
    narrow = copy.deepcopy(wide)
    for layer, width in zip(narrow.model.layers, widths, strict=True):
        for name in ("gate_proj", "up_proj", "gate_up_proj"):
            if not hasattr(layer.mlp, name):
                continue
            part, halves = getattr(layer.mlp, name), 2 if name == "gate_up_proj" else 1
            small = torch.nn.Linear(part.in_features, halves * width, bias=part.bias is not None)
            small.weight.data = torch.cat([half[:width] for half in part.weight.data.chunk(halves)])
            if part.bias is not None:
                small.bias.data = part.bias.data[:width].clone()
            setattr(layer.mlp, name, small)
        down = torch.nn.Linear(width, layer.mlp.down_proj.out_features, bias=layer.mlp.down_proj.bias is not None)
        down.weight.data = layer.mlp.down_proj.weight.data[:, :width].clone()
        if down.bias is not None:
            down.bias.data = layer.mlp.down_proj.bias.data.clone()
        layer.mlp.down_proj = down
    return narrow.requires_grad_(False)


def save_text_decoder(folder: Path, model_type: str = "llama", bare: bool = True, **overrides: Any) -> Path:
    """A folder with a tokenizer, of the language model or of the ``bare`` decoder, as sentence-transformers has it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = make_decoder(model_type, **overrides)
    (model.model if bare else model).save_pretrained(folder)
    word_tokenizer(TINY["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder
