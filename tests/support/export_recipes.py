"""Recipes of the zoo (exports.py): right exports, and ones that are broken on purpose, with the module at fault."""

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


class Whole(At):
    """``breaks`` the model; the module at ``path`` is to be named for it."""

    def __call__(self, model: Any) -> None:
        self.breaks(model)


def pooling(mode: str) -> At:
    return Whole("sentence_head.1", lambda model: setattr(model[1], "pooling_mode", mode))


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


def given(before: Callable[[dict[str, Any]], None], path: str = "") -> At:
    """Changes what a model is given by keyword, which the module at ``path`` reads first."""

    def change(_m: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        before(kwargs)
        return args, kwargs

    return Whole(path, lambda model: model.register_forward_pre_hook(change, with_kwargs=True))


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


SKIPPED_STAGE = Whole("sentence_head.2", lambda model: setattr(model, "2", Function(lambda features: features)))


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
    found += [Recipe(f"{family} by dynamo", family, exporter="dynamo") for family in ("bert", "llama", "vit", "gpt2")]
    found += [Recipe(f"{family} by transformers", family, exporter="transformers") for family in ("bert", "qwen3")]
    found += [Recipe(f"{family} with a cache", family, exporter="cached") for family in ("gpt2", "llama", "qwen3")]
    found += [Recipe(f"{family}, its encoder", family, exporter="encoder") for family in ("t5", "bart")]
    found += [Recipe("gpt2 merged", "gpt2", exporter="merged"), Recipe("llama merged", "llama", exporter="merged")]
    found += [Recipe("t5, its decoder with a past", "t5", exporter="with_past")]
    found += [Recipe("bert static", "bert", exporter="static")]
    for rewrite in REWRITES:
        for family in ("bert", "vit"):
            if (family, rewrite) not in {("vit", "fused"), ("vit", "renamed"), ("vit", "external")}:
                found.append(Recipe(f"{family} {rewrite}", family, rewrite=rewrite))
    found += [Recipe(f"mean {rewrite}", "mean", rewrite=rewrite) for rewrite in ("onnxruntime", "int8", "fp16")]
    found += [Recipe("llama int4", "llama", rewrite="int4"), Recipe("gpt2 fp16", "gpt2", rewrite="fp16")]
    return found


def _wrong() -> list[Recipe]:
    attention = f"{E}.1.attention.self"
    gelu = torch.nn.functional.gelu
    return [
        Recipe("bias dropped", "bert", zero_bias(f"{attention}.value"), "bias"),
        Recipe("bias dropped by dynamo", "bert", zero_bias(f"{E}.0.output.dense"), "bias", exporter="dynamo"),
        Recipe("bias dropped, nameless", "bert", zero_bias(f"{E}.0.intermediate.dense"), "bias", rewrite="nameless"),
        Recipe(
            "bias dropped, optimised",
            "bert",
            zero_bias(f"{attention}.query"),
            "bias",
            at=(f"{attention}.query", attention),
            rewrite="onnxruntime",
        ),
        Recipe(
            "bias dropped, fused",
            "bert",
            zero_bias(f"{E}.1.output.dense"),
            at=(f"{E}.1.output", f"{E}.1.output.dense", f"{E}.1.output.LayerNorm"),
            rewrite="fused",
        ),
        Recipe(
            "bias dropped by transformers",
            "bert",
            zero_bias(f"{attention}.value"),
            "bias",
            at=(f"{attention}.value", attention),
            exporter="transformers",
        ),
        Recipe("classifier bias dropped", "classifier", zero_bias("classifier"), "bias"),
        Recipe("heads swapped", "bert", swap_heads(f"{attention}.query"), "heads"),
        Recipe(
            "heads swapped, polygraphy",
            "distilbert",
            swap_heads("transformer.layer.1.attention.v_lin"),
            "heads",
            rewrite="polygraphy",
        ),
        Recipe("epsilon", "bert", attribute(f"{E}.0.output.LayerNorm", "eps", 0.001), "epsilon"),
        Recipe(
            "epsilon of a norm by rms",
            "llama",
            attribute("model.layers.0.input_layernorm", "variance_epsilon", 0.01),
            "epsilon",
        ),
        Recipe("transposed weight", "bert", transpose(f"{attention}.key"), "transposed"),
        Recipe(
            "transposed weight, onnxscript",
            "vit",
            transpose("vit.layers.1.attention.q_proj"),
            "transposed",
            rewrite="onnxscript",
        ),
        Recipe(
            "one tensor as example of two inputs",
            "bert",
            given(_one_tensor, "embeddings.word_embeddings"),
            "tokens that are read from attention_mask",
            exporter="dynamo",
        ),
        Recipe("mask ignored", "bert", given(_ignore_mask), "mask", at=(f"{E}.0.attention.self", f"{E}.0.attention")),
        Recipe("mask ignored by a decoder", "llama", given(_ignore_mask, "model.layers.0.self_attn"), "mask"),
        Recipe(
            "mask ignored, int8",
            "bert",
            given(_ignore_mask),
            "mask",
            at=(f"{E}.0.attention.self", f"{E}.0.attention"),
            rewrite="int8",
        ),
        Recipe(
            "frozen length",
            "bert",
            kind="frozen",
            at=("embeddings", f"{E}.0.attention.self", "the graph"),
            exporter="static",
            edits=unfix,
        ),
        Recipe(
            "frozen batch",
            "vit",
            kind="frozen",
            at=("vit.embeddings", "embeddings", "the graph"),
            exporter="static",
            edits=unfix,
        ),
        Recipe(
            "wrong pooling",
            "mean",
            pooling("cls"),
            "pooling",
        ),
        Recipe(
            "wrong pooling, mean for cls",
            "cls",
            pooling("mean"),
            "pooling",
        ),
        Recipe(
            "wrong pooling, max",
            "dense",
            pooling("max"),
            "pooling",
        ),
        Recipe(
            "Dense skipped",
            "dense",
            SKIPPED_STAGE,
            "Dense",
        ),
        Recipe(
            "Normalize skipped",
            "mean",
            SKIPPED_STAGE,
            "Normalize",
        ),
        Recipe("Normalize skipped, fp16", "mean", SKIPPED_STAGE, "Normalize", rewrite="fp16"),
        Recipe("another checkpoint", "bert", another_seed, "another checkpoint", at=("embeddings.word_embeddings",)),
        Recipe("another checkpoint, decoder", "gpt2", another_seed, "another checkpoint", at=("transformer.wte",)),
        Recipe("stale revision", "bert", later_revision, "stale", at=("embeddings.word_embeddings",)),
        Recipe(
            "stale revision, vision",
            "vit",
            later_revision,
            "stale",
            at=("vit.embeddings.patch_embeddings.projection", "vit.embeddings"),
        ),
        Recipe(
            "tanh for erf",
            "bert",
            replace(
                f"{E}.0.intermediate.intermediate_act_fn", lambda _: Function(lambda x: gelu(x, approximate="tanh"))
            ),
            "tanh",
        ),
        Recipe("erf for tanh", "gpt2", replace("transformer.h.1.mlp.act", lambda _: Function(gelu)), "erf"),
        Recipe("relu for gelu", "vit", replace("vit.layers.0.mlp.activation_fn", lambda _: torch.nn.ReLU()), "ReLU"),
        Recipe("positions off by one", "bert", given(_later, "embeddings.position_embeddings"), "positions"),
        Recipe("positions off by one, decoder", "gpt2", given(_later, "transformer.wpe"), "positions"),
        Recipe(
            "wrong rotary base",
            "llama",
            rotary_base("model.rotary_emb", 1000.0),
            "rotary",
            at=("model.rotary_emb", "model.layers.0.self_attn"),
        ),
        Recipe(
            "wrong rotary base by dynamo",
            "qwen3",
            rotary_base("model.rotary_emb", 500000.0),
            "rotary",
            at=("model.rotary_emb", "model.layers.0.self_attn"),
            exporter="dynamo",
        ),
        Recipe("scale missing", "llama", attribute("model.layers.1.self_attn", "scaling", 1.0), "scale"),
        Recipe("scale missing in an encoder", "bert", attribute(f"{E}.0.attention.self", "scaling", 1.0), "scale"),
        Recipe("token types ignored", "bert", given(_ignore_types, "embeddings.token_type_embeddings"), "types"),
        Recipe("tied table untied", "gpt2", replace("lm_head", lambda old: _untied(old)), "tied"),
        Recipe("causal mask off", "llama", given(_see_all, "model.layers.0.self_attn"), "causal"),
        Recipe("causal mask off, gpt2", "gpt2", given(_see_all, "transformer.h.0.attn"), "causal"),
        Recipe("dtype narrowed", "bert", narrow(f"{E}.1.intermediate.dense"), "narrowed"),
        Recipe("dtype narrowed to bf16", "llama", narrow("model.layers.0.mlp.up_proj", torch.bfloat16), "narrowed"),
        Recipe(
            "layer skipped",
            "bert",
            replace(f"{E}.1", lambda _: Skipped()),
            "skipped",
            at=(f"{E}.1", f"{E}.1.attention"),
        ),
        Recipe(
            "layer skipped, vision",
            "vit",
            replace("vit.layers.1", lambda _: Skipped()),
            "skipped",
            at=("vit.layers.1", "vit.layers.1.layernorm_before"),
        ),
        Recipe(
            "residual left out",
            "bert",
            lambda m: _no_residual(m.get_submodule(f"{E}.0.output")),
            "residual",
            at=(f"{E}.0.output",),
        ),
        Recipe("cache off by one", "gpt2", _shift_cache, "cache", at=("the cache",), exporter="cached"),
        Recipe("cache off by one, llama", "llama", _shift_cache, "cache", at=("the cache",), exporter="cached"),
        Recipe("bias dropped, with a cache", "gpt2", zero_bias("transformer.h.1.mlp.c_fc"), "bias", exporter="cached"),
        Recipe("bias dropped, merged", "gpt2", zero_bias("transformer.h.0.attn.c_proj"), "bias", exporter="merged"),
        Recipe(
            "heads swapped, with a past",
            "t5",
            swap_heads("decoder.block.0.layer.0.SelfAttention.q"),
            "another weight",
            exporter="with_past",
        ),
        Recipe("gain dropped", "llama", ones("model.layers.1.post_attention_layernorm"), "gain"),
        Recipe(
            "gain without its one",
            "gemma",
            lambda m: m.get_submodule("model.layers.0.input_layernorm").weight.data.sub_(1),
            "gain",
            at=("model.layers.0.input_layernorm",),
        ),
        Recipe(
            "mask ignored by the decoder's encoder",
            "t5",
            given(_ignore_mask, "encoder.block.0.layer.0.SelfAttention"),
            "mask",
        ),
        Recipe("bias dropped across", "bart", zero_bias("model.decoder.layers.0.encoder_attn.v_proj"), "bias"),
        Recipe(
            "running mean lost",
            "resnet",
            lambda m: m.get_submodule("resnet.encoder.stages.0.layers.0.layer.0.normalization").running_mean.zero_(),
            at=(
                "resnet.encoder.stages.0.layers.0.layer.0.normalization",
                "resnet.encoder.stages.0.layers.0.layer.0",
                "resnet.encoder.stages.0.layers.0.layer.0.convolution",
            ),
        ),
        Recipe(
            "layer skipped, int8",
            "bert",
            replace(f"{E}.0", lambda _: Skipped()),
            "skipped",
            at=(f"{E}.0", f"{E}.0.attention", f"{E}.0.attention.self"),
            rewrite="int8",
        ),
        Recipe(
            "wrong activation, openvino",
            "bert",
            replace(f"{E}.0.intermediate.intermediate_act_fn", lambda _: torch.nn.ReLU()),
            "ReLU",
            rewrite="openvino",
        ),
        Recipe(
            "scale missing, fp16", "bert", attribute(f"{E}.1.attention.self", "scaling", 1.0), "scale", rewrite="fp16"
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
