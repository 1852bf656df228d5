"""Translations of operators, and of complex numbers, which a graph has as pairs of real ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.exporters.onnx_translations import TRANSLATIONS, add_rows, one_hot, table_rows, top_places
from nestforge.exporters.signature import Signature
from nestforge.exporters.trace import quiet_export, trace
from torch.nn import functional

SIGNATURE = Signature(
    (TensorSpec("y", "float32", ("batch", 4001)),), (TensorSpec("x", "float32", ("batch", 4001)),), None
)


class ErfInv(torch.nn.Module):
    def forward(self, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.special.erfinv(y),)


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    import onnx_ir as ir

    traced = trace(ErfInv().eval(), SIGNATURE, Bucket(1, 1), 20)
    return onnxruntime.InferenceSession(
        ir.to_proto(traced.model).SerializeToString(), providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("edge", [0.5, 0.999, 1 - 1e-6])
def test_the_inverse_error_function_within_float32(session: onnxruntime.InferenceSession, edge: float) -> None:
    y = np.linspace(-edge, edge, 4001, dtype=np.float32)[None]
    (found,) = session.run(None, {"y": y})
    expected = torch.special.erfinv(torch.from_numpy(y).double()).numpy()
    np.testing.assert_allclose(found, expected, rtol=5e-7, atol=1e-12)


class AddTwice(torch.nn.Module):
    def forward(self, answer: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return add_rows(add_rows(answer, rows, values), rows, values)


def arrays() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(5, 3), torch.tensor([4, 0]), torch.tensor([[1.0, 2, 3], [10, 20, 30]])


def test_adds_to_the_rows_and_leaves_its_input() -> None:
    answer, rows, values = arrays()
    result = add_rows(answer, rows, values)
    assert result.tolist() == [[11, 21, 31], [1, 1, 1], [1, 1, 1], [1, 1, 1], [2, 3, 4]]
    assert torch.equal(answer, torch.ones(5, 3))


def test_engines_scatter_without_a_reduction() -> None:
    """A reduction would add rows that meet; ONNX Runtime 1.31 loses such updates, TensorRT has none."""
    with quiet_export():
        program = torch.onnx.export(
            AddTwice(), arrays(), dynamo=True, opset_version=20, custom_translation_table=TRANSLATIONS, verbose=False
        )
    proto = program.model_proto
    scatters = [node for node in proto.graph.node if node.op_type == "ScatterND"]
    assert len(scatters) == 2
    assert not any(
        attribute.name == "reduction" and attribute.s != b"none" for s in scatters for attribute in s.attribute
    )
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    names = [value.name for value in session.get_inputs()]
    (found,) = session.run(None, dict(zip(names, (tensor.numpy() for tensor in arrays()), strict=True)))
    assert found.tolist() == AddTwice()(*arrays()).tolist()


class Third(torch.nn.Module):
    """The highest third of each row, and at least one."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return top_places(scores, (scores.shape[1] + 2) // 3)


class Interface:
    inputs = (TensorSpec("scores", "float32", ("batch", "sequence")),)
    outputs = (TensorSpec("places", "int64", ("batch", "third")),)


def test_as_many_as_the_graph_counts_itself() -> None:
    traced = trace(Third(), Interface(), Bucket(1, 32, None, 1), opset=20)
    session = onnxruntime.InferenceSession(ir.to_proto(traced.model).SerializeToString())
    for length in (1, 2, 3, 10, 32):
        scores = np.random.default_rng(length).standard_normal((1, length)).astype(np.float32)
        (found,) = session.run(None, {"scores": scores})
        assert found.tolist() == [np.argsort(-scores[0])[: -(-length // 3)].tolist()]


PLACES = torch.tensor([[6, 0], [3, 4], [1, 2]])


def test_places_of_groups_are_rows_of_one_table() -> None:
    assert table_rows(PLACES, 7).tolist() == [[6, 0], [10, 11], [15, 16]]
    assert table_rows(PLACES[:, None], 7)[:, 0].tolist() == table_rows(PLACES, 7).tolist()
    assert torch.equal(table_rows(PLACES[:1], 7), PLACES[:1])


def test_a_product_with_ones_reads_places() -> None:
    tokens = torch.randn(3, 7, 4)
    read = one_hot(PLACES, 7) @ tokens
    assert torch.equal(read, torch.stack([tokens[group][PLACES[group]] for group in range(3)]))


BUCKET = Bucket(3, 6, 2, 2)


class Attends(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: torch.Tensor) -> Any:
        chosen = (mask[0] > 0 if self.options.get("hides") else mask[0]) if mask else None
        options = {name: given for name, given in self.options.items() if name != "hides"}
        return (functional.scaled_dot_product_attention(query, key, value, chosen, **options),)


def spec(name: str, heads: int) -> TensorSpec:
    return TensorSpec(name, "float32", ("batch", heads, "sequence", 8))


@pytest.mark.parametrize("bucket", [Bucket(3, 6), BUCKET], ids=str)
@pytest.mark.parametrize(
    ("options", "masked", "heads", "plain"),
    [
        ({}, False, 4, True),
        ({"scale": 0.3}, True, 4, True),
        ({"hides": True}, True, 4, True),
        ({"is_causal": True}, False, 4, True),
        ({"enable_gqa": True}, False, 2, False),
    ],
    ids=["alone", "added mask", "mask of bools", "causal", "shared keys"],
)
def test_equals_pytorch(options: dict[str, Any], masked: bool, heads: int, plain: bool, bucket: Bucket) -> None:
    specs = [spec("query", 4), spec("key", heads), spec("value", heads)]
    if masked:
        specs.append(TensorSpec("mask", "float32", ("batch", 1, 1, "sequence")))
    signature = Signature(tuple(specs), (spec("out", 4),), 6)
    module = Attends(**options)
    traced = trace(module, signature, bucket, 20)
    kinds = [node.op_type for node in traced.model.graph]
    assert ("IsNaN" not in kinds and "Reshape" not in kinds) or not plain
    session = onnxruntime.InferenceSession(ir.to_proto(traced.model).SerializeToString())
    rng = np.random.default_rng(0)
    feeds = {each.name: rng.standard_normal(each.shape(bucket)).astype(np.float32) for each in specs}
    if options.get("hides"):
        feeds["mask"][..., 0] = 1.0  # every query sees something
    (expected,) = module(*map(torch.from_numpy, feeds.values()))
    (found,) = session.run(None, feeds)
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-6)


class Squeezed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``x`` [2, 1, 3]."""
        return x.squeeze(1), x.squeeze(2), x.squeeze((0, 1))


def test_a_dimension_that_is_not_one_is_not_squeezed() -> None:
    x = torch.arange(6.0).view(2, 1, 3)
    with quiet_export():
        program = torch.onnx.export(
            Squeezed(), (x,), dynamo=True, opset_version=20, custom_translation_table=TRANSLATIONS, verbose=False
        )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert [array.tolist() for array in found] == [tensor.tolist() for tensor in Squeezed()(x)]


class Less(torch.nn.Module):
    def forward(self, mask: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``mask`` [2, 3] int64 and ``x`` [2, 3]."""
        return 1.0 - mask, 1 - mask, torch.rsub(x, 3, alpha=2)


def test_a_number_less_integers_is_what_torch_has() -> None:
    given = torch.tensor([[0, 1, 1], [1, 0, 5]]), torch.arange(6.0).view(2, 3)
    with quiet_export():
        program = torch.onnx.export(
            Less(), given, dynamo=True, opset_version=20, custom_translation_table=TRANSLATIONS, verbose=False
        )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [value.name for value in session.get_inputs()]
    found = session.run(None, dict(zip(names, (tensor.numpy() for tensor in given), strict=True)))
    expected = [tensor.numpy() for tensor in Less()(*given)]
    assert [(array.dtype, array.tolist()) for array in found] == [(array.dtype, array.tolist()) for array in expected]


TOKENS = ("batch", "sequence")
Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Of complex x and y ``[B, S, 4]``.
TURNS: dict[str, Turn] = {
    "a product": lambda x, y: x * y,
    "a real number": lambda x, y: x * 1.5 + y,
    "a real tensor": lambda x, y: x * torch.view_as_real(y)[..., 0],
    "a new dimension": lambda x, y: (x.unsqueeze(2) * y[:, :, None, :]).squeeze(2),
    "a new last dimension": lambda x, y: (x.unsqueeze(-1) * y.unsqueeze(-1)).squeeze(-1),
    "rows alike": lambda x, y: x * y[:1].expand(x.shape[0], -1, -1),
    "dimensions in another order": lambda x, y: (x.transpose(1, 2) * y.transpose(-1, -2)).transpose(1, 2),
    "another type": lambda x, y: x.to(torch.complex64) - y.conj(),
}


class Turned(torch.nn.Module):
    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self.turn = turn

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor]:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return (torch.view_as_real(self.turn(pairs, torch.polar(torch.ones_like(angles), angles))).flatten(2),)


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_as_torch_computes_them(turn: Turn) -> None:
    inputs = TensorSpec("x", "float32", (*TOKENS, 8)), TensorSpec("angles", "float32", (*TOKENS, 4))
    module = Turned(turn).eval()
    traced = trace(module, Signature(inputs, (TensorSpec("y", "float32", (*TOKENS, 8)),), None), Bucket(4, 9, 1, 1), 20)
    graph = ir.to_proto(traced.model).SerializeToString()
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    for rows, tokens in ((1, 1), (4, 9)):
        drawn = torch.Generator().manual_seed(0)
        x, angles = (torch.randn(rows, tokens, size, generator=drawn) for size in (8, 4))
        (found,) = session.run(None, {"x": x.numpy(), "angles": angles.numpy()})
        np.testing.assert_allclose(found, module(x, angles)[0].numpy(), rtol=1e-5, atol=1e-6)
