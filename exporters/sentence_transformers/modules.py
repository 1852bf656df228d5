"""The modules of sentence-transformers that stand behind the transformer, as data (no torch here).

Each reads and writes one of two values: ``token_embeddings`` ``[B, S, H]``, which the transformer makes, and
``sentence_embedding`` ``[B, D]``, which pooling makes of it. ``parameters`` are a module's own, by the names that they
have in its ``model.safetensors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ...bucket import Bucket
from ...workload import Op, elementwise, linear

Value = Literal["token_embeddings", "sentence_embedding"]
TOKENS: Value = "token_embeddings"
SENTENCE: Value = "sentence_embedding"
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pooling:
    """``modes`` of the tokens ``[B, S, H]``, each ``[B, H]``, joined in this order. ``include_prompt`` is whether the
    tokens of a prompt take part."""

    modes: tuple[PoolingMode, ...]
    width: int
    include_prompt: bool = True

    reads: Value = TOKENS
    writes: Value = SENTENCE

    @property
    def takes(self) -> int:
        return self.width

    @property
    def gives(self) -> int:
        return len(self.modes) * self.width

    @property
    def parameters(self) -> Mapping[str, Shape]:
        return {}

    def ops(self, name: str, bucket: Bucket) -> list[Op]:
        return [elementwise(name, bucket.tokens * self.width, passes=3 * len(self.modes))]


@dataclass(frozen=True)
class Dense:
    """``activation(x W^T + b)``, and with ``residual`` the input on top, projected where the widths differ.

    ``activation`` is the name of a class of ``torch.nn``.
    """

    takes: int
    gives: int
    bias: bool
    activation: str
    residual: bool
    reads: Value
    writes: Value

    @property
    def parameters(self) -> Mapping[str, Shape]:
        shapes: dict[str, Shape] = {"linear.weight": (self.gives, self.takes)}
        if self.bias:
            shapes["linear.bias"] = (self.gives,)
        if self.projects:
            shapes["residual.weight"] = (self.gives, self.takes)
        return shapes

    @property
    def projects(self) -> bool:
        """Whether what is added on top passes a linear layer of its own."""
        return self.residual and self.takes != self.gives

    def ops(self, name: str, bucket: Bucket) -> list[Op]:
        rows = _rows(self.reads, bucket)
        ops = [linear(name, rows, self.takes, self.gives, self.bias)]
        if self.projects:
            ops.append(linear(f"{name}.residual", rows, self.takes, self.gives, bias=False))
        return [*ops, elementwise(f"{name}.activation", rows * self.gives, passes=5 if self.residual else 2)]


@dataclass(frozen=True)
class Normalize:
    """Each vector divided by its Euclidean length."""

    takes: int
    reads: Value
    writes: Value

    @property
    def gives(self) -> int:
        return self.takes

    @property
    def parameters(self) -> Mapping[str, Shape]:
        return {}

    def ops(self, name: str, bucket: Bucket) -> list[Op]:
        return [elementwise(name, _rows(self.reads, bucket) * self.takes, passes=4)]


@dataclass(frozen=True)
class LayerNorm:
    """Layer normalisation of the sentence embedding, with scale and bias."""

    takes: int

    reads: Value = SENTENCE
    writes: Value = SENTENCE

    @property
    def gives(self) -> int:
        return self.takes

    @property
    def parameters(self) -> Mapping[str, Shape]:
        return {"norm.weight": (self.takes,), "norm.bias": (self.takes,)}

    def ops(self, name: str, bucket: Bucket) -> list[Op]:
        return [elementwise(name, bucket.batch * self.takes, passes=4)]


Module = Pooling | Dense | Normalize | LayerNorm


def _rows(value: Value, bucket: Bucket) -> int:
    return bucket.tokens if value == TOKENS else bucket.batch
