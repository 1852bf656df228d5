"""Where a model has layers, and attention in them: names of modules, of axes, and of what ``--variant`` asks for."""

from __future__ import annotations

from typing import NamedTuple

from .config import MheConfig, MheEncoderDecoderConfig
from .forms import ATTENTION, CROSS, DECODER, ENCODER


class Place(NamedTuple):
    """Attention in the module ``at``; ``axis`` is that of its heads, or of how many numbers each has, if there is one,
    and ``role`` what the variants call its form."""

    at: str
    axis: str | None
    role: str


def layers_of(config: MheConfig) -> tuple[str, ...]:
    """Every layer, by its module and as axes call it; an encoder's before its decoder's."""
    own = tuple(f"layers.{layer}" for layer in range(config.num_hidden_layers))
    if not isinstance(config, MheEncoderDecoderConfig):
        return own
    after = (f"decoder.layers.{layer}" for layer in range(config.decoder_layers))
    return (*(f"encoder.{layer}" for layer in own), *after)


def places_of(config: MheConfig) -> tuple[Place, ...]:
    """Every sublayer of attention, in the order in which a pass comes to it."""
    return tuple(place for layer in layers_of(config) for place in places_in(config, layer))


def places_in(config: MheConfig, layer: str) -> tuple[Place, ...]:
    """The sublayers of attention of one ``layer``."""
    own, axis = f"{layer}.attention", config.heads_axis and f"{layer}.{config.heads_axis}"
    if not isinstance(config, MheEncoderDecoderConfig):
        return (Place(own, axis, ATTENTION),)
    if layer.startswith("encoder."):
        return (Place(own, axis, ENCODER),)
    cross = Place(f"{layer}.cross_attention", config.cross_axis and f"{layer}.{config.cross_axis}", CROSS)
    return (Place(own, axis, DECODER), cross)
