"""A submodel's demands on a device, operation by operation, before anything is traced (no torch here)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .bucket import Bucket

OpKind = Literal["gemm", "batched_gemm", "elementwise", "gather"]

# Engines compute in float32.
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Op:
    """One operation of a submodel at one bucket.

    ``flops`` counts a multiply-add as two. ``weight_bytes`` are read once per pass; ``activation_bytes`` are the
    inputs read plus the outputs written.
    """

    name: str
    kind: OpKind
    flops: int
    weight_bytes: int
    activation_bytes: int


def macs(ops: Iterable[Op]) -> int:
    """Multiply-adds of the matrix products among ``ops``, as papers count them; elementwise work is left out."""
    return sum(op.flops for op in ops if op.kind in ("gemm", "batched_gemm")) // 2


def linear(name: str, rows: int, inputs: int, outputs: int, bias: bool = True) -> Op:
    """A linear layer on ``rows`` vectors."""
    weights = (inputs + bias) * outputs * _FLOAT32_BYTES
    return Op(name, "gemm", 2 * rows * inputs * outputs, weights, rows * (inputs + outputs) * _FLOAT32_BYTES)


def elementwise(name: str, elements: int, passes: int) -> Op:
    """``passes`` counts reads and writes of the tensor over the operations that are fused under this name."""
    return Op(name, "elementwise", elements * passes, 0, elements * passes * _FLOAT32_BYTES)


def lookup(name: str, elements: int) -> Op:
    """Rows of tables, ``elements`` numbers in all."""
    return Op(name, "gather", 0, elements * _FLOAT32_BYTES, elements * _FLOAT32_BYTES)


def added_rows(name: str, elements: int, whole: int) -> list[Op]:
    """``elements`` numbers added to rows of a tensor of ``whole`` numbers: read, summed, and written into a copy, most
    of which goes from one cache to another."""
    return [
        lookup(f"{name}.read", elements),
        elementwise(f"{name}.sum", elements, passes=3),
        lookup(f"{name}.write", elements),
        elementwise(f"{name}.copy", whole, passes=1),
    ]


def one_hot_product(name: str, slots: int, tokens: int, groups: int, width: int) -> list[Op]:
    """``slots`` in all, each of one of the ``tokens`` of its group, times a matrix of who has whom, one way or the
    other."""
    ones = slots * tokens
    moved = (ones + (slots + groups * tokens) * width) * _FLOAT32_BYTES
    return [elementwise(f"{name}.mask", ones, passes=2), Op(name, "batched_gemm", 2 * ones * width, 0, moved)]


def attention_products(at: str, scores: int, head_dim: int, read: int, between: Mapping[str, int]) -> list[Op]:
    """``scores`` of queries and keys, ``read`` numbers together, and what they mix of as many values; ``between`` has
    the passes over scores, by name."""
    product, moved = 2 * scores * head_dim, (read + scores) * _FLOAT32_BYTES
    return [
        Op(f"{at}.scores", "batched_gemm", product, 0, moved),
        *(elementwise(f"{at}.{name}", scores, passes) for name, passes in between.items()),
        Op(f"{at}.context", "batched_gemm", product, 0, moved),
    ]


def self_attention(at: str, bucket: Bucket, hidden: int, heads: int, head_dim: int, bias: bool = True) -> list[Op]:
    """Multi-head self-attention with its projections: ``4 S H a + 2 S^2 a`` multiply-adds for inner width ``a``."""
    tokens, inner = bucket.tokens, heads * head_dim
    scores = heads * bucket.batch * bucket.sequence**2
    return [
        *(linear(f"{at}.{part}", tokens, hidden, inner, bias) for part in ("query", "key", "value")),
        elementwise(f"{at}.split", 3 * tokens * inner, passes=4),
        *attention_products(at, scores, head_dim, 2 * tokens * inner, {"softmax": 8}),
        linear(f"{at}.output", tokens, inner, hidden, bias),
    ]


def feed_forward(at: str, tokens: int, hidden: int, width: int, bias: bool = True, gated: bool = False) -> list[Op]:
    """An FFN of ``width`` neurons, whose activation reads and writes once; its product with up, where it is ``gated``,
    reads two tensors and writes one."""
    return [
        *([linear(f"{at}.gate", tokens, hidden, width, bias)] if gated else []),
        linear(f"{at}.up", tokens, hidden, width, bias),
        elementwise(f"{at}.activation", tokens * width, passes=5 if gated else 2),
        linear(f"{at}.down", tokens, width, hidden, bias),
    ]


def pre_norm_layer(
    at: str, bucket: Bucket, hidden: int, heads: int, head_dim: int, width: int, bias: bool = True
) -> list[Op]:
    """Attention and an FFN of ``width`` neurons without a gate, each with its norm and residual."""
    tokens = bucket.tokens
    return [
        elementwise(f"{at}.attention.norm", tokens * hidden, passes=4),
        *self_attention(f"{at}.attention", bucket, hidden, heads, head_dim, bias),
        elementwise(f"{at}.attention.residual", tokens * hidden, passes=3),
        elementwise(f"{at}.ffn.norm", tokens * hidden, passes=4),
        *feed_forward(f"{at}.ffn", tokens, hidden, width, bias),
        elementwise(f"{at}.ffn.residual", tokens * hidden, passes=3),
    ]


def post_norm_layer(at: str, bucket: Bucket, hidden: int, heads: int, head_dim: int, width: int) -> list[Op]:
    """Attention and an FFN of ``width`` neurons without a gate, each with residual and norm behind it; of no heads or
    neurons, these alone."""
    tokens, ops = bucket.tokens, list[Op]()
    if heads:
        ops += self_attention(f"{at}.attention", bucket, hidden, heads, head_dim)
    ops.append(elementwise(f"{at}.attention.norm", tokens * hidden, passes=5))
    if width:
        ops += feed_forward(f"{at}.ffn", tokens, hidden, width)
    return [*ops, elementwise(f"{at}.ffn.norm", tokens * hidden, passes=5)]
