"""How the answers for rows and tokens depend on others, found by asking a module."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import InputError
from ..hugging_face import survey
from ..own_lines import line_of
from .module import named_outputs

_ROWS = 3
# Share of the largest number of an answer; products of other sizes are rounded otherwise.
_TOLERANCE = 1e-3

Tensors = Mapping[str, torch.Tensor]


def require_own_rows(module: torch.nn.Module, given: Tensors, tables: Mapping[str, int]) -> None:
    """Asks ``module`` for rows together and one at a time: floats standard normal, as in the comparison of engines,
    whole numbers from their ``tables``, or those ``given``.

    Raises InputError where an answer depends on other rows: a larger request is answered in several runs.
    """
    draw, together = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for name, tensor in given.items():
        shape = (_ROWS, *tensor.shape[1:])
        if tensor.is_floating_point():
            together[name] = torch.randn(shape, generator=draw)
        elif name in tables:
            together[name] = torch.randint(tables[name], shape, generator=draw, dtype=tensor.dtype)
        else:
            together[name] = tensor[torch.arange(_ROWS) % len(tensor)]
    name = type(module).__name__
    try:
        every = named_outputs(module(**together))
        alone = {row: _one(module, together, row) for row in (0, _ROWS - 1)}
    except Exception as failure:  # of any kind: the user's code
        raise InputError(
            f"example_inputs: {name} does not run on standard normal inputs, with which engines are compared"
            f"{line_of(failure)}: {survey.reason(failure)}"
        ) from failure
    for row, answer in alone.items():
        for output, one in answer.items():
            whole = every[output]
            is_of_rows = whole.shape[:1] == (_ROWS,) and one.shape[:1] == (1,) and one.is_floating_point()
            if is_of_rows and not _is_same(whole[row : row + 1], one):
                raise InputError(
                    f"model: {name} answers a row otherwise when others are beside it (output {output}), and requests "
                    "are split by rows and joined; expected rows that do not depend on each other"
                )


def _one(module: torch.nn.Module, together: Tensors, row: int) -> dict[str, torch.Tensor]:
    return named_outputs(module(**{name: tensor[row : row + 1] for name, tensor in together.items()}))


def hides_where_one(module: torch.nn.Module, given: Tensors, mask: str, tables: Mapping[str, int]) -> bool:
    """Whether what the first token holds reaches others where ``mask`` is 0 there alone, and not where it is 1 there
    alone."""
    length = given[mask].shape[1]
    if length < 2:
        return False
    changed = {name: _other_first(t, tables.get(name)) for name, t in given.items() if t.shape[1:2] == (length,)}
    hidden = torch.ones_like(given[mask])
    hidden[:, 0] = 0
    seen = torch.ones_like(hidden) - hidden if hidden.dtype != torch.bool else ~hidden

    def reaches(at: torch.Tensor) -> bool:
        first, second = (named_outputs(module(**{**given, **new, mask: at})) for new in ({}, changed))
        pairs = ((_others(first[name], length), _others(second[name], length)) for name in first)
        return not all(_is_same(*pair) for pair in pairs)

    return reaches(hidden) and not reaches(seen)


def _other_first(tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
    """``tensor`` with other numbers at the first token, where that may be."""
    other = tensor.clone()
    if tensor.is_floating_point():
        other[:, 0] += torch.randn(other[:, 0].shape, generator=torch.Generator().manual_seed(0))
    elif rows is not None:
        other[:, 0] = (other[:, 0] + 1) % rows
    return other


def _others(found: torch.Tensor, length: int) -> torch.Tensor:
    return found[:, 1:] if found.shape[1:2] == (length,) else found


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    one, other = one.double(), other.double()
    scale = float(one.nan_to_num(0, 0, 0).abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)
