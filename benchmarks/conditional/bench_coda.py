"""CODA encoders of base width: a reduction of 4 against the dense adapter model of the same checkpoint, the router's
share, and PyTorch eager."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ...exporters.families.coda.config import CodaConfig
from ...exporters.families.coda.model import load_model
from ..harness import Row, interleaved, ratio
from ..subjects import CORES, eager_call, packed
from .coda_subject import BUCKET, LAYERS, coda_bundle, coda_config, coda_folder, coda_submodel

_KEYS = ("k-to-k", "k-to-all")
_ROUNDS = 12
_REDUCTIONS = (4, 1)
_OF_PREDICTED, _ROUTER_SHARE = 0.85, 0.06


def run() -> list[Row]:
    return [row for keys in _KEYS for row in (_against_dense(keys), _router(keys), _against_eager(keys))]


def predicted_ratio(config: CodaConfig, tokens: int, selected: int) -> float:
    """Multiplications of a dense layer with an adapter over those of a conditional one (docs/coda.md, section 3)."""
    d, n, k = config.hidden_size, tokens, selected
    inner = config.num_attention_heads * config.head_size
    shared, adapter = config.key_value_heads * config.head_size, 2 * n * d * config.adapter_size
    read = k if config.keys_of == "selected" else n

    def layer(asking: int, reads: int) -> int:
        attention = 2 * asking * d * inner + 2 * reads * d * shared + 2 * asking * reads * inner
        return attention + 3 * asking * d * config.intermediate_size

    return (layer(n, n) + adapter) / (layer(k, read) + adapter + n * d)


def _times(engines: dict[str, tuple[Path, str]]) -> dict[str, list[float]]:
    """Milliseconds of packed engines in turns; all tokens count."""
    with ExitStack() as stack:
        opened = {name: stack.enter_context(packed(*engine, BUCKET)) for name, engine in engines.items()}
        for one in opened.values():
            one.feeds["attention_mask"][:] = 1
        calls = {name: (lambda one=one: one.runner.run(one.feeds)) for name, one in opened.items()}
        return interleaved(calls, _ROUNDS, 3)


def _how() -> str:
    return (
        f"median ratio of {_ROUNDS} interleaved rounds, {LAYERS} layers of base width, 1 x 512, packed, {CORES} threads"
    )


def _against_dense(keys: str) -> Row:
    config = coda_config(keys)
    bundle = coda_bundle(config, _REDUCTIONS)
    times = _times({"dense": (bundle, coda_submodel(config, 1)), "quarter": (bundle, coda_submodel(config, 4))})
    speed, predicted = ratio(times, "dense", "quarter"), predicted_ratio(config, 512, 128)
    return Row(
        f"CODA {keys}: reduction 4 over the dense adapter model of the same checkpoint",
        f"{speed:.2f}x, {speed / predicted:.2f} of the {predicted:.2f}x predicted by multiplications "
        f"(best {min(times['quarter']):.0f} against {min(times['dense']):.0f} ms)",
        f">= {_OF_PREDICTED} of it",
        speed >= _OF_PREDICTED * predicted,
        _how(),
    )


def _router(keys: str) -> Row:
    """Against the same layers that take the first k tokens: scores, rounds, gates and TopK together."""
    soft, first = coda_config(keys), coda_config(keys, "first_k")
    bundles = {"soft": coda_bundle(soft, _REDUCTIONS), "first": coda_bundle(first, (4,))}
    engines = {name: (bundle, coda_submodel(soft, 4)) for name, bundle in bundles.items()}
    share = 1 - 1 / ratio(_times(engines), "soft", "first")
    return Row(
        f"CODA {keys}: the router of {soft.soft_top_k.rounds if soft.soft_top_k else 0} rounds, of a layer's time",
        f"{100 * share:.1f} %",
        f"<= {100 * _ROUTER_SHARE:.0f} %",
        share <= _ROUTER_SHARE,
        f"over layers that take the first tokens; {_how()}",
    )


def _against_eager(keys: str) -> Row:
    config = coda_config(keys)
    model = load_model(coda_folder(config))
    model.reduction = 4
    with packed(coda_bundle(config, _REDUCTIONS), coda_submodel(config, 4), BUCKET) as ours:
        ours.feeds["attention_mask"][:] = 1
        calls = {"eager": eager_call(model, ours.feeds), "ours": lambda: ours.runner.run(ours.feeds)}
        times = interleaved(calls, _ROUNDS, 3)
    speed = ratio(times, "eager", "ours")
    return Row(
        f"CODA {keys}: engine against PyTorch eager, reduction 4",
        f"{speed:.2f}x (best {min(times['ours']):.0f} against {min(times['eager']):.0f} ms)",
        ">= 1x",
        speed >= 1,
        _how(),
    )
