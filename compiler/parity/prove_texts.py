"""Texts through a bundle beside sentence-transformers itself: what no engine's receipt shows, since engines are given
tokens. Tokenizer, case, longest text, prompts, pooling and the modules behind it, layers left out, and cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ...bundle.manifest import TextReceipt
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...errors import ParityError
from ...exporters.checkpoints.tokenizer_file import SETTINGS_FILE
from ...exporters.depth import layer_list
from ...exporters.sentence_transformers.library import SENTENCES, Library, TextCase, asked, cut_outputs, is_installed
from ...exporters.universal import UniversalModel
from ...runtime.device.threads import threads_or_default
from ...runtime.model import ElasticModel
from .cases import Case
from .compare import tolerance_for
from .judge import JudgedOutputs, judge
from .reference import Reference, replayed


class JudgedTexts(NamedTuple):
    """Comparison and its figures, and what is wrong, if anything is."""

    receipt: TextReceipt
    problem: str | None


def prove_texts(bundle: Bundle, universal: UniversalModel) -> tuple[TextReceipt, ...]:
    """The receipts of ``judged_texts``. Raises ParityError where the library makes other vectors."""
    found = list(judged_texts(bundle, universal))
    for receipt, problem in found:
        if problem is not None:
            raise ParityError(f"texts, {receipt.submodel}: {problem}")
    return tuple(receipt for receipt, _ in found)


def judged_texts(bundle: Bundle, universal: UniversalModel) -> Iterator[JudgedTexts]:
    """Each submodel of all widths, with whose layers the library can run; none of a model without modules of
    sentence-transformers, and where that library is not installed. Nor of a folder whose files do not say which class
    tokenises: its ``tokenizer.json`` is taken as it is, where the library guesses a class by the model's type."""
    source, has_texts = universal.source, bundle.manifest.text is not None and is_installed()
    if source.modules is None or not has_texts or not (source.checkpoint.folder / SETTINGS_FILE).is_file():
        return
    for entry in bundle.manifest.largest_first:
        submodel = universal.spec.parse(entry.id)
        if submodel.has_all_widths:
            yield _judged(bundle, universal, submodel)


def _judged(bundle: Bundle, universal: UniversalModel, submodel: Submodel) -> JudgedTexts:
    """Its engine of the longest bucket, packed as users run it."""
    source, manifest, name = universal.source, bundle.manifest, submodel.id
    assert source.modules is not None
    own = [engine for engine in manifest.engines if engine.submodel == name and engine.segment is None]
    engine = max(own, key=lambda each: (each.bucket.sequence, each.bucket.batch))
    library = Library(source.checkpoint.folder, cut_outputs(manifest, submodel.depth), engine.bucket.sequence)
    if submodel.depth is not None and (stack := layer_list(source.architecture)) is not None:
        library.keep_layers(stack, submodel.depth)
    texts = list(library.cases(SENTENCES))
    cases = [Case(case.name, case.feeds) for case in texts]
    reference = replayed(Reference(None, library, library.outputs), cases)
    with ElasticModel(bundle, {engine.id: "packed"}, threads_or_default(None)) as model:
        ask = partial(model, submodel=name, truncate=True)
        found = [asked(partial(ask, case.texts, prompt_name=case.prompt_name), library.outputs) for case in texts]
    limit = tolerance_for(source.precision(submodel), universal.spec.depth)
    verdict = judge(reference, found, cases, JudgedOutputs(library.outputs), limit)
    modules = [type(module).__name__ for _, module in source.modules.modules.values()]
    receipt = TextReceipt(
        submodel=name,
        library=library.version,
        stages=("tokenizer", *(["prompts"] if manifest.text and manifest.text.prompts else []), "layers", *modules),
        cases=tuple(case.name for case in cases),
        rule=limit.rule,
        outputs=verdict.outputs,
    )
    if verdict.broken is None:
        return JudgedTexts(receipt, None)
    others = _other_tokens(universal, texts, engine.bucket.sequence)
    return JudgedTexts(receipt, f"{others}beside {library.version}, {verdict.broken.describe()}")


def _other_tokens(universal: UniversalModel, texts: Sequence[TextCase], longest: int) -> str:
    """The first text of which the bundle's tokenizer makes other tokens than the library; empty where none is."""
    encoder = universal.source.encoder
    assert encoder is not None
    for case in texts:
        prompt = encoder.entry.prompt(prompt_name=case.prompt_name)
        theirs, mask = case.feeds["input_ids"], case.feeds["attention_mask"]
        for row, text in enumerate(case.texts):
            own = encoder.encode([text], longest, True, prompt).feeds[encoder.entry.ids][0]
            if own.tolist() != theirs[row][mask[row] == 1].tolist():
                return f"other tokens of {text[:40]!r}; "
    return ""
