"""Modules of our models beside attention: embeddings, FFNs, matrices back to the vocabulary, how weights are drawn,
and pairs of low-rank matrices beside linear layers.

Shapes: ``B`` rows, ``S`` tokens, ``H`` hidden, ``F`` neurons of an FFN, ``V`` vocabulary.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn import functional

from ...errors import CheckpointError

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "squared_relu": lambda x: functional.relu(x).square(),
}
M = TypeVar("M", bound=torch.nn.Module)


class Ffn(torch.nn.Module):
    """``down(activation(up(x)))``, or ``gated`` ``down(activation(gate(x)) * up(x))``, with ``up`` [F, H], ``down``
    [H, F].

    Any first ``m`` of the neurons of an FFN without a gate are an FFN of their own: rows ``[:m]`` of ``up`` and columns
    ``[:m]`` of ``down``. The bias of ``down`` is whole at every ``m``, and nothing is rescaled.
    """

    def __init__(self, hidden: int, width: int, activation: str, bias: bool = True, gated: bool = False) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = torch.nn.Linear(hidden, width, bias) if gated else None
        self.up = torch.nn.Linear(hidden, width, bias)
        self.down = torch.nn.Linear(width, hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., H] to [..., H]."""
        inner = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        return self.down(inner)


class Embeddings(torch.nn.Module):
    """Vectors of tokens, added to those of places and of kinds of token, where there are so many, and normalised where
    an ``epsilon`` is stated."""

    def __init__(
        self, vocabulary: int, width: int, positions: int = 0, types: int = 0, epsilon: float | None = None
    ) -> None:
        super().__init__()
        self.word = torch.nn.Embedding(vocabulary, width)
        self.position = torch.nn.Embedding(positions, width) if positions else None
        self.token_type = torch.nn.Embedding(types, width) if types else None
        self.norm = None if epsilon is None else torch.nn.LayerNorm(width, epsilon)

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ids [B, S] to [B, S, H]; by default every token is of kind 0, and places count from the first on."""
        kinds = None
        if self.token_type is not None:
            kinds = self.token_type.weight[0] if token_type_ids is None else self.token_type(token_type_ids)
        total: torch.Tensor = self.word(input_ids)
        if self.position is not None:
            from_first = position_ids is None
            total = total + (self.position.weight[: input_ids.shape[1]] if from_first else self.position(position_ids))
        total = total if kinds is None else total + kinds
        return total if self.norm is None else self.norm(total)


class VocabularyHead(torch.nn.Module):
    """Logits of every token, through a matrix of its own or, where it is ``tied``, the table of tokens."""

    def __init__(self, hidden: int, vocabulary: int, tied: bool, bias: bool = False) -> None:
        super().__init__()
        self.weight = None if tied else torch.nn.Parameter(torch.empty(vocabulary, hidden))
        self.bias = torch.nn.Parameter(torch.empty(vocabulary)) if bias else None

    def forward(self, hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, S, H] and the ``table`` of tokens [V, H] to logits [B, S, V]."""
        return functional.linear(hidden, table if self.weight is None else self.weight, self.bias)


class MaskedLmHead(torch.nn.Module):
    """Logits of the token at every position, as BERT has them: through the table of tokens, of numbers of ``width``,
    and a bias of its own."""

    def __init__(self, hidden: int, width: int, vocabulary: int, epsilon: float, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.transform = torch.nn.Linear(hidden, width)
        self.norm = torch.nn.LayerNorm(width, epsilon)
        self.bias = torch.nn.Parameter(torch.zeros(vocabulary))

    def forward(self, hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, S, H] and the ``table`` of tokens [V, width] to logits [B, S, V]."""
        return functional.linear(self.norm(self.activation(self.transform(hidden))), table, self.bias)


class View(torch.nn.Module):
    """A pass of ``model`` on its weights, in eval mode."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.eval()


class Answering(View):
    """``model`` as families hand it over: inputs by position, a tuple of outputs."""

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _outputs(self.model(*inputs))


class AnsweringWithRoutes(View):
    """``Answering`` of a model whose ``routed`` also returns, by layer, routes; ``chosen`` of those follow its
    outputs."""

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        answer, routes = self.model.routed(*inputs)
        return (*_outputs(answer), *(routes[layer].chosen for layer in sorted(routes)))


def _outputs(answer: Any) -> tuple[torch.Tensor, ...]:
    return answer if isinstance(answer, tuple) else (answer,)


@torch.no_grad()
def draw_weights(
    model: torch.nn.Module,
    closing: float = 1.0,
    mean: Callable[[str], float] = lambda _: 0.0,
    kept: tuple[str, ...] = (),
) -> None:
    """Draws weights as BERT and GPT-2 do: normal around their ``mean`` by name, 0.02; biases 0; norms stay at 1.

    ``closing`` scales what closes a residual branch, ``attention.output`` and ``ffn.down``; weights whose names end
    with one of ``kept`` stay as they are.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
        elif not name.endswith(("norm.weight", *kept)):
            scale = closing if name.endswith(("attention.output.weight", "ffn.down.weight")) else 1.0
            torch.nn.init.normal_(parameter, mean(name), 0.02 * scale)


def on_same_weights(model: M) -> M:
    """A copy of ``model`` whose parameters and buffers are those of ``model``."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def mend_sizes(model: torch.nn.Module) -> None:
    """Gives linear layers the sizes that their weights have."""
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            part.out_features, part.in_features = part.weight.shape


class Parted(torch.nn.Module):
    """``layer``, whose rows are those of several layers of one size one behind the other, as its ``parts``, on the same
    weights: a prefix of each of them is a prefix of its own parameters."""

    def __init__(self, layer: torch.nn.Linear, parts: int) -> None:
        super().__init__()
        biases = [None] * parts if layer.bias is None else layer.bias.chunk(parts)
        self.parts = torch.nn.Module()  # no list, as layers of a model are in
        for number, (weight, bias) in enumerate(zip(layer.weight.chunk(parts), biases, strict=True)):
            self.parts.add_module(str(number), linear_on(weight, bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., K] to [..., parts * N]."""
        return torch.cat([part(x) for part in self.parts.children()], -1)


def linear_on(weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.nn.Linear:
    """The layer of these very weights."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer


def part_layers(model: torch.nn.Module, parts: Mapping[str, int]) -> None:
    """Puts a ``Parted`` in the place of each layer that has so many ``parts``, by its name."""
    for path, count in parts.items():
        owner, _, name = path.rpartition(".")
        layer = model.get_submodule(path)
        assert isinstance(layer, torch.nn.Linear)
        setattr(model.get_submodule(owner), name, Parted(layer, count))


class Passed(torch.nn.Module):
    """In the place of a layer that is left out: its first input as it is."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


class LowRankLinear(torch.nn.Linear):
    """``x W^T + b + (x A^T) B^T`` (LoRA, arXiv 2106.09685, section 4.1): ``A`` [r, in], ``B`` [out, r] with the scale.

    Both are 0 until a task brings its own, which is the layer as it was, to the bit.
    """

    def __init__(self, linear: torch.nn.Linear, rank: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = torch.nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, linear.out_features, bias=False)
        for pair in (self.lora_A, self.lora_B):
            torch.nn.init.zeros_(pair.weight)
            pair.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., in] to [..., out]."""
        added: torch.Tensor = self.lora_B(self.lora_A(x))
        return super().forward(x) + added


def with_pairs(module: torch.nn.Module, ranks: Mapping[str, int], where: str) -> torch.nn.Module:
    """``module``, changed in place: a pair of the rank in ``ranks`` beside each linear layer named there.

    Raises CheckpointError for a layer that is no plain linear one; ``where`` begins the message.
    """
    for name, rank in ranks.items():
        linear = module.get_submodule(name)
        if type(linear) is not torch.nn.Linear:
            raise CheckpointError(
                f"{where}: {name} is a {type(linear).__name__}, and LoRA is read beside plain linear layers"
            )
        _replace(module, name, LowRankLinear(linear, rank))
    return module


class MergedLinear(torch.nn.Module):
    """``x (W + B A)^T + b``, summed in float64 where it is used: a merged weight does not outlive the product."""

    def __init__(self, pair: LowRankLinear) -> None:
        super().__init__()
        self.weight, self.bias, self.lora_A, self.lora_B = pair.weight, pair.bias, pair.lora_A, pair.lora_B

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., in] to [..., out]."""
        change = self.lora_B.weight.double() @ self.lora_A.weight.double()
        weight = (self.weight.double() + change).to(self.weight.dtype)
        return torch.nn.functional.linear(x, weight, self.bias)


def merged(module: torch.nn.Module) -> torch.nn.Module:
    """A copy, on the same memory, that has every pair merged into its weight."""
    found = on_same_weights(module)
    for name, part in list(found.named_modules()):
        if isinstance(part, LowRankLinear):
            _replace(found, name, MergedLinear(part))
    return found


def _replace(module: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, layer)
