"""Graphs of repeated layers are those of whole traces; layers that differ anywhere are traced, all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import onnx_ir as ir
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.exporters import trace as trace_module
from nestforge.exporters.equal_layers import shortened
from nestforge.exporters.signature import Signature
from nestforge.exporters.source import open_source
from nestforge.exporters.trace import trace
from nestforge.exporters.universal import load_universal

from tests.support.gated_decoders import save_decoder

LAYERS, WIDTH = 8, 4
ROWS = ("batch", "sequence", WIDTH)
SIGNATURE = Signature((TensorSpec("x", "float32", ROWS),), (TensorSpec("y", "float32", ROWS),), 16)
RANGE = Bucket(2, 9, None, 1)


class Layer(torch.nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, width), torch.nn.Linear(width, WIDTH)
        self.factor = 1.0

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.factor * self.down(torch.relu(self.up(x))) * scale


class Net(torch.nn.Module):
    """Layers one behind the other, given a number that is made before them."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))
        self.head = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        scale = x.mean()
        for layer in self.layers:
            x = layer(x, scale)
        return (self.head(x),)


class Twice(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return super().forward(*super().forward(x))


class ByPlace(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        scale = x.mean()
        for number, layer in enumerate(self.layers):
            x = layer(x * number, scale)
        return (self.head(x),)


class Gathering(Net):
    """What is behind the layers reads all of them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        found, scale = [x], x.mean()
        for layer in self.layers:
            found.append(layer(found[-1], scale))
        return (self.head(torch.stack(found).sum(0)),)


class Constant(Net):
    """Layers have a number in a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.factor = torch.tensor(0.5)


class LastWeight(Net):
    """What is behind the layers reads a weight of the last."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (super().forward(x)[0] @ self.layers[-1].up.weight.T @ self.layers[-1].up.weight,)


class LastButOne(Net):
    """What the last layer but one returns is an output."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale, before = x.mean(), x
        for layer in self.layers:
            before, x = x, layer(x, scale)
        return self.head(x), before


class SameTwice(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(x) * 2


class Nothing(Net):
    """More layers that do nothing than others."""

    def __init__(self) -> None:
        super().__init__(3)
        self.more = torch.nn.ModuleList(torch.nn.Identity() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for each in self.more:
            x = each(x)
        return super().forward(x)


class Locked(Net):
    """There is no copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()


class Single(Net):
    """Its copy is itself."""

    def __deepcopy__(self, memo: object) -> Single:
        return self


class Limited(Layer):
    """What it does of a size, other limits do too where the size is small."""

    limit = 8

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x, scale) * torch.sym_min(x.shape[1], self.limit)


class Limits(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Limited() for _ in range(LAYERS))
        self.layers[6].limit = 9


def another_factor(net: Net) -> None:
    net.layers[6].factor = 2.0


def another_width(net: Net) -> None:
    net.layers[6] = Layer(7)


def another_function(net: Net) -> None:
    net.layers[6].up = torch.nn.Sequential(net.layers[6].up, torch.nn.Tanh())


def every_other(net: Net) -> None:
    for layer in net.layers[::2]:
        layer.factor = 3.0


def one_tensor(net: Net) -> None:
    """All layers on the weights of the first."""
    for layer in net.layers[1:]:
        layer.up.weight = net.layers[0].up.weight


def ready(net: torch.nn.Module) -> torch.nn.Module:
    return net.eval().requires_grad_(False)


def kept(net: torch.nn.Module) -> int | None:
    found = shortened(ready(net), SIGNATURE, (torch.ones(2, 7, WIDTH),))
    return found and found.kept


def meaning(graph: ir.Graph) -> tuple[set[str], list[str], list[str | None]]:
    """Nodes, each by its operation and all that is before it, outputs so, and names of inputs."""
    known = {value: str(value.name) for value in (*graph.inputs, *graph.initializers.values())}
    said = []
    for node in graph:
        values = {name: str(attribute.value) for name, attribute in node.attributes.items()}
        read: Any = [value and known[value] for value in node.inputs]
        if node.op_type == "Shape":  # torch takes the size of a row from any tensor that has it
            read = None
        said.append(sha256(repr((node.op_type, values, read)).encode()).hexdigest())
        known |= {value: f"{said[-1]}.{number}" for number, value in enumerate(node.outputs)}
    return set(said), [known[value] for value in graph.outputs], [value.name for value in graph.inputs]


def both(monkeypatch: pytest.MonkeyPatch, traced: Callable[[], ir.Model]) -> tuple[ir.Model, ir.Model]:
    """A graph of repeated layers, and one of all layers traced."""
    repeated: list[bool] = []
    real = trace_module.repeat_layers
    monkeypatch.setattr(trace_module, "repeat_layers", lambda *args: repeated.append(real(*args)) or repeated[-1])
    few = traced()
    assert repeated == [True]
    monkeypatch.setattr(trace_module, "shortened", lambda *_: None)
    return few, traced()


@pytest.mark.parametrize(("change", "layers"), [(None, 2), (every_other, 4), (another_factor, 9), (one_tensor, None)])
def test_as_many_layers_are_kept_as_differ(change: Callable[[Net], None] | None, layers: int | None) -> None:
    net = Net(16)
    if change is not None:
        change(net)
    assert kept(net) == layers


@pytest.mark.parametrize("net", [Twice, ByPlace, Gathering])
def test_layers_that_are_not_called_in_turn_alike_are_all_traced(net: type[Net]) -> None:
    assert kept(net()) is None


@pytest.mark.parametrize("change", [another_factor, another_width, another_function])
def test_one_layer_that_differs_near_the_end_has_all_traced(change: Callable[[Net], None]) -> None:
    net = Net()
    change(net)
    assert kept(net) is None


def test_weights_of_repeated_layers_lie_in_the_order_in_which_nodes_read_them() -> None:
    """In any other that of two compiles would differ."""
    graph = trace(ready(Net(16)), SIGNATURE, RANGE, 20).model.graph
    read = dict.fromkeys(value.name for node in graph for value in node.inputs if value and value.is_initializer())
    repeated = [name for name in graph.initializers if name.startswith("layers.") and int(name.split(".")[1]) > 2]
    assert len(repeated) > 26
    assert repeated == [name for name in read if name in repeated]


def test_few_layers_are_traced_as_they_are() -> None:
    assert kept(Net(5)) is None


@pytest.mark.parametrize("net", [Locked, Single])
def test_a_class_that_cannot_be_copied_is_traced_as_it_is(net: type[Net]) -> None:
    module = net()
    assert kept(module) is None
    assert len(module.layers) == LAYERS


def test_layers_are_equal_at_larger_sizes_too() -> None:
    net, small, large = ready(Limits()), torch.ones(2, 7, WIDTH), torch.ones(2, 9, WIDTH, device="meta")
    assert shortened(net, SIGNATURE, (small,)) is not None
    assert shortened(net, SIGNATURE, (small,), (large,)) is None


@pytest.mark.parametrize("net", [LastWeight, LastButOne, SameTwice, Nothing, Limits])
def test_graphs_where_few_layers_do_not_say_all_are_those_of_whole_traces(
    monkeypatch: pytest.MonkeyPatch, net: Callable[[], Net]
) -> None:
    module = ready(net())
    outputs = [TensorSpec(f"y{number}", "float32", ROWS) for number, _ in enumerate(module(torch.ones(2, 7, WIDTH)))]
    interface = replace(SIGNATURE, outputs=tuple(outputs))
    graph = trace(module, interface, RANGE, 20).model.graph
    monkeypatch.setattr(trace_module, "shortened", lambda *_: None)
    assert meaning(graph) == meaning(trace(module, interface, RANGE, 20).model.graph)


@pytest.mark.parametrize(("net", "change"), [(Net, None), (Net, every_other)])
def test_a_graph_of_repeated_layers_is_that_of_all(
    monkeypatch: pytest.MonkeyPatch, net: type[Net], change: Callable[[Net], None] | None
) -> None:
    module = net()
    if change is not None:
        change(module)
    few, whole = both(monkeypatch, lambda: trace(ready(module), SIGNATURE, RANGE, 20).model)
    assert meaning(few.graph) == meaning(whole.graph)
    assert {name: value.const_value.numpy().tolist() for name, value in few.graph.initializers.items()} == {
        name: value.const_value.numpy().tolist() for name, value in whole.graph.initializers.items()
    }


def test_a_decoder_with_its_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Masks and angles are made before the layers, each of which has inputs and outputs of its own."""
    universal = load_universal(open_source(save_decoder(tmp_path / "model", num_hidden_layers=6), generates=True))
    whole, part = universal.spec.universal(), universal.source.parts["cached"]
    interface = part.of(whole)
    module, bucket = interface.module(universal.narrow(whole)), part.at(Bucket(1, 9, None, 1))
    few, every = (each.graph for each in both(monkeypatch, lambda: trace(module, interface, bucket, 20).model))
    assert meaning(few) == meaning(every)
    assert few.initializers.keys() == every.initializers.keys()
    assert [value.name for value in few.outputs] == [value.name for value in every.outputs]


def test_a_constant_of_each_layer_has_the_numbers_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    few, whole = both(monkeypatch, lambda: trace(ready(Constant()), SIGNATURE, RANGE, 20).model)
    assert [node.op_type for node in few.graph] == [node.op_type for node in whole.graph]
    assert f"layers.{LAYERS - 1}.factor" in {value.name for value in whole.graph.initializers.values()}
    constants = [value for value in few.graph.initializers.values() if str(value.name).endswith("factor")]
    assert sum(len(value.uses()) for value in constants) == LAYERS
