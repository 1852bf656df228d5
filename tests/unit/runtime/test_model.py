import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.errors import BundleCorruptError, BundleError, InputError, SelectionError
from nestforge.profiles.probe_host import probe_host
from nestforge.runtime import model as model_module
from nestforge.runtime.answer import Padding
from nestforge.runtime.engines import runner as engine_runner
from nestforge.runtime.inputs.arrays import InputChecker
from support.sealing import edit_sealed

Feeds = Callable[..., dict[str, Any]]
Reference = Callable[..., dict[str, Any]]


def test_an_exact_input_is_answered_by_the_largest(tiny_bundle: Path, feeds: Feeds, expected: Reference) -> None:
    inputs = feeds(1, 8)
    with nestforge.load(tiny_bundle, threads=1) as model:
        answer = model(inputs)
    want = expected(32, inputs["input_ids"], inputs["attention_mask"])
    assert list(answer.outputs) == ["hidden", "total"]
    np.testing.assert_allclose(answer["hidden"], want["hidden"], rtol=1e-5, atol=1e-5)
    assert (answer.submodel, answer.engine, answer.bucket) == ("ffn32", "ffn32@b1-s8", Bucket(1, 8))
    assert (answer.padding, answer.truncated, answer.residency) == (None, (), "packed")
    assert answer.reason == "no limit given: the largest submodel"
    assert answer.timings.run > 0
    assert answer.timings.encode >= 0


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (1, 9), (2, 1), (2, 8), (2, 15)])
def test_a_smaller_input_is_padded_said_so_and_cut_back(
    tiny_bundle: Path, feeds: Feeds, expected: Reference, shape: tuple[int, int]
) -> None:
    inputs = feeds(*shape)
    before = {name: array.copy() for name, array in inputs.items()}
    bucket = Bucket(1, 8) if shape[0] == 1 and shape[1] <= 8 else Bucket(2, 16)
    with nestforge.load(tiny_bundle, threads=1) as model:
        answer = model(inputs, submodel="S")
    want = expected(16, inputs["input_ids"], inputs["attention_mask"])
    assert answer.padding == Padding(Bucket(*shape), bucket)
    assert {name: array.shape for name, array in answer.outputs.items()} == {
        "hidden": (*shape, 16),
        "total": (shape[0], 16),
    }
    for name, array in answer.outputs.items():
        np.testing.assert_allclose(array, want[name], rtol=1e-5, atol=1e-5)
        assert array.base is None  # the caller's own
    for name, array in before.items():
        assert np.array_equal(inputs[name], array)


def test_padding_does_not_change_a_bit(tiny_bundle: Path, feeds: Feeds) -> None:
    exact = feeds(1, 8)
    short = {name: array[:, :5] for name, array in exact.items()}
    masked = {name: array.copy() for name, array in exact.items()}
    masked["attention_mask"][:, 5:] = 0
    with nestforge.load(tiny_bundle, threads=1) as model:
        assert np.array_equal(model(short)["hidden"], model(masked)["hidden"][:, :5])
        assert np.array_equal(model(short)["total"], model(masked)["total"])


def test_limits_budget_and_label_choose(tiny_bundle: Path, feeds: Feeds) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        assert model(feeds(1, 8), latency_ms=1).reason.startswith(
            "measured here 0.4 ms <= 1 ms; next larger ffn32 (measured"
        )
        assert model(feeds(2, 16), latency_ms=3).reason.startswith("predicted 3 ms <= 3 ms; next larger ffn32")
        assert model(feeds(1, 8), budget="edge").reason == "budget edge: the largest within 1 ms"
        assert model(feeds(1, 8), submodel="XL").submodel == "ffn32"
        with pytest.raises(SelectionError, match=r"`latency_ms` <= 0.1; there is ffn32 \(measured here 2.5 ms"):
            model.choose(1, 8, latency_ms=0.1)


def figures_times(bundle: Path, factor: float) -> None:
    """The bundle states ``factor`` times what its engines were measured to take."""

    def scaled(record: dict[str, Any]) -> None:
        for point in (point for latency in record["latencies"] for point in latency["points"]):
            for name in ("predicted_ms", "measured_p50_ms", "measured_p95_ms"):
                if name in point:
                    point[name] *= factor

    edit_sealed(bundle / "build.json", scaled)


def test_a_limit_that_no_figure_keeps_is_answered_if_a_run_does(own_bundle: Path, feeds: Feeds) -> None:
    figures_times(own_bundle, 1e6)
    with nestforge.load(own_bundle, threads=1) as model:
        with pytest.raises(SelectionError, match=r"no submodel answers 1x8 with `latency_ms` <= 100000"):
            model.choose(1, 8, latency_ms=1e5)
        answer = model(feeds(1, 8), latency_ms=1e5)
        assert answer.submodel == "ffn16"
        assert answer.reason == "tried, since no run has shown lately what it takes: measured here 4e+05 ms"
        answers = [model(feeds(1, 8), latency_ms=1e5) for _ in range(6)]
        assert answers[-1].submodel == "ffn32", "what the small one showed holds for the large one"
        assert model.choose(1, 8, deadline_ms=1e5).engine.submodel == "ffn32"


def test_a_deadline_that_no_figure_keeps_is_tried_once(own_bundle: Path, feeds: Feeds) -> None:
    figures_times(own_bundle, 1e6)
    with nestforge.load(own_bundle, threads=1) as model:
        assert model(feeds(1, 8), deadline_ms=1e5).submodel == "ffn16"


def test_what_was_tried_and_seen_refuses_at_once(
    own_bundle: Path, feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestforge.runtime.running_estimate._SECONDS_FRESH", 1e9)
    figures_times(own_bundle, 1e-3)  # 0.0004 ms are stated
    with nestforge.load(own_bundle, threads=1) as model:
        runner = model._pool.get(model.choose(1, 8, submodel="ffn16").engine)
        run, count = runner.run, [0]

        def counted(inputs: Any, routing: bool) -> Any:
            count[0] += 1
            return run(inputs, routing)

        monkeypatch.setattr(runner, "run", counted)
        for runs, tried in ((2, True), (3, True), (4, True), (4, False)):
            with pytest.raises(SelectionError, match=r"no submodel answers 1x8 with `latency_ms` <= 0.0001") as refused:
                model(feeds(1, 8), latency_ms=1e-4)
            assert count[0] == runs
            assert ("; ffn16 was tried and took " in str(refused.value)) is tried


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ({"cpu": "Cortex-A76\nrev 4", "architecture": "aarch64"}, "measured on Cortex-A76 rev 4: 0.4 ms <= 1 ms"),
        ({}, "measured on an unknown processor: 0.4 ms <= 1 ms"),
    ],
    ids=["another", "unknown"],
)
def test_figures_of_another_host_are_named_so(own_bundle: Path, feeds: Feeds, host: dict[str, str], known: str) -> None:
    edit_sealed(own_bundle / "build.json", lambda record: record.update(host=host))
    with nestforge.load(own_bundle, threads=1) as model:
        assert model(feeds(1, 8), latency_ms=1).reason.startswith(known)
        assert model(feeds(2, 16), latency_ms=3).reason.startswith("predicted 3 ms <= 3 ms")


def test_text_goes_in_and_truncation_is_said(tiny_bundle: Path, expected: Reference) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        answer = model(["a nest of models", "nest"])
        ids = np.array([[1, 4, 5, 6, 7, 2], [1, 5, 2, 0, 0, 0]])
        want = expected(32, ids, np.array([[1] * 6, [1, 1, 1, 0, 0, 0]]))
        np.testing.assert_allclose(answer["total"], want["total"], rtol=1e-5, atol=1e-5)
        assert str(answer.padding) == "b2-s6 -> b2-s16"

        long = "a nest " * 10
        with pytest.raises(InputError, match="text 0: 22 tokens, the largest bucket takes 16"):
            model(long)
        answer = model(["nest", long], truncate=True)
        assert (answer.truncated, answer["hidden"].shape) == ((1,), (2, 16, 16))
        assert "1 truncated" in repr(answer)


def test_repr_is_short(tiny_bundle: Path, feeds: Feeds) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        text = repr(model(feeds(1, 5)))
        assert repr(model).endswith("tiny, 2 submodels, 4 engines), 1 threads)")
    assert text.startswith("Answer(hidden float32[1, 5, 16], total float32[1, 16]; ffn32@b1-s8, ")
    assert text.endswith(" ms (first run), padded b1-s5 -> b1-s8; no limit given: the largest submodel)")


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ({"input_ids": np.zeros((1, 4), np.int64)}, {}, "inputs input_ids: expected exactly attention_mask, input_ids"),
        (3, {}, "inputs: expected arrays by name, a text or texts, got int"),
        ([], {}, "text: expected a text or a non-empty list"),
        (["a " * 15] * 3, {}, "text 0: 17 tokens, the largest bucket takes 16"),
        ({}, {"truncate": True}, "truncate: applies to text only"),
        (["a nest", "a \udc80"], {}, "text 1: half of a surrogate pair, which is no character"),
        *(
            (kind(b"hello"), {}, f"expected arrays by input name, or text as str, got {kind.__name__}; decode it")
            for kind in (bytes, bytearray, memoryview)
        ),
    ],
)
def test_refuses(tiny_bundle: Path, inputs: Any, options: dict[str, Any], message: str) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model, pytest.raises(InputError) as error:
        model(inputs, **options)
    assert str(error.value).startswith(message)


def test_a_bundle_without_tokenizer_takes_arrays_only(
    own_bundle: Path, edit_manifest: Callable[[Path, Callable[[dict[str, Any]], object]], None], feeds: Feeds
) -> None:
    edit_manifest(own_bundle, lambda data: data.pop("text"))
    with nestforge.load(own_bundle, threads=1) as model:
        model(feeds(1, 8))
        with pytest.raises(InputError, match="has no tokenizer; pass arrays by input name"):
            model("a nest")


@pytest.mark.parametrize("residency", ["shared", "packed"])
def test_many_threads_get_their_own_answers_and_open_each_engine_once(
    tiny_bundle: Path, feeds: Feeds, expected: Reference, residency: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = engine_runner.runner_for

    def counting(bundle: Any, engine: Any, *rest: Any) -> Any:
        opened.append(engine.id)
        return real(bundle, engine, *rest)

    monkeypatch.setattr(engine_runner, "runner_for", counting)
    start = threading.Barrier(8)
    with nestforge.load(tiny_bundle, threads=1, residency=residency) as model:

        def work(seed: int) -> None:
            if seed < 8:
                start.wait(10)
            shape = (1 + seed % 2, 1 + seed % 8)
            inputs = feeds(*shape, seed=seed)
            width = 16 if seed % 3 else 32
            answer = model(inputs, submodel=f"ffn{width}")
            want = expected(width, inputs["input_ids"], inputs["attention_mask"])
            np.testing.assert_allclose(answer["hidden"], want["hidden"], rtol=1e-5, atol=1e-5)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(200)))
    assert sorted(opened) == ["ffn16@b1-s8", "ffn16@b2-s16", "ffn32@b1-s8", "ffn32@b2-s16"]


def test_preload_opens_everything_now(own_bundle: Path, feeds: Feeds) -> None:
    (own_bundle / "ffn16.b1-s8.onnx").write_bytes(b"\xff" * (own_bundle / "ffn16.b1-s8.onnx").stat().st_size)
    with nestforge.load(own_bundle, threads=1) as model:
        model(feeds(1, 8), submodel="ffn32")
        with pytest.raises(BundleError, match=r"ffn16.b1-s8.onnx: sha256 \w+, expected"):
            model(feeds(1, 8), submodel="ffn16")
    with pytest.raises(BundleError, match=r"ffn16.b1-s8.onnx: sha256 \w+, expected"):
        nestforge.load(own_bundle, threads=1, preload=True)
    with pytest.raises(BundleCorruptError, match="sha256"):
        nestforge.load(own_bundle, threads=1, check="full")


def test_a_memory_cap_decides_residencies(tiny_bundle: Path, feeds: Feeds) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        assert set(model.residencies.values()) == {"packed"}
    # Bytes: weights 3200 and 5312; private and activations of all four engines 30976.
    with nestforge.load(tiny_bundle, threads=1, memory_mb=0.0363) as model:
        assert set(model.residencies.values()) == {"shared"}
        assert model(feeds(1, 8)).residency == "shared"
    with nestforge.load(tiny_bundle, threads=1, memory_mb=0.03) as model:
        assert "ffn32@b2-s16" not in model.residencies
        with pytest.raises(SelectionError, match="submodel ffn32 has no engine for 2x16 here"):
            model(feeds(2, 16), submodel="ffn32")
    with pytest.raises(SelectionError, match=r"memory_mb=0.0479: 4 engines as packed take 0.0 MB"):
        nestforge.load(tiny_bundle, memory_mb=0.0479, residency="packed")


def test_refuses_bad_settings(tiny_bundle: Path) -> None:
    with pytest.raises(InputError, match="residency 'fast': expected one of auto, shared, packed, mapped"):
        nestforge.load(tiny_bundle, residency="fast")
    with pytest.raises(InputError, match=r"threads: expected a whole number from 1 to .*, got 0"):
        nestforge.load(tiny_bundle, threads=0)
    with pytest.raises(InputError, match=r"affinity: expected numbers of CPUs, each once, .* got 'all'"):
        nestforge.load(tiny_bundle, affinity="all")


def test_shared_engines_map_the_store_and_copy_no_weight(tiny_bundle: Path, feeds: Feeds) -> None:
    with nestforge.load(tiny_bundle, threads=1, residency="shared") as model:
        model(feeds(1, 8))
        assert str(tiny_bundle / WEIGHTS_NAME) in Path("/proc/self/maps").read_text()


def test_a_deadline_counts_the_requests_in_flight(
    tiny_bundle: Path, feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release = threading.Event(), threading.Event()
    with nestforge.load(tiny_bundle, threads=probe_host().cores, preload=True) as model:
        assert model(feeds(1, 8), deadline_ms=1000).submodel == "ffn32"
        runner = model._pool.get(model.choose(1, 8, submodel="ffn32").engine)
        run = runner.run

        def held(inputs: Any, routing: bool) -> Any:
            entered.set()
            assert release.wait(10)
            return run(inputs, routing)

        monkeypatch.setattr(runner, "run", held)
        monkeypatch.setattr(model._in_flight, "_clock", lambda: model._in_flight._at)
        monkeypatch.setattr(model_module, "perf_counter", lambda: 0.0)  # no time passes
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(model, feeds(1, 8))
            assert entered.wait(10)
            # 95 of 100 runs take 0.6 ms of their own, at half speed; the largest takes 2.9, beside itself more than 5.
            choice = model.choose(1, 8, deadline_ms=4.9)
            assert choice.engine.submodel == "ffn16"
            assert choice.reason.startswith(
                "measured here 0.4 ms (p95 0.6 ms), expected in 1.2 ms <= 4.9 ms left of 4.9, 1 in flight that needs "
                "2.5 ms more; next larger ffn32 (measured here 2.5 ms, "
            )
            assert model(feeds(1, 8), deadline_ms=4.9).submodel == "ffn16"
            with pytest.raises(
                SelectionError, match=r"`deadline_ms` <= 0.5 .* the soonest is ffn16 .*, expected in 1.2"
            ):
                model(feeds(1, 8), deadline_ms=0.5)
            release.set()
            assert first.result(10).submodel == "ffn32"
        assert model.choose(1, 8, deadline_ms=4.9).engine.submodel == "ffn32"
        assert model._in_flight.load().remaining_ms == []


def test_counts_tokens_as_its_tokenizer_does(tiny_bundle: Path) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        assert model.token_counts(["a nest of models", "nest", ""] * 100) == [6, 3, 2] * 100
        assert model.longest_sequence(2) == 16
        with pytest.raises(InputError, match="texts: expected a list of str, got str 'a nest'"):
            model.token_counts("a nest")


def test_no_memory_is_taken_for_shapes_that_the_engine_has_not(
    own_bundle: Path, feeds: Feeds, edit_manifest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_manifest(own_bundle, lambda data: [one["bucket"].update(sequence=2**21) for one in data["engines"]])
    monkeypatch.setattr(InputChecker, "filled", lambda *_: pytest.fail("filled before the engine was opened"))
    with nestforge.load(own_bundle) as model, pytest.raises(BundleCorruptError, match="the manifest says"):
        model(feeds(1, 9), submodel="ffn16")
