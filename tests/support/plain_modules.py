"""Small modules of PyTorch as a user writes them: of no library."""

import torch
from torch.nn import functional


class Block(torch.nn.Module):
    """Attention and an FFN, ``[B, S, H]`` to ``[B, S, H]``."""

    def __init__(self, hidden: int = 16, heads: int = 4, width: int = 32) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, hidden // heads
        self.norm, self.ffn_norm = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = torch.nn.Linear(hidden, width), torch.nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        rows, length, _ = x.shape
        normed = self.norm(x)
        q, k, v = (
            each(normed).view(rows, length, self.num_heads, self.head_dim).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5  # [B, n, S, S]
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, -1))
        return x + self.down(functional.gelu(self.up(self.ffn_norm(x))))


class Tagger(torch.nn.Module):
    """Tokens and a number a row to scores ``[B, S, 3]`` and a mean ``[B, 16]``; ``mask`` is 1 where a token counts."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.places = torch.nn.Embedding(50, 16), torch.nn.Parameter(0.1 * torch.randn(1, 24, 16))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
        self.head = torch.nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> dict[str, object]:
        x = self.embed(tokens) * scale[:, None, None] + self.places[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask == 0)
        return {"scores": self.head(x), "of": (x.mean(1), x.argmax(-1))}


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 32), torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Branching(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return -found if found.sum() > 0 else found


class Looping(Mlp):
    """Of at most 16 tokens: the search for the longest text ends soon."""

    scales = (0.5,) * 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        for step in range(int(x.shape[1])):
            found = found + x[:, step : step + 1, :4] * self.scales[step]
        return found


class OfSeven(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.places = torch.nn.Parameter(torch.randn(7, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.places)


@torch.library.custom_op("nestforge_tests::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Custom(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return thrice(super().forward(x))
