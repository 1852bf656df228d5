"""Common to tests on a GPU: whether there is one, runs on its provider, and the table of figures."""

import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest
from nestforge.bundle.open_bundle import Bundle
from nestforge.errors import NestforgeError
from nestforge.runtime.device.device import Device
from nestforge.runtime.engines.onnxruntime_gpu.provider import Provider, provider_named
from nestforge.runtime.engines.residency import Residency
from nestforge.runtime.model import ElasticModel

# Warning of inductor on every GPU that has TF32 where the process computes without, and warnings are errors in tests.
WITHOUT_TF32 = "ignore:TensorFloat32 tensor cores:UserWarning"


@cache
def gpu_problem() -> str | None:
    """Why no test can run on a GPU here, in one line, or None."""
    try:
        provider = provider_named("cuda")
        provider.take().release()
    except NestforgeError as problem:
        return str(problem)
    return None


def needs_torch_cuda() -> None:
    """Skips where PyTorch cannot compute on the GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")


def needs_tensorrt(oldest: tuple[int, int] = (10, 3)) -> None:
    """Skips where no plan can be built, or by a release before ``oldest``."""
    from nestforge.runtime.engines.tensorrt import problem as tensorrt_problem

    if problem := tensorrt_problem():
        pytest.skip(problem)
    import tensorrt as trt

    major, minor, *_ = (int(part) for part in trt.__version__.split("."))
    if (major, minor) < oldest:
        pytest.skip(f"TensorRT {trt.__version__}, needs {oldest[0]}.{oldest[1]}")


def on(provider: Provider, bundle: Bundle) -> ElasticModel:
    """The bundle as a model whose engines run on ``provider``."""
    held: Residency = "shared" if provider.shares else "packed"
    return ElasticModel(bundle, dict.fromkeys((e.id for e in bundle.manifest.engines), held), 1, provider)


@contextmanager
def verified_on(provider: Provider) -> Iterator[None]:
    """Within it, ``verify_bundle`` runs every engine's own graph on ``provider`` in place of the processor."""
    from nestforge.compiler import verify
    from nestforge.compiler.engines import segments, whole
    from nestforge.runtime.engines.runner import EnginePool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "ElasticModel", partial(ElasticModel, provider=provider))
        patch.setattr(segments, "EnginePool", partial(EnginePool, provider=provider))
        patch.setattr(verify, "proof_bundle", nullcontext)
        yield


def milliseconds(calls: Mapping[str, Callable[[], object]], rounds: int = 50) -> dict[str, float]:
    """Median time of each call, taken in turns; each has to end when its work has. The first turns are left out: in
    them kernels are loaded and graphs captured, for which ONNX Runtime runs an engine several times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 10):
        for name, call in calls.items():
            started = perf_counter()
            call()
            if number >= 10:
                times[name].append(1e3 * (perf_counter() - started))
    return {name: median(measured) for name, measured in times.items()}


@dataclass
class Results:
    """The figures of one run of the tests."""

    rows: list[dict[str, str]] = field(default_factory=list)

    def add(self, what: str, found: str, wanted: str, how: str) -> None:
        """One row of the table."""
        self.rows.append({"what": what, "found": found, "wanted": wanted, "how": how})

    def write(self, path: Path, device: Device | None) -> None:
        """``path`` as Markdown, and the same as JSON beside it."""
        facts = {"device": str(getattr(device, "name", "none")), "host": platform.platform(), **_versions()}
        facts["command"] = " ".join(["pytest", *sys.argv[1:]])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps({"host": facts, "results": asdict(self)["rows"]}, indent=1))
        lines = [f"- {name}: {value}" for name, value in facts.items()]
        lines += ["", "| what | found | wanted | how |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(row.values())} |" for row in self.rows]
        path.write_text("# Measured on a GPU\n\n" + "\n".join(lines) + "\n")


def _versions() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("nestforge", "onnxruntime-gpu", "torch", "tensorrt", "cuda-bindings", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {"python": platform.python_version(), **found}
