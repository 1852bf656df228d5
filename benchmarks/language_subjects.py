"""Llama-shaped models with random weights, one of them with windows, compiled to generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ..bucket import Bucket
from ..compiler.compile import compile_bundle
from ..profiles.budget import BudgetSpec
from ..profiles.precision import Precision
from .harness import CACHE
from .subjects import elsewhere

# Eight widths of its FFNs, the largest last.
WIDTHS = tuple(f"ffn{width}" for width in range(256, 2049, 256))


def llama_folder() -> Path:
    """12 layers of 768, FFN 2048, 12 heads that share 4 of keys and values, 32,000 tokens, 4096 positions."""
    sizes = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    return _checkpoint("llama-100m", "Llama", num_key_value_heads=4, max_position_embeddings=4096, **sizes)


def llama_bundle(precision: Precision = "fp32") -> Path:
    """The whole of it alone, as others have it."""
    return _bundle(llama_folder(), precision)


def llama_halves_bundle() -> Path:
    """The whole of it, and half of its FFNs."""
    return _bundle(llama_folder(), "fp32", ("ffn1024",), "-halves")


def llama_widths_bundle(precision: Precision) -> Path:
    """All of WIDTHS."""
    return _bundle(llama_folder(), precision, WIDTHS[:-1], "-widths")


def tiny_llama_bundle() -> Path:
    """One layer of 64 and 32,000 tokens, whose steps are so short that work beside them shows."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return _bundle(
        _checkpoint("llama-tiny", "Llama", num_key_value_heads=2, max_position_embeddings=512, **sizes), "fp32"
    )


def mistral_bundle() -> Path:
    """4 layers of 512 whose tokens see 512, FFN 1024, 8 heads that share 4 of keys and values, 16384 positions."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "sliding_window": 512, "max_position_embeddings": 16384}
    return _bundle(_checkpoint("mistral-windows", "Mistral", **sizes), "fp32")


def _checkpoint(name: str, kind: str, /, **sizes: int) -> Path:
    import transformers

    library: Any = transformers
    folder = CACHE / f"{name}-checkpoint"
    if not folder.exists():
        torch.manual_seed(0)
        config = getattr(library, f"{kind}Config")(vocab_size=32_000, tie_word_embeddings=True, **sizes)
        getattr(library, f"{kind}ForCausalLM")(config).save_pretrained(folder)
        letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        library.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def _bundle(folder: Path, precision: Precision, submodels: Sequence[str] = (), kind: str = "") -> Path:
    path = CACHE / f"{folder.name}{kind}-{precision}.bundle"
    if not path.exists():
        device = replace(elsewhere(), buckets=(Bucket(1, 16),), budgets={"full": BudgetSpec()}, precisions=(precision,))
        compile_bundle(folder, device, path, submodels=submodels, levels={"ffn": (1.0,)}, generate=True)
    return path
