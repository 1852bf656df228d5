"""The interface of transformers' ``pipeline("text-classification")`` over a compiled bundle."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np

from ..bundle.entries.tensor_spec import TensorSpec
from ..bundle.manifest import Manifest
from ..bundle.roles import compared_outputs
from ..errors import InputError
from ..runtime.exits.choice import RequestedExits
from ..runtime.inputs.arrays import Array
from ..runtime.model import ElasticModel
from ..strict import nearest
from .text_model import TextModel, listed

Function = Literal["softmax", "sigmoid", "none"]
# Not None, which asks for every class.
_ONE: Any = object()


class Scored(TypedDict):
    """One class of a text."""

    label: str
    score: float


class TextClassifier(TextModel):
    """Texts to labels and scores, where a text classification pipeline is expected.

    ``bundle``, ``budget`` and ``submodel`` are those of ``TextModel``. ``labels`` are the classes' names in order, or
    by number as ``id2label`` of the source checkpoint's ``config.json``; a bundle does not hold them, and without them
    they are LABEL_0, LABEL_1 and so on. ``function_to_apply`` makes scores of logits: softmax, of a single class
    sigmoid, unless another is named; a model of several labels at once needs sigmoid, a regression none. ``exits`` is
    as in a call of the model. Raises InputError for a bundle that does not classify, or labels that do not fit.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str] | ElasticModel,
        *,
        labels: Sequence[str] | Mapping[int, str] | Mapping[str, str] | None = None,
        function_to_apply: Function | None = None,
        budget: str | None = None,
        submodel: str | None = None,
        exits: RequestedExits | None = None,
    ) -> None:
        super().__init__(bundle, budget=budget, submodel=submodel)
        try:
            self._output = class_output(self.model.bundle.manifest, f"bundle {self.model.bundle.path}")
            classes = int(self._output.dims[1])
            self.labels = checked_labels(labels, classes)
            self._function = _function_named(function_to_apply or ("sigmoid" if classes == 1 else "softmax"))
        except InputError:
            self.close()
            raise
        self._exits = exits

    def __call__(
        self,
        inputs: str | Iterable[str],
        *,
        top_k: int | None = _ONE,
        function_to_apply: Function | None = None,
        batch_size: int | None = None,
        truncation: bool = False,
    ) -> list[Scored] | list[list[Scored]]:
        """The label and score of each text, in order; of a single text too, a list.

        With ``top_k`` each text has a list of its best, of every class for None; a single text has that list alone.
        Texts go in batches of like length of at most ``batch_size``. A text of more tokens than ``max_seq_length`` is
        refused, or cut there with ``truncation``, which the logger ``nestforge`` says. Raises InputError.
        """
        texts, single = listed(inputs)
        if top_k is not _ONE and top_k is not None and (type(top_k) is not int or top_k < 1):
            raise InputError(f"top_k: expected a whole number of at least 1, or None for all, got {top_k!r:.80}")
        function = self._function if function_to_apply is None else _function_named(function_to_apply)
        found: list[list[Scored]] = [[] for _ in texts]
        if texts:
            for part, answer in self._answers(texts, truncate=truncation, batch_size=batch_size, exits=self._exits):
                scores = function(answer[self._output.name].astype(np.float32))
                for number, row in zip(part.tolist(), scores, strict=True):
                    best = np.argsort(-row, kind="stable")[: 1 if top_k is _ONE else top_k]
                    found[number] = [{"label": self.labels[place], "score": float(row[place])} for place in best]
        if top_k is _ONE:
            return [best[0] for best in found]
        return found[0] if single else found


def class_output(manifest: Manifest, name: str) -> TensorSpec:
    """The output ``[batch, classes]`` of logits. Raises InputError where there is none."""
    role = compared_outputs(manifest).get("classes")
    wanted = role.name if role is not None else "logits"  # of a single class, which is compared with nothing
    for spec in manifest.outputs:
        if spec.name == wanted and len(spec.dims) == 2 and spec.dims[0] == "batch" and isinstance(spec.dims[1], int):
            return spec
    known = ", ".join(f"{spec.name} {list(spec.dims)}" for spec in manifest.outputs)
    raise InputError(f"{name}: expected an output of logits [batch, classes]; it has {known}")


def checked_labels(labels: Sequence[str] | Mapping[Any, str] | None, classes: int) -> tuple[str, ...]:
    """The names of so many classes. Raises InputError for labels that are not theirs."""
    if labels is None:
        return tuple(f"LABEL_{place}" for place in range(classes))
    named: Sequence[Any]
    if isinstance(labels, Mapping):
        by_number = {str(number): label for number, label in labels.items()}
        named = [by_number.get(str(place)) for place in range(len(by_number))]
    else:
        named = labels
    if isinstance(named, str) or len(named) != classes or not all(isinstance(label, str) for label in named):
        raise InputError(f"labels: expected the names of {classes} classes, got {labels!r:.80}")
    return tuple(named)


def _function_named(name: str) -> Callable[[Array], Array]:
    if name not in SCORES:
        raise InputError(f"function_to_apply {name!r:.80}{nearest(str(name)[:80], SCORES)}")
    return SCORES[name]


def _softmax(logits: Array) -> Array:
    """Over the classes of ``[B, C]``."""
    powers: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _sigmoid(logits: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))  # which no logit overflows


# Scores [B, C] of logits.
SCORES: dict[str, Callable[[Array], Array]] = {"softmax": _softmax, "sigmoid": _sigmoid, "none": lambda x: x}
