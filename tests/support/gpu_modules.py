"""Modules of nestforge that need a GPU's libraries to import: TensorRT's, or CUDA's from Python."""

from __future__ import annotations

# Imported where a plan is built or opened, never before TensorRT was found.
ON_A_GPU = frozenset(
    {
        *("runtime.device.cuda_memory", "runtime.device.cuda_device"),
        *(
            f"runtime.engines.tensorrt.{name}"
            for name in ("engine", "contexts", "runner", "cache_runs", "cached_runner")
        ),
        *("compiler.tensorrt.build_plan", "compiler.tensorrt.build_plan"),
    }
)
