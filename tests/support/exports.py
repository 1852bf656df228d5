"""A zoo of exports as recipes: tiny models with random weights, exported by the tools that people use, right ones and
ones that are broken on purpose, with the module or stage that is at fault.

``Zoo(folder).export(recipe)`` makes one, once; models are made once each. TorchScript's exporter makes most of them,
since it takes a second where the others take ten.
"""

from __future__ import annotations

import contextlib
import copy
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

from .sentence_zoo import sentence_folder
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

Break = Callable[[Any], None]
Edit = Callable[[Path], None]


@dataclass(frozen=True)
class Recipe:
    """How an export is made: by ``exporter`` of ``family``'s model, which ``breaks`` changes before, and ``edits``
    change after. ``at`` are the modules that may be named for its fault, none of a right one; ``rewrites`` are tools
    that make another file of it. ``kind`` is a word of what is to be said."""

    name: str
    family: str
    exporter: str = "torchscript"
    breaks: Break | None = None
    edits: Edit | None = None
    rewrites: tuple[str, ...] = ()
    at: tuple[str, ...] = ()
    kind: str = ""

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
            for rewrite in recipe.rewrites:
                found = REWRITES[rewrite](found, self._feeds(family))
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
    """A decoder that takes a cache and returns one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = [(past[place], past[place + 1]) for place in range(0, len(past), 2)]
        cache = transformers.DynamicCache(ddp_cache_data=pairs)
        found = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        layers = found.past_key_values.layers
        return found.logits, *(each for layer in layers for each in (layer.keys, layer.values))


def cached(model: Any, family: Family, path: Path) -> None:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = config.hidden_size // config.num_attention_heads
    kinds = [f"{layer}.{kind}" for layer in range(config.num_hidden_layers) for kind in ("key", "value")]
    past = [torch.randn(_ROWS, heads, 4, size) for _ in kinds]
    names = ["input_ids", "attention_mask", *(f"past_key_values.{kind}" for kind in kinds)]
    axes = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "total"}}
    with torch.no_grad():
        torch.onnx.export(
            Cached(model),
            (torch.randint(3, 64, (_ROWS, 3)), torch.ones(_ROWS, 7, dtype=torch.int64), *past),
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=names,
            output_names=["logits", *(f"present.{kind}" for kind in kinds)],
            dynamic_axes={**axes, **{name: {0: "batch", 2: "past"} for name in names[2:]}},
        )


def encoder_part(model: Any, family: Family, path: Path) -> None:
    text = Family(family.type, family.cls, family.config)
    torchscript(model.get_encoder(), text, path)


EXPORTERS: dict[str, Callable[[Any, Family, Path], Path | None]] = {
    "torchscript": torchscript,
    "static": static,
    "dynamo": dynamo,
    "transformers": transformers_exporter,
    "cached": cached,
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


def _int4(path: Path, _: Feeds) -> Path:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(path), block_size=32, is_symmetric=True)
    quantizer.process()
    found = path.with_name("int4.onnx")
    onnx.save(quantizer.model.model, found)
    return found


def _fp16(path: Path, _: Feeds) -> Path:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    found = path.with_name("fp16.onnx")
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), found)
    return found


def _onnxscript(path: Path, _: Feeds) -> Path:
    from onnxscript import optimizer

    found = path.with_name("onnxscript.onnx")
    onnx.save(optimizer.optimize(onnx.load(path)), found)
    return found


def _polygraphy(path: Path, _: Feeds) -> Path:
    from polygraphy.backend.onnx import fold_constants

    found = path.with_name("folded.onnx")
    onnx.save(fold_constants(onnx.load(path), allow_onnxruntime_shape_inference=False), found)
    return found


def _external(path: Path, _: Feeds) -> Path:
    found = path.with_name("external.onnx")
    onnx.save(onnx.load(path), found, save_as_external_data=True, location="external.bin", size_threshold=0)
    return found


def _nameless(path: Path, _: Feeds) -> Path:
    """Node names and metadata lost, as simplifiers lose them."""
    model = onnx.load(path)
    for node in model.graph.node:
        node.name = ""
        del node.metadata_props[:]
    found = path.with_name("nameless.onnx")
    onnx.save(model, found)
    return found


def _renamed(path: Path, _: Feeds) -> Path:
    """Outputs that are named as nobody's."""
    model = onnx.load(path)
    names = {value.name: f"out{number}" for number, value in enumerate(model.graph.output)}
    for node in model.graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
        node.input[:] = [names.get(name, name) for name in node.input]
    for value in model.graph.output:
        value.name = names[value.name]
    found = path.with_name("renamed.onnx")
    onnx.save(model, found)
    return found


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
    "int4": _int4,
    "fp16": _fp16,
    "onnxscript": _onnxscript,
    "polygraphy": _polygraphy,
    "external": _external,
    "nameless": _nameless,
    "renamed": _renamed,
    "openvino": _openvino,
}


# Faults: of modules.
def part(model: Any, path: str) -> Any:
    return model.get_submodule(path)


def zero_bias(path: str) -> Break:
    return lambda model: part(model, path).bias.data.zero_()


def transpose(path: str) -> Break:
    def apply(model: Any) -> None:
        weight = part(model, path).weight
        weight.data = weight.data.T.contiguous()

    return apply


def swap_heads(path: str, heads: int = 4) -> Break:
    def apply(model: Any) -> None:
        weight = part(model, path).weight
        blocks = weight.data.reshape(heads, -1, weight.shape[1]).clone()
        weight.data = blocks[[1, 0, *range(2, heads)]].reshape(weight.shape)

    return apply


def attribute(path: str, name: str, value: Any) -> Break:
    return lambda model: setattr(part(model, path), name, value)


def narrow(path: str, dtype: torch.dtype = torch.float16) -> Break:
    def apply(model: Any) -> None:
        weight = part(model, path).weight
        weight.data = weight.data.to(dtype).float()

    return apply


def ones(path: str) -> Break:
    return lambda model: part(model, path).weight.data.fill_(1.0)


def replace(path: str, made: Callable[[Any], Module]) -> Break:
    def apply(model: Any) -> None:
        parent, _, name = path.rpartition(".")
        owner = part(model, parent)
        setattr(owner, name, made(part(model, path)))

    return apply


class Skipped(Module):
    """The module's first input in the place of its output."""

    def forward(self, first: Any, *_: Any, **__: Any) -> Any:
        return first


class Function(Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def given(path: str, before: Callable[[dict[str, Any]], None]) -> Break:
    """Changes what a module is given by keyword."""

    def apply(model: Any) -> None:
        def change(_m: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            before(kwargs)
            return args, kwargs

        part(model, path).register_forward_pre_hook(change, with_kwargs=True)

    return apply


def _ignore_mask(kwargs: dict[str, Any]) -> None:
    kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])


def _ignore_types(kwargs: dict[str, Any]) -> None:
    kwargs["token_type_ids"] = torch.zeros_like(kwargs["token_type_ids"])


def _later(kwargs: dict[str, Any]) -> None:
    ids = kwargs["input_ids"]
    kwargs["position_ids"] = torch.cumsum(torch.ones_like(ids), 1)


def _see_all(kwargs: dict[str, Any]) -> None:
    ids = kwargs["input_ids"]
    kwargs["attention_mask"] = torch.zeros_like(ids)[:, None, None, :] * ids[:, None, :, None].float()


def another_seed(model: Any) -> None:
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.data = parameter.data.flatten()[torch.randperm(parameter.numel())].reshape(parameter.shape)


def later_revision(model: Any) -> None:
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.data += 0.02 * parameter.data.std().nan_to_num(0.1) * torch.randn_like(parameter)


def rotary_base(path: str, base: float) -> Break:
    def apply(model: Any) -> None:
        rotary = part(model, path)
        size = 2 * rotary.inv_freq.numel()
        rotary.inv_freq = base ** -(torch.arange(0, size, 2).float() / size)

    return apply


# Faults: of graphs.
def unfix(path: Path) -> None:
    """Declares sizes dynamic that were traced as fixed."""
    model = onnx.load(path)
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        dims[0].dim_param = "batch"
        if len(dims) == 2:
            dims[1].dim_param = "sequence"
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    onnx.save(model, path)


E = "encoder.layer"


def _right() -> list[Recipe]:
    found = [Recipe(family, family) for family in FAMILIES]
    found += [Recipe(f"{family} by dynamo", family, "dynamo") for family in ("bert", "llama", "vit", "gpt2")]
    found += [Recipe(f"{family} by transformers", family, "transformers") for family in ("bert", "qwen3")]
    found += [Recipe(f"{family} with a cache", family, "cached") for family in ("gpt2", "llama", "qwen3")]
    found += [Recipe(f"{family}, its encoder", family, "encoder") for family in ("t5", "bart")]
    found += [Recipe("bert static", "bert", "static")]
    for rewrite in REWRITES:
        for family in ("bert", "vit"):
            if (family, rewrite) not in {("vit", "fused"), ("vit", "renamed"), ("vit", "external")}:
                found.append(Recipe(f"{family} {rewrite}", family, rewrites=(rewrite,)))
    found += [Recipe(f"mean {rewrite}", "mean", rewrites=(rewrite,)) for rewrite in ("onnxruntime", "int8", "fp16")]
    found += [Recipe("llama int4", "llama", rewrites=("int4",)), Recipe("gpt2 fp16", "gpt2", rewrites=("fp16",))]
    return found


def _wrong() -> list[Recipe]:
    attention = f"{E}.1.attention.self"
    gelu = torch.nn.functional.gelu
    return [
        Recipe("bias dropped", "bert", breaks=zero_bias(f"{attention}.value"), at=(f"{attention}.value",), kind="bias"),
        Recipe(
            "bias dropped by dynamo",
            "bert",
            "dynamo",
            zero_bias(f"{E}.0.output.dense"),
            at=(f"{E}.0.output.dense",),
            kind="bias",
        ),
        Recipe(
            "bias dropped, nameless",
            "bert",
            breaks=zero_bias(f"{E}.0.intermediate.dense"),
            rewrites=("nameless",),
            at=(f"{E}.0.intermediate.dense",),
            kind="bias",
        ),
        Recipe(
            "bias dropped, optimised",
            "bert",
            breaks=zero_bias(f"{attention}.query"),
            rewrites=("onnxruntime",),
            at=(f"{attention}.query", attention),
            kind="bias",
        ),
        Recipe(
            "bias dropped, fused",
            "bert",
            breaks=zero_bias(f"{E}.1.output.dense"),
            rewrites=("fused",),
            at=(f"{E}.1.output", f"{E}.1.output.dense", f"{E}.1.output.LayerNorm"),
        ),
        Recipe(
            "bias dropped by transformers",
            "bert",
            "transformers",
            zero_bias(f"{attention}.value"),
            at=(f"{attention}.value", attention),
            kind="bias",
        ),
        Recipe(
            "classifier bias dropped", "classifier", breaks=zero_bias("classifier"), at=("classifier",), kind="bias"
        ),
        Recipe(
            "heads swapped", "bert", breaks=swap_heads(f"{attention}.query"), at=(f"{attention}.query",), kind="heads"
        ),
        Recipe(
            "heads swapped, polygraphy",
            "distilbert",
            breaks=swap_heads("transformer.layer.1.attention.v_lin"),
            rewrites=("polygraphy",),
            at=("transformer.layer.1.attention.v_lin",),
            kind="heads",
        ),
        Recipe(
            "epsilon",
            "bert",
            breaks=attribute(f"{E}.0.output.LayerNorm", "eps", 1e-3),
            at=(f"{E}.0.output.LayerNorm",),
            kind="epsilon",
        ),
        Recipe(
            "epsilon of a norm by rms",
            "llama",
            breaks=attribute("model.layers.0.input_layernorm", "variance_epsilon", 1e-2),
            at=("model.layers.0.input_layernorm",),
            kind="epsilon",
        ),
        Recipe(
            "transposed weight",
            "bert",
            breaks=transpose(f"{attention}.key"),
            at=(f"{attention}.key",),
            kind="transposed",
        ),
        Recipe(
            "transposed weight, onnxscript",
            "vit",
            breaks=transpose("vit.layers.1.attention.q_proj"),
            rewrites=("onnxscript",),
            at=("vit.layers.1.attention.q_proj",),
            kind="transposed",
        ),
        Recipe(
            "mask ignored",
            "bert",
            breaks=given("", _ignore_mask),
            at=(f"{E}.0.attention.self", f"{E}.0.attention"),
            kind="mask",
        ),
        Recipe(
            "mask ignored by a decoder",
            "llama",
            breaks=given("", _ignore_mask),
            at=("model.layers.0.self_attn",),
            kind="mask",
        ),
        Recipe(
            "mask ignored, int8",
            "bert",
            breaks=given("", _ignore_mask),
            rewrites=("int8",),
            at=(f"{E}.0.attention.self", f"{E}.0.attention"),
            kind="mask",
        ),
        Recipe(
            "frozen length",
            "bert",
            "static",
            edits=unfix,
            at=("embeddings", f"{E}.0.attention.self", "the graph"),
            kind="frozen",
        ),
        Recipe(
            "frozen batch",
            "vit",
            "static",
            edits=unfix,
            at=("vit.embeddings", "embeddings", "the graph"),
            kind="frozen",
        ),
        Recipe(
            "wrong pooling",
            "mean",
            breaks=lambda m: setattr(m[1], "pooling_mode", "cls"),
            at=("sentence_head.1",),
            kind="pooling",
        ),
        Recipe(
            "wrong pooling, mean for cls",
            "cls",
            breaks=lambda m: setattr(m[1], "pooling_mode", "mean"),
            at=("sentence_head.1",),
            kind="pooling",
        ),
        Recipe(
            "wrong pooling, max",
            "dense",
            breaks=lambda m: setattr(m[1], "pooling_mode", "max"),
            at=("sentence_head.1",),
            kind="pooling",
        ),
        Recipe(
            "Dense skipped",
            "dense",
            breaks=lambda m: setattr(m, "2", Function(lambda f: f)),
            at=("sentence_head.2",),
            kind="Dense",
        ),
        Recipe(
            "Normalize skipped",
            "mean",
            breaks=lambda m: setattr(m, "2", Function(lambda f: f)),
            at=("sentence_head.2",),
            kind="Normalize",
        ),
        Recipe(
            "Normalize skipped, fp16",
            "mean",
            breaks=lambda m: setattr(m, "2", Function(lambda f: f)),
            rewrites=("fp16",),
            at=("sentence_head.2",),
            kind="Normalize",
        ),
        Recipe(
            "another checkpoint",
            "bert",
            breaks=another_seed,
            at=("embeddings.word_embeddings",),
            kind="another checkpoint",
        ),
        Recipe(
            "another checkpoint, decoder",
            "gpt2",
            breaks=another_seed,
            at=("transformer.wte",),
            kind="another checkpoint",
        ),
        Recipe("stale revision", "bert", breaks=later_revision, at=("embeddings.word_embeddings",), kind="stale"),
        Recipe(
            "stale revision, vision",
            "vit",
            breaks=later_revision,
            at=("vit.embeddings.patch_embeddings.projection", "vit.embeddings"),
            kind="stale",
        ),
        Recipe(
            "tanh for erf",
            "bert",
            breaks=replace(
                f"{E}.0.intermediate.intermediate_act_fn", lambda _: Function(lambda x: gelu(x, approximate="tanh"))
            ),
            at=(f"{E}.0.intermediate.intermediate_act_fn",),
            kind="tanh",
        ),
        Recipe(
            "erf for tanh",
            "gpt2",
            breaks=replace("transformer.h.1.mlp.act", lambda _: Function(gelu)),
            at=("transformer.h.1.mlp.act",),
            kind="erf",
        ),
        Recipe(
            "relu for gelu",
            "vit",
            breaks=replace("vit.layers.0.mlp.activation_fn", lambda _: torch.nn.ReLU()),
            at=("vit.layers.0.mlp.activation_fn",),
            kind="ReLU",
        ),
        Recipe(
            "positions off by one",
            "bert",
            breaks=given("", _later),
            at=("embeddings.position_embeddings",),
            kind="positions",
        ),
        Recipe(
            "positions off by one, decoder", "gpt2", breaks=given("", _later), at=("transformer.wpe",), kind="positions"
        ),
        Recipe(
            "wrong rotary base",
            "llama",
            breaks=rotary_base("model.rotary_emb", 1e3),
            at=("model.rotary_emb", "model.layers.0.self_attn"),
            kind="rotary",
        ),
        Recipe(
            "wrong rotary base by dynamo",
            "qwen3",
            "dynamo",
            rotary_base("model.rotary_emb", 5e5),
            at=("model.rotary_emb", "model.layers.0.self_attn"),
            kind="rotary",
        ),
        Recipe(
            "scale missing",
            "llama",
            breaks=attribute("model.layers.1.self_attn", "scaling", 1.0),
            at=("model.layers.1.self_attn",),
            kind="scale",
        ),
        Recipe(
            "scale missing in an encoder",
            "bert",
            breaks=attribute(f"{E}.0.attention.self", "scaling", 1.0),
            at=(f"{E}.0.attention.self",),
            kind="scale",
        ),
        Recipe(
            "token types ignored",
            "bert",
            breaks=given("", _ignore_types),
            at=("embeddings.token_type_embeddings",),
            kind="types",
        ),
        Recipe(
            "tied table untied",
            "gpt2",
            breaks=replace("lm_head", lambda old: _untied(old)),
            at=("lm_head",),
            kind="stale",
        ),
        Recipe("causal mask off", "llama", breaks=given("", _see_all), at=("model.layers.0.self_attn",), kind="causal"),
        Recipe(
            "causal mask off, gpt2", "gpt2", breaks=given("", _see_all), at=("transformer.h.0.attn",), kind="causal"
        ),
        Recipe(
            "dtype narrowed",
            "bert",
            breaks=narrow(f"{E}.1.intermediate.dense"),
            at=(f"{E}.1.intermediate.dense",),
            kind="narrowed",
        ),
        Recipe(
            "dtype narrowed to bf16",
            "llama",
            breaks=narrow("model.layers.0.mlp.up_proj", torch.bfloat16),
            at=("model.layers.0.mlp.up_proj",),
            kind="narrowed",
        ),
        Recipe(
            "layer skipped",
            "bert",
            breaks=replace(f"{E}.1", lambda _: Skipped()),
            at=(f"{E}.1", f"{E}.1.attention"),
            kind="skipped",
        ),
        Recipe(
            "layer skipped, vision",
            "vit",
            breaks=replace("vit.layers.1", lambda _: Skipped()),
            at=("vit.layers.1", "vit.layers.1.layernorm_before"),
            kind="skipped",
        ),
        Recipe(
            "residual left out",
            "bert",
            breaks=lambda m: _no_residual(part(m, f"{E}.0.output")),
            at=(f"{E}.0.output",),
            kind="residual",
        ),
        Recipe("cache off by one", "gpt2", "cached", _shift_cache, at=("the cache",), kind="cache"),
        Recipe("cache off by one, llama", "llama", "cached", _shift_cache, at=("the cache",), kind="cache"),
        Recipe(
            "bias dropped, with a cache",
            "gpt2",
            "cached",
            zero_bias("transformer.h.1.mlp.c_fc"),
            at=("transformer.h.1.mlp.c_fc",),
            kind="bias",
        ),
        Recipe(
            "gain dropped",
            "llama",
            breaks=ones("model.layers.1.post_attention_layernorm"),
            at=("model.layers.1.post_attention_layernorm",),
            kind="gain",
        ),
        Recipe(
            "gain without its one",
            "gemma",
            breaks=lambda m: part(m, "model.layers.0.input_layernorm").weight.data.sub_(1),
            at=("model.layers.0.input_layernorm",),
            kind="gain",
        ),
        Recipe(
            "mask ignored by the decoder's encoder",
            "t5",
            breaks=given("", _ignore_mask),
            at=("encoder.block.0.layer.0.SelfAttention",),
            kind="mask",
        ),
        Recipe(
            "bias dropped across",
            "bart",
            breaks=zero_bias("model.decoder.layers.0.encoder_attn.v_proj"),
            at=("model.decoder.layers.0.encoder_attn.v_proj",),
            kind="bias",
        ),
        Recipe(
            "running mean lost",
            "resnet",
            breaks=lambda m: part(m, "resnet.encoder.stages.0.layers.0.layer.0.normalization").running_mean.zero_(),
            at=(
                "resnet.encoder.stages.0.layers.0.layer.0.normalization",
                "resnet.encoder.stages.0.layers.0.layer.0",
                "resnet.encoder.stages.0.layers.0.layer.0.convolution",
            ),
        ),
        Recipe(
            "layer skipped, int8",
            "bert",
            breaks=replace(f"{E}.0", lambda _: Skipped()),
            rewrites=("int8",),
            at=(f"{E}.0", f"{E}.0.attention", f"{E}.0.attention.self"),
            kind="skipped",
        ),
        Recipe(
            "wrong activation, openvino",
            "bert",
            breaks=replace(f"{E}.0.intermediate.intermediate_act_fn", lambda _: torch.nn.ReLU()),
            rewrites=("openvino",),
            at=(f"{E}.0.intermediate.intermediate_act_fn",),
            kind="ReLU",
        ),
        Recipe(
            "scale missing, fp16",
            "bert",
            breaks=attribute(f"{E}.1.attention.self", "scaling", 1.0),
            rewrites=("fp16",),
            at=(f"{E}.1.attention.self",),
            kind="scale",
        ),
    ]


def _shift_cache(model: Any) -> None:
    """What a step reads of the values before it lies one place off."""

    def change(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None:
            for layer in cache.layers:
                layer.values = layer.values.roll(1, 2)
        return args, kwargs

    model.register_forward_pre_hook(change, with_kwargs=True)


def _untied(old: Any) -> Module:
    made = copy.deepcopy(old)
    torch.manual_seed(3)
    made.weight = torch.nn.Parameter(old.weight.data + 0.05 * torch.randn_like(old.weight))
    return made


def _no_residual(part: Any) -> None:
    part.register_forward_pre_hook(lambda _m, args: (args[0], torch.zeros_like(args[1])))


RECIPES = [*_right(), *_wrong()]
