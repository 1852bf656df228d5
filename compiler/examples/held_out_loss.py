"""How well a submodel does on texts, in PyTorch: one number to compare assignments by before any is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ...bundle.entries.tensor_spec import Role, TensorSpec
from ...bundle.roles import Interface, compared_outputs
from ...elastic import Submodel
from ...errors import CheckpointError
from ...exporters.universal import UniversalModel

_BATCH = 16
# Long texts cost time quadratically and tell two submodels apart no better.
_MAX_TOKENS = 128


@dataclass(frozen=True)
class _Batch:
    """Inputs in the signature's order; ``real`` [B, S] is 1 where a token is no padding."""

    inputs: tuple[torch.Tensor, ...]
    ids: torch.Tensor
    real: torch.Tensor


class HeldOutLoss:
    """The loss of submodels of ``model`` on ``texts``; lower is better.

    For a model that predicts the next token: nats per token. For every other model: 1 - mean cosine of its compared
    output (bundle/roles.py) to the universal model's, averaged over the tokens of a text.
    """

    def __init__(self, model: UniversalModel, texts: Sequence[str]) -> None:
        """Raises CheckpointError for a model without a tokenizer, or without an output to compare."""
        source = model.source
        compared = compared_outputs(Interface(source.signature.inputs, source.signature.outputs, source.signature.text))
        encoder = model.source.encoder
        if encoder is None or source.signature.text is None:
            raise CheckpointError(f"{source.checkpoint.folder}: no tokenizer.json, so this model reads no texts")
        if not compared:
            raise CheckpointError(f"{source.checkpoint.folder}: no output by which submodels could be compared")
        self._model = model
        self._role: Role
        self._output: TensorSpec
        self._role, self._output = next(iter(compared.items()))
        longest = min(_MAX_TOKENS, source.signature.max_sequence or _MAX_TOKENS)
        ids = source.signature.text.continued
        by_length = sorted((encoder.encode([t], longest, truncate=True).feeds[ids].shape[1], t) for t in texts)
        self._batches = []
        for start in range(0, len(by_length), _BATCH):
            part = by_length[start : start + _BATCH]
            feeds = encoder.encode([text for _, text in part], longest, truncate=True).feeds
            inputs = {spec.name: torch.from_numpy(feeds[spec.name]) for spec in source.signature.inputs}
            lengths = torch.tensor([length for length, _ in part])
            real = torch.arange(inputs[ids].shape[1])[None, :] < lengths[:, None]  # [B, S]
            self._batches.append(_Batch(tuple(inputs.values()), inputs[ids], real.float()))
        self._reference = [] if self._of_tokens else [self._vectors(model.module, batch) for batch in self._batches]

    @property
    def unit(self) -> str:
        """Name of the number."""
        return "nats per token" if self._of_tokens else f"1 - cosine of {self._output.name} to the universal model's"

    def __call__(self, submodel: Submodel) -> float:
        module = self._model.narrow(submodel)
        parts = [self._total(module, index) for index in range(len(self._batches))]
        return sum(total for total, _ in parts) / max(1.0, sum(count for _, count in parts))

    @property
    def _of_tokens(self) -> bool:
        return self._role == "next_tokens"

    def _total(self, module: torch.nn.Module, index: int) -> tuple[float, float]:
        """Sum of the loss over the batch, and how many tokens or texts it is the sum of."""
        batch = self._batches[index]
        if self._of_tokens:
            logits = self._run(module, batch)[:, :-1]  # [B, S - 1, V]
            each = functional.cross_entropy(logits.transpose(1, 2), batch.ids[:, 1:], reduction="none")
            counted = batch.real[:, 1:]
            return float((each * counted).sum()), float(counted.sum())
        cosine = functional.cosine_similarity(self._vectors(module, batch), self._reference[index])
        return float((1 - cosine).clamp(min=0).sum()), float(len(cosine))

    def _vectors(self, module: torch.nn.Module, batch: _Batch) -> torch.Tensor:
        """One vector per text [B, H], float64: near-equal vectors would lose their difference in float32."""
        output = self._run(module, batch).double()
        if "sequence" not in self._output.dims:
            return output
        weights = batch.real[:, :, None].double()
        return (output * weights).sum(1) / weights.sum(1)

    def _run(self, module: torch.nn.Module, batch: _Batch) -> torch.Tensor:
        position = self._model.source.signature.outputs.index(self._output)
        with torch.no_grad():
            output: torch.Tensor = module(*batch.inputs)[position]
        return output
