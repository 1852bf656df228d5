"""Identity of an index, and whether a bundle may answer with it.

Embeddings of two engines can be compared only if both are proven to be submodels of one universal model. So an index
keeps the hash of the weight store, the checkpoint's configuration, the tokenizer and the engines that built it with
their parity receipts; docs/retrieval.md says what is compared.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry, ParityReceipt
from ...bundle.manifest import FileEntry, Manifest, SubmodelEntry
from ...bundle.open_bundle import Bundle
from ...errors import InputError, SelectionError
from ...profiles.backends import BACKENDS
from ..dimensions import listed, may_be_cut

INDEX_SCHEMA_VERSION = 1
_REMEDY = "build the index again with this bundle"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class BuiltBy:
    """An engine that encoded part of the corpus: the universal submodel at one bucket, and its parity receipt then."""

    bucket: Bucket
    receipt: ParityReceipt


@dataclass(frozen=True)
class IndexIdentity:
    """Everything about an index but its rows.

    ``weights_sha256`` is the weight store's; ``configuration`` the files of the checkpoint that say what is computed
    with the weights; ``tokenizer_sha256`` the tokenizer file's where the corpus was text. The first ``width`` numbers
    of ``output`` are the embedding, divided by its Euclidean length; rows are ranked by the inner product of two such
    vectors, computed in float64, and equal ones by their number, the lowest first. ``submodel`` is the universal
    model's id, ``truncated`` counts texts that were cut, ``prompt`` stood before each of them; ``entries`` and
    ``labelled`` say what else the index holds of its rows.
    """

    schema_version: int
    model: str
    weights_sha256: str
    configuration: tuple[FileEntry, ...]
    output: str
    width: int = field(metadata={"min": 1})
    similarity: Literal["cosine"]
    normalisation: Literal["l2"]
    ties: Literal["lowest row"]
    submodel: str
    engines: tuple[BuiltBy, ...]
    rows: int = field(metadata={"min": 1})
    entries: Literal["texts", "ids", "none"]
    labelled: bool
    truncated: int = field(default=0, metadata={"min": 0})
    tokenizer_sha256: str | None = None
    prompt: str | None = None


def universal_of(manifest: Manifest) -> SubmodelEntry:
    """The submodel that keeps every axis whole. Raises SelectionError if the bundle was compiled without it."""
    sizes: dict[str, list[int]] = {}
    for axis in manifest.axes:
        sizes.setdefault(axis.kind, []).append(axis.size)
    for entry in manifest.submodels:
        if {kind: list(values) for kind, values in entry.values.items()} == sizes:
            return entry
    known = ", ".join(entry.id for entry in manifest.submodels)
    raise SelectionError(
        f"bundle of {manifest.name}: an index is built by the universal model, and it has only {known}; compile with "
        "`include='levels'`"
    )


def configuration_of(manifest: Manifest) -> tuple[FileEntry, ...]:
    """The checkpoint's JSON files but for the tokenizer: activation, pooling and the like are in no weight."""
    tokenizer = manifest.text.file if manifest.text else None
    return tuple(each for each in manifest.provenance.source if each.path.endswith(".json") and each.path != tokenizer)


def tokenizer_sha256(bundle: Bundle) -> str | None:
    """Hash of the bundle's tokenizer file, if it has one."""
    text = bundle.manifest.text
    return None if text is None else _hash_of(bundle, text.file)


def covered(bundle: Bundle, engine: EngineEntry, output: str) -> ParityReceipt:
    """The receipt of ``engine``, which is about this very file and weight store, and about ``output``.

    Raises SelectionError if there is no such receipt.
    """
    receipt = engine.parity
    problem = None
    if receipt is None:
        problem = "has no parity receipt"
    elif receipt.weights_sha256 != bundle.manifest.weights_sha256:
        problem = "has a parity receipt for other weights than this bundle's"
    elif BACKENDS[engine.backend].runs_graphs and receipt.graph_sha256 != _hash_of(bundle, engine.file):
        problem = "has a parity receipt for another file"
    elif output not in {each.name for each in receipt.outputs}:
        problem = f"has a parity receipt that does not cover output {output!r:.80}"
    if receipt is None or problem:
        raise SelectionError(
            f"bundle {bundle.path}: engine {engine.id} {problem}, so its embeddings cannot be compared with an index; "
            "compile the bundle again"
        )
    return receipt


def check_fits(identity: IndexIdentity, bundle: Bundle, where: str) -> None:
    """Raises InputError if ``bundle`` may not answer with the index, whatever the submodel; ``where`` names it."""
    manifest = bundle.manifest
    here = manifest.weights_sha256
    if identity.weights_sha256 != here:
        raise InputError(
            f"{where}: built by another universal model ({identity.model!r:.80}, weights "
            f"{identity.weights_sha256[:12]}) than bundle {bundle.path} holds ({manifest.name}, weights "
            f"{(here or 'none')[:12]}); {_REMEDY}"
        )
    differing = {*identity.configuration} ^ {*configuration_of(manifest)}
    if differing:
        file = min(entry.path for entry in differing)
        raise InputError(
            f"{where}: built by another universal model than bundle {bundle.path} holds: its weights are the same, its "
            f"{file!r:.80} is not; {_REMEDY}"
        )
    if identity.tokenizer_sha256 is not None and identity.tokenizer_sha256 != tokenizer_sha256(bundle):
        raise InputError(f"{where}: its texts went through another tokenizer than bundle {bundle.path} has; {_REMEDY}")
    if not any(spec.name == identity.output and may_be_cut(spec, identity.width) for spec in manifest.outputs):
        cuts = {spec.name: f" cut to {listed(spec.dimensions)}" for spec in manifest.outputs if spec.dimensions}
        outputs = ", ".join(f"{spec.name} {list(spec.dims)}{cuts.get(spec.name, '')}" for spec in manifest.outputs)
        raise InputError(
            f"{where}: holds output {identity.output!r:.80} [batch, {identity.width}], bundle {bundle.path} has "
            f"{outputs}; {_REMEDY}"
        )
    held = {(e.submodel, e.bucket): e for e in manifest.engines if e.segment is None}
    for built in identity.engines:
        engine = held.get((identity.submodel, built.bucket))
        if engine is None:
            raise InputError(
                f"{where}: built by engine {identity.submodel!r:.80} at {built.bucket.label}, which bundle "
                f"{bundle.path} does not hold, so no parity receipt covers it; compile that bucket too, or {_REMEDY}"
            )
        covered(bundle, engine, identity.output)


def identity_problems(identity: IndexIdentity) -> Iterator[str]:
    """Checks beyond the types, for an index that is being read."""
    hashes = {"weights_sha256": identity.weights_sha256, "tokenizer_sha256": identity.tokenizer_sha256}
    for name, sha256 in hashes.items():
        if sha256 is not None and not _SHA256.fullmatch(sha256):
            yield f"{name}: {sha256[:80]!r}; expected 64 lower-case hexadecimal digits"
    if not identity.engines:
        yield "engines: none; expected the engines that built the index"
    if (identity.entries == "texts") != (identity.tokenizer_sha256 is not None):
        has = "lacks" if identity.entries == "texts" else "has"
        yield f"tokenizer_sha256: an index of {identity.entries!r} {has} one"
    if identity.prompt is not None and identity.entries != "texts":
        yield f"prompt: an index of {identity.entries!r} has one"


def _hash_of(bundle: Bundle, name: str) -> str | None:
    return next((entry.sha256 for entry in bundle.manifest.files if entry.path == name), None)
