from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.graph.encodings import decoded, encode
from nestforge.compiler.graph.precision.exact import exact, with_stored_weights
from nestforge.profiles.precision import INT4, INT8
from support.encoded_engines import encoded_engines, run
from support.tiny_compile import save_tiniest

BUCKET = Bucket(2, 8)
WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
FORMS = ("qdq", "int8", "int8-dynamic", "int4")


@pytest.mark.parametrize("form", FORMS)
def test_without_the_rounding_of_activations_nothing_is_left_but_that_of_weights(tmp_path: Path, form: str) -> None:
    engines = encoded_engines(tmp_path, save_tiniest(tmp_path / "model", **WIDE), BUCKET)
    whole = engines.model.spec.universal()
    graph = engines.graph(form, whole)
    left = onnx.ModelProto.FromString(exact(graph.SerializeToString()))
    kinds = {node.op_type for node in left.graph.node}
    assert not kinds & {"QGemm", "QuantizeLinear", "DynamicQuantizeLinear"}
    found, rounded = (run(one, engines.feeds, engines.folder, True) for one in (left, graph))
    module = with_stored_weights(engines.model, engines.templates[form].weights).narrow(whole, {})
    import torch

    with torch.no_grad():
        results = module(*(torch.from_numpy(array) for array in engines.feeds.values()))
    for name, expected in zip(found, results, strict=True):
        np.testing.assert_allclose(found[name], expected.numpy(), atol=2e-5)
        assert np.abs(rounded[name] - expected.numpy()).max() > 1e-4, "the engine itself rounds"


def test_a_largest_number_of_an_input_is_left_alone() -> None:
    """A sentence model whose tokens are pooled by max asks the mask, an input, whether there is any."""
    graph = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 20]>
        agraph (int64[2, 8] mask) => (int64[2, 1] y) <int64[1] width = {-1}> { y = ReduceMax (mask, width) }
        """
    )
    left = onnx.ModelProto.FromString(exact(graph.SerializeToString()))
    assert [node.op_type for node in left.graph.node] == ["ReduceMax"]


def test_the_model_itself_is_left_alone(tmp_path: Path) -> None:
    engines = encoded_engines(tmp_path, save_tiniest(tmp_path / "model", **WIDE), BUCKET)
    before = {name: p.detach().clone() for name, p in engines.model.parameters().items()}
    other = with_stored_weights(engines.model, engines.templates["int8"].weights).universal.parameters()
    changed = {name for name, p in other.items() if not p.equal(before[name])}
    assert changed
    assert all(p.dim() == 2 for name, p in other.items() if name in changed)
    assert all(p.equal(before[name]) for name, p in engines.model.parameters().items())


@pytest.mark.parametrize(("name", "steps"), [("w" + INT8, 63), ("w.T" + INT8, 63), ("w" + INT4, 7)])
def test_decoded_numbers_are_half_a_step_away_at_most(name: str, steps: int) -> None:
    array = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    found = decoded(array, name)
    assert found.shape == array.shape
    assert found.dtype == np.float32
    assert np.abs(found - array).max() <= np.abs(array).max() / steps
    if name.endswith(INT8):
        np.testing.assert_array_equal(encode(found, name), encode(array, name))
