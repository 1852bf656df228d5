"""The models and bundles that benchmarks run on, made once under ``.cache/bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from ..bucket import Bucket
from ..bundle.files import weights_in
from ..bundle.open_bundle import open_bundle
from ..compiler.compile import compile_bundle
from ..compiler.graph.make_template import traced_template
from ..compiler.graph.store import Store, read_store, write_store
from ..compiler.graph.template import Template, emit, load_template, save_template
from ..examples.encoder.corpus import demo_checkpoint
from ..exporters.source import open_source
from ..exporters.universal import UniversalModel, load_universal
from ..profiles.budget import BudgetSpec
from ..profiles.device_profile import DeviceProfile
from ..profiles.load_profile import load_profile
from ..profiles.probe_host import probe_host
from ..runtime.engines.runner import Runner, runner_for
from ..runtime.inputs.arrays import random_feeds
from .harness import CACHE

BUCKET = Bucket(1, 128)
CORES = probe_host().cores
# Six even levels make 5 * 12 + 1 rungs of 12 layers; three more submodels make 64.
_SIXTHS = (1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0)
_BESIDE = ("ffn768-heads12", "ffn1536-heads12", "ffn3072-heads6")


@dataclass(frozen=True)
class Subject:
    """A model with its template and weight store, and the plain exports to compare with."""

    name: str
    folder: Path
    model: UniversalModel
    template: Template
    store: Store

    def engine(self, submodel: str) -> Path:
        """Our engine file of ``submodel``."""
        path = self.folder / f"{submodel}.onnx"
        path.write_bytes(emit(self.template, self.store, self.model.spec.parse(submodel)))
        return path

    def plain(self, submodel: str) -> Path:
        """The export of ``torch.onnx.export`` for ``submodel`` with its default options."""
        path = self.folder / f"plain-{submodel}.onnx"
        if not path.exists():
            export_plain(self, submodel, path)
        return path

    def feeds(self) -> dict[str, Any]:
        return random_feeds(self.model.source.signature.inputs, BUCKET)


def export_plain(subject: Subject, submodel: str, path: Path, free: Mapping[int, Any] | None = None) -> None:
    """The usual way: trace the narrowed module, save graph and weights; with the dimensions ``free`` of every input."""
    module = subject.model.narrow(subject.model.spec.parse(submodel))
    inputs = tuple(torch.from_numpy(array) for array in subject.feeds().values())
    names = [spec.name for spec in subject.model.source.signature.inputs]
    outputs = [spec.name for spec in subject.model.source.signature.outputs]
    shapes = None
    if free is not None:
        inputs, shapes = tuple(each.expand(2, -1) for each in inputs), (tuple(dict(free) for _ in inputs),)
    program = torch.onnx.export(
        *(module, inputs), dynamo=True, input_names=names, output_names=outputs, dynamic_shapes=shapes, verbose=False
    )
    assert program is not None
    program.save(str(path), external_data=True)


def default_session(path: Path) -> Any:
    """A session as most people open one: default options, but for the number of threads that ours get too."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = CORES
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True)
class Packed:
    """An open packed engine of a bundle, and inputs for it."""

    runner: Runner
    feeds: dict[str, Any]


@contextmanager
def packed(bundle: Path, submodel: str, bucket: Bucket = BUCKET) -> Iterator[Packed]:
    """The bundle's engine of ``submodel`` at ``bucket``, as the runtime opens it packed."""
    opened = open_bundle(bundle)
    engine = next(e for e in opened.manifest.engines if e.submodel == submodel and e.bucket == bucket)
    with runner_for(opened, engine, "packed", CORES) as runner:
        yield Packed(runner, random_feeds(opened.manifest.inputs, engine.bucket))


def eager_call(module: torch.nn.Module, feeds: Mapping[str, Any]) -> Callable[[], object]:
    """A call of PyTorch eager on the same inputs, by position, with as many threads as engines get."""
    torch.set_num_threads(CORES)
    tensors = [torch.from_numpy(array) for array in feeds.values()]

    def call() -> object:
        with torch.inference_mode():
            return module(*tensors)

    return call


@cache
def bert_base() -> Subject:
    """BERT-base's shape (12 x 768, FFN 3072) with random weights."""
    return _subject("bert-base", bert_base_folder())


@cache
def minilm() -> Subject:
    """The real all-MiniLM-L6-v2."""
    return _subject("minilm", demo_checkpoint())


def bert_base_folder() -> Path:
    import transformers

    folder = CACHE / "bert-base-checkpoint"
    if not folder.exists():
        torch.manual_seed(0)
        transformers.BertModel(transformers.BertConfig()).save_pretrained(folder)
    return folder


def bert_base_bundle() -> Path:
    """64 submodels of BERT-base at one bucket, compiled and verified as users do (some minutes, once)."""
    path = CACHE / "bert-base.bundle"
    if not path.exists():
        levels = {"ffn": _SIXTHS, "heads": _SIXTHS}
        compile_bundle(bert_base_folder(), elsewhere(), path, levels=levels, submodels=_BESIDE, include="ladder")
    return path


def minilm_bundle() -> Path:
    """Every rung of MiniLM's default ladder, compiled for this host."""
    path = CACHE / "minilm.bundle"
    if not path.exists():
        compile_bundle(demo_checkpoint(), "host-cpu", path, include="ladder", buckets=(Bucket(1, 32), BUCKET))
    return path


def minilm_range_bundle() -> Path:
    """The whole MiniLM, one engine for up to 32 texts of up to 512 tokens."""
    path = CACHE / "minilm-range.bundle"
    if not path.exists():
        device = replace(elsewhere(), buckets=(Bucket(32, 512, 1, 1),), budgets={"full": BudgetSpec()})
        compile_bundle(demo_checkpoint(), device, path, include="budgets")
    return path


def tiny_bundle() -> Path:
    """Levels of a 2-layer encoder with random weights, small enough that its engines fit the caches together."""
    import transformers

    path = CACHE / "tiny.bundle"
    if not path.exists():
        folder = CACHE / "tiny-checkpoint"
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
        )
        transformers.BertModel(config).save_pretrained(folder)
        compile_bundle(folder, replace(elsewhere(), buckets=(Bucket(1, 32),)), path)
    return path


def elsewhere() -> DeviceProfile:
    """A profile that is not of this host, so that 64 engines are built and verified but not timed."""
    return replace(load_profile("laptop-x86"), buckets=(BUCKET,), cores=CORES)


def _subject(name: str, checkpoint: Path) -> Subject:
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    model = load_universal(open_source(checkpoint))
    template = folder / "template.onnx"
    if not weights_in(folder):
        traced = traced_template(model, model.module, model.source.signature, BUCKET, opset=20)
        save_template(traced, template)
        write_store(model, traced.weights, traced.tables, folder)
    return Subject(name, folder, model, load_template(template), read_store(weights_in(folder), model.spec))
