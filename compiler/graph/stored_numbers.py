"""PyTorch's model with the numbers that engines read of a weight store, each tensor held against the weight it is of.

The name of a stored tensor says what it is made of (encodings.py), so that it is made anew and must be equal to the
byte. Integers of 4 bits that examples chose are no function of a weight alone: they are the ones that were chosen, as
far as these are known, and no further from the weight than rounding can leave them.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from ...elastic import Submodel
from ...errors import ParityError
from ...exporters.universal import PREFIX, UniversalModel
from ...profiles.precision import FP32, SCALES, WEIGHT_BITS, Encoding
from ..work.tensor_file import Unmade, write_tensors
from .encodings import DTYPES, beyond_rounding, decoded, parts_of, split_encoding
from .passes.contract import TRANSPOSED
from .store import encoded_rows, float32_views, rows_of, stored_arrays


@dataclass(frozen=True)
class StoredModel:
    """``universal`` with the numbers that an engine reads as its parameters, and ``folded`` with the ones that it reads
    as tensors made of several: those lie in the store as they are, or rounded."""

    universal: UniversalModel
    folded: Mapping[str, torch.Tensor]

    def narrow(self, submodel: Submodel, variants: Mapping[str, str]) -> torch.nn.Module:
        """The module narrowed to ``submodel``; where the engine reads folded tensors, in its ``variants``, on those."""
        module, source = self.universal.narrow(submodel), self.universal.source
        if not self.folded:
            return module
        assert source.architecture.lower is not None
        lowered = source.architecture.lower(module, variants)
        parameters = {name.removeprefix(PREFIX): parameter for name, parameter in lowered.named_parameters()}
        for name, tensor in self.folded.items():
            for cut in source.spec.slices_of(name):
                tensor = tensor.narrow(cut.dim, 0, submodel[cut.axis] * cut.unit)
            parameters[name].data = tensor.contiguous()
        return lowered


@dataclass(frozen=True)
class StoredNumbers:
    """The numbers of the weight store ``files``, made of the weights of ``model``; rounded ones lie as float32 in files
    of ``folder``, each once. ``chosen`` are tensors of 4 bits that examples may have chosen, as they must be."""

    model: UniversalModel
    files: Sequence[Path]
    folder: Path
    chosen: Mapping[str, np.ndarray] = field(default_factory=dict)
    _made: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def in_model(self, names: Collection[str]) -> StoredModel:
        """The model with the numbers that the tensors ``names`` of the store stand for.

        Raises ParityError for a tensor that is not what is made of the model's weight.
        """
        parts = sorted(set(chain.from_iterable(map(parts_of, names))), key=_fewest_bits)
        self._make([name for name in parts if name not in self._made])
        values = dict[str, torch.Tensor]()
        for name in parts:  # of a weight in several encodings that of products, which has the fewest bits
            if (tensor := self._made[name]) is not None:
                values.setdefault(_parameter(name), tensor)
        folded = {name: values.pop(name) for name in values.keys() & self.model.spec.folded.keys()}
        return StoredModel(self.model.with_parameters(values), folded)

    def _make(self, names: Collection[str]) -> None:
        shapes, known = self.model.stored_shapes(), dict(self.chosen)
        files: dict[Encoding, dict[str, Unmade]] = {}
        for name in names:
            plain, encoding = split_encoding(name)
            numbers = partial(self._numbers, name, known)
            if encoding != FP32 and encoding in WEIGHT_BITS:
                shape = shapes[_parameter(name)]
                form = shape[::-1] if plain.endswith(TRANSPOSED) else shape
                files.setdefault(encoding, {})[plain] = Unmade(DTYPES[FP32], form, numbers)
            else:
                deque(numbers(), maxlen=0)
                self._made[name] = self._views[_parameter(name)] if encoding == FP32 else None
        for encoding, tensors in files.items():
            path = self.folder / f"numbers{len(self._made)}{encoding}"
            made = path.with_name(f"{path.name}.writing")  # an earlier one of that name may be mapped
            write_tensors(tensors, made)
            made.replace(path)
            views = float32_views([path], self.model.spec)
            self._made.update({plain + encoding: views[_parameter(plain)] for plain in tensors})

    def _numbers(self, name: str, known: dict[str, np.ndarray]) -> Iterator[np.ndarray]:
        """Values of the rows of the tensor ``name``, some at a time; ``known`` as that of ``encoded_rows``."""
        stored, (plain, encoding), held = self.model.stored(), split_encoding(name), self._stored[name]
        scale = next((self._stored[plain + one] for one in SCALES.get(encoding, ())), None)
        for (rows, data), made in zip(rows_of(stored, name), encoded_rows(stored, name, known), strict=True):
            if not np.array_equal(made, held[rows]):
                raise ParityError(f"weight {name}: the bundle has other numbers than are made of the model's")
            numbers = decoded(held[rows], name, None if scale is None else scale[rows])
            numbers = numbers[..., : data.shape[-1]] if scale is not None else numbers
            if beyond_rounding(numbers, data, name).any():
                raise ParityError(
                    f"weight {name}: its numbers are further from the model's than rounding can leave them"
                )
            yield numbers

    @cached_property
    def _stored(self) -> Mapping[str, np.ndarray]:
        return stored_arrays(self.files, self.model.spec)

    @cached_property
    def _views(self) -> Mapping[str, torch.Tensor]:
        return float32_views(self.files, self.model.spec)


def _fewest_bits(name: str) -> tuple[int, str]:
    """Sorts weights by their bits, behind all scales."""
    return WEIGHT_BITS.get(split_encoding(name)[1], 0), name


def _parameter(name: str) -> str:
    return split_encoding(name)[0].removesuffix(TRANSPOSED)
