"""A model of transformers as the compiler sees it: what families of such models state alike (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...bucket import Bucket
from ...elastic import Axis, ElasticSpec, Submodel
from ...workload import Op
from ..architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import read_nesting
from ..sentence_transformers.read_modules import read_modules
from ..signature import Signature
from .interface import Loading, with_modules
from .tensors import Parameters

if TYPE_CHECKING:  # plans are made without torch
    import torch


def describe(
    checkpoint: Checkpoint,
    axes: Sequence[Axis],
    parameters: Parameters,
    names: Mapping[str, str],
    signature: Signature,
    workload: Callable[[Submodel, Bucket], list[Op]],
    loading: Loading,
    hidden: int | None = None,
) -> Architecture:
    """The architecture of a class of transformers with ``axes`` per layer, ``ffn`` among them.

    ``names`` are those of ``held_tensors``. Behind a model whose tokens are ``hidden`` wide there may be modules of
    sentence-transformers; without ``hidden`` it takes none. Raises CheckpointError for modules or nesting that are not
    understood.
    """
    modules = None if hidden is None else read_modules(checkpoint, hidden)
    interface = with_modules(signature, checkpoint, modules)
    nesting = read_nesting(checkpoint, tuple(dict.fromkeys(axis.kind for axis in axes)))

    def load() -> torch.nn.Module:
        from .transformers_model import load_module

        return load_module(checkpoint, interface, modules, loading)

    return Architecture(
        spec=ElasticSpec(
            tuple(axes),
            tuple(parameters.slices),
            nesting.nested,
            depth=sum(axis.kind == "ffn" for axis in axes),
            granularities=nesting.granularities,
        ),
        signature=interface,
        parameter_shapes=parameters.shapes,
        workload=workload,
        load=load,
        names_in_files=names,
        modules=modules,
    )
