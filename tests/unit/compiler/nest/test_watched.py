from __future__ import annotations

import torch
from nestforge.bucket import Bucket
from nestforge.compiler.nest.distill import trainable
from nestforge.compiler.nest.watched import NestedPasses, blocks_of, run
from nestforge.runtime.inputs.arrays import random_feeds

from .conftest import Ordinary


def inputs(ordinary: Ordinary) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.from_numpy, random_feeds(ordinary.source.signature.inputs, Bucket(2, 8), 0).values()))


def test_blocks_are_the_models_layers(ordinary: Ordinary) -> None:
    assert blocks_of(ordinary.universal) == [f"model.encoder.layer.{layer}" for layer in range(3)]


def test_a_pass_hears_every_block_and_leaves_no_listener(ordinary: Ordinary) -> None:
    universal = ordinary.universal
    found = run(universal.module, blocks_of(universal), inputs(ordinary))
    assert [state.shape for state in found.hidden] == [(2, 8, 32)] * 3
    assert torch.equal(found.hidden[-1], found.outputs[0])
    assert not any(part._forward_hooks for part in universal.module.modules())


def test_a_submodels_pass_is_that_of_the_narrowed_module(ordinary: Ordinary) -> None:
    universal = ordinary.universal
    submodels = [universal.spec.parse(name) for name in ("ffn16-heads2", "ffn5x1_64x2-heads4", "ffn64-heads4")]
    passes = NestedPasses(universal, submodels)
    for parameter in universal.parameters().values():  # a view sees what training writes, a copy would not
        parameter.data += 0.01
    for number, submodel in enumerate(submodels):
        expected = universal.narrow(submodel)(*inputs(ordinary))
        found = passes.of(number, inputs(ordinary)).outputs
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gradients_reach_the_prefix_and_nothing_behind_it(ordinary: Ordinary) -> None:
    universal = ordinary.universal
    passes = NestedPasses(universal, [universal.spec.parse("ffn16-heads2")])
    weights = trainable(universal)
    for weight in weights.values():
        weight.requires_grad_(True)
    outputs = passes.of(0, inputs(ordinary)).outputs
    torch.autograd.backward([output.square().sum() for output in outputs])
    for name, keeps in (("intermediate.dense.weight", 16), ("attention.self.query.weight", 16)):
        gradient = weights[f"encoder.layer.1.{name}"].grad
        assert gradient is not None
        assert gradient[:keeps].abs().sum(1).all()
        assert not gradient[keeps:].any()
    columns = weights["encoder.layer.1.output.dense.weight"].grad
    assert columns is not None
    assert columns[:, :16].abs().sum(0).all()
    assert not columns[:, 16:].any()
