"""Engines broken on purpose, and what the gate says of them: by its rule, and by the one that knew no conditioning.

``python -m support.gate_faults`` in tests prints the tables of docs/decisions/0017 and 0020.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import WEIGHTS_NAME
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.engines.emitted import Emitted
from nestforge.compiler.engines.templates import Templates
from nestforge.compiler.parity.cases import Case
from nestforge.compiler.parity.engine_verdict import judge_engine, tolerance_of
from nestforge.compiler.parity.judge import Replayed, Verdict
from nestforge.compiler.parity.reference import replayed
from nestforge.compiler.work.staging import Stage
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.runtime.inputs.arrays import Arrays
from onnx import numpy_helper
from support.tiny_compile import board, builder_in

FAULTS = ("bias dropped", "epsilon changed", "heads swapped", "mask position wrong")
_BIASES = ("attention.output.dense.bias", "output.dense.bias", "o_proj.bias", "mlp.fc2.bias", "down.bias", "up.bias")
_QUERIES = ("query.weight", "q_proj.weight", "query.weight.T", "q_proj.weight.T")


@dataclass(frozen=True)
class Subject:
    """One universal engine with its reference on every case."""

    builder: EngineBuilder
    engine: Emitted
    cases: list[Case]
    reference: Replayed

    def outputs(self, hidden: bool = False) -> list[Arrays]:
        """What the engine answers; with ``hidden``, one position that counts is taken for one that does not."""
        mask = self.builder.universal.source.signature.mask
        feeds = [{name: array.copy() for name, array in case.feeds.items()} for case in self.cases]
        for arrays in feeds if hidden and mask else ():
            row = int(np.argmax(arrays[mask].sum(axis=1)))
            places = np.flatnonzero(arrays[mask][row])
            if len(places) > 1:
                arrays[mask][row, places[-1]] = 0
        return self.builder.run(self.engine.entry, feeds)

    def judged(self, found: list[Arrays]) -> Verdict:
        """By today's rule."""
        manifest, universal = self.builder.bundle.manifest, self.builder.universal
        return judge_engine(manifest, universal, self.engine.entry, self.cases, self.reference, found)

    def was_passed(self, found: list[Arrays]) -> bool:
        """By the rule before: against PyTorch's float32, without rms, and without its own error."""
        universal = self.builder.universal
        limit, specs = tolerance_of(self.engine.entry, universal), universal.source.signature.outputs
        for case, arrays in zip(self.cases, found, strict=True):
            with torch.no_grad():
                inputs = [torch.from_numpy(array) for array in case.feeds.values()]
                tensors = self.builder.universal.module(*inputs)
            float32 = {spec.name: tensor.numpy() for spec, tensor in zip(specs, tensors, strict=True)}
            wanted, got = case.read(float32, specs), case.read(arrays, specs)
            for name, reference in wanted.items():
                r, f = reference.astype(np.float64).ravel(), got[name].astype(np.float64).ravel()
                scale = max(1.0, float(np.sqrt(np.mean(r * r))))
                if not (np.abs(f - r) <= limit.atol * scale + limit.rtol * np.abs(r)).all():
                    return False
                if name != "entropy" and not r @ f >= limit.min_cosine * np.linalg.norm(r) * np.linalg.norm(f):
                    return False
        return True

    def broken(self, fault: str) -> list[Arrays] | None:
        """What the engine answers with a ``fault``; None where the model has nothing of the kind."""
        if fault == "mask position wrong":
            return self.outputs(hidden=True) if self.builder.universal.source.signature.mask else None
        return self._with_graph(_other_epsilons) if fault == "epsilon changed" else self._with_weights(fault)

    def _with_graph(self, change: Callable[[onnx.ModelProto], bool]) -> list[Arrays] | None:
        folder, entry = self.builder.proofs.path, self.engine.entry
        model = onnx.load(folder / entry.file, load_external_data=False)
        if not change(model):
            return None
        (folder / "broken.onnx").write_bytes(model.SerializeToString())
        return replace(self, engine=replace(self.engine, entry=replace(entry, file="broken.onnx"))).outputs()

    def _with_weights(self, fault: str) -> list[Arrays] | None:
        ends = _BIASES if fault == "bias dropped" else _QUERIES
        names = [name for end in ends for name in self.builder.store if name.endswith(end)]
        if not names:
            return None
        path, stored = self.builder.stage.folder / WEIGHTS_NAME, self.builder.store[names[0]]
        sound = path.read_bytes()
        size = int(np.prod(stored.shape))
        array = np.frombuffer(sound, np.float32, size, stored.offset).reshape(stored.shape).copy()
        if fault == "bias dropped":
            array[:] = 0
        else:
            rows = array.T if names[0].endswith(".T") else array  # the first rows are those of the first head
            heads = self.builder.universal.source.checkpoint.config["num_attention_heads"]
            head = len(rows) // (heads[0] if isinstance(heads, list) else heads)
            rows[:] = np.concatenate([rows[head : 2 * head], rows[:head], rows[2 * head :]])
        raw = bytearray(sound)
        raw[stored.offset : stored.offset + 4 * size] = array.tobytes()
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
    builder = builder_in(folder / "stage", universal, template, profile, segments=False)
    engine, cases = builder.emit("engine", "engine.onnx", whole, bucket), list(builder.cases[bucket])
    found = builder.run(engine.entry, [case.feeds for case in cases])
    atol = tolerance_of(engine.entry, universal).atol
    reference = replayed(builder.references.of(whole), cases, engine.entry.routing, found, atol)
    return Subject(builder, engine, cases, reference)


def _other_epsilons(model: onnx.ModelProto) -> bool:
    """Ten times every epsilon, at least 1e-5: of layer norms, or the constant that is added to a mean of squares."""
    changed = False
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = max(10 * attribute.f, 1e-5)
                changed = True
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.data_type == onnx.TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor)
            if array.size == 1 and 0 < float(array.item()) < 1e-4:
                tensor.CopyFrom(numpy_helper.from_array(np.maximum(10 * array, np.float32(1e-5)), tensor.name))
                changed = True
    return changed


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


def subjects(folder: Path, only: Collection[str] | None = None) -> Iterator[tuple[str, Subject]]:
    """Every family, and models that amplify rounding; or those named ``only``."""
    from support.cost_eff_models import save_tiny
    from support.gated_decoders import OWN, save_decoder
    from support.tiny_matlm import save_tiny_matlm
    from support.tiny_mixer import save_tiny_mixer
    from support.tiny_models import save_tiny_encoder
    from support.tiny_vision import save_tiny_matvit, save_tiny_vit

    short, image = Bucket(2, 8), Bucket(2, 1)
    electra, llama = partial(save_tiny_encoder, model_type="electra"), partial(save_decoder, model_type="llama")
    wide = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024}
    models: dict[str, tuple[Callable[[Path], Path], Bucket, Callable[[UniversalModel], object] | None]] = {
        "bert": (save_tiny_encoder, short, None),
        "roberta": (partial(save_tiny_encoder, model_type="roberta"), short, None),
        "electra": (electra, short, None),
        "cost-eff": (save_tiny, short, None),
        **{kind: (partial(save_decoder, model_type=kind), short, None) for kind in OWN},
        "matformer LM": (save_tiny_matlm, short, None),
        "matformer ViT": (save_tiny_matvit, image, None),
        "vit": (save_tiny_vit, image, None),
        "sparse mixer": (save_tiny_mixer, Bucket(2, 16), None),
        "bert, gains x3": (save_tiny_encoder, short, gains(3)),
        "bert, gains x10": (save_tiny_encoder, short, gains(10)),
        "bert, gains x30": (save_tiny_encoder, short, gains(30)),
        "electra, unit embeddings": (electra, short, unit_embeddings),
        "bert 4x256, range 0.3": (partial(save_tiny_encoder, **wide), short, None),
        "llama, gains x3": (llama, short, gains(3)),
        "cost-eff, heads x1000": (save_tiny, short, unit_heads(1000)),
    }
    for name, (save, bucket, edit) in models.items():
        if only is None or name in only:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                yield name, subject(Path(scratch), save(Path(scratch) / "model"), bucket, edit)


@dataclass(frozen=True)
class Finding:
    """What two rules say of one engine. ``rms`` is what it is off by where it is furthest off, ``float32`` what PyTorch
    is off by there."""

    rms: float
    float32: float
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.rms:.0e}: {self.old}, {self.new}"


def findings(one: Subject) -> Mapping[str, Finding]:
    """The sound engine and every fault that the model can have."""
    broken = {fault: one.broken(fault) for fault in FAULTS}
    every = {"none": one.outputs()} | {fault: found for fault, found in broken.items() if found is not None}
    return {fault: _finding(one, found) for fault, found in every.items()}


def _finding(one: Subject, found: list[Arrays]) -> Finding:
    verdict = one.judged(found)
    worst = max(verdict.outputs, key=lambda output: output.max_rms or 0.0)
    new = "unprovable" if verdict.unprovable else "passes" if verdict.broken is None else "refused"
    old = "passes" if one.was_passed(found) else "refused"
    return Finding(worst.max_rms or 0.0, worst.float32_rms or 0.0, old, new)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        headings = ["model", "float32 off by", "sound", *FAULTS]
        sys.stdout.write(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}\n")
        for model_name, one_subject in subjects(Path(work), sys.argv[1:] or None):
            every_finding = findings(one_subject)
            cells = [str(every_finding.get(fault, "")) for fault in ("none", *FAULTS)]
            sys.stdout.write(f"| {model_name} | {every_finding['none'].float32:.0e} | {' | '.join(cells)} |\n")
            sys.stdout.flush()
