"""A model of transformers as the compiler sees it: what families of such models state alike (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import TensorSpec
from ...elastic import ElasticSpec, Submodel
from ...workload import Op
from ..architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import read_nesting
from ..sentence_transformers.modules import TOKENS
from ..sentence_transformers.read_modules import SentenceModules, read_modules
from ..sentence_transformers.text_settings import with_text_settings
from ..signature import Signature
from .interface import EMBEDDING, POOLING_MASK, Loading
from .tensors import Parameters

if TYPE_CHECKING:  # plans are made without torch
    import torch


def describe(
    checkpoint: Checkpoint,
    parameters: Parameters,
    names: Mapping[str, str],
    signature: Signature,
    workload: Callable[[Submodel, Bucket], list[Op]],
    loading: Loading,
    hidden: int | None = None,
) -> Architecture:
    """The architecture of a class of transformers, whose ``parameters`` have one ``ffn`` axis a layer.

    ``names`` are those of ``held_tensors``. Behind a model whose tokens are ``hidden`` wide there may be modules of
    sentence-transformers; without ``hidden`` it takes none. Raises CheckpointError for modules or nesting that are not
    understood.
    """
    modules = None if hidden is None else read_modules(checkpoint, hidden)
    interface = _with_modules(signature, checkpoint, modules)
    nesting = read_nesting(checkpoint, tuple(dict.fromkeys(axis.kind for axis in parameters.axes)))

    def load() -> torch.nn.Module:
        from .transformers_model import load_module

        return load_module(checkpoint, interface, modules, loading)

    return Architecture(
        spec=ElasticSpec(
            tuple(parameters.axes),
            tuple(parameters.slices),
            nesting.nested,
            depth=sum(axis.kind == "ffn" for axis in parameters.axes),
            granularities=nesting.granularities,
        ),
        signature=interface,
        parameter_shapes=parameters.shapes,
        workload=workload,
        load=load,
        names_in_files=names,
        modules=modules,
    )


def _with_modules(signature: Signature, checkpoint: Checkpoint, modules: SentenceModules | None) -> Signature:
    """``signature`` of the transformer alone, which has a mask and returns its tokens, with the embedding that
    ``modules`` make of them, the tokens where modules change those first, and with what the folder says of texts."""
    if modules is None:
        return signature
    mask = next(spec for spec in signature.inputs if spec.name == signature.mask)
    pooling = replace(mask, name=POOLING_MASK, row_needs=None)  # of a prompt alone it leaves nothing
    inputs = (*signature.inputs, *([pooling] if modules.leaves_prompt_out else []))
    outputs = [*signature.outputs, TensorSpec(EMBEDDING, "float32", ("batch", modules.width))]
    if modules.token_width is not None:
        outputs.insert(-1, TensorSpec(TOKENS, "float32", ("batch", "sequence", modules.token_width)))
    text = signature.text
    if text is not None:
        pooled = POOLING_MASK if modules.leaves_prompt_out else None
        text = with_text_settings(checkpoint, replace(text, embedding=EMBEDDING), pooled)
    return replace(signature, inputs=inputs, outputs=tuple(outputs), text=text)
