"""One bundle as it is served: requests of it that may share a run, and how a run of several answers each."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ..argument_types import number_within
from ..bucket import Bucket
from ..bundle.manifest import Manifest
from ..bundle.roles import embedding_output
from ..errors import InputError, NestforgeError
from ..profiles.backends import BACKENDS
from ..runtime.candidates import Candidate
from ..runtime.exits.choice import OFF, ExitChoice
from ..runtime.exits.policy import Calibration
from ..runtime.inputs.arrays import Array, InputChecker, random_feeds
from ..runtime.inputs.text import Encoded, Text
from ..runtime.model import ElasticModel
from ..runtime.request import Request
from .leaving import Going, go_on
from .scheduler import Further, Job, Run

_LIMITS, _NAMES = ("latency_ms", "deadline_ms", "memory_mb"), ("budget", "submodel", "task")
HEADERS = {name: f"nestforge-{name.replace('_', '-')}" for name in (*_LIMITS, *_NAMES)}
# Runs of each submodel before the first request: one that is not counted, and as many as the estimate wants.
_WARM_UPS, _WARM_UP_PROMPT = 4, 8
# Tokens whose text is kept; what a decoder shows of a part of a letter.
_MOST_WRITTEN = 1 << 16
_MOST_REMEMBERED = 256
_INCOMPLETE = "\ufffd"
# For how many times what all segments take a request that stopped between two may wait for rows of others.
_WAITS = 1.0
# Runs of less are not stopped: seen at 12 ms a stop took what it saved.
_MS_JOINED = 30.0
# Rows are joined where a run of twice as many takes at most so much of two runs: with less the queue is not asked.
_WORTH_JOINING = 0.9
# Stands for any deadline where only that there is one counts.
_SOME_MS = 1.0
# Engines of more have no second form on one thread: it would hold a copy of the weights, and such runs use all cores.
_MOST_NARROW_MB = 128.0


def now_ms() -> float:
    """Milliseconds of the clock by which jobs arrive and are due."""
    return 1e3 * perf_counter()


class Terms(NamedTuple):
    """Who asks, when that came, and what it states; without a deadline it waits for ``patience_ms`` at most."""

    client: str
    arrived: float
    patience_ms: float
    deadline_ms: float | None

    @property
    def is_timed(self) -> bool:
        return self.deadline_ms is not None

    @property
    def due(self) -> float:
        return self.arrived + (self.patience_ms if self.deadline_ms is None else self.deadline_ms)


class Asked(NamedTuple):
    """The choice that a request leaves, the same for all that may share a run; a deadline is there as ``_SOME_MS``."""

    request: Request
    task: str | None = None
    dimensions: int | None = None


@dataclass(eq=False, frozen=True)
class Work:
    """A request: its choice, its arrays, and the ``deadline_ms`` that it stated; of texts the ``lengths`` of its rows
    without padding. One that ``is_part`` of another is answered by the submodel that its job has. One that stopped on
    its way is ``going`` on."""

    asked: Asked
    deadline_ms: float | None
    feeds: Mapping[str, Array]
    lengths: Sequence[int] | None = None
    is_part: bool = False
    going: Going | None = None


@dataclass(eq=False, frozen=True)
class Reply:
    """Outputs by name, which submodel gave them and why; ``exits`` are the layers after which rows left, None without
    exits; ``shared`` is how many requests the run answered, which ``ended`` then (``now_ms``); of a text, which takes
    many, 0 and None. Where ``whole`` is stated, which takes several runs, it is of the first of them alone."""

    outputs: Mapping[str, Array]
    submodel: str
    reason: str
    exits: list[int] | None
    shared: int
    ended: float | None
    whole: Candidate | None = None


def stated(headers: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, Any]:
    """The budget that a request states, by headers ``nestforge-deadline-ms`` and so on or parameters of the body
    (``deadline_ms``). Raises InputError for what is none, or stands in both."""
    found: dict[str, Any] = {}
    for name, header_name in HEADERS.items():
        header, value = headers.get(header_name), body.get(name)
        if header is not None and value is not None:
            raise InputError(f"{name}: stands in a header and in the body; expected once")
        if header is not None and name in _LIMITS:
            try:
                value = float(header)
            except ValueError:
                raise InputError(f"{name}: expected a positive number, got {header!r:.80}") from None
        elif header is not None:
            value = header
        if value is not None and name in _LIMITS:
            value = number_within(name, value, float, {"above": 0})
        elif value is not None and not isinstance(value, str):
            raise InputError(f"{name}: expected a name, got {value!r:.80}")
        if value is not None:
            found[name] = value
    return found


class Served:
    """``model`` under its ``name``, and ``narrow``, the same on one thread: its small engines run side by side where
    many wait. Thread-safe."""

    def __init__(self, name: str, model: ElasticModel, narrow: ElasticModel | None = None) -> None:
        self.name, self.model, self.is_broken = name, model, False
        manifest = model.bundle.manifest
        self._narrow, self._small = narrow, small_submodels(manifest)
        self.checker, self._texts = InputChecker(manifest.inputs), model.texts
        self.written = lru_cache(_MOST_WRITTEN)(self._written)
        # Called as ``remembered(read, *given)``: what ``read`` finds in ``given`` for this bundle, of the last ones.
        self.remembered = lru_cache(_MOST_REMEMBERED)(lambda read, *given: read(self, *given))
        self._buckets = {engine.bucket for engine in manifest.engines}
        specs = (*manifest.inputs, *manifest.outputs)
        sizes = {dim for spec in specs for dim in spec.dims if isinstance(dim, str)}
        calibration = None if manifest.exits is None else Calibration.read(model.bundle)
        # Rows answer for themselves: none of another request changes where they are routed or leave.
        self._shares = (
            all(spec.dims[:1] == ("batch",) for spec in specs)
            and all(spec.pad is not None for spec in manifest.inputs if "sequence" in spec.dims)
            and sizes <= {"batch", "sequence"}
            and all(policy.rule == "per_row" for policy in (calibration.policies if calibration else ()))
            and not any(engine.routing for engine in manifest.engines)
        )

    @cached_property
    def embedding(self) -> str:
        """The output that is the embedding. Raises InputError where there is none."""
        return embedding_output(self.model.bundle.manifest).name

    def _written(self, token: int) -> tuple[str, list[int] | None]:
        """The text of one token with its bytes; of a part of a letter the vocabulary's name for it, and None."""
        tokenizer = self._texts.encoder().tokenizer
        before = tokenizer.encode("a", add_special_tokens=False).ids  # a text's first token may lose its space
        head, text = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (before, [*before, token]))
        if _INCOMPLETE in text or not text.startswith(head):
            return str(tokenizer.id_to_token(token)), None
        own = text[len(head) :]
        return own, list(own.encode())

    @staticmethod
    def choice(found: Mapping[str, Any], dimensions: int | None = None) -> tuple[Asked, float | None]:
        """Choices that a request leaves open, and its deadline, by what is ``stated`` of it. Raises as a call does."""
        deadline = found.get("deadline_ms")
        limits = {name: value for name, value in found.items() if name != "task"}
        if deadline is not None:
            limits["deadline_ms"] = _SOME_MS
        request = Request(**limits)
        request.check_one_selector()
        return Asked(request, found.get("task"), dimensions), deadline

    def encoded(
        self, texts: Sequence[Text], found: Mapping[str, Any], truncate: bool, prompt_name: str | None = None
    ) -> Encoded:
        """Texts as arrays. Raises InputError."""
        longest = self.model.longest_sequence(1, found.get("submodel"))
        encoded, _ = self._texts.encode(texts, lambda _: longest, truncate, None, prompt_name)
        return encoded

    def tokenized(self, texts: Sequence[str], special: bool) -> list[Any]:
        """The library's encoding of each text. Raises InputError, also without a tokenizer."""
        return self._texts.encoder().encodings(texts, special)

    def job(self, work: Work, terms: Terms) -> Job:
        """The request as the queue sees it. Raises as a call of the model does."""
        shape = self.checker.shape_of(work.feeds)
        alone = self.candidates(work.asked, shape.batch, shape.sequence, work.lengths)
        key = Key(self, work.asked) if self._shares else None
        return Job(key, shape.batch, shape.sequence, terms.client, terms.arrived, terms.due, alone, terms.is_timed)

    def together(self, asked: Asked, rows: int, steps: int, segment: int = 0) -> Sequence[Candidate]:
        """The engines that take so many rows of several requests in one run, from a segment on by its number. A request
        that no bucket holds is not looked up: its figures in several runs cost more than many a run, and the queue asks
        at every arrival."""
        if not any(bucket.batch >= rows and bucket.sequence >= steps for bucket in self._buckets):
            return ()
        try:
            found = self.candidates(asked, rows, steps)
        except NestforgeError:
            return ()
        return found if segment == 0 else [self._from(segment, asked, one, rows, steps) for one in found]

    def candidates(
        self, asked: Asked, rows: int, steps: int, lengths: Sequence[int] | None = None
    ) -> Sequence[Candidate]:
        options: dict[str, Any] = {"task": asked.task, "dimensions": asked.dimensions, "lengths": lengths}
        found = self.model.candidates(asked.request, rows, steps, **options)
        # A limit in time is of the model's own figures, and tasks are its own.
        if self._narrow is not None and asked.request.latency_ms is None and asked.task is None:
            beside = self._narrow.candidates(asked.request, rows, steps, **options)
            found = [*found, *(one for one in beside if one.engine.submodel in self._small and one.runs is None)]
        if any(one.p95_ms == math.inf for one in found):  # nothing is known, so that nothing is refused for it
            return [replace(one, p95_ms=0.0) if one.p95_ms == math.inf else one for one in found]
        return found

    def replies(self, works: Sequence[Work], run: Run) -> Sequence[Reply | Further]:
        """The answers to requests that share ``run``, or what is left of those whose rows stopped on their way. Raises
        as a call of the model does."""
        asked, feeds = works[0].asked, works[0].feeds
        exits = self._exits(asked, run.candidate)
        if exits is not None and (works[0].going is not None or run.candidate.p95_ms >= _MS_JOINED):
            return self._go_on(works, run, exits)
        # Where rows leave early, the model makes all runs itself: one of them says nothing of where others left.
        if run.candidate.runs is not None and self._shares and self.model.bundle.manifest.exits is None:
            return [self._first(works[0], run)]
        if len(works) > 1:
            shape = Bucket(1, max(job.steps for job in run.jobs))
            filled = [
                self.checker.filled(work.feeds, replace(shape, batch=job.rows))
                for work, job in zip(works, run.jobs, strict=True)
            ]
            feeds = {name: np.concatenate([each[name] for each in filled]) for name in filled[0]}
        options: dict[str, Any] = {"task": asked.task, "dimensions": asked.dimensions}
        if works[0].deadline_ms is None and not works[0].is_part:
            options |= asked.request._asdict()
        else:
            options |= {"submodel": run.candidate.engine.submodel, "exits": OFF}
        model = self.model if self._narrow is None or run.candidate.cores > 1 else self._narrow
        answer = model(feeds, **options)
        ended, reason = now_ms(), run.reason or answer.reason
        exits = None if answer.exits is None else answer.exits.layer.tolist()
        if len(works) == 1:
            return [Reply(answer.outputs, answer.submodel, reason, exits, 1, ended)]
        found, start, specs = [], 0, self.model.bundle.manifest.outputs
        for job in run.jobs:
            own = Bucket(job.rows, job.steps)
            outputs = {s.name: answer.outputs[s.name][start:][tuple(map(slice, s.shape(own)))] for s in specs}
            left = None if exits is None else exits[start : start + job.rows]
            found.append(Reply(outputs, answer.submodel, reason, left, len(works), ended))
            start += job.rows
        return found

    def _exits(self, asked: Asked, candidate: Candidate) -> ExitChoice | None:
        """The exits between which rows of several requests may stop; None where all of a run ends at once."""
        if not self._shares or self.model.bundle.manifest.exits is None or candidate.runs is not None:
            return None
        if asked.task is not None or asked.dimensions is not None:
            return None
        found = self.model.exits_of(asked.request, candidate.engine)
        return found if found is not None and found.open is not None and found.open.chain.may_stop else None

    def _from(self, segment: int, asked: Asked, one: Candidate, rows: int, steps: int) -> Candidate:
        """Figures of ``one`` for rows that go on at a segment."""
        exits = self._exits(asked, one)
        assert exits is not None
        assert exits.open is not None
        return replace(one, p95_ms=one.p95_ms * exits.open.chain.share(segment, rows, steps))

    def _go_on(self, works: Sequence[Work], run: Run, exits: ExitChoice) -> list[Reply | Further]:
        """Results of a run from where its requests stand: it stops on its way where others may share the rest."""
        assert exits.open is not None
        asked, steps = works[0].asked, max(job.steps for job in run.jobs)
        given = [
            work.going
            or Going(
                job.rows,
                np.arange(job.rows),
                self.checker.filled(work.feeds, Bucket(job.rows, steps)),
                f"{self.model.choose(job.rows, steps, **asked.request._asdict()).reason}; {exits.reason}",
            )
            for work, job in zip(works, run.jobs, strict=True)
        ]
        # Fewer rows may leave another choice, and states are of one submodel.
        own = Asked(Request(submodel=run.candidate.engine.submodel))
        ends = [one.until for one in given if one.until is not None]
        until = min(ends, default=now_ms() + _WAITS * run.candidate.p95_ms)

        def left(segment: int, shape: Bucket, of: Job) -> Job:
            new, *_ = (*of.after, of.key)
            return replace(
                of,
                key=Key(self, own, segment),
                rows=shape.batch,
                steps=shape.sequence,
                alone=self.together(own, shape.batch, shape.sequence, segment),
                continues=True,
                within=max(0.0, until - now_ms()),
                after=(new, *(Key(self, own, before) for before in range(1, segment))),
            )

        def stop(segment: int, rows: int, longest: int) -> bool:
            alone, twice = (self.together(own, count, longest) for count in (rows, 2 * rows))
            if alone and twice and twice[0].p95_ms > _WORTH_JOINING * 2 * alone[0].p95_ms:
                return False
            return run.stops(left(segment, Bucket(rows, longest), run.jobs[0]), now_ms())

        found, ended = go_on(exits.open, given, stop), now_ms()
        return [
            Further(
                left(one.segment, one.shape, job),
                replace(work, asked=own, feeds={}, going=replace(one, until=one.until or until)),
            )
            if len(one.rows)
            else Reply(one.outputs, run.candidate.engine.submodel, one.reason, one.layers, len(works), ended)
            for work, job, one in zip(works, run.jobs, found, strict=True)
        ]

    def parts(self, work: Work, whole: Candidate) -> Iterator[tuple[Array, Work, Candidate]]:
        """The runs of a request that takes several: the numbers of its rows, and each as a request of its own."""
        assert whole.runs is not None
        for rows, shape in whole.runs.split.parts:
            feeds = self.checker.taken(work.feeds, rows, shape.sequence)
            yield rows, replace(work, feeds=feeds, lengths=None, is_part=True), whole.runs.by_shape[shape]

    def _first(self, work: Work, run: Run) -> Reply:
        """The first run of several, so that those of others may run before the next."""
        _, part, one = next(self.parts(work, run.candidate))
        (reply,), (job,) = self.replies([part], replace(run, candidate=one)), run.jobs
        assert isinstance(reply, Reply)
        reason = run.reason
        if not reason:
            limits = work.asked.request._asdict()
            chosen = self.model.choose(job.rows, job.steps, **limits, task=work.asked.task, lengths=work.lengths)
            reason = chosen.reason
        return replace(reply, reason=reason, whole=run.candidate)

    def warm_up(self) -> None:
        """Runs every submodel at its smallest shape and reads the chat template, so that no request is the first, and
        figures fit this host."""
        for one in self.model.submodels:
            bucket = self.model.choose(1, 1, submodel=one.id).engine.bucket.smallest
            feeds = random_feeds(self.model.bundle.manifest.inputs, bucket)
            models = [self.model]
            if self._narrow is not None and one.id in self._small:
                models.append(self._narrow)
            for model in models:
                for _ in range(_WARM_UPS):
                    model(feeds, submodel=one.id, exits=OFF)
        entry = self.model.bundle.manifest.generation
        if entry is not None and entry.prompt_array is None:  # which no request generates behind
            with suppress(InputError):  # which a chat hears
                self.model.generate.require_chats()
            half = entry.most_tokens // 2
            for engine in entry.generators:
                prompt = [0] * min(_WARM_UP_PROMPT, half)
                self.model.generate(prompt, max_tokens=min(_WARM_UPS, half), submodel=engine.submodel)


def small_submodels(manifest: Manifest) -> set[str]:
    """Those that run on one thread of the processor too, side by side. None of a model with exits, which its own
    threads share, nor of one that generates."""
    if manifest.exits is not None or manifest.generation is not None:
        return set()
    elsewhere = {engine.submodel for engine in manifest.engines if not BACKENDS[engine.backend].runs_graphs}
    small = {one.id for one in manifest.submodels if one.weight_bytes <= _MOST_NARROW_MB * 1e6}
    return small - elsewhere


class Key(NamedTuple):
    """Key of jobs that may share a run: of one choice, before one segment of a chain of exits."""

    served: Served
    asked: Asked
    segment: int = 0


def options(key: Hashable, rows: int, steps: int) -> Sequence[Candidate]:
    """The scheduler's options: none where no engine takes so many."""
    assert isinstance(key, Key)
    return key.served.together(key.asked, rows, steps, key.segment)
