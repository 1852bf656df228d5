"""A pass that reads weights otherwise than they are written is a pass of a module that has them so."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.parity import reading
from nestforge.compiler.parity.cases import parity_cases
from nestforge.compiler.parity.reading import in_float64, nudged
from nestforge.elastic import Submodel
from nestforge.errors import UnsupportedModelError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from support.cost_eff_models import save_tiny
from support.gated_decoders import save_decoder
from support.tiny_coda import save_tiny_coda
from support.tiny_compile import save_tiniest
from support.tiny_matlm import save_tiny_matlm
from support.tiny_mhe import save_tiny_mhe
from support.tiny_mixer import save_tiny_mixer
from support.tiny_models import save_gpt2, save_t5, save_tiny_vit
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "bert": save_tiniest,
    "coda": save_tiny_coda,
    "cost-eff": save_tiny,
    "gemma3": lambda folder: save_decoder(folder, "gemma3_text"),
    "gpt2": save_gpt2,
    "llama": save_decoder,
    "matlm": save_tiny_matlm,
    "mhe": save_tiny_mhe,
    "mixer": save_tiny_mixer,
    "qwen3": lambda folder: save_decoder(folder, "qwen3"),
    "t5": save_t5,
    "vit": save_tiny_vit,
}
IDS = torch.tensor([[5, 7, 11, 3, 2, 9]])


def widened(module: torch.nn.Module) -> torch.nn.Module:
    """A copy with float64 parameters on the same buffers."""
    return with_parameters(module, lambda parameter: parameter.data.double())


def with_parameters(module: torch.nn.Module, made: Callable[[torch.nn.Parameter], torch.Tensor]) -> torch.nn.Module:
    """A copy with other numbers on the same buffers."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in module.buffers()}
    memo |= {id(p): torch.nn.Parameter(made(p), requires_grad=False) for p in module.parameters()}
    return copy.deepcopy(module, memo)


def submodels(universal: UniversalModel) -> Iterator[Submodel]:
    """The whole, and one whose weights are views of larger ones."""
    yield universal.spec.universal()
    yield universal.spec.submodel({a.name: max(1, a.size // 2) for a in universal.spec.axes if a.choices is None})


@pytest.fixture(scope="module", params=FAMILIES)
def universal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> UniversalModel:
    return load_universal(open_source(FAMILIES[request.param](tmp_path_factory.mktemp("family") / "model")))


def given(universal: UniversalModel) -> list[tuple[torch.Tensor, ...]]:
    signature = universal.source.signature
    sequence = min(16, signature.max_sequence or 16)
    cases = parity_cases(signature, Bucket(2, sequence), None)
    return [tuple(torch.from_numpy(array) for array in case.feeds.values()) for case in cases]


def wide(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]


def test_weights_read_in_float64_are_a_module_with_float64_weights(universal: UniversalModel) -> None:
    for submodel in submodels(universal):
        module = universal.narrow(submodel)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with torch.no_grad():
            first = [module(*inputs) for inputs in given(universal)]
        with in_float64(module):
            found = [module(*wide(inputs)) for inputs in given(universal)]
        copied = widened(module)
        with in_float64(copied):
            expected = [copied(*wide(inputs)) for inputs in given(universal)]
        for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        assert any(tensor.dtype == torch.float64 for tensor in found[0])
        # Nothing of the pass stays behind in the module.
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        with torch.no_grad():
            again = [module(*inputs) for inputs in given(universal)]
        assert all(map(torch.equal, itertools.chain(*first), itertools.chain(*again)))
    assert torch.get_default_dtype() == torch.float32


def test_a_module_that_is_read_moved_is_a_module_with_moved_weights(universal: UniversalModel) -> None:
    module = universal.narrow(universal.spec.universal())
    moved = with_parameters(module, Moved(module, seed=3))
    for inputs in given(universal)[:2]:
        with nudged(module, 3):
            found, again = module(*inputs), module(*inputs)
        with nudged(module, 4):
            other = module(*inputs)
        with torch.no_grad():
            expected = moved(*inputs)
        assert all(map(torch.equal, found, again))
        assert all(map(torch.equal, found, expected))
        assert not all(map(torch.equal, found, other))


class Moved:
    """Parameters of ``module`` as ``nudged`` has them."""

    def __init__(self, module: torch.nn.Module, seed: int) -> None:
        self._module, self._seed = module, seed

    def __call__(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        with nudged(self._module, self._seed):
            return parameter.clone()


def test_an_eighth_of_the_weights_is_moved_by_one_unit(universal: UniversalModel) -> None:
    module = universal.module
    off = {name: (Moved(module, 0)(p) - p).abs() / p.abs() for name, p in module.named_parameters()}
    weights = torch.cat([one.flatten() for one in off.values()]).nan_to_num(nan=0)  # of those that are 0
    assert weights.max() <= 2.0**-23
    assert 0.1 < float((weights > 0).sum() / sum((p != 0).sum() for p in module.parameters())) < 0.15


def test_what_is_moved_does_not_depend_on_where_it_lies(universal: UniversalModel) -> None:
    """Another order in memory, with gaps between, as in a file."""
    module = universal.module
    moved = {name: Moved(module, 7)(p) for name, p in module.named_parameters()}
    numbers = sum(p.numel() for p in module.parameters()) + 3 * len(moved)
    memory, at, places = torch.zeros(numbers), 0, {}
    for parameter in reversed(list(module.parameters())):
        memory[at : at + parameter.numel()] = parameter.data.flatten()
        places[id(parameter)] = slice(at, at + parameter.numel())
        at += parameter.numel() + 3
    other = with_parameters(module, lambda p: memory[places[id(p)]].view(p.shape))
    for name, parameter in other.named_parameters():
        assert torch.equal(Moved(other, 7)(parameter), moved[name])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    folder = save_decoder(tmp_path_factory.mktemp("llama") / "llama", "llama")
    return load_universal(open_source(folder)).module


def test_a_pass_holds_one_weight(llama: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest, whatever the number of layers and passes is."""
    largest = max(parameter.numel() for parameter in llama.parameters())
    made: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda size, **kind: (made.append(size), empty(size, **kind))[1],
    )
    with in_float64(llama):
        first = llama(IDS)
        assert sorted(made) == made, "it grows to the largest, and is not made again"
        assert made[-1] == largest
        held = len(made)
        again = llama(IDS)
    assert len(made) == held < len(list(llama.parameters()))
    assert all(map(torch.equal, first, again))


def test_a_large_product_is_made_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 192 columns each, which is a vocabulary of two and a half parts here."""
    table, x = torch.nn.Linear(24, 480).requires_grad_(False), torch.randn(7, 24, dtype=torch.float64)
    for bias in (table.bias, None):
        table.bias = bias
        with in_float64(table):
            whole = table(x)
        with monkeypatch.context() as patch:
            patch.setattr(reading, "_MOST_BYTES_AT_ONCE", 64)
            with Largest() as largest, in_float64(table):
                parts = table(x)
        assert parts.shape == (7, 480)
        torch.testing.assert_close(parts, whole, rtol=1e-14, atol=1e-15)
        assert largest.numbers == 192 * 24


class Largest(TorchDispatchMode):
    """The most numbers of a float64 tensor that an operation takes."""

    numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        taken = [leaf.numel() for leaf in leaves if leaf.dtype == torch.float64]
        self.numbers = max(self.numbers, *taken, 0)
        return func(*args, **(kwargs or {}))


def test_what_is_cut_off_reads_as_zero() -> None:
    layer, other = torch.nn.Linear(5, 4).requires_grad_(False), torch.nn.Linear(5, 4).requires_grad_(False)
    other.load_state_dict(layer.state_dict())
    other.weight[2:], other.weight[:, 3:], other.bias[2:] = 0, 0, 0
    x = torch.randn(3, 5, dtype=torch.float64)
    with in_float64(layer, {"weight": [(0, 2), (1, 3)], "bias": [(0, 2)]}):
        found, table = layer(x), torch.nn.functional.embedding(torch.tensor([3, 1]), layer.weight)
        column = layer.weight[:, 2] * 1
    with in_float64(other):
        assert torch.equal(found, other(x))
        assert torch.equal(table, other.weight[torch.tensor([3, 1])])
        assert torch.equal(column, other.weight[:, 2] * 1)
    assert layer.weight.count_nonzero() == 20


class Narrowings(TorchDispatchMode):
    """Collects operations that take float64 and return float32."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        taken, returned = (
            [leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
            for tree in ((args, kwargs), result)
        )
        if torch.float64 in taken and torch.float32 in returned:
            self.found.append(str(func))
        return result


def test_norms_that_ask_for_float32_stay_wide(llama: torch.nn.Module) -> None:
    with in_float64(llama):
        (found,) = llama(IDS)
    assert found.dtype == torch.float64

    with torch.no_grad():
        (narrowed,) = copy.deepcopy(llama).double()(IDS)  # its norms round to float32, as their code says
    for part in (own := copy.deepcopy(llama)).modules():
        if type(part).__name__ == "LlamaRMSNorm":
            part.forward = _norm.__get__(part)
    with in_float64(own):
        (expected,) = own(IDS)
    assert (found - expected).abs().max() < 1e-13
    assert (narrowed - expected).abs().max() > 1e-9


def _norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """LlamaRMSNorm without its casts."""
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (hidden * scale)


def test_nothing_is_narrowed_and_rotary_angles_keep_their_numbers(llama: torch.nn.Module) -> None:
    angles: list[torch.Tensor] = []
    rotary: Any = next(part for part in llama.modules() if type(part).__name__ == "LlamaRotaryEmbedding")
    handle = rotary.register_forward_hook(lambda _m, _i, out: angles.append(out[0].double()))
    try:
        with torch.no_grad():
            llama(IDS)
        with Narrowings() as watch, in_float64(llama):
            llama(IDS)
    finally:
        handle.remove()
    assert watch.found == []
    assert torch.equal(*angles)


class Layers(torch.nn.Module):
    """Layers that want weights of the type of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [
                torch.nn.Conv1d(6, 8, 3, padding=1, groups=2),
                torch.nn.ConvTranspose1d(8, 6, 3, padding=1),
                torch.nn.LSTM(5, 5, bidirectional=True),
                torch.nn.GRU(10, 5, num_layers=2),
                torch.nn.RNN(5, 5),
                torch.nn.RMSNorm(5),
                torch.nn.PReLU(6),
                torch.nn.GroupNorm(2, 6),
                torch.nn.BatchNorm1d(6),
            ]
        )
        self.attention = torch.nn.MultiheadAttention(5, 1, add_bias_kv=True)
        self.cell, self.pairs = torch.nn.LSTMCell(5, 3), torch.nn.Bilinear(5, 5, 2)
        self.query = torch.nn.Parameter(torch.randn(2, 1, 5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``x`` [B, 6, 5]."""
        for layer in self.layers:
            found = layer(x)
            x = found[0] if isinstance(found, tuple) else found
        pooled = torch.nn.functional.scaled_dot_product_attention(self.query.view(2, 1, 5), x, x)
        return (x, *self.attention(x, x, x), *self.cell(x[0]), self.pairs(x, x), pooled)


def test_layers_that_ask_for_one_type_are_answered() -> None:
    torch.manual_seed(0)
    layers, x = Layers().eval().requires_grad_(False), torch.randn(2, 6, 5, dtype=torch.float64)
    with in_float64(layers):
        found = layers(x)
    copied = widened(layers)
    with in_float64(copied):
        expected = copied(x)
    assert all(map(torch.equal, found, expected))


def test_a_pass_that_writes_into_a_weight_is_refused() -> None:
    class Rescaling(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.div_(2)
            return super().forward(x)

    module = Rescaling(4, 4)
    before = module.weight.detach().clone()
    with in_float64(module), pytest.raises(UnsupportedModelError, match="writes into its weight weight; expected"):
        module(torch.ones(1, 4))
    assert torch.equal(module.weight, before)
