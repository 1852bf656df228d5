"""Acceptance and times of drafts on this host: texts continued with each of them, as the engines that generate run
here."""

from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial

from ...bundle.device_files.device_file import this_host
from ...bundle.entries.generation_entry import NO_DRAFTS
from ...bundle.open_bundle import Bundle
from ...errors import InputError, SelectionError
from ...progress import Progress, silent
from ..device.threads import threads_or_default
from ..generation.draft_gains import HostDrafts
from ..generation.options import NGRAM
from ..load import load

# Tokens of a text: those of its prompt, and those that are generated behind it.
_PROMPT_TOKENS, _NEW_TOKENS = 64, 48
_MOST_TEXTS = 16
# Drafted tokens of a run, in turn from text to text: what a check takes depends on their number.
_DRAFTED = (1, 2, 4, 8)
# Where nobody gives texts: a story, an answer, a list, code and a summary.
DEFAULT_TEXTS = (
    "Once upon a time there was a fisherman who lived with his wife in a small house by the sea.",
    "Question: What is the capital of France, and what is it known for?\nAnswer: The capital of France is",
    "A list of fruits: apple, banana, cherry, apple, banana, cherry, apple, banana,",
    "def read_lines(path):\n    with open(path) as file:\n        return [line.strip() for line in file]\n\ndef",
    "The meeting began at nine. Sales rose in March, fell in April, and rose again in May. Summary: sales",
)


def calibrate_drafts(
    bundle: Bundle,
    texts: Sequence[str] = DEFAULT_TEXTS,
    *,
    submodel: str | None = None,
    threads: int | None = None,
    progress: Progress = silent,
) -> HostDrafts:
    """Acceptance of the tokens that each smaller submodel and n-gram draft for ``submodel`` (an id or a level, by
    default the largest) behind ``texts``, 16 at most, and what runs take. Nothing is written.

    Raises InputError for no texts, a bundle that does not generate, takes no drafts or has no tokenizer, SelectionError
    for a submodel that does not generate, and a BundleError for engines that cannot be opened.
    """
    if not texts:
        raise InputError("texts: expected at least one")
    generation = bundle.manifest.generation
    if generation is None:
        raise InputError(f"bundle {bundle.path}: has no engines that generate, so no drafts to calibrate")
    if generation.states:
        raise InputError(f"bundle {bundle.path}: no drafts to calibrate: {NO_DRAFTS}")
    order = [entry.id for entry in bundle.manifest.largest_first]
    able = {engine.submodel for engine in generation.engines}
    target = bundle.manifest.submodel(submodel).id if submodel else next(name for name in order if name in able)
    if target not in able:
        raise SelectionError(f"submodel {target}: has no engine that generates")
    drafts = [NGRAM, *(name for name in order[order.index(target) + 1 :] if name in able)]
    threads, texts = threads_or_default(threads), texts[:_MOST_TEXTS]
    with load(bundle.path, threads=threads) as model:
        for done, text in enumerate(texts):
            progress("continue texts", done, len(texts))
            prompt = model.generate.tokens(text)[: min(_PROMPT_TOKENS, generation.positions // 2)]
            tokens = min(_NEW_TOKENS, generation.positions - len(prompt))
            most = min(_DRAFTED[done % len(_DRAFTED)], *(engine.bucket.sequence - 1 for engine in generation.engines))
            write = partial(model.generate, prompt, max_tokens=tokens, submodel=target, temperature=0)
            write()
            for draft in drafts if most else ():
                write(draft=draft, drafted=most)
        progress("continue texts", len(texts), len(texts))
        times, judged = model.generate.learned()
    return HostDrafts(
        host=this_host(),
        threads=threads,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        texts=len(texts),
        times=tuple(times),
        drafts=tuple(judged),
    )
