"""The gate on whole engines: right ones pass however much their model amplifies rounding, broken ones never do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.engines.templates import Templates
from nestforge.compiler.graph.template import Emitted
from nestforge.compiler.parity.cases import Case
from nestforge.compiler.parity.engine_verdict import judge_engine, tolerance_of
from nestforge.compiler.parity.judge import Replayed, Verdict
from nestforge.compiler.parity.reference import replayed
from nestforge.compiler.work.staging import Stage
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.runtime.inputs.arrays import Arrays
from onnx import numpy_helper
from support.cost_eff_models import save_tiny
from support.tiny_compile import BUCKET, board, builder_in, save_tiniest
from support.tiny_models import save_tiny_encoder

# Cases in which every fault is found, of the five in which a right engine passes.
FEW = 2
FAULTS = ("bias dropped", "epsilon changed", "heads swapped", "mask position wrong")
_BIASES = ("attention.output.dense.bias", "output.dense.bias")
_QUERIES = ("query.weight", "query.weight.T", "query.weight.fp16", "query.weight.T.fp16")


@dataclass(frozen=True)
class Subject:
    """One universal engine with its reference on every case."""

    builder: EngineBuilder
    engine: Emitted
    cases: list[Case]
    reference: Replayed

    def outputs(self, hidden: bool = False) -> list[Arrays]:
        """The engine's answers; with ``hidden``, the mask hides one position that counts."""
        feeds = [{name: array.copy() for name, array in case.feeds.items()} for case in self.cases]
        for mask in [arrays["attention_mask"] for arrays in feeds] if hidden else ():
            row = int(np.argmax(mask.sum(axis=1)))
            places = np.flatnonzero(mask[row])
            if len(places) > 1:
                mask[row, places[-1]] = 0
        return self.builder.run(self.engine.entry, feeds)

    def on(self, cases: list[Case]) -> Subject:
        reference = self.builder.references.of(self.builder.universal.spec.universal())
        return replace(self, cases=cases, reference=replayed(reference, cases))

    def looked_at(self) -> Subject:
        """As of a large model: PyTorch answers in float32, and in float64 where that leaves a doubt."""
        module = self.builder.references.of(self.builder.universal.spec.universal())
        names = {case.name for case in self.cases}
        return replace(self, reference=replayed(module, self.cases, in_float32=names))

    def of_cases(self, count: int) -> Subject:
        """On the first cases alone."""
        return replace(self, cases=self.cases[:count], reference=self.reference.at(range(count)))

    def judged(self, found: list[Arrays]) -> Verdict:
        manifest, universal = self.builder.bundle.manifest, self.builder.universal
        return judge_engine(manifest, universal, self.engine.entry, self.cases, self.reference, found)

    def broken(self, fault: str) -> list[Arrays]:
        """Answers with a ``fault``."""
        if fault == "mask position wrong":
            return self.outputs(hidden=True)
        return self._with_other_epsilons() if fault == "epsilon changed" else self._with_weights(fault)

    def _with_other_epsilons(self) -> list[Arrays]:
        folder, entry = self.builder.proofs.path, self.engine.entry
        model = onnx.load(folder / entry.file, load_external_data=False)
        _change_epsilons(model)
        (folder / "broken.onnx").write_bytes(model.SerializeToString())
        return replace(self, engine=replace(self.engine, entry=replace(entry, file="broken.onnx"))).outputs()

    def _with_weights(self, fault: str) -> list[Arrays]:
        ends = _BIASES if fault == "bias dropped" else _QUERIES
        names = [name for end in ends for name in self.builder.store if name.endswith(end)]
        path, stored = self.builder.stage.folder / WEIGHTS_NAME, self.builder.store[names[0]]
        sound = path.read_bytes()
        size, dtype = int(np.prod(stored.shape)), np.float16 if names[0].endswith(".fp16") else np.float32
        array = np.frombuffer(sound, dtype, size, stored.offset).reshape(stored.shape).copy()
        if fault == "bias dropped":
            array[:] = 0
        else:
            rows = array.T if ".T" in names[0] else array  # the first rows are those of the first head
            heads = self.builder.universal.source.checkpoint.config["num_attention_heads"]
            head = len(rows) // (heads[0] if isinstance(heads, list) else heads)
            rows[:] = np.concatenate([rows[head : 2 * head], rows[:head], rows[2 * head :]])
        raw = bytearray(sound)
        raw[stored.offset : stored.offset + array.nbytes] = array.tobytes()
        path.write_bytes(raw)
        try:
            return self.outputs()
        finally:
            path.write_bytes(sound)


def subject(folder: Path, model: Path, bucket: Bucket, edit: Callable[[UniversalModel], object] | None) -> Subject:
    """The universal engine of ``model``, whose weights ``edit`` changes first."""
    universal = load_universal(open_source(model))
    if edit is not None:
        edit(universal)
    profile = board(buckets=[bucket.label], budgets={"full": {}})
    whole = universal.spec.universal()
    template = Templates(universal, Stage(folder / "trace", folder / "trace work"), profile).traced(whole, bucket, None)
    return emitted(builder_in(folder / "stage", universal, template, profile, segments=False))


def emitted(builder: EngineBuilder) -> Subject:
    """The universal engine of a ``builder`` at its one bucket."""
    universal, (bucket,) = builder.universal, builder.profile.buckets
    whole = universal.spec.universal()
    engine, cases = builder.emit("engine", "engine.onnx", whole, bucket), list(builder.cases[bucket])
    found = builder.run(engine.entry, [case.feeds for case in cases])
    atol = tolerance_of(engine.entry, universal).atol
    reference = replayed(builder.references.of(whole), cases, engine.entry.routing, found, atol)
    return Subject(builder, engine, cases, reference)


def in_half_weights(one: Subject, folder: Path) -> Subject:
    """The same engine of the same trace with weights in float16, against PyTorch with the numbers that are stored, at
    the limits of fp32: the tight half of its gate."""
    universal, (template,) = one.builder.universal, one.builder.templates.known.values()
    profile = board(buckets=[template.bucket.label], budgets={"full": {}}, precision="fp16-weights")
    half = emitted(builder_in(folder, universal, template, profile))
    assert half.engine.entry.precision == "fp16-weights"
    stored = half.builder.engine_references.rounded(half.builder.proofs, half.engine.entry)
    reference = replayed(stored.of(universal.spec.universal()), half.cases)
    entry = replace(half.engine.entry, precision="fp32")
    return replace(half, engine=replace(half.engine, entry=entry), reference=reference)


def _change_epsilons(model: onnx.ModelProto) -> None:
    """Ten times every epsilon, at least 1e-5: of layer norms, or the constant that is added to a mean of squares."""
    changed = 0
    for attribute in (attribute for node in model.graph.node for attribute in node.attribute):
        if attribute.name == "epsilon":
            attribute.f = max(10 * attribute.f, 1e-5)
            changed += 1
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.data_type == onnx.TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor)
            if array.size == 1 and 0 < float(array.item()) < 1e-4:
                tensor.CopyFrom(numpy_helper.from_array(np.maximum(10 * array, np.float32(1e-5)), tensor.name))
                changed += 1
    assert changed


def gains(factor: float) -> Callable[[UniversalModel], object]:
    """Every norm's gain times ``factor``: differences grow by it in every layer."""

    def edit(universal: UniversalModel) -> None:
        for name, parameter in universal.parameters().items():
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.data *= factor

    return edit


def unit_embeddings(universal: UniversalModel) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in universal.parameters().items():
        if "embeddings" in name and "norm" not in name.lower():
            parameter.data = torch.randn(parameter.shape, generator=generator)


def unit_heads(factor: float) -> Callable[[UniversalModel], object]:
    """Exits whose logits are ``factor`` times as large."""

    def edit(universal: UniversalModel) -> None:
        for name, parameter in universal.parameters().items():
            if "exits." in name:
                parameter.data *= factor

    return edit


MODELS = {
    "bert, gains x3": (save_tiny_encoder, gains(3)),
    "electra, unit embeddings": (partial(save_tiny_encoder, model_type="electra"), unit_embeddings),
    "cost-eff, heads x1000": (save_tiny, unit_heads(1000)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_amplifies_rounding_passes_and_every_fault_of_it_is_found(name: str, tmp_path: Path) -> None:
    save, edit = MODELS[name]
    one = subject(tmp_path, save(tmp_path / "model"), BUCKET, edit)
    assert one.judged(one.outputs()).broken is None
    few = one.of_cases(FEW)
    looked = few.looked_at()
    assert looked.reference.in_float32 == {case.name for case in few.cases}
    assert looked.judged(looked.outputs()).broken is None
    for fault in FAULTS:
        found = few.broken(fault)
        verdict = few.judged(found)
        assert verdict.broken is not None, fault
        assert not verdict.unprovable, fault
        assert looked.judged(found).broken_cases == verdict.broken_cases, fault
    if name.startswith("bert"):
        half = in_half_weights(one, tmp_path / "half")
        assert half.judged(half.outputs()).broken is None
        few = half.of_cases(FEW)
        assert [fault for fault in FAULTS if few.judged(few.broken(fault)).broken is None] == []


def test_what_float32_cannot_compute_is_refused_by_name(tmp_path: Path) -> None:
    """Embeddings so far from 0 that what their norm leaves of them is below their last digit."""

    def move_away(universal: UniversalModel) -> None:
        universal.parameters()["embeddings.position_embeddings.weight"].data += 1e6

    one = subject(tmp_path, save_tiniest(tmp_path / "bert"), BUCKET, move_away)
    judgement = one.judged(one.outputs())
    assert judgement.unprovable
    assert "this model needs more than float32" in judgement.broken.describe()


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_every_mask_that_is_answered_is_answered_as_pytorch_does(decoder: bool, tmp_path: Path) -> None:
    """All masks of two rows of three; a third row fills the bucket, as the runtime does it."""
    model = save_tiniest(tmp_path / "bert", is_decoder=decoder)
    one = subject(tmp_path, model, Bucket(3, 3), None)
    first = one.cases[0].feeds
    lines = [line for line in product((0, 1), repeat=3) if (line[0] if decoder else any(line))]
    cases = []
    for number, pair in enumerate(product(lines, repeat=2)):
        feeds = {name: array.copy() for name, array in first.items()}
        for array in feeds.values():
            array[2] = 0
        feeds["attention_mask"][:2] = pair
        cases.append(Case(f"mask {number}", feeds, 2))
    every = one.on(cases)
    assert every.judged(every.outputs()).broken is None
    # Padding of the bucket reaches nobody.
    alone, other = every.outputs()[0], cases[0].feeds
    for array in other.values():
        array[2] = 1
    for name, array in one.builder.run(one.engine.entry, [other])[0].items():
        assert np.array_equal(array[:2], alone[name][:2]), name
