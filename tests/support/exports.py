"""A zoo of exports: tiny models with random weights, exported by the tools that people use. Its recipes are in
export_recipes.py.

``Zoo(folder).export(recipe)`` makes one, once; models are made once each. TorchScript's exporter makes most of them,
since it takes a second where the others take ten.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import transformers

from .sentence_folders import sentence_folder
from .tiny_models import word_tokenizer

Module = torch.nn.Module
TEXT = ("input_ids", "attention_mask")
TYPED = (*TEXT, "token_type_ids")
_ROWS, _LENGTH = 2, 8
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}


@dataclass(frozen=True)
class Family:
    """A model: the class of transformers, its ``config`` and the inputs and outputs that its exports have."""

    type: str
    cls: str
    config: dict[str, Any]
    inputs: tuple[str, ...] = TEXT
    outputs: tuple[str, ...] = ("last_hidden_state",)
    sentence: str = ""


FAMILIES = {
    "bert": Family("bert", "BertModel", _SIZES, TYPED, ("last_hidden_state", "pooler_output")),
    "classifier": Family("bert", "BertForSequenceClassification", {**_SIZES, "num_labels": 5}, TYPED, ("logits",)),
    "masked": Family("bert", "BertForMaskedLM", _SIZES, TYPED, ("logits",)),
    "distilbert": Family(
        "distilbert",
        "DistilBertModel",
        {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 40},
    ),
    "roberta": Family("roberta", "RobertaModel", {**_SIZES, "type_vocab_size": 1, "pad_token_id": 1}),
    "albert": Family("albert", "AlbertModel", {**_SIZES, "embedding_size": 16}, TYPED),
    "modernbert": Family(
        "modernbert",
        "ModernBertModel",
        {
            **_SIZES,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 8,
        },
    ),
    "gpt2": Family(
        "gpt2",
        "GPT2LMHeadModel",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "initializer_range": 0.3},
        outputs=("logits",),
    ),
    "llama": Family("llama", "LlamaForCausalLM", _DECODER, outputs=("logits",)),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _DECODER, outputs=("logits",)),
    "gemma": Family("gemma", "GemmaForCausalLM", _DECODER, outputs=("logits",)),
    "vit": Family(
        "vit",
        "ViTForImageClassification",
        {**_SIZES, "image_size": 16, "patch_size": 4, "num_labels": 7},
        ("pixel_values",),
        ("logits",),
    ),
    "resnet": Family(
        "resnet",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 7, "layer_type": "basic"},
        ("pixel_values",),
        ("logits",),
    ),
    "mean": Family("bert", "BertModel", _SIZES, TYPED, ("token_embeddings", "sentence_embedding"), "mean"),
    "cls": Family("bert", "BertModel", _SIZES, TYPED, ("sentence_embedding",), "cls"),
    "dense": Family("bert", "BertModel", _SIZES, TYPED, ("sentence_embedding",), "dense"),
    "t5": Family(
        "t5",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
        ("input_ids", "attention_mask", "decoder_input_ids"),
        ("logits",),
    ),
    "bart": Family(
        "bart",
        "BartForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 40,
            "init_std": 0.3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
        },
        ("input_ids", "attention_mask", "decoder_input_ids"),
        ("logits",),
    ),
}

Break = Callable[[Any], Any]
Edit = Callable[[Path], None]


@dataclass(frozen=True)
class Recipe:
    """How an export is made: by ``exporter`` of ``family``'s model, which ``breaks`` changes before, and ``edits``
    change after. ``at`` are the modules that may be named for its fault, by default the one that it ``breaks``, none of
    a right one; ``rewrite`` is a tool that makes another file of it. ``kind`` is a word of what is to be said."""

    name: str
    family: str
    breaks: Break | None = None
    kind: str = ""
    at: tuple[str, ...] = ()
    exporter: str = "torchscript"
    rewrite: str = ""
    edits: Edit | None = None

    def __post_init__(self) -> None:
        if not self.at and (path := getattr(self.breaks, "path", None)):
            object.__setattr__(self, "at", (path,))

    @property
    def is_right(self) -> bool:
        return not self.at


class Zoo:
    """Makes models and exports in ``folder``, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model(self, family: str) -> Path:
        path = self.folder / "models" / family
        if not path.is_dir():
            made = FAMILIES[family]
            model = make_model(made)
            if made.sentence:
                sentence_folder(path, model, made.sentence)
            else:
                model.save_pretrained(path)
            word_tokenizer(64).save(str(path / "tokenizer.json"))
        return path

    def export(self, recipe: Recipe) -> Path:
        folder = self.folder / "exports" / re.sub(r"\W+", "-", recipe.name)
        target = folder / "model.onnx"
        if (folder / "done").exists():
            return Path((folder / "done").read_text())
        folder.mkdir(parents=True, exist_ok=True)
        family = FAMILIES[recipe.family]
        module = load_model(family, self.model(recipe.family))
        if recipe.breaks is not None:
            recipe.breaks(module)
        with quiet():
            found = EXPORTERS[recipe.exporter](module, family, target) or target
            if recipe.edits is not None:
                recipe.edits(found)
            if recipe.rewrite:
                found = REWRITES[recipe.rewrite](found, self._feeds(family))
        (folder / "done").write_text(str(found))
        return found

    def _feeds(self, family: Family) -> list[dict[str, np.ndarray]]:
        return [{name: each.numpy() for name, each in inputs_of(family, seed).items()} for seed in range(4)]


def make_model(family: Family, seed: int = 0) -> Any:
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family.type, **family.config)
    model = getattr(transformers, family.cls)(config)
    for parameter in model.parameters():  # biases and norms start at constants; make every one matter
        parameter.data += 0.05 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer += 0.1 * torch.rand_like(buffer)
    return model.eval()


def load_model(family: Family, folder: Path) -> Any:
    if family.sentence:
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(folder), device="cpu").eval()
    return getattr(transformers, family.cls).from_pretrained(folder).eval()


def inputs_of(family: Family, seed: int = 0, length: int = _LENGTH) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    found = {}
    for name in family.inputs:
        if name == "pixel_values":
            found[name] = torch.randn(_ROWS, 3, 16, 16)
        elif name.endswith("input_ids"):
            found[name] = torch.randint(3, 64, (_ROWS, length if name == "input_ids" else 5))
        else:
            found[name] = torch.ones(_ROWS, length, dtype=torch.int64)
    if "attention_mask" in found and seed:
        found["attention_mask"][1, -3:] = 0
    if "token_type_ids" in found:
        found["token_type_ids"][:, :3] = 0
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Positional(Module):
    """A model whose inputs and outputs have places, as exporters want."""

    def __init__(self, model: Any, family: Family) -> None:
        super().__init__()
        self.model, self.names, self.outputs = model, family.inputs, family.outputs
        self.sentence = bool(family.sentence)

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = dict(zip(self.names, given, strict=True))
        if self.sentence:
            found = self.model(inputs)
        else:
            found = self.model(**inputs, **({} if self.names == ("pixel_values",) else {"use_cache": False}))
        return tuple(found[name] for name in self.outputs)


def _axes(family: Family) -> dict[str, dict[int, str]]:
    axes: dict[str, dict[int, str]] = {}
    for name in family.inputs:
        sequence = "decoder_sequence" if name.startswith("decoder") else "sequence"
        axes[name] = {0: "batch"} if name == "pixel_values" else {0: "batch", 1: sequence}
    return axes


def torchscript(model: Any, family: Family, path: Path, frozen: bool = False) -> None:
    inputs = inputs_of(family)
    with torch.no_grad():
        torch.onnx.export(
            Positional(model, family),
            tuple(inputs.values()),
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=list(inputs),
            output_names=list(family.outputs),
            dynamic_axes=None if frozen else {**_axes(family), **{name: {0: "batch"} for name in family.outputs}},
        )


def static(model: Any, family: Family, path: Path) -> None:
    torchscript(model, family, path, frozen=True)


def dynamo(model: Any, family: Family, path: Path) -> None:
    inputs = inputs_of(family)
    dims = {name: dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for name, axes in _axes(family).items()}
    torch.onnx.export(
        Positional(model, family),
        tuple(inputs.values()),
        str(path),
        dynamo=True,
        verbose=False,
        input_names=list(inputs),
        output_names=list(family.outputs),
        dynamic_shapes=(tuple(dims.values()),),
        external_data=False,
    )


def transformers_exporter(model: Any, family: Family, path: Path) -> Path:
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    OnnxExporter().export(model, inputs_of(family), config=OnnxConfig(dynamic=True)).save_pretrained(path.parent)
    return path.parent


class Cached(Module):
    """A decoder that takes a cache, perhaps an empty one, and returns one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = [(past[place], past[place + 1]) for place in range(0, len(past), 2)]
        cache = transformers.DynamicCache(ddp_cache_data=pairs)
        found = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        layers = found.past_key_values.layers
        return found.logits, *(each for layer in layers for each in (layer.keys, layer.values))


def cached(model: Any, family: Family, path: Path, has_past: bool = True) -> None:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = config.hidden_size // config.num_attention_heads
    kinds = [f"{layer}.{kind}" for layer in range(config.num_hidden_layers) for kind in ("key", "value")]
    past = [torch.randn(_ROWS, heads, 4, size) for _ in kinds if has_past]
    names = ["input_ids", "attention_mask", *(f"past_key_values.{kind}" for kind in kinds if has_past)]
    axes = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "total"}}
    mask = torch.ones(_ROWS, 7 if has_past else 3, dtype=torch.int64)
    with torch.no_grad():
        torch.onnx.export(
            Cached(model),
            (torch.randint(3, 64, (_ROWS, 3)), mask, *past),
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=names,
            output_names=["logits", *(f"present.{kind}" for kind in kinds)],
            dynamic_axes={**axes, **{name: {0: "batch", 2: "past"} for name in names[2:]}},
        )


def merged(model: Any, family: Family, path: Path) -> Path:
    """A decoder without a past and one with it in one graph, as optimum writes it: ``use_cache_branch`` chooses."""
    branches, weights, inputs = [], [], []
    for has_past in (True, False):
        cached(model, family, path, has_past)
        whole = onnx.load(path)
        made = onnx.compose.add_prefix(whole, f"{has_past}_", rename_inputs=False).graph
        inputs += whole.graph.input if has_past else ()
        weights += made.initializer
        branches.append(onnx.helper.make_graph(made.node, f"past_{has_past}", [], made.output))
    path.unlink()
    names = [value.name for value in whole.graph.output]
    chosen = onnx.helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])
    given = dict(zip(("then_branch", "else_branch"), branches, strict=True))
    node = onnx.helper.make_node("If", ["use_cache_branch"], names, **given)
    outputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names]
    graph = onnx.helper.make_graph([node], "merged", [*inputs, chosen], outputs, weights)
    found = path.with_name("decoder_model_merged.onnx")
    onnx.save(onnx.helper.make_model(graph, opset_imports=whole.opset_import, ir_version=8), found)
    return found


class Continuing(Module):
    """A decoder behind an encoder that reads both caches and returns its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, mask: torch.Tensor, ids: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own, across = (
            transformers.DynamicCache(ddp_cache_data=[(past[n + at], past[n + at + 1]) for n in range(0, len(past), 4)])
            for at in (0, 2)
        )
        cache = transformers.EncoderDecoderCache(own, across)
        states = torch.zeros(ids.shape[0], past[2].shape[2], self.model.config.d_model)
        given = {"decoder_input_ids": ids, "attention_mask": mask, "encoder_outputs": (states,), "use_cache": True}
        found = self.model(**given, past_key_values=cache)
        layers = found.past_key_values.self_attention_cache.layers
        return found.logits, *(each for layer in layers for each in (layer.keys, layer.values))


def with_past(model: Any, family: Family, path: Path) -> Path:
    """An encoder-decoder's decoder for steps, as optimum writes it."""
    config, layers = model.config, range(model.config.num_layers)
    sides = (("decoder", "past"), ("encoder", "encoder_sequence"))
    kinds = [(f"{n}.{side}.{kind}", dim) for n in layers for side, dim in sides for kind in ("key", "value")]
    past = [torch.randn(_ROWS, config.num_heads, 3 if dim == "past" else 8, config.d_kv) for _, dim in kinds]
    names = ["encoder_attention_mask", "input_ids", *(f"past_key_values.{kind}" for kind, _ in kinds)]
    axes = {name: {0: "batch", 2: dim} for name, (_, dim) in zip(names[2:], kinds, strict=True)}
    found = path.with_name("decoder_with_past_model.onnx")
    with torch.no_grad():
        torch.onnx.export(
            Continuing(model),
            (torch.ones(_ROWS, 8, dtype=torch.int64), torch.randint(3, 64, (_ROWS, 1)), *past),
            str(found),
            dynamo=False,
            opset_version=17,
            input_names=names,
            output_names=["logits", *(f"present.{kind}" for kind, dim in kinds if dim == "past")],
            dynamic_axes={**axes, names[0]: {0: "batch", 1: "encoder_sequence"}, names[1]: {0: "batch"}},
        )
    return found


def encoder_part(model: Any, family: Family, path: Path) -> None:
    text = Family(family.type, family.cls, family.config)
    torchscript(model.get_encoder(), text, path)


EXPORTERS: dict[str, Callable[[Any, Family, Path], Path | None]] = {
    "torchscript": torchscript,
    "static": static,
    "dynamo": dynamo,
    "transformers": transformers_exporter,
    "cached": cached,
    "merged": merged,
    "with_past": with_past,
    "encoder": encoder_part,
}
Feeds = list[dict[str, np.ndarray]]


def _ort_optimised(path: Path, _: Feeds) -> Path:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path.with_name("optimised.onnx"))
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return path.with_name("optimised.onnx")


def _fused(path: Path, _: Feeds) -> Path:
    from onnxruntime.transformers import optimizer

    found = path.with_name("fused.onnx")
    optimizer.optimize_model(str(path), "bert", num_heads=4, hidden_size=32).save_model_to_file(str(found))
    return found


def _int8(path: Path, _: Feeds) -> Path:
    from onnxruntime.quantization import quantize_dynamic

    found = path.with_name("int8.onnx")
    quantize_dynamic(path, found)
    return found


class _Data:
    def __init__(self, feeds: Feeds) -> None:
        self.left = list(feeds)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self.left.pop() if self.left else None


def _static_int8(form: str) -> Callable[[Path, Feeds], Path]:
    def rewrite(path: Path, feeds: Feeds) -> Path:
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

        found = path.with_name(f"{form}.onnx")
        quantize_static(
            path,
            found,
            _Data(feeds),
            quant_format=QuantFormat[form],
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm", "Conv"],
        )
        return found

    return rewrite


def _int4(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=True)
    quantizer.process()
    return quantizer.model.model


def _fp16(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    return convert_float_to_float16(model, keep_io_types=True)


def _onnxscript(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxscript import optimizer

    return optimizer.optimize(model)


def _folded(model: onnx.ModelProto) -> onnx.ModelProto:
    from polygraphy.backend.onnx import fold_constants

    return fold_constants(model, allow_onnxruntime_shape_inference=False)


def _nameless(model: onnx.ModelProto) -> onnx.ModelProto:
    """Node names and metadata lost, as simplifiers lose them."""
    for node in model.graph.node:
        node.name = ""
        del node.metadata_props[:]
    return model


def _renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Outputs that are named as nobody's."""
    names = {value.name: f"out{number}" for number, value in enumerate(model.graph.output)}
    for node in model.graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
        node.input[:] = [names.get(name, name) for name in node.input]
    for value in model.graph.output:
        value.name = names[value.name]
    return model


def _saved(change: Callable[[onnx.ModelProto], onnx.ModelProto], **settings: Any) -> Callable[[Path, Feeds], Path]:
    def rewrite(path: Path, _: Feeds) -> Path:
        found = path.with_name("rewritten.onnx")
        onnx.save(change(onnx.load(path)), found, **settings)
        return found

    return rewrite


def _openvino(path: Path, _: Feeds) -> Path:
    import openvino

    found = path.with_name("model.xml")
    openvino.save_model(openvino.convert_model(str(path)), found, compress_to_fp16=False)
    return found


REWRITES: dict[str, Callable[[Path, Feeds], Path]] = {
    "onnxruntime": _ort_optimised,
    "fused": _fused,
    "int8": _int8,
    "qdq": _static_int8("QDQ"),
    "qoperator": _static_int8("QOperator"),
    "int4": _saved(_int4),
    "fp16": _saved(_fp16),
    "onnxscript": _saved(_onnxscript),
    "polygraphy": _saved(_folded),
    "external": _saved(lambda model: model, save_as_external_data=True, location="external.bin", size_threshold=0),
    "nameless": _saved(_nameless),
    "renamed": _saved(_renamed),
    "openvino": _openvino,
}
