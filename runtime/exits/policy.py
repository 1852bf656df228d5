"""When a row leaves a chain of exits: thresholds on entropy, how they compare, and whether rows leave alone; and
calibrated policies, which ``calibration.json`` in a bundle's folder holds.

Like the build record it is measured, belongs to one host, and is not listed in the manifest; it names the manifest's
hash instead, and is sealed (device_file.py). docs/exits.md says what the figures mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Literal, get_args

import numpy as np

from ...bundle.device_files.device_file import DeviceRecord
from ...bundle.manifest import CALIBRATION_NAME
from ...bundle.open_bundle import Bundle
from ...errors import SelectionError
from ...whole_file import alone

Compare = Literal["<", "<="]
Rule = Literal["per_row", "batch_max"]


@dataclass(frozen=True)
class ExitPolicy:
    """A row leaves at exit ``j`` where ``entropy compare thresholds[j]`` (nats); the last exit always answers.

    There is one threshold for every exit but the last; a negative one closes its exit. ``per_row`` gives each row the
    answer that it would get alone. ``batch_max`` lets the whole batch leave when its least certain row may, as research
    code does; its answers depend on the batch. ``name`` says in answers where the policy comes from.
    Raises SelectionError for a comparison, a rule or a threshold that is none.
    """

    thresholds: tuple[float, ...]
    compare: Compare = "<="
    rule: Rule = "per_row"
    name: str = "thresholds requested"

    def __post_init__(self) -> None:
        if self.compare not in get_args(Compare) or self.rule not in get_args(Rule):
            raise SelectionError(
                f"exit policy: expected a comparison of {', '.join(get_args(Compare))} and a rule of "
                f"{', '.join(get_args(Rule))}, got {self.compare!r:.80} and {self.rule!r:.80}"
            )
        if not isinstance(self.thresholds, tuple):
            raise SelectionError(f"exit policy: expected a tuple of thresholds in nats, got {self.thresholds!r:.80}")
        for value in self.thresholds:
            if not _is_number(value):
                raise SelectionError(f"thresholds: expected numbers in nats, got {value!r:.80}")

    def leavers(self, exit_index: int, entropies: Sequence[float]) -> list[bool]:
        """Which rows leave at this exit, by their entropies. NaN never leaves early."""
        # Without numpy: after an engine has run the caches hold weights, not numpy's code.
        limit = self._limits[exit_index]
        certain = [value < limit for value in entropies] if self.compare == "<" else [v <= limit for v in entropies]
        return [all(certain)] * len(certain) if self.rule == "batch_max" else certain

    @cached_property
    def _limits(self) -> tuple[float, ...]:
        """The thresholds as float32 has them, as entropies are: one that was taken from an entropy must equal it."""
        with np.errstate(over="ignore"):
            return tuple(float(np.float32(value)) for value in self.thresholds)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # a whole number beyond every float
        return False


def closed(exits: int) -> ExitPolicy:
    """No row leaves before the last of ``exits`` exits."""
    return ExitPolicy((-1.0,) * (exits - 1), name="every exit closed")


def thresholds_for(requested: float | Sequence[float], exits: int) -> tuple[float, ...]:
    """One threshold per exit but the last, from one number for all or one for each.

    Raises SelectionError for the wrong count or what is no number.
    """
    given = tuple(requested) if isinstance(requested, Sequence) else (requested,) * (exits - 1)
    check_count(given, exits)
    return tuple(float(value) for value in ExitPolicy(given).thresholds)


def read_exits(text: str) -> str | float | tuple[float, ...]:
    """Thresholds where ``text`` reads as numbers with commas between, else a name."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        return text
    return numbers if len(numbers) > 1 else numbers[0]


def check_count(thresholds: Sequence[object], exits: int) -> None:
    """Raises SelectionError unless there is one threshold for every exit but the last."""
    if len(thresholds) != exits - 1:
        raise SelectionError(
            f"thresholds: expected one number, or {exits - 1} (one for every exit but the last), got {len(thresholds)}"
        )


QualityKind = Literal["accuracy", "agreement_with_last_exit"]
# A name never reads as a number, which would be a threshold; "off" asks for the whole engine.
_POLICY_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._<=+%-]{0,79}")
_RESERVED_NAMES = frozenset({"off", "inf", "infinity", "nan"})
_SHARE_RANGE = {"min": 0, "max": 1}


@dataclass(frozen=True)
class Costs:
    """Costs of answering: latencies in milliseconds per request of the policy's ``batch`` rows, FLOPs per row."""

    mean_flops: float = field(metadata={"min": 0})
    mean_latency_ms: float = field(metadata={"min": 0})
    p50_latency_ms: float = field(metadata={"min": 0})
    p95_latency_ms: float = field(metadata={"min": 0})
    p99_latency_ms: float = field(metadata={"min": 0})


@dataclass(frozen=True)
class Figures:
    """Costs, the share of good answers (0 to 1), and how many rows left at each exit, over ``rows`` rows."""

    rows: int = field(metadata={"min": 1})
    costs: Costs
    quality: float = field(metadata=_SHARE_RANGE)
    histogram: tuple[int, ...] = field(metadata={"min": 0})


@dataclass(frozen=True)
class CurvePoint:
    """Result of one ``threshold`` (nats) at every exit, by simulation on the calibration part."""

    threshold: float
    simulated: Figures


@dataclass(frozen=True)
class CalibratedPolicy:
    """Thresholds found for a ``budget`` on the engines of one submodel, and the figures that they rest on.

    ``quality_is`` says what quality means: the share of labels hit, or, without labels, of rows whose answer is the
    last exit's. ``histogram`` counts the rows of the calibration part that left at each exit. ``simulated`` and
    ``measured`` are of the calibration part, ``held_out`` and ``held_out_whole`` of rows that the search never saw
    (None with too few rows); ``whole`` and ``held_out_whole`` are the whole engine, timed in turns with the chain.
    ``correction`` is measured over simulated time, with which ``simulated`` and ``curve`` were scaled. All times are
    given at the pace that the whole engine had when it was first measured. ``created`` is the time in UTC,
    ``processor`` where it was measured.
    """

    name: str
    submodel: str
    budget: str
    batch: int = field(metadata={"min": 1})
    thresholds: tuple[float, ...]
    compare: Compare
    rule: Rule
    histogram: tuple[int, ...] = field(metadata={"min": 0})
    quality_is: QualityKind
    data_sha256: str
    rows: int = field(metadata={"min": 1})
    truncated_rows: int = field(metadata={"min": 0})
    correction: float = field(metadata={"min": 0})
    simulated: Figures
    measured: Figures
    whole: Figures
    curve: tuple[CurvePoint, ...]
    global_point: CurvePoint
    engines: tuple[str, ...]
    processor: str
    threads: int = field(metadata={"min": 1})
    created: str
    held_out: Figures | None = None
    held_out_whole: Figures | None = None
    notes: tuple[str, ...] = ()

    def policy(self) -> ExitPolicy:
        """The policy that a chain follows, under this name."""
        return ExitPolicy(self.thresholds, self.compare, self.rule, self.name)


@dataclass(frozen=True)
class Calibration(DeviceRecord):
    """The policies of one bundle; ``defaults`` says by submodel which answers where a request asks for none."""

    name = CALIBRATION_NAME
    mend = "remove it and calibrate again"
    lost = "the calibration"

    defaults: Mapping[str, str]
    policies: tuple[CalibratedPolicy, ...]

    def of(self, submodel: str) -> tuple[CalibratedPolicy, ...]:
        """The policies of the submodel with this id."""
        return tuple(policy for policy in self.policies if policy.submodel == submodel)

    def find(self, submodel: str, name: str) -> CalibratedPolicy:
        """The policy ``name`` of ``submodel`` (its id). Raises SelectionError listing what exists."""
        for policy in self.of(submodel):
            if policy.name == name:
                return policy
        known = ", ".join(policy.name for policy in self.of(submodel)) or "none"
        raise SelectionError(f"no calibrated exits {name[:80]!r} of submodel {submodel}; it has {known}")

    def default(self, submodel: str) -> CalibratedPolicy | None:
        """The policy that answers where a request asks for none, if ``submodel`` (its id) has one."""
        return self.find(submodel, self.defaults[submodel]) if submodel in self.defaults else None

    def with_policy(self, policy: CalibratedPolicy, default: bool) -> Calibration:
        """This calibration and ``policy``, which replaces one of the same name and submodel."""
        key = (policy.submodel, policy.name)
        others = (other for other in self.policies if (other.submodel, other.name) != key)
        policies = tuple(sorted((*others, policy), key=lambda each: (each.submodel, each.name)))
        defaults = {**self.defaults, policy.submodel: policy.name} if default else self.defaults
        return replace(self, defaults=dict(sorted(defaults.items())), policies=policies)

    def problems(self, bundle: Bundle) -> Iterable[str]:
        """Submodels, engines and names that exist, one figure for every exit."""
        exits = bundle.manifest.exits
        values = {entry.id: entry.values for entry in bundle.manifest.submodels}
        engines = {engine.id for engine in bundle.manifest.engines}
        if exits is None:
            yield "this bundle's model has no exits"
            return
        seen = set()
        for policy in self.policies:
            where = f"policy {policy.name[:80]!r} of {policy.submodel[:80]!r}"
            if policy.submodel not in values:
                yield f"{where}: no such submodel in this bundle"
                continue
            if not _POLICY_NAME.fullmatch(policy.name) or policy.name.lower() in _RESERVED_NAMES:
                yield f"{where}: not a name that a policy may have"
            if (policy.submodel, policy.name) in seen:
                yield f"{where}: stands twice"
            seen.add((policy.submodel, policy.name))
            depth = values[policy.submodel].get("depth", (exits.segments[-1].layer,))[0]
            count = sum(segment.layer <= depth for segment in exits.segments)
            if len(policy.thresholds) != count - 1:
                yield f"{where}: {len(policy.thresholds)} thresholds, expected {count - 1}"
            if len(policy.histogram) != count or not sum(policy.histogram):
                yield f"{where}: histogram {list(policy.histogram)[:20]}, expected counts of {count} exits"
            if unknown := [engine for engine in policy.engines if engine not in engines]:
                yield f"{where}: engine {unknown[0][:80]!r} is not in this bundle"
        for submodel, name in self.defaults.items():
            if (submodel, name) not in seen:
                yield f"defaults: no policy {name[:80]!r} of submodel {submodel[:80]!r}"


def check_name(name: str) -> str:
    """``name``, if a policy may have it. Raises SelectionError."""
    if not _POLICY_NAME.fullmatch(name) or name.lower() in _RESERVED_NAMES:
        raise SelectionError(
            f"name {name[:80]!r}: expected a letter, then up to 79 of letters, digits and ._<=+%-, "
            f"and none of {', '.join(sorted(_RESERVED_NAMES))}"
        )
    return name


def save_policy(bundle: Bundle, policy: CalibratedPolicy, default: bool) -> Calibration:
    """Adds ``policy`` to what the bundle's folder holds by now: other calibrations may have ended meanwhile.

    Raises OutputError where it cannot be written, BundleError where what is there cannot be read.
    """
    with alone(bundle.path):
        kept = (Calibration.read(bundle) or Calibration.made_for(bundle, {}, ())).with_policy(policy, default)
        kept.write(bundle)
    return kept
