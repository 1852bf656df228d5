"""To how many numbers an embedding may be cut, by what a request or the model's folder says (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..bundle.roles import Interface, embedding_of, embedding_output
from ..errors import CheckpointError, InputError
from ..strict import structure
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.config import known_keys
from .sentence_transformers.modules import SENTENCE, Normalize
from .sentence_transformers.read_modules import SentenceModules
from .signature import Signature


@dataclass(frozen=True)
class _Matryoshka:
    """Keys of config.json by which published models state it, and servers (vLLM, SGLang) read it."""

    is_matryoshka: bool | None = None
    matryoshka_dimensions: tuple[int, ...] | None = None


def with_dimensions(
    signature: Signature, checkpoint: Checkpoint, modules: SentenceModules | None, requested: Sequence[int] | None
) -> Signature:
    """``signature`` whose embedding states its ``dimensions``: those ``requested``, else those that config.json lists,
    its width alone where that says that the model is none of this kind, else any; and whether ``modules`` bring it to
    length 1.

    The whole width always is one. Raises InputError for dimensions requested that the model cannot have,
    CheckpointError for what config.json says in another form.
    """
    interface = Interface(signature.inputs, signature.outputs, signature.text)
    spec = embedding_of(interface) if requested is None else embedding_output(interface)
    if spec is None:
        return signature
    width, where = int(spec.dims[1]), str(checkpoint.folder / "config.json")
    if requested is not None and not (requested and all(1 <= number <= width for number in requested)):
        got = list(requested)
        raise InputError(f"`dimensions`: expected numbers from 1 to {width}, the width of {spec.name}, got {got}")
    stated = structure(_Matryoshka, known_keys(_Matryoshka, checkpoint.config), where, CheckpointError)
    listed = stated.matryoshka_dimensions if requested is None else requested
    if listed is None and stated.is_matryoshka is False:
        listed = ()
    # A list is of all numbers that the modules make; of a folder with truncate_dim some lie beyond those returned.
    fitting = None if listed is None else tuple(sorted({width, *(n for n in listed if n <= width)}, reverse=True))
    if fitting is not None and fitting[-1] < 1:
        raise CheckpointError(f"{where}: matryoshka_dimensions: expected numbers of at least 1, got {fitting[-1]}")
    last = [module for _, module in modules.modules.values() if module.writes == SENTENCE][-1:] if modules else []
    normalizes = any(isinstance(module, Normalize) for module in last)
    cut = replace(spec, dimensions=fitting, normalisation="l2" if normalizes else None)
    return replace(signature, outputs=tuple(cut if each is spec else each for each in signature.outputs))
