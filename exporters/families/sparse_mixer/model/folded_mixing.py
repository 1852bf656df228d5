"""Spectral mixing at a quarter of the multiplications: cosines are even in ``k -> N - k``, and sines are odd.

    sum_k x[k] cos(2 pi j k / N) = sum over half of k of (x[k] + x[N-k]) cos(...)        the same for j and N - j
    sum_k x[k] sin(2 pi j k / N) = sum over half of k of (x[k] - x[N-k]) sin(...)        of opposite signs there

so a product of N x N becomes one of N/2 x N/2 between a fold of its input and an unfold of its result, for each of

    Y = Cs X Ch + a Cs X Sh + b Ss X Ch + c Ss X Sh        (see spectral_tables.py; a, b, c are -1, 0 or 1)
"""

from __future__ import annotations

import torch

from ..architecture.config import SPECTRAL_FACTORS, SparseMixerConfig, halves
from .spectral_tables import cos_sin


class HalfTables(torch.nn.Module):
    """Cosines [N // 2 + 1, same] and sines [(N - 1) // 2, same] of the indices up to half of ``size`` N, float32."""

    cosines: torch.Tensor
    sines: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        cosines, sines = cos_sin(size)
        even, odd = halves(size)
        self.register_buffer("cosines", cosines[:even, :even].float().contiguous(), persistent=False)
        self.register_buffer("sines", sines[1 : odd + 1, 1 : odd + 1].float().contiguous(), persistent=False)


class FoldedMixing(torch.nn.Module):
    """The spectral mixing of ``config``, folded along both axes, for sequences as long as ``along_sequence``."""

    def __init__(self, config: SparseMixerConfig, along_sequence: HalfTables, along_hidden: HalfTables) -> None:
        super().__init__()
        self.factors = SPECTRAL_FACTORS[config.mixing]
        self.along_sequence, self.along_hidden = along_sequence, along_hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, S, d] to [B, S, d]."""
        even_even, even_odd, odd_even, odd_odd = self.factors  # of the sequence, then of the hidden axis
        cosines = fold(x, -1, 1) @ self.along_hidden.cosines  # [B, S, d // 2 + 1]
        sines = fold(x, -1, -1) @ self.along_hidden.sines  # [B, S, (d - 1) // 2]
        return unfold(
            self._along_sequence(cosines, even_even, odd_even),
            self._along_sequence(sines, even_odd, odd_odd),
            x.shape[-1],
            -1,
        )

    def _along_sequence(self, part: torch.Tensor, even: int, odd: int) -> torch.Tensor:
        """``even * C part + odd * S part``, of ``part`` [B, S, m]."""
        cosines = self.along_sequence.cosines @ fold(part, 1, 1) if even else None
        sines = self.along_sequence.sines @ fold(part, 1, -1) if odd else None
        if even < 0:
            cosines = None if cosines is None else -cosines
        if odd < 0:
            sines = None if sines is None else -sines
        return unfold(cosines, sines, part.shape[1], 1)


def fold(x: torch.Tensor, dim: int, sign: int) -> torch.Tensor:
    """``x[k] + sign * x[N-k]`` along ``dim``: for even parts (sign 1) of 0..N/2, whose ends have no partner, for odd
    parts (-1) of what lies between, since sines are zero at the ends."""
    size = x.shape[dim]
    pairs = (size - 1) // 2
    low, high = x.narrow(dim, 1, pairs), x.narrow(dim, size - pairs, pairs).flip(dim)
    if sign < 0:
        return low - high
    ends = [x.narrow(dim, size // 2, 1)] if size % 2 == 0 else []
    return torch.cat([x.narrow(dim, 0, 1), low + high, *ends], dim)


def unfold(even: torch.Tensor | None, odd: torch.Tensor | None, size: int, dim: int) -> torch.Tensor:
    """The whole of ``size`` along ``dim`` from its even half, its odd half, or both; None is a half of zeros."""
    pairs = (size - 1) // 2
    if even is None:
        assert odd is not None
        zero = odd.new_zeros([1 if extent == dim % odd.dim() else n for extent, n in enumerate(odd.shape)])
        ends = [zero] if size % 2 == 0 else []
        return torch.cat([zero, odd, *ends, -odd.flip(dim)], dim)
    first, middle = even.narrow(dim, 0, 1), even.narrow(dim, 1, pairs)
    ends = [even.narrow(dim, size // 2, 1)] if size % 2 == 0 else []
    low, high = (middle, middle) if odd is None else (middle + odd, middle - odd)
    return torch.cat([first, low, *ends, high.flip(dim)], dim)
