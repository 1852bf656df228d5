"""Token mixing by fixed matrices: one along the sequence, one along the hidden axis, and no mask.

Every kind is ``Y = sum_p left_p X right_p`` with ``left`` [S, P * S] and ``right`` [d, P * d]; P is 2 for most spectral
kinds and 1 elsewhere. Linear mixing learns both matrices. Circulant and Toeplitz mixing learn one vector each:

    circulant  M[r, s] = c[(r - s) mod N]       N numbers
    toeplitz   M[r, s] = t[N - 1 + s - r]       2 N - 1 numbers

Their ``Y = Ms X Mh^T`` takes the transpose on the hidden axis, where linear mixing ``Ws X Wh`` takes none. Matrices
that are not parameters are held as buffers for inference, and computed from the parameters where those are learned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..architecture.config import SparseMixerConfig
from .spectral_tables import spectral_matrices

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
