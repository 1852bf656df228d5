"""Small models compiled with KV-cache engines for the processor and for TensorRT, their plans, and what transformers
generates: Llama and T5 with tokenizers, a language model with elastic heads, an MHE pair."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.tensorrt import check_plan
from nestforge.compiler.tensorrt.build_bundle import build_plans
from nestforge.runtime.generation.row import Generated
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.fake_cuda import World
from support.fake_tensorrt import host_with_gpu
from support.gated_decoders import save_decoder
from support.once import made_once
from support.tiny_compile import board
from support.tiny_matlm import save_tiny_matlm
from support.tiny_mhe import save_tiny_pair
from support.tiny_models import V1_1, edit_config, save_t5
from support.tokenizer_files import CHATML, byte_level

VOCABULARY = 512


def save_text_llama(folder: Path) -> Path:
    """With 256 positions."""
    save_decoder(folder, vocab_size=VOCABULARY, head_dim=8, max_position_embeddings=256)
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    return folder


def llama_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder ``model`` and what is compiled of it, ``bundle``: levels S to XL, ffn8 to ffn32. Only to be read."""

    def make(folder: Path) -> None:
        options = {"buckets": [Bucket(1, 16)], "generate": True, "measure": False}
        nestforge.compile(save_text_llama(folder / "model"), "raspberry-pi-5", folder / "bundle", **options)

    return made_once(factory, "llama", make)


def t5_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder ``t5``, of a model with a head of its own and a gate, and what is compiled of it, ``t5.bundle``: the
    order of its neurons is kept. Only to be read."""

    def make(folder: Path) -> None:
        compile_t5(edit_config(save_t5(folder / "t5", **V1_1), nested=True), folder / "t5.bundle")

    return made_once(factory, "t5", make)


def compile_t5(model: Path, output: Path, **options: Any) -> Path:
    """The bundle of ``model``: ffn32, and a submodel whose layers have widths of their own."""
    common = {"buckets": [Bucket(1, 16)], "include": "budgets", "measure": False}
    submodels = ["ffn8x1_24x1_16x1"]
    return nestforge.compile(
        model, "raspberry-pi-5", output, generate=True, **{**common, "submodels": submodels, **options}
    )


def generated_by_transformers(folder: Path, prompt: Sequence[int], tokens: int) -> list[int]:
    """The ``tokens`` most likely ones behind ``prompt``, and no more than the text has."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    module: Any = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    # Its cache has as many layers as the encoder, which here has fewer than the decoder.
    found = module.generate(torch.tensor([list(prompt)]), max_new_tokens=tokens, do_sample=False, use_cache=False)
    return list(found[0, 1:].tolist())


def greedy(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    """The ``tokens`` behind ``prompt`` of the language model in ``folder``."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    found = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return list(found[0, len(prompt) :].tolist())


# The largest, one with its heads, and one with fewer.
WHOLE, SAME_HEADS, NARROW = "ffn32-heads4", "ffn16-heads4", "ffn16-heads3"
CAPACITIES = (16, 40)
# Submodels of the T5, and of an MHE pair whose submodels keep fewer heads, of their texts and of prompts.
SMALL = "ffn8x1_24x1_16x1"
WHOLE_PAIR, NARROW_PAIR = "ffn48-heads4-cross_heads4", "ffn48-heads4x1_3x1-cross_heads2"
# The most tokens of a prompt with which plans are checked: with thousands it takes long.
_MOST_CHECKED = 48
# The first release whose parser takes KV-cache graphs.
RELEASE = "10.15.0"


def generating_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder ``model`` and what is compiled of it, each with the three submodels: ``graphs`` for TensorRT,
    ``plans``, which has plans beside them as ``played_gpu`` builds them, and ``processor`` for ONNX Runtime. Only to be
    read."""

    def make(folder: Path) -> None:
        sizes = {"num_hidden_layers": 2, "intermediate_size": 32, "max_position_embeddings": 48}
        model = save_tiny_matlm(folder / "model", nested_heads=True, **sizes)
        options: dict[str, Any] = {"submodels": [SAME_HEADS, NARROW], "include": "budgets"}
        options |= {"levels": {"ffn": (1.0,), "heads": (1.0,)}, "generate": True}
        common: dict[str, Any] = {"budgets": {"full": {}}, "buckets": ["1x8"]}
        nestforge.compile(model, board(**common), folder / "processor", measure=False, **options)
        device = board(backend="tensorrt", capacities=list(CAPACITIES), **common)
        nestforge.compile(model, device, folder / "graphs", emit_only=True, **options)
        shutil.copytree(folder / "graphs", folder / "plans")
        with played_gpu(folder):
            build_plans(folder / "plans")

    return made_once(factory, "generating-plans", make)


@contextmanager
def played_gpu(folder: Path, **facts: Any) -> Iterator[World]:
    """A host that plays a GPU, and may run what was built in ``folder``; ``facts`` are of its World."""
    with host_with_gpu(folder / "cache", **{"version": RELEASE, **facts}) as world:
        yield world


def require_same_texts(mine: ElasticModel, known: ElasticModel, requests: Iterable[Mapping[str, Any]]) -> None:
    """Sampled, since the likeliest token may stay so whatever is lost of a text."""
    for asked in requests:
        found, expected = (model.generate(temperature=1.0, seed=3, **asked).rows for model in (mine, known))
        assert [row.tokens for row in found] == [row.tokens for row in expected]


def requests_of(prompts: Sequence[Any], smallest: str, tokens: Sequence[int], drafted: int) -> list[dict[str, Any]]:
    """One row; rows that leave, in one call; drafts of the ``smallest`` submodel; that one alone."""
    alone, together, last = tokens
    return [
        {"prompt": prompts[1], "max_tokens": alone},
        {"prompt": prompts, "max_tokens": together},
        {"prompt": prompts[-1], "max_tokens": last, "draft": smallest, "drafted": drafted},
        {"prompt": prompts[-1], "max_tokens": last, "submodel": smallest},
    ]


def require_same(found: Generated, known: Generated) -> None:
    """Tokens, and as the likeliest one may stay so whatever is lost of a text, how likely each of them was."""
    for row, expected in zip(found.rows, known.rows, strict=True):
        assert (row.tokens, row.reused_tokens) == (expected.tokens, expected.reused_tokens)
        assert row.log_probabilities is not None
        assert expected.log_probabilities is not None
        mine, theirs = ([each.token for each in own.log_probabilities or ()] for own in (row, expected))
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


@contextmanager
def opened_plans(folder: Path, **facts: Any) -> Iterator[tuple[ElasticModel, World]]:
    """The model of the plans, and the host that plays its GPU."""
    with played_gpu(folder, **facts) as world, load(folder / "plans", threads=1) as model:
        yield model, world


def source_folder(factory: pytest.TempPathFactory) -> Path:
    """The folders ``t5`` and ``pair``, each with ``graphs`` for TensorRT and with ``plans``, which has plans beside
    them as ``played_gpu`` builds them, and ``pair/processor``, compiled for ONNX Runtime; the T5's is ``t5.bundle`` of
    ``t5_folder``. Only to be read."""
    t5 = t5_folder(factory)

    def make(folder: Path) -> None:
        compile_plans(t5 / "t5", folder / "t5", [SMALL], "1x16", {"ffn": (1.0,)})
        pair = save_tiny_pair(folder / "model", attention="mha", nested=True)
        levels = dict.fromkeys(("ffn", "heads", "cross_heads"), (1.0,))
        compile_plans(pair, folder / "pair", [NARROW_PAIR], "1x8", levels)
        options: dict[str, Any] = {"submodels": [NARROW_PAIR], "levels": levels, "generate": True, "measure": False}
        device = board(budgets={"full": {}}, buckets=["1x8"])
        nestforge.compile(pair, device, folder / "pair" / "processor", **options)

    return made_once(factory, "source-plans", make)


def compile_plans(
    model: Path, folder: Path, submodels: list[str], bucket: str, levels: dict[str, Sequence[float]]
) -> None:
    """``graphs`` of the ``model`` and its ``submodels``, and ``plans``."""
    device = board(backend="tensorrt", capacities=list(CAPACITIES), budgets={"full": {}}, buckets=[bucket])
    options: dict[str, Any] = {"levels": levels, "include": "budgets", "emit_only": True, "submodels": submodels}
    nestforge.compile(model, device, folder / "graphs", generate=True, **options)
    shutil.copytree(folder / "graphs", folder / "plans")
    with played_gpu(folder), few_prompt_tokens():
        build_plans(folder / "plans")


@contextmanager
def few_prompt_tokens() -> Iterator[None]:
    """Plans that read prompts are checked with short ones alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_plan, "_MOST_SCORES", 4 * _MOST_CHECKED**2)
        yield
