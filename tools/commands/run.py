"""``nestforge run``: one request through the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

from ...bundle.open_bundle import Bundle
from ...bundle.roles import compared_outputs, continued_input, ids_input
from ...runtime.answer import Answer, ExitRows
from ...runtime.engines.onnxruntime_gpu.provider import PROVIDERS
from ...runtime.engines.residency import Residency
from ...runtime.inputs.arrays import Array
from ...runtime.inputs.files import MAX_BYTES, read_npz
from ...runtime.inputs.text import open_tokenizer
from ...runtime.load import load
from ...runtime.model import ElasticModel
from ...runtime.summary import ShortNames
from ...tables import Table
from ...whole_file import require_new, write_whole
from ..console import Block, in_options, say, show
from ..options import (
    bundle_argument,
    field_options,
    json_option,
    merge_option,
    merged_tasks,
    overwrite_option,
    path_option,
    require_text_options,
)

_SHOWN = 6  # first values of each output
_SHOWN_RUNS = 8
# Remedies for a limit that was missed.
_MENDS = {
    "latency_ms": "figures of this host are made by `nestforge measure`, and --residency auto makes faster engines",
    "deadline_ms": "a deadline counts the text's encoding too; allow more time, or name a smaller submodel",
}

_LIMITS = ("budget", "latency_ms", "deadline_ms", "submodel")
_OF_TEXTS = ("truncate", "prompt", "prompt_name")

_RUN_EXAMPLES = """\b
Examples:
  nestforge run my.bundle --text "A submodel is a view." --budget fast
  nestforge run my.bundle --text "one row" --text "another row" --latency-ms 8 --output answer.npz
  nestforge run my.bundle --inputs inputs.npz --submodel ffn768-heads6 --json
  nestforge run my.bundle --text "easy or hard?" --exits 0.3
  nestforge run my.bundle --text "how is a file closed?" --prompt-name query
  nestforge run my.bundle --text "how is a file closed?" --dimensions 256
  nestforge run my.bundle --text "A submodel is a view." --task reviews
  nestforge run my.bundle --text "A submodel is a view." --provider cuda
"""


@click.command("run", epilog=_RUN_EXAMPLES)
@bundle_argument
@click.option("--text", "texts", multiple=True, metavar="TEXT", help="Text to answer, a row. Repeatable.")
@path_option("--inputs", "NPZ file with an array per input, by name, rows first.")
@field_options(ElasticModel.__call__, *_LIMITS, "exits", *_OF_TEXTS)
@field_options(load, residency="shared, which opens in milliseconds; on a GPU as its provider has it")
@field_options(ElasticModel.__call__, "task", "dimensions")
@merge_option
@field_options(load, "provider")
@path_option("--output", "NPZ file to write all outputs to.")
@overwrite_option
@json_option
def run_command(
    bundle: Path,
    texts: tuple[str, ...],
    inputs: Path | None,
    residency: Residency | Literal["auto"] | None,
    merge: bool,
    provider: str,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Answer one request with the submodel that fits it.

    Without --budget, --latency-ms, --deadline-ms or --submodel the largest submodel answers. Prints which one did,
    why, and how long it took. For logits it prints the best classes or tokens.

    The first run of an engine often takes several times as long as later ones. With a limit in time the request is
    therefore answered twice, and the second answer is shown, with the time of the first run and whether the limit was
    kept.
    """
    if bool(texts) == (inputs is not None):
        raise click.UsageError("expected either --text or --inputs")
    if sum(options[name] is not None for name in _LIMITS) > 1:
        raise click.UsageError("expected at most one of --budget, --latency-ms, --deadline-ms and --submodel")
    require_text_options(bool(texts), **{name: options[name] for name in _OF_TEXTS})
    merged, in_time = merged_tasks(options["task"], merge), options["deadline_ms"] is not None
    if output is not None:
        require_new(output, overwrite)
    residency = residency or ("shared" if PROVIDERS[provider] is None else "auto")
    # A deadline counts from the call, so nothing opens after it.
    with load(bundle, residency=residency, preload=in_time, provider=provider, merge=merged) as model:
        feeds = read_npz(inputs, MAX_BYTES) if inputs is not None else list(texts)
        ask = partial(model, feeds, **options)
        answer = ask()
        first_ms = answer.timings.run if answer.first_run else None
        if answer.limit is not None and answer.first_run:
            answer = ask()
        names = ShortNames.of(model.bundle.manifest)
        best = best_answers(model.bundle, answer, model.token_counts(texts, answer.prompt) if texts else None)
    if output is not None:
        arrays = answer.outputs
        write_whole(output, lambda stream: np.savez(stream, **arrays), "the answer", new=not overwrite)  # type: ignore[arg-type]
    found = None if best is None else {"what": best[0], "rows": best[1]}
    data = {**_answer_data(answer, first_ms), "best": found}
    show(as_json, data, lambda: _answer_report(answer, best, first_ms, names))
    if not as_json and answer.limit is not None and not answer.limit.kept:
        say(f"\nwarning: {in_options(str(answer.limit))}; {_MENDS[answer.limit.name]}", err=True)


def _answer_data(answer: Answer, first_ms: float | None) -> dict[str, Any]:
    return {
        "submodel": answer.submodel,
        "engine": answer.engine,
        "bucket": answer.bucket,
        "residency": answer.residency,
        "reason": answer.reason,
        "padding": answer.padding,
        "truncated": answer.truncated,
        "prompt": answer.prompt,
        "dimensions": answer.dimensions,
        "task": answer.task,
        "timings_ms": answer.timings._asdict(),
        "first_run_ms": first_ms,
        "limit": None if answer.limit is None else {**answer.limit._asdict(), "kept": answer.limit.kept},
        "runs": [{**run._asdict(), "rows": run.rows.tolist()} for run in answer.runs],
        "outputs": {
            name: {"dtype": str(array.dtype), "shape": array.shape, "first": [float(v) for v in array.ravel()[:_SHOWN]]}
            for name, array in answer.outputs.items()
        },
        "exits": _exits_data(answer.exits) if answer.exits else None,
    }


def _exits_data(exits: ExitRows) -> dict[str, Any]:
    columns = {
        "exit": exits.index.tolist(),
        "layer": exits.layer.tolist(),
        "entropy": exits.entropy.tolist(),
        "flops": exits.flops.tolist(),
        "flops_share": exits.share.tolist(),
    }
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return {"policy": exits.policy, "rows": rows}


def _answer_report(
    answer: Answer, best: tuple[str, list[list[Best]]] | None, first_ms: float | None, names: ShortNames
) -> Iterator[Block]:
    timings = answer.timings
    first = f" (first run {first_ms:.2f} ms)" if first_ms is not None and not answer.first_run else ""
    facts = [
        *([("task", answer.task)] if answer.task is not None else []),
        ("submodel", names(answer.submodel)),
        ("because", in_options(answer.reason)),
        ("engine", f"{names(answer.engine)}, weights {answer.residency}"),
        ("padding", str(answer.padding) if answer.padding else "none"),
        *((f"run {number}", str(run)) for number, run in enumerate(answer.runs[:_SHOWN_RUNS], 1)),
        *([("more runs", str(len(answer.runs) - _SHOWN_RUNS))] if len(answer.runs) > _SHOWN_RUNS else []),
        *([("prompt", repr(answer.prompt))] if answer.prompt else []),
        *([("dimensions", str(answer.dimensions))] if answer.dimensions is not None else []),
        *([("truncated", f"text {', '.join(map(str, answer.truncated))}")] if answer.truncated else []),
        (
            "timings",
            f"encode {timings.encode:.2f} ms, dispatch {timings.dispatch:.2f} ms, "
            f"open {timings.open:.2f} ms, {'first ' if answer.first_run else ''}run {timings.run:.2f} ms{first}",
        ),
        *([("limit", in_options(str(answer.limit)))] if answer.limit else []),
    ]
    yield Table.facts(facts)
    yield Table.of(
        answer.outputs.items(),
        {
            "output": lambda output: output[0],
            "dtype": lambda output: output[1].dtype,
            "shape": lambda output: "x".join(map(str, output[1].shape)),
            "first values": lambda output: " ".join(f"{value:.4f}" for value in output[1].ravel()[:_SHOWN]),
        },
    )
    if best is not None:
        what, candidates = best
        columns = ["row", f"best {what} and logit", *([""] * (len(candidates[0]) - 1))]
        yield Table(columns, [[str(number), *map(str, row)] for number, row in enumerate(candidates)])
    if answer.exits is not None:
        yield Table.of(
            enumerate(_exits_data(answer.exits)["rows"]),
            {
                "row": lambda left: left[0],
                "left after layer": lambda left: left[1]["layer"],
                "entropy, nats": lambda left: f"{left[1]['entropy']:.4f}",
                "FLOPs of whole engine": lambda left: f"{100 * left[1]['flops_share']:.1f} %",
            },
        )


_ANSWERS_SHOWN = 3


@dataclass(frozen=True)
class Best:
    """One candidate: a class or token ``id``, its ``logit``, and its ``token`` where the bundle has a tokenizer."""

    id: int
    logit: float
    token: str | None = None

    def __str__(self) -> str:
        shown = str(self.id) if self.token is None else repr(self.token)
        return f"{shown} {self.logit:.2f}"


def best_answers(bundle: Bundle, answer: Answer, lengths: Sequence[int] | None) -> tuple[str, list[list[Best]]] | None:
    """The kind of candidates, and per row the best of them, the best first; None for a model without such logits, or
    one whose decoder repeats the text that its encoder reads, so that nothing follows it.

    ``lengths`` are the tokens of each text; without them every step of an array counts.
    """
    roles = compared_outputs(bundle.manifest)
    if "classes" in roles and roles["classes"].dims[:-1] == ("batch",):
        return "class", [_best(row, None) for row in answer[roles["classes"].name]]
    if "next_tokens" in roles and continued_input(bundle.manifest) == ids_input(bundle.manifest):
        logits = answer[roles["next_tokens"].name]
        ends = [logits.shape[1]] * len(logits) if lengths is None else [min(n, logits.shape[1]) for n in lengths]
        token = _tokens(bundle)
        return "next token", [_best(row[end - 1], token) for row, end in zip(logits, ends, strict=True)]
    return None


def _best(logits: Array, token: Callable[[int], str | None] | None) -> list[Best]:
    ids = np.argsort(-logits, kind="stable")[:_ANSWERS_SHOWN].tolist()
    return [Best(i, float(logits[i]), token(i) if token else None) for i in ids]


def _tokens(bundle: Bundle) -> Callable[[int], str | None] | None:
    if bundle.manifest.text is None:
        return None
    return open_tokenizer(bundle.file(bundle.manifest.text.file)).id_to_token
