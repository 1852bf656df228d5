"""The float64 reference: nothing that depends on a weight is narrowed, and what depends on none keeps its numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.compiler.parity.evidence.float64 import in_float64, nudged, widened
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.gated_decoders import save_decoder
from support.tiny_compile import save_tiniest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

IDS = torch.tensor([[5, 7, 11, 3, 2, 9]])


class Narrowings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects operations that take float64 and return float32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        taken, given = (
            [leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
            for tree in ((args, kwargs), result)
        )
        if torch.float64 in taken and torch.float32 in given:
            self.found.append(str(func))
        return result


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    folder = save_decoder(tmp_path_factory.mktemp("llama") / "llama", "llama")
    return load_universal(open_source(folder)).module


def test_norms_that_ask_for_float32_stay_wide(llama: torch.nn.Module) -> None:
    wide = widened(llama)
    with in_float64():
        (found,) = wide(IDS)
    assert found.dtype == torch.float64

    with torch.no_grad():
        (narrowed,) = copy.deepcopy(llama).double()(IDS)  # its norms round to float32, as their code says
    for part in (own := widened(llama)).modules():
        if type(part).__name__ == "LlamaRMSNorm":
            part.forward = _norm.__get__(part)  # type: ignore[method-assign, assignment]
    with in_float64():
        (expected,) = own(IDS)
    assert (found - expected).abs().max() < 1e-13
    assert (narrowed - expected).abs().max() > 1e-9


def _norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """LlamaRMSNorm without its casts."""
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (hidden * scale)  # type: ignore[no-any-return]


def test_nothing_is_narrowed_and_rotary_angles_keep_their_numbers(llama: torch.nn.Module) -> None:
    wide, angles = widened(llama), {}
    for name, module in (("float32", llama), ("float64", wide)):
        rotary: Any = next(part for part in module.modules() if type(part).__name__ == "LlamaRotaryEmbedding")
        rotary.register_forward_hook(lambda _m, _i, out, name=name: angles.update({name: out[0].double()}))
    with torch.no_grad():
        llama(IDS)
    watch = Narrowings()
    with watch, in_float64():
        wide(IDS)
    assert watch.found == []
    assert torch.equal(angles["float32"], angles["float64"])


def test_the_module_itself_is_left_alone(tmp_path: Path) -> None:
    module = load_universal(open_source(save_tiniest(tmp_path / "bert"))).module
    before = {name: value.clone() for name, value in module.state_dict().items()}
    wide, moved = widened(module), nudged(module, 0)
    assert all(parameter.dtype == torch.float64 for parameter in wide.parameters())
    assert {id(buffer) for buffer in wide.buffers()} == {id(buffer) for buffer in module.buffers()}
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
        assert torch.equal(wide.state_dict()[name], value.to(wide.state_dict()[name].dtype))
    weights, others = (dict(each.named_parameters()) for each in (module, moved))
    changed = {name: (others[name] - data).abs() for name, data in weights.items()}
    assert all((off <= 2.0**-22 * weights[name].abs()).all() for name, off in changed.items())
    share = sum(int((off > 0).sum()) for off in changed.values()) / sum(off.numel() for off in changed.values())
    assert 0.1 < share < 0.15
    assert torch.get_default_dtype() == torch.float32
