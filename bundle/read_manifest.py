"""Reading a manifest or a build record: strict JSON of a known schema, and everything that types alone do not say."""

import re
from collections.abc import Iterable
from itertools import chain
from math import prod
from typing import Any

from ..bucket import MAX_TOKENS, Bucket
from ..errors import BundleFormatError, PlanError
from ..outside_file import versioned_json
from ..profiles.backends import BACKENDS
from ..profiles.precision import PRECISIONS, in_precision
from ..strict import structure
from .build_record import BuildRecord, is_grid
from .check_parts import exit_problems, generation_problems, task_problems
from .entries.engine_entry import EngineEntry, Segment, Whole
from .entries.tensor_spec import MAX_ELEMENTS, RANGES, TensorSpec
from .files import unsealed, weight_problems
from .manifest import SCHEMA_VERSION, UNLISTED, Manifest
from .roles import role_problems

# A bundle of 64 submodels in 8 buckets writes about 2 MiB; parsed JSON takes some twenty times its bytes.
MAX_JSON_BYTES = 16 * 2**20
# Most kinds of axes of one model; a submodel's id names each of them.
MAX_KINDS = 64
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,254}")
_FIGURE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_manifest(raw: bytes, where: str) -> Manifest:
    """Parses a manifest. Raises BundleFormatError for anything this version cannot vouch for."""
    manifest = structure(Manifest, _versioned_json(raw, where), where, BundleFormatError)
    for problem in _problems(manifest):
        raise BundleFormatError(f"{where}: {problem}")
    return manifest


def read_build_record(raw: bytes, where: str, manifest: Manifest) -> BuildRecord:
    """Parses the build record of ``manifest``, and checks its seal.

    Raises BundleFormatError for anything this version cannot vouch for, BundleCorruptError for a wrong seal.
    """
    data = unsealed(raw, _versioned_json(raw, where), where, "fetch the bundle again, or compile it again")
    build = structure(BuildRecord, data, where, BundleFormatError)
    for problem in _build_problems(build, manifest):
        raise BundleFormatError(f"{where}: {problem}")
    return build


def _build_problems(build: BuildRecord, manifest: Manifest) -> Iterable[str]:
    """Latencies of engines that are none, two of one kind, and percentiles in the wrong order."""
    engines = {engine.id for engine in manifest.timed_engines}
    for latency in build.latencies:
        if latency.engine not in engines:
            yield f"latencies: engine {latency.engine[:80]!r} is not in the manifest"
        where, points = f"latencies of engine {latency.engine}", latency.points
        for point in points:
            p50, p95 = point.measured_p50_ms, point.measured_p95_ms
            if p95 is not None and (p50 is None or p50 > p95):
                yield f"{where}: measured_p95_ms {p95} below or without measured_p50_ms {p50}"
            if point.noise is not None and p50 is None:
                yield f"{where}: noise without measured_p50_ms"
        sizes = [(point.batch, point.sequence) for point in points]
        measured = [(point.batch, point.sequence) for point in points if point.measured_p50_ms is not None]
        if not (is_grid(sizes) and (is_grid(measured) or not measured)):
            yield f"{where}: points; expected every batch at every sequence once"
    yield from _repeated("latency of", (f"{one.engine} as {one.residency}" for one in build.latencies))


def is_plain_name(path: str) -> bool:
    """True for a file name that cannot leave its folder on any platform."""
    return _PLAIN_NAME.fullmatch(path) is not None


def _problems(manifest: Manifest) -> Iterable[str]:
    """Checks beyond the types: names confined to the folder, references that resolve, sane shapes."""
    files = [f.path for f in manifest.files]
    for entry in manifest.files:
        if not is_plain_name(entry.path):
            yield f"file {entry.path!r} may leave the bundle; expected a plain file name"
        if entry.path in UNLISTED:
            yield f"files lists {entry.path}, whose hash cannot be in the manifest"
        if not _SHA256.fullmatch(entry.sha256):
            yield f"file {entry.path}: sha256 {entry.sha256[:80]!r}; expected 64 lower-case hexadecimal digits"
    # Compared without case: on some file systems two such names are one file.
    yield from _repeated("file", (path.lower() for path in files))
    yield from weight_problems(manifest.weight_names)
    called = ((entry.id, *(label for label in entry.labels if label != entry.id)) for entry in manifest.submodels)
    yield from _repeated("submodel", chain.from_iterable(called))
    yield from _repeated("engine", (entry.id for entry in manifest.listed_engines))
    yield from _repeated("budget", (entry.name for entry in manifest.budgets))
    yield from _repeated("input", (entry.name for entry in manifest.inputs))
    yield from _repeated("output", (entry.name for entry in manifest.outputs))
    yield from _repeated("engine for", map(_place, manifest.every_engine))

    yield from _axis_problems(manifest)

    precisions = {entry.id: entry.precision for entry in manifest.submodels}
    for engine in manifest.every_engine:
        if engine.submodel not in precisions:
            yield f"engine {engine.id}: submodel {engine.submodel!r} is not in this manifest"
        if engine.parity is None:
            yield f"engine {engine.id}: has no parity receipt"
        if engine.backend not in PRECISIONS[engine.precision].backends:
            yield f"engine {engine.id}: {engine.backend} runs no engine in {engine.precision}"
        if engine.precision != precisions.get(engine.submodel, engine.precision):
            yield f"engine {engine.id}: in {engine.precision}; its submodel is in {precisions[engine.submodel]}"
        if engine.kind.needs not in (None, *BACKENDS[engine.backend].kinds):
            yield f"engine {engine.id}: {engine.backend} runs no engine of kind {engine.kind.name}"
        if engine.file not in files:
            yield f"engine {engine.id}: file {engine.file!r} is not among the files"
        if min(engine.bucket.batch, engine.bucket.sequence) < 1 or engine.bucket.tokens > MAX_TOKENS:
            yield f"engine {engine.id}: bucket {engine.bucket.label} is outside 1..{MAX_TOKENS} tokens"
        if not engine.bucket.is_static and BACKENDS[engine.backend].static_segments and manifest.exits is not None:
            yield f"engine {engine.id}: a range, which engines for {engine.backend} of a model with exits have not"
        for least, most in zip(_least(engine.bucket), (engine.bucket.batch, engine.bucket.sequence), strict=True):
            if least is not None and not 1 <= least < most:
                yield f"engine {engine.id}: bucket has a range {least}..{most}; expected one that rises from 1 or more"
    for engine in manifest.engines:
        if not isinstance(engine.kind, Whole | Segment):
            yield f"engine {engine.id}: of kind {engine.kind.name}; expected it among those of generation"
    for budget in manifest.budgets:
        if budget.submodel not in precisions:
            yield f"budget {budget.name}: submodel {budget.submodel!r} is not in this manifest"
    for submodel in manifest.submodels:
        quality = submodel.quality
        for figure in (*quality.figures, *(quality.errors or ())) if quality else ():
            if not _FIGURE_NAME.fullmatch(figure):
                yield f"submodel {submodel.id}: figure {figure[:80]!r}; expected a name such as mean_cosine"
    for spec in _specs(manifest):
        if any(d not in {"batch", "sequence"} if isinstance(d, str) else not 1 <= d <= MAX_ELEMENTS for d in spec.dims):
            yield f"tensor {spec.name}: dims {list(spec.dims)}; expected 'batch', 'sequence' or a positive number"
        low, high = RANGES[spec.dtype]
        if spec.high is not None:
            low, high = max(low, 0), min(high, spec.high - 1)
        if spec.pad is not None and not low <= spec.pad <= high:
            yield f"tensor {spec.name}: pad {spec.pad} is outside {low}..{high}"
        if spec.row_needs is not None and (spec.dims != ("batch", "sequence") or spec.dtype.startswith("float")):
            yield f"tensor {spec.name}: {spec.dtype} {list(spec.dims)} cannot have row_needs {spec.row_needs!r}"
    if manifest.ranking.order_file not in (None, *files):
        yield f"ranking: file {manifest.ranking.order_file!r} is not among the files"
    if (text := manifest.text) is not None:
        names = {spec.name for spec in manifest.inputs}
        if text.file not in files:
            yield f"text: file {text.file!r} is not among the files"
        for name in (text.ids, text.mask, text.type_ids, text.pooled, text.shifted):
            if name is not None and name not in names:
                yield f"text: {name!r} is not an input of this model"
        if (text.shifted is None) != (text.start is None):
            yield "text: shifted and start: expected both or neither"
        if text.default_prompt is not None and text.default_prompt not in (text.prompts or {}):
            yield f"text: default_prompt {text.default_prompt[:80]!r} is not among the prompts"
    known = {entry.id for entry in manifest.submodels}
    for receipt in manifest.texts:
        if receipt.submodel not in known:
            yield f"texts: submodel {receipt.submodel[:80]!r} is not in the manifest"
    if not manifest.engines or not manifest.inputs or not manifest.outputs:
        yield "expected at least one engine, one input and one output"
    yield from _routing_problems(manifest)
    yield from exit_problems(manifest)
    yield from generation_problems(manifest)
    yield from task_problems(manifest)
    yield from role_problems(manifest)
    yield from _size_problems(manifest)
    if manifest.tasks is not None and manifest.tasks.merged:
        yield from _problems(manifest.of_merged)


def _size_problems(manifest: Manifest) -> Iterable[str]:
    """Tensors that no host holds."""
    for engine in manifest.engines:
        for spec in chain(*manifest.interface_of(engine)):
            if prod(spec.shape(engine.bucket)) > MAX_ELEMENTS:
                yield f"engine {engine.id}: tensor {spec.name} has more than {MAX_ELEMENTS} elements"
    if manifest.exits and manifest.engines:
        # Rows of any bucket may be laid out at the length of any other.
        batch = max(engine.bucket.batch for engine in manifest.engines)
        steps = max(engine.bucket.sequence for engine in manifest.engines)
        if batch * steps > MAX_TOKENS:
            yield f"engines: {batch} rows of {steps} steps, over all buckets, are more than {MAX_TOKENS} tokens"


def _place(engine: EngineEntry) -> str:
    part = engine.submodel if engine.segment is None else f"{engine.submodel}, segment {engine.segment}"
    room = "" if engine.capacity is None else f", capacity {engine.capacity}"
    return f"{part} at {engine.bucket.label}, {engine.backend}{room}"


def _least(bucket: Bucket) -> tuple[int | None, int | None]:
    return bucket.min_batch, bucket.min_sequence


def _specs(manifest: Manifest) -> Iterable[TensorSpec]:
    yield from (*manifest.inputs, *manifest.outputs)
    for segment in manifest.exits.segments if manifest.exits else ():
        yield from (*segment.inputs, *segment.outputs)


def _routing_problems(manifest: Manifest) -> Iterable[str]:
    """Routes that no engine can return, and receipts of other ones."""
    for engine in manifest.every_engine:
        entries = engine.routing or ()
        tensors = [spec.name for specs in manifest.interface_of(engine) for spec in specs]
        yield from _repeated(f"engine {engine.id}: tensor", (*dict.fromkeys(tensors), *(e.name for e in entries)))
        for entry in entries:
            if not entry.shape or any(not 1 <= size <= MAX_ELEMENTS for size in entry.shape):
                yield f"engine {engine.id}: route {entry.name}: shape {list(entry.shape)}; expected positive numbers"
        receipts = (engine.parity.routing if engine.parity else None) or ()
        proven, returned = [receipt.name for receipt in receipts], [entry.name for entry in entries]
        if proven != returned:
            yield f"engine {engine.id}: receipt of routes {proven[:8]}; it returns {returned[:8]}"
        for receipt in receipts:
            if receipt.differing > receipt.made:
                yield f"engine {engine.id}: route {receipt.name}: {receipt.differing} of {receipt.made} differ"


def _axis_problems(manifest: Manifest) -> Iterable[str]:
    """Axes that cannot be, and submodels that do not lie on them."""
    yield from _repeated("axis", (axis.name for axis in manifest.axes))
    for axis in manifest.axes:
        if not 1 <= axis.size <= MAX_ELEMENTS:
            yield f"axis {axis.name}: size {axis.size} is outside 1..{MAX_ELEMENTS}"
        choices = axis.choices
        if choices is not None and (
            list(choices) != sorted(set(choices), reverse=axis.falls)
            or not choices
            or not all(1 <= choice <= MAX_ELEMENTS for choice in choices)
            or choices[-1] != axis.size
        ):
            expected = f"rising or falling numbers, from 1 on, up or down to {axis.size}"
            yield f"axis {axis.name}: choices {list(choices)[:80]}; expected {expected}"
        if axis.min_depth is not None and not (axis.layer is not None and 1 <= axis.min_depth <= MAX_ELEMENTS):
            yield f"axis {axis.name}: min_depth {axis.min_depth}; expected one of a layer, of at least 1"
    spec, precisions = manifest.spec, [entry.precision for entry in manifest.submodels]
    if len(spec.kinds) > MAX_KINDS:
        yield f"axes are of {len(spec.kinds)} kinds, more than the {MAX_KINDS} allowed"
        return
    for entry in manifest.submodels:
        try:
            submodel = in_precision(spec.from_kinds(entry.values), entry.precision, precisions)
        except PlanError as problem:
            yield f"submodel {entry.id}: {problem}"
            continue
        values = {kind: tuple(widths) for kind, widths in submodel.by_kind().items()}
        if entry.values != values:  # from_kinds completes what is left out; a manifest leaves nothing out
            missing = next(kind for kind in values if entry.values.get(kind) != values[kind])
            yield f"submodel {entry.id}: values of {missing}; expected one for each of {len(values[missing])} axes"
        elif entry.id != submodel.id:
            yield f"submodel {entry.id}: its values and precision are those of {submodel.id}"


def _repeated(what: str, names: Iterable[str]) -> Iterable[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"{what} {name!r} stands twice"
        seen.add(name)


def _versioned_json(raw: bytes, where: str) -> dict[str, Any]:
    if len(raw) > MAX_JSON_BYTES:
        raise BundleFormatError(f"{where}: {len(raw)} bytes, more than the {MAX_JSON_BYTES} allowed")
    return versioned_json(raw, SCHEMA_VERSION, where, "compile again", BundleFormatError)
