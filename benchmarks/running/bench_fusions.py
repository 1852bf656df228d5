"""Fused operators of ONNX Runtime (``com.microsoft``) and its own optimizer, over our graph, whose operators are plain.

A bar that is missed says that a fusion pays here: then decision 0021 is to be looked at again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ...runtime.engines.onnxruntime.session import OPTIMIZATION_LEVEL, open_session, session_options
from ..harness import Row, interleaved, ratio
from ..subjects import CORES, minilm

_DOMAIN = "com.microsoft"
_ROUNDS = 40

Fusion = Callable[[ir.Model], int]


def run() -> list[Row]:
    subject = minilm()
    universal = subject.model.spec.universal().id
    plain = subject.engine(universal).absolute()
    options = session_options(CORES, OPTIMIZATION_LEVEL, packed=True)
    sessions = {"plain": open_session(plain, options)}
    figures: dict[str, str] = {}
    for name, fusions in _FUSIONS.items():
        path, fused = _fused(plain, name, fusions)
        figures[name] = f"{fused} fused"
        sessions[name] = open_session(path, options)
    every = session_options(CORES, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL, packed=True)
    figures["ENABLE_ALL"] = "ONNX Runtime's own optimizer"
    sessions["ENABLE_ALL"] = open_session(plain, every)
    feeds = {entry.name: subject.feeds()[entry.name] for entry in sessions["plain"].get_inputs()}
    want = sessions["plain"].run(None, feeds)
    for session in sessions.values():
        for got, expected in zip(session.run(None, feeds), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
    times = interleaved({name: partial(session.run, None, feeds) for name, session in sessions.items()}, _ROUNDS)
    return [
        Row(
            f"{name} over the plain graph",
            f"{over:.2f}x ({figures[name]})",
            ">= 0.95x",
            over >= 0.95,
            f"median ratio of {_ROUNDS} interleaved rounds, whole MiniLM, packed, 1x128, {CORES} threads",
        )
        for name in figures
        for over in [ratio(times, name, "plain")]
    ]


def _fused(plain: Path, name: str, fusions: tuple[Fusion, ...]) -> tuple[Path, int]:
    """The engine with these fusions, beside the plain one, and how many nodes they made."""
    model = ir.load(plain)
    fused = sum(fusion(model) for fusion in fusions)
    model.graph.opset_imports[_DOMAIN] = 1
    RemoveUnusedNodesPass()(model)
    path = plain.with_name(f"{plain.stem}-{name.replace(' ', '-')}.onnx")
    ir.save(model, path)
    return path, fused


def _attention(model: ir.Model) -> int:
    """Query, key and value ``[B, S, H * D]``, scores and their mask as one ``MultiHeadAttention``."""
    fused = 0
    for softmax in _nodes(model, "Softmax"):
        [(context, _)] = softmax.outputs[0].uses()
        scores, mask = softmax.inputs[0].producer().inputs
        scaled, keys = scores.producer().inputs
        query, scale = scaled.producer().inputs
        # What was transposed: ``[B, S, H, D]``.
        parts = [value.producer().inputs[0] for value in (query, keys, context.inputs[1])]
        [(transposed, _)] = context.outputs[0].uses()
        [(merged, _)] = transposed.outputs[0].uses()
        batch, length, _, width = parts[0].producer().inputs[1].const_value.numpy().tolist()
        product = parts[0].producer().inputs[0].producer()
        heads = product.inputs[2].shape[0] // width
        shape = _constant(model, f"fused{fused}", [batch, length, heads * width])
        inputs = [_inserted(softmax, "Reshape", "", [part.producer().inputs[0], shape]) for part in parts]
        attributes = {"num_heads": heads, "scale": float(scale.const_value.numpy())}
        out = _inserted(softmax, "MultiHeadAttention", _DOMAIN, [*inputs, None, None, mask], attributes)
        merged.replace_input_with(0, out)
        fused += 1
    return fused


def _skip_normalization(model: ir.Model) -> int:
    """A sum and the normalization behind it as one ``SkipLayerNormalization``."""
    fused = 0
    for norm in _nodes(model, "LayerNormalization"):
        added = norm.inputs[0].producer()
        if added.op_type == "Add":
            epsilon = {"epsilon": norm.attributes["epsilon"].as_float()}
            inputs = [*added.inputs, *norm.inputs[1:]]
            _replaced(norm, _inserted(norm, "SkipLayerNormalization", _DOMAIN, inputs, epsilon))
            fused += 1
    return fused


def _bias_gelu(model: ir.Model) -> int:
    """The bias of a product and the activation behind it as one ``BiasGelu``."""
    fused = 0
    for gelu in _nodes(model, "Gelu"):
        product = gelu.inputs[0].producer()
        bias = product.inputs[2]
        product.resize_inputs(2)
        _replaced(gelu, _inserted(gelu, "BiasGelu", _DOMAIN, [gelu.inputs[0], bias]))
        fused += 1
    return fused


_FUSIONS: dict[str, tuple[Fusion, ...]] = {
    "MultiHeadAttention": (_attention,),
    "SkipLayerNormalization": (_skip_normalization,),
    "BiasGelu": (_bias_gelu,),
    "all three": (_attention, _skip_normalization, _bias_gelu),
}


def _nodes(model: ir.Model, op_type: str) -> list[Any]:
    """Untyped: that what they read is there, and computed by a node, is known of this graph."""
    return [node for node in model.graph if node.op_type == op_type]


def _constant(model: ir.Model, name: str, numbers: list[int]) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(np.array(numbers, np.int64), name=name))
    model.graph.register_initializer(value)
    return value


def _inserted(before: ir.Node, op_type: str, domain: str, inputs: Any, attributes: Any = None) -> ir.Value:
    node = ir.node(op_type, inputs, attributes, domain=domain)
    before.graph.insert_before(before, node)  # type: ignore[union-attr]
    return node.outputs[0]


def _replaced(node: ir.Node, value: ir.Value) -> None:
    """``value`` where the only output of ``node`` is read."""
    for user, index in tuple(node.outputs[0].uses()):
        user.replace_input_with(index, value)
