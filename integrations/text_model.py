"""A bundle that is asked for texts: one of its submodels answers any number of them, in full batches."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

from ..errors import InputError
from ..runtime.answer import Answer
from ..runtime.inputs.arrays import Array
from ..runtime.load import load
from ..runtime.model import ElasticModel
from ..runtime.rows import Rows, answers, buckets_of, rows_of

_Self = TypeVar("_Self", bound="TextModel")
_LOGGER = logging.getLogger("nestforge")


class TextModel:
    """The one submodel of a bundle that answers every text, whatever its length. A context manager; thread-safe.

    ``bundle`` is a folder, which is opened here and closed with this, or a model that is open and stays the caller's.
    The submodel is that of a named ``budget``, or ``submodel`` by id or label, else the largest. ``truncated`` counts
    the texts that were cut to ``max_seq_length`` tokens so far. Raises as ``nestforge.load`` and a model's call do.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str] | ElasticModel,
        *,
        budget: str | None = None,
        submodel: str | None = None,
    ) -> None:
        self._opened_here = not isinstance(bundle, ElasticModel)
        self.model = bundle if isinstance(bundle, ElasticModel) else load(bundle)
        try:
            if self.model.bundle.manifest.text is None:
                raise InputError(f"bundle {self.model.bundle.path}: has no tokenizer, so it cannot be asked for texts")
            self.submodel = self.model.choose(1, 1, budget=budget, submodel=submodel).engine.submodel
            self._buckets = buckets_of(self.model, self.submodel)
        except BaseException:
            self.close()
            raise
        self._selection = {"submodel": self.submodel} if budget is None else {"budget": budget}
        self.truncated = 0
        self._count_lock = threading.Lock()

    @property
    def max_seq_length(self) -> int:
        """The most tokens of a text that the submodel takes here, the ones added by the tokenizer included."""
        text, longest = self.model.bundle.manifest.text, self.model.longest_sequence(1, self.submodel)
        return min(longest, (text and text.max_tokens) or longest)

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        limit = f"texts are cut to {self.max_seq_length} tokens here"
        raise InputError(
            f"max_seq_length {value!r:.80}: {limit}; for fewer shorten them, for more compile larger buckets"
        )

    def close(self) -> None:
        """Closes the model that was opened here; another one is left open."""
        if self._opened_here:
            self.model.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model.bundle!r}, {self.submodel})"

    def _answers(
        self,
        texts: list[str],
        *,
        truncate: bool,
        batch_size: int | None = None,
        show_progress: bool = False,
        prompt: str | None = None,
        prompt_name: str | None = None,
        **options: Any,
    ) -> Iterator[tuple[Array, Answer]]:
        """The numbers of the texts in a batch and the answer to them, until every text has one; texts of like length
        go together. One line is logged where texts were cut."""
        if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
            raise InputError(f"batch_size: expected a whole number of at least 1, got {batch_size!r:.80}")
        rows: Rows = rows_of(self.model, texts, truncate=truncate, prompt=prompt, prompt_name=prompt_name)
        cut = 0
        with progress(show_progress, len(texts)) as advance:
            batches = answers(
                self.model, rows, self._buckets, truncate=truncate, most=batch_size, **self._selection, **options
            )
            for part, answer in batches:
                yield part, answer
                cut += len(answer.truncated)
                advance(len(part))
        self._count(cut, len(texts))

    def _count(self, cut: int, texts: int) -> None:
        """Counts and logs that so many of so many ``texts`` were cut, if any was."""
        if cut:
            with self._count_lock:
                self.truncated += cut
            _LOGGER.warning(
                "%d of %d texts were cut to %d tokens, the most that submodel %s takes here",
                *(cut, texts, self.max_seq_length, self.submodel),
            )


def listed(inputs: object) -> tuple[list[Any], bool]:
    """``inputs`` as a list, and whether they were a single text. Raises InputError for what is none."""
    if isinstance(inputs, str):
        return [inputs], True
    if isinstance(inputs, set | frozenset):
        raise InputError(
            f"inputs: expected a text or texts in an order, got a {type(inputs).__name__}, which has none; give a list"
        )
    has_rows = getattr(inputs, "ndim", 1) == 1  # of an array of texts
    if isinstance(inputs, Iterable) and has_rows and not isinstance(inputs, bytes | bytearray | memoryview | dict):
        texts = list(inputs)
        wrong = next((number for number, text in enumerate(texts) if not isinstance(text, str)), None)
        if wrong is not None:
            raise InputError(f"text {wrong}: expected text, got {texts[wrong]!r:.80}")
        return texts, False
    raise InputError(f"inputs: expected a text or texts, got {type(inputs).__name__}")


@contextmanager
def progress(shown: bool, total: int) -> Iterator[Callable[[int], None]]:
    """Called with how many more of ``total`` texts are done; a bar on stderr where ``shown``."""
    if not shown:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("Texts", total=total)
        yield lambda done: bar.advance(task, done)
