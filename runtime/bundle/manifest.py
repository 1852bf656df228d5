"""The manifest and the build record of a bundle, as docs/bundle-format.md specifies them (read_manifest.py reads)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from ...elastic import SEQUENCE, Axis, Bucket, ElasticSpec
from ...errors import InputError, PlanError, SelectionError
from ...profiles.precision import Precision
from ...strict import nearest
from .noise import Noise

# 1 (2026-11): first published schema. 2 (2026-11): exits, segments, proofs, axes with choices; reads 1.
# 3 (2026-11): figures of quality by what an output means, roles of outputs; reads 1 and 2.
# 4 (2026-11): routing of engines and receipts of it, metadata and variants of engines (keys `decisions`, `facts` and
# `forms`); reads 1, 2 and 3.
# 5 (2026-11): precision of engines; reads 1 to 4.
# 6 (2026-11): seals of the files that no manifest lists (seal.py); reads 1 to 5.
# 7 (2026-11): buckets that leave dimensions free, latencies by shape and with their noise; reads 1 to 6.
# 8 (2026-11): engines that keep keys and values in a cache, for generation; reads 1 to 7.
# 9 (2026-11): encoder-decoders: text that feeds both sides, encoders of generation; reads 1 to 8.
SCHEMA_VERSION = 9
SEALED_SINCE = 6
MANIFEST_NAME = "manifest.json"
BUILD_NAME = "build.json"
REPORT_NAME = "report.md"
WEIGHTS_NAME = "weights.safetensors"
RANKING_NAME = "ranking.safetensors"
PLANS_NAME = "plans.json"
CALIBRATION_NAME = "calibration.json"
MEASUREMENTS_NAME = "measurements.json"
# The whole numbers that an array of each dtype holds.
RANGES = {
    "float32": (-(2**63), 2**63 - 1),
    "float16": (-65504, 65504),
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "bool": (0, 1),
}
DTYPES = tuple(RANGES)
# What an output means: a vector of the input; logits of classes; logits of the token at each position (masked language
# models); logits of the token that follows each position (causal ones).
Role = Literal["embedding", "classes", "tokens", "next_tokens"]
# How an engine holds its weights, see residency.py.
Residency = Literal["shared", "packed", "mapped"]
# Of engines that keep keys and values in a cache: their ``segment``, and their dimensions that the caller chooses.
CACHED, CAPACITY, LOGIT_COUNT = "cached", "capacity", "answers"
# Of engines that read a prompt for a decoder, and the dimension of its tokens, which the caller chooses too.
ENCODER, SOURCE = "encoder", "source"
# Of one tensor, which no host holds.
MAX_ELEMENTS = 2**31
# What a mask ``[B, S]`` must have in every row.
RowNeed = Literal["token", "first_token"]
# The hashes of these cannot be in the manifest: it is one of them, and the others name its hash or follow it.
UNLISTED = (MANIFEST_NAME, BUILD_NAME, REPORT_NAME, PLANS_NAME, CALIBRATION_NAME, MEASUREMENTS_NAME)


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle; ``path`` is a plain file name, without folders."""

    path: str
    bytes: int = field(metadata={"min": 0})
    sha256: str


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of an engine.

    ``dims`` names each dimension: ``batch`` and ``sequence`` follow the bucket or, where it leaves them free, the
    request; a number is fixed, and any other name is the caller's to choose. ``pad`` is the value that fills an input
    up to its bucket; an input without one cannot be padded. ``high`` bounds a whole-number input to
    ``0 <= value < high``: the vocabulary size for token ids, 2 for a mask. ``role`` says what an output means, and so
    by what measure submodels are compared (runtime/bundle/roles.py); where no output has one, shapes decide.
    ``row_needs`` is stated of the mask that says which positions count, and says what every row must have for its
    answer to be defined: a ``token`` somewhere (attention over nothing is no number that implementations agree on), or
    one at the start, ``first_token``, where positions see only those before them.
    """

    name: str
    dtype: str = field(metadata={"choices": DTYPES})
    dims: tuple[str | int, ...]
    pad: int | None = None
    high: int | None = field(default=None, metadata={"min": 1})
    role: Role | None = None
    row_needs: RowNeed | None = None

    def shape(self, bucket: Bucket, others: Mapping[str, int] = MappingProxyType({})) -> tuple[int, ...]:
        """Shape at ``bucket``, the largest where it is a range, with the sizes of ``others`` by name."""
        sizes = {"batch": bucket.batch, "sequence": bucket.sequence, **others}
        return tuple([sizes[dim] if isinstance(dim, str) else dim for dim in self.dims])

    def declared(self, bucket: Bucket) -> tuple[str | int, ...]:
        """What an engine at ``bucket`` declares: a free dimension by its name."""
        sizes = {"batch": bucket.batch, "sequence": bucket.sequence}
        fixed = {name: size for name, size in sizes.items() if name not in bucket.free}
        return tuple(fixed.get(dim, dim) if isinstance(dim, str) else dim for dim in self.dims)


@dataclass(frozen=True)
class RoutingEntry:
    """Routes that an engine chooses on the way, such as which tokens each expert took: whole numbers (int64) of
    ``shape``, returned beside its outputs where they are asked for."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ParityOutput:
    """Worst figures of one output over all parity cases.

    ``float32_max_abs`` and ``float32_rms`` are what PyTorch's own float32 differs by from the reference, at most and as
    the root of the mean square; ``max_rms`` is the latter of the engine. Receipts before schema 6 lack the three.
    """

    name: str
    max_abs: float
    max_rel: float
    min_cosine: float
    max_rms: float | None = None
    float32_max_abs: float | None = None
    float32_rms: float | None = None


@dataclass(frozen=True)
class ParityRouting:
    """One tensor of routes over all parity cases, judged by the PyTorch submodel that was made to take them.

    Of ``made`` single choices ``differing`` are not PyTorch's own; ``worst_score_gap`` is by how much the worst of them
    is worse, in units of the score that decides. ``shares`` are means over the cases.
    """

    name: str
    made: int = field(metadata={"min": 0})
    differing: int = field(metadata={"min": 0})
    worst_score_gap: float = field(metadata={"min": 0, "key": "worst_margin"})
    shares: Mapping[str, float]


@dataclass(frozen=True)
class ParityReceipt:
    """Proof that an engine equals the PyTorch submodel: the rule and its limits, the cases and the worst figures.

    Of an engine with ``routing`` PyTorch took the engine's routes; their score gaps are at most ``atol``.
    """

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
    routing: tuple[ParityRouting, ...] | None = field(default=None, metadata={"key": "decisions"})
    rms: float | None = None


@dataclass(frozen=True)
class Quality:
    """Agreement of a submodel with the universal model on ``samples`` held-out texts or rows.

    ``figures`` are those of the model's outputs by name, with units and headings in runtime/bundle/figures.py;
    ``positions`` is how many of them the figures per position rest on, None where rows have none. ``errors`` are the
    standard errors of figures, since so few samples were drawn of all that there are.
    """

    samples: int = field(metadata={"min": 1})
    figures: Mapping[str, float]
    data_sha256: str
    positions: int | None = field(default=None, metadata={"min": 1})
    errors: Mapping[str, float] | None = field(default=None, metadata={"min": 0})


@dataclass(frozen=True)
class SubmodelEntry:
    """One submodel: its axis values per kind, one per layer, and what does not depend on the bucket.

    ``weight_bytes`` counts the parameters that its engines read of the weight store; tables come on top.
    """

    id: str
    labels: tuple[str, ...]
    values: Mapping[str, tuple[int, ...]]
    parameters: int = field(metadata={"min": 0})
    weight_bytes: int = field(metadata={"min": 0})
    quality: Quality | None = None

    @property
    def sequence(self) -> int | None:
        """What its engines have in the place of a bucket's sequence, of models that are another function at each."""
        return self.values[SEQUENCE][0] if self.values.get(SEQUENCE) else None

    def at(self, bucket: Bucket) -> Bucket:
        """The bucket that this submodel has in the place of ``bucket``."""
        return bucket if self.sequence is None else Bucket(bucket.batch, self.sequence, bucket.min_batch)


@dataclass(frozen=True)
class EngineEntry:
    """One submodel at one bucket, or one ``segment`` of it, as a file that a backend runs, with its analytic costs.

    Engines of one file are one engine: submodels that differ in depth alone share their segments. ``private_bytes`` are
    the initializers inside the file, which no other engine shares; ``weight_bytes`` is what a segment reads of the
    weight store, or a whole engine with tables there (any other reads its submodel's weights). ``activation_bytes``
    estimates what a run takes beside the weights: eight times the operands of its largest product. ``slice_problem``
    says why an engine was traced. Only an engine that is still being built has no ``parity``. ``routing`` are the
    routes that it returns after its outputs, in order; ``metadata`` are static numbers and words that no shape of it
    shows, such as the slots of an expert; ``variants`` say in which of several equal variants it computes what. Each of
    the three is None where there is nothing to say. ``precision`` is that of its products; which values it holds in
    others its graph says.
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
    segment: str | None = None
    weight_bytes: int | None = field(default=None, metadata={"min": 0})
    routing: tuple[RoutingEntry, ...] | None = field(default=None, metadata={"key": "decisions"})
    metadata: Mapping[str, int | str] | None = field(default=None, metadata={"key": "facts"})
    variants: Mapping[str, str] | None = field(default=None, metadata={"key": "forms"})
    precision: Precision = "fp32"

    def row_flops(self, sequence: int) -> int:
        """What a row of ``sequence`` steps costs: its share of the bucket, of a range also by its length. That counts
        attention as the longest row has it, so that a shorter one takes a little less."""
        length = self.bucket.nearest(Bucket(1, sequence)).sequence
        return self.flops * length // (self.bucket.sequence * self.bucket.batch)


@dataclass(frozen=True)
class SegmentEntry:
    """The layers between two exits, compiled as engines of their own; ``layer`` counts the layers that have run when
    its exit answers. A segment but the first takes the state that the one before returned."""

    name: str
    layer: int = field(metadata={"min": 1})
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class GateEntry:
    """When a row leaves early: ``entropy compare threshold``, in nats; a threshold for every exit but the last, which
    always answers. A negative one closes its exit."""

    compare: Literal["<", "<="]
    thresholds: tuple[float, ...]


@dataclass(frozen=True)
class ExitsEntry:
    """The exits of a multi-exit model and the segments between them, in order; ``gate`` is the model's own, if any.

    Every segment returns ``logits`` ``[B, classes]`` and ``entropy`` ``[B]`` (nats) of its exit, and all but the last
    the state ``state_out`` ``[B, S, H]`` that the next takes as ``state_in``. ``mask`` is the input that says which
    positions count. ``trims``: whether positions behind the longest row may be cut without changing an answer.
    """

    segments: tuple[SegmentEntry, ...]
    classes: int = field(metadata={"min": 2})
    logits: str
    entropy: str
    state_in: str
    state_out: str
    mask: str
    trims: bool
    gate: GateEntry | None = None

    @property
    def computed_from(self) -> dict[str, str]:
        """Outputs that are computed from another one."""
        return {self.entropy: self.logits}


@dataclass(frozen=True)
class CachedLayer:
    """What a layer keeps of each token: keys and values of ``heads`` heads of ``size`` numbers."""

    heads: int = field(metadata={"min": 1})
    size: int = field(metadata={"min": 1})


@dataclass(frozen=True)
class EncoderEntry:
    """The ``engines`` of an encoder-decoder that read a prompt, of up to ``positions`` tokens, once: one for each
    submodel. Its decoder begins with ``start_id``.

    An engine takes ``input_ids`` ``[1, S]`` int64 and returns what each layer of the decoder reads of them, with the
    heads of its own cache: ``source_key_0`` ``[1, heads, size, S]`` and ``source_value_0`` ``[1, heads, S, size]``
    float32. Figures of an engine are those of a prompt of 512 tokens, or of the longest.
    """

    start_id: int = field(metadata={"min": 0})
    positions: int = field(metadata={"min": 1})
    engines: tuple[EngineEntry, ...]


@dataclass(frozen=True)
class GenerationEntry:
    """The ``engines`` of a causal language model, or of a decoder behind an ``encoder``, that keep keys and values in a
    cache of the caller's, one for each submodel. Submodels that differ in no layer's heads can continue each other's
    cache.

    An engine takes ``input_ids`` and ``position_ids`` (``[B, S]`` int64), the new tokens and their places in the text,
    ``logits_at`` ``[answers]`` int64, the new tokens whose logits are wanted, and per layer ``past_key_0`` and
    ``past_value_0`` (``[B, heads, capacity, size]``). It returns ``logits`` ``[B, answers, vocabulary]`` and per
    layer ``present_key_0`` and ``present_value_0``: the cache, with the new tokens at their places. Callers bind both
    to one buffer, so that nothing is copied. Several rows take one new token each; several new tokens are of one row.
    Figures of an engine are those of one new token of one row, its activations those of the longest run. Behind an
    encoder an engine also takes, before the cache, ``source_lengths`` ``[B]`` int64 and per layer ``source_key_0`` and
    ``source_value_0``, which have that many tokens of each row, and room for the longest.

    ``positions`` is the largest capacity. A text ends with a token of ``end_ids``, and begins with ``begin_id`` where
    the tokenizer adds one. ``sampling`` is how the model's folder picks tokens, by option, None for the likeliest.
    ``chat_template`` is the file with the Jinja template of chats, ``special_tokens`` the ones that it may name.
    """

    vocabulary: int = field(metadata={"min": 2})
    layers: tuple[CachedLayer, ...]
    positions: int = field(metadata={"min": 2})
    end_ids: tuple[int, ...]
    engines: tuple[EngineEntry, ...]
    begin_id: int | None = field(default=None, metadata={"min": 0})
    sampling: Mapping[str, int | float] | None = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] | None = None
    encoder: EncoderEntry | None = None

    @property
    def every_engine(self) -> tuple[EngineEntry, ...]:
        """``engines``, and those of the encoder."""
        return (*self.engines, *(self.encoder.engines if self.encoder else ()))

    def encoder_of(self, engine: EngineEntry) -> EngineEntry | None:
        """What reads the prompts of ``engine``, if the model has an encoder."""
        others = self.encoder.engines if self.encoder else ()
        return next((other for other in others if other.submodel == engine.submodel), None)

    def with_engines(self, engines: Iterable[EngineEntry]) -> GenerationEntry:
        """This with ``engines`` of both kinds in the place of its own."""
        every, encoder = tuple(engines), self.encoder
        if encoder is not None:
            encoder = replace(encoder, engines=tuple(engine for engine in every if engine.segment == ENCODER))
        return replace(self, engines=tuple(engine for engine in every if engine.segment != ENCODER), encoder=encoder)

    @property
    def interface(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Inputs and outputs of its engines, by position."""
        tokens = ("batch", "sequence")
        inputs = [
            TensorSpec("input_ids", "int64", tokens, high=self.vocabulary),
            TensorSpec("position_ids", "int64", tokens, high=self.positions),
            TensorSpec("logits_at", "int64", (LOGIT_COUNT,)),
        ]
        outputs = [TensorSpec("logits", "float32", ("batch", LOGIT_COUNT, self.vocabulary))]
        if self.encoder is not None:
            inputs += [TensorSpec("source_lengths", "int64", ("batch",)), *self._source("batch", SOURCE)]
        for number, layer in enumerate(self.layers):
            dims = ("batch", layer.heads, CAPACITY, layer.size)
            for kind in ("key", "value"):
                inputs.append(TensorSpec(f"past_{kind}_{number}", "float32", dims))
                outputs.append(TensorSpec(f"present_{kind}_{number}", "float32", dims))
        return tuple(inputs), tuple(outputs)

    @property
    def encoder_interface(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Inputs and outputs of the engines of the encoder, by position."""
        ids = TensorSpec("input_ids", "int64", ("batch", "sequence"), high=self.vocabulary)
        return (ids,), tuple(self._source("batch", "sequence"))

    def _source(self, rows: str, tokens: str) -> Iterator[TensorSpec]:
        for number, layer in enumerate(self.layers):
            yield TensorSpec(f"source_key_{number}", "float32", (rows, layer.heads, layer.size, tokens))
            yield TensorSpec(f"source_value_{number}", "float32", (rows, layer.heads, tokens, layer.size))


@dataclass(frozen=True)
class Proof:
    """One acceptance suite on one subject: how many comparisons it made, the worst figure found, and the limit kept.

    ``near_ties`` lists decisions that were left out because they lie within the measured error of a threshold.
    """

    suite: Literal["load", "slice", "decision", "composition", "extremes"]
    subject: str
    checked: int = field(metadata={"min": 0})
    worst: float
    limit: float
    near_ties: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Limits of one budget, resolved to absolute units. ``None`` is no limit."""

    latency_ms: float | None = None
    memory_mb: float | None = None
    parameters: int | None = None
    flops: int | None = None
    non_embedding_parameters: int | None = None
    ffn_parameters: int | None = None


@dataclass(frozen=True)
class BudgetEntry:
    """A named budget, the submodel chosen for it, and why."""

    name: str
    limits: Limits
    submodel: str
    reason: str


@dataclass(frozen=True)
class TextEntry:
    """How text becomes inputs: a ``tokenizers`` file and the input each field of an encoding feeds.

    ``lowercase``: the tokenizer lowers a text's case first. A text of more than ``max_tokens``, with the tokens
    that the tokenizer adds, is too long for the model whatever its buckets. ``prompts`` are texts by name that may
    stand before a request's; the one named ``default_prompt`` does unless the request asks for another. ``pooled`` is
    the input that is 1 where a token takes part in the embedding, of models that leave the tokens of a prompt out.
    ``shifted`` is the input that gets the same tokens one place later, behind the token ``start``: of an
    encoder-decoder, which answers of each place with the token that follows there.
    """

    file: str
    ids: str
    mask: str | None
    type_ids: str | None
    embedding: str | None
    lowercase: bool = False
    max_tokens: int | None = field(default=None, metadata={"min": 1})
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None
    pooled: str | None = None
    shifted: str | None = None
    start: int | None = field(default=None, metadata={"min": 0})

    @property
    def continued(self) -> str:
        """The input with the tokens that outputs of role ``next_tokens`` continue."""
        return self.shifted or self.ids

    def prompt(self, prompt: str | None = None, prompt_name: str | None = None) -> str:
        """The text that stands before a request's: ``prompt`` itself (empty for none), the one called ``prompt_name``,
        else the default. Raises InputError for a name that the model does not have, or for both."""
        known = self.prompts or {}
        if prompt is not None and prompt_name is not None:
            raise InputError("prompt and prompt_name: expected one of them, a text or the name of one")
        if prompt is not None:
            if not isinstance(prompt, str):
                raise InputError(f"prompt: expected a text, got {prompt!r:.80}")
            return prompt
        name = self.default_prompt if prompt_name is None else prompt_name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in known:
            hint = nearest(str(name)[:80], known) if known else ": this model has no prompts; give the text as prompt"
            raise InputError(f"prompt_name {name!r:.80}{hint}")
        return known[name]


@dataclass(frozen=True)
class Ranking:
    """How the elastic axes were ordered at import, and from how many texts or rows.

    ``order_file`` holds the permutations themselves, where there are any.
    """

    method: Literal["none", "magnitude", "taylor"]
    data_sha256: str | None = None
    samples: int | None = None
    order_sha256: str | None = None
    order_file: str | None = None


@dataclass(frozen=True)
class Provenance:
    """Where the bundle comes from: enough to make it again."""

    tools: Mapping[str, str]
    source: tuple[FileEntry, ...]
    profile: Mapping[str, Any]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """Everything about a bundle that follows from its inputs; what was measured is in the build record.

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
    exits: ExitsEntry | None = None
    proofs: tuple[Proof, ...] = ()
    generation: GenerationEntry | None = None

    @property
    def every_engine(self) -> tuple[EngineEntry, ...]:
        """``engines``, and those that generate."""
        return (*self.engines, *(self.generation.every_engine if self.generation else ()))

    @property
    def largest_first(self) -> tuple[SubmodelEntry, ...]:
        """``submodels``, those with the most parameters first, and of equally many those whose other choices, such as
        capacity, are larger."""
        kinds = [axis.kind for axis in self.axes if axis.choices is not None]

        def smallness(entry: SubmodelEntry) -> tuple[int, list[int], str]:
            return -entry.parameters, [-value for kind in kinds for value in entry.values.get(kind, ())], entry.id

        return tuple(sorted(self.submodels, key=smallness))

    def interface(self, segment: str | None) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Inputs and outputs of the engines of ``segment``, which is ``CACHED`` for those that generate, ``ENCODER``
        for those that read a prompt, and None for whole ones."""
        if segment == CACHED and self.generation is not None:
            return self.generation.interface
        if segment == ENCODER and self.generation is not None:
            return self.generation.encoder_interface
        for entry in self.exits.segments if self.exits else ():
            if entry.name == segment:
                return entry.inputs, entry.outputs
        return self.inputs, self.outputs

    def _completed(self, submodel_id: str) -> str:
        """The whole id, as far as ``submodel_id`` is one."""
        try:
            return ElasticSpec(self.axes, ()).parse(submodel_id).id
        except PlanError:
            return submodel_id

    def submodel(self, submodel_id: str) -> SubmodelEntry:
        """The submodel with this label or id, where kinds at full size may be left out.

        Raises SelectionError listing what exists.
        """
        wanted = (submodel_id, self._completed(submodel_id))
        for name in wanted:
            for entry in self.submodels:
                if name == entry.id or name in entry.labels:
                    return entry
        known = ", ".join(f"{e.id} ({'/'.join(e.labels)})" if e.labels else e.id for e in self.submodels)
        raise SelectionError(f"no submodel {submodel_id!r:.80} in this bundle; it has {known}")


@dataclass(frozen=True)
class LatencyPoint:
    """Predicted and measured time of an engine at one shape of its range, in milliseconds, and the ``noise`` of the
    latter; see ``Latency``."""

    batch: int = field(metadata={"min": 1})
    sequence: int = field(metadata={"min": 1})
    predicted_ms: float = field(metadata={"min": 0})
    measured_p50_ms: float | None = field(default=None, metadata={"min": 0})
    measured_p95_ms: float | None = field(default=None, metadata={"min": 0})
    noise: Noise | None = None


@dataclass(frozen=True)
class Latency:
    """Predicted and measured time of one engine, in milliseconds, never mixed: the field name says which.

    ``predicted_ms`` was stated before this engine was measured; for a profile of the compiling host itself it is
    corrected by a few measured rungs. An engine of a range has ``points``, every batch of some at every sequence of
    some; its other figures are those of its largest shape. ``noise`` says how far to trust the measured ones, and is
    None where nothing was measured, or before schema 7.
    """

    engine: str
    predicted_ms: float = field(metadata={"min": 0})
    measured_p50_ms: float | None = field(default=None, metadata={"min": 0})
    measured_p95_ms: float | None = field(default=None, metadata={"min": 0})
    residency: Residency | None = None
    points: tuple[LatencyPoint, ...] | None = None
    noise: Noise | None = None

    @property
    def noises(self) -> tuple[Noise, ...]:
        """Of every measured figure of this engine, as far as they are known."""
        return tuple(one.noise for one in self.points or (self,) if one.noise is not None)


@dataclass(frozen=True)
class BuildRecord:
    """What differs between two compiles of the same inputs: time, host, and everything measured.

    ``build`` maps the graphs of engines for TensorRT to the ``trtexec`` command that makes a plan of each.
    ``report_sha256`` is the hash of report.md. ``seconds`` and ``cpu_seconds``, those of all threads, are by stage.
    """

    schema_version: int
    manifest_sha256: str
    created: str
    command: tuple[str, ...]
    host: Mapping[str, Any]
    seconds: Mapping[str, float] = field(metadata={"min": 0})
    latencies: tuple[Latency, ...]
    build: Mapping[str, str] | None = None
    report_sha256: str | None = None
    cpu_seconds: Mapping[str, float] | None = field(default=None, metadata={"min": 0})
