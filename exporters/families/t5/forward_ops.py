"""The operations of one pass of a T5 model, for the analytic cost model (no torch here)."""

from __future__ import annotations

from collections.abc import Iterator

from ....bucket import Bucket
from ....elastic import Submodel
from ....workload import Op, elementwise, linear, lookup
from .architecture import T5Architecture

_FLOAT32_BYTES = 4
# Behind which a step is counted.
_PROMPT_TOKENS = 64


def forward_ops(architecture: T5Architecture, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """Encoder and decoder, each over as many tokens, and the head."""
    ops = _stack(architecture, "encoder", submodel, bucket)
    if architecture.decoder_layers:
        ops += decoder_ops(architecture, submodel, bucket)
    return ops


def decoder_ops(architecture: T5Architecture, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """The decoder, behind as many tokens, and the head."""
    ops = _stack(architecture, "decoder", submodel, bucket, source=bucket.sequence)
    return [*ops, _head(architecture, bucket)]


def encoding_ops(architecture: T5Architecture, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """The encoder, and the keys and values that every layer of the decoder makes of its answer."""
    return [*_stack(architecture, "encoder", submodel, bucket), *source_ops(architecture, bucket)]


def source_ops(architecture: T5Architecture, bucket: Bucket) -> list[Op]:
    """The keys and values that every layer of the decoder makes of what an encoder returned."""
    inner, ops = architecture.heads * architecture.head_dim, list[Op]()
    for layer in range(architecture.decoder_layers):
        at = f"decoder.layers.{layer}.cross_attention"
        ops += [linear(f"{at}.{p}", bucket.tokens, architecture.hidden, inner, bias=False) for p in ("key", "value")]
    return ops


def step_ops(architecture: T5Architecture, submodel: Submodel) -> list[Op]:
    """One new token of the decoder, behind a short prompt."""
    bucket = Bucket(1, 1)
    ops = _stack(architecture, "decoder", submodel, bucket, source=_PROMPT_TOKENS, has_source_keys=True)
    return [*ops, _head(architecture, bucket)]


def _stack(
    a: T5Architecture, stack: str, submodel: Submodel, bucket: Bucket, source: int = 0, has_source_keys: bool = False
) -> list[Op]:
    """One side over ``bucket``. A decoder reads ``source`` tokens of the encoder, whose keys and values it makes too,
    unless it ``has_source_keys`` already."""
    hidden, tokens = a.hidden, bucket.tokens
    ops = [lookup(f"{stack}.embedding", tokens * hidden)]
    ops.append(lookup(f"{stack}.position_bias", a.heads * bucket.sequence**2))
    for layer in range(a.stacks[stack]):
        at = f"{stack}.layers.{layer}"
        ops += _attention(a, f"{at}.attention", bucket, bucket.sequence, made_of=tokens)
        if stack == "decoder":
            made = 0 if has_source_keys else bucket.batch * source
            ops += _attention(a, f"{at}.cross_attention", bucket, source, made_of=made)
        width = submodel[f"{at}.ffn"]
        ops += [
            elementwise(f"{at}.ffn.norm", tokens * hidden, passes=4),
            *(linear(f"{at}.ffn.{up}", tokens, hidden, width, bias=False) for up in a.ups),
            elementwise(f"{at}.ffn.activation", tokens * width, passes=5 if a.gated else 2),
            linear(f"{at}.ffn.wo", tokens, width, hidden, bias=False),
            elementwise(f"{at}.ffn.residual", tokens * hidden, passes=3),
        ]
    return [*ops, elementwise(f"{stack}.norm", tokens * hidden, passes=4)]


def _head(a: T5Architecture, bucket: Bucket) -> Op:
    """The product with the vocabulary."""
    return linear("lm_head", bucket.tokens, a.hidden, a.vocabulary, bias=False)


def _attention(a: T5Architecture, at: str, bucket: Bucket, seen: int, made_of: int) -> Iterator[Op]:
    """Queries of ``bucket`` over ``seen`` tokens of each row; keys and values are made of ``made_of`` tokens in all."""
    tokens, inner = bucket.tokens, a.heads * a.head_dim
    scores = a.heads * tokens * seen
    moved = (tokens * inner + bucket.batch * seen * inner + scores) * _FLOAT32_BYTES
    yield elementwise(f"{at}.norm", tokens * a.hidden, passes=4)
    yield linear(f"{at}.query", tokens, a.hidden, inner, bias=False)
    if made_of:
        yield from (linear(f"{at}.{part}", made_of, a.hidden, inner, bias=False) for part in ("key", "value"))
    yield elementwise(f"{at}.split", (tokens + 2 * made_of) * inner, passes=2)
    yield Op(f"{at}.scores", "batched_gemm", 2 * scores * a.head_dim, 0, moved)
    yield elementwise(f"{at}.softmax", scores, passes=10)
    yield Op(f"{at}.context", "batched_gemm", 2 * scores * a.head_dim, 0, moved)
    yield elementwise(f"{at}.merge", tokens * inner, passes=2)
    yield linear(f"{at}.output", tokens, inner, a.hidden, bias=False)
    yield elementwise(f"{at}.residual", tokens * a.hidden, passes=3)
