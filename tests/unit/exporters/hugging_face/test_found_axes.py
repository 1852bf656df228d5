"""Axes found in modules that no family names: the traps each as a tiny module, and agreement with named families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.elastic import PrefixSlice
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.family import family_of
from nestforge.exporters.hugging_face.found_axes import FoundAxes, find_axes
from torch import nn
from torch.nn import functional

# Features, heads, features of a head, neurons.
H, N, D, F = 12, 4, 3, 20


class Layers(nn.Module):
    """``layers`` in a residual stream, behind a norm each."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in layers)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


class Ffn(nn.Module):
    """An FFN with ``between`` of its neurons; ``up`` makes ``wide`` of them."""

    def __init__(self, between: Any = functional.gelu, wide: int = F, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.between, self.inner = between, inner
        self.up, self.down = nn.Linear(H, wide), nn.Linear(F, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.between(self.up(x))
        return self.down(made if self.inner is None else self.inner(made))


class BatchNormed(Ffn):
    """Behind a norm over the batch, whose variances are no negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Attention(nn.Module):
    """``kv`` pairs of keys and values for all heads; the classes below bend one thing each."""

    def __init__(self, kv: int = N, made: int | None = None) -> None:
        super().__init__()
        self.kv, self.num_heads = kv, N
        self.q, self.k, self.v = nn.Linear(H, N * D), nn.Linear(H, kv * D), nn.Linear(H, kv * D)
        self.o = nn.Linear(N * D, H)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        return self.split(self.q(x))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, D).transpose(1, 2)

    def bend(self, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def three(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = self.queries(x), self.split(self.k(x)), self.split(self.v(x))
        return q, *(t.repeat_interleave(N // self.kv, 1) if self.kv != N else t for t in (k, v))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.three(x)
        scores = self.bend(q @ k.transpose(-1, -2) / D**0.5).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).flatten(2))


class Fused(Attention):
    """Queries, keys and values in one weight: one behind the other, or side by side for each head."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.by_head, self.qkv = by_head, nn.Linear(H, 3 * N * D)
        del self.q, self.k, self.v

    def three(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.by_head:
            return self.qkv(x).view(*x.shape[:2], -1, 3 * D).transpose(1, 2).chunk(3, -1)
        return tuple(map(self.split, self.qkv(x).chunk(3, -1)))


class Counted(Attention):
    """Splits into as many heads as it was made with."""

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], self.num_heads, D).transpose(1, 2)


class Biased(Attention):
    """A table of biases by distance for each head."""

    def __init__(self, table: nn.Embedding | None = None) -> None:
        super().__init__()
        self.table = table or nn.Embedding(5, N)

    def bend(self, scores: torch.Tensor) -> torch.Tensor:
        places = torch.arange(scores.shape[-1])
        return scores + self.table((places[:, None] - places).abs().clamp(max=4)).permute(2, 0, 1)


class Normed(Attention):
    """Queries normalised, each head by itself or all together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        return self.norm(self.split(q)) if self.norm.normalized_shape == (D,) else self.split(self.norm(q))


class Convolved(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(N * D, N * D, 3, padding=1, groups=N * D)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        return self.split(self.conv(self.q(x).transpose(1, 2)).transpose(1, 2))


class Experts(nn.Module):
    """Every expert on every token, their weights stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(2, H, F)), nn.Parameter(torch.empty(2, F, H))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = (x.flatten(0, 1).expand(2, -1, -1) @ self.up).relu()
        return (inner @ self.down).sum(0).view(x.shape)


class Tied(Ffn):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).relu() @ self.up.weight


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, F), nn.Linear(H, F), nn.Linear(F, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Bare(Ffn):
    """A gate and its values in one weight, which is no layer's."""

    def __init__(self) -> None:
        super().__init__(functional.glu)
        self.up = nn.ParameterList([torch.empty(2 * F, H)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(functional.linear(x, self.up[0])))


class Scaled(Ffn):
    """A number that counts the neurons, and is none of the weights': a prefix is another function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x).relu()
        return self.down(inner / inner.shape[-1])


class Slanted(Ffn):
    """A prefix is the same function, but neurons in another order are another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x).relu()
        return self.down(inner * 0.9 ** torch.arange(inner.shape[-1]))


class Residual(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def found(*layers: nn.Module) -> FoundAxes:
    return find_axes(Layers(*layers).eval(), (torch.empty(2, 5, H),))


def _plain(axis: str, unit: int, made: str, read: str) -> set[PrefixSlice]:
    layer = axis.rpartition(".")[0]
    rows = {
        PrefixSlice(f"{layer}.{name}.{part}", 0, axis, unit) for name in made.split() for part in ("weight", "bias")
    }
    return rows | {PrefixSlice(f"{layer}.{read}.weight", 1, axis, unit)}


FFN, HEADS = "layers.0.ffn", "layers.0.heads"


@pytest.mark.parametrize(
    ("layer", "size", "slices"),
    [
        (Ffn, F, _plain(FFN, 1, "up", "down")),
        (BatchNormed, F, _plain(FFN, 1, "up", "down")),
        (Gated, F, _plain(FFN, 1, "gate up", "down")),
        (Tied, F, {PrefixSlice(f"layers.0.up.{part}", 0, FFN) for part in ("weight", "bias")}),
        (Attention, N, _plain(HEADS, D, "q k v", "o")),
        (Counted, N, _plain(HEADS, D, "q k v", "o")),
        (
            lambda: Attention(kv=2),
            2,
            _plain(HEADS, 2 * D, "q", "o") | _plain(HEADS, D, "k v", "o") - _plain(HEADS, D, "", "o"),
        ),
        (
            lambda: Fused(by_head=True),
            N,
            _plain(HEADS, 3 * D, "qkv", "o") - _plain(HEADS, 3 * D, "", "o") | _plain(HEADS, D, "", "o"),
        ),
        (
            lambda: Fused(by_head=False),
            N,
            _plain(HEADS, D, "qkv.parts.0 qkv.parts.1 qkv.parts.2", "o"),
        ),
        (lambda: Ffn(lambda x: functional.glu(x), 2 * F), F, _plain(FFN, 1, "up.parts.0 up.parts.1", "down")),
        (Biased, N, _plain(HEADS, D, "q k v", "o") | {PrefixSlice("layers.0.table.weight", 1, HEADS)}),
        (lambda: Normed(D), N, _plain(HEADS, D, "q k v", "o")),
    ],
    ids=[
        "ffn",
        "batch norm",
        "gated",
        "tied",
        "heads",
        "counted heads",
        "grouped",
        "fused by head",
        "fused",
        "fused gate",
        "table per head",
        "norm per head",
    ],
)
def test_what_may_shrink_is_found_with_all_that_follows(layer: Any, size: int, slices: set[PrefixSlice]) -> None:
    axes = found(layer())
    assert [axis.size for axis in axes.axes] == [size]
    assert sorted(axes.slices, key=str) == sorted(slices, key=str)
    assert axes.refused == ()


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([Bare()], "ffn of layers.*: layers.*.up.0 holds its steps behind those of others"),
        ([Attention(kv=1)], "heads of layers.*: cut to 2 of 4, Attention fails"),
        ([Normed(N * D)], "heads of layers.*: a norm runs over it"),
        ([Convolved()], "heads of layers.*: a convolution"),
        ([Experts()], "ffn of layers.*: layers.*.up has three dimensions"),
        (
            [Ffn(lambda x: x * (x >= x.topk(3).values[..., -1:]))],
            "ffn of layers.*: a choice of its highest runs over it",
        ),
        ([Ffn(lambda x: x.softmax(-1))], "ffn of layers.*: a softmax runs over it"),
        ([Ffn(inner=nn.LayerNorm(F))], "ffn of layers.*: a norm runs over it"),
        ([Ffn(inner=Residual(F, F))], "ffn of layers.*: layers.*.inner.weight would be cut in two dimensions"),
        ([Scaled()], "ffn of layers.*: cut to 10 of 20 it is another function"),
        ([Slanted()], "ffn of layers.*: its steps differ by their place"),
    ],
    ids=[
        "no layer",
        "one key",
        "norm of all",
        "convolution",
        "experts",
        "top-k",
        "softmax",
        "norm",
        "mixed",
        "scaled",
        "slanted",
    ],
)
def test_what_may_not_is_refused_with_the_reason(layers: list[nn.Module], reason: str) -> None:
    axes = found(*layers)
    assert (axes.axes, axes.slices) == ((), ())
    assert reason in "\n".join(axes.refused)


def test_layers_are_in_parts_where_that_gives_axes_alone() -> None:
    fused, plain, gated = Fused(by_head=False), Bare(), Ffn(lambda x: functional.glu(x), 2 * F)
    axes = found(fused, plain, gated)
    assert [axis.name for axis in axes.axes] == ["layers.0.heads", "layers.1.ffn"]
    assert axes.parted == {"layers.0.qkv": 3, "layers.2.up": 2}
    assert axes.stacked["layers.2.up.bias"] == ("layers.2.up.parts.0.bias", "layers.2.up.parts.1.bias")


class Asked(Ffn):
    """It looks at what its layer is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.glu(self.up(x) * (3 if isinstance(self.up, nn.Linear) else 1)))


class Again(Ffn):
    """Its layer, or the weights of that, under a second name, behind which others follow."""

    def __init__(self, shares: str) -> None:
        super().__init__(functional.glu, 2 * F)
        self.again, self.below = (self.up if shares == "layer" else nn.Linear(H, 2 * F)), nn.Linear(F, H)
        if shares == "weight":
            self.again.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.below(functional.glu(self.again(x)))


def hooked() -> Ffn:
    layer = Ffn(lambda x: functional.glu(x), 2 * F)
    layer.up.register_forward_hook(lambda _, __, found: 3 * found)
    return layer


def with_forward_of_its_own() -> Ffn:
    layer = Ffn(lambda x: functional.glu(x), 2 * F)
    plain = layer.up.forward
    layer.up.forward = lambda x: 3 * plain(x)  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    "layer",
    [Asked(wide=2 * F), Again("layer"), Again("weight"), hooked(), with_forward_of_its_own()],
    ids=["asked", "layer twice", "weight twice", "hook", "forward"],
)
def test_a_layer_that_is_more_than_its_weights_is_in_no_parts(layer: nn.Module) -> None:
    axes = found(layer)
    assert (axes.axes, axes.parted) == ((), {})


def test_what_layers_share_is_no_axis() -> None:
    table, shared = nn.Embedding(5, N), Ffn()
    reading = Ffn()
    reading.up = shared.up
    axes = found(Biased(table), Biased(table), shared, reading)
    assert axes.axes == ()
    assert "heads of layers: its parameters lie in no layer, or in several" in axes.refused
    # The same layer twice is one.
    assert [axis.name for axis in found(shared, shared).axes] == [FFN]


TEXT = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 99}


@pytest.mark.parametrize(
    ("model_type", "own"),
    [("bert", {}), ("vit", {"image_size": 16, "patch_size": 8}), ("llama", {"num_key_value_heads": 2})],
)
def test_named_families_have_the_same_axes(model_type: str, own: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **TEXT, **own, use_cache=False)
    checkpoint = Checkpoint(Path("nowhere"), {**config.to_dict(), "model_type": model_type}, {}, "no weights")
    named = family_of(checkpoint).read(checkpoint).spec
    with torch.device("meta"):
        module = transformers.AutoModel.from_config(config).eval()
        ids = torch.ones(2, 5, dtype=torch.long)
        images, texts = {"pixel_values": torch.empty(2, 3, 16, 16)}, {"input_ids": ids, "attention_mask": ids}
    axes = find_axes(module, (), images if model_type == "vit" else texts)
    assert tuple(axis for axis in axes.axes if axis.kind in named.kinds) == named.axes
    assert {cut for cut in axes.slices if cut.axis.rpartition(".")[2] in named.kinds} == set(named.slices)
    # Named Llamas keep their heads.
    assert {axis.kind for axis in axes.axes} == {"ffn", "heads"}
