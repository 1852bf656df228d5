"""The tensors that forms of attention read in place of parameters: their names, shapes, and how they shrink.

Each is made of parameters head by head, so that the first heads of it are what the first heads of the parameters give:
slicing first and folding second is a prefix of what was folded once. model/folds.py makes them.

Names below the module of a sublayer, such as ``layers.N.attention``, ``n`` heads of size ``d``, which of the two in
front as the layout of the model says:

- ``folded.query`` ``[n, d]``, of mhe_mul: both factors of a head and the softmax scale, ``c_i`` of section 6.3.
- ``folded.key`` ``[d, H]``, of mhe_add: the key projection with the softmax scale.
- ``folded.output`` ``[H, n * d]``, of mhe_mul: the output projection with the value factors (6.5).
- ``folded.queries.weight`` ``[n * d, H]``, ``.bias``: a query projection for each head (form C).
- ``expanded.query.weight`` ``[n * d, H]``, ``.bias``, and of keys and values: an ordinary MHA (form B, 6.1 and 6.2).
"""

from __future__ import annotations

from .....elastic import PrefixSlice
from ....hugging_face.tensors import Shape
from .config import MheConfig


def folded_shapes(config: MheConfig, at: str) -> dict[str, Shape]:
    """Tensor to shape of the attention sublayer ``at``; none where heads have no embeddings."""
    if not config.has_tables:
        return {}
    d, inner, is_mul = config.hidden_size, config.inner, config.attention == "mhe_mul"
    shapes: dict[str, Shape] = {}
    if is_mul:
        shapes[f"{at}.folded.query"] = config.table_shape
        shapes[f"{at}.folded.output"] = (d, inner)
    else:
        shapes[f"{at}.folded.key"] = (config.head_size, d)
    for part in ("folded.queries", "expanded.query", "expanded.key", "expanded.value"):
        shapes[f"{at}.{part}.weight"] = (inner, d)
        if not is_mul or config.attention_bias:  # what mhe_add adds is a bias of each head
            shapes[f"{at}.{part}.bias"] = (inner,)
    return shapes


def folded_slices(config: MheConfig, at: str, axis: str | None) -> dict[str, PrefixSlice | None]:
    """Tensor to its slice along the ``axis`` of the heads, or of how many numbers each has, if there is one."""
    slices: dict[str, PrefixSlice | None] = dict.fromkeys(folded_shapes(config, at))
    if axis is None:
        return slices
    for name in slices:
        if name.endswith("folded.query"):
            slices[name] = PrefixSlice(name, 0, axis)
        elif name.endswith("folded.key"):  # one head's, which all share
            slices[name] = PrefixSlice(name, 0, axis) if config.width_first else None
        else:
            dim = 1 if name.endswith("folded.output") else 0
            slices[name] = PrefixSlice(name, dim, axis, config.step)
    return slices
