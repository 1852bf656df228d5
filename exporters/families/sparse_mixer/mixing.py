"""Token mixing by fixed matrices: one along the sequence, one along the hidden axis, and no mask.

Every kind is ``Y = sum_p left_p X right_p`` with ``left`` [S, P * S] and ``right`` [d, P * d]; P is 2 for most spectral
kinds and 1 elsewhere. Linear mixing learns both matrices. Circulant and Toeplitz mixing learn one vector each:

    circulant  M[r, s] = c[(r - s) mod N]       N numbers
    toeplitz   M[r, s] = t[N - 1 + s - r]       2 N - 1 numbers

Their ``Y = Ms X Mh^T`` takes the transpose on the hidden axis, where linear mixing ``Ws X Wh`` takes none. Matrices
that are not parameters are held as buffers for inference, and computed from the parameters where those are learned.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch

from .config import SPECTRAL, SparseMixerConfig, halves, parts_of

Matrices = tuple[torch.Tensor, torch.Tensor]


class Mixing(torch.nn.Module, ABC):
    """``forward`` maps [B, S, d] to [B, S, d] for one S, that of the matrices.

    ``sequence_matrix`` and ``hidden_matrix`` are ``left`` and ``right`` where they are held.
    """

    sequence_matrix: torch.Tensor | None
    hidden_matrix: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sequence_matrix", None, persistent=False)
        self.register_buffer("hidden_matrix", None, persistent=False)

    @abstractmethod
    def matrices(self) -> Matrices:
        """``left`` and ``right``: those held, else computed from the parameters."""

    def hold(self, length: int) -> None:
        """Holds the matrices of sequences of ``length``; nothing where they are the parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.matrices()
        mixed = x @ right  # [B, S, P * d]
        parts = right.shape[1] // right.shape[0]
        if parts > 1:
            mixed = torch.cat(mixed.chunk(parts, dim=-1), dim=1)  # [B, P * S, d]
        return left @ mixed


class LinearMixing(Mixing):
    """``Ws X Wh`` with ``sequence`` [n, n] and ``hidden`` [d, d]."""

    def __init__(self, length: int, hidden: int) -> None:
        super().__init__()
        self.sequence = torch.nn.Parameter(torch.empty(length, length))
        self.hidden = torch.nn.Parameter(torch.empty(hidden, hidden))

    def matrices(self) -> Matrices:
        return self.sequence, self.hidden


class VectorMixing(Mixing):
    """Circulant or Toeplitz mixing, whose ``sequence`` and ``hidden`` are the vectors that make the matrices."""

    def __init__(self, length: int, hidden: int, toeplitz: bool) -> None:
        super().__init__()
        self.length, self.toeplitz = length, toeplitz
        self.sequence, self.hidden = (
            torch.nn.Parameter(torch.empty(2 * size - 1 if toeplitz else size)) for size in (length, hidden)
        )

    def matrices(self) -> Matrices:
        learned = torch.is_grad_enabled() and (self.sequence.requires_grad or self.hidden.requires_grad)
        if self.sequence_matrix is None or self.hidden_matrix is None or learned:
            return self._built()
        return self.sequence_matrix, self.hidden_matrix

    def hold(self, length: int) -> None:
        self.length = length
        with torch.no_grad():
            left, right = self._built()
        self.sequence_matrix, self.hidden_matrix = left.contiguous(), right.contiguous()

    def train(self, mode: bool = True) -> VectorMixing:
        if mode:  # the vectors are about to change
            self.sequence_matrix = self.hidden_matrix = None
        return super().train(mode)

    def _built(self) -> Matrices:
        if self.toeplitz:
            width = (self.hidden.shape[0] + 1) // 2
            return toeplitz(self.sequence, self.length), toeplitz(self.hidden, width).T
        return circulant(self.sequence), circulant(self.hidden).T


class SpectralMixing(Mixing):
    """Fourier and Hartley mixing, which learns nothing; layers alike share their tables."""

    def __init__(self, tables: Matrices) -> None:
        super().__init__()
        self.share(tables)

    def share(self, tables: Matrices) -> None:
        """Holds ``tables``, those of ``spectral_matrices``."""
        self.sequence_matrix, self.hidden_matrix = tables

    def matrices(self) -> Matrices:
        assert self.sequence_matrix is not None
        assert self.hidden_matrix is not None
        return self.sequence_matrix, self.hidden_matrix


def circulant(vector: torch.Tensor) -> torch.Tensor:
    """``vector`` [N] to the matrix [N, N] whose entry (r, s) is ``vector[(r - s) mod N]``."""
    place = torch.arange(vector.shape[0], device=vector.device)
    return vector[(place[:, None] - place[None, :]) % vector.shape[0]]


def toeplitz(vector: torch.Tensor, size: int) -> torch.Tensor:
    """``vector`` [2 N - 1] to the first ``size`` rows and columns of the matrix whose entry (r, s) is
    ``vector[N - 1 + s - r]``."""
    place = torch.arange(size, device=vector.device)
    return vector[vector.shape[0] // 2 + place[None, :] - place[:, None]]


def make_mixings(config: SparseMixerConfig) -> list[Mixing | None]:
    """The mixing of every layer, None for layers that attend."""
    length, hidden = config.max_position_embeddings, config.hidden_size
    tables: Matrices | None = None
    mixings: list[Mixing | None] = []
    for layer in range(config.num_hidden_layers):
        if not config.mixes(layer):
            mixings.append(None)
        elif config.mixing == "linear":
            mixings.append(LinearMixing(length, hidden))
        elif config.mixing in ("circulant", "toeplitz"):
            mixings.append(VectorMixing(length, hidden, config.mixing == "toeplitz"))
        else:
            tables = tables or spectral_matrices(config.mixing, length, hidden)
            mixings.append(SpectralMixing(tables))
    return mixings


def spectral_matrices(mixing: str, length: int, hidden: int) -> Matrices:
    """Fourier and Hartley mixing as real matrix products, without an FFT.

    With ``C[j, k] = cos(2 pi j k / N)`` and ``S[j, k] = sin(2 pi j k / N)``, of the sequence (``Cs``, ``Ss``) and the
    hidden axis (``Ch``, ``Sh``), the transforms of a real ``X [n, d]`` are (Sparse Mixers; DFTs are not normalised)

        fourier            Cs X Ch - Ss X Sh                      real part of the 2-D DFT
        hartley            (Cs + Ss) X Ch + (Cs - Ss) X Sh        real minus imaginary part
        hartley_plus       (Cs - Ss) X Ch - (Cs + Ss) X Sh        real plus imaginary part
        hartley_separable  (Cs + Ss) X (Ch + Sh)                  real minus imaginary part, along each axis by itself
        hartley_separable_plus  (Cs - Ss) X (Ch - Sh)             real plus imaginary part, along each axis by itself

    Returned are ``left`` [n, P * n] and ``right`` [d, P * d] float32, so that ``Y`` is the sum over P parts of
    ``left_p X right_p``; P is 1 for the separable ones, else 2."""
    cs, ss = cos_sin(length)
    ch, sh = cos_sin(hidden)
    cs_ch, cs_sh, ss_ch, ss_sh = SPECTRAL[mixing]
    left, right = [cs_ch * cs + ss_ch * ss], [ch + cs_sh * sh]
    if parts_of(mixing) == 2:
        left, right = [*left, cs_sh * cs + ss_sh * ss], [ch, sh]
    return torch.cat(left, dim=1).float(), torch.cat(right, dim=1).float()


def cos_sin(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``C`` and ``S`` [size, size] in float64; the angle of ``j k`` is that of ``j k mod size``, which is exact."""
    steps = torch.arange(size, device="cpu")
    angles = (2 * math.pi / size) * torch.arange(size, dtype=torch.float64, device="cpu")
    turns = torch.outer(steps, steps) % size
    return angles.cos()[turns], angles.sin()[turns]


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
    """The spectral mixing of ``config`` for sequences as long as ``along_sequence``, folded along both axes: a quarter
    of the multiplications, since cosines are even in ``k -> N - k``, and sines are odd.

        sum_k x[k] cos(2 pi j k / N) = sum over half of k of (x[k] + x[N-k]) cos(...)     the same for j and N - j
        sum_k x[k] sin(2 pi j k / N) = sum over half of k of (x[k] - x[N-k]) sin(...)     of opposite signs there

    so a product of N x N becomes one of N/2 x N/2 between a fold of its input and an unfold of its result, for each of

        Y = Cs X Ch + a Cs X Sh + b Ss X Ch + c Ss X Sh        (see spectral_matrices; a, b, c are -1, 0 or 1)
    """

    def __init__(self, config: SparseMixerConfig, along_sequence: HalfTables, along_hidden: HalfTables) -> None:
        super().__init__()
        self.factors = SPECTRAL[config.mixing]
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
