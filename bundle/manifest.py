"""The manifest of a bundle, as docs/bundle-format.md specifies it (read_manifest.py reads)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..bucket import Bucket
from ..elastic import DEPTH, SEQUENCE, Axis, ElasticSpec, Pairs
from ..errors import InputError, PlanError, SelectionError
from ..profiles.precision import Precision, highest_first, rank
from ..strict import nearest
from .entries.engine_entry import Decode, Encoder, EngineEntry, ExitsEntry, ParityOutput, Segment, Whole
from .entries.generation_entry import GenerationEntry
from .entries.task_entry import TasksEntry
from .entries.tensor_spec import TensorSpec
from .files import hash_of_all, is_of_weights

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
BUILD_NAME = "build.json"
REPORT_NAME = "report.md"
RANKING_NAME = "ranking.safetensors"
PLANS_NAME = "plans.json"
CALIBRATION_NAME = "calibration.json"
MEASUREMENTS_NAME = "measurements.json"
DRAFTS_NAME = "drafts.json"
TASKS_NAME = "tasks.json"
# The hashes of these cannot be in the manifest: it is one of them, and the others name its hash or follow it.
UNLISTED = (
    *(MANIFEST_NAME, BUILD_NAME, REPORT_NAME, PLANS_NAME, CALIBRATION_NAME, MEASUREMENTS_NAME, DRAFTS_NAME),
    TASKS_NAME,
)


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle; ``path`` is a plain file name, without folders."""

    path: str
    bytes: int = field(metadata={"min": 0})
    sha256: str


@dataclass(frozen=True)
class Quality:
    """Agreement of a submodel with the universal model on ``samples`` held-out texts or rows.

    ``figures`` are those of the model's outputs by name, with units and headings in bundle/figures.py;
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

    ``weight_bytes`` counts the parameters that its engines read of the weight store; tables come on top. ``precision``
    is that of its engines. ``states`` are figures that a published table has of it, by column.
    """

    id: str
    labels: tuple[str, ...]
    values: Mapping[str, tuple[int, ...]]
    parameters: int = field(metadata={"min": 0})
    weight_bytes: int = field(metadata={"min": 0})
    quality: Quality | None = None
    precision: Precision = "fp32"
    states: Mapping[str, float] | None = None

    @property
    def label(self) -> str:
        """Its short name: the first of its labels, its id where it has none."""
        return self.labels[0] if self.labels else self.id

    @property
    def sequence(self) -> int | None:
        """The sequence of its engines in the place of a bucket's, for models that are another function at each."""
        return self.values[SEQUENCE][0] if self.values.get(SEQUENCE) else None

    @property
    def depth(self) -> int | None:
        """How many layers run, or None where every submodel has all of them."""
        return self.values[DEPTH][0] if self.values.get(DEPTH) else None

    def at(self, bucket: Bucket) -> Bucket:
        """The bucket that this submodel has in the place of ``bucket``."""
        return bucket if self.sequence is None else Bucket(bucket.batch, self.sequence, bucket.min_batch)


@dataclass(frozen=True)
class Proof:
    """One acceptance suite on one subject: how many comparisons it made, the worst figure found, and the limit kept.

    ``near_ties`` lists decisions that were left out because they lie within the measured error of a threshold.
    """

    suite: Literal["load", "padding", "slice", "decision", "composition", "extremes"]
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
            raise InputError("`prompt` and `prompt_name`: expected one of them, a text or the name of one")
        if prompt is not None:
            if not isinstance(prompt, str):
                raise InputError(f"prompt: expected a text, got {prompt!r:.80}")
            return prompt
        name = self.default_prompt if prompt_name is None else prompt_name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in known:
            hint = nearest(str(name)[:80], known) if known else ": this model has no prompts; give the text as `prompt`"
            raise InputError(f"`prompt_name` {name!r:.80}{hint}")
        return known[name]


@dataclass(frozen=True)
class TextReceipt:
    """Proof that texts through the runtime become the vectors that ``library`` makes of the model's folder, with as
    many layers as ``submodel`` has: through which ``stages``, on which ``cases``, by which ``rule``, and the worst
    figures of the embedding, and of it cut (``NAME in DIMENSIONS``)."""

    submodel: str
    library: str
    stages: tuple[str, ...]
    cases: tuple[str, ...]
    rule: str
    outputs: tuple[ParityOutput, ...]


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
class JobOptions:
    """Settings of a compile beside its profile: which submodels it ``include``d whatever budgets chose, and the ids of
    the ``submodels`` that were requested, of them the published ``slices``; whether examples were ``text`` or ``data``;
    the layers of the ``exits`` at which the model is cut, None for all; whether engines ``generate``, and tasks are
    ``mergeable``. ``whole_along`` are axes that no submodel shrinks: weights are not laid out along them.
    ``dimensions`` are those to which the embedding may be cut, None for the model's own, and ``pairs`` layers with
    dimensions, None where each goes with the other. ``left_out`` are sets of layers that submodels may lack.
    """

    include: Literal["budgets", "levels", "ladder"] = "levels"
    submodels: tuple[str, ...] = ()
    text: bool = False
    data: bool = False
    exits: tuple[int, ...] | None = None
    generate: bool = False
    mergeable: bool = False
    slices: tuple[str, ...] = ()
    whole_along: tuple[str, ...] = ()
    dimensions: tuple[int, ...] | None = None
    pairs: Pairs | None = None
    left_out: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Provenance:
    """Where the bundle comes from: enough to make it again. ``hub`` is the name and the commit of a model that was
    fetched, ``OWNER/NAME@COMMIT``."""

    tools: Mapping[str, str]
    source: tuple[FileEntry, ...]
    profile: Mapping[str, Any]
    options: JobOptions = field(default_factory=JobOptions)
    hub: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything about a bundle that follows from its inputs; what was measured is in the build record.

    For a profile of the compiling host itself, measured latencies are inputs to its budgets. ``notes`` state what was
    rounded, and what is unusual about submodels that were requested by id.
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
    texts: tuple[TextReceipt, ...] = ()
    generation: GenerationEntry | None = None
    tasks: TasksEntry | None = None

    @property
    def weight_files(self) -> tuple[FileEntry, ...]:
        """The files of the weight store, in order."""
        return tuple(sorted((file for file in self.files if is_of_weights(file.path)), key=lambda file: file.path))

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The names of ``weight_files``."""
        return tuple(file.path for file in self.weight_files)

    @property
    def weights_sha256(self) -> str | None:
        """Hash of the weight store; None without one."""
        return hash_of_all([file.sha256 for file in self.weight_files])

    @property
    def every_engine(self) -> tuple[EngineEntry, ...]:
        """``engines``, and the engines that generate."""
        return (*self.engines, *(self.generation.every_engine if self.generation else ()))

    @property
    def listed_engines(self) -> tuple[EngineEntry, ...]:
        """``every_engine``, and those that tasks are merged into."""
        return (*self.every_engine, *(self.tasks.merged if self.tasks else ()))

    @property
    def timed_engines(self) -> tuple[EngineEntry, ...]:
        """The engines that latencies are of: ``engines``, and those of whole inputs that tasks are merged into."""
        return (*self.engines, *self.of_merged.engines)

    def with_engines(self, engines: Iterable[EngineEntry]) -> Manifest:
        """This with ``engines`` of every kind in the place of its own."""
        every, generation = tuple(engines), self.generation
        generating = [engine for engine in every if isinstance(engine.kind, Decode | Encoder)]
        return replace(
            self,
            engines=tuple(engine for engine in every if isinstance(engine.kind, Whole | Segment)),
            generation=None if generation is None else generation.with_engines(generating),
        )

    @property
    def of_merged(self) -> Manifest:
        """This with the engines that tasks are merged into in the place of all others; they take no tasks."""
        return replace(self.with_engines(self.tasks.merged if self.tasks else ()), tasks=None)

    @property
    def largest_first(self) -> tuple[SubmodelEntry, ...]:
        """``submodels``, those with the most parameters first, and of equally many those whose other choices, such as
        capacity, or whose precision keep more."""
        chosen = {axis.kind: axis for axis in self.axes if axis.choices is not None}

        def smallness(entry: SubmodelEntry) -> tuple[int, list[float], int, str]:
            shares = (-axis.share(value) for kind, axis in chosen.items() for value in entry.values.get(kind, ()))
            return -entry.parameters, list(shares), rank(entry.precision), entry.id

        return tuple(sorted(self.submodels, key=smallness))

    def interface_of(self, engine: EngineEntry) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Inputs and outputs of ``engine``, by position."""
        if isinstance(engine.kind, Decode | Encoder) and self.generation is not None:
            own = self.generation.of(engine)
            return own.encoder_interface if isinstance(engine.kind, Encoder) else own.interface_at(engine.capacity)
        for entry in self.exits.segments if self.exits else ():
            if entry.name == engine.segment:
                return entry.inputs, entry.outputs
        return self.inputs, self.outputs

    @property
    def spec(self) -> ElasticSpec:
        """The axes of its submodels, and the precisions that these have where there are several."""
        precisions = highest_first({entry.precision for entry in self.submodels})
        return ElasticSpec(self.axes, (), precisions=precisions if len(precisions) > 1 else ())

    def _completed(self, submodel_id: str) -> str:
        """The whole id, as far as ``submodel_id`` is one; of a label without the highest precision."""
        try:
            return self.spec.parse(submodel_id).id
        except PlanError:
            return submodel_id.removesuffix("".join(f".{highest}" for highest in self.spec.precisions[:1]))

    def submodel(self, submodel_id: str) -> SubmodelEntry:
        """The submodel with this label or id, where kinds at full size may be left out.

        Raises SelectionError listing what exists.
        """
        for name in (submodel_id, self._completed(submodel_id)):
            for entry in self.submodels:
                if name == entry.id or name in entry.labels:
                    return entry
        known = ", ".join(f"{e.id} ({'/'.join(e.labels)})" if e.labels else e.id for e in self.submodels)
        raise SelectionError(f"no submodel {submodel_id!r:.80} in this bundle; it has {known}")
