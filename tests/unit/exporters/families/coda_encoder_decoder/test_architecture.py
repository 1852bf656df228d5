from __future__ import annotations

from nestforge.bucket import Bucket
from nestforge.exporters.families.coda.encoder_decoder_config import (
    elastic_spec,
    encoding_ops,
    forward_ops,
    parameter_group,
    parameter_shapes,
)
from nestforge.exporters.families.t5 import step_ops
from support.tiny_coda_t5 import pair_config, tiny_pair


def test_shapes_are_those_of_the_module() -> None:
    for tied in (True, False):
        config = pair_config(tie_word_embeddings=tied)
        found = {name: tuple(parameter.shape) for name, parameter in tiny_pair(config).named_parameters()}
        assert parameter_shapes(config) == found


def test_axes_of_both_sides_and_the_reduction() -> None:
    spec = elastic_spec(pair_config(num_decoder_layers=2))
    assert [axis.name for axis in spec.axes] == [
        "encoder.layers.0.ffn",
        "decoder.layers.0.ffn",
        "decoder.layers.1.ffn",
        "coda.reduction",
    ]
    assert (spec.universal().id, spec.depth) == ("ffn32-coda.reduction1", 3)
    shapes = parameter_shapes(pair_config(num_decoder_layers=2))
    assert all(cut.parameter in shapes for cut in spec.slices)


def test_groups_are_the_encoders() -> None:
    assert parameter_group("encoder.layers.0.router.weight") == "routers"
    assert parameter_group("decoder.block.0.layer.0.layer_norm.weight") is None


def test_a_reduction_spares_the_encoder_alone() -> None:
    """Products of a pass; what the decoder makes of a prompt and of one more token does not depend on r."""
    config, bucket = pair_config(), Bucket(1, 12)
    spec = elastic_spec(config)
    whole, reduced = spec.universal(), spec.parse("ffn32-coda.reduction3")

    def products(ops: object) -> dict[str, int]:
        return {op.name: op.flops for op in ops if op.kind == "gemm"}  # type: ignore[attr-defined]

    passed = [products(forward_ops(config, submodel, bucket)) for submodel in (whole, reduced)]
    assert passed[0]["layers.0.ffn.up"] == 3 * passed[1]["layers.0.ffn.up"]
    assert passed[0]["decoder.layers.0.ffn.wo"] == passed[1]["decoder.layers.0.ffn.wo"]
    assert passed[0]["lm_head"] == 2 * 12 * 16 * 40
    read = [products(encoding_ops(config, submodel, bucket)) for submodel in (whole, reduced)]
    assert read[0]["decoder.layers.0.cross_attention.key"] == read[1]["decoder.layers.0.cross_attention.key"]
    assert products(step_ops(config.decoder, whole)) == products(step_ops(config.decoder, reduced))
