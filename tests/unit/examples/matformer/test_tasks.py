"""The digits in a fixed split, and images that are distorted in training alone."""

from __future__ import annotations

import torch
from nestforge.examples.matformer.tasks import read_digits

DIGITS = read_digits()


def test_the_split_is_fixed_and_has_every_image_once() -> None:
    parts = (DIGITS.train, DIGITS.validation, DIGITS.test)
    assert [len(part.targets) for part in parts] == [1078, 359, 360]
    assert torch.cat([part.targets for part in parts]).bincount().tolist() == [
        *(178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
    ]
    assert all(part.targets.bincount(minlength=10).min() > 0.09 * len(part.targets) for part in parts)
    assert read_digits().facts == DIGITS.facts
    for part in parts:
        assert part.inputs.shape == (len(part.targets), 1, 8, 8)
        assert part.inputs.aminmax() == (0.0, 1.0)


def test_batches_are_distorted_images_that_the_seed_decides() -> None:
    first, again, other = (list(DIGITS.batches(16, 3, seed)) for seed in (0, 0, 1))
    assert [len(batch.targets) for batch in first] == [16, 16, 16]
    assert all(torch.equal(one.inputs, two.inputs) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0].targets, other[0].targets)
    whole = {image.numpy().tobytes() for image in DIGITS.train.inputs}
    assert not any(image.numpy().tobytes() in whole for batch in first for image in batch.inputs)
    assert all(batch.inputs.min() >= 0 and batch.inputs.max() <= 1 for batch in first)
