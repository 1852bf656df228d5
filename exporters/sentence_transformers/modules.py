"""The modules of sentence-transformers that stand behind the transformer, as data (no torch here).

Each reads and writes one of two values: ``token_embeddings`` ``[B, S, H]``, which the transformer makes, and
``sentence_embedding`` ``[B, D]``, which pooling makes of it. ``parameters`` are a module's own, by the names that they
have in its ``model.safetensors``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ...bucket import Bucket
from ...errors import CheckpointError
from ...outside_file import read_json
from ...strict import structure
from ...workload import Op, elementwise, linear

Value = Literal["token_embeddings", "sentence_embedding"]
TOKENS: Value = "token_embeddings"
SENTENCE: Value = "sentence_embedding"
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module that takes so many numbers of the value that it ``reads``, and gives as many of the one that it
    ``writes``."""

    takes: int
    reads: Value = SENTENCE
    writes: Value = SENTENCE

    @property
    def gives(self) -> int:
        """Numbers that it makes."""
        return self.takes

    @property
    def parameters(self) -> Mapping[str, Shape]:
        """Shapes of its own parameters by name."""
        return {}

    def ops(self, name: str, bucket: Bucket) -> list[Op]:
        """Its operations at ``bucket``."""
        return [elementwise(name, self.rows(bucket) * self.takes, passes=4)]

    def rows(self, bucket: Bucket) -> int:
        """How many vectors it reads."""
        return bucket.tokens if self.reads == TOKENS else bucket.batch


@dataclass(frozen=True, kw_only=True)
class Pooling(Module):
    """``modes`` of the tokens ``[B, S, H]``, each ``[B, H]``, joined in this order. ``include_prompt`` is whether the
    tokens of a prompt take part."""

    modes: tuple[PoolingMode, ...]
    include_prompt: bool = True
    reads: Value = TOKENS

    @property
    def gives(self) -> int:
        return len(self.modes) * self.takes

    def ops(self, name: str, bucket: Bucket) -> list[Op]:
        return [elementwise(name, bucket.tokens * self.takes, passes=3 * len(self.modes))]


@dataclass(frozen=True, kw_only=True)
class Dense(Module):
    """``activation(x W^T + b)``, and with ``residual`` the input on top, projected where the widths differ.

    ``activation`` is the name of a class of ``torch.nn``.
    """

    outputs: int
    bias: bool
    activation: str
    residual: bool

    @property
    def gives(self) -> int:
        return self.outputs

    @property
    def parameters(self) -> Mapping[str, Shape]:
        shapes: dict[str, Shape] = {"linear.weight": (self.gives, self.takes)}
        shapes |= {"linear.bias": (self.gives,)} if self.bias else {}
        return shapes | ({"residual.weight": (self.gives, self.takes)} if self.projects else {})

    @property
    def projects(self) -> bool:
        """Whether what is added on top passes a linear layer of its own."""
        return self.residual and self.takes != self.gives

    def ops(self, name: str, bucket: Bucket) -> list[Op]:
        rows = self.rows(bucket)
        ops = [linear(name, rows, self.takes, self.gives, self.bias)]
        if self.projects:
            ops.append(linear(f"{name}.residual", rows, self.takes, self.gives, bias=False))
        return [*ops, elementwise(f"{name}.activation", rows * self.gives, passes=5 if self.residual else 2)]


class Normalize(Module):
    """Each vector divided by its Euclidean length."""


class LayerNorm(Module):
    """Layer normalisation of the sentence embedding, with scale and bias."""

    @property
    def parameters(self) -> Mapping[str, Shape]:
        return {"norm.weight": (self.takes,), "norm.bias": (self.takes,)}


# Flags of older configs, in the order in which their results are joined.
_POOLING_FLAGS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_OLD_WIDTH_KEY, _WIDTH_KEY = "word_embedding_dimension", "embedding_dimension"
# Classes of torch.nn that need no argument, have no parameter and work element by element.
ACTIVATIONS = frozenset(
    [
        *("ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish", "ReLU"),
        *("ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh", "Tanhshrink"),
    ]
)
_DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"


@dataclass(frozen=True)
class _Pooling:
    embedding_dimension: int = field(metadata={"min": 1})
    pooling_mode: PoolingMode | tuple[PoolingMode, ...] = "mean"
    include_prompt: bool = True


@dataclass(frozen=True)
class _Dense:
    in_features: int = field(metadata={"min": 1})
    out_features: int = field(metadata={"min": 1})
    bias: bool = True
    activation_function: str = _DEFAULT_ACTIVATION
    module_input_name: Value = SENTENCE
    module_output_name: Value | None = None
    use_residual: bool = False


@dataclass(frozen=True)
class _Normalize:
    module_input_name: Value = SENTENCE
    module_output_name: Value | None = None


@dataclass(frozen=True)
class _LayerNorm:
    dimension: int = field(metadata={"min": 1})


@dataclass(frozen=True)
class _Dropout:
    dropout: float = 0.2


Widths = Mapping[Value, int]


def read_module(kind: str, folder: Path, widths: Widths) -> Module | None:
    """The module of class ``kind`` (one of ``KINDS``) whose ``config.json`` lies in ``folder``, or None for one that
    computes nothing outside training. ``widths`` are those of the values that are there when it runs.

    Raises CheckpointError for a key or value that is not understood.
    """
    path = folder / "config.json"
    return KINDS[kind](path, read_json(path, CheckpointError) if path.is_file() else {}, widths)


def _pooling(path: Path, data: dict[str, Any], _: Widths) -> Pooling:
    if _OLD_WIDTH_KEY in data and _WIDTH_KEY not in data:
        data[_WIDTH_KEY] = data.pop(_OLD_WIDTH_KEY)
    flags = {key: data.pop(key) for key in _POOLING_FLAGS if key in data}
    for key, value in flags.items():
        if type(value) is not bool:
            raise CheckpointError(f"{path}: {key}: expected true or false, got {value!r:.80}")
    if flags and "pooling_mode" not in data:
        data["pooling_mode"] = [mode for key, mode in _POOLING_FLAGS.items() if flags.get(key)] or "mean"
    stated = structure(_Pooling, data, str(path), CheckpointError)
    modes = (stated.pooling_mode,) if isinstance(stated.pooling_mode, str) else stated.pooling_mode
    if not modes:
        raise CheckpointError(f"{path}: pooling_mode: expected at least one of {', '.join(POOLING_MODES)}")
    return Pooling(takes=stated.embedding_dimension, modes=modes, include_prompt=stated.include_prompt)


def _dense(path: Path, data: dict[str, Any], _: Widths) -> Dense:
    stated = structure(_Dense, data, str(path), CheckpointError)
    package, activation = stated.activation_function.rpartition(".")[::2]
    if not (package == "torch.nn" or package.startswith("torch.nn.modules.")) or activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{path}: activation_function {stated.activation_function[:120]!r} is not supported; expected torch.nn's "
            f"{', '.join(sorted(ACTIVATIONS))}"
        )
    return Dense(
        takes=stated.in_features,
        outputs=stated.out_features,
        bias=stated.bias,
        activation=activation,
        residual=stated.use_residual,
        reads=stated.module_input_name,
        writes=stated.module_output_name or stated.module_input_name,
    )


def _normalize(path: Path, data: dict[str, Any], widths: Widths) -> Normalize:
    stated = structure(_Normalize, data, str(path), CheckpointError)
    reads = stated.module_input_name
    return Normalize(takes=widths.get(reads, 0), reads=reads, writes=stated.module_output_name or reads)


def _layer_norm(path: Path, data: dict[str, Any], _: Widths) -> LayerNorm:
    return LayerNorm(takes=structure(_LayerNorm, data, str(path), CheckpointError).dimension)


def _dropout(path: Path, data: dict[str, Any], _: Widths) -> None:
    structure(_Dropout, data, str(path), CheckpointError)


KINDS: Mapping[str, Callable[[Path, dict[str, Any], Widths], Module | None]] = {
    "Pooling": _pooling,
    "Dense": _dense,
    "Normalize": _normalize,
    "LayerNorm": _layer_norm,
    "Dropout": _dropout,
}
