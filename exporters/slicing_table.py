"""Google's table of slices of Gemma 3n, a CSV: in each row the name of a submodel, its FFN widths, the layers that it
leaves out, and how it did. Nothing in it is executed."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from math import isfinite, prod
from pathlib import Path

from ..elastic import DEPTH, ElasticSpec, Submodel
from ..errors import CheckpointError, PlanError
from ..outside_file import read_file

NAME, LAYERS, WIDTHS, LEFT_OUT = "name", "# Layers", "FFN Hidden Dims", "Layers Skipped"
_MAX_BYTES = 2**20
_MAX_ROWS = 1000
_MAX_NAME_LENGTH = 80
# ``2_048 * 4``, as Python writes numbers.
_TERM = re.compile(r"\d[\d_]{0,11}(?:\s*\*\s*\d[\d_]{0,11}){0,3}", re.ASCII)


@dataclass(frozen=True)
class TableRow:
    """One submodel: ``widths`` of the layers that it has, or of all of them, ``left_out`` by number, how many
    ``layers`` it or the model has, where the table says so, and the numbers that it ``states`` beside, by column."""

    where: str
    name: str
    widths: tuple[int, ...]
    left_out: tuple[int, ...] = ()
    layers: int | None = None
    states: Mapping[str, float] = field(default_factory=dict)

    def submodel(self, spec: ElasticSpec) -> Submodel:
        """The submodel of ``spec`` that it names, whose depths are those of the table. Raises PlanError for a row of
        another model."""
        axes = {axis.layer: axis for axis in spec.axes if axis.kind == "ffn"}
        layers = [layer for layer in range(len(axes)) if layer not in self.left_out]
        if len(self.widths) == len(axes):
            found = {axis.name: self.widths[layer] for layer, axis in axes.items() if layer in layers}
        elif len(self.widths) == len(layers):
            found = {axes[layer].name: width for layer, width in zip(layers, self.widths, strict=True)}
        else:
            several = f"{len(layers)} or {len(axes)}" if self.left_out else str(len(axes))
            raise self._of_another(f"{WIDTHS}: {len(self.widths)} widths, expected {several}")
        if self.layers not in (None, len(layers), len(axes)):
            raise self._of_another(f"{LAYERS}: {self.layers}, expected {len(layers)}")
        for axis in axes.values():
            if not 1 <= found.get(axis.name, 1) <= axis.size:
                raise self._of_another(
                    f"{WIDTHS}: {found[axis.name]} neurons in layer {axis.layer}, expected 1 to {axis.size}"
                )
        return spec.submodel(found | ({DEPTH: len(layers)} if self.left_out else {}))

    def _of_another(self, problem: str) -> PlanError:
        return PlanError(f"{self.where}: {problem}; the table is of another model")


def read_slicing_table(path: Path) -> tuple[TableRow, ...]:
    """The rows of the table. Raises CheckpointError naming the line and column that are not understood."""
    text = read_file(path, _MAX_BYTES, CheckpointError).decode("utf-8-sig", errors="replace")
    reader = csv.DictReader(StringIO(text, newline=""), strict=True, skipinitialspace=True)
    rows: list[TableRow] = []
    try:
        columns = [name.strip() for name in reader.fieldnames or ()]
        if twice := next((name for name in columns if columns.count(name) > 1), None):
            raise CheckpointError(f"{path}: two columns are called {twice!r}")
        for cells in reader:
            rows.append(_row(f"{path}: line {reader.line_num}", cells))
            if len(rows) > _MAX_ROWS:
                raise CheckpointError(f"{path}: more than {_MAX_ROWS} rows")
    except csv.Error as failure:
        raise CheckpointError(f"{path}: line {reader.line_num}: {failure}") from failure
    if not rows:
        raise CheckpointError(f"{path}: no rows; expected a table with columns {NAME}, {WIDTHS}, {LEFT_OUT}")
    names = [row.name for row in rows]
    if again := next((name for name in names if names.count(name) > 1), None):
        raise CheckpointError(f"{path}: two rows are called {again!r}")
    return tuple(rows)


def sets_left_out(rows: Sequence[TableRow]) -> tuple[tuple[int, ...], ...]:
    """The layers that ``rows`` leave out, each set once."""
    return tuple(sorted({row.left_out for row in rows if row.left_out}))


def _row(where: str, cells: Mapping[str | None, str | list[str] | None]) -> TableRow:
    if None in cells:
        raise CheckpointError(f"{where}: more cells than columns; a list with commas needs quotes")
    named = {key.strip(): cell.strip() for key, cell in cells.items() if key is not None and isinstance(cell, str)}
    for column in (NAME, WIDTHS, LEFT_OUT):
        if column not in named:
            raise CheckpointError(f"{where}: no column {column!r}; expected {NAME}, {WIDTHS}, {LEFT_OUT}")
    name = named[NAME]
    if not (name.isprintable() and 0 < len(name) <= _MAX_NAME_LENGTH):
        raise CheckpointError(f"{where}: {NAME}: expected a name of one line, got {name!r:.80}")
    widths, left_out = _numbers(where, WIDTHS, named[WIDTHS]), _numbers(where, LEFT_OUT, named[LEFT_OUT])
    if not widths:
        raise CheckpointError(f"{where}: {WIDTHS}: expected a list such as [2_048 * 4, 2_048 * 8], got none")
    stated = {key: _number(cell) for key, cell in named.items() if key not in (NAME, LAYERS, WIDTHS, LEFT_OUT)}
    numbers = {key: value for key, value in stated.items() if value is not None}
    layers = named.get(LAYERS, "")
    if layers and not layers.isdecimal():
        raise CheckpointError(f"{where}: {LAYERS}: expected a whole number, got {layers!r:.80}")
    return TableRow(where, name, widths, tuple(sorted({*left_out})), int(layers) if layers else None, numbers)


def _numbers(where: str, column: str, text: str) -> tuple[int, ...]:
    """Whole numbers, or products of them, in brackets with commas between; none for no text."""
    if text in ("", "[]"):
        return ()
    terms = [term.strip() for term in text[1:-1].rstrip(", ").split(",")]
    if not (text[0] == "[" and text[-1] == "]" and all(map(_TERM.fullmatch, terms))):
        raise CheckpointError(f"{where}: {column}: expected a list such as [2_048 * 4, 2_048 * 8], got {text!r:.80}")
    return tuple(prod(int(factor.replace("_", "")) for factor in term.split("*")) for term in terms)


def _number(text: str) -> float | None:
    """A number, or a share in percent; None for other text."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return value if isfinite(value) else None
