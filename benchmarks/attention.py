"""MHE attention: forms against the naive export, and decoding against ordinary heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import numpy as np
import onnxruntime
import torch

from .. import load
from ..bucket import Bucket
from ..bundle.entries.tensor_spec import TensorSpec
from ..bundle.manifest import WEIGHTS_NAME
from ..compiler.compile import compile_bundle
from ..compiler.graph.emit import emit
from ..compiler.graph.make_template import make_template
from ..compiler.graph.store import read_store, save_tensors
from ..compiler.planning.cost_model import predict
from ..elastic import ElasticSpec
from ..exporters.checkpoints.own_folder import save_model
from ..exporters.families.mhe.architecture.attention_ops import Sublayer, form_ops
from ..exporters.families.mhe.architecture.config import MheConfig, MheDecoderConfig
from ..exporters.families.mhe.architecture.forms import held_forms
from ..exporters.families.mhe.architecture.presets import PRESETS
from ..exporters.families.mhe.model.attention import Attention
from ..exporters.families.mhe.model.decoder import MheDecoder
from ..exporters.families.mhe.model.forms import in_form
from ..exporters.modules.cached_attention import Cache, cache_places, cached_attention
from ..exporters.trace import Interface, quiet_export, trace
from ..profiles.budget import BudgetSpec
from ..profiles.device_profile import DeviceProfile
from ..profiles.measure_rates import measure_host_rates
from ..profiles.probe_host import host_profile
from ..runtime.model import ElasticModel
from .harness import CACHE, Row, benchmark, interleaved, ratio
from .subjects import CORES, default_session, elsewhere

_FOLDER = CACHE / "mhe"
# Kind and tokens to how much faster the chosen form is than the naive export of the same module.
_BARS = {("mhe_add", 512): 1.5, ("mhe_add", 128): 1.2, ("mhe_mul", 512): 1.3, ("mhe_mul", 128): 1.1}
_MHE_ROUNDS, _RUNS = {512: 9, 128: 15}, 5
# Of a cache: valid tokens, and tokens of room.
_MHE_VALID, _CAPACITY = 128, 2048
_MHE_FASTER, _SMALLER = 2.0, 12


@benchmark
def bench_mhe() -> list[Row]:
    """MHE attention of base shape: the chosen form against the naive export, and one cached token against an MHA's."""
    here = replace(host_profile(), rates=measure_host_rates(CORES))  # as fast as it is now
    rows = [_whole(kind, tokens, bar, here) for (kind, tokens), bar in _BARS.items()]
    return [*rows, *(row for kind in ("mhe_add", "mhe_mul") for row in _cached(kind))]


def _whole(kind: str, tokens: int, bar: float, here: DeviceProfile) -> Row:
    """One sublayer of an encoder, without padding."""
    config, bucket = _config(kind), Bucket(1, tokens)
    ops = form_ops(Sublayer(config, "attention", bucket, config.num_attention_heads, config.head_size))
    form = min(held_forms(config), key=lambda one: predict(ops[one], here).predicted_ms)
    attention, folder = _drawn(config), _FOLDER / f"{kind}-{tokens}"
    x = torch.randn(1, tokens, config.hidden_size, generator=torch.Generator().manual_seed(1))
    folder.mkdir(parents=True, exist_ok=True)
    interface = HiddenStates(config.hidden_size)
    ours = block_engine(in_form(attention, form), interface, bucket, folder)
    sessions = {"ours": default_session(ours), "naive": default_session(_exported(attention, x, folder / "naive.onnx"))}
    calls = {
        name: (lambda session=session: session.run(None, {"x": x.numpy()})[0]) for name, session in sessions.items()
    }
    np.testing.assert_allclose(calls["ours"](), calls["naive"](), atol=1e-4)
    times = interleaved(calls, _MHE_ROUNDS[tokens], _RUNS)
    speed = ratio(times, "naive", "ours")
    return Row(
        f"{kind} sublayer, 1 x {tokens}, chosen form over the naive export",
        f"{speed:.2f}x (best {min(times['ours']):.2f} against {min(times['naive']):.2f} ms)",
        f">= {bar}x",
        speed >= bar,
        f"{form}; median ratio of {_MHE_ROUNDS[tokens]} interleaved rounds, both in default sessions, {CORES} threads",
    )


def _cached(kind: str) -> list[Row]:
    """One token of one sublayer over a cache, in the normal form and expanded to an MHA."""
    attention, folder = _drawn(_config(kind)), _FOLDER / f"{kind}-cached"
    steps = {form: _step(attention, form, folder / form) for form in ("normal", "expanded")}
    np.testing.assert_allclose(steps["normal"].first, steps["expanded"].first, atol=1e-4)
    times = interleaved({form: step.call for form, step in steps.items()}, rounds=15, runs=31)
    speed = ratio(times, "expanded", "normal")
    smaller = steps["expanded"].cache_bytes / steps["normal"].cache_bytes
    how = f"{_MHE_VALID} valid tokens of {_CAPACITY}, caches bound in place, default sessions, {CORES} threads"
    return [
        Row(
            f"{kind} sublayer, one cached token, normal form over form B",
            f"{speed:.2f}x (best {1e3 * min(times['normal']):.0f} against {1e3 * min(times['expanded']):.0f} us)",
            f">= {_MHE_FASTER:g}x",
            speed >= _MHE_FASTER,
            f"median ratio of 15 interleaved rounds; {how}",
        ),
        Row(
            f"{kind}: bytes of keys and values, form B over normal form",
            f"{smaller:.0f}x",
            f">= {_SMALLER}x",
            smaller >= _SMALLER,
            how,
        ),
    ]


class CachedSublayer(torch.nn.Module):
    """``attention``, in some form, on new tokens and what a cache has; to be traced."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, past_key: torch.Tensor, past_value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """``x`` [1, 1, H] at ``position_ids`` [1, 1] to [1, 1, H] and the cache, ``past_key`` and ``past_value``
        [1, K, C, d], with it."""
        places, kept = cache_places(position_ids), list[torch.Tensor]()

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: torch.Tensor | None, scale: float
        ) -> torch.Tensor:
            found, after = cached_attention(query, Cache(key, value), Cache(past_key, past_value), places, scale)
            kept.extend(after)
            return found.transpose(1, 2)

        return (self.attention(x, None, None, attend), *kept)


@dataclass(frozen=True)
class _Interface:
    """Of ``CachedSublayer`` with ``heads`` of keys in its cache."""

    hidden: int
    heads: int
    size: int

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        places = TensorSpec("position_ids", "int64", (1, 1))
        return TensorSpec("x", "float32", (1, 1, self.hidden)), places, self._kept("past_key"), self._kept("past_value")

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return TensorSpec("y", "float32", (1, 1, self.hidden)), self._kept("key"), self._kept("value")

    def _kept(self, name: str) -> TensorSpec:
        return TensorSpec(name, "float32", (1, self.heads, _CAPACITY, self.size))


@dataclass(frozen=True)
class _Step:
    """One token: ``call`` runs it, ``first`` is its answer over an empty cache."""

    call: Callable[[], object]
    first: np.ndarray
    cache_bytes: int


def _step(attention: Attention, form: str, folder: Path) -> _Step:
    config = attention.config
    heads = 1 if form == "normal" else config.num_attention_heads
    interface = _Interface(config.hidden_size, heads, config.head_size)
    block = CachedSublayer(in_form(attention, form))
    session: Any = default_session(block_engine(block, interface, Bucket(1, 1), folder))
    shape = (1, heads, _CAPACITY, config.head_size)
    caches = [onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32)) for _ in range(2)]
    x = torch.randn(1, 1, config.hidden_size, generator=torch.Generator().manual_seed(2)).numpy()
    answer = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros_like(x))

    def bound(place: int) -> Any:
        binding = session.io_binding()
        binding.bind_cpu_input("x", x)
        binding.bind_cpu_input("position_ids", np.array([[place]], np.int64))
        for given, kept, cache in zip(("past_key", "past_value"), ("key", "value"), caches, strict=True):
            binding.bind_ortvalue_input(given, cache)
            binding.bind_ortvalue_output(kept, cache)
        binding.bind_ortvalue_output("y", answer)
        return binding

    session.run_with_iobinding(bound(0))
    first, later = answer.numpy().copy(), bound(_MHE_VALID - 1)
    return _Step(lambda: session.run_with_iobinding(later), first, sum(cache.numpy().nbytes for cache in caches))


def _config(kind: str) -> MheConfig:
    return PRESETS[f"{kind.replace('_', '-')}-encoder-base"]


def _drawn(config: MheConfig) -> Attention:
    torch.manual_seed(0)
    attention = Attention(config).eval().requires_grad_(False)
    for parameter in attention.parameters():
        parameter.data = torch.randn_like(parameter) * 0.02
    return attention


def _exported(attention: Attention, x: torch.Tensor, path: Path) -> Path:
    """What ``torch.onnx.export`` makes of the literal module with its default options."""
    with quiet_export():
        program = torch.onnx.export(attention, (x,), dynamo=True, input_names=["x"], output_names=["y"], verbose=False)
    assert program is not None
    program.save(str(path), external_data=True)
    return path


_LONG_VALID, _NEW, _POSITIONS = 2048, 32, 2304
_LONG_ROUNDS, _PAUSE = 5, 0.3
_LONG_FASTER = 1.5


@benchmark
def bench_mhe_decode() -> list[Row]:
    """Tokens a second behind a long text: a decoder with MHE attention against one with ordinary heads."""
    with load(_bundle("mhe-mul"), threads=CORES) as ours, load(_bundle("mha"), threads=CORES) as other:
        steps = [(_step_ms(ours), _step_ms(other)) for _ in range(_LONG_ROUNDS)]
    speed = median(theirs / own for own, theirs in steps)
    rates = [1e3 / median(each) for each in zip(*steps, strict=True)]
    return [
        Row(
            f"tokens per second of mhe_mul over mha, {_LONG_VALID} valid tokens",
            f"{speed:.2f}x ({rates[0]:.1f} against {rates[1]:.1f} tokens/s)",
            f">= {_LONG_FASTER}x",
            speed >= _LONG_FASTER,
            f"{_LONG_ROUNDS} rounds in turn, medians of {_NEW} greedy tokens, decoders of base shape, "
            f"random weights, {CORES} threads",
        )
    ]


def _step_ms(model: ElasticModel) -> float:
    sleep(_PAUSE)
    prompt = np.random.default_rng(0).integers(3, 50_000, _LONG_VALID).tolist()
    return median(model.generate(prompt, max_tokens=_NEW, stop=[]).rows[0].token_ms)


def _bundle(kind: str) -> Path:
    path, folder = CACHE / f"{kind}-decoder.bundle", CACHE / f"{kind}-decoder-checkpoint"
    if not folder.exists():
        preset = PRESETS[f"{kind}-decoder-base"]
        assert isinstance(preset, MheDecoderConfig)
        config = replace(preset, max_position_embeddings=_POSITIONS, elastic_heads=False)
        torch.manual_seed(0)
        save_model(MheDecoder(config), config, folder)
    if not path.exists():
        device = replace(elsewhere(), buckets=(Bucket(1, 16),), budgets={"full": BudgetSpec()})
        compile_bundle(folder, device, path, include="budgets", generate=True)
    return path


@dataclass(frozen=True)
class HiddenStates:
    """The interface of a block: hidden states ``[B, S, hidden]`` in, hidden states out."""

    hidden: int

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("x", "float32", ("batch", "sequence", self.hidden)),)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("y", "float32", ("batch", "sequence", self.hidden)),)


def block_engine(block: torch.nn.Module, interface: Interface, bucket: Bucket, folder: Path) -> Path:
    """The engine of ``block`` in ``folder``: weights outside, a row of a stack a view."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().numpy() for name, value in block.named_parameters()}
    spec = ElasticSpec((), ())
    template = make_template(trace(block, interface, bucket, opset=20), spec, bucket, set(weights))
    save_tensors({name: weights[name] for name in template.weights} | dict(template.tables), folder / WEIGHTS_NAME)
    path = folder / "engine.onnx"
    path.write_bytes(emit(template, read_store(folder / WEIGHTS_NAME, spec), spec.universal()))
    return path
