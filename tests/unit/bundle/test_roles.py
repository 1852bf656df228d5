from dataclasses import replace
from typing import Any

import pytest
from nestforge.bundle.entries.tensor_spec import Role, TensorSpec
from nestforge.bundle.manifest import Manifest, TextEntry
from nestforge.bundle.roles import (
    Interface,
    compared_outputs,
    continued_input,
    has_decoder,
    ids_input,
    label_classes,
    mask_input,
    role_problems,
)

TOKENS = ("batch", "sequence")
IDS = TensorSpec("ids", "int64", TOKENS, pad=0, high=100)
MASK = TensorSpec("mask", "int64", TOKENS, pad=0, high=2)
PIXELS = TensorSpec("pixels", "float32", ("batch", 3, 8, 8))


def output(name: str, *dims: Any, role: Role | None = None) -> TensorSpec:
    return TensorSpec(name, "float32", dims, role=role)


def roles(*outputs: TensorSpec, text: TextEntry | None = None, inputs: tuple[TensorSpec, ...] = (IDS, MASK)) -> Any:
    interface = Interface(inputs, outputs, text)
    return {role: spec.name for role, spec in compared_outputs(interface).items()}


def test_what_is_stated_decides() -> None:
    logits, vector = output("logits", "batch", 5, role="classes"), output("vector", "batch", 8, role="embedding")
    assert roles(logits, output("other", "batch", 9), vector) == {"classes": "logits", "embedding": "vector"}


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([output("logits", "batch", 5)], {"classes": "logits"}),
        ([output("logits", *TOKENS, 100)], {"tokens": "logits"}),
        ([output("logits", *TOKENS, 5)], {"classes": "logits"}),
        ([output("logits", "batch", 1)], {}),
        ([output("logits", "batch", 1), output("h", "batch", 4)], {"embedding": "h"}),
        ([output("hidden", *TOKENS, 8), output("pooled", "batch", 8)], {"embedding": "hidden"}),
        ([output("a", "batch", 8), output("b", "batch", 8)], {"embedding": "b"}),
        ([output("score", "batch")], {}),
        ([output("image", "batch", 3, 8, 8)], {}),
    ],
)
def test_where_nothing_is_stated_shapes_decide(outputs: list[TensorSpec], expected: dict[str, str]) -> None:
    assert roles(*outputs) == expected


def test_the_text_embedding_is_what_a_text_encoder_is_compared_by() -> None:
    text = TextEntry("t.json", "ids", "mask", None, "sentence")
    assert roles(output("hidden", *TOKENS, 8), output("sentence", "batch", 8), text=text) == {"embedding": "sentence"}


def test_exits_name_their_logits(exits_bundle: Any) -> None:
    from nestforge.bundle.open_bundle import open_bundle

    manifest = open_bundle(exits_bundle).manifest
    assert {role: spec.name for role, spec in compared_outputs(manifest).items()} == {"classes": manifest.exits.logits}
    assert label_classes(manifest) == manifest.exits.classes
    assert mask_input(manifest) == manifest.exits.mask


def test_token_ids_are_what_text_feeds_else_the_input_of_most_values() -> None:
    many = TensorSpec("positions", "int64", TOKENS, high=512)
    assert ids_input(Interface((IDS, MASK), ())) == IDS
    assert ids_input(Interface((IDS, MASK, many), (), TextEntry("t", "ids", None, None, None))) == IDS
    assert ids_input(Interface((IDS, many), ())) == many
    assert ids_input(Interface((PIXELS, MASK), ())) is None


def test_a_decoder_continues_its_own_tokens_and_not_those_that_an_encoder_reads() -> None:
    follows = replace(IDS, name="decoder_ids")
    assert continued_input(Interface((IDS, MASK), ())) == IDS
    assert continued_input(Interface((IDS, MASK, follows), ())) == follows
    assert ids_input(Interface((IDS, MASK, follows), ())) == IDS
    assert continued_input(Interface((PIXELS, MASK), ())) is None
    assert [has_decoder(Interface(inputs, ())) for inputs in ((IDS, MASK), (IDS, MASK, follows), (PIXELS,))] == [
        False,
        True,
        False,
    ]


def test_labels_name_classes_of_rows_alone() -> None:
    assert label_classes(Interface((PIXELS,), (output("logits", "batch", 7),))) == 7
    assert label_classes(Interface((IDS,), (output("logits", *TOKENS, 7),))) is None
    assert label_classes(Interface((IDS,), (output("logits", *TOKENS, 100),))) is None


@pytest.mark.parametrize(
    ("outputs", "inputs", "problem"),
    [
        ([output("y", "batch", 8)], (replace(IDS, role="tokens"),), "tensor ids: role 'tokens'; only the outputs"),
        ([output("y", "batch", 8, role="classes"), output("z", "batch", 8, role="classes")], (IDS,), "each once"),
        ([output("y", "batch", 8, role="classes"), output("z", *TOKENS, 8, role="tokens")], (IDS,), "one of classes"),
        ([output("y", "batch", 8, role="tokens")], (IDS,), "output y: float32 ['batch', 8] cannot have role 'tokens'"),
        ([output("y", "batch", 1, role="classes")], (IDS,), "cannot have role 'classes'"),
        ([output("y", "batch", 2, 2, role="embedding")], (IDS,), "cannot have role 'embedding'"),
        ([replace(output("y", "batch", 9, role="classes"), dtype="int64")], (IDS,), "int64 ['batch', 9] cannot"),
        ([output("y", *TOKENS, 99, role="next_tokens")], (IDS,), "needs token ids below 99 among the inputs"),
        ([output("y", *TOKENS, 99, role="next_tokens")], (PIXELS,), "needs token ids below 99 among the inputs"),
    ],
)
def test_a_role_that_cannot_be(
    manifest: Manifest, outputs: list[TensorSpec], inputs: tuple[TensorSpec, ...], problem: str
) -> None:
    changed = replace(manifest, inputs=inputs, outputs=tuple(outputs), text=None)
    assert problem in next(iter(role_problems(changed)))


def test_roles_that_can_be(manifest: Manifest) -> None:
    outputs = (output("y", *TOKENS, 100, role="next_tokens"), output("z", "batch", 4, role="embedding"))
    assert list(role_problems(replace(manifest, inputs=(IDS,), outputs=outputs, text=None))) == []
    assert list(role_problems(manifest)) == []
