"""Which heads and FFN channels of a layer matter: first-order Taylor scores under the losses of every exit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ....exporters.families.cost_eff.model import CostEffModel
from .batches import Batch
from .losses import label_loss


@dataclass(frozen=True)
class Importance:
    """Scores per layer: ``heads`` ``[A]`` and ``ffn`` ``[F]`` each."""

    heads: Sequence[torch.Tensor]
    ffn: Sequence[torch.Tensor]


def taylor_importance(
    model: CostEffModel, batches: Sequence[Batch], on_batch: Callable[[int, int], None]
) -> Importance:
    """``sum |dL/dw| |w|`` over the weights of each structure, the gradient's size averaged over ``batches``.

    ``L`` sums the label losses of every exit, so a structure is judged by each exit behind it. A head's weights are
    its columns of the attention output, a channel's its row of the FFN input and its column of the FFN output. Scores
    compare structures of one layer, not layers with each other. Dropout stays off.
    """
    weights = [
        model.get_parameter(f"encoder.layer.{layer}.{name}.weight")
        for layer in range(len(model.architecture.layers))
        for name in ("attention.output.dense", "intermediate.dense", "output.dense")
    ]
    sizes = [torch.zeros_like(weight) for weight in weights]
    for index, batch in enumerate(batches):
        for size, gradient in zip(sizes, torch.autograd.grad(label_loss(model, batch), weights), strict=True):
            size += gradient.abs() / len(batches)
        on_batch(index + 1, len(batches))
    products = [size * weight.detach().abs() for size, weight in zip(sizes, weights, strict=True)]
    columns = [product.sum(0).reshape(-1, model.architecture.head_size).sum(1) for product in products[0::3]]
    channels = [into.sum(1) + out.sum(0) for into, out in zip(products[1::3], products[2::3], strict=True)]
    return Importance(columns, channels)
