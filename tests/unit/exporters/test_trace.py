"""Exports: what is traced, and modules that write into nothing, which run once."""

import contextlib
import logging
import warnings
from typing import ClassVar

import onnx_ir as ir
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.errors import ExportError
from nestforge.exporters import faster_export
from nestforge.exporters import trace as trace_module
from nestforge.exporters.faster_export import torchlib_read_once
from nestforge.exporters.signature import Signature
from nestforge.exporters.trace import Trace, quiet_export, trace
from torch.onnx._internal.exporter import _registration
from torch.onnx._internal.exporter._registration import ONNXRegistry

BUCKET = Bucket(2, 5)
SIGNATURE = Signature(
    (TensorSpec("x", "float32", ("batch", "sequence", 4)), TensorSpec("mask", "int64", ("batch", "sequence"))),
    (TensorSpec("y", "float32", ("batch", "sequence", 3)), TensorSpec("total", "float32", ("batch",))),
    16,
)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 6)
        self.down = torch.nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor([2.0, 3.0, 4.0]))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.down(torch.nn.functional.gelu(self.up(x))) * self.scale * mask.unsqueeze(-1)
        return y, y.sum((1, 2))


class Wrapper(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.model(*tensors)


@pytest.fixture(scope="module")
def traced() -> Trace:
    torch.manual_seed(0)
    return trace(Wrapper(Net()).eval().requires_grad_(False), SIGNATURE, BUCKET, 20)


def test_inputs_and_outputs_are_the_signatures_at_the_bucket(traced: Trace) -> None:
    shapes = {
        value.name: tuple(value.shape.numpy()) for value in (*traced.model.graph.inputs, *traced.model.graph.outputs)
    }
    assert shapes == {"x": (2, 5, 4), "mask": (2, 5), "y": (2, 5, 3), "total": (2,)}
    assert traced.model.opset_imports[""] == 20


def test_every_parameter_keeps_its_name_and_its_values(traced: Trace) -> None:
    torch.manual_seed(0)
    expected = dict(Net().named_parameters())
    initializers = traced.model.graph.initializers
    for name, parameter in expected.items():
        tensor = initializers[name].const_value
        assert tensor.numpy().tolist() == parameter.tolist()


def test_modules_return_the_values_that_they_return(traced: Trace) -> None:
    """The value named for a module is the one that PyTorch's module returns, by shape and by the graph around it."""
    values = {value.name: value for node in traced.model.graph for value in node.outputs}
    assert {"up", "down"} <= traced.module_outputs.keys()
    assert tuple(values[traced.module_outputs["up"]].shape.numpy()) == (2, 5, 6)
    assert tuple(values[traced.module_outputs["down"]].shape.numpy()) == (2, 5, 3)
    (user,) = {use.node.op_type for use in values[traced.module_outputs["up"]].uses()}
    assert user == "Gelu"


def test_tracing_is_quiet_and_leaves_no_setting_behind(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("torch.onnx")
    before = (logger.level, warnings.filters[:], torch.is_grad_enabled())
    module = Wrapper(Net()).eval()
    trace(module, SIGNATURE, Bucket(1, 2), 20)
    assert (logger.level, warnings.filters[:], torch.is_grad_enabled()) == before
    assert capfd.readouterr() == ("", "")
    assert next(module.parameters()).requires_grad


class Queries(torch.nn.Module):
    """As OWL-ViT has them: so many a row, worked out of two batches."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x.sum(1).reshape(x.shape[0], mask.shape[0] // x.shape[0], x.shape[-1])


def test_a_size_that_the_trace_worked_out_is_a_number() -> None:
    queries = Signature(SIGNATURE.inputs, (TensorSpec("y", "float32", ("batch", 1, 4)),), 16)
    (value,) = trace(Queries(), queries, Bucket(4, 5, 1), 20).model.graph.outputs
    assert value.shape is not None
    assert [dim if isinstance(dim, int) else dim.value for dim in value.shape] == ["batch", 1, 4]


class Undecided(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.sum() > 0:
            return x[..., :3], mask.sum(1).float()
        return -x[..., :3], mask.sum(1).float()


class Broken(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise KeyError("first line\nsecond line")


@pytest.mark.parametrize("module", [Undecided(), Broken()], ids=lambda module: type(module).__name__)
def test_what_does_not_export_is_one_line(module: torch.nn.Module) -> None:
    with pytest.raises(ExportError) as failure:
        trace(module, SIGNATURE, BUCKET, 20)
    message = str(failure.value)
    assert message.startswith(f"{type(module).__name__} at b2-s5: torch.onnx.export failed: ")
    assert "\n" not in message
    assert failure.value.__cause__ is not None


def export(**options: object) -> bytes:
    program = torch.onnx.export(torch.nn.GELU(), (torch.ones(2, 3),), dynamo=True, verbose=False, **options)
    return program.model_proto.graph.SerializeToString()


def test_torchlib_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with torchlib_read_once(), quiet_export():
        export()
    monkeypatch.setattr(_registration.onnxscript_apis, "get_torchlib_ops", None)  # a second reading would fail
    with torchlib_read_once(), quiet_export():
        export()


def test_graphs_are_those_of_a_registry_of_their_own() -> None:
    with quiet_export():
        expected = export(optimize=False)
        with torchlib_read_once():
            assert export(optimize=False) == expected


def test_a_translation_that_one_export_adds_is_not_seen_by_the_next() -> None:
    def as_relu(x: object, approximate: str = "none") -> object:
        from onnxscript import opset20

        return opset20.Relu(x)

    with quiet_export(), torchlib_read_once():
        plain = export(optimize=False)
        assert export(optimize=False, custom_translation_table={torch.ops.aten.gelu.default: as_relu}) != plain
        assert export(optimize=False) == plain
    assert isinstance(vars(ONNXRegistry)["from_torchlib"], classmethod)  # its own again


class Tied(torch.nn.Module):
    """Operations that torch composes of others or writes in place, that ONNX has or has not; a weight read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.recurrent = torch.nn.GRU(4, 4, batch_first=True)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("places", torch.arange(5.0), persistent=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = x + self.words(mask)
        kept[:, 0] = 0.0
        kept, _ = self.attention(*[self.norm(kept)] * 3, need_weights=False)
        kept, _ = self.recurrent(torch.nn.functional.silu(kept) + self.places[:, None])
        y = self.head(kept)[..., :3] * mask[..., None] + (mask > 0)[..., None] / 3  # types are promoted
        return y, torch.where(y > 0, y, y.clamp_min(-1.0)).std((1, 2))


def test_a_trace_that_is_decomposed_at_once_is_the_one_that_is_decomposed_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    module = Wrapper(Tied()).eval().requires_grad_(False)
    at_once = trace(module, SIGNATURE, BUCKET, 20)
    monkeypatch.setattr(trace_module, "decomposed_at_once", lambda opset: contextlib.nullcontext())
    behind = trace(module, SIGNATURE, BUCKET, 20)
    assert list(at_once.module_outputs) == list(behind.module_outputs)
    assert sorted(at_once.model.graph.initializers) == sorted(behind.model.graph.initializers)
    assert "words.weight" in at_once.model.graph.initializers  # once, as the tied one that it is
    assert _described(at_once.model.graph) == _described(behind.model.graph)


def _described(graph: ir.Graph) -> list[tuple[object, ...]]:
    """Its nodes, with values by number where they have no name of a parameter or an input."""
    made = {value: number for number, value in enumerate(value for node in graph for value in node.outputs)}
    return [
        (
            node.op_type,
            [value and made.get(value, value.name) for value in node.inputs],
            {name: str(attribute.value) for name, attribute in node.attributes.items()},
        )
        for node in graph
    ]


ROWS = ("batch", "sequence", 3)
ALONE = Signature((TensorSpec("x", "float32", ROWS),), (TensorSpec("y", "float32", ROWS),), 16)


class Alone(torch.nn.Module):
    """Returns more than is asked for, its input among it."""

    calls: ClassVar[list[torch.Tensor]] = []
    last: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 3)
        self.last = None
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        Alone.calls.append(x)
        y = self.up(x)
        y[:, 0] = 0.0
        return y, x, x.mT, y


class Counting(Alone):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.seen += 1
        return (super().forward(x)[0] * self.seen,)


class Overwriting(Alone):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(x.mul_(2))


class Keeping(Alone):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.last = x * 2
        return super().forward(x)


def traced_alone(net: type[Alone], bucket: Bucket) -> tuple[ir.Model, Alone, int]:
    """The graph, the module behind it, and how often it ran."""
    torch.manual_seed(0)
    Alone.calls.clear()
    module = net().eval().requires_grad_(False)
    model = trace(module, ALONE, bucket, 20).model
    return model, module, len(Alone.calls)


@pytest.mark.parametrize("bucket", [Bucket(2, 8), Bucket(2, 9, None, 1)], ids=str)
@pytest.mark.parametrize(("net", "runs"), [(Alone, 1), (Keeping, 1), (Counting, 3), (Overwriting, 3)])
def test_the_graph_is_that_of_two_runs(
    monkeypatch: pytest.MonkeyPatch, net: type[Alone], runs: int, bucket: Bucket
) -> None:
    alone, module, ran = traced_alone(net, bucket)
    assert (ran, module.last) == (runs, None), "what a trace leaves on a module is taken away again"
    monkeypatch.setattr(faster_export, "traced_alone", _refused)
    behind, _, ran = traced_alone(net, bucket)
    assert ran == 2
    assert repr(alone.graph) == repr(behind.graph)


@contextlib.contextmanager
def _refused(_: torch.nn.Module):
    raise RuntimeError
    yield


class KeptTotal(torch.nn.Module):
    """Its total is of the batch that it saw first."""

    kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kept is None:
            self.kept = torch.ones(2)
        return x[..., :3] * mask.unsqueeze(-1), self.kept * x.mean()


def test_an_output_of_one_size_is_refused_where_the_size_is_free() -> None:
    with pytest.raises(ExportError, match=r"made for one size: output total has shape \[2\] where \['batch'\] was"):
        trace(Wrapper(KeptTotal()).eval(), SIGNATURE, Bucket(4, 5, 1, 1), 20)
