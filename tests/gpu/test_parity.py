"""Every family's engines, segments included, on the CUDA provider against PyTorch, within the limits of the gate."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.verify import VerifyReport, verify_bundle
from nestforge.errors import BundleIncompatibleError
from nestforge.runtime.engines.onnxruntime_gpu.provider import Provider
from support.cost_eff_models import save_tiny
from support.gated_decoders import save_decoder
from support.gpu_available import Results, verified_on
from support.tiny_compile import board
from support.tiny_matlm import save_text_matlm
from support.tiny_mixer import save_tiny_mixer
from support.tiny_models import save_tiny_encoder, save_tiny_matvit, save_tiny_vit

TOKENS, IMAGES = [Bucket(1, 8), Bucket(2, 16)], [Bucket(1, 1), Bucket(4, 1)]
FAMILIES: dict[str, tuple[Callable[[Path], Path], Sequence[Bucket]]] = {
    "bert": (save_tiny_encoder, TOKENS),
    "roberta": (lambda folder: save_tiny_encoder(folder, "roberta", "ForSequenceClassification"), TOKENS),
    "electra": (lambda folder: save_tiny_encoder(folder, "electra"), TOKENS),
    "vit": (save_tiny_vit, IMAGES),
    "matformer vit": (save_tiny_matvit, IMAGES),
    "llama": (save_decoder, TOKENS),
    "matformer lm": (save_text_matlm, TOKENS),
    "sparse mixer": (save_tiny_mixer, [Bucket(2, 16)]),
    "cost-eff": (save_tiny, TOKENS),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_pytorch(cuda: Provider, results: Results, tmp_path: Path, family: str) -> None:
    save, buckets = FAMILIES[family]
    folder = save(tmp_path / "m")
    bundle = compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "b", buckets=buckets)
    with verified_on(cuda):
        report = verify_bundle(bundle, against=folder)
    _note(results, f"parity, {family}, fp32", report)
    assert report, [verdict.problem for verdict in report.engines if verdict.problem]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_equals_pytorch(cuda: Provider, results: Results, tmp_path: Path, precision: str) -> None:
    """Typed graphs of a profile for TensorRT, whose gate knows both precisions, in ONNX Runtime's CUDA kernels."""
    folder = save_tiny_encoder(tmp_path / "m")
    profile = board(budgets={"full": {}}, backend="tensorrt", precision=precision)
    bundle = compile_bundle(folder, profile, tmp_path / "b", buckets=TOKENS, emit_only=True)
    try:
        with verified_on(cuda):
            report = verify_bundle(bundle, against=folder)
    except BundleIncompatibleError as refusal:
        if precision == "fp16":
            raise
        results.add("parity, bert, bf16", "not run", "within its limits", f"ONNX Runtime refuses it: {refusal}")
        pytest.skip(str(refusal))
    _note(results, f"parity, bert, {precision}", report)
    assert report, [verdict.problem for verdict in report.engines if verdict.problem]


def _note(results: Results, what: str, report: VerifyReport) -> None:
    verdicts = report.engines
    failed = sum(bool(verdict.problem) for verdict in verdicts)
    results.add(what, f"{len(verdicts) - failed} of {len(verdicts)} engines", "all", "verify_bundle on provider cuda")
