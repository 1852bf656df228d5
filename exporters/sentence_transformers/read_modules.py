"""Reads ``modules.json`` strictly: which modules run behind the transformer, in their order, and their weights' shapes.

A module that is not understood stops the import by its name: without it the embedding would be another one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ...bucket import Bucket
from ...errors import CheckpointError
from ...outside_file import read_json
from ...strict import structure
from ...workload import Op
from ..checkpoints.checkpoint import MODULES_FILE, Checkpoint, TensorHeader, compare_with_headers, open_weights
from .modules import KINDS, SENTENCE, TOKENS, Module, Pooling, Shape, Value, read_module
from .text_settings import read_model_config

# The attribute of a universal model under which the modules lie; their parameters start with it.
HEAD = "sentence_head"
_TRANSFORMER_KIND = "Transformer"
# Where the classes have stood from version 0.2 to 6.2, such as sentence_transformers.models.Pooling; sparse encoders,
# cross encoders and multi-vector encoders have packages of their own.
_TYPE_NAME = re.compile(
    r"sentence_transformers(?:\.models|\.base\.modules|\.sentence_transformer\.modules)(?:\.\w+)?\.(\w+)"
)
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MAX_MODULES = 64


@dataclass(frozen=True)
class _Entry:
    """One module of ``modules.json``. ``kwargs`` name arguments that ``encode`` would hand on, which change nothing
    here: these modules take none."""

    name: str
    path: str
    type: str
    idx: int | None = None
    kwargs: tuple[str, ...] = ()


@dataclass(frozen=True)
class SentenceModules:
    """The modules behind the transformer by their place in ``modules.json``, each with the folder of its files.

    The first ``width`` numbers of the embedding that the last of them writes are the model's. ``headers`` are the
    tensors in the folders, by parameter name, where there are weights.
    """

    modules: Mapping[int, tuple[str, Module]]
    width: int
    files: tuple[Path, ...]
    headers: Mapping[str, TensorHeader]

    @cached_property
    def parameter_shapes(self) -> Mapping[str, Shape]:
        """Every parameter of the modules, by the universal model's names."""
        return {
            parameter_name(place, name): shape
            for place, (_, module) in self.modules.items()
            for name, shape in module.parameters.items()
        }

    @property
    def token_width(self) -> int | None:
        """Numbers of a token that modules have changed before it is pooled; None where none does."""
        found = [module.gives for _, module in self.modules.values() if module.writes == TOKENS]
        return found[-1] if found else None

    @property
    def leaves_prompt_out(self) -> bool:
        """Whether a pooling leaves the tokens of a prompt out, so that it must know which they are."""
        return any(isinstance(m, Pooling) and not m.include_prompt for _, m in self.modules.values())

    def ops(self, bucket: Bucket) -> list[Op]:
        """The operations of the modules, for the analytic cost model."""
        return [op for place, (_, module) in self.modules.items() for op in module.ops(f"{HEAD}.{place}", bucket)]


def name_in_file(parameter: str) -> str:
    """Name of one of a module's parameters in its file, given the universal model's name of it."""
    return parameter.split(".", 2)[2]


def parameter_name(place: int, name: str) -> str:
    """The universal model's name of the parameter that the files of the module at ``place`` call ``name``."""
    return f"{HEAD}.{place}.{name}"


def read_modules(checkpoint: Checkpoint, hidden: int) -> SentenceModules | None:
    """The modules behind a transformer whose tokens are ``hidden`` wide; None where the folder has no ``modules.json``.

    Raises CheckpointError for a module or setting that is not understood, does not fit the one before it, or whose
    weights are missing, misfit or pickled.
    """
    folder = checkpoint.folder
    if not checkpoint.has_modules:
        for path in sorted(folder.glob("*_Pooling")):  # how texts are pooled would be passed over in silence
            raise CheckpointError(f"{path}: a module of sentence-transformers, and no {MODULES_FILE} says when it runs")
        return None
    config = read_model_config(folder)  # first, since it says what kind of model the modules are
    where, entries = folder / MODULES_FILE, _entries(folder)
    widths: dict[Value, int] = {TOKENS: hidden}
    modules: dict[int, tuple[str, Module]] = {}
    for place, (kind, entry) in enumerate(entries):
        if place == 0:
            continue
        module = read_module(kind, folder / entry.path, widths)
        if module is None:
            continue
        named = f"{where}: module {place} ({entry.path}, {kind})"
        if module.reads not in widths:
            raise CheckpointError(f"{named} reads {module.reads}, which no module before it makes")
        if module.takes != widths[module.reads]:
            raise CheckpointError(
                f"{named} takes {module.takes} numbers of {module.reads}, the one before it gives "
                f"{widths[module.reads]}"
            )
        if not isinstance(module, Pooling) and module.writes != module.reads:
            raise CheckpointError(
                f"{named} reads {module.reads} and writes {module.writes}: only Pooling makes one of the other"
            )
        widths[module.writes] = module.gives
        modules[place] = (entry.path, module)
    if SENTENCE not in widths:
        raise CheckpointError(f"{where}: no module makes a {SENTENCE}; expected a Pooling")
    headers = _headers(checkpoint, modules) if checkpoint.has_weights else {}
    shown = min(widths[SENTENCE], config.truncate_dim or widths[SENTENCE])
    files = [where, *(folder / entry.path / "config.json" for _, entry in entries[1:])]
    files += [folder / header.file for header in headers.values()]
    return SentenceModules(modules, shown, tuple(sorted({f for f in files if f.is_file()})), headers)


def _entries(folder: Path) -> list[tuple[str, _Entry]]:
    """Kind and entry of every module, the transformer first."""
    where = folder / MODULES_FILE
    data = read_json(where, CheckpointError, list)
    if not 1 <= len(data) <= _MAX_MODULES:
        raise CheckpointError(f"{where}: expected 1 to {_MAX_MODULES} modules, got {len(data)}")
    entries = [structure(_Entry, item, f"{where}: module {i}", CheckpointError) for i, item in enumerate(data)]
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise CheckpointError(f"{where}: two modules have one name among {', '.join(names)[:80]}")
    kinds = [_kind(where, place, entry) for place, entry in enumerate(entries)]
    return list(zip(kinds, entries, strict=True))


def _kind(where: Path, place: int, entry: _Entry) -> str:
    named = f"{where}: module {place} ({entry.path[:80]!r})"
    match = _TYPE_NAME.fullmatch(entry.type)
    kind = match[1] if match else ""
    expected = [_TRANSFORMER_KIND] if place == 0 else sorted(KINDS)
    if kind not in expected:
        raise CheckpointError(
            f"{named} is {entry.type[:120]!r}, which is not supported here; expected {', '.join(expected)} of "
            "sentence_transformers"
        )
    if place == 0 and entry.path:
        raise CheckpointError(
            f"{named}: the transformer lies in a folder of its own; save the model again with a newer "
            "sentence-transformers, which writes it beside modules.json"
        )
    if place and (not _FOLDER_NAME.fullmatch(entry.path) or ".." in entry.path):
        raise CheckpointError(f"{named}: path may leave the model folder; expected a plain folder name")
    return kind


def open_module(folder: Path, path: str) -> Checkpoint:
    """The weights of the module of ``folder`` that lies in its folder ``path``. Raises CheckpointError."""
    remedy = "load the model with sentence-transformers and save it again, which writes safetensors"
    return open_weights(folder / path / "model.safetensors", "pytorch_model.bin", remedy)


def _headers(checkpoint: Checkpoint, modules: Mapping[int, tuple[str, Module]]) -> dict[str, TensorHeader]:
    """The tensors of the modules that have parameters, which must be exactly those."""
    headers: dict[str, TensorHeader] = {}
    for place, (path, module) in modules.items():
        if module.parameters:
            own = open_module(checkpoint.folder, path)
            compare_with_headers(own, module.parameters)
            for name, header in own.tensors.items():
                headers[parameter_name(place, name)] = replace(header, file=f"{path}/{header.file}")
    return headers
