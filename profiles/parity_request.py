"""A check of an export: what is compared with which model and what a user accepts, each stated once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..argument_types import document_fields, option, take_numbers, take_types
from ..errors import InputError
from ..progress import Progress, silent
from .compile_request import PROGRESS

Preset = Literal["strict", "deploy"]


@document_fields
@dataclass(frozen=True, eq=False)
class ParityRequest:
    """The arguments of ``nestforge.check_parity``. Raises InputError for a field of another type or beyond its
    bounds."""

    export: str | Path = option(
        "ONNX file or a folder of them, OpenVINO IR, TensorRT plan, bundle, or the URL of an embeddings server.",
        MISSING,
    )
    against: Any = option("Model folder that the export was made of, another export, or a torch.nn.Module.", MISSING)
    map: Mapping[str, str] | None = option("Inputs and outputs of the export, and their names in the model.")
    inputs: Mapping[str, NDArray[Any]] | None = option("Arrays by the model's or the export's names: one more case.")
    texts: Sequence[str] | None = option("Texts: more cases, by the model's tokenizer.")
    seed: int = option("Random seed of the cases.", 0, min=0)
    tolerance: float | None = option(
        "Largest difference, as a share of the output's rms, in the place of the rule.", above=0
    )
    preset: Preset | None = option(
        "strict: the rule of fp32, whatever the precision; deploy: cosine and largest element of every row."
    )
    library: str | Path | None = option("Shared library with the export's custom operators.")
    progress: Progress = field(default=silent, repr=False, metadata=PROGRESS.metadata)

    def __post_init__(self) -> None:
        take_types(self)
        take_numbers(self, ("seed", "tolerance"))
        if self.tolerance is not None and self.preset is not None:
            raise InputError("`tolerance` and `preset` are two rules; expected one of them")

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that a receipt repeats; the user's own cases by their SHA-256."""
        plain = {name: getattr(self, name) for name in SETTINGS}
        if self.library is not None:
            plain["library"] = str(self.library)
        return {**plain, "inputs": sha256_of_own(self.inputs), "texts": sha256_of_own(self.texts)}


SETTINGS = ("map", "seed", "tolerance", "preset", "library")


def sha256_of_own(own: Mapping[str, NDArray[Any]] | Sequence[str] | None) -> str | None:
    """The hash of the user's arrays by name, or texts; None for none."""
    if not own:
        return None
    found = hashlib.sha256()
    for name in sorted(own) if isinstance(own, Mapping) else own:
        array = np.ascontiguousarray(own[name]) if isinstance(own, Mapping) else np.zeros(0)
        found.update(f"{name}\0{array.dtype}{array.shape}\0".encode() + array.tobytes())
    return found.hexdigest()
