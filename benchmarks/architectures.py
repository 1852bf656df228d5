"""``make zoo``: small random models of transformers' classes, compiled as a user's would be, in an order at random.

``python -m nestforge.benchmarks.architectures [TYPE | TYPE/TASK | TYPE/CLASS ...]`` tries a class of each type of
transformers' AutoModel table, the causal one where there is one, and with ``--pairs FILE`` the class of every pair of
type and task in FILE (``{"tasks": {TYPE: [TASK]}}``). A class is tried once, in a process of its own, within so many
seconds of a processor: compiled for every shape of a range, at whose ends, powers of two and random lengths the gate
compares, and behind padding; where that is refused, for one shape. A causal class compiles with engines that generate
in the same job, and what they write is compared with transformers' ``generate``: prompts of 1, 7 and 20 tokens, and
two of these as rows of one call. Where nothing compiles, PyTorch runs the model itself at three lengths, so that the
table tells what is ours. Results are kept in a file, one line each, and are of a version of the code, which the tables
say; ``--again`` tries those anew that failed. The tables of docs/architectures.md are written with ``--write``.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import multiprocessing
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import click

from ..bucket import Bucket
from ..compiler.compile import compile_bundle
from ..errors import NestforgeError
from ..exporters.checkpoints.config import offline_transformers
from ..exporters.family import families
from ..exporters.hugging_face.small_model import random_model, smaller
from ..exporters.source import open_source
from ..profiles.device_profile import DeviceProfile, read_profile
from ..runtime.load import load
from .architecture_tables import FOUND, PASSING, Found, read_found, write_tables
from .transformers_classes import TABLES, classes_of, is_causal, read_pairs, usual_class, writes

_ROOT = Path(__file__).parents[1]
_CODE = ("bundle", "compiler", "exporters", "parity", "profiles", "runtime")
_MOST_PARAMETERS = 40_000_000
# Forms in which a class may compile, with their shapes: lengths beside those that were traced, or each its engine.
_FORMS = {"range": ("1..2x1..40",), "row": ("1x1..40",), "length": ("2x7", "2x19", "2x33")}
_LENGTHS = (7, 19, 33)
_PROMPTS, _NEW_TOKENS = (1, 7, 20), 12
_BEHIND_ENCODER = ("decoder_start_token_id", "bos_token_id", "forced_bos_token_id", "forced_eos_token_id")
# By what configurations state, whether a model has FFNs of the usual kinds, stacked experts, or heads of attention.
_FFN_KEYS = (
    *("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "n_inner"),
    *("ffn_hidden_size", "mlp_dim", "mlp_ratio", "encoder_intermediate_size"),
)
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "attention_heads")

_BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
# What else a type needs to stay a model.
_OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8},
    # Layers of both kinds: with states alone these classes find no length in a cache.
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_expand": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    **{key: {"prediction_length": 4} for key in ("informer", "autoformer", "time_series_transformer")},
    "clap": {
        "audio_config": {"hidden_size": 64, "patch_embeds_hidden_size": 8, "num_hidden_layers": 4}
        | {"depths": [1, 1, 1, 1], "num_attention_heads": [2, 2, 2, 2], "projection_dim": 16},
    },
    "cvt": {"depth": [1, 2, 3]},  # reads a list of so many by the number of the stage
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    **{key: {"projection_dim": 32} for key in ("owlvit", "owlv2")},
    **{
        key: {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
        | {"backbone_config": _BACKBONE}
        for key in ("detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer", "maskformer")
    },
    **{key: {"decoder_start_token_id": 0} for key in ("t5", "longt5", "switch_transformers")},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},  # four and two of them side by side
    "lilt": {"hidden_size": 48},  # six tables of places side by side
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [8, 8]},
}


def small_model(model_type: str, class_name: str) -> Any:
    """A small random model, whose texts have no end; of a causal class as a decoder."""
    transformers = offline_transformers()
    config_class = transformers.CONFIG_MAPPING[model_type]
    stated, causal = config_class(), is_causal(model_type, class_name)
    own = {"is_decoder": True} if causal and hasattr(stated, "is_decoder") else {}
    cls = getattr(transformers, class_name)
    changed = {**smaller(stated), **_OWN.get(model_type, {}), **own}
    _state_sections(cls, stated, changed)
    config = config_class(**changed)
    for part in (config, config.get_text_config()) if writes(model_type, class_name) else ():
        part.eos_token_id = None
    if class_name.endswith("ForSequenceClassification") and getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0  # by which decoders find the end of a text
    return random_model(cls, config, _MOST_PARAMETERS)


def _state_sections(cls: Any, stated: Any, changed: dict[str, Any]) -> None:
    """Adds to ``changed`` the parts of rotary positions in several dimensions where their class has a default of its
    own, for wider heads."""
    if '.get("mrope_section", [' not in inspect.getsource(sys.modules[cls.__module__]):
        return
    for part in (changed, *(part for part in changed.values() if isinstance(part, dict))):
        rotary = part.get("rope_parameters") or (part is changed and getattr(stated, "rope_parameters", None))
        if rotary and "rope_theta" in rotary and "mrope_section" not in rotary:
            part["rope_parameters"] = {**rotary, "mrope_section": [1, 1, 2]}


def board(buckets: Sequence[str]) -> DeviceProfile:
    """A device that is not this host, so that nothing is measured."""
    rates = {"gemm_gflops": 10, "batched_gemm_gflops": 5, "elementwise_gb_s": 5, "bandwidth_gb_s": 5}
    data = {"schema_version": 1, "name": "board", "description": "any", "backend": "onnxruntime", "cores": 1}
    rest = {"memory_mb": 4000, "rates": {**rates, "op_overhead_us": 1.0}, "width_multiple": 8}
    return read_profile({**data, **rest, "buckets": [*buckets], "budgets": {"full": {}}}, "board")


def tried(model_type: str, class_name: str) -> Found:
    """What became of a class. ``result`` is a form of ``_FORMS``, ``batch`` (it reads no tokens) or the stage that
    refused it, with the ``reason``; ``axes`` are the kinds found and ``states`` what the configuration
    says there is; ``generates`` is ``tokens`` where it writes what transformers does, else why not. ``torch`` is there
    where nothing compiled: why PyTorch itself does not run the model, empty where it does."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "m"
        try:
            model = small_model(model_type, class_name)
            model.save_pretrained(folder)
        except Exception as failure:  # noqa: BLE001  (of any kind: the code of hundreds of models)
            return {"result": "no small model", "reason": _line(failure, folder)}
        said = {"states": " ".join(_states(model.config))}
        try:
            source = open_source(folder)
            said |= {"family": source.family.name, "axes": " ".join(source.spec.kinds)}
            has_tokens = source.signature.max_sequence is not None
            may_generate = writes(model_type, class_name)
            said |= _compiled(folder, class_name, source.spec.kinds, has_tokens, may_generate)
        except Exception as failure:  # noqa: BLE001  (a fault of ours too, to be seen in the table)
            said |= _refusal(failure, folder)
        return said if said["result"] in PASSING else {**said, "torch": _torch_fails(model, folder)}


def _compiled(folder: Path, class_name: str, kinds: Sequence[str], has_tokens: bool, may_generate: bool) -> Found:
    said: Found = {}
    for form, buckets in _FORMS.items() if has_tokens else [("batch", _FORMS["range"])]:
        if said and (form == "row") != ("lets padding through" in said["reason"]):
            continue  # the form that helps against what refused the first
        for generate in (True, False) if may_generate and "generates" not in said else (False,):
            try:
                compile_bundle(
                    model=folder,
                    output=folder / "out",
                    profile=board(buckets),
                    generate=generate,
                    levels=dict.fromkeys(kinds, (0.5, 1.0)) or None,
                )
            except Exception as failure:  # noqa: BLE001  (as above)
                refused = _refusal(failure, folder)
                if generate and ("generate: " in refused["reason"] or ".cached@" in refused["reason"]):
                    said["generates"] = refused["reason"]
                else:
                    said |= refused  # the last and least that was asked is the reason
                continue
            if generate:
                said["generates"] = _generates(class_name, folder)
            elif may_generate:
                said.setdefault("generates", said.get("reason", ""))
            return {**said, "result": form}
    return said


def _generates(class_name: str, folder: Path) -> str:
    """``tokens``, or the first text behind which the bundle in ``folder`` writes other tokens than transformers."""
    import torch

    transformers = offline_transformers()
    module = getattr(transformers, class_name).from_pretrained(folder, dtype=torch.float32).eval()
    kept = {name: getattr(module.generation_config, name, None) for name in _BEHIND_ENCODER}
    module.generation_config = transformers.GenerationConfig(pad_token_id=0, **kept)  # else the likeliest tokens
    drawn = torch.Generator().manual_seed(0)
    vocabulary = module.config.get_text_config().vocab_size
    prompts = [torch.randint(3, vocabulary, (1, length), generator=drawn) for length in _PROMPTS]
    try:
        model, expected = load(folder / "out"), []
        entry = model.bundle.manifest.generation
        array = entry and entry.encoder and entry.encoder.input
        if array:
            prompts = [torch.randn(array.shape(Bucket(1, 1)), generator=drawn) for _ in _PROMPTS]
        for prompt in prompts:
            given = {} if array else {"attention_mask": torch.ones_like(prompt)}
            with torch.no_grad():
                written = module.generate(prompt, max_new_tokens=_NEW_TOKENS, do_sample=False, **given)[0].tolist()
                begun = 1 if module.config.is_encoder_decoder else prompt.shape[1]
                expected.append(written[begun if len(written) > _NEW_TOKENS else 0 :])
        for rows in ([0], [1], [2], [1, 2]):
            rows_of = [prompts[row] for row in rows]
            asked: Any = torch.cat(rows_of).numpy() if array else [one[0].tolist() for one in rows_of]
            found = model.generate(asked, max_tokens=_NEW_TOKENS)
            for row, own in zip(rows, found.rows, strict=True):
                if list(own.tokens) != expected[row]:
                    return f"behind {_PROMPTS[row]} tokens {list(own.tokens)}, transformers {expected[row]}"
    except Exception as failure:  # noqa: BLE001  (of transformers or of ours)
        return _line(failure, folder)
    return "tokens"


def _torch_fails(model: Any, folder: Path) -> str:
    """Why PyTorch does not run ``model`` at three lengths, with all of the inputs that are known by name or with text,
    images or sound alone; nothing where it does."""
    import torch

    from ..exporters.hugging_face.class_inputs import inputs_of

    first = "none of its inputs is known"
    for specs in inputs_of(model.eval()):
        try:
            for length in _LENGTHS:
                drawn = torch.Generator().manual_seed(length)
                given = {}
                for spec in specs:
                    shape = spec.shape(Bucket(2, length))
                    whole = spec.dtype == "int64"
                    given[spec.name] = (
                        torch.randint(0, spec.high or 2, shape, generator=drawn)
                        if whole and spec.row_needs is None
                        else torch.ones(shape, dtype=torch.int64)
                        if whole
                        else torch.randn(shape, generator=drawn)
                    )
                with torch.no_grad():
                    model(**given)
            return ""
        except Exception as failure:  # noqa: BLE001  (of any kind: the code of hundreds of models)
            first = _line(failure, folder) if first.startswith("none") else first
    return first


def _states(config: Any) -> Iterator[str]:
    """What the configuration or one of its parts says that there is."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    for kind, keys in (("ffn", _FFN_KEYS), ("experts", _EXPERT_KEYS), ("heads", _HEAD_KEYS)):
        if any(isinstance(value := getattr(part, key, None), (int, float)) and value for part in parts for key in keys):
            yield kind


def _refusal(failure: Exception, folder: Path) -> Found:
    kind = type(failure).__name__.removesuffix("Error").lower() if isinstance(failure, NestforgeError) else "fault"
    return {"result": "not understood" if kind == "unsupportedmodel" else kind, "reason": _line(failure, folder)}


def _line(failure: Exception, folder: Path) -> str:
    name = "" if isinstance(failure, NestforgeError) else f"{type(failure).__name__}: "
    said = f"{name}{failure}".replace(f"{folder}/config.json: ", "").replace(str(folder), "MODEL")
    return " ".join(said.split())[:300]


def _apart(model_type: str, class_name: str, seconds: int) -> Found:
    """``tried`` in a process of its own, within so many ``seconds`` of a processor."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
            sender.send(tried(model_type, class_name))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(10 * seconds)
    if receiver.poll():
        found: Found = receiver.recv()
        return found
    if process.is_alive() or process.exitcode == -signal.SIGXCPU:
        process.kill()
        return {"result": "time", "reason": f"more than {seconds} s of a processor"}
    return {"result": "fault", "reason": f"the process ended with {process.exitcode}"}


def code_version() -> str:
    """By what the results of one version of the package differ from those of another."""
    files = sorted(path for part in _CODE for path in (_ROOT / part).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def _wanted(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Types and classes to try, of the names given or of all, in an order at random."""
    if names:
        split = [name.partition("/")[::2] for name in names]
        return [(kind, (classes_of(kind, own) if own in TABLES else own) or usual_class(kind)) for kind, own in split]
    if pairs:
        return [(kind, name) for kind, task in pairs if (name := classes_of(kind, task)) is not None]
    return [(kind, usual_class(kind)) for kind in offline_transformers().models.auto.modeling_auto.MODEL_MAPPING_NAMES]


def _at_random(classes: Sequence[tuple[str, str]], seed: int) -> list[tuple[str, str]]:
    """In an order of which the first are a fair sample."""
    found = list(dict.fromkeys(classes))
    random.Random(seed).shuffle(found)  # noqa: S311
    return found


@click.command()
@click.argument("names", nargs=-1, metavar="[TYPE | TYPE/TASK | TYPE/CLASS]...")
@click.option("--pairs", "pairs_file", type=click.Path(path_type=Path), help="Pairs of type and task, as JSON.")
@click.option("--minutes", type=float, default=600, help="Begin no class after so many.")
@click.option("--seconds", default=75, help="CPU seconds for each type.")
@click.option("--jobs", default=1, help="Classes at a time.")
@click.option("--seed", default=0, help="Random seed of the order.")
@click.option("--again", is_flag=True, help="Try what failed anew.")
@click.option("--results", type=click.Path(path_type=Path), default=FOUND, help="File of results, a line each.")
@click.option("--write", is_flag=True, help="Try nothing and write docs/architectures.md.")
def main(
    names: tuple[str, ...],
    pairs_file: Path | None,
    minutes: float,
    seconds: int,
    jobs: int,
    seed: int,
    again: bool,
    results: Path,
    write: bool,
) -> None:
    """Try classes of transformers that were not tried yet."""
    pairs = [] if pairs_file is None else read_pairs(pairs_file)
    found, code = read_found(results), code_version()
    if write:
        write_tables(found, [f"{kind}/{name}" for kind, name in _at_random(_wanted((), ()), seed)], pairs)
        return
    import torch

    from ..exporters.hugging_face import survey  # noqa: F401  (before the processes, which then have it)

    families()
    torch.set_num_threads(1)
    wanted = _wanted(names, pairs)
    wanted = list(dict.fromkeys(wanted)) if names else _at_random(wanted, seed)
    end, writing = time.monotonic() + 60 * minutes, Lock()
    results.parent.mkdir(exist_ok=True)

    def work(number: int, model_type: str, class_name: str) -> None:
        known = found.get(f"{model_type}/{class_name}")
        is_due = names or known is None or (again and known["result"] not in PASSING and known["code"] != code)
        if not is_due or time.monotonic() > end:
            return
        begun = time.monotonic()
        one = {"type": model_type, "class": class_name, "code": code, **_apart(model_type, class_name, seconds)}
        one["seconds"] = f"{time.monotonic() - begun:.0f}"
        with writing, results.open("a") as stream:
            stream.write(json.dumps(one) + "\n")
        click.echo(f"{number} of {len(wanted)} {one}")

    with ThreadPoolExecutor(jobs) as pool:  # whose threads wait for processes
        for done in [pool.submit(work, number, *each) for number, each in enumerate(wanted)]:
            done.result()


if __name__ == "__main__":
    main()
