"""Receipts, pages and reports of a check; decoders with a cache, servers, texts and other exports as the reference."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from xml.etree import ElementTree

import nestforge
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from nestforge.errors import InputError
from nestforge.exporters.source import open_source
from nestforge.parity.exports import bundle_exports
from nestforge.parity.model import open_model
from nestforge.parity.receipt import as_receipt
from nestforge.tools.cli import main
from sentence_transformers import SentenceTransformer
from support.export_recipes import RECIPES
from support.exports import Zoo
from support.small_bundle import FFN, reference
from support.tiny_mixer import save_tiny_mixer


def exported(zoo: Zoo, name: str) -> tuple[Path, Path]:
    recipe = next(recipe for recipe in RECIPES if recipe.name == name)
    return zoo.export(recipe), zoo.model(recipe.family)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["parity", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def kept(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is kept of a broken export."""
    folder = tmp_path_factory.mktemp("kept")
    export, model = exported(zoo, "bias dropped")
    files = [part for name in ("r.json", "page.html", "junit.xml") for part in ("--save", folder / name)]
    assert run(export, "--against", model, *files)[0] == 1
    return folder


def test_a_receipt_names_files_versions_cases_and_figures(kept: Path) -> None:
    receipt = json.loads((kept / "r.json").read_text())
    assert receipt["format"] == 1
    assert {Path(file).name for file in receipt["files"]} >= {"model.onnx", "model.safetensors"}
    assert all(len(facts["sha256"]) == 64 for facts in receipt["files"].values())
    assert receipt["report"]["settings"]["seed"] == 0
    assert "torch" in receipt["versions"]
    graph = receipt["report"]["graphs"][0]
    assert len(graph["figures"]) == 2 * len(graph["cases"])
    assert graph["fault"]["module"] == "encoder.layer.1.attention.self.value"


def test_a_receipt_is_checked_again(kept: Path, tmp_path: Path) -> None:
    code, said = run("--receipt", kept / "r.json")
    assert code == 1
    assert said.splitlines()[-1].startswith("PARITY BROKEN")
    receipt = json.loads((kept / "r.json").read_text())
    claims = tmp_path / "claims.json"
    claims.write_text(json.dumps({**receipt, "report": {**receipt["report"], "verdict": True}}))
    code, said = run("--receipt", claims)
    assert code == 2
    assert "which is not so" in said
    file = next(name for name in receipt["files"] if name.endswith("model.onnx"))
    receipt["files"][file]["sha256"] = "0" * 64
    claims.write_text(json.dumps(receipt))
    assert "not the file of the receipt" in run("--receipt", claims)[1]
    claims.write_text("{}")
    assert run("--receipt", claims)[0] == 2


@pytest.mark.parametrize(
    "beside", [("model.onnx", "--against", "m"), ("model.onnx",), ("--seed", "0"), ("--tolerance", "1")]
)
def test_a_receipt_has_its_own_settings(kept: Path, beside: tuple[str, ...]) -> None:
    code, said = run("--receipt", kept / "r.json", *beside)
    assert code == 2
    assert "which has its own settings" in said


def test_a_receipt_holds_own_cases_by_their_hash(zoo: Zoo, tmp_path: Path) -> None:
    export, model = exported(zoo, "mean")
    mine, other, texts, kept = (tmp_path / name for name in ("mine.npz", "other.npz", "t.txt", "r.json"))
    arrays = {name: np.ones((1, 6), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    np.savez(mine, **arrays)
    np.savez(other, **{**arrays, "input_ids": np.full((1, 6), 2)})
    texts.write_text("the quick fox\na lazy dog jumps over the model\n")
    own = ("--inputs", mine, "--text", texts)
    code, said = run(export, "--against", model, *own, "--save", kept)
    assert code == 0
    assert "your inputs" in said
    assert "texts 1 to 2" in said
    assert run("--receipt", kept, *own)[0] == 0
    for given, what in (((), "inputs"), (("--inputs", other, "--text", texts), "inputs"), (("--inputs", mine), "text")):
        code, said = run("--receipt", kept, *given)
        assert code == 2
        assert f"--{what}" in said
        assert "are not those of the receipt" in said


def test_a_page_shows_the_error_by_module(kept: Path) -> None:
    page = (kept / "page.html").read_text()
    assert "<meter" in page
    assert "encoder.layer.1.attention.self.value" in page
    assert "<script" not in page


def test_junit_has_a_case_for_each_output(kept: Path) -> None:
    suite = ElementTree.fromstring((kept / "junit.xml").read_text())[0]  # noqa: S314  (our own)
    assert int(suite.get("tests", 0)) == len(suite)
    assert 0 < int(suite.get("failures", 0)) <= len(suite)


@pytest.mark.parametrize("name", ["llama with a cache", "t5, its encoder"])
def test_parts_of_generating_models_pass(zoo: Zoo, name: str) -> None:
    report = nestforge.check_parity(*exported(zoo, name))
    assert report.is_right, report.line


def test_a_cache_off_by_one_is_found_and_named(zoo: Zoo) -> None:
    report = nestforge.check_parity(*exported(zoo, "cache off by one"))
    fault = report.graphs[0].fault
    assert not report.is_right
    assert fault.module == "the cache"


def test_another_export_is_the_reference(zoo: Zoo) -> None:
    export, _ = exported(zoo, "bert")
    assert nestforge.check_parity(exported(zoo, "bert nameless")[0], export).is_right
    assert not nestforge.check_parity(exported(zoo, "bias dropped")[0], export).is_right


def test_texts_that_cannot_be_cases_are_refused(zoo: Zoo) -> None:
    export, _ = exported(zoo, "bert")
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        nestforge.check_parity(export, export, texts=["fox"])
    for name in ("vit", "llama with a cache"):
        with pytest.raises(InputError, match="takes no texts"):
            nestforge.check_parity(*exported(zoo, name), texts=["fox"])
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        nestforge.check_parity("http://127.0.0.1:9/embed", export)


class Server:
    """An embeddings server; ``width`` numbers of each, normalised or not, or an error."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.width, self.factor, self.fails = 32, 1.0, False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                texts = asked.get("input") or asked["inputs"]
                rows = (outer.factor * model.encode(texts))[:, : outer.width].tolist()
                if self.path == "/embed":
                    data: object = rows
                else:
                    data = {"data": [{"embedding": row} for row in rows]}
                self.send_response(500 if outer.fails else 200)
                self.end_headers()
                self.wfile.write(json.dumps(data).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def server(zoo: Zoo) -> Iterator[Server]:
    made = Server(SentenceTransformer(str(zoo.model("mean")), device="cpu"))
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_a_server_is_checked_end_to_end(zoo: Zoo, server: Server) -> None:
    model = zoo.model("mean")
    for path in ("/v1/embeddings", "/embed"):
        report = nestforge.check_parity(f"{server.url}{path}", model)
        assert report.is_right, report.line
    server.factor = 2.0
    assert not nestforge.check_parity(f"{server.url}/embed", model).is_right
    server.factor, server.width = 1.0, 8
    with pytest.raises(InputError, match="8 numbers"):
        nestforge.check_parity(f"{server.url}/embed", model)
    server.fails = True
    with pytest.raises(InputError, match="500"):
        nestforge.check_parity(f"{server.url}/embed", model)


class Written(torch.nn.Module):
    """The small bundle's model, as its own reference computes it."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        found = reference(FFN, input_ids.numpy(), attention_mask.numpy())
        return {name: torch.from_numpy(array) for name, array in found.items()}


def test_a_bundle_is_asked_through_the_runtime(tiny_bundle: Path) -> None:
    report = nestforge.check_parity(tiny_bundle, Written())
    assert report.is_right, report.line
    assert report.graphs[0].kind == "bundle"
    with pytest.raises(InputError, match="a module in memory has no receipt"):
        as_receipt(report)


def test_a_bundles_precision_is_that_of_the_submodel_that_answers() -> None:
    exports = bundle_exports(Path(__file__).parents[2] / "golden" / "bundle-precisions")
    assert exports[0].precision == "fp32"  # its first engine is one of int8-dynamic
    exports[-1].close()


def test_a_checkpoint_of_our_own_format_is_a_model(tmp_path: Path) -> None:
    folder = save_tiny_mixer(tmp_path / "mixer")
    model, source = open_model(folder), open_source(folder)
    assert model.inputs == tuple(spec.name for spec in source.signature.inputs)
    ids = torch.ones(1, source.signature.max_sequence or 8, dtype=torch.int64)
    expected = source.architecture.load()(*[ids for _ in model.inputs])
    found = model.answer({name: ids.numpy() for name in model.inputs})
    for spec, tensor in zip(source.signature.outputs, expected, strict=True):
        assert np.array_equal(found[spec.name], tensor.numpy())
