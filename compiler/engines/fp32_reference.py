"""The universal model's float32 engine, in the working folder: what lower precisions are calibrated on and judged by.

A bundle need not have one; it is gone when the bundle is published.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry, Whole
from ...bundle.manifest import FileEntry
from ...bundle.open_bundle import Bundle
from ...errors import BuildError
from ...profiles.backends import ONNXRUNTIME
from ...profiles.precision import BLOCK_INPUTS, FOUR_BITS, PRECISIONS, Calibration, Precision
from ...runtime.consistency.samples import Batch
from ...runtime.inputs.arrays import Arrays
from ..examples.corpus import ArrayCorpus, Corpus, samples_of
from ..graph.encodings import split_encoding
from ..graph.precision.calibrate import calibrate, overflowing
from ..graph.precision.derive import exit_heads
from ..graph.precision.error_feedback import rounded, seen_moments
from ..graph.precision.fp32_nodes import fp32_products
from ..graph.store import read_store, share_store, stored_arrays, write_store
from ..graph.template import Template, emit, private_bytes
from ..parity.cases import Case
from ..work.clock import Clock
from ..work.staging import Stage
from ..work.tensor_file import write_tensors
from .templates import TemplateKey, Templates

_GRAPH_FILE = "universal.onnx"
_FOLDER = "fp32-reference"
_ROUNDED_FILE = "int4.safetensors"


@dataclass(frozen=True)
class Fp32Reference:
    """``bundle`` holds the one ``engine``; ``graph`` is its file."""

    bundle: Bundle
    engine: EngineEntry
    template: Template
    graph: onnx.ModelProto


def build_fp32_reference(templates: Templates, stage: Stage, partial: Bundle) -> Fp32Reference:
    """The float32 engine at the bucket of the longest sequence, and of those the fewest rows."""
    universal = templates.universal
    whole, spec = universal.spec.universal(), universal.spec
    bucket = max(templates.profile.buckets, key=lambda bucket: (bucket.sequence, -bucket.batch))
    template = templates.get(TemplateKey(whole.at(bucket), whole.structure))
    folder = stage.work / _FOLDER
    folder.mkdir(exist_ok=True)
    files = write_store(universal, template.weights, template.tables, folder, once=stage.once)
    share_store(universal, files)  # of other precisions the bundle's store holds float32 weights in part alone
    store = read_store(files, spec)
    graph = emit(template, store, whole)
    (folder / _GRAPH_FILE).write_bytes(graph)
    source = universal.source
    engine = EngineEntry(
        id=f"{whole.id} in fp32",
        submodel=whole.id,
        bucket=whole.at(bucket),
        backend=ONNXRUNTIME.name,
        file=_GRAPH_FILE,
        emitted="traced",
        private_bytes=private_bytes(template, store),
        flops=0,
        moved_bytes=0,
        activation_bytes=0,
        kind=Whole(routing=source.routes(whole, whole.at(bucket)) or None),
    )
    listed = tuple(FileEntry(file.name, file.stat().st_size, sha256="") for file in files)
    bundle = replace(partial, path=folder, manifest=replace(partial.manifest, engines=(engine,), files=listed))
    return Fp32Reference(bundle, engine, template, onnx.ModelProto.FromString(graph))


def calibrated(
    templates: Templates,
    stage: Stage,
    reference: Fp32Reference,
    cases: Sequence[Case],
    corpus: Corpus | ArrayCorpus | None,
    clock: Clock,
) -> Templates:
    """``templates`` with the scales that their precisions need, and the weights of 4 bits, found on the part of
    ``corpus`` that calibrates; an interrupted compile finds them once. Without a corpus weights are rounded plainly,
    and ranges are those on the ``cases`` of the reference.

    Raises BuildError where a value would not fit a float16, or a layer sees nothing in all of ``corpus``.
    """
    precisions, engine = templates.profile.precisions, reference.engine
    samples = samples_of(corpus, "calibration", templates.universal.source.encoder)
    batches = [] if samples is None else list(samples.batches(reference.bundle.manifest, engine.bucket))
    feeds = [batch.feeds for batch in batches]
    for precision in _needing("range", precisions):
        shown = feeds or [case.feeds for case in cases]
        _refuse_overflow(templates, reference, precision, shown)
    in_fp32 = fp32_products(reference.template.proto, exit_heads(templates.universal.source, None))
    counted = [_whole(batch, engine.bucket) for batch in batches]
    in_4_bits = [precision for precision in precisions if PRECISIONS[precision].encoding in FOUR_BITS]
    if in_4_bits and feeds:
        names = {name for one in in_4_bits for name in templates.derived(reference.template, one, None).weights}
        seen = partial(seen_moments, reference.graph, reference.bundle.path, feeds, in_fp32, counted, names)
        of_4_bits = len({plain for plain, encoding in map(split_encoding, names) if encoding in FOUR_BITS})

        def write(path: Path) -> None:
            tick = partial(clock.reach, total=of_4_bits)
            write_tensors(rounded(seen(), templates.universal.stored(), names, tick), path)

        path = stage.once(stage.work / _ROUNDED_FILE, write)
        templates = replace(templates, rounded=stored_arrays([path], templates.universal.spec, *BLOCK_INPUTS))
    if not _needing("scales", precisions):
        return templates

    def found() -> dict[str, float]:
        return calibrate(reference.graph, reference.bundle.path, feeds, in_fp32, counted)

    return replace(templates, scales=stage.memo("scales", dict[str, float], found))


def _needing(calibration: Calibration, precisions: Sequence[Precision]) -> list[Precision]:
    return [precision for precision in precisions if PRECISIONS[precision].calibration == calibration]


def _whole(batch: Batch, bucket: Bucket) -> np.ndarray:
    """Which positions of what the engine takes are those of samples, bool ``[B, S]``."""
    shape = bucket.filled(Bucket(*batch.counted.shape))
    counted = np.zeros((shape.batch, shape.sequence), bool)
    counted[: batch.rows] = batch.counted
    return counted


def _refuse_overflow(
    templates: Templates, reference: Fp32Reference, precision: Precision, feeds: Sequence[Arrays]
) -> None:
    low = templates.derived(reference.template, precision, None)
    for name, largest in overflowing(reference.graph, low.proto, reference.bundle.path, feeds).items():
        modules = [module for module, value in reference.template.module_outputs.items() if value == name]
        kind = "weight" if name in reference.template.external else "value"
        where = max(modules, key=len) if modules else f"{kind} {name}"
        raise BuildError(
            f"precision {precision}: {where} reaches {largest:.4g}, and a float16 ends at 65504; use fp32, or "
            "for TensorRT bf16, which has the range of float32"
        )
