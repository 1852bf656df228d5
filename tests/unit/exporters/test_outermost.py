from __future__ import annotations

from nestforge.exporters.depth import outermost_products


def decoder(layers: int, prefix: str = "model.layers") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (512, 32)}
    for layer in range(layers):
        shapes[f"{prefix}.{layer}.self_attn.k_proj.weight"] = (16, 32)
        shapes[f"{prefix}.{layer}.mlp.up_proj.weight"] = (64, 32)
        shapes[f"{prefix}.{layer}.mlp.down_proj.weight"] = (32, 64)
        shapes[f"{prefix}.{layer}.norm.weight"] = (128,)
    return shapes


def test_the_last_product_of_the_first_and_the_last_eighth_of_the_layers() -> None:
    assert outermost_products(decoder(7)) == frozenset()
    assert outermost_products(decoder(15)) == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 14)}
    expected = {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1, 2, 27, 28, 29)}
    assert outermost_products(decoder(30)) == expected


def test_every_list_of_layers_has_its_own_ends() -> None:
    two = decoder(8, "encoder.block") | decoder(4, "decoder.block")
    assert outermost_products(two) == {f"encoder.block.{layer}.mlp.down_proj.weight" for layer in (0, 7)}


def test_stacks_of_experts_are_weights_and_lists_of_them_are_no_layers() -> None:
    stacks = {f"layers.{layer}.experts.{name}": (4, *shape) for layer in range(8) for name, shape in EXPERT.items()}
    assert outermost_products(stacks) == {"layers.0.experts.down", "layers.7.experts.down"}
    listed = {f"layers.{layer}.experts.{e}.down": EXPERT["down"] for layer in range(8) for e in range(16)}
    assert outermost_products(listed) == frozenset(), "none has more inputs than the others of its layer"


def test_products_of_one_value_are_never_told_apart() -> None:
    narrow = decoder(8) | {f"model.layers.{layer}.mlp.down_proj.weight": (32, 32) for layer in range(8)}
    assert outermost_products(narrow) == frozenset(), "queries, keys and values are one product in some engines"


EXPERT = {"up": (64, 32), "down": (32, 64)}
