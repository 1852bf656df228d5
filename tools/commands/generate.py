"""``nestforge generate``: text from a language model, streamed to the terminal, or a chat turn by turn."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import click

from ...bundle.entries.generation_entry import GenerationEntry
from ...errors import CapacityError, InputError
from ...outside import printable
from ...outside_file import parse_json
from ...runtime.engines.residency import Residency
from ...runtime.generation.generation import Generation
from ...runtime.generation.options import GenerationRequest
from ...runtime.generation.row import Generated, GeneratedRow
from ...runtime.load import load
from ...runtime.summary import ShortNames
from ..console import print_json, print_table, say
from ..options import bundle_argument, field_options, json_option, merge_option, merged_tasks, path_option

_GENERATE_EXAMPLES = """\b
Examples:
  nestforge generate my.bundle --prompt "Once upon a time" --max-tokens 64
  nestforge generate my.bundle --prompt-file question.txt --temperature 0.8 --top-p 0.95 --seed 7
  nestforge generate my.bundle --chat --tokens-per-second 20
  nestforge generate my.bundle --messages chat.json --submodel S --json
  nestforge generate my.bundle --inputs features.npz --decoder-prompt 50258,50259,50359,50363
"""

# Fields of the request without an option of the same form: texts and objects, and one too many.
_NO_OPTIONS = ("prompt", "messages", "session", "memory_mb", "stop")
_GENERATE_FIELDS = tuple(field.name for field in fields(GenerationRequest) if field.name not in _NO_OPTIONS)


@click.command("generate", epilog=_GENERATE_EXAMPLES)
@bundle_argument
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Text to continue; repeatable, each is a row.")
@path_option("--prompt-file", "UTF-8 file whose whole text is continued.")
@click.option("--chat", is_flag=True, help="Chat on standard input, a turn a line; an empty line ends it.")
@path_option("--inputs", "NPZ file with the array that the model's encoder reads, rows first.")
@path_option("--messages", 'JSON file of a chat to answer: [{"role": ..., "content": ...}].')
@click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="Text that ends a row beside the model's own end tokens; token ids are for Python. Repeatable.",
)
@field_options(GenerationRequest, *_GENERATE_FIELDS)
@field_options(load, "threads", "residency", "provider")
@merge_option
@json_option
def generate_command(
    bundle: Path,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    chat: bool,
    inputs: Path | None,
    messages: Path | None,
    threads: int | None,
    residency: Residency | Literal["auto"],
    provider: str,
    merge: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue a text or answer a chat.

    Without --budget, --submodel, --tokens-per-second or --deadline-ms the largest submodel writes. The text is streamed
    to stdout; who wrote it and how fast follows on stderr. The bundle must be compiled with --generate.
    """
    if bool(prompts) + chat + sum(file is not None for file in (prompt_file, inputs, messages)) != 1:
        raise click.UsageError("expected one of --prompt, --prompt-file, --inputs, --chat and --messages")
    if sum(options[name] is not None for name in ("budget", "submodel", "tokens_per_second", "deadline_ms")) > 1:
        raise click.UsageError("expected at most one of --budget, --submodel, --tokens-per-second and --deadline-ms")
    if chat and (as_json or options["logprobs"] is not None):
        raise click.UsageError("--json and --logprobs are for one answer, not for --chat")
    if residency == "mapped":
        raise click.UsageError("--residency: expected auto, shared or packed; engines that generate are never mapped")
    task, capacity = options["task"], options.pop("capacity")
    merged = merged_tasks(task, merge)
    with load(bundle, residency=residency, threads=threads, provider=provider, merge=merged) as model:
        say_endless(model.bundle.manifest.generation, options["stop"])
        names = ShortNames.of(model.bundle.manifest)
        if chat:
            model.generate.require_chats()
            with model.session(capacity=capacity, task=task) as session:
                converse(lambda turns: model.generate.stream(messages=turns, session=session, **options), names)
            return
        arguments = _prompt_arguments(prompts, prompt_file, inputs, messages)
        generation = model.generate.stream(**arguments, capacity=capacity, **options)
        with generation:
            if as_json:
                print_json(generated_data(generation.finish()))
                return
            if inputs is not None or len(prompts) > 1 or model.bundle.manifest.text is None:
                print_texts(generation.finish())
            else:
                stream_text(generation)
            generated = generation.result()
        if options["logprobs"] is not None:
            for row in generated.rows:
                print_log_probabilities(row, model.generate.token_text)
        say_speed(generated, names)


def _prompt_arguments(
    prompts: tuple[str, ...], prompt_file: Path | None, inputs: Path | None, messages: Path | None
) -> dict[str, Any]:
    """The arguments of ``generate`` that say what is continued."""
    from ...runtime.inputs.files import MAX_BYTES, read_npz, read_text_file

    if inputs is not None:
        arrays = list(read_npz(inputs, MAX_BYTES).values())
        if len(arrays) != 1:
            raise InputError(f"{inputs}: {len(arrays)} arrays; expected the one that the model's encoder reads")
        return {"prompt": arrays[0]}
    if messages is not None:
        return {"messages": _chat_of(read_text_file(messages), messages)}
    if prompt_file is not None:
        return {"prompt": read_text_file(prompt_file)}
    return {"prompt": list(prompts)}


def _chat_of(text: str, path: Path) -> Sequence[Mapping[str, str]]:
    """The chat in ``path``; the chat template checks the messages."""
    try:
        chat: Sequence[Mapping[str, str]] = parse_json(text)
    except ValueError as failure:
        raise InputError(
            f"{path}: not JSON ({failure}); expected a list of messages with role and content"
        ) from failure
    return chat


_PROMPT = "> "
_ENDED_BY = {"end": "the end token", None: "interruption"}  # else as `finish` has it
# Runs shown of a row: where a rate lies between two submodels, they may take turns at every other token.
_RUNS_SHOWN = 10
Message = dict[str, str]


def stream_text(generation: Generation) -> Generated:
    """Writes the text of its one row as it comes, and gives back all of it."""
    for piece in generation:
        _write(piece.text)
    click.echo()
    return generation.result()


def print_texts(generated: Generated) -> None:
    """The rows, where there are several, each behind its number; of a bundle without a tokenizer the token ids."""
    for number, row in enumerate(generated.rows):
        if len(generated.rows) > 1:
            say(f"row {number}")
        _write(" ".join(map(str, row.tokens)) if row.text is None else row.text)
        click.echo()


def print_log_probabilities(row: GeneratedRow, text_of: Callable[[int], str]) -> None:
    """A table of its tokens: the log-probability of each, and the most likely ones in its place."""
    found = row.log_probabilities or ()
    most = max((len(each.top) for each in found), default=0)
    columns = ["token", "log-probability", *(["most likely", *[""] * (most - 1)] if most else [])]
    rows = [
        [repr(text_of(token)), f"{each.token:.4f}", *(f"{text_of(other)!r} {value:.4f}" for other, value in each.top)]
        for token, each in zip(row.tokens, found, strict=True)
    ]
    print_table(columns, rows)


def say_speed(generated: Generated, names: ShortNames, of_a_chat: bool = False) -> None:
    """Tokens written, by which submodel, and how fast, on stderr."""
    hint = "" if of_a_chat else ", whose reasons --json shows"  # which is not for chats
    for number, row in enumerate(generated.rows):
        before = f"row {number}: " if len(generated.rows) > 1 else ""
        reused = f" ({row.reused_tokens} reused)" if row.reused_tokens else ""
        say(
            f"{before}{_tokens(len(row.tokens))}, ended by {_ENDED_BY.get(row.finish, row.finish)}; prompt of "
            f"{_tokens(row.prompt_tokens)}{reused} in {row.prompt_ms:.1f} ms",
            err=True,
        )
        for run in row.runs[:_RUNS_SHOWN]:
            of_task = f", task {generated.task}" if generated.task is not None else ""
            say(names(f"{before}{run.tokens} by {run.submodel}{of_task}: {run.reason}"), err=True)
        if more := row.runs[_RUNS_SHOWN:]:
            counted = Counter[str]()
            for run in more:
                counted[run.submodel] += run.tokens
            written = ", ".join(f"{tokens} by {names(submodel)}" for submodel, tokens in counted.items())
            say(f"{before}{written}: in {len(more)} more runs{hint}", err=True)
        for one in row.drafts:
            say(
                f"{before}{names(one.draft)} drafted {one.drafted}, {one.accepted} accepted in {one.runs} runs",
                err=True,
            )
    if generated.tokens_per_second is not None:
        say(f"{generated.tokens_per_second:.1f} tokens/s", err=True)


def _tokens(number: int) -> str:
    return f"{number} token{'' if number == 1 else 's'}"


def say_endless(entry: GenerationEntry | None, stops: Collection[str]) -> None:
    """On stderr, of a model for which no token ends a text."""
    if entry is not None and not entry.end_ids and not stops:
        say("the model's folder states no token that ends a text: it ends after --max-tokens, or at --stop", err=True)


def generated_data(generated: Generated) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "task": generated.task,
        "rows": [
            {
                "text": row.text,
                "tokens": row.tokens,
                "finish": row.finish,
                "stop": row.stop,
                "runs": row.runs,
                "log_probabilities": row.log_probabilities,
                "prompt_tokens": row.prompt_tokens,
                "reused_tokens": row.reused_tokens,
                "prompt_ms": row.prompt_ms,
                "token_ms": row.token_ms,
                "tokens_per_second": row.tokens_per_second,
                "drafts": row.drafts,
            }
            for row in generated.rows
        ],
        "tokens_per_second": generated.tokens_per_second,
    }


def converse(
    answer: Callable[[list[Message]], Generation], names: ShortNames, lines: Iterable[str] | None = None
) -> None:
    """A chat: each of ``lines``, by default those of standard input, is the user's turn; an empty one, the end of the
    input, or a turn that its cache has no room left for ends it. Raises CapacityError if that is the first."""
    messages: list[Message] = []
    for line in _typed() if lines is None else lines:
        if not line.strip():
            return
        messages.append({"role": "user", "content": line.rstrip("\n")})
        try:
            generation = answer(messages)
        except CapacityError as failure:
            if len(messages) == 1:
                raise
            say(f"the chat has used up its capacity: {failure}", err=True)
            return
        with generation:
            generated = stream_text(generation)
        say_speed(generated, names, of_a_chat=True)
        messages.append({"role": "assistant", "content": generated.text or ""})


def _typed() -> Iterable[str]:
    """Lines of standard input, requested where a person types them."""
    asks = sys.stdin is not None and sys.stdin.isatty()
    while True:
        if asks:
            click.echo(_PROMPT, nl=False, err=True)
        line = sys.stdin.readline() if sys.stdin is not None else ""
        if not line:
            return
        yield line


def _write(text: str) -> None:
    """Text of the model's on stdout; nothing in it but its lines and tabs drives the terminal."""
    lines = ["\t".join(map(printable, line.split("\t"))) for line in text.split("\n")]
    click.echo("\n".join(lines), nl=False)
