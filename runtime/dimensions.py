"""An embedding cut to its first numbers, which of a Matryoshka model are an embedding themselves (Kusupati et al. 2022,
arXiv:2205.13147, section 3)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..bundle.entries.tensor_spec import TensorSpec
from ..bundle.manifest import Manifest, SubmodelEntry
from ..bundle.roles import embedding_of, embedding_output
from ..errors import InputError
from .inputs.arrays import Array

# The least that torch.nn.functional.normalize divides by.
_LEAST_LENGTH = 1e-12


class Cut(NamedTuple):
    """The first ``dimensions`` numbers of ``output``, brought to length 1 where the model does that to all of them."""

    output: TensorSpec
    dimensions: int

    def applied(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """``outputs`` with the embedding cut; all other arrays as they are."""
        kept = np.ascontiguousarray(outputs[self.output.name][:, : self.dimensions])
        return {**outputs, self.output.name: kept if self.output.normalisation is None else normalized(kept)}


def cut_to(manifest: Manifest, dimensions: int) -> Cut:
    """The cut that a request asks for. Raises InputError for a model without an embedding, and for ``dimensions`` to
    which it is not cut."""
    output = embedding_output(manifest)
    return Cut(output, required(output, dimensions))


def paired(manifest: Manifest) -> dict[int, frozenset[str]]:
    """Submodels by the dimensions that they have, where a model was trained in pairs of layers and dimensions."""
    output = embedding_of(manifest)
    pairs = () if output is None or output.pairs is None else output.pairs
    return {
        number: frozenset(one.id for one in manifest.submodels if (one.depth, number) in pairs) for _, number in pairs
    }


def required(
    output: TensorSpec, dimensions: int, name: str = "dimensions", submodel: SubmodelEntry | None = None
) -> int:
    """``dimensions``, which messages call ``name``. Raises InputError for those to which ``output`` is not cut, or not
    that of ``submodel``."""
    if may_be_cut(output, dimensions):
        pairs, width = output.pairs, output.dims[1]
        if submodel is None or pairs is None or dimensions == width or (submodel.depth, dimensions) in pairs:
            return dimensions
        of_own, depth = [f"{number}" for layers, number in pairs if layers == submodel.depth], submodel.depth
        others = [f"{layers}" for layers, number in pairs if number == dimensions]
        raise InputError(
            f"{name}: {dimensions} was trained with {', '.join(others)} layers, submodel {submodel.id} has {depth}, "
            f"which go with {', '.join(of_own) or width}; ask for a submodel of those layers, or for {width}, all"
        )
    allowed = f"1 to {output.dims[1]}" if output.dimensions is None else f"one of {listed(output.dimensions)}"
    why = "" if output.dimensions is None else ", which the model lists; compile with `dimensions` to list others"
    raise InputError(f"{name}: expected {allowed}, got {dimensions!r:.80}{why}")


def may_be_cut(output: TensorSpec, dimensions: int) -> bool:
    """Whether ``output`` is an embedding that may be cut to ``dimensions`` numbers: to those that its model lists, or
    to any, as sentence-transformers has it, where it lists none."""
    if not output.is_vector or type(dimensions) is not int:
        return False
    return dimensions in (range(1, int(output.dims[1]) + 1) if output.dimensions is None else output.dimensions)


def listed(dimensions: Sequence[int]) -> str:
    """``768, 512, 256``."""
    return ", ".join(map(str, dimensions))


def normalized(vectors: Array) -> Array:
    """``vectors`` ``[N, D]`` at length 1, as ``torch.nn.functional.normalize`` has it."""
    lengths = np.linalg.norm(vectors.astype(np.float32, copy=False), axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, _LEAST_LENGTH)).astype(vectors.dtype, copy=False)
