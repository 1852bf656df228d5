"""To how many numbers an embedding may be cut, and after which layers it may be made, by what a request or the model's
folder says (no torch here)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..bundle.roles import Interface, embedding_of, embedding_output
from ..elastic import Pairs
from ..errors import CheckpointError, InputError
from ..outside_file import read_file
from ..profiles.strict_yaml import parse_yaml
from ..strict import structure
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.config import known_keys
from .sentence_transformers.modules import SENTENCE, Normalize
from .sentence_transformers.read_modules import SentenceModules
from .signature import Signature

# The model card, whose first lines state something of the model between two of _LIMIT.
CARD = "README.md"
_LIMIT = "---"
_MAX_CARD_BYTES = 2**24
# Losses of sentence-transformers, as its cards name them.
_LOSSES = ("AdaptiveLayerLoss", "Matryoshka2dLoss")


@dataclass(frozen=True)
class _Matryoshka:
    """Keys by which a folder states it, in config.json or at the start of its card; published models have the first
    two, and servers (vLLM, SGLang) read them.

    ``matryoshka_layers`` are those after which the model was trained to answer; ``matryoshka_pairs`` are layers with
    dimensions, where each were trained with the other alone.
    """

    is_matryoshka: bool | None = None
    matryoshka_dimensions: tuple[int, ...] | None = None
    matryoshka_layers: tuple[int, ...] | None = None
    matryoshka_pairs: tuple[tuple[int, ...], ...] | None = None


def read_depths(
    checkpoint: Checkpoint,
    layers: Sequence[int] | None = None,
    dimensions: Sequence[int] | None = None,
    pairs: Pairs | None = None,
) -> tuple[tuple[int, ...] | None, Pairs | None]:
    """The layers after which a model may answer, None for what its family knows, and their pairs with dimensions, None
    where each goes with the other: those requested, else those that its folder states. Its pairs are dropped where
    ``layers`` or ``dimensions`` were requested.

    Raises CheckpointError for what the folder says in another form.
    """
    stated = _stated(checkpoint)
    if pairs is None and layers is None and dimensions is None and (listed := stated.matryoshka_pairs) is not None:
        if not listed or any(len(pair) != 2 for pair in listed):
            raise checkpoint.misfit("matryoshka_pairs: expected pairs of layers and dimensions, such as [[6, 128]]")
        pairs = tuple((pair[0], pair[1]) for pair in listed)
    own = stated.matryoshka_layers if pairs is None else [layer for layer, _ in pairs]
    chosen = own if layers is None else layers
    return None if chosen is None else tuple(sorted({*chosen})), None if pairs is None else tuple(sorted({*pairs}))


def trained_by_layer(checkpoint: Checkpoint) -> str | None:
    """The loss in a card's tags by which a model learnt to answer after every layer, if any."""
    tags = read_card(checkpoint.folder, ("tags",)).get("tags")
    return next((loss for loss in _LOSSES if isinstance(tags, list) and f"loss:{loss}" in tags), None)


def with_dimensions(
    signature: Signature,
    checkpoint: Checkpoint,
    modules: SentenceModules | None,
    requested: Sequence[int] | None,
    pairs: Pairs | None = None,
) -> Signature:
    """``signature`` whose embedding states its ``dimensions``: those ``requested``, or of ``pairs``, which it then
    states too; else those that the folder lists, its width alone where that says that the model is none of this kind,
    else any; and whether ``modules`` bring it to length 1.

    The whole width always is one. Raises InputError for dimensions requested that the model cannot have,
    CheckpointError for what the folder says in another form.
    """
    asked, requested = ("dimensions", requested) if pairs is None else ("pairs", [number for _, number in pairs])
    interface = Interface(signature.inputs, signature.outputs, signature.text)
    spec = embedding_of(interface) if requested is None else embedding_output(interface)
    if spec is None:
        return signature
    width = int(spec.dims[1])
    if requested is not None and not (requested and all(1 <= number <= width for number in requested)):
        got = list(requested)
        raise InputError(f"`{asked}`: expected numbers from 1 to {width}, the width of {spec.name}, got {got}")
    stated = _stated(checkpoint)
    listed = stated.matryoshka_dimensions if requested is None else requested
    if listed is None and stated.is_matryoshka is False:
        listed = ()
    # A list is of all numbers that the modules make; of a folder with truncate_dim some lie beyond those returned.
    fitting = None if listed is None else tuple(sorted({width, *(n for n in listed if n <= width)}, reverse=True))
    if fitting is not None and fitting[-1] < 1:
        raise checkpoint.misfit(f"matryoshka_dimensions: expected numbers of at least 1, got {fitting[-1]}")
    last = [module for _, module in modules.modules.values() if module.writes == SENTENCE][-1:] if modules else []
    normalizes = any(isinstance(module, Normalize) for module in last)
    cut = replace(spec, dimensions=fitting, pairs=pairs, normalisation="l2" if normalizes else None)
    return replace(signature, outputs=tuple(cut if each is spec else each for each in signature.outputs))


def _stated(checkpoint: Checkpoint) -> _Matryoshka:
    """Dimensions as config.json states them, and where that is silent the card."""
    config = checkpoint.config
    own = read_card(checkpoint.folder, [each.name for each in fields(_Matryoshka) if each.name not in config])
    structure(_Matryoshka, own, str(checkpoint.folder / CARD), CheckpointError)
    where = str(checkpoint.folder / "config.json")
    return structure(_Matryoshka, {**own, **known_keys(_Matryoshka, config)}, where, CheckpointError)


def read_card(folder: Path, keys: Collection[str]) -> Mapping[str, Any]:
    """Those of ``keys`` that stand between two lines ``---`` at the start of a card; none where there is no card, or it
    begins otherwise. The other keys, which may be results of benchmarks in thousands of lines, are not read. Raises
    CheckpointError for values that are no YAML."""
    path = folder / CARD
    if not path.is_file():
        return {}
    lines = read_file(path, _MAX_CARD_BYTES, CheckpointError).decode(errors="replace").splitlines()
    if lines[:1] != [_LIMIT] or _LIMIT not in lines[1:]:
        return {}
    wanted, is_wanted = list[str](), False
    for line in lines[1 : lines.index(_LIMIT, 1)]:
        if line[:1] not in (" ", "-", "", "#"):  # a key, behind which its value is indented, or a list
            is_wanted = line.partition(":")[0] in keys
        if is_wanted:
            wanted.append(line)
    found = parse_yaml("\n".join(wanted), path, CheckpointError)
    return found if isinstance(found, dict) else {}
