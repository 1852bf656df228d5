"""How well a submodel does on texts, in PyTorch: one number to compare assignments by before any is compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from ...elastic import Submodel
from ...errors import CheckpointError
from ...exporters.universal import UniversalModel
from .texts import TextBatches, compared_first, embeddings

_BATCH = 16
# Long texts cost time quadratically and tell two submodels apart no better.
_MAX_TOKENS = 128


class HeldOutLoss:
    """The loss of submodels of ``model`` on ``texts``; lower is better.

    For a model that predicts the next token: nats per token. For every other model: 1 - mean cosine of its compared
    output (bundle/roles.py) to the universal model's, averaged over the tokens of a text.
    """

    def __init__(self, model: UniversalModel, texts: Sequence[str]) -> None:
        """Raises CheckpointError for a model without a tokenizer, or without an output to compare."""
        self._model, self._texts = model, TextBatches.of(model.source, texts, _MAX_TOKENS)
        self._role, self._output = compared_first(model.source)
        if self._role is None:
            raise CheckpointError(f"{model.source.checkpoint.folder}: no output by which submodels could be compared")
        self._reference = None if self._of_tokens else embeddings(model.source, model.module, self._texts)

    @property
    def unit(self) -> str:
        """Name of the number."""
        return "nats per token" if self._of_tokens else f"1 - cosine of {self._output.name} to the universal model's"

    def __call__(self, submodel: Submodel) -> float:
        module = self._model.narrow(submodel)
        if self._reference is None:
            return self._nats(module)
        found = embeddings(self._model.source, module, self._texts)
        return float((1 - functional.cosine_similarity(found, self._reference)).clamp(min=0).mean())

    @property
    def _of_tokens(self) -> bool:
        return self._role == "next_tokens"

    @torch.no_grad()
    def _nats(self, module: torch.nn.Module) -> float:
        """Mean loss over the tokens of every text but its first."""
        signature = self._model.source.signature
        assert signature.text is not None
        ids = [spec.name for spec in signature.inputs].index(signature.text.continued)
        place, total, count = signature.outputs.index(self._output), 0.0, 0.0
        for batch in self._texts.once(_BATCH):
            logits, counted = module(*batch.inputs)[place][:, :-1], batch.weights[:, 1:]  # [B, S - 1, V], [B, S - 1]
            each = functional.cross_entropy(logits.transpose(1, 2), batch.inputs[ids][:, 1:], reduction="none")
            total, count = total + float((each * counted).sum()), count + float(counted.sum())
        return total / max(1.0, count)
