"""Small real checkpoints, made with transformers and random weights, as a user's folder would hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = tuple(
    "the a quick brown fox jumps over lazy dog model engine budget shape time compile run test of to and".split()  # noqa: SIM905
)


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


def word_tokenizer(vocabulary: int) -> Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = {word: index for index, word in enumerate([*special, *WORDS][:vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106  (a token, not a password)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer
