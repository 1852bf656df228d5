"""``make zoo``: a small random model of every type in transformers' AutoModel table, compiled as a user's would be.

``python -m nestforge.benchmarks.architectures [TYPE ...] [--minutes N]`` compiles those that ``build/zoo.jsonl`` does
not have yet (a type that is named: again), each in a process of its own, and writes the tables of
docs/architectures.md. A type is compiled for every shape of a range, at whose ends, powers of two and random lengths
the gate compares; where that is refused, for one length.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import re
import resource
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..compiler.compile import compile_bundle
from ..errors import ExportError, NestforgeError, UnsupportedModelError
from ..exporters.checkpoints.config import offline_transformers
from ..exporters.family import families
from ..exporters.source import open_source
from ..profiles.device_profile import DeviceProfile, read_profile

_ROOT = Path(__file__).parents[1]
_FOUND = _ROOT / "build" / "zoo.jsonl"
_PAGE = _ROOT / "docs" / "architectures.md"
_PART = re.compile(r"<!-- zoo -->\n.*<!-- end -->\n", re.DOTALL)
_SECONDS = 150
_MOST_PARAMETERS = 30_000_000
_PASSING = ("range", "batch", "length")
_RANGE, _LENGTH = "1..2x1..40", "2x33"

# Sizes of a small model by the names that configurations give them; each counts where the type has it.
_SMALL: dict[int, str] = {
    32: "hidden_size d_model dim n_embd embed_dim emb_dim embedding_size word_embed_proj_dim hidden_dim_size width "
    "model_dim decoder_hidden_size encoder_hidden_size text_hidden_size lm_hidden_size hidden_size_per_layer_input "
    "out_hidden_size pooler_output_size channels attention_hidden_size linear_num_value_dim embedding_dim n_embed "
    "image_size input_size img_size max_source_positions conv_pos projection_hidden_size attention_dim lru_width "
    "decoder_dim encoder_dim num_mel_bins",
    48: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim n_inner ffn_hidden_size d_inner "
    "inner_dim dense_intermediate_size feed_forward_size mlp_dim encoder_intermediate_size decoder_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth num_encoder_layers "
    "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_block_layers num_frames "
    "num_hidden_groups num_experts_per_tok top_k moe_top_k num_experts_per_token num_selected_experts",
    4: "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_heads num_experts "
    "n_routed_experts num_local_experts moe_num_experts rotary_dim window_size num_groups "
    "encoder_num_attention_heads decoder_num_attention_heads",
    1: "n_group topk_group n_groups num_nextn_predict_layers first_k_dense_replace n_shared_experts num_channel_groups",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim state_size mamba_d_state patch_size mamba_d_head "
    "linear_key_head_dim linear_value_head_dim vocab_size_per_layer_input ssm_state_size mamba_head_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank projection_dim time_step_rank "
    "moe_shared_expert_intermediate_size expert_intermediate_size conv_dim_size num_conv_pos_embeddings lora_rank",
    128: "vocab_size text_vocab_size entity_vocab_size",
    64: "max_position_embeddings n_positions max_sequence_length max_seq_len max_seq_length n_ctx max_target_positions "
    "max_length codebook_size num_conv_pos window",
}
# What else a type needs to stay a model.
_OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8},
    **{key: {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2} for key in ("bamba", "granitemoehybrid")},
    **{key: {"prediction_length": 4} for key in ("informer", "autoformer", "time_series_transformer")},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [8, 8]},
}
_SIZE_OF = {name: size for size, names in _SMALL.items() for name in names.split()}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
_SHARED_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "linear_num_key_heads")


def smaller(config: Any) -> dict[str, Any]:
    """Changes to a configuration's defaults that leave a model of a few thousand weights; parts of it in turn."""
    stated = config.to_dict()
    parts = [name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is not None]
    found: dict[str, Any] = {
        name: {**getattr(config, name).to_dict(), **smaller(getattr(config, name))} for name in parts
    }
    layers = next((stated[name] for name in _LAYERS if isinstance(stated.get(name), int)), None)
    for name, value in stated.items():
        if isinstance(value, Mapping) and "mrope_section" in value:
            found[name] = {**value, "mrope_section": [2, 1, 1]}
        if name in parts or isinstance(value, (bool, str, Mapping)) or value is None:
            continue
        if isinstance(value, int):
            found |= _smaller_number(name, value, stated)
        elif isinstance(value, (list, tuple)) and value:
            kept = _smaller_list(name, list(value), layers)
            found |= {} if kept == list(value) else {name: kept}
    return found


def _smaller_number(name: str, value: int, stated: Mapping[str, Any]) -> dict[str, int]:
    if name in _SIZE_OF:
        return {name: min(value, _SIZE_OF[name])}
    if name in _SHARED_HEADS:
        heads = next(
            (stated[each] for each in ("num_attention_heads", "n_head") if isinstance(stated.get(each), int)), 0
        )
        return {name: min(value, 4 if value >= heads else 2)}
    if name.endswith("token_id") and value >= 100:
        return {name: value % 97 + 1}
    return {}


def _smaller_list(name: str, value: list[Any], layers: int | None) -> list[Any]:
    if len(value) == layers and layers > 2:  # something of each layer
        value = [value[0], value[-1]]
    if not all(type(each) is int for each in value):
        return value
    if "depth" in name or "layers" in name or name in ("num_blocks",):
        return [1] * len(value)
    if max(value) >= 64 and ("size" in name or "dim" in name or "channel" in name or "widths" in name):
        return [max(4, each * 32 // max(value) // 4 * 4) for each in value]
    if "heads" in name:
        return [min(each, 2) for each in value]
    return value


def save_small(model_type: str, folder: Path) -> str:
    """Saves a small random model of the type, whose class it returns."""
    import torch

    transformers = offline_transformers()
    auto = transformers.models.auto.modeling_auto
    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    named = (
        causal[model_type]
        if model_type in causal and model_type not in masked
        else auto.MODEL_MAPPING_NAMES[model_type]
    )
    named = named if isinstance(named, str) else named[0]
    config_class = transformers.CONFIG_MAPPING[model_type]
    config = config_class(**{**smaller(config_class()), **_OWN.get(model_type, {})})
    cls = getattr(transformers, named)
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in cls(config).parameters())
    if weights > _MOST_PARAMETERS:
        raise ValueError(f"{weights / 1e6:.0f} M parameters are left; no name of a size is known")
    torch.manual_seed(0)
    model = cls(config)
    for parameter in model.parameters():  # biases and norms start at constants; make every one matter
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return named


def board(bucket: str) -> DeviceProfile:
    """A device that is not this host, so that nothing is measured."""
    rates = {"gemm_gflops": 10, "batched_gemm_gflops": 5, "elementwise_gb_s": 5, "bandwidth_gb_s": 5}
    data = {"schema_version": 1, "name": "board", "description": "any", "backend": "onnxruntime", "cores": 1}
    rest = {"memory_mb": 4000, "rates": {**rates, "op_overhead_us": 1.0}, "width_multiple": 8}
    return read_profile({**data, **rest, "buckets": [bucket], "budgets": {"full": {}}}, "board")


def tried(model_type: str, read_alone: bool) -> dict[str, str]:
    """What became of a type: ``result`` is ``range``, ``batch`` (it reads no tokens), ``length`` (one alone), ``read``
    where nothing more was asked, or the stage that refused it, with the ``reason``; ``axes`` are the kinds found."""
    with tempfile.TemporaryDirectory() as made:
        folder, said = Path(made) / "m", {"type": model_type}
        try:
            said["class"] = save_small(model_type, folder)
        except Exception as failure:  # noqa: BLE001  (of any kind: the code of hundreds of models)
            return {**said, "result": "no small model", "reason": _line(failure, folder)}
        try:
            source = open_source(folder)
            said |= {"family": source.family.name, "axes": " ".join(source.spec.kinds)}
            if read_alone:
                return {**said, "result": "read"}
            has_tokens = source.signature.max_sequence is not None
            try:
                compile_bundle(model=folder, output=folder / "out", profile=board(_RANGE))
                return {**said, "result": "range" if has_tokens else "batch"}
            except ExportError as failure:
                if not has_tokens:
                    raise
                said["reason"] = _line(failure, folder)
            compile_bundle(model=folder, output=folder / "out", profile=board(_LENGTH))
            return {**said, "result": "length"}
        except UnsupportedModelError as failure:
            return {**said, "result": "not understood", "reason": _line(failure, folder)}
        except NestforgeError as failure:
            stage = type(failure).__name__.removesuffix("Error").lower()
            return {**said, "result": stage, "reason": _line(failure, folder)}
        except Exception as failure:  # noqa: BLE001  (a fault of ours, to be seen in the table)
            return {**said, "result": "fault", "reason": _line(failure, folder)}


def _line(failure: Exception, folder: Path) -> str:
    name = "" if isinstance(failure, NestforgeError) else f"{type(failure).__name__}: "
    return " ".join(f"{name}{failure}".replace(f"{folder}/config.json: ", "").replace(str(folder), "MODEL").split())[
        :300
    ]


def _apart(model_type: str, read_alone: bool) -> dict[str, str]:
    """``tried`` in a process of its own, within so many seconds of a processor."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS + 1))
        with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
            sender.send(tried(model_type, read_alone))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    if receiver.poll():
        found: dict[str, str] = receiver.recv()
        return found
    if process.exitcode == -signal.SIGXCPU:
        return {"type": model_type, "result": "time", "reason": f"more than {_SECONDS} s"}
    return {"type": model_type, "result": "fault", "reason": f"the process ended with {process.exitcode}"}


def read_found() -> dict[str, dict[str, str]]:
    """The latest result of each type."""
    lines = _FOUND.read_text().splitlines() if _FOUND.is_file() else []
    return {found["type"]: found for found in map(json.loads, lines)}


def tables(found: Sequence[Mapping[str, str]], types: int, version: str) -> str:
    """What became of the types, in Markdown."""
    by_result: dict[str, list[Mapping[str, str]]] = {}
    for one in sorted(found, key=lambda each: each["type"]):
        by_result.setdefault(one["result"], []).append(one)
    passing = sum(len(by_result.get(kind, ())) for kind in _PASSING)
    made = len(found) - len(by_result.get("no small model", ()))
    titles = {
        "range": "any length in one engine",
        "batch": "inputs of one size, any batch",
        "length": "one engine per length (`--bucket 1x128`)",
        "read": "read, and not compiled yet",
    }
    read = [one for one in found if one["result"] in ("read", *_PASSING) or "axes" in one]
    searched = [one["axes"].split() for one in read if "axes" in one]
    failed = made - passing - sum(len(by_result.get(kind, ())) for kind in ("read", "not understood"))
    ffn, heads = (sum(kind in axes for axes in searched) for kind in ("ffn", "heads"))
    lines = [
        f"transformers {version}, {len(found)} of {types} types: small models of {made} could be made, of which "
        f"{len(read)} are read ({100 * len(read) / max(1, made):.0f} %); FFNs were found in {ffn}, heads in {heads} of "
        f"{len(searched)}. "
        f"{passing} were compiled and pass the gate, {failed} failed.",
        *("", "| result | types | |", "|---|---|---|"),
    ]
    for kind, title in titles.items():
        names = ", ".join(f"`{one['type']}`" for one in by_result.get(kind, ()))
        lines.append(f"| {title} | {len(by_result.get(kind, ()))} | {names} |")
    lines += ["", "| type | refused by | reason |", "|---|---|---|"]
    for kind, ones in sorted(by_result.items()):
        for one in ones if kind not in titles else ():
            shown = one.get("reason", "")[:160].replace("|", "\\|").replace("`", "'")
            lines.append(f"| `{one['type']}` | {kind} | `{shown}` |")
    return "\n".join(lines)


@click.command()
@click.argument("types", nargs=-1)
@click.option("--minutes", type=float, default=600, help="Begin no type after so many.")
@click.option("--read", "read_alone", is_flag=True, help="Read what the classes are, and compile nothing.")
def main(types: tuple[str, ...], minutes: float, read_alone: bool) -> None:
    """Compile a small model of each of TYPES, or of all that were not yet, and write docs/architectures.md."""
    import torch

    from ..exporters.hugging_face import survey  # noqa: F401  (before the processes, which then have it)

    families()
    torch.set_num_threads(1)
    transformers = offline_transformers()
    every = list(transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES)
    random.Random(0).shuffle(every)  # noqa: S311  (so that some of them are a fair sample)
    end, found = time.monotonic() + 60 * minutes, read_found()
    _FOUND.parent.mkdir(exist_ok=True)
    for number, model_type in enumerate(types or every):
        if time.monotonic() > end:
            break
        if types or model_type not in found or (found[model_type]["result"] == "read" and not read_alone):
            found[model_type] = _apart(model_type, read_alone)
            with _FOUND.open("a") as stream:
                stream.write(json.dumps(found[model_type]) + "\n")
            click.echo(f"{number} {found[model_type]}")
    if _PAGE.is_file():
        part = f"<!-- zoo -->\n{tables(list(found.values()), len(every), transformers.__version__)}\n<!-- end -->\n"
        _PAGE.write_text(_PART.sub(lambda _: part, _PAGE.read_text()))


if __name__ == "__main__":
    main()
