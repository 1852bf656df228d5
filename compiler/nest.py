"""The road from an ordinary checkpoint to a nested one. Read ``nest`` from top to bottom."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from ..argument_types import takes_request
from ..bundle.files import to_json
from ..elastic import Submodel
from ..errors import CheckpointError, OutputError, PlanError
from ..exporters.checkpoints.checkpoint import Checkpoint
from ..exporters.sentence_transformers.read_modules import SentenceModules
from ..exporters.source import ModelSource, open_source
from ..exporters.universal import PREFIX, UniversalModel, load_universal
from ..profiles.nest_request import NestRequest
from ..strict import digest, unstructure
from .distill import Effort, Taught, distill, trainable
from .examples.corpus import Corpus, read_corpus
from .examples.rank_axes import rank_axes
from .examples.texts import TextBatches, embeddings, mean_cosines, training_texts
from .planning.levels import RANKED_FRACTIONS, Level
from .planning.levels import levels as make_levels
from .provenance import source_entries, tool_versions
from .work.clock import Clock
from .work.staging import Stage, staged, write_synced

DEFAULT_LEVELS: Mapping[str, Sequence[float]] = {"ffn": RANKED_FRACTIONS}
DEFAULT_MINUTES = 8.0
_OUTCOME = "outcome"
RECORD_NAME = "nest.json"
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
# Tokenizer files, and files that say how texts are embedded; not the card, which is of another model.
_COPIED_PATTERNS = ("*.json", "*.txt", "*.model")
_SHARD_INDEX = re.compile(r".*\.index\.json")  # of weights in several files; here they are one


@dataclass(frozen=True)
class NestedLevel:
    """Mean cosine of one level to the original model on held-out texts: ``ranked`` before training, ``nested`` after.

    ``fractions`` are those of every axis kind that moves, ``parameters`` counts the level's own.
    """

    label: str
    submodel: str
    fractions: Mapping[str, float]
    parameters: int
    ranked: float
    nested: float


@dataclass(frozen=True)
class _Outcome:
    """Figures of a finished training."""

    levels: tuple[NestedLevel, ...]
    steps: int
    seconds: float


@dataclass(frozen=True)
class NestReport:
    """Report of ``nest``: training and quality; ``steps`` and ``seconds`` count the training of interrupted calls
    too."""

    output: Path
    levels: tuple[NestedLevel, ...]
    texts: int
    held_out: int
    steps: int
    seconds: float
    seed: int


@takes_request(NestRequest)
def nest(request: NestRequest) -> NestReport:
    """Makes a nested model of a checkpoint, in a new folder.

    The arguments are the fields of ``NestRequest``. The same steps and seed give the same weights on the same machine.
    Raises a NestforgeError and publishes nothing if an input is bad; an interrupted call goes on where it was when
    called again with the same arguments.
    """
    text, output = Path(request.text), Path(request.output)
    effort = _effort(request)
    source = open_source(request.model)
    fractions = dict(DEFAULT_LEVELS if request.levels is None else request.levels)
    ladder = _levels(source, fractions)
    corpus, texts, clock = read_corpus(text), training_texts(text), Clock(request.progress)
    replaced = ("config.json", RECORD_NAME) if request.overwrite else ()
    with staged(output, _key(source, fractions, texts, corpus, effort), replaced) as stage:
        if stage.is_published and not stage.has(_OUTCOME):  # stopped while it cleared its work
            raise OutputError(f"{output}: exists already, made by a call with these arguments; its figures are gone")
        # Written last, so that an interrupted call that has it only has to publish.
        make = partial(_nested, source, fractions, ladder, corpus, texts, effort, stage, clock)
        outcome = stage.memo(_OUTCOME, _Outcome, make)
    return NestReport(
        output, outcome.levels, len(texts), len(corpus.held_out), outcome.steps, outcome.seconds, request.seed
    )


def _nested(
    source: ModelSource,
    fractions: Mapping[str, Sequence[float]],
    ladder: Sequence[Level],
    corpus: Corpus,
    texts: Sequence[str],
    effort: Effort,
    stage: Stage,
    clock: Clock,
) -> _Outcome:
    """Fills the stage's folder."""
    with clock("load"):
        universal = load_universal(source)
        refuse_unwritable(universal)
    with clock("rank"):  # the important neurons first, so that even the untrained prefix is the best of its size
        # The folder is in the new order itself, so what was permuted is not part of it.
        rank_axes(universal, corpus, replace(stage, folder=stage.work), clock)
    teacher = copy.deepcopy(universal.module)
    held_out = TextBatches.of(source, corpus.held_out)
    with clock("measure"):
        reference = embeddings(source, teacher, held_out)
        ranked = mean_cosines(universal, _submodels(ladder), held_out, reference, clock)
    with clock("distill"):  # every level learns what the original answers
        taught = distill(universal, teacher, ladder, TextBatches.of(source, texts), effort, stage, clock)
    with clock("write"):
        write_folder(universal, fractions, stage)
    with clock("measure again"):  # what was written, as every later command reads it
        written = load_universal(open_source(stage.folder))
        nested = mean_cosines(written, _submodels(ladder), held_out, reference, clock)
    levels = tuple(
        NestedLevel(
            level.label,
            level.submodel.id,
            {kind: steps[number] for kind, steps in fractions.items()},
            universal.source.parameters(level.submodel),
            ranked[number],
            nested[number],
        )
        for number, level in enumerate(ladder)
    )
    write_synced(stage.folder / RECORD_NAME, to_json(_record(levels, effort, taught, texts, corpus)))
    return _Outcome(levels, taught.steps, taught.seconds)


def _effort(request: NestRequest) -> Effort:
    if request.minutes is not None and request.steps is not None:
        raise PlanError("minutes and steps: expected one of them, got both")
    if request.steps is not None:
        return Effort(request.seed, steps=request.steps)
    return Effort(request.seed, seconds=60 * (request.minutes or DEFAULT_MINUTES))


def _levels(source: ModelSource, fractions: Mapping[str, Sequence[float]]) -> tuple[Level, ...]:
    """The levels to train, refusing before any work what cannot be nested."""
    folder, spec = source.checkpoint.folder, source.spec
    if spec.trained_nested:
        raise CheckpointError(f"{folder}: nested already, as its config.json says; compile it as it is")
    if source.exits is not None or spec.axes != spec.prefix_axes:
        raise CheckpointError(f"{folder}: a model with exits cannot be nested here; expected one that answers once")
    if source.signature.text is None:
        raise CheckpointError(f"{folder}: no tokenizer.json, so the text file cannot be read by this model")
    ladder = make_levels(spec, fractions, width_multiple=1)
    if len(ladder) == 1:
        raise PlanError("levels: expected a level below 1, got only the whole model")
    return ladder


def _submodels(ladder: Sequence[Level]) -> list[Submodel]:
    return [level.submodel for level in ladder]


def _key(
    source: ModelSource,
    fractions: Mapping[str, Sequence[float]],
    texts: Sequence[str],
    corpus: Corpus,
    effort: Effort,
) -> str:
    """The digest of everything that an interrupted training must share with the one that goes on."""
    return digest(["nest", tool_versions(), source_entries(source), fractions, texts, corpus.held_out, effort])


def _record(
    levels: Sequence[NestedLevel], effort: Effort, taught: Taught, texts: Sequence[str], corpus: Corpus
) -> dict[str, Any]:
    """How the folder was made, and what its levels are worth, which it states beside its weights."""
    return {
        "tools": tool_versions(),
        "levels": unstructure(levels),
        "effort": unstructure(effort),
        "steps": taught.steps,
        "texts": {"count": len(texts), "sha256": _sha256(texts)},
        "held_out": {"count": len(corpus.held_out), "sha256": _sha256(corpus.held_out)},
    }


def refuse_unwritable(model: UniversalModel) -> None:
    """Raises CheckpointError if a weight that training changes is not in the checkpoint under its name and shape."""
    checkpoint = model.source.checkpoint
    for name, weight in trainable(model).items():
        place = model.source.architecture.place_in_files(name, tuple(weight.shape))
        header = checkpoint.tensors.get(place.tensor)
        if header is None or header.shape != place.shape:
            raise CheckpointError(
                f"{checkpoint.folder}: parameter {name} of the loaded model is not a tensor of the weights, so a "
                "trained one cannot be written back; save the model with its library's own save_pretrained first"
            )


def write_folder(model: UniversalModel, fractions: Mapping[str, Sequence[float]], stage: Stage) -> None:
    """Writes the folder that ``stage`` publishes: float32 weights under the checkpoint's own names."""
    checkpoint = model.source.checkpoint
    for path in _companions(checkpoint.folder, model.source.modules):
        target = stage.folder / path.relative_to(checkpoint.folder)
        target.parent.mkdir(exist_ok=True)
        write_synced(target, path.read_bytes())
    config = {
        **checkpoint.config,
        "_name_or_path": f"{checkpoint.name}-nested",
        "nested": True,
        "granularities": unstructure(fractions),
        **{key: "float32" for key in ("dtype", "torch_dtype") if key in checkpoint.config},
    }
    write_synced(stage.folder / _CONFIG, to_json(config))
    write_synced(stage.folder / _WEIGHTS, save(_weights(model), {"format": "pt"}))


def _sha256(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _companions(folder: Path, modules: SentenceModules | None) -> list[Path]:
    """Files of the original folder besides weights, configuration and prose."""
    found = {path for pattern in _COPIED_PATTERNS for path in folder.glob(pattern)} - {folder / _CONFIG}
    found |= set(modules.files if modules else ())
    return sorted(path for path in found if path.is_file() and not _SHARD_INDEX.fullmatch(path.name))


def _weights(model: UniversalModel) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, as the module has it where it has one: tied copies under each of their names."""
    architecture = model.source.architecture
    plain = {name.removeprefix(PREFIX): data for name, data in model.module.state_dict().items()}
    loaded = {
        architecture.names_in_files.get(name, name): data.T if name in architecture.transposed else data
        for name, data in plain.items()
    }
    loaded |= {tensor: torch.cat([plain[part] for part in parts]) for tensor, parts in architecture.stacked.items()}
    tensors = {}
    for name, stored in _stored(model.source.checkpoint).items():
        data = loaded.get(name, stored)
        tensors[name] = (data.float() if data.is_floating_point() else data).clone().contiguous()
    return tensors


def _stored(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted({header.file for header in checkpoint.tensors.values()}):
        with safe_open(checkpoint.folder / file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  (not a dict)
    return tensors
