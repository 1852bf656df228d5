"""Heads on the whole road: planned, sliced, proven equal to PyTorch, published, and answered from the bundle."""

from __future__ import annotations

from pathlib import Path

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.exporters.source import open_source
from nestforge.runtime.inputs.arrays import random_feeds
from support.hugging_face_classes import save_class
from support.tiny_compile import BUCKET, board, save_tiniest


@pytest.mark.parametrize(
    ("model_type", "class_name", "outputs"),
    [
        ("bert", "BertForQuestionAnswering", ["start_logits", "end_logits"]),
        ("bert", "BertForMultipleChoice", ["logits"]),
        ("electra", "ElectraForPreTraining", ["logits"]),
        ("llama", "LlamaForSequenceClassification", ["logits"]),
        ("qwen3", "Qwen3Model", ["last_hidden_state"]),
        ("vit", "ViTForMaskedImageModeling", ["reconstruction"]),
    ],
)
def test_a_head_is_compiled_and_answers_as_transformers_does(
    tmp_path: Path, model_type: str, class_name: str, outputs: list[str]
) -> None:
    import transformers

    folder = save_class(tmp_path / "m", model_type, class_name, num_hidden_layers=1)
    compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    signature = open_source(folder).signature
    assert [spec.name for spec in bundle.manifest.outputs] == outputs
    assert {engine.emitted for engine in bundle.manifest.engines} == {"sliced"}
    feeds = random_feeds(signature.inputs, signature.buckets([BUCKET], [BUCKET])[0])
    given = {name: torch.from_numpy(array) for name, array in feeds.items()}
    if class_name.endswith("MultipleChoice"):
        given = {name: tensor.unsqueeze(1) for name, tensor in given.items()}
    with torch.no_grad():
        expected = getattr(transformers, class_name).from_pretrained(folder, dtype=torch.float32).eval()(**given)
    with nestforge.load(tmp_path / "b") as model:
        answer = model(feeds)
    for name in outputs:
        np.testing.assert_allclose(answer[name], expected[name].numpy(), atol=2e-5, rtol=1e-4, err_msg=name)


def test_text_is_tokenised_as_transformers_does(tmp_path: Path) -> None:
    """tokenizer_config.json says the opposite of tokenizer.json, which lowers case."""
    import transformers

    folder = save_tiniest(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": false}')
    compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "b")
    text = "the Quick FOX"
    given = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    assert given["input_ids"].tolist() == [[2, 4, 1, 1, 3]]
    with torch.no_grad():
        expected = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()(**given)
    with nestforge.load(tmp_path / "b") as model:
        answer = model(text)
    np.testing.assert_allclose(answer["last_hidden_state"], expected["last_hidden_state"].numpy(), atol=2e-5, rtol=1e-4)
