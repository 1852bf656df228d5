"""CODA encoders of base width: a reduction of 4 against the dense adapter model of the same checkpoint, the router's
share, what four reductions weigh, and PyTorch eager."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ....compiler.compile import compile_bundle
from ....elastic import Bucket
from ....exporters.families.coda.architecture.config import REDUCTION, CodaConfig, Router
from ....exporters.families.coda.architecture.presets import PRESETS
from ....exporters.families.coda.folder import load_model, save_model
from ....exporters.families.coda.model.encoder import CodaEncoder
from ....runtime.bundle.open_bundle import open_bundle
from ..harness import Row, interleaved, ratio
from ..kept import CACHE
from ..subjects import CORES, eager_call, elsewhere, packed

_KEYS = ("k-to-k", "k-to-all")
_BUCKET = Bucket(1, 512)
# Of the preset's twelve equal layers: what is compared is time per layer, and a small vocabulary leaves layers alone.
_LAYERS, _WORDS = 4, 1000
_ROUNDS = 12
_OFFERED = (8, 4, 2, 1)
_OF_PREDICTED, _ROUTER_SHARE, _BYTES = 0.85, 0.06, 1.01


def run() -> list[Row]:
    rows = [row for keys in _KEYS for row in (_against_dense(keys), _router(keys), _against_eager(keys))]
    return [*rows, _bytes()]


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


def _config(keys: str, router: Router = "soft_top_k") -> CodaConfig:
    schedule = PRESETS[f"coda-t5-base-{keys}"].soft_top_k if router == "soft_top_k" else None
    return replace(
        PRESETS[f"coda-t5-base-{keys}"],
        num_hidden_layers=_LAYERS,
        vocab_size=_WORDS,
        router=router,
        soft_top_k=schedule,
        reduction=4,
        reductions=_OFFERED,
        reduction_of_one="dense",
    )


def _folder(config: CodaConfig) -> Path:
    folder = CACHE / f"coda-{config.keys_of}-{config.router}-checkpoint"
    if not folder.exists():
        torch.manual_seed(0)
        save_model(CodaEncoder(config).eval(), config, folder)
    return folder


def _bundle(config: CodaConfig, reductions: tuple[int, ...] = _OFFERED) -> Path:
    path = CACHE / f"coda-{config.keys_of}-{config.router}-{'-'.join(map(str, reductions))}.bundle"
    if not path.exists():
        submodels = [_submodel(config, reduction) for reduction in reductions]
        compile_bundle(
            _folder(config), elsewhere(), path, buckets=[_BUCKET], submodels=submodels, include="budgets", measure=False
        )
    return path


def _submodel(config: CodaConfig, reduction: int) -> str:
    return f"ffn{config.intermediate_size}-{REDUCTION}{reduction}"


def _times(engines: dict[str, tuple[Path, str]]) -> dict[str, list[float]]:
    """Milliseconds of packed engines in turns; all tokens count."""
    with ExitStack() as stack:
        opened = {name: stack.enter_context(packed(*engine, _BUCKET)) for name, engine in engines.items()}
        for one in opened.values():
            one.feeds["attention_mask"][:] = 1
        calls = {name: (lambda one=one: one.runner.run(one.feeds)) for name, one in opened.items()}
        return interleaved(calls, _ROUNDS, 3)


def _how() -> str:
    return (
        f"median ratio of {_ROUNDS} interleaved rounds, {_LAYERS} layers of base width, 1 x 512, packed, "
        f"{CORES} threads"
    )


def _against_dense(keys: str) -> Row:
    config = _config(keys)
    bundle = _bundle(config)
    times = _times({"dense": (bundle, _submodel(config, 1)), "quarter": (bundle, _submodel(config, 4))})
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
    soft, first = _config(keys), _config(keys, "first_k")
    engines = {"soft": (_bundle(soft), _submodel(soft, 4)), "first": (_bundle(first, (4,)), _submodel(first, 4))}
    share = 1 - 1 / ratio(_times(engines), "soft", "first")
    return Row(
        f"CODA {keys}: the router of {soft.soft_top_k.rounds if soft.soft_top_k else 0} rounds, of a layer's time",
        f"{100 * share:.1f} %",
        f"<= {100 * _ROUTER_SHARE:.0f} %",
        share <= _ROUTER_SHARE,
        f"over layers that take the first tokens; {_how()}",
    )


def _against_eager(keys: str) -> Row:
    config = _config(keys)
    model = load_model(_folder(config))
    model.reduction = 4
    with packed(_bundle(config), _submodel(config, 4), _BUCKET) as ours:
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


def _bytes() -> Row:
    config = _config(_KEYS[-1])
    four, one = (_size(_bundle(config, reductions)) for reductions in (_OFFERED, (1,)))
    return Row(
        "CODA: four reductions over one, bytes of the bundle",
        f"{four / one:.4f}x ({four / 1e6:.1f} MB over {one / 1e6:.1f} MB)",
        f"<= {_BYTES}x",
        four / one <= _BYTES,
        f"all files; {_LAYERS} layers of base width",
    )


def _size(bundle: Path) -> int:
    return sum(path.stat().st_size for path in open_bundle(bundle).path.iterdir())
