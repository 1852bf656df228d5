"""Acceptance suites that no engine's receipt shows: what loading kept, what slicing keeps, that padding changes no
answer, where rows leave a chain, and texts beside sentence-transformers itself, since engines are given tokens:
tokenizer, case, longest text, prompts, pooling and the modules behind it, layers left out, and cuts."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.manifest import Proof, TextReceipt
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...errors import ParityError
from ...exporters.checkpoints.tokenizer_file import SETTINGS_FILE
from ...exporters.depth import layer_list
from ...exporters.sentence_transformers.library import SENTENCES, Library, TextCase, asked, cut_outputs, is_installed
from ...exporters.universal import PREFIX, UniversalModel
from ...runtime.device.threads import threads_or_default
from ...runtime.inputs.arrays import Array, Arrays
from ...runtime.model import ElasticModel
from ..work.clock import Clock
from .cases import Case
from .compare import size_of, tolerance_for
from .judge import JudgedOutputs, judge
from .prove_exits import prove_exits
from .reading import in_float64
from .reference import Reference, replayed
from .references import References

# Share of an output's size, whatever the precision of engines: both sides are PyTorch in float64, whose unit roundoff
# is 1e-16. Measured: 3e-15. A model whose float32 is off by less than 1 %, the bound of the gate, stays below 1e-10.
_SLICE_LIMIT = 1e-9
# As _SLICE_LIMIT; sums of other lengths round otherwise.
_PADDING_LIMIT = 1e-9
# The smaller cases of one bucket: what is proven in torch alone does not change with a size.
_MOST_CASES = 8


def prove(bundle: Bundle, chosen: Sequence[Submodel], references: References, clock: Clock) -> tuple[Proof, ...]:
    """Every suite on the engines of ``bundle``, which answer through the runtime. Raises ParityError if one fails."""
    universal, cases = references.universal, references.cases
    whole = universal.spec.universal()
    smallest = min(engine.bucket for engine in bundle.manifest.engines if engine.submodel == whole.id)
    prove_load = universal.source.architecture.prove_load
    proofs = list(prove_load(cases[smallest][0].feeds)) if prove_load is not None else []
    if universal.source.architecture.surveyed:
        proofs += prove_padding(references)
    for submodel in clock.each(chosen):
        if submodel.precision is None:  # a slice of PyTorch's weights, whatever engines make of them
            proofs += prove_slice(submodel, submodel.at(smallest), references)
        limit = tolerance_for(universal.source.precision(submodel), universal.spec.depth)
        proofs += prove_exits(bundle, submodel, references, limit)
    for proof in proofs:
        if not proof.worst <= proof.limit:  # NaN fails too
            raise ParityError(f"{proof.suite} suite, {proof.subject}: {proof.worst:.3g}, allowed {proof.limit:.3g}")
    return tuple(proofs)


def prove_slice(submodel: Submodel, bucket: Bucket, references: References) -> Iterator[Proof]:
    """The proof for ``submodel``, in torch alone, on the smaller cases of ``bucket``; none where it slices no
    parameters but by jointly normalised axes.

    A jointly normalised axis has no zeros to compare with: both sides have it narrowed, and so do they what slices
    nothing: depth, capacity, sequence. Computed in float64, since the rounding of sums of other lengths says nothing
    about slices, and weights may amplify it beyond every limit.
    """
    universal = references.universal
    zeroable = {cut.axis for cut in universal.spec.slices} - universal.spec.jointly_normalised
    if all(value == axis.size for axis, value in submodel.values if axis.name in zeroable):
        return
    kept = {axis.name: value for axis, value in submodel.values if axis.name not in zeroable}
    passed, asked = references.replayed(submodel, bucket), references.asked(submodel, bucket)
    narrowed = [pair for pair in zip(asked, passed.outputs, strict=True) if pair[0].name not in passed.in_float32]
    whole = references.of(universal.spec.submodel(kept))
    first = {
        name: [(cut.dim, submodel[cut.axis] * cut.unit) for cut in universal.spec.slices_of(name.removeprefix(PREFIX))]
        for name, _ in whole.module.named_parameters()
    }
    figures = []
    with in_float64(whole.module, first):
        for case, found in sorted(narrowed, key=lambda pair: pair[0].tokens)[:_MOST_CASES]:
            outputs, _ = whole.run(case.feeds)
            named = {spec.name: tensor.numpy() for spec, tensor in zip(whole.specs, outputs, strict=True)}
            for name, reference in case.read(named, whole.specs).items():
                figures.append(np.abs(reference - found[name]).max() / size_of(reference))
    # The figure is no number where any is none.
    yield Proof("slice", submodel.id, min(len(narrowed), _MOST_CASES), float(np.max(figures)), _SLICE_LIMIT)


def prove_padding(references: References) -> Iterator[Proof]:
    """The proofs for a class that nobody has read, which may pass over its own mask: one row by itself, shorter than
    its bucket, against the same row in the filled bucket, for every bucket that requests are filled up to, and every
    range of several rows and lengths. Raises ParityError where the answers differ."""
    source = references.universal.source
    whole = references.of(source.spec.universal())
    for bucket, cases in references.cases.items():
        shape, inputs = bucket.smallest, source.signature.inputs
        if any(spec.pad is None for spec in inputs):
            continue
        # In a range, rows of one request that differ in length fill each other.
        some = [one for one in cases if _mixes_lengths(inputs, one.feeds)] or (cases if shape.tokens > 1 else [])
        if not some:
            continue
        case = min(some, key=lambda one: one.tokens)
        alone, filled, kept = _row(inputs, case.feeds)
        with in_float64(whole.module):
            own, together = whole.run(alone)[0], whole.run(filled)[0]
        worst = 0.0
        for spec, first, second in zip(whole.specs, own, together, strict=True):
            difference = float(np.abs(first.numpy() - _first(spec, second.numpy(), kept)).max())
            scale = size_of(first.numpy())
            if not difference <= _PADDING_LIMIT * scale:  # no number fails too
                one_row = Bucket(1, bucket.sequence, None, 1)
                free = one_row if bucket.sequence > 1 else Bucket(bucket.batch, 1, 1)
                raise ParityError(
                    f"bucket {bucket}: what fills a request up to it changes output {spec.name} by {difference:.3g}: "
                    f"the class lets padding through; ask for shapes that nothing fills, such as {free}"
                )
            worst = max(worst, difference / scale)
        yield Proof("padding", bucket.label, 1, worst, _PADDING_LIMIT)


def _mixes_lengths(inputs: tuple[TensorSpec, ...], feeds: Arrays) -> bool:
    tokens = [feeds[spec.name].shape for spec in inputs if spec.dims[:2] == ("batch", "sequence")]
    return any(rows > 1 and length > 1 for rows, length, *_ in tokens)


def _row(inputs: tuple[TensorSpec, ...], feeds: Arrays) -> tuple[dict[str, Array], dict[str, Array], int]:
    """The first row cut by a third, all rows with the first filled in place of that, and the tokens that it keeps."""
    length = max(
        (feeds[spec.name].shape[spec.dims.index("sequence")] for spec in inputs if "sequence" in spec.dims), default=1
    )
    kept = max(1, length - max(1, length // 3))
    alone: dict[str, Array] = {}
    filled: dict[str, Array] = {}
    for spec in inputs:
        array = feeds[spec.name].copy()
        if spec.dims[:2] == ("batch", "sequence"):
            if spec.row_needs is not None:
                array[0] = 1
            array[0, kept:] = spec.pad
        filled[spec.name] = array
        alone[spec.name] = _first(spec, array, kept)
    return alone, filled, kept


def _first(spec: TensorSpec, array: Array, kept: int) -> Array:
    """The first row up to the tokens that it keeps."""
    cut: Mapping[str | int, slice] = {"batch": slice(1), "sequence": slice(kept)}
    return np.ascontiguousarray(array[tuple(cut.get(dim, slice(None)) for dim in spec.dims)])


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
