from __future__ import annotations

from nestforge.exporters.families.mhe.forms import Place, layers_of, places_of
from support.tiny_mhe import decoder_config, encoder_config, pair_config, tiny_mhe


def test_one_side() -> None:
    for config in (encoder_config(), decoder_config()):
        assert layers_of(config) == ("layers.0", "layers.1")
        assert places_of(config)[1] == Place("layers.1.attention", "layers.1.heads", "attention")
    assert places_of(encoder_config(attention="sha"))[0].axis is None


def test_two_sides() -> None:
    config = pair_config(num_decoder_layers=2)
    assert layers_of(config) == ("encoder.layers.0", "decoder.layers.0", "decoder.layers.1")
    assert places_of(config)[:3] == (
        Place("encoder.layers.0.attention", "encoder.layers.0.heads", "encoder_attention"),
        Place("decoder.layers.0.attention", "decoder.layers.0.heads", "decoder_attention"),
        Place("decoder.layers.0.cross_attention", "decoder.layers.0.cross_heads", "cross_attention"),
    )
    assert [place.axis for place in places_of(pair_config(attention="mha"))] == [
        "encoder.layers.0.heads",
        "decoder.layers.0.heads",
        "decoder.layers.0.cross_heads",
    ]


def test_every_place_is_a_module_of_the_model() -> None:
    for config in (encoder_config(), decoder_config(), pair_config()):
        model = tiny_mhe(config)
        found = [name for name, part in model.named_modules() if type(part).__name__ == "Attention"]
        assert found == [place.at for place in places_of(config)]
