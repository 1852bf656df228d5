"""Loads the user's own transformers module, strictly, and gives it a positional signature for tracing."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from .checkpoint import Checkpoint
from .family import Signature


class EncoderModule(torch.nn.Module):
    """Calls ``model`` by keyword and returns its outputs as a tuple, in the signature's order.

    ``pooling`` adds the sentence embedding ``[B, H]`` that sentence-transformers computes outside the model:
    ``{"mean": bool, "normalize": bool}``; empty for none.
    """

    def __init__(self, model: torch.nn.Module, signature: Signature, pooling: Mapping[str, bool]) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(spec.name for spec in signature.inputs)
        self.outputs = tuple(spec.name for spec in signature.outputs)
        self.pooling = dict(pooling)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = dict(zip(self.inputs, tensors, strict=True))
        result = dict(self.model(**named))
        if self.pooling:
            result["sentence_embedding"] = self._embed(result["last_hidden_state"], named["attention_mask"])
        return tuple(result[name] for name in self.outputs)

    def _embed(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.pooling["mean"]:
            weights = mask.unsqueeze(-1).to(hidden.dtype)  # [B, S, 1]
            pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)  # [B, H]
        else:
            pooled = hidden[:, 0]
        return torch.nn.functional.normalize(pooled, dim=-1) if self.pooling["normalize"] else pooled


def load_transformers(checkpoint: Checkpoint, without_pooler: bool) -> torch.nn.Module:
    """The class that ``config.json`` names, with this checkpoint's weights, in eval mode and float32.

    Raises CheckpointError if a weight is missing, has another shape or is not finite.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    name = checkpoint.architecture
    cls: Any = getattr(transformers, name, None) if name else transformers.AutoModel
    if cls is None:
        raise CheckpointError(f"{checkpoint.folder / 'config.json'}: transformers has no class {name!r}")
    has_pooler = "add_pooling_layer" in inspect.signature(cls.__init__).parameters
    options = {"add_pooling_layer": False} if without_pooler and has_pooler else {}
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
        model, report = cls.from_pretrained(
            checkpoint.folder,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except Exception as failure:  # transformers raises many unrelated types for a config.json that makes no sense
        raise CheckpointError(f"{checkpoint.folder}: transformers cannot load it ({_one_line(failure)})") from failure
    _refuse_misfits(checkpoint, report)
    for parameter_name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise CheckpointError(f"{checkpoint.folder}: tensor {parameter_name} holds NaN or infinite values")
    frozen: torch.nn.Module = model.eval().requires_grad_(False)
    return frozen


def _refuse_misfits(checkpoint: Checkpoint, report: Mapping[str, Any]) -> None:
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name} has shape {list(found)}; config.json says {list(expected)}"
        )
    for name in sorted(report["missing_keys"]):
        raise CheckpointError(f"{checkpoint.folder}: tensor {name} is missing from the weights")


def _one_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:300]
