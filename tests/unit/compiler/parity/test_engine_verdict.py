import re
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from nestforge.bundle.entries.engine_entry import ParityOutput
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.graph.template import emit
from nestforge.compiler.parity.compare import Comparison, tolerance_for
from nestforge.compiler.parity.engine_verdict import ProofRun, first_divergence, require_parity, tolerance_of
from nestforge.compiler.parity.judge import BrokenRoute, JudgedOutputs, Verdict
from nestforge.compiler.parity.reference import Reference
from nestforge.elastic import Submodel
from nestforge.errors import ParityError
from support.tiny_compile import BUCKET


def diverges_at(builder: EngineBuilder, submodel: Submodel, case: int = 0, mask: np.ndarray | None = None) -> str:
    return divergence_of(builder, submodel, builder.references.of(submodel), case, mask)


def divergence_of(
    builder: EngineBuilder, submodel: Submodel, reference: Reference, case: int, mask: np.ndarray | None = None
) -> str:
    template = builder.templates.of(builder.universal.spec.universal(), BUCKET)
    given = builder.cases[BUCKET][case]
    run = ProofRun(emit(template, builder.store, submodel), template.module_outputs, builder.stage.folder)
    return first_divergence(run, reference, given, tolerance_for("fp32", 2), partial(reference.run, given.feeds), mask)


def damage(builder: EngineBuilder, name: str, element: int | None = None, by: float = 0.5) -> None:
    """Changes one element of a stored tensor, or all of them."""
    path, stored = builder.stage.folder / WEIGHTS_NAME, builder.store[name]
    raw = bytearray(path.read_bytes())
    elements = range(int(np.prod(stored.shape))) if element is None else [element]
    for offset in (stored.offset + 4 * index for index in elements):
        struct.pack_into("<f", raw, offset, 1.3 * struct.unpack_from("<f", raw, offset)[0] + by)
    path.write_bytes(raw)


def test_positions_that_the_mask_leaves_out_are_passed_over(builder: EngineBuilder) -> None:
    """The last position, which is padding in every row."""
    whole, cases = builder.universal.spec.universal(), builder.cases[BUCKET]
    number = [case.name for case in cases].index("padded")
    mask = cases[number].feeds["attention_mask"]
    assert not mask[:, -1].any()
    damage(builder, "embeddings.position_embeddings.weight", (BUCKET.sequence - 1) * 16)
    assert diverges_at(builder, whole, number).startswith("embeddings.position_embeddings")
    assert diverges_at(builder, whole, number, mask[: cases[number].rows]).startswith("no module alone")


def test_sound_engines_diverge_nowhere(builder: EngineBuilder) -> None:
    spec = builder.universal.spec
    for submodel in (spec.universal(), spec.parse("ffn8_24-heads1_2")):
        for case in range(len(builder.cases[BUCKET])):
            found = diverges_at(builder, submodel, case)
            assert found == "no module alone breaks the rule; rounding grows over the whole depth"


@pytest.mark.parametrize("submodel_id", ["ffn32-heads2", "ffn16-heads1"])
def test_damage_to_any_weight_is_found_in_the_module_that_owns_it(builder: EngineBuilder, submodel_id: str) -> None:
    submodel, path = builder.universal.spec.parse(submodel_id), builder.stage.folder / WEIGHTS_NAME
    sound = path.read_bytes()
    for name in builder.store:
        damage(builder, name)
        module = name.removesuffix(".T").rpartition(".")[0]
        assert diverges_at(builder, submodel).split(" (max abs ")[0] == module, name
        path.write_bytes(sound)


def test_damage_outside_the_submodels_prefix_does_not_touch_it(builder: EngineBuilder) -> None:
    spec, name = builder.universal.spec, "encoder.layer.1.intermediate.dense.bias"
    damage(builder, name, element=20)
    assert diverges_at(builder, spec.parse("ffn16")).startswith("no module")
    assert diverges_at(builder, spec.parse("ffn24")).startswith("encoder.layer.1.intermediate.dense (max abs ")


def test_the_first_of_several_is_named_and_nothing_is_left(builder: EngineBuilder) -> None:
    before = sorted(path.name for path in builder.stage.folder.iterdir())
    damage(builder, "pooler.dense.bias")
    damage(builder, "encoder.layer.0.attention.output.LayerNorm.bias")
    found = diverges_at(builder, builder.universal.spec.universal())
    assert found.startswith("encoder.layer.0.attention.output.LayerNorm (max abs ")
    assert sorted(path.name for path in builder.stage.folder.iterdir()) == before


def test_values_that_are_not_finite_diverge(builder: EngineBuilder) -> None:
    damage(builder, "encoder.layer.1.output.dense.bias", element=3, by=float("inf"))
    found = diverges_at(builder, builder.universal.spec.universal())
    assert found == "encoder.layer.1.output.dense (max abs inf)"


def test_the_reference_is_left_as_it_was(builder: EngineBuilder, tmp_path: Path) -> None:
    submodel = builder.universal.spec.parse("ffn16-heads1")
    reference = builder.references.of(submodel)
    divergence_of(builder, submodel, reference, 0)
    assert not any(part._forward_hooks for part in reference.module.modules())


FIGURES = ParityOutput("y", 0.5, 0.5, 0.9, 0.1, 0.0, 0.0)


def refusal(builder: EngineBuilder, verdict: Verdict) -> str | None:
    """The message about a sound engine under ``verdict``."""
    whole, cases = builder.universal.spec.universal(), builder.cases[BUCKET]
    engine = builder.emit("one", "one.onnx", whole, BUCKET)
    reference = builder.references.of(whole)
    outputs = JudgedOutputs(builder.bundle.manifest.outputs)
    run, found = ProofRun(engine.proof_graph, engine.template.module_outputs, builder.proofs.path), [{} for _ in cases]
    limit = tolerance_of(engine.entry, builder.universal)
    try:
        require_parity("engine one", verdict, run, reference, engine.entry, outputs, cases, found, limit, "the rule")
    except ParityError as failure:
        return str(failure)
    return None


def test_a_verdict_that_is_not_broken_is_let_through(builder: EngineBuilder) -> None:
    assert refusal(builder, Verdict((FIGURES,), None, None)) is None


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            Comparison(FIGURES, ("random-1",)),
            r"engine one: output y, case random-1: .*; allowed the rule; first to diverge: no module alone breaks the ",
        ),
        (
            BrokenRoute("whole", "routes, case whole: worse"),
            r"engine one: routes, .*; allowed the rule; first to diverge: no module; the route alone is wr",
        ),
        (Comparison(FIGURES, ("random-0",), True), r"engine one: output y, .* no comparison would prove anything$"),
    ],
)
def test_a_broken_one_says_where_it_leaves_pytorch(
    builder: EngineBuilder, broken: Comparison | BrokenRoute, message: str
) -> None:
    found = refusal(builder, Verdict((FIGURES,), None, broken))
    assert found is not None
    assert re.match(message, found), found
