"""What a ``config.json``, of transformers or like one of its own, may say that is not honoured (no torch here).

A class computes what it reads of its configuration, so most keys are honoured by construction. Refused is what the
class would pass over in silence, what would run or fetch code, and what no submodel could keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import CheckpointError
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.elastic_config import read_number

# Implementations of attention that PyTorch has itself. Others name a package, or a kernel on the hub: code to fetch.
_ATTENTION_IMPLEMENTATIONS = (None, "eager", "sdpa")
# Activations with parameters of their own.
LEARNED = ("prelu", "xielu")


def refuse_unhonoured(checkpoint: Checkpoint, encoder_decoder: bool = False) -> None:
    """Raises CheckpointError, one line that names the key, for what would change the function and is not honoured; of
    an ``encoder_decoder`` a second sequence is honoured."""
    for problem in _problems(checkpoint.config, encoder_decoder):
        raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {problem}")
    adapter = checkpoint.folder / "adapter_config.json"
    if adapter.is_file():
        raise CheckpointError(
            f"{adapter}: adapters are not supported; merge the adapter into the model (merge_and_unload of peft) and "
            "save it again"
        )


def read_pad(checkpoint: Checkpoint, vocabulary: int, default: int | None) -> int | None:
    """``pad_token_id``, or ``default`` where config.json does not have the key; None where it is null or negative.

    Raises CheckpointError for one beyond the vocabulary.
    """
    value: Any = checkpoint.config.get("pad_token_id", default)
    if value is not None and (type(value) is not int or value >= vocabulary):
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'}: pad_token_id: expected a token of the vocabulary, "
            f"0..{vocabulary - 1}, or null, got {value!r:.80}"
        )
    return None if value is None or value < 0 else value


def read_classes(checkpoint: Checkpoint) -> int:
    """Classes of a head, as transformers counts them: ``num_labels``, else the labels that have names, else two."""
    labels = checkpoint.config.get("id2label")
    return read_number(checkpoint, "num_labels", default=len(labels) if isinstance(labels, Mapping) else 2)


def _problems(config: Mapping[str, Any], encoder_decoder: bool) -> Iterator[str]:
    if config.get("auto_map"):
        yield (
            "auto_map: the folder brings code of its own, which is never run; remove the key if transformers' own "
            "class is the same model"
        )
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            yield f"{key}: quantized weights are not supported; save the model in float32 or bfloat16"
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        if config.get(key) not in _ATTENTION_IMPLEMENTATIONS:
            yield (
                f"{key}: expected eager or sdpa, got {config[key]!r:.80}; other kernels are neither fetched nor run: "
                "remove the key"
            )
    if config.get("per_layer_config"):
        yield "per_layer_config: layers that differ in more than their FFN's width are not supported"
    positions = config.get("position_embedding_type")
    if positions not in (None, "absolute"):
        yield (
            f"position_embedding_type: {positions!r:.80} is not supported: the model's class would pass over it and "
            "use its own"
        )
    for key in ("alibi", "use_alibi"):
        if config.get(key):
            yield f"{key}: linear biases of attention (ALiBi) are not supported"
    for key in ("add_cross_attention", "is_encoder_decoder"):
        if config.get(key) and not encoder_decoder:
            yield f"{key}: a second sequence to attend to is not supported"
    if config.get("pruned_heads"):
        yield "pruned_heads: heads that are gone from some layers are not supported"
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        if config.get(key) in LEARNED:
            yield f"{key}: {config[key]} has parameters of its own (a learned activation), which is not supported"
