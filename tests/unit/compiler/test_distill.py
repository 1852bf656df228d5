import copy
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.manifest import TextEntry
from nestforge.compiler.distill import (
    Effort,
    NestedPasses,
    Pass,
    _drawn,
    blocks_of,
    difference,
    distill,
    load_state,
    run,
    save_state,
    trainable,
)
from nestforge.compiler.examples.texts import TextBatches, training_texts
from nestforge.compiler.planning.levels import levels
from nestforge.compiler.work.clock import Clock
from nestforge.compiler.work.staging import Stage
from nestforge.exporters.signature import Signature
from nestforge.progress import silent
from nestforge.runtime.inputs.arrays import random_feeds

from .conftest import Ordinary


def test_the_loss_falls(ordinary: Ordinary, tmp_path: Path) -> None:
    universal = ordinary.universal
    stage = Stage(tmp_path, tmp_path)
    texts = TextBatches.of(universal.source, training_texts(ordinary.text))
    ladder = levels(universal.spec, {"ffn": (0.25, 1.0)}, 1)
    teacher = copy.deepcopy(universal.module)
    taught = distill(universal, teacher, ladder, texts, Effort(0, steps=120), stage, Clock(silent))
    assert (taught.steps, len(taught.losses)) == (120, 120)
    small = [loss for step, loss in enumerate(taught.losses) if _drawn(2, 0, step) == 0]
    assert mean(small[-10:]) < 0.85 * mean(small[:10])
    assert not any(parameter.requires_grad for parameter in universal.module.parameters())


def test_all_but_embedding_tables_are_trained(ordinary: Ordinary) -> None:
    universal = ordinary.universal
    left = universal.parameters().keys() - trainable(universal).keys()
    assert left == {f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")}


def test_half_of_the_steps_run_the_whole_model_and_the_levels_share_the_rest() -> None:
    counts = Counter(_drawn(4, 0, step) for step in range(3000))
    assert counts[3] / 3000 == pytest.approx(1 / 2, abs=0.03)
    assert all(counts[level] / 3000 == pytest.approx(1 / 6, abs=0.03) for level in range(3))


@pytest.mark.parametrize(
    ("effort", "steps", "seconds", "done"),
    [
        (Effort(0, steps=10), 0, 99.0, 0.0),
        (Effort(0, steps=10), 5, 0.0, 0.5),
        (Effort(0, steps=10), 10, 0.0, 1.0),
        (Effort(0, seconds=60.0), 7, 45.0, 0.75),
    ],
)
def test_how_much_of_a_training_is_done(effort: Effort, steps: int, seconds: float, done: float) -> None:
    assert effort.done(steps, seconds) == done


TOKENS = TensorSpec("tokens", "float32", ("batch", "sequence", 2))
EMBEDDING = TensorSpec("embedding", "float32", ("batch", 2))
POOLER = TensorSpec("pooler", "float32", ("batch", 2))
TEXT = TextEntry("tokenizer.json", "ids", "mask", None, "embedding")


def of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(list(rows))


def test_equal_passes_differ_by_nothing() -> None:
    outputs = (torch.ones(1, 3, 2), torch.ones(1, 2))
    same = Pass(outputs, (torch.ones(1, 3, 2),))
    assert difference(Signature((), (TOKENS, EMBEDDING), text=TEXT), same, same, torch.ones(1, 3)) == 0


def test_every_part_counts_relative_to_the_teachers_length_and_padding_not_at_all() -> None:
    signature = Signature((), (TOKENS, POOLER, EMBEDDING), text=TEXT)
    weights = of([1, 1, 0])
    teacher = Pass(
        (of([3, 4], [0, 2], [1, 1])[None], of([1, 0]), of([0, 1])),
        (of([1, 0], [0, 1], [1, 1])[None], of([2, 0], [2, 0], [1, 1])[None]),
    )
    student = Pass(
        (of([3, 5], [0, 1], [9, 9])[None], of([7, 7]), of([0, 0.5])),  # the pooler follows from the tokens
        (of([1, 1], [0, 1], [9, 9])[None], of([2, 0], [0, 0], [9, 9])[None]),
    )
    tokens = (1 / 25 + 1 / 4) / 2
    embedding = 0.25
    hidden = (0.5 + 0.5) / 2
    assert float(difference(signature, student, teacher, weights)) == pytest.approx(tokens + embedding + hidden)


def test_a_model_without_tokens_or_embedding_is_held_to_all_it_has() -> None:
    signature = Signature((), (POOLER,), text=TextEntry("tokenizer.json", "ids", "mask", None, None))
    found = difference(signature, Pass((of([1, 1]),), ()), Pass((of([1, 0]),), ()), of([1, 1]))
    assert float(found) == pytest.approx(1)


def test_a_vector_of_zeros_and_a_batch_without_tokens_are_no_division_by_zero() -> None:
    zeros = Pass((torch.zeros(1, 2, 2),), ())
    found = difference(Signature((), (TOKENS,)), zeros, zeros, torch.zeros(1, 2))
    assert float(found) == 0


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
        assert gradient[:keeps].abs().sum(1).all()
        assert not gradient[keeps:].any()
    columns = weights["encoder.layer.1.output.dense.weight"].grad
    assert columns[:, :16].abs().sum(0).all()
    assert not columns[:, 16:].any()


def training() -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.randn(3)) for name in ("a", "b", "never")}
    return weights, torch.optim.AdamW(weights.values(), lr=0.1, fused=True)


def step(weights: dict[str, torch.nn.Parameter], optimiser: torch.optim.Optimizer) -> None:
    optimiser.zero_grad()
    torch.autograd.backward((weights["a"].square() * weights["b"]).sum())
    optimiser.step()


def test_a_training_that_was_kept_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    weights, optimiser = training()
    for _ in range(3):
        step(weights, optimiser)
    save_state(tmp_path / "state", weights, optimiser, 3, 1.5)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    others, other = training()
    assert load_state(tmp_path / "state", others, other) == (3, 1.5)
    step(weights, optimiser)
    step(others, other)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_without_a_file_a_training_begins(tmp_path: Path) -> None:
    weights, optimiser = training()
    before = weights["a"].detach().clone()
    assert load_state(tmp_path / "state", weights, optimiser) == (0, 0.0)
    assert torch.equal(weights["a"], before)
