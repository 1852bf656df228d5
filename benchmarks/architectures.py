"""``make zoo``: a small random model of every type in transformers' AutoModel table, compiled as a user's would be.

``python -m nestforge.benchmarks.architectures [TYPE ...] [--minutes N]`` compiles those that ``build/zoo.jsonl`` does
not have yet (a type that is named: again), each in a process of its own, and writes the tables of
docs/architectures.md. A type is compiled for every shape of a range, at whose ends, powers of two and random lengths
the gate compares; where that is refused, for one length.

``--generate`` asks the causal class of each type, as a decoder, for engines that generate, and compares what they write
with transformers' ``generate``: prompts of 1, 7 and 20 tokens, and two of these as rows of one call.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..compiler.compile import compile_bundle
from ..errors import ExportError, NestforgeError, UnsupportedModelError
from ..exporters.checkpoints.config import offline_transformers
from ..exporters.family import families
from ..exporters.hugging_face.small_model import random_model, smaller
from ..exporters.source import open_source
from ..profiles.device_profile import DeviceProfile, read_profile
from ..runtime.load import load

_ROOT = Path(__file__).parents[1]
_FOUND = _ROOT / "build" / "zoo.jsonl"
_PAGE = _ROOT / "docs" / "architectures.md"
_GENERATED = _ROOT / "build" / "zoo-generating.jsonl"
_SECONDS = 150
_MOST_PARAMETERS = 30_000_000
_PASSING = ("range", "batch", "length")
_RANGE, _LENGTH = "1..2x1..40", "2x33"
_PROMPTS, _NEW_TOKENS = (1, 7, 20), 12
# What is said of a class that keeps something else than keys and values.
_STATE = re.compile(r"keeps a \w+, which|takes no cache of keys and values")

# What else a type needs to stay a model.
_OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8},
    **{key: {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2} for key in ("bamba", "granitemoehybrid")},
    **{key: {"prediction_length": 4} for key in ("informer", "autoformer", "time_series_transformer")},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [8, 8]},
}


def save_small(model_type: str, folder: Path, named: str | None = None) -> str:
    """Saves a small random model of the type, whose class it returns; of the causal one ``named``, as a decoder whose
    texts have no end."""

    transformers = offline_transformers()
    auto = transformers.models.auto.modeling_auto
    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    usual = (
        causal[model_type]
        if model_type in causal and model_type not in masked
        else auto.MODEL_MAPPING_NAMES[model_type]
    )
    usual = usual if isinstance(usual, str) else usual[0]
    config_class = transformers.CONFIG_MAPPING[model_type]
    stated = config_class()
    own = {"is_decoder": True} if named and hasattr(stated, "is_decoder") else {}
    config = config_class(**{**smaller(stated), **_OWN.get(model_type, {}), **own})
    if named:
        for part in (config, config.get_text_config()):
            part.eos_token_id = None
    cls = getattr(transformers, named or usual)
    random_model(cls, config, _MOST_PARAMETERS).save_pretrained(folder)
    return named or usual


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


def generated(model_type: str, _: bool) -> dict[str, str]:
    """What became of the causal class of a type: ``result`` is ``tokens`` where it writes what transformers does, else
    ``differs`` or the stage that refused it; ``whole`` is there where it compiles at one length, to generate or not."""
    with tempfile.TemporaryDirectory() as made:
        folder, said = Path(made) / "m", {"type": model_type}
        named = offline_transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        try:
            said["class"] = save_small(model_type, folder, named if isinstance(named, str) else named[0])
        except Exception as failure:  # noqa: BLE001  (of any kind: the code of hundreds of models)
            return {**said, "result": "no small model", "reason": _line(failure, folder)}
        refused: dict[str, str] = {}
        for generate in (True, False):
            try:
                compile_bundle(model=folder, output=folder / "out", profile=board(_LENGTH), generate=generate)
            except Exception as failure:  # noqa: BLE001  (a fault of ours too, to be seen in the table)
                kind = type(failure).__name__.removesuffix("Error").lower()
                refused = refused or {"result": kind, "reason": _line(failure, folder)}
                continue
            said["whole"] = "yes"
            if refused:
                return {**said, **refused}
            try:
                wrong = _other_tokens(said["class"], folder)
            except Exception as failure:  # noqa: BLE001  (as above)
                return {**said, "result": "fault", "reason": _line(failure, folder)}
            return {**said, "result": "tokens"} if wrong is None else {**said, "result": "differs", "reason": wrong}
        return {**said, **refused}


def _other_tokens(class_name: str, folder: Path) -> str | None:
    """The first text behind which the bundle in ``folder`` writes other tokens than transformers, if there is one."""
    import torch

    transformers = offline_transformers()
    module = getattr(transformers, class_name).from_pretrained(folder, dtype=torch.float32).eval()
    module.generation_config = transformers.GenerationConfig(pad_token_id=0)  # the likeliest tokens and nothing else
    model, drawn = load(folder / "out"), torch.Generator().manual_seed(0)
    vocabulary = module.config.get_text_config().vocab_size
    prompts = [torch.randint(3, vocabulary, (1, length), generator=drawn) for length in _PROMPTS]
    expected = []
    for prompt in prompts:
        given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": _NEW_TOKENS, "do_sample": False}
        with torch.no_grad():
            expected.append(module.generate(prompt, **given)[0, prompt.shape[1] :].tolist())
    for rows in ([0], [1], [2], [1, 2]):
        found = model.generate([prompts[row][0].tolist() for row in rows], max_tokens=_NEW_TOKENS)
        for row, own in zip(rows, found.rows, strict=True):
            if list(own.tokens) != expected[row]:
                return f"behind {_PROMPTS[row]} tokens {list(own.tokens)}, transformers {expected[row]}"
    return None


def _line(failure: Exception, folder: Path) -> str:
    name = "" if isinstance(failure, NestforgeError) else f"{type(failure).__name__}: "
    return " ".join(f"{name}{failure}".replace(f"{folder}/config.json: ", "").replace(str(folder), "MODEL").split())[
        :300
    ]


def _apart(job: Callable[[str, bool], dict[str, str]], model_type: str, read_alone: bool) -> dict[str, str]:
    """``job``, ``tried`` or ``generated``, in a process of its own, within so many seconds of a processor."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS + 1))
        with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
            sender.send(job(model_type, read_alone))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    if receiver.poll():
        found: dict[str, str] = receiver.recv()
        return found
    if process.exitcode == -signal.SIGXCPU:
        return {"type": model_type, "result": "time", "reason": f"more than {_SECONDS} s"}
    return {"type": model_type, "result": "fault", "reason": f"the process ended with {process.exitcode}"}


def read_found(file: Path = _FOUND) -> dict[str, dict[str, str]]:
    """The latest result of each type in ``file``."""
    lines = file.read_text().splitlines() if file.is_file() else []
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
        lines.append(f"| {title} | {len(by_result.get(kind, ()))} | {_listed(by_result.get(kind, ()))} |")
    lines += ["", "| type | refused by | reason |", "|---|---|---|"]
    for kind, ones in sorted(by_result.items()):
        for one in ones if kind not in titles else ():
            lines.append(f"| `{one['type']}` | {kind} | `{_shown(one)}` |")
    return "\n".join(lines)


def generating_table(found: Sequence[Mapping[str, str]], types: int, version: str) -> str:
    """What became of causal classes that were to generate, in Markdown."""
    found = sorted(found, key=lambda each: each["type"])
    made = [one for one in found if one["result"] != "no small model"]
    whole = [one for one in made if "whole" in one]
    equal = [one for one in whole if one["result"] == "tokens"]
    others = [one for one in whole if _STATE.search(one.get("reason", ""))]
    share, own = (100 * len(equal) / max(1, len(of)) for of in (whole, whole[len(others) :]))
    lines = [
        f"transformers {version}, {len(found)} of {types} causal types that no family names: small models of "
        f"{len(made)} could be made, of which {len(whole)} compile whole, at one length, and pass the gate. "
        f"{len(equal)} of these write the tokens that transformers writes ({share:.0f} %); {len(others)} keep "
        f"something else than keys and values ({own:.0f} % of the others generate).",
        *("", "| causal type | generates | reason |", "|---|---|---|"),
        f"| {_listed(equal)} | as transformers does | |",
    ]
    for one in made:
        if one not in equal:
            kind = "no, compiles whole" if one in whole else "no, nor whole"
            lines.append(f"| `{one['type']}` | {kind} | `{_shown(one)}` |")
    return "\n".join(lines)


def _listed(found: Sequence[Mapping[str, str]]) -> str:
    return ", ".join(f"`{one['type']}`" for one in found)


def _shown(one: Mapping[str, str]) -> str:
    return one.get("reason", "")[:160].replace("|", "\\|").replace("`", "'")


def _write(part: str, table: str) -> None:
    """Puts ``table`` in the place of what the page has for ``part``."""
    if _PAGE.is_file():
        old = re.compile(rf"<!-- {part} -->\n.*?<!-- end -->\n", re.DOTALL)
        _PAGE.write_text(old.sub(lambda _: f"<!-- {part} -->\n{table}\n<!-- end -->\n", _PAGE.read_text()))


@click.command()
@click.argument("types", nargs=-1)
@click.option("--minutes", type=float, default=600, help="Begin no type after so many.")
@click.option("--read", "read_alone", is_flag=True, help="Read what the classes are, and compile nothing.")
@click.option("--generate", is_flag=True, help="Compile causal classes alone, to generate.")
def main(types: tuple[str, ...], minutes: float, read_alone: bool, generate: bool) -> None:
    """Compile a small model of each of TYPES, or of all that were not yet, and write docs/architectures.md."""
    import torch

    from ..exporters.hugging_face import survey  # noqa: F401  (before the processes, which then have it)

    families()
    torch.set_num_threads(1)
    transformers = offline_transformers()
    auto = transformers.models.auto.modeling_auto
    named = {name for family in families() for name in family.model_types} if generate else set()
    table = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if generate else auto.MODEL_MAPPING_NAMES
    every = [name for name in table if name not in named]  # those of named families generate in tests of their own
    random.Random(0).shuffle(every)  # noqa: S311  (so that some of them are a fair sample)
    file, job = (_GENERATED, generated) if generate else (_FOUND, tried)
    end, found = time.monotonic() + 60 * minutes, read_found(file)
    file.parent.mkdir(exist_ok=True)
    for number, model_type in enumerate(types or every):
        if time.monotonic() > end:
            break
        if types or model_type not in found or (found[model_type]["result"] == "read" and not read_alone):
            found[model_type] = _apart(job, model_type, read_alone)
            with file.open("a") as stream:
                stream.write(json.dumps(found[model_type]) + "\n")
            click.echo(f"{number} {found[model_type]}")
    made, version = list(found.values()), transformers.__version__
    if generate:
        _write("zoo generating", generating_table(made, len(every), version))
    else:
        _write("zoo", tables(made, len(every), version))


if __name__ == "__main__":
    main()
