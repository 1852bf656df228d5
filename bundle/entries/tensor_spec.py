"""An input or output of a model or an engine, as the manifest states it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from ...bucket import Bucket
from ...elastic import Pairs

# The whole numbers that an array of each dtype holds.
RANGES = {
    "float32": (-(2**63), 2**63 - 1),
    "float16": (-65504, 65504),
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "bool": (0, 1),
}
DTYPES = tuple(RANGES)
# The meaning of an output: a vector of the input; logits of classes; logits of the token at each position (masked
# language models); logits of the token that follows each position (causal ones).
Role = Literal["embedding", "classes", "tokens", "next_tokens"]
# Limit of one tensor, which no host holds.
MAX_ELEMENTS = 2**31
# The tokens that a mask ``[B, S]`` must have in every row.
RowNeed = Literal["token", "first_token"]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of an engine.

    ``dims`` names each dimension: ``batch`` and ``sequence`` follow the bucket or, where it leaves them free, the
    request; a number is fixed, and any other name is the caller's to choose. ``pad`` is the value that fills an input
    up to its bucket; an input without one cannot be padded. ``high`` bounds a whole-number input to
    ``0 <= value < high``: the vocabulary size for token ids, 2 for a mask. ``role`` says what an output means, and so
    by what measure submodels are compared (bundle/roles.py); where no output has one, shapes decide.
    ``row_needs`` is stated of the mask that says which positions count, and says what every row must have for its
    answer to be defined: a ``token`` somewhere (attention over nothing is no number that implementations agree on), or
    one at the start, ``first_token``, where positions see only those before them.
    An embedding ``[batch, width]`` may be cut to its first numbers: to the ``dimensions`` listed, which fall from
    ``width`` on, or to any number where none are; of ``pairs`` submodels of so many layers to those numbers alone.
    ``normalisation``: the model brings its rows to length 1.
    """

    name: str
    dtype: str = field(metadata={"choices": DTYPES})
    dims: tuple[str | int, ...]
    pad: int | None = None
    high: int | None = field(default=None, metadata={"min": 1})
    role: Role | None = None
    row_needs: RowNeed | None = None
    dimensions: tuple[int, ...] | None = None
    pairs: Pairs | None = None
    normalisation: Literal["l2"] | None = None

    @property
    def is_vector(self) -> bool:
        """Whether it is one vector of floats for each row."""
        shaped = len(self.dims) == 2 and self.dims[0] == "batch" and isinstance(self.dims[1], int)
        return shaped and self.dtype in ("float32", "float16")

    def shape(self, bucket: Bucket, others: Mapping[str, int] = MappingProxyType({})) -> tuple[int, ...]:
        """Shape at ``bucket``, the largest where it is a range, with the sizes of ``others`` by name."""
        sizes = {"batch": bucket.batch, "sequence": bucket.sequence, **others}
        return tuple([sizes[dim] if isinstance(dim, str) else dim for dim in self.dims])

    def declared(self, bucket: Bucket) -> tuple[str | int, ...]:
        """Dimensions that an engine at ``bucket`` declares: a free dimension by its name."""
        sizes = {"batch": bucket.batch, "sequence": bucket.sequence}
        fixed = {name: size for name, size in sizes.items() if name not in bucket.free}
        return tuple(fixed.get(dim, dim) if isinstance(dim, str) else dim for dim in self.dims)
