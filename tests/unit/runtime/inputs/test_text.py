import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.manifest import Manifest
from nestforge.errors import BundleCorruptError, InputError
from nestforge.runtime.inputs.text import TextEncoder
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing


def make(bundle: Path, manifest: Manifest, inputs: Sequence[TensorSpec] | None = None) -> TextEncoder:
    assert manifest.text
    return TextEncoder(bundle / "tokenizer.json", manifest.text, manifest.inputs if inputs is None else inputs)


def test_texts_become_rows_as_long_as_the_longest(tiny_bundle: Path, manifest: Manifest) -> None:
    encoded = make(tiny_bundle, manifest).encode(["a nest of models", "nest"], 8)
    assert encoded.feeds["input_ids"].tolist() == [[1, 4, 5, 6, 7, 2], [1, 5, 2, 0, 0, 0]]
    assert encoded.feeds["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
    assert {array.dtype for array in encoded.feeds.values()} == {np.dtype("int64")}
    assert encoded.truncated == ()


def test_dtype_and_pad_are_the_manifests(tiny_bundle: Path, manifest: Manifest) -> None:
    ids = replace(manifest.inputs[0], dtype="int32", pad=3)
    encoded = make(tiny_bundle, manifest, [ids]).encode(["nest", "a nest"], 8)
    assert encoded.feeds["input_ids"].dtype == np.int32
    assert encoded.feeds["input_ids"].tolist() == [[1, 5, 2, 3], [1, 4, 5, 2]]


def test_too_long_is_refused_or_truncated_with_its_last_token_kept(tiny_bundle: Path, manifest: Manifest) -> None:
    encoder = make(tiny_bundle, manifest)
    with pytest.raises(
        InputError, match="text 1: 6 tokens, the largest bucket takes 4; shorten it, pass `truncate=True`"
    ):
        encoder.encode(["nest", "a nest of models"], 4)
    encoded = encoder.encode(["nest", "a nest of models"], 4, truncate=True)
    assert encoded.feeds["input_ids"].tolist() == [[1, 5, 2, 0], [1, 4, 5, 2]]
    assert encoded.truncated == (1,)
    assert encoder.encode(["a nest of models"], 8).feeds["input_ids"].shape == (1, 6)


PROCESSORS = {
    "none": None,
    "template": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [1], "tokens": ["[CLS]"]}},
    },
    "bert": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
    "roberta": {
        "type": "RobertaProcessing",
        "sep": ["[SEP]", 2],
        "cls": ["[CLS]", 1],
        "trim_offsets": True,
        "add_prefix_space": False,
    },
    "bytes": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
}


def test_a_text_without_a_token_is_refused_and_one_of_special_tokens_alone_is_not(
    own_bundle: Path, manifest: Manifest
) -> None:
    assert make(own_bundle, manifest).encode([""], 8).lengths == (2,)
    edit_tokenizer(own_bundle, lambda data: data.update(post_processor=None))
    for texts, row in (([""], 0), (["nest", ""], 1)):
        with pytest.raises(InputError, match=f"text {row}: empty, and the tokenizer adds no tokens"):
            make(own_bundle, manifest).encode(texts, 8)


@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
def test_truncation_equals_the_tokenizers_own(own_bundle: Path, manifest: Manifest, processor: object) -> None:
    edit_tokenizer(own_bundle, lambda data: data.update(post_processor=processor))
    library = Tokenizer.from_file(str(own_bundle / "tokenizer.json"))
    library.no_padding()
    types = replace(manifest.inputs[1], name="types")
    entry = replace(manifest.text or pytest.fail("no text"), type_ids="types")
    encoder = TextEncoder(own_bundle / "tokenizer.json", entry, [*manifest.inputs, types])
    texts = ["a nest of models of models", "nest", "of a nest", "models a of nest nest unheard"]
    for longest in (3, 4, 5):
        library.enable_truncation(longest)
        rows = library.encode_batch(texts)
        encoded = encoder.encode(texts, longest, truncate=True)
        for field, name in (("ids", "input_ids"), ("attention_mask", "attention_mask"), ("type_ids", "types")):
            expected = [getattr(row, field) for row in rows]
            assert [a[:n].tolist() for a, n in zip(encoded.feeds[name], map(len, expected), strict=True)] == expected


def test_a_pair_is_cut_as_transformers_cuts_it(own_bundle: Path, manifest: Manifest) -> None:
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer.from_file(str(own_bundle / "tokenizer.json"))
    library.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    library.save(str(own_bundle / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=library,
        pad_token="[PAD]",  # noqa: S106  (a token)
        model_input_names=["input_ids", "token_type_ids"],
    )
    types = replace(manifest.inputs[1], name="types")
    entry = replace(manifest.text or pytest.fail("no text"), type_ids="types")
    encoder = TextEncoder(own_bundle / "tokenizer.json", entry, [*manifest.inputs, types])
    pairs = [
        (" ".join(["nest"] * first), " ".join(["models"] * second)) for first in range(6) for second in range(1, 6)
    ]
    for longest in range(3, 14):
        encoded = encoder.encode(pairs, longest, truncate=True)
        for number, pair in enumerate(pairs):
            row = theirs(*pair, truncation="longest_first", max_length=longest)
            for field, name in (("input_ids", "input_ids"), ("token_type_ids", "types")):
                assert encoded.feeds[name][number, : encoded.lengths[number]].tolist() == row[field]


def edit_tokenizer(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((bundle / "tokenizer.json").read_bytes())
    edit(data)
    (bundle / "tokenizer.json").write_text(json.dumps(data))


def test_a_bucket_without_room_for_a_token_of_the_text_is_refused(tiny_bundle: Path, manifest: Manifest) -> None:
    for longest in (0, 1):
        with pytest.raises(InputError, match=f"adds 2 tokens to each, and the largest bucket takes {longest}"):
            make(tiny_bundle, manifest).encode(["a nest"], longest, truncate=True)


def test_a_tokenizer_that_cannot_say_unknown_is_refused_when_opened(own_bundle: Path, manifest: Manifest) -> None:
    edit_tokenizer(own_bundle, lambda data: data["model"].update({"unk_token": "[NOPE]"}))
    with pytest.raises(BundleCorruptError, match=r"tokenizer.json: cannot encode every text \(.*Missing \[UNK\] token"):
        make(own_bundle, manifest)


def test_a_tokenizer_whose_own_tokens_are_beyond_the_vocabulary_is_refused_when_opened(
    own_bundle: Path, manifest: Manifest
) -> None:
    edit_tokenizer(own_bundle, lambda data: data["post_processor"]["special_tokens"]["[CLS]"].update(ids=[2**31]))
    with pytest.raises(BundleCorruptError, match=r"gives 2147483648 for input_ids, which takes 0\.\.15"):
        make(own_bundle, manifest)


def test_a_token_beyond_the_vocabulary_is_refused_and_truncating_takes_no_longer(
    own_bundle: Path, manifest: Manifest
) -> None:
    edit_tokenizer(own_bundle, lambda data: data["model"]["vocab"].update(nest=2**31))
    encoder = make(own_bundle, manifest)
    for truncate in (False, True):
        with pytest.raises(InputError, match=r"text 1: the tokenizer gives 2147483648 for input_ids"):
            encoder.encode(["a", "nest a a a a a a a"], 16 if not truncate else 4, truncate)
    assert encoder.encode(["a of models " * 9], 4, truncate=True).feeds["input_ids"].tolist() == [[1, 4, 6, 2]]


PANICS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a token of the template is missing": lambda data: data["post_processor"].update(special_tokens={}),
    "a second text": lambda data: data["post_processor"].update(single=[{"Sequence": {"id": "B", "type_id": 0}}]),
    "chunks of no length": lambda data: data.update(pre_tokenizer={"type": "FixedLength", "length": 0}),
}


@pytest.mark.parametrize("edit", PANICS.values(), ids=PANICS)
def test_a_panic_of_the_tokenizer_is_an_error_of_the_file(
    own_bundle: Path, manifest: Manifest, edit: Callable[[dict[str, Any]], object]
) -> None:
    """Rust's panics reach Python as exceptions that are no Exception."""
    edit_tokenizer(own_bundle, edit)
    with pytest.raises(BundleCorruptError, match=r"tokenizer.json: cannot encode every text \(") as caught:
        make(own_bundle, manifest)
    assert not isinstance(caught.value.__cause__, Exception)


@pytest.mark.parametrize("texts", [[], [1], ["a", None]])
def test_refuses_what_is_no_text(tiny_bundle: Path, manifest: Manifest, texts: Sequence[str]) -> None:
    with pytest.raises(InputError, match="expected a text or a non-empty list of texts"):
        make(tiny_bundle, manifest).encode(texts, 8)


def test_an_input_without_pad_takes_texts_of_one_length(tiny_bundle: Path, manifest: Manifest) -> None:
    encoder = make(tiny_bundle, manifest, [replace(manifest.inputs[0], pad=None)])
    assert encoder.encode(["a", "of"], 8).feeds["input_ids"].shape == (2, 3)
    with pytest.raises(InputError, match="input input_ids: texts of different lengths need padding"):
        encoder.encode(["a", "a nest"], 8)


def test_an_input_that_no_text_feeds_is_refused(tiny_bundle: Path, manifest: Manifest) -> None:
    with pytest.raises(InputError, match="input pixels: does not come from text"):
        make(tiny_bundle, manifest, [TensorSpec("pixels", "float32", ("batch", 3))])


def test_a_damaged_tokenizer_is_named(own_bundle: Path, manifest: Manifest) -> None:
    (own_bundle / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleCorruptError, match=r"tokenizer.json: not a tokenizer file \("):
        make(own_bundle, manifest)


def test_truncation_in_one_thread_does_not_reach_another(tiny_bundle: Path, manifest: Manifest) -> None:
    encoder = make(tiny_bundle, manifest)

    def tokens(truncate: bool) -> int:
        longest = 3 if truncate else 8
        return encoder.encode(["a nest of models"], longest, truncate).feeds["input_ids"].shape[1]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokens, [True, False] * 50)) == [3, 6] * 50


def prompted(manifest: Manifest, **entry: Any) -> Manifest:
    assert manifest.text
    return replace(manifest, text=replace(manifest.text, prompts={"q": "a nest ", "none": ""}, **entry))


def test_a_prompt_stands_before_every_text(tiny_bundle: Path, manifest: Manifest) -> None:
    encoder = make(tiny_bundle, prompted(manifest, default_prompt="q"))
    assert encoder.encode(["of models"], 8).feeds["input_ids"].tolist() == [[1, 4, 5, 6, 7, 2]]
    assert encoder.encode(["of models"], 8, prompt="").feeds["input_ids"].tolist() == [[1, 6, 7, 2]]
    assert encoder.lengths(["of models", "nest"]) == [6, 5]
    assert encoder.lengths(["of models"], "") == [4]
    with pytest.raises(InputError, match="prompt: half of a surrogate pair"):
        encoder.encode(["nest"], 8, prompt="\ud800")
    with pytest.raises(InputError, match="prompt: expected a text, got 3"):
        encoder.encode(["nest"], 8, prompt=3)


def test_a_text_longer_than_the_model_takes(tiny_bundle: Path, manifest: Manifest) -> None:
    encoder = make(tiny_bundle, prompted(manifest, max_tokens=5))
    with pytest.raises(
        InputError, match=r"text 0: 6 tokens, the model takes 5 \(its max_seq_length\); shorten it or pass"
    ):
        encoder.encode(["a nest of models"], 8)
    with pytest.raises(InputError, match=r"text 0: 6 tokens, the prompt included, the largest bucket takes 4"):
        encoder.encode(["of models"], 4, prompt="a nest ")
    assert encoder.encode(["a nest of models"], 8, truncate=True).lengths == (5,)


def test_the_tokens_of_a_prompt_may_be_left_out_of_pooling(tiny_bundle: Path, manifest: Manifest) -> None:
    pooling = TensorSpec("pooling", "int64", ("batch", "sequence"), pad=0, high=2)
    encoder = make(tiny_bundle, prompted(manifest, pooled="pooling"), [*manifest.inputs, pooling])
    encoded = encoder.encode(["of models", "nest"], 8, prompt="a ")
    assert encoded.feeds["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 1, 0]]
    # This file does not say that its last token is special, so the prompt alone has three.
    assert encoded.feeds["pooling"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 0]]
    assert encoder.encode(["of models"], 8).feeds["pooling"].tolist() == [[1, 1, 1, 1]]
    with pytest.raises(InputError, match="text 0: the prompt takes all 4 tokens, and the model pools those behind it"):
        encoder.encode(["nest"], 4, truncate=True, prompt="a nest of ")
