"""Fourier and Hartley mixing as real matrix products, without an FFT.

With ``C[j, k] = cos(2 pi j k / N)`` and ``S[j, k] = sin(2 pi j k / N)``, of the sequence (``Cs``, ``Ss``) and of the
hidden axis (``Ch``, ``Sh``), the transforms of a real ``X [n, d]`` are (Sparse Mixers; DFTs are not normalised)

    fourier            Cs X Ch - Ss X Sh                      real part of the 2-D DFT
    hartley            (Cs + Ss) X Ch + (Cs - Ss) X Sh        real minus imaginary part
    hartley_plus       (Cs - Ss) X Ch - (Cs + Ss) X Sh        real plus imaginary part
    hartley_separable  (Cs + Ss) X (Ch + Sh)                  real minus imaginary part, along each axis by itself
    hartley_separable_plus  (Cs - Ss) X (Ch - Sh)             real plus imaginary part, along each axis by itself
"""

from __future__ import annotations

import math

import torch

from ..architecture.config import Mixing


def spectral_matrices(mixing: Mixing, length: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``left`` [n, P * n] and ``right`` [d, P * d] float32, so that ``Y`` is the sum over P parts of
    ``left_p X right_p``; P is 1 for the separable ones, else 2."""
    cs, ss = cos_sin(length)
    ch, sh = cos_sin(hidden)
    left: tuple[torch.Tensor, ...]
    right: tuple[torch.Tensor, ...]
    match mixing:
        case "fourier":
            left, right = (cs, -ss), (ch, sh)
        case "hartley":
            left, right = (cs + ss, cs - ss), (ch, sh)
        case "hartley_plus":
            left, right = (cs - ss, -cs - ss), (ch, sh)
        case "hartley_separable":
            left, right = (cs + ss,), (ch + sh,)
        case "hartley_separable_plus":
            left, right = (cs - ss,), (ch - sh,)
        case _:
            raise ValueError(f"mixing {mixing}: expected a spectral one")
    return torch.cat(left, dim=1).float(), torch.cat(right, dim=1).float()


def cos_sin(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``C`` and ``S`` [size, size] in float64; the angle of ``j k`` is that of ``j k mod size``, which is exact."""
    steps = torch.arange(size, device="cpu")
    angles = (2 * math.pi / size) * torch.arange(size, dtype=torch.float64, device="cpu")
    turns = torch.outer(steps, steps) % size
    return angles.cos()[turns], angles.sin()[turns]
