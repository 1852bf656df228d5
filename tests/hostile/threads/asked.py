"""Requests of the threads, by seed, and the comparison of answers."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle
from nestforge.errors import NestforgeError, SelectionError
from nestforge.runtime.answer import Answer
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.runtime.model import ElasticModel

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "nest", "of", "models", "unheard"]


@dataclass(frozen=True)
class Asked:
    """One request; ``in_time`` is one whose submodel follows from what the model is doing, or has seen runs take."""

    inputs: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    in_time: bool = False


@dataclass(frozen=True)
class Told:
    """The outcome: a digest of every value and fact of the answer, or the refusal in words."""

    what: str
    submodel: str | None = None
    by_chain: bool = False


def asked_of(bundle: Bundle, rng: Random, count: int) -> list[Asked]:
    """``count`` different requests, some of which are refused."""
    return [_asked(bundle, rng, number) for number in range(count)]


def ask(model: ElasticModel, asked: Asked) -> Told:
    """Asks once; refusals are answers too, but a model that was closed is the caller's to see."""
    try:
        answer = model(asked.inputs, **asked.options)
    except NestforgeError as refusal:
        if "closed" in str(refusal) or "not open" in str(refusal):
            raise
        kind = type(refusal).__name__
        # How late it would be depends on what else is under way, and what engines take on the runs so far.
        return Told(kind if asked.in_time else f"{kind}: {str(refusal).partition('; there is ')[0]}")
    return Told(_digest(answer), answer.submodel, answer.exits is not None)


def alone(model: ElasticModel, asked: Asked, told: Told) -> Told:
    """The right outcome, from a model that nobody else uses: where the submodel followed from the time, of that one.
    Whether there was any in time, nobody can say afterwards."""
    if asked.in_time and told.what == SelectionError.__name__:
        return told
    if not asked.in_time or told.submodel is None:
        return ask(model, asked)
    options: dict[str, Any] = {"submodel": told.submodel, "truncate": asked.options.get("truncate", False)}
    options["exits"] = asked.options["exits"] if told.by_chain else "off"
    return ask(model, Asked(asked.inputs, options))


def _asked(bundle: Bundle, rng: Random, number: int) -> Asked:
    manifest = bundle.manifest
    options = dict(_options(bundle, rng))
    in_time = "deadline_ms" in options or "latency_ms" in options
    if manifest.exits is not None and rng.random() < 0.6:
        count = len(manifest.exits.segments) - 1
        options["exits"] = rng.choice(["off", rng.choice([-1.0, 0.25, 1.0, 10.0]), tuple([0.5] * count)])
    bucket = rng.choice(manifest.engines).bucket
    if manifest.text is not None and rng.random() < 0.5:
        texts = [" ".join(rng.choices(WORDS, k=rng.choice([1, 3, 9, 40]))) for _ in range(rng.randint(1, bucket.batch))]
        # To what a limit in latency cuts them follows from the runs too.
        options["truncate"] = rng.random() < 0.8 and "latency_ms" not in options
        return Asked(texts[0] if len(texts) == 1 else texts, options, in_time)
    size = Bucket(rng.randint(1, bucket.batch), rng.randint(1, bucket.sequence))
    feeds = random_feeds(manifest.inputs, size, number)
    for spec in manifest.inputs:
        if spec.high == 2 and spec.pad == 0:  # a mask: rows begin with their tokens
            lengths = [rng.randint(1, size.sequence) for _ in range(size.batch)]
            feeds[spec.name] = (np.arange(size.sequence) < np.array(lengths)[:, None]).astype(spec.dtype)
    if rng.random() < 0.1:  # refused
        name = rng.choice(sorted(feeds))
        given = feeds[name]
        feeds[name] = rng.choice([given.astype(np.float64), given[:0], np.zeros((99, 99), given.dtype)])
    return Asked(feeds, options, in_time)


def _options(bundle: Bundle, rng: Random) -> Mapping[str, Any]:
    manifest = bundle.manifest
    kind = rng.choice(
        ["none", "submodel", "submodel", "budget", "latency", "memory", "deadline", "deadline", "unknown"]
    )
    if kind == "submodel":
        return {"submodel": rng.choice(manifest.submodels).id}
    if kind == "budget" and manifest.budgets:
        return {"budget": rng.choice(manifest.budgets).name}
    if kind == "latency":
        return {"latency_ms": rng.choice([0.001, 1.0, 1e6])}
    if kind == "memory":
        return {"memory_mb": rng.choice([0.0001, 1.0, 1e6])}
    if kind == "deadline":
        return {"deadline_ms": rng.choice([0.01, 1.0, 50.0, 1e6])}
    if kind == "unknown" and rng.random() < 0.3:
        return rng.choice([{"submodel": "nobody"}, {"budget": "nobody"}, {"latency_ms": -1.0}])
    return {}


def _digest(answer: Answer) -> str:
    found = hashlib.sha256()
    arrays = dict(answer.outputs)
    if answer.exits is not None:
        exits = answer.exits
        arrays |= {"index": exits.index, "layer": exits.layer, "exit entropy": exits.entropy, "flops": exits.flops}
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(array.tobytes())
    return f"{answer.engine}, padding {answer.padding}, truncated {answer.truncated}: {found.hexdigest()}"
