"""Tables of angles: of every kind of rotary positions those of transformers' own class, and what has none."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.compiler.graph.passes.general_optimizer import optimize
from nestforge.compiler.graph.passes.rotary_tables import angle_tables
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.hugging_face.decoder_positions import fix_frequencies
from nestforge.exporters.trace import trace
from support.gated_decoders import make_decoder

COUNT = 96
_BASE = {"rope_theta": 1e4, "original_max_position_embeddings": 24}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {"short_factor": [1.0, 1.5] * 4, "long_factor": [4.0] * 8, "original_max_position_embeddings": COUNT}
_BY_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
KINDS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "default": ("llama", None, {}),
    "linear": ("llama", None, {"rope_parameters": {**_BASE, "rope_type": "linear", "factor": 2.0}}),
    "llama3": ("llama", None, {"rope_parameters": {**_BASE, **_LLAMA3, "rope_type": "llama3", "factor": 8.0}}),
    "yarn": ("llama", None, {"rope_parameters": {**_BASE, "rope_type": "yarn", "factor": 4.0}}),
    "longrope": ("llama", None, {"rope_parameters": {**_BASE, **_LONG, "rope_type": "longrope"}}),
    "dynamic": ("llama", None, {"rope_parameters": {"rope_theta": 5e3, "rope_type": "dynamic", "factor": 4.0}}),
    "local": ("gemma3_text", "sliding_attention", {"rope_parameters": _BY_LAYER}),
    "global": ("gemma3_text", "full_attention", {"rope_parameters": _BY_LAYER}),
    "partial": ("phi3", None, {"hidden_size": 64}),
}


class Angles(torch.nn.Module):
    """Cosines and sines ``[B, S, R]`` of every kind, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"head_dim": 16, "max_position_embeddings": COUNT}
        decoders = [make_decoder(model_type, **sizes, **keys) for model_type, _, keys in KINDS.values()]
        self.rotary = torch.nn.ModuleList(decoder.model.rotary_emb for decoder in decoders)

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        like, found = torch.zeros(1), list[torch.Tensor]()
        for rotary, (_, layers, _) in zip(self.rotary, KINDS.values(), strict=True):
            found += rotary(like, position_ids) if layers is None else rotary(like, position_ids, layers)
        return tuple(found)


class Interface:
    inputs = (TensorSpec("position_ids", "int64", ("batch", "sequence"), high=COUNT),)
    outputs = tuple(TensorSpec(f"{n}", "float32", ("batch", "sequence", 16)) for n in range(2 * len(KINDS)))


@pytest.fixture(scope="module")
def traced() -> tuple[ir.Model, list[np.ndarray]]:
    """All kinds as a graph, and what transformers computes at every position."""
    module = Angles()
    with torch.no_grad():
        expected = [values[0].numpy() for values in module(torch.arange(COUNT)[None])]
    for rotary in module.rotary:
        fix_frequencies(rotary, COUNT, Checkpoint(Path("m"), {}, {}, missing="untrained"))
    model = trace(module, Interface(), Bucket(64, COUNT, 1, 1), 20).model
    optimize(model)
    return model, expected


@pytest.mark.parametrize("kind", KINDS)
def test_angles_are_those_of_transformers_at_every_position(
    traced: tuple[ir.Model, list[np.ndarray]], kind: str
) -> None:
    model, expected = traced
    own = slice(2 * list(KINDS).index(kind), 2 * list(KINDS).index(kind) + 2)
    found = angle_tables(model, model.graph.outputs[own], model.graph.inputs[0], COUNT, ())
    assert found is not None
    for table, values in zip(found, expected[own], strict=True):
        assert table.dtype == np.float32
        np.testing.assert_allclose(table, values, atol=1e-6)


ANGLES = """
<ir_version: 10, opset_import: ["" : 20]>
step (int64[batch, sequence] position_ids, int64[batch, sequence] others, int64[1, sequence] places)
    => (float[batch, 1, sequence, 8] cosine)
<float[4] rates = {1.0, 0.5, 0.25, 0.1}, float scale = {1.2}, float[4, 1] column = {1.0, 2.0, 3.0, 4.0},
 int64[1] last = {-1}, int64[1] one = {1}, int64 axis = {1}>
{
  at = Unsqueeze (position_ids, last)
  number = Cast <to = 1> (at)
  half = Mul (number, rates)
  angles = Concat <axis = -1> (half, half)
  c = Cos (angles)
  scaled = Mul (c, scale)
  cosine = Unsqueeze (scaled, one)
}
"""


def tables(old: str = "", new: str = "", weights: tuple[str, ...] = (), count: int = 5000) -> list[np.ndarray] | None:
    assert old in ANGLES
    proto = onnx.parser.parse_model(ANGLES.replace(old, new) if old else ANGLES)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    return angle_tables(model, model.graph.outputs[:1], model.graph.inputs[0], count, weights)


def test_a_table_has_a_row_for_every_position() -> None:
    found = tables()
    rates = np.tile(np.array([1.0, 0.5, 0.25, 0.1], np.float32), 2)
    expected = 1.2 * np.cos((np.arange(5000, dtype=np.float32)[:, None] * rates).astype(np.float64))
    np.testing.assert_allclose(found[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Unsqueeze (position_ids", "Unsqueeze (others"),
        ("number = Cast <to = 1> (at)", "all = CumSum (at, axis)\n  number = Cast <to = 1> (all)"),
        ("number = Cast <to = 1> (at)", "top = ReduceMax (at)\n  by = Sub (at, top)\n  number = Cast <to = 1> (by)"),
        (
            "  c = Cos (angles)",
            "  p = Unsqueeze (places, last)\n  f = Cast <to = 1> (p)\n  wide = Add (angles, f)\n  c = Cos (wide)",
        ),
        ("Cos (angles)", "Softmax <axis = 1> (angles)"),
        ("Concat <axis = -1> (half, half)", "Concat <axis = 1> (half, half)"),
        ("(number, rates)", "(number, column)"),
        ("int64[batch, sequence] position_ids", "int64[batch, 4] position_ids"),
        ("int64[batch, sequence] position_ids", "int64[some, some] position_ids"),
    ],
)
def test_angles_of_more_than_a_tokens_own_position_have_none(old: str, new: str) -> None:
    assert tables(old, new) is None


def test_a_weight_is_no_constant() -> None:
    assert tables(weights=("scale",)) is None
