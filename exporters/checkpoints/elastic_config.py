"""What nestforge reads in a Hugging Face config.json beside transformers' own keys (no torch here).

``intermediate_size`` may list one FFN width per layer; ``nested`` says that every prefix was trained as a model, and
``granularities`` which levels training sampled, by axis kind as fractions rising to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...errors import CheckpointError
from ...strict import nearest, structure
from .checkpoint import Checkpoint

# Layers are counted through before any tensor is looked at.
MOST_LAYERS = 1024

Granularities = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Nesting:
    """How the model was trained; ``granularities`` is None where the levels are not known."""

    nested: bool = False
    granularities: Granularities | None = None


def read_nesting(checkpoint: Checkpoint, kinds: Sequence[str]) -> Nesting:
    """What config.json says of a model with axes of ``kinds``. Raises CheckpointError for what makes no sense."""
    where = str(checkpoint.folder / "config.json")
    stated = {key: checkpoint.config[key] for key in ("nested", "granularities") if key in checkpoint.config}
    nesting = structure(Nesting, stated, where, CheckpointError)
    if nesting.granularities is not None and (problem := granularity_problem(nesting.granularities, kinds)):
        raise CheckpointError(f"{where}: {problem}")
    return nesting


def read_widths(
    checkpoint: Checkpoint, layers: int, key: str = "intermediate_size", default: int | None = None
) -> tuple[int, ...]:
    """FFN neurons of every layer, from one number or a list of them; ``default`` where config.json has none. Raises
    CheckpointError for anything else."""
    value: Any = checkpoint.config.get(key)
    value = default if value is None else value
    widths: list[Any] = value if isinstance(value, list) else [value] * layers
    where = f"{checkpoint.folder / 'config.json'}: {key}"
    if len(widths) != layers:
        raise CheckpointError(f"{where}: expected {layers} numbers, one per layer, got {len(widths)}")
    for width in widths:
        if type(width) is not int or width < 1:
            raise CheckpointError(f"{where}: expected whole numbers of at least 1, got {width!r:.80}")
    return tuple(widths)


def read_number(
    checkpoint: Checkpoint, key: str, default: int | None = None, at_least: int = 1, at_most: int | None = None
) -> int:
    """A whole number; ``default`` where config.json has none. Raises CheckpointError for anything else."""
    value: Any = checkpoint.config.get(key)
    value = default if value is None else value
    where = f"{checkpoint.folder / 'config.json'}: {key}"
    if type(value) is not int or value < at_least:
        raise CheckpointError(f"{where}: expected a whole number of at least {at_least}, got {value!r:.80}")
    if at_most is not None and value > at_most:
        raise CheckpointError(f"{where}: expected at most {at_most}, got {value!r:.80}")
    return value


def granularity_problem(table: Granularities, kinds: Sequence[str]) -> str | None:
    """What makes no sense among the levels of a model with axes of ``kinds``, or None."""
    for kind, steps in table.items():
        if kind not in kinds:
            return f"granularities: this model has no axis kind {kind[:80]!r}{nearest(kind[:80], kinds)}"
        rising = all(low < high for low, high in pairwise(steps))
        if not steps or steps[0] <= 0 or not rising or steps[-1] != 1:
            shown = ", ".join(f"{step:g}" for step in steps[:8])
            return f"granularities: {kind}: expected fractions that increase from above 0 to 1, got [{shown}]"
    if len({len(steps) for steps in table.values()}) != 1:
        return "granularities: expected equally many fractions for every axis kind, and at least one kind"
    return None
