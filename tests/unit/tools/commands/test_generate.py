"""``nestforge generate``: a text, several, a chat; as text and as JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from nestforge.bundle.entries.generation_entry import CachedLayer, GenerationEntry
from nestforge.outside import printable
from nestforge.runtime import load as load_module
from nestforge.runtime.generation.row import Generated, GeneratedRow, Run
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from nestforge.runtime.summary import ShortNames
from nestforge.tools.commands.generate import say_endless, say_speed
from support.commands import error_of, json_of, nestforge, usage_of
from support.fake_gpu import host_provider
from support.generating import llama_folder

CHAT = [{"role": "user", "content": "class method"}]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory) / "bundle"


@pytest.fixture(scope="module")
def model(bundle: Path) -> ElasticModel:
    return load(bundle)


def generate(bundle: Path, *options: str, stdin: str | None = None) -> Result:
    return nestforge("generate", bundle, *options, stdin=stdin)


def shown_as(text: str | None) -> str:
    """On a terminal: what is neither a letter nor a new line is escaped."""
    return "\n".join(map(printable, (text or "").split("\n")))


def test_the_text_is_stdout_and_the_rest_stderr(bundle: Path, model: ElasticModel) -> None:
    shown = generate(bundle, "--prompt", "class method", "--max-tokens", "6")
    text = model.generate("class method", max_tokens=6).text
    assert text
    assert (shown.exit_code, shown.stdout) == (0, f"{shown_as(text)}\n")
    lines = shown.stderr.splitlines()
    assert lines[0].startswith("6 tokens, ended by length; prompt of ")
    assert lines[1] == "6 by XL: no limit given: the largest submodel"
    assert lines[2].endswith(" tokens/s")


def test_several_prompts_are_rows(bundle: Path, model: ElasticModel) -> None:
    shown = generate(bundle, "--prompt", "class", "--prompt", "the", "--max-tokens", "4", "--submodel", "S")
    rows = model.generate(["class", "the"], max_tokens=4, submodel="S").rows
    assert shown.stdout == f"row 0\n{shown_as(rows[0].text)}\nrow 1\n{shown_as(rows[1].text)}\n"
    assert "row 1: 4 by S: submodel S requested\n" in shown.stderr


def test_json_has_the_rows(bundle: Path, model: ElasticModel, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("class method")
    options = ("--prompt-file", str(prompt), "--max-tokens", "5", "--logprobs", "1", "--json")
    data: Any = json.loads(generate(bundle, *options).stdout)
    row = model.generate("class method", max_tokens=5, logprobs=1).rows[0]
    assert (data["rows"][0]["text"], tuple(data["rows"][0]["tokens"])) == (row.text, row.tokens)
    assert data["rows"][0]["finish"] == "length"
    assert data["rows"][0]["runs"] == [
        {"submodel": "ffn32", "tokens": 5, "reason": "no limit given: the largest submodel"}
    ]
    assert len(data["rows"][0]["log_probabilities"]) == 5


def test_a_chat_in_a_file_is_answered(bundle: Path, model: ElasticModel, tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps(CHAT))
    shown = generate(bundle, "--messages", str(chat), "--max-tokens", "5")
    assert shown.stdout == f"{shown_as(model.generate(messages=CHAT, max_tokens=5).text)}\n"
    chat.write_text("{")
    assert error_of("generate", bundle, "--messages", chat).startswith(f"{chat}: not JSON (")


def test_a_chat_keeps_its_turns_in_one_cache(bundle: Path, model: ElasticModel) -> None:
    shown = generate(bundle, "--chat", "--max-tokens", "5", stdin="class method\nthe value\n\nnot read\n")
    first = model.generate(messages=CHAT, max_tokens=5).text
    turns = [*CHAT, {"role": "assistant", "content": first or ""}, {"role": "user", "content": "the value"}]
    assert shown.stdout == f"{shown_as(first)}\n{shown_as(model.generate(messages=turns, max_tokens=5).text)}\n"
    assert " reused) in " in shown.stderr


def test_a_chat_whose_cache_is_full_ends_and_says_so(bundle: Path) -> None:
    turns = "class method\n" * 9
    shown = generate(bundle, "--chat", "--max-tokens", "5", "--capacity", "100", stdin=turns)
    assert shown.exit_code == 0
    assert 1 <= shown.stderr.count("ended by length") < 9
    assert shown.stderr.splitlines()[-1].startswith("the chat has used up its capacity: prompt: ")
    refused = generate(bundle, "--chat", "--max-tokens", "5", "--capacity", "8", stdin=turns)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith("nestforge: error: prompt: ")


def test_log_probabilities_are_a_table(bundle: Path, model: ElasticModel) -> None:
    shown = generate(bundle, "--prompt", "class", "--max-tokens", "3", "--logprobs", "1").stdout.splitlines()
    row = model.generate("class", max_tokens=3, logprobs=1).rows[0]
    assert row.log_probabilities
    assert shown[-4].split() == ["token", "log-probability", "most", "likely"]
    for line, found in zip(shown[-3:], row.log_probabilities, strict=True):
        assert f"{found.token:.4f}" in line


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), "expected one of --prompt, --prompt-file, --inputs, --chat and --messages"),
        (("--prompt", "a", "--chat"), "expected one of --prompt, --prompt-file, --inputs, --chat and --messages"),
        (
            ("--prompt", "a", "--submodel", "S", "--deadline-ms", "5"),
            "expected at most one of --budget, --submodel, --tokens-per-second and --deadline-ms",
        ),
        (("--chat", "--json"), "--json and --logprobs are for one answer, not for --chat"),
        (("--prompt", "a", "--residency", "mapped"), "engines that generate are never mapped"),
    ],
)
def test_wrong_usage(bundle: Path, options: tuple[str, ...], line: str) -> None:
    assert line in usage_of("generate", bundle, *options)


def test_an_empty_prompt_is_refused(bundle: Path) -> None:
    assert error_of("generate", bundle, "--prompt", "") == "prompt 0: empty; there is nothing to continue"


def test_a_draft_is_said_and_changes_no_text(bundle: Path, model: ElasticModel) -> None:
    options = ("--prompt", "class method", "--max-tokens", "9", "--draft", "S", "--drafted", "2")
    shown = generate(bundle, *options)
    row = model.generate("class method", max_tokens=9, draft="S", drafted=2).rows[0]
    assert shown.stdout == f"{shown_as(model.generate('class method', max_tokens=9).text)}\n"
    (drafts,) = row.drafts
    lines = shown.stderr.splitlines()
    assert lines[1] == "9 by XL: no limit given: the largest submodel; drafted by S, at most 2 a run"
    assert lines[2] == f"S drafted {drafts.drafted}, {drafts.accepted} accepted in {drafts.runs} runs"
    data: Any = json.loads(generate(bundle, *options, "--json").stdout)
    assert data["rows"][0]["drafts"] == [
        {"draft": "ffn8", "runs": drafts.runs, "drafted": drafts.drafted, "accepted": drafts.accepted}
    ]


def test_an_encoder_decoder_reads_the_prompt_and_has_no_chat() -> None:
    golden = Path(__file__).parents[3] / "golden" / "bundle-narrow-heads"
    (row,) = json_of("generate", golden, "--prompt", "the quick brown fox", "--max-tokens", "4")["rows"]
    assert row["prompt_tokens"] == 4
    assert len(row["tokens"]) <= 4
    assert "its model has no chat template" in error_of("generate", golden, "--chat")


NAMES = ShortNames({"ffn8": "S", "ffn32": "XL"})


def row(*runs: Run) -> Generated:
    tokens = tuple(range(sum(run.tokens for run in runs)))
    return Generated((GeneratedRow("text", tokens, "length", None, runs, None, 3, 0, 1.0, ()),), None)


@pytest.mark.parametrize(
    ("finish", "said"), [("end", "the end token"), ("stop", "stop"), ("length", "length"), (None, "interruption")]
)
def test_what_ended_a_text_and_one_token_is_one(capsys: pytest.CaptureFixture[str], finish: Any, said: str) -> None:
    one = replace(row(Run("ffn8", 1, "x")).rows[0], finish=finish, prompt_tokens=1)
    say_speed(Generated((one,), None), NAMES)
    assert capsys.readouterr().err.startswith(f"1 token, ended by {said}; prompt of 1 token in 1.0 ms\n")


def test_every_run_has_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    say_speed(row(Run("ffn8", 1, "the smallest"), Run("ffn32", 2, "3 ms left"), Run("ffn8", 4, "1 ms left")), NAMES)
    assert capsys.readouterr().err.splitlines()[1:] == [
        "1 by S: the smallest",
        "2 by XL: 3 ms left",
        "4 by S: 1 ms left",
    ]


def test_of_many_runs_the_last_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [Run("ffn8", 1, f"turn {turn}") if turn % 2 else Run("ffn32", 2, f"turn {turn}") for turn in range(13)]
    say_speed(row(*turns), NAMES)
    lines = capsys.readouterr().err.splitlines()[1:]
    assert lines[:10] == [f"{turn.tokens} by {NAMES(turn.submodel)}: {turn.reason}" for turn in turns[:10]]
    assert lines[10:] == ["4 by XL, 1 by S: in 3 more runs, whose reasons --json shows"]
    say_speed(row(*turns), NAMES, of_a_chat=True)  # whose answers --json is not for
    assert capsys.readouterr().err.splitlines()[-1] == "4 by XL, 1 by S: in 3 more runs"


def test_a_text_that_no_token_ends_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    entry = GenerationEntry(9, (CachedLayer(1, 8),), 16, (), ())
    say_endless(entry, ())
    line = "the model's folder states no token that ends a text: it ends after --max-tokens, or at --stop\n"
    assert capsys.readouterr().err == line
    say_endless(entry, ["end"])
    say_endless(replace(entry, end_ids=(2,)), ())
    say_endless(None, ())
    assert capsys.readouterr().err == ""


def test_a_provider_is_the_hosts_and_of_the_bundle(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that this host lacks, and one whose kernels the bundle's caches are not for."""
    line = error_of("generate", bundle, "--prompt", "class", "--provider", "cuda")
    assert line.endswith("; install nestforge[cuda] in place of nestforge[cpu]")
    monkeypatch.setattr(load_module, "provider_named", lambda _: host_provider())
    line = error_of("generate", bundle, "--prompt", "class", "--provider", "cuda")
    assert line.startswith("generate: provider host does not run these KV-cache engines; use provider cuda with a ")
