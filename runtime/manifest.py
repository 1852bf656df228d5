"""The manifest and the build record of a bundle, as docs/bundle-format.md specifies them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..elastic import Axis, Bucket, ElasticSpec
from ..errors import BundleFormatError, PlanError, SelectionError
from ..strict import structure

# 1 (2026-11): first published schema.
SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
BUILD_NAME = "build.json"
REPORT_NAME = "report.md"
WEIGHTS_NAME = "weights.safetensors"
# A bundle of 64 submodels in 8 buckets writes about 2 MiB; parsed JSON takes some twenty times its bytes.
MAX_JSON_BYTES = 16 * 2**20
MAX_ELEMENTS = 2**31
# The whole numbers that an array of each dtype holds.
_RANGES = {
    "float32": (-(2**63), 2**63 - 1),
    "float16": (-65504, 65504),
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "bool": (0, 1),
}
DTYPES = tuple(_RANGES)
# Of one model; a submodel's id names each of them.
MAX_KINDS = 64
# The hashes of these cannot stand in the manifest: it is one of them, and the others name its hash or follow it.
UNLISTED = (MANIFEST_NAME, BUILD_NAME, REPORT_NAME)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,254}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle; ``path`` is a plain file name, without folders."""

    path: str
    bytes: int = field(metadata={"min": 0})
    sha256: str


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of an engine.

    ``dims`` names each dimension: ``batch`` and ``sequence`` follow the bucket, a number is fixed. ``pad`` is the value
    that fills an input up to its bucket; an input without one cannot be padded. ``high`` bounds a whole-number input
    to ``0 <= value < high``: the vocabulary size for token ids, 2 for a mask.
    """

    name: str
    dtype: str = field(metadata={"choices": DTYPES})
    dims: tuple[str | int, ...]
    pad: int | None = None
    high: int | None = field(default=None, metadata={"min": 1})

    def shape(self, bucket: Bucket) -> tuple[int, ...]:
        """Static shape at ``bucket``."""
        sizes = {"batch": bucket.batch, "sequence": bucket.sequence}
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)


@dataclass(frozen=True)
class ParityOutput:
    """Worst figures of one output over all parity cases."""

    name: str
    max_abs: float
    max_rel: float
    min_cosine: float


@dataclass(frozen=True)
class ParityReceipt:
    """Proof that an engine equals the PyTorch submodel: the rule and its limits, the cases and the worst figures."""

    reference: str
    rule: str
    atol: float
    rtol: float
    min_cosine: float
    cases: tuple[str, ...]
    outputs: tuple[ParityOutput, ...]
    graph_sha256: str
    weights_sha256: str
    difference_to_universal: float | None = None


@dataclass(frozen=True)
class Quality:
    """Agreement of a text encoder's submodel with the universal model on held-out text."""

    texts: int
    mean_cosine: float
    recall_at_10: float
    data_sha256: str


@dataclass(frozen=True)
class SubmodelEntry:
    """One submodel: its axis values per kind, one per layer, and what does not depend on the bucket.

    ``weight_bytes`` counts what its engines read of the weight store.
    """

    id: str
    labels: tuple[str, ...]
    values: Mapping[str, tuple[int, ...]]
    parameters: int = field(metadata={"min": 0})
    weight_bytes: int = field(metadata={"min": 0})
    quality: Quality | None = None


@dataclass(frozen=True)
class EngineEntry:
    """One submodel at one bucket, as a file that a backend runs, with its analytic costs.

    ``private_bytes`` are the initializers inside the file, which no other engine shares. ``activation_bytes`` estimates
    what a run takes beside the weights: eight times the operands of its largest product. ``slice_problem`` says why an
    engine was traced. Only an engine that is still being built has no ``parity``.
    """

    id: str
    submodel: str
    bucket: Bucket
    backend: Literal["onnxruntime", "tensorrt"]
    file: str
    emitted: Literal["sliced", "traced"]
    private_bytes: int = field(metadata={"min": 0})
    flops: int = field(metadata={"min": 0})
    moved_bytes: int = field(metadata={"min": 0})
    activation_bytes: int = field(metadata={"min": 0})
    slice_problem: str | None = None
    parity: ParityReceipt | None = None


@dataclass(frozen=True)
class Limits:
    """Limits of one budget, resolved to absolute units. ``None`` is no limit."""

    latency_ms: float | None = None
    memory_mb: float | None = None
    parameters: int | None = None
    flops: int | None = None


@dataclass(frozen=True)
class BudgetEntry:
    """A named budget, the submodel chosen for it, and why."""

    name: str
    limits: Limits
    submodel: str
    reason: str


@dataclass(frozen=True)
class TextEntry:
    """How text becomes inputs: a ``tokenizers`` file and the input each field of an encoding feeds."""

    file: str
    ids: str
    mask: str | None
    type_ids: str | None
    embedding: str | None


@dataclass(frozen=True)
class Ranking:
    """How the elastic axes were ordered at import."""

    method: Literal["none", "magnitude", "taylor"]
    data_sha256: str | None = None
    texts: int | None = None
    order_sha256: str | None = None


@dataclass(frozen=True)
class Provenance:
    """Where the bundle comes from: enough to make it again."""

    tools: Mapping[str, str]
    source: tuple[FileEntry, ...]
    profile: Mapping[str, Any]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """Everything about a bundle that follows from its inputs; what was measured stands in the build record.

    For a profile of the compiling host itself, measured latencies are inputs to its budgets. ``notes`` state what was
    rounded, and what is unusual about submodels that were asked for by id.
    """

    schema_version: int
    name: str
    family: str
    axes: tuple[Axis, ...]
    trained_nested: bool
    ranking: Ranking
    submodels: tuple[SubmodelEntry, ...]
    engines: tuple[EngineEntry, ...]
    budgets: tuple[BudgetEntry, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    files: tuple[FileEntry, ...]
    provenance: Provenance
    text: TextEntry | None = None
    notes: tuple[str, ...] = ()

    def submodel(self, submodel_id: str) -> SubmodelEntry:
        """The submodel with this id or label. Raises SelectionError listing what exists."""
        for entry in self.submodels:
            if submodel_id == entry.id or submodel_id in entry.labels:
                return entry
        known = ", ".join(f"{e.id} ({'/'.join(e.labels)})" if e.labels else e.id for e in self.submodels)
        raise SelectionError(f"no submodel {submodel_id!r} in this bundle; it has {known}")


@dataclass(frozen=True)
class Latency:
    """Predicted and measured time of one engine, in milliseconds, never mixed: the field name says which.

    ``predicted_ms`` was stated before this engine was measured; for a profile of the compiling host itself it is
    corrected by a few measured rungs.
    """

    engine: str
    predicted_ms: float
    measured_p50_ms: float | None = None
    measured_p95_ms: float | None = None
    residency: str | None = None


@dataclass(frozen=True)
class BuildRecord:
    """What differs between two compiles of the same inputs: time, host, and everything measured."""

    schema_version: int
    manifest_sha256: str
    created: str
    command: tuple[str, ...]
    host: Mapping[str, Any]
    seconds: Mapping[str, float]
    latencies: tuple[Latency, ...]


def read_manifest(raw: bytes, where: str) -> Manifest:
    """Parses a manifest. Raises BundleFormatError for anything this version cannot vouch for."""
    manifest = structure(Manifest, _versioned_json(raw, where), where, BundleFormatError)
    for problem in _problems(manifest):
        raise BundleFormatError(f"{where}: {problem}")
    return manifest


def read_build_record(raw: bytes, where: str) -> BuildRecord:
    """Parses a build record. Raises BundleFormatError for anything this version cannot vouch for."""
    return structure(BuildRecord, _versioned_json(raw, where), where, BundleFormatError)


def is_plain_name(path: str) -> bool:
    """True for a file name that cannot leave its folder on any platform."""
    return _PLAIN_NAME.fullmatch(path) is not None


def _problems(manifest: Manifest) -> Iterable[str]:
    """What the types alone do not say: names confined to the folder, references that resolve, sane shapes."""
    files = [f.path for f in manifest.files]
    for entry in manifest.files:
        if not is_plain_name(entry.path):
            yield f"file {entry.path!r} may leave the bundle; expected a plain file name"
        if entry.path in UNLISTED:
            yield f"files lists {entry.path}, whose hash cannot stand in the manifest"
        if not _SHA256.fullmatch(entry.sha256):
            yield f"file {entry.path}: sha256 {entry.sha256[:80]!r}; expected 64 lower-case hexadecimal digits"
    # Compared without case: on some file systems two such names are one file.
    yield from _repeated("file", (path.lower() for path in files))
    yield from _repeated("submodel", (name for entry in manifest.submodels for name in (entry.id, *entry.labels)))
    yield from _repeated("engine", (entry.id for entry in manifest.engines))
    yield from _repeated("budget", (entry.name for entry in manifest.budgets))
    yield from _repeated("input", (entry.name for entry in manifest.inputs))
    yield from _repeated("output", (entry.name for entry in manifest.outputs))
    yield from _repeated("engine for", (f"{e.submodel} at {e.bucket.label}, {e.backend}" for e in manifest.engines))

    yield from _axis_problems(manifest)

    ids = {entry.id for entry in manifest.submodels}
    for engine in manifest.engines:
        if engine.submodel not in ids:
            yield f"engine {engine.id}: submodel {engine.submodel!r} is not in this manifest"
        if engine.parity is None:
            yield f"engine {engine.id}: has no parity receipt"
        if engine.file not in files:
            yield f"engine {engine.id}: file {engine.file!r} is not among the files"
        if min(engine.bucket.batch, engine.bucket.sequence) < 1 or engine.bucket.tokens > MAX_ELEMENTS:
            yield f"engine {engine.id}: bucket {engine.bucket.label} is outside 1..{MAX_ELEMENTS} tokens"
    for budget in manifest.budgets:
        if budget.submodel not in ids:
            yield f"budget {budget.name}: submodel {budget.submodel!r} is not in this manifest"
    for spec in (*manifest.inputs, *manifest.outputs):
        if any(d not in {"batch", "sequence"} if isinstance(d, str) else not 1 <= d <= MAX_ELEMENTS for d in spec.dims):
            yield f"tensor {spec.name}: dims {list(spec.dims)}; expected 'batch', 'sequence' or a positive number"
        low, high = _RANGES[spec.dtype]
        if spec.high is not None:
            low, high = max(low, 0), min(high, spec.high - 1)
        if spec.pad is not None and not low <= spec.pad <= high:
            yield f"tensor {spec.name}: pad {spec.pad} is outside {low}..{high}"
    if manifest.text:
        names = {spec.name for spec in manifest.inputs}
        if manifest.text.file not in files:
            yield f"text: file {manifest.text.file!r} is not among the files"
        for name in (manifest.text.ids, manifest.text.mask, manifest.text.type_ids):
            if name is not None and name not in names:
                yield f"text: {name!r} is not an input of this model"
    if not manifest.engines or not manifest.inputs or not manifest.outputs:
        yield "expected at least one engine, one input and one output"


def _axis_problems(manifest: Manifest) -> Iterable[str]:
    """Axes that cannot be, and submodels that do not lie on them."""
    yield from _repeated("axis", (axis.name for axis in manifest.axes))
    for axis in manifest.axes:
        if not 1 <= axis.size <= MAX_ELEMENTS:
            yield f"axis {axis.name}: size {axis.size} is outside 1..{MAX_ELEMENTS}"
    spec = ElasticSpec(manifest.axes, ())
    if len(spec.kinds) > MAX_KINDS:
        yield f"axes are of {len(spec.kinds)} kinds, more than the {MAX_KINDS} allowed"
        return
    for entry in manifest.submodels:
        try:
            submodel = spec.from_kinds(entry.values)
        except PlanError as problem:
            yield f"submodel {entry.id}: {problem}"
            continue
        values = {kind: tuple(widths) for kind, widths in submodel.by_kind().items()}
        if entry.values != values:  # from_kinds completes what is left out; a manifest leaves nothing out
            missing = next(kind for kind in values if entry.values.get(kind) != values[kind])
            yield f"submodel {entry.id}: values of {missing}; expected one for each of {len(values[missing])} axes"
        elif entry.id != submodel.id:
            yield f"submodel {entry.id}: its values are those of {submodel.id}"


def _repeated(what: str, names: Iterable[str]) -> Iterable[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"{what} {name!r} stands twice"
        seen.add(name)


def _versioned_json(raw: bytes, where: str) -> object:
    if len(raw) > MAX_JSON_BYTES:
        raise BundleFormatError(f"{where}: {len(raw)} bytes, more than the {MAX_JSON_BYTES} allowed")
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as failure:
        raise BundleFormatError(f"{where}: not JSON ({failure})") from failure
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise BundleFormatError(
            f"{where}: schema_version {str(version)[:80]!r}, expected {SCHEMA_VERSION}; "
            "open it with the nestforge release that wrote it, or compile again"
        )
    return data


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError(f"a key stands twice among {', '.join(key for key, _ in pairs)[:80]}")
    return table


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
