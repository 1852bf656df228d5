"""Recipes of the zoo (exports.py): right exports, and ones that are broken on purpose, with the module at fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

from .exports import FAMILIES, REWRITES, Break, Module, Recipe


# Faults: of modules.
@dataclass(frozen=True)
class At:
    """``breaks`` the module at ``path`` of a model."""

    path: str
    breaks: Break

    def __call__(self, model: Any) -> None:
        self.breaks(model.get_submodule(self.path))


def zero_bias(path: str) -> At:
    return At(path, lambda part: part.bias.data.zero_())


def of_weight(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> At:
    return At(path, lambda part: setattr(part.weight, "data", change(part.weight.data)))


def transpose(path: str) -> At:
    return of_weight(path, lambda weight: weight.T.contiguous())


def swap_heads(path: str, heads: int = 4) -> At:
    order = [1, 0, *range(2, heads)]
    return of_weight(path, lambda weight: weight.reshape(heads, -1, weight.shape[1])[order].reshape(weight.shape))


def attribute(path: str, name: str, value: Any) -> At:
    return At(path, lambda part: setattr(part, name, value))


def narrow(path: str, dtype: torch.dtype = torch.float16) -> At:
    return of_weight(path, lambda weight: weight.to(dtype).float())


def ones(path: str) -> At:
    return of_weight(path, torch.ones_like)


class Replaced(At):
    def __call__(self, model: Any) -> None:
        model.set_submodule(self.path, self.breaks(model.get_submodule(self.path)))


def replace(path: str, made: Callable[[Any], Module]) -> At:
    return Replaced(path, made)


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


def given(before: Callable[[dict[str, Any]], None]) -> Break:
    """Changes what a model is given by keyword."""

    def change(_m: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        before(kwargs)
        return args, kwargs

    return lambda model: model.register_forward_pre_hook(change, with_kwargs=True)


def _ignore_mask(kwargs: dict[str, Any]) -> None:
    kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])


def _one_tensor(kwargs: dict[str, Any]) -> None:
    kwargs["input_ids"] = kwargs["attention_mask"]  # as torch.export reads both where an example is one tensor


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


def rotary_base(path: str, base: float) -> At:
    def change(rotary: Any) -> None:
        size = 2 * rotary.inv_freq.numel()
        rotary.inv_freq = base ** -(torch.arange(0, size, 2).float() / size)

    return At(path, change)


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
    found += [Recipe("gpt2 merged", "gpt2", "merged"), Recipe("llama merged", "llama", "merged")]
    found += [Recipe("t5, its decoder with a past", "t5", "with_past")]
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
        Recipe("bias dropped", "bert", breaks=zero_bias(f"{attention}.value"), kind="bias"),
        Recipe("bias dropped by dynamo", "bert", "dynamo", zero_bias(f"{E}.0.output.dense"), kind="bias"),
        Recipe(
            "bias dropped, nameless",
            "bert",
            breaks=zero_bias(f"{E}.0.intermediate.dense"),
            rewrites=("nameless",),
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
        Recipe("classifier bias dropped", "classifier", breaks=zero_bias("classifier"), kind="bias"),
        Recipe("heads swapped", "bert", breaks=swap_heads(f"{attention}.query"), kind="heads"),
        Recipe(
            "heads swapped, polygraphy",
            "distilbert",
            breaks=swap_heads("transformer.layer.1.attention.v_lin"),
            rewrites=("polygraphy",),
            kind="heads",
        ),
        Recipe("epsilon", "bert", breaks=attribute(f"{E}.0.output.LayerNorm", "eps", 0.001), kind="epsilon"),
        Recipe(
            "epsilon of a norm by rms",
            "llama",
            breaks=attribute("model.layers.0.input_layernorm", "variance_epsilon", 0.01),
            kind="epsilon",
        ),
        Recipe("transposed weight", "bert", breaks=transpose(f"{attention}.key"), kind="transposed"),
        Recipe(
            "transposed weight, onnxscript",
            "vit",
            breaks=transpose("vit.layers.1.attention.q_proj"),
            rewrites=("onnxscript",),
            kind="transposed",
        ),
        Recipe(
            "one tensor as example of two inputs",
            "bert",
            "dynamo",
            given(_one_tensor),
            at=("embeddings.word_embeddings",),
            kind="tokens that are read from attention_mask",
        ),
        Recipe(
            "mask ignored",
            "bert",
            breaks=given(_ignore_mask),
            at=(f"{E}.0.attention.self", f"{E}.0.attention"),
            kind="mask",
        ),
        Recipe(
            "mask ignored by a decoder",
            "llama",
            breaks=given(_ignore_mask),
            at=("model.layers.0.self_attn",),
            kind="mask",
        ),
        Recipe(
            "mask ignored, int8",
            "bert",
            breaks=given(_ignore_mask),
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
            kind="tanh",
        ),
        Recipe("erf for tanh", "gpt2", breaks=replace("transformer.h.1.mlp.act", lambda _: Function(gelu)), kind="erf"),
        Recipe(
            "relu for gelu",
            "vit",
            breaks=replace("vit.layers.0.mlp.activation_fn", lambda _: torch.nn.ReLU()),
            kind="ReLU",
        ),
        Recipe(
            "positions off by one",
            "bert",
            breaks=given(_later),
            at=("embeddings.position_embeddings",),
            kind="positions",
        ),
        Recipe(
            "positions off by one, decoder", "gpt2", breaks=given(_later), at=("transformer.wpe",), kind="positions"
        ),
        Recipe(
            "wrong rotary base",
            "llama",
            breaks=rotary_base("model.rotary_emb", 1000.0),
            at=("model.rotary_emb", "model.layers.0.self_attn"),
            kind="rotary",
        ),
        Recipe(
            "wrong rotary base by dynamo",
            "qwen3",
            "dynamo",
            rotary_base("model.rotary_emb", 500000.0),
            at=("model.rotary_emb", "model.layers.0.self_attn"),
            kind="rotary",
        ),
        Recipe("scale missing", "llama", breaks=attribute("model.layers.1.self_attn", "scaling", 1.0), kind="scale"),
        Recipe(
            "scale missing in an encoder",
            "bert",
            breaks=attribute(f"{E}.0.attention.self", "scaling", 1.0),
            kind="scale",
        ),
        Recipe(
            "token types ignored",
            "bert",
            breaks=given(_ignore_types),
            at=("embeddings.token_type_embeddings",),
            kind="types",
        ),
        Recipe("tied table untied", "gpt2", breaks=replace("lm_head", lambda old: _untied(old)), kind="tied"),
        Recipe("causal mask off", "llama", breaks=given(_see_all), at=("model.layers.0.self_attn",), kind="causal"),
        Recipe("causal mask off, gpt2", "gpt2", breaks=given(_see_all), at=("transformer.h.0.attn",), kind="causal"),
        Recipe("dtype narrowed", "bert", breaks=narrow(f"{E}.1.intermediate.dense"), kind="narrowed"),
        Recipe(
            "dtype narrowed to bf16",
            "llama",
            breaks=narrow("model.layers.0.mlp.up_proj", torch.bfloat16),
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
            breaks=lambda m: _no_residual(m.get_submodule(f"{E}.0.output")),
            at=(f"{E}.0.output",),
            kind="residual",
        ),
        Recipe("cache off by one", "gpt2", "cached", _shift_cache, at=("the cache",), kind="cache"),
        Recipe("cache off by one, llama", "llama", "cached", _shift_cache, at=("the cache",), kind="cache"),
        Recipe("bias dropped, with a cache", "gpt2", "cached", zero_bias("transformer.h.1.mlp.c_fc"), kind="bias"),
        Recipe("bias dropped, merged", "gpt2", "merged", zero_bias("transformer.h.0.attn.c_proj"), kind="bias"),
        Recipe(
            "heads swapped, with a past",
            "t5",
            "with_past",
            swap_heads("decoder.block.0.layer.0.SelfAttention.q"),
            kind="another weight",
        ),
        Recipe("gain dropped", "llama", breaks=ones("model.layers.1.post_attention_layernorm"), kind="gain"),
        Recipe(
            "gain without its one",
            "gemma",
            breaks=lambda m: m.get_submodule("model.layers.0.input_layernorm").weight.data.sub_(1),
            at=("model.layers.0.input_layernorm",),
            kind="gain",
        ),
        Recipe(
            "mask ignored by the decoder's encoder",
            "t5",
            breaks=given(_ignore_mask),
            at=("encoder.block.0.layer.0.SelfAttention",),
            kind="mask",
        ),
        Recipe(
            "bias dropped across", "bart", breaks=zero_bias("model.decoder.layers.0.encoder_attn.v_proj"), kind="bias"
        ),
        Recipe(
            "running mean lost",
            "resnet",
            breaks=lambda m: m.get_submodule(
                "resnet.encoder.stages.0.layers.0.layer.0.normalization"
            ).running_mean.zero_(),
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
            kind="ReLU",
        ),
        Recipe(
            "scale missing, fp16",
            "bert",
            breaks=attribute(f"{E}.1.attention.self", "scaling", 1.0),
            rewrites=("fp16",),
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
