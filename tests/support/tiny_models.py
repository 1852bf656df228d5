"""Small checkpoints with random weights, as a user's folder would hold them: encoders, GPT-2, T5, and vision models of
images 8 x 8, patches 4 x 4."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.tokenizer_files import END, SPECIAL, WORDS, byte_level, word_tokenizer
from tokenizers import Tokenizer, processors


def save_tiny_encoder(folder: Path, model_type: str = "bert", task: str = "Model", **overrides: Any) -> Path:
    """A 3-layer encoder, 4 heads of 8, FFN 64, hidden 32, whose outputs really depend on every part."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 40,
            "type_vocab_size": 1 if model_type in {"roberta", "xlm-roberta", "camembert"} else 2,
            "initializer_range": 0.3,
            **({"embedding_size": 32} if model_type == "electra" else {}),
            **overrides,
        },
    )
    torch.manual_seed(0)
    factory = {
        "Model": "AutoModel",
        "ForSequenceClassification": "AutoModelForSequenceClassification",
        "ForTokenClassification": "AutoModelForTokenClassification",
        "ForMaskedLM": "AutoModelForMaskedLM",
    }[task]
    model = getattr(transformers, factory).from_config(config)
    for parameter in model.parameters():  # biases and norms start at constants; make every one matter
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    word_tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def add_pooling(folder: Path, normalize: bool = True) -> None:
    """The files by which sentence-transformers says how a sentence embedding is made."""
    (folder / "1_Pooling").mkdir()
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    parts = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalize else [])]
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (kind, path) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def corpus(path: Path, texts: int = 400) -> Path:
    """A text file with different lines of words that the tiny tokenizer knows."""
    lines = []
    for number in range(texts):
        lines.append(" ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 5 + number % 7)))
    path.write_text("\n".join(f"{line} {WORDS[i % 20]} {WORDS[i // 20 % 20]}" for i, line in enumerate(lines)) + "\n")
    return path


TINY_GPT2: dict[str, Any] = {
    "vocab_size": 48,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 32,
    "n_positions": 40,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_gpt2(class_name: str = "GPT2LMHeadModel", **overrides: Any) -> Any:
    """A transformers module whose answers really depend on every parameter."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, class_name)(transformers.GPT2Config(**{**TINY_GPT2, **overrides}))
    for parameter in model.parameters():  # biases and norms start at constants; make every one matter
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


def save_gpt2(folder: Path, class_name: str = "GPT2LMHeadModel", **overrides: Any) -> Path:
    """A folder with ``config.json`` and ``model.safetensors``."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    make_gpt2(class_name, **overrides).save_pretrained(folder)
    return folder


def narrowed_gpt2(wide: Any, widths: list[int]) -> Any:
    """Another module of the same class, whose FFNs are really made with the first neurons of the wide one's."""
    narrow = copy.deepcopy(wide)
    for layer, width in zip(narrow.base_model.h, widths, strict=True):
        up, down = layer.mlp.c_fc, layer.mlp.c_proj
        layer.mlp = type(layer.mlp)(width, narrow.config).eval()
        layer.mlp.c_fc.weight.data, layer.mlp.c_fc.bias.data = up.weight.data[:, :width], up.bias.data[:width]
        layer.mlp.c_proj.weight.data, layer.mlp.c_proj.bias.data = down.weight.data[:width], down.bias.data
    return narrow.requires_grad_(False)


T5_VOCABULARY = 512
# Fewer layers before than behind; heads that are wider together than the model; distances that end within a test's.
TINY_T5: dict[str, Any] = {
    "vocab_size": T5_VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "pad_token_id": 0,
    "eos_token_id": SPECIAL.index(END),
    "decoder_start_token_id": 0,
}
V1_1: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def make_t5(class_name: str = "T5ForConditionalGeneration", **overrides: Any) -> Any:
    """A transformers module whose logits really depend on every part; where the config says v1.1, with its own head."""
    import transformers

    torch.manual_seed(0)
    model: Any = getattr(transformers, class_name)(transformers.T5Config(**{**TINY_T5, **overrides}))
    if overrides.get("tie_word_embeddings") is False and hasattr(model, "lm_head"):
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    for name, parameter in model.named_parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
        if "relative_attention_bias" in name:  # small ones would not show
            parameter.data = torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


def save_t5(folder: Path, class_name: str = "T5ForConditionalGeneration", text: bool = True, **overrides: Any) -> Path:
    """Its folder, with a tokenizer that ends a text with the token that ends one if it has ``text``."""
    model = make_t5(class_name, **overrides)
    model.save_pretrained(folder)
    stored = {name: parameter.contiguous() for name, parameter in model.named_parameters()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    if text:
        t5_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def t5_tokenizer() -> Tokenizer:
    """Byte-level, as any other; every text has the token behind it that ends it."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, SPECIAL.index(END))]
    )
    return tokenizer


# 2 layers, 2 heads of 8, FFN 32, hidden 16; five tokens.
TINY_VIT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 2,
}
CLASSES = 3


def save_tiny_vit(folder: Path, model_type: str = "vit", task: str = "Model", **overrides: Any) -> Path:
    """A Hugging Face ViT or DeiT of the class that ends in ``task``, whose outputs depend on every part."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(model_type, **{**TINY_VIT, "num_labels": CLASSES, **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, {"vit": "ViT", "deit": "DeiT"}[model_type] + task)(config)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    """Overwrites keys of ``config.json``; ``...`` removes one."""
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    return folder


def cut_ffn(folder: Path, widths: list[int]) -> Path:
    """Makes a Hugging Face ViT one whose layers keep their first ``widths`` neurons, listed in ``config.json``."""
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        for layer, width in enumerate(widths):
            if f"layer.{layer}.intermediate.dense." in name:
                weights[name] = weights[name][:width].contiguous()
            elif f"layer.{layer}.output.dense.weight" in name:
                weights[name] = weights[name][:, :width].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return edit_config(folder, intermediate_size=widths)


def save_tiny_matvit(folder: Path, **overrides: Any) -> Path:
    """A MatViT that says it was trained nested, in FFNs and heads."""
    from nestforge.exporters.checkpoints.own_folder import save_model
    from nestforge.exporters.families.matformer.config import MatformerVitConfig
    from nestforge.exporters.families.matformer.model import MatformerViT

    settings = {**TINY_VIT, "num_labels": CLASSES, "activation": "gelu", "nested": True, "nested_heads": True}
    config = MatformerVitConfig(**{**settings, **overrides})
    torch.manual_seed(0)
    model = MatformerViT(config)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return save_model(model, config, folder)
