"""Modules of the user's own, in memory: compiled, sliced, proven and verified as models of folders are."""

from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.elastic import Axis
from nestforge.errors import CheckpointError, ExportError, InputError, NestforgeError, PlanError, UnsupportedModelError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.families.general import MODULE
from nestforge.exporters.in_memory.examples import module_in_memory
from nestforge.exporters.source import open_source
from support.plain_modules import Branching, Custom, Looping, Mlp, OfSeven, Tagger
from support.tiny_compile import board
from torch.nn import functional

ROWS = ("batch", "sequence")
TAGGED = {"tokens": torch.ones(2, 9, dtype=torch.int64), "mask": torch.ones(2, 9, dtype=torch.int64)}
EXAMPLE = {**TAGGED, "scale": torch.ones(2)}
DYNAMIC = {"tokens": ROWS, "mask": ROWS}


def compiled(module: torch.nn.Module, output: Path, example: Any, **settings: Any) -> Path:
    return nestforge.compile(module, board(budgets={"full": {}}), output, example_inputs=example, **settings)


@pytest.fixture(scope="module")
def tagger() -> Tagger:
    torch.manual_seed(0)
    return Tagger().train()


@pytest.fixture(scope="module")
def bundle(tagger: Tagger, tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = {name: value.clone() for name, value in tagger.state_dict().items()}
    levels = {"ffn": [0.5, 1], "heads": [0.5, 1]}
    output = tmp_path_factory.mktemp("tagger") / "out"
    made = compiled(tagger, output, EXAMPLE, dynamic=DYNAMIC, buckets=["1..2x1..12"], levels=levels)
    # The user's module stays as it was: permuting and sharing weights are a copy's.
    assert all(torch.equal(value, before[name]) for name, value in tagger.state_dict().items())
    assert all(part.training for part in tagger.modules())
    return made


def test_axes_interface_and_proofs(bundle: Path) -> None:
    manifest = nestforge.open_bundle(bundle).manifest
    assert (manifest.name, manifest.family) == ("Tagger", "module")
    axes = [Axis(f"layers.{layer}.{kind}", size) for layer in (0, 1) for kind, size in (("ffn", 32), ("heads", 4))]
    assert manifest.axes == tuple(axes)
    assert [entry.id for entry in manifest.submodels] == ["ffn16-heads2", "ffn32-heads4"]
    assert all(engine.slice_problem is None for engine in manifest.engines)
    given = {spec.name: (spec.dims, spec.high, spec.row_needs) for spec in manifest.inputs}
    assert given == {"tokens": (ROWS, 50, None), "mask": (ROWS, 2, "token"), "scale": (("batch",), None, None)}
    assert {spec.name: spec.dims for spec in manifest.outputs} == {"scores": (*ROWS, 3), "of.0": ("batch", 16)}
    assert manifest.notes == ("outputs that engines do not have (not of float rows): of.1",)
    assert [proof.suite for proof in manifest.proofs] == ["slice"]
    (source,) = manifest.provenance.source
    assert (source.path, source.bytes) == ("Tagger", sum(each.nbytes for each in Tagger().parameters()))


def test_the_runtime_answers_as_the_module_does(bundle: Path, tagger: Tagger) -> None:
    given = {"tokens": torch.randint(0, 50, (2, 5)), "mask": torch.ones(2, 5, dtype=torch.int64)}
    given["scale"] = torch.tensor([0.5, 2.0])
    with torch.no_grad():
        expected: Any = tagger.eval()(**given)
    tagger.train()
    with nestforge.load(bundle) as model:
        answer = model({name: tensor.numpy() for name, tensor in given.items()})
    np.testing.assert_allclose(answer["scores"], expected["scores"], atol=1e-5)
    np.testing.assert_allclose(answer["of.0"], expected["of"][0], atol=1e-5)


def test_verify_takes_the_module_again(bundle: Path, tagger: Tagger, tmp_path: Path) -> None:
    report = nestforge.verify(bundle, against=tagger)
    assert report
    assert report.against == "Tagger"
    assert len(report.engines) == 2
    torch.manual_seed(1)
    with pytest.raises(CheckpointError, match=r"^torch.nn.Module Tagger: .*the bundle was made from another model"):
        nestforge.verify(bundle, against=Tagger())
    with pytest.raises(InputError, match=r"^the bundle was made of a module in memory, Tagger; compare it with that"):
        nestforge.verify(bundle, against=tmp_path)
    with pytest.raises(InputError, match="made of a module in memory, Tagger; compare it with that, got int 3"):
        nestforge.verify(bundle, against=3)


def test_precisions_and_layers_without_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Mlp()
    folder = compiled(module, tmp_path / "out", torch.randn(2, 8), buckets=["1..4x1"], precisions=["fp32", "fp16"])
    manifest = nestforge.open_bundle(folder).manifest
    assert manifest.axes == (Axis("layers.0.ffn", 32),)
    assert {entry.precision for entry in manifest.submodels} == {"fp32", "fp16"}
    assert nestforge.verify(folder, against=module)


def test_layers_of_pytorch_are_computed_without_their_fused_form(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    stated = {"src": ("batch", "sequence", None)}
    source = open_source(module_in_memory(module, torch.randn(2, 5, 16), stated))
    assert source.spec.axes == (Axis("layers.0.ffn", 32), Axis("layers.1.ffn", 32))
    assert "self_attn.in_proj_weight holds its steps behind those of others" in source.architecture.kept_whole[0]
    assert torch.backends.mha.get_fastpath_enabled()
    compiled(
        module, tmp_path / "out", torch.randn(2, 5, 16), dynamic=stated, buckets=["1..2x1..6"], levels={"ffn": [1]}
    )


class Scaled(Mlp):
    """Answers of double precision, times one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * self.scale).double()


class Seeing(torch.nn.Module):
    """Images of whole numbers before a convolution, to which no weight has come."""

    def __init__(self) -> None:
        super().__init__()
        self.see = torch.nn.Conv2d(3, 4, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.see(image.float() / 255).mean((2, 3))


def test_images_of_whole_numbers(tmp_path: Path) -> None:
    image, module = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8), Seeing()
    folder = compiled(module, tmp_path / "out", image, buckets=["1..4x1"], include="budgets")
    with nestforge.load(folder) as model, torch.no_grad():
        np.testing.assert_allclose(model({"image": image.numpy()})["output"], module(image), atol=1e-6)


@pytest.mark.parametrize("module", [Scaled(), torch.nn.Softmax(-1)], ids=["one number", "no parameters"])
def test_parameters_without_dimensions_and_none_at_all(module: torch.nn.Module, tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    folder = compiled(module, tmp_path / "out", x, buckets=["1..4x1"], include="budgets")
    (given,) = nestforge.open_bundle(folder).manifest.inputs
    with nestforge.load(folder) as model, torch.no_grad():
        np.testing.assert_allclose(model({given.name: x.numpy()})["output"], module(x), atol=1e-6)


class Parting(Mlp):
    """Says the opposite at one length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return -found if x.shape[1] == 11 else found


WIDE = {"x": torch.randn(2, 7, 8)}
REFUSED: dict[str, tuple[torch.nn.Module, Any, type[NestforgeError], str]] = {
    "a branch on values": (
        Branching(),
        WIDE,
        UnsupportedModelError,
        r"Branching does not run without numbers at plain_modules.py:\d+ \(return -found if found.sum\(\) > 0 else "
        r"found\): what runs depends on values there, which no graph can; choose by torch.where",
    ),
    "a custom operator": (
        Custom(),
        WIDE,
        UnsupportedModelError,
        r"at plain_modules.py:\d+ \(.*\): nestforge_tests::thrice is a custom operator, which no graph has",
    ),
    "a length that parameters fix": (
        OfSeven(),
        WIDE,
        InputError,
        r"dynamic: OfSeven is made for one size of sequence: it runs at 7 and not at 6 at plain_modules.py:\d+ .*; "
        "state None in its place: ",
    ),
    "a branch on a length": (
        Parting(),
        WIDE,
        ExportError,
        r"Parting at 1..2x1..12: the module does other things at some sizes: it branches on sequence 11 at "
        r"test_module.py:\d+ \(return -found if x.shape\[1\] == 11 else found\); ask for static buckets",
    ),
    "a length that the trace freezes": (
        Looping(),
        WIDE,
        ExportError,
        r"Looping at 1..2x1..12: the module is made for one size: sequence of x is frozen at plain_modules.py:\d+ "
        r"\(for step in range\(int\(x.shape\[1\]\)\):\); ask for static buckets",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_engine_computes_is_refused_at_its_line(case: str, tmp_path: Path) -> None:
    module, example, error, expected = REFUSED[case]
    with pytest.raises(error, match=expected) as refusal:
        compiled(module, tmp_path / "out", example, dynamic={"x": (*ROWS, None)}, buckets=["1..2x1..12"])
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


class Striding(torch.nn.Module):
    """Sound ``[B, 4, S]`` to half its steps, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.wave, self.out = torch.nn.Conv1d(4, 8, 3, stride=2), torch.nn.Linear(8, 2)

    def forward(self, sound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.wave(sound)
        return found, self.out(found.mean(-1).relu())


def test_a_sequence_behind_its_features_and_outputs_of_a_share_of_it(tmp_path: Path) -> None:
    stated = {"sound": ("batch", None, "sequence")}
    folder = compiled(Striding(), tmp_path / "out", torch.randn(2, 4, 19), dynamic=stated, buckets=["1..2x5..12"])
    manifest = nestforge.open_bundle(folder).manifest
    assert [(spec.name, spec.dims) for spec in manifest.outputs] == [("output_1", ("batch", 2))]
    assert manifest.notes == ("outputs that engines do not have (not of float rows): output_0",)


class Filled(torch.nn.Module):
    """Attends within blocks of four tokens, to which a text is filled up, by whole numbers that nothing trains; with
    ``parts`` it branches behind that."""

    def __init__(self, parts: bool = False) -> None:
        super().__init__()
        self.embed, self.up, self.down = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.order = torch.nn.Parameter(torch.arange(16).flip(0), requires_grad=False)
        self.register_buffer("last", torch.arange(4).flip(0))
        self.parts = parts

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = ids.shape[1]
        x = self.embed(functional.pad(ids, (0, (4 - tokens % 4) % 4))).unflatten(1, (-1, 4))[:, :, self.last]
        x = (x + functional.scaled_dot_product_attention(x, x, x)).flatten(1, 2)[..., self.order]
        x = x + self.down(self.up(x).relu())
        return -x[:, :tokens] if self.parts and tokens == 7 else x[:, :tokens]


def test_filled_up_to_a_multiple_with_parameters_of_whole_numbers(tmp_path: Path) -> None:
    module, ids = Filled(), torch.randint(50, (2, 9))
    settings: dict[str, Any] = {"dynamic": {"ids": ROWS}, "buckets": ["1..2x1..12"], "levels": {"ffn": [0.5, 1]}}
    folder = compiled(module, tmp_path / "out", ids, **settings)
    manifest = nestforge.open_bundle(folder).manifest
    assert manifest.outputs[0].dims == ("batch", "sequence", 16)
    assert [entry.id for entry in manifest.submodels] == ["ffn16", "ffn32"]
    assert nestforge.verify(folder, against=module)
    assert isinstance(module.order, torch.nn.Parameter), "the module itself stays as it is"
    with nestforge.load(folder) as model, torch.no_grad():
        for tokens in (1, 4, 7, 12):
            ids = torch.randint(50, (2, tokens))
            np.testing.assert_allclose(model({"ids": ids.numpy()})["output"], module(ids), atol=1e-5)
    with pytest.raises(ExportError, match=r"it branches on sequence 7 at test_module.py:\d+ "):
        compiled(Filled(parts=True), tmp_path / "none", ids, **settings)


def test_the_least_length_is_said(tmp_path: Path) -> None:
    stated = {"sound": ("batch", None, "sequence")}
    for buckets, expected in (
        (["1..2x1..12"], r"bucket 1..2x1..12: the model takes at least 3 tokens; ask for 1..2x3..12"),
        (["2x2"], r"bucket 2x2: the model takes at least 3 tokens; ask for 2x3"),
    ):
        with pytest.raises(ExportError, match=expected):
            compiled(Striding(), tmp_path / "out", torch.randn(2, 4, 9), dynamic=stated, buckets=buckets)
    source = open_source(module_in_memory(Striding(), torch.randn(2, 4, 3), stated))
    assert source.signature.min_sequence == 3
    usual = [Bucket.parse("1..8x1..128"), Bucket.parse("1x8")]
    assert list(map(str, source.signature.buckets(None, usual))) == ["1..8x3..128", "1x8"]


class Infinite(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (-super().forward(x).abs()).log()


def test_rows_rank_the_axes_and_answers_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.random.default_rng(0).standard_normal((300, 8)).astype("f4"))
    settings: dict[str, Any] = {"buckets": ["1..4x1"], "levels": {"ffn": [0.5, 1]}, "data": tmp_path / "rows.npz"}
    manifest = nestforge.open_bundle(compiled(Mlp(), tmp_path / "out", torch.randn(2, 8), **settings)).manifest
    assert manifest.ranking.method == "taylor"
    assert all(entry.quality is not None for entry in manifest.submodels)
    with pytest.raises(ExportError, match=r"Infinite answers with NaN or infinite numbers on x \[2, 8\], which no eng"):
        compiled(Infinite(), tmp_path / "none", torch.ones(2, 8), buckets=["2x1"])


def test_of_shapes_that_are_asked_one_by_one_none_is_frozen(tmp_path: Path) -> None:
    shapes, whole = ["2x3", "2x7"], {"ffn": [1]}
    folder = compiled(Looping(), tmp_path / "out", WIDE, dynamic={"x": (*ROWS, None)}, buckets=shapes, levels=whole)
    assert len(nestforge.open_bundle(folder).manifest.engines) == 2


def test_what_only_folders_have_is_refused(tmp_path: Path, tagger: Tagger) -> None:
    with pytest.raises(PlanError, match="generate: Mlp cannot; expected a causal language model"):
        compiled(Mlp(), tmp_path / "out", torch.randn(2, 8), generate=True)
    with pytest.raises(InputError, match=r"example_inputs: expected with a torch\.nn\.Module alone"):
        nestforge.compile(tmp_path, example_inputs=torch.randn(2, 8))
    with pytest.raises(InputError, match=r"model: expected str, Path or torch\.nn\.Module, got int 3"):
        nestforge.compile(3)
    with pytest.raises(CheckpointError, match="is that of a module in memory, which no folder holds"):
        MODULE.read(Checkpoint(tmp_path, {"model_type": "torch.nn.Module"}, {}))
    with pytest.raises(ExportError, match=r"bucket b1-s40: the model takes at most 24 tokens"):
        compiled(tagger, tmp_path / "out", EXAMPLE, dynamic=DYNAMIC, buckets=["1x40"])
