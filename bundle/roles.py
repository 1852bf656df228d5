"""By what output, and as what, submodels are compared with the universal model.

1. Outputs that state a ``role`` in the manifest are compared, and no others.
2. Where none does: the text embedding, if the manifest names one.
3. Else an output called ``logits`` (of a model with exits, the one that its exits name): ``classes`` for
   ``[batch, C]``; for ``[batch, sequence, C]`` ``tokens`` where C bounds the token ids, else ``classes``. That such a
   model predicts the *following* token cannot be seen from its shapes: a causal model's family states ``next_tokens``.
4. Else, as ``embedding``, the first output per position, or without one the last output with features.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import InputError
from .entries.engine_entry import ExitsEntry
from .entries.tensor_spec import Role, TensorSpec
from .manifest import Manifest, TextEntry

# One of these at most: their figures share names.
_DISTRIBUTIONS: tuple[Role, ...] = ("classes", "tokens", "next_tokens")


@dataclass(frozen=True)
class Interface:
    """Inputs of the choice how a model is compared: its inputs and outputs, and what text and exits say of them."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    text: TextEntry | None = None
    exits: ExitsEntry | None = None


def compared_outputs(manifest: Manifest | Interface) -> dict[Role, TensorSpec]:
    """The outputs to compare, by role; empty where none can be, such as a single number per row."""
    stated: dict[Role, TensorSpec] = {spec.role: spec for spec in manifest.outputs if spec.role is not None}
    if stated:
        return stated
    outputs = {spec.name: spec for spec in manifest.outputs if _features(spec) > 1}
    if manifest.text and manifest.text.embedding in outputs:
        return {"embedding": outputs[manifest.text.embedding]}
    logits = outputs.get(manifest.exits.logits if manifest.exits else "logits")
    if logits is not None and logits.dims[:-1] in (("batch",), ("batch", "sequence")):
        ids = ids_input(manifest)
        per_token = len(logits.dims) == 3 and ids is not None and ids.high == logits.dims[-1]
        return {"tokens" if per_token else "classes": logits}
    features = [spec for spec in outputs.values() if spec.dims[:-1] in (("batch",), ("batch", "sequence"))]
    if not features:
        return {}
    return {"embedding": next((spec for spec in features if len(spec.dims) == 3), features[-1])}


def embedding_of(manifest: Manifest | Interface) -> TensorSpec | None:
    """The output that is the embedding, ``[batch, width]``: the one of that role, else the one that text names, else
    one of that name; None where it is no vector, or there is none."""
    named = [spec.name for spec in manifest.outputs if spec.role == "embedding"]
    named += [manifest.text.embedding] if manifest.text and manifest.text.embedding else []
    return next((spec for spec in manifest.outputs if spec.name == [*named, "embedding"][0] and spec.is_vector), None)


def embedding_output(manifest: Manifest | Interface, requested: str | None = None) -> TensorSpec:
    """The output that is the embedding: the one requested, else ``embedding_of``. Raises InputError for none."""
    vectors = [spec for spec in manifest.outputs if spec.is_vector]
    wanted = [spec for spec in vectors if spec.name == requested]
    found = embedding_of(manifest) if requested is None else next(iter(wanted), None)
    if found is not None:
        return found
    what = "no output is said to be the embedding" if requested is None else f"output {requested!r:.80} is no embedding"
    names = ", ".join(spec.name for spec in vectors) or "none"
    raise InputError(f"{what}; expected a float output [batch, width], the model has {names}")


def ids_input(manifest: Manifest | Interface) -> TensorSpec | None:
    """The input with token ids ``[batch, sequence]``: what text feeds, else the one with the most values, if any."""
    if manifest.text is not None:
        return next((spec for spec in manifest.inputs if spec.name == manifest.text.ids), None)
    tokens = [s for s in manifest.inputs if s.dims == ("batch", "sequence") and s.high is not None and s.high > 2]
    return max(tokens, key=lambda spec: spec.high or 0, default=None)


def continued_input(manifest: Manifest | Interface) -> TensorSpec | None:
    """The input whose tokens the logits of next tokens continue: the decoder's, which comes behind what an encoder
    reads, where there are two, else ``ids_input``."""
    ids = ids_input(manifest)
    alike = [spec for spec in manifest.inputs if ids is not None and (spec.dims, spec.high) == (ids.dims, ids.high)]
    return alike[-1] if alike else ids


def has_decoder(manifest: Manifest | Interface) -> bool:
    """Whether the tokens of a decoder come behind what an encoder reads."""
    return continued_input(manifest) != ids_input(manifest)


def mask_input(manifest: Manifest | Interface) -> str | None:
    """The input that says which positions count, if the manifest names one."""
    if manifest.text is not None and manifest.text.mask is not None:
        return manifest.text.mask
    return manifest.exits.mask if manifest.exits else None


def label_classes(manifest: Manifest | Interface) -> int | None:
    """How many classes a row's label may name, or None where rows have none."""
    spec = compared_outputs(manifest).get("classes")
    return _features(spec) if spec is not None and spec.dims[:-1] == ("batch",) else None


def role_problems(manifest: Manifest) -> Iterator[str]:
    """Roles that an output cannot have; for a manifest that is being read."""
    segments = manifest.exits.segments if manifest.exits else ()
    for spec in (*manifest.inputs, *(s for segment in segments for s in (*segment.inputs, *segment.outputs))):
        if spec.role is not None:
            yield f"tensor {spec.name}: role {spec.role!r}; only the outputs of whole engines have one"
    roles = [spec.role for spec in manifest.outputs if spec.role is not None]
    if len(roles) != len(set(roles)) or len([role for role in roles if role in _DISTRIBUTIONS]) > 1:
        yield f"outputs: roles {', '.join(sorted(roles))}; expected each once, and one of {', '.join(_DISTRIBUTIONS)}"
    for spec in manifest.outputs:
        width = _features(spec)
        if (cuts := spec.dimensions) is not None and (
            not spec.is_vector or cuts[:1] != (width,) or list(cuts) != sorted({*cuts}, reverse=True) or cuts[-1] < 1
        ):
            yield f"output {spec.name}: dimensions {list(cuts)[:8]}; expected falling numbers from {width} on"
        if spec.pairs is not None and not {number for _, number in spec.pairs} <= {*(cuts or ())}:
            yield f"output {spec.name}: pairs {list(spec.pairs)[:8]}; expected dimensions of those listed"
        if spec.role is None:
            continue
        leading = {"tokens": [("batch", "sequence")], "next_tokens": [("batch", "sequence")]}.get(
            spec.role, [("batch",), ("batch", "sequence")]
        )
        if _features(spec) < 2 or spec.dims[:-1] not in leading or not spec.dtype.startswith("float"):
            yield f"output {spec.name}: {spec.dtype} {list(spec.dims)} cannot have role {spec.role!r}"
        if spec.role == "next_tokens":
            ids = ids_input(manifest)
            if ids is None or ids.high is None or ids.high > _features(spec):
                yield f"output {spec.name}: role 'next_tokens' needs token ids below {spec.dims[-1]} among the inputs"


def _features(spec: TensorSpec) -> int:
    """Size of the last dimension where that is fixed, else 0."""
    last = spec.dims[-1] if spec.dims else 0
    return last if isinstance(last, int) else 0
