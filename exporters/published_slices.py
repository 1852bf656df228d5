"""Published slices: folders that claim to be a submodel of another checkpoint, with widths of their own in each layer,
and Google's table of slices of Gemma 3n.

Nested training makes every level a prefix of the next. A folder that was fine-tuned afterwards, or whose neurons were
put in another order, is a model of its own: its answers cannot come from a view of the universal model's weights.

The table is a CSV: in each row the name of a submodel, its FFN widths, the layers that it leaves out, and how it did.
Nothing in it is executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from ..elastic import Submodel
from ..errors import CheckpointError, PlanError
from .sentence_transformers.read_modules import HEAD, name_in_file
from .source import ModelSource, open_source

if TYPE_CHECKING:  # plans are made without torch, unless of slices
    import torch
import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from math import isfinite, prod

from ..elastic import DEPTH, ElasticSpec
from ..outside_file import read_file

# Keys in which a slice may differ: widths, which are compared as axes; how training went; names and versions.
_KEYS_THAT_MAY_DIFFER = frozenset(
    [
        *("intermediate_size", "n_inner", "d_ff", "num_hidden_layers", "nested", "granularities"),
        *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"),
    ]
)


def read_slice(source: ModelSource, folder: Path) -> Submodel:
    """The submodel of ``source`` that the checkpoint in ``folder`` holds.

    Every sliced tensor must equal, bit by bit, the first part of the universal model's, and every other tensor the
    whole of it; what both ``config.json`` state beside widths must be the same. Raises CheckpointError naming the first
    tensor or key that does not, or the layer whose width is impossible.
    """
    claimed = open_source(folder)
    for checkpoint in (source.checkpoint, claimed.checkpoint):
        checkpoint.require_weights()
    if claimed.family is not source.family:
        raise CheckpointError(
            f"{folder}: a slice of {source.name} must be of family {source.family.name}, got {claimed.family.name}"
        )
    try:
        submodel = source.spec.submodel({axis.name: axis.size for axis in claimed.spec.axes})
    except PlanError as failure:
        raise CheckpointError(f"{folder}: {failure}; it is no slice of {source.name}") from failure
    _compare_names(source, claimed, submodel, folder)
    _compare_configs(source, claimed, folder)
    for name in claimed.shapes:
        _compare_tensor(source, claimed, submodel, name)
    return submodel


def _compare_names(source: ModelSource, claimed: ModelSource, submodel: Submodel, folder: Path) -> None:
    expected = {
        name: source.spec.shape_of(name, shape, submodel)
        for name, shape in source.shapes.items()
        if source.spec.has(name, submodel)
    }
    for name in sorted(expected.keys() ^ claimed.shapes.keys()):
        problem = "is missing" if name in expected else f"has no place in {source.name}"
        raise CheckpointError(f"{folder}: tensor {name} {problem}; it is no slice of {source.name}")
    for name, shape in claimed.shapes.items():
        if tuple(shape) != expected[name]:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(shape)}; expected {list(expected[name])} of {source.name}"
            )


def _compare_configs(source: ModelSource, claimed: ModelSource, folder: Path) -> None:
    """Equal weights are another model where, say, the activation or the number of heads that share them differs."""
    free = {*_KEYS_THAT_MAY_DIFFER, "num_attention_heads"} if "heads" in source.spec.kinds else _KEYS_THAT_MAY_DIFFER
    ours, theirs = source.checkpoint.config, claimed.checkpoint.config
    if _behind(source) != _behind(claimed):
        raise CheckpointError(
            f"{folder}: its modules of sentence-transformers are not those of {source.name}; it is no slice of it"
        )
    for key in sorted((ours.keys() & theirs.keys()) - free):
        if ours[key] != theirs[key]:
            raise CheckpointError(
                f"{folder / 'config.json'}: {key[:80]}: expected {ours[key]!r:.80} as {source.name} has, got "
                f"{theirs[key]!r:.80}; it is no slice of it"
            )


def _behind(source: ModelSource) -> object:
    """Computation behind the model."""
    return None if source.modules is None else (dict(source.modules.modules), source.modules.width)


def _compare_tensor(source: ModelSource, claimed: ModelSource, submodel: Submodel, name: str) -> None:
    import torch

    cuts, where = source.spec.slices_of(name), f"{claimed.checkpoint.folder}: tensor {name}"
    (expected, stored), (found, own) = _tensor(source, name), _tensor(claimed, name)
    for cut in cuts:
        expected = expected.narrow(cut.dim, 0, submodel[cut.axis] * cut.unit)
    if own != stored:
        raise CheckpointError(f"{where} is stored as {own}, that of {source.name} as {stored}; a slice shares its bits")
    if torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (found, expected))):
        return
    if cuts:
        kept = ", ".join(f"{cut.axis} {submodel[cut.axis]}" for cut in cuts)
        differs = f"is not the first part ({kept}) of {source.name}'s"
    else:
        differs = f"differs from {source.name}'s, which submodels share whole"
    raise CheckpointError(f"{where} {differs}: the levels are not nested; compile it as a model of its own")


def _tensor(source: ModelSource, parameter: str) -> tuple[torch.Tensor, str]:
    """``parameter`` as it is stored, and how. Raises CheckpointError unless the files hold it in its shape."""
    checkpoint, modules = source.checkpoint, source.modules
    place = source.architecture.place_in_files(parameter, source.shapes[parameter])
    header = {**checkpoint.tensors, **(modules.headers if modules else {})}.get(place.tensor)
    if header is None or header.shape != place.shape:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {parameter} is not stored as the model has it, so it cannot be compared with "
            "a slice; save the model as it is loaded"
        )
    name = name_in_file(parameter) if parameter.startswith(HEAD) else place.tensor
    with safe_open(checkpoint.folder / header.file, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    part = tensor[place.rows] if place.is_part else tensor
    return part.T if place.transposed else part, header.dtype


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
