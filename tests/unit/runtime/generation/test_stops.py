"""Where a row's text ends, and that no piece goes beyond it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.errors import InputError
from nestforge.runtime.generation.stops import Stops, TextStream
from support.trained_tokenizers import END, KINDS, byte_fallback, byte_level, docstrings, whole_words
from tokenizers import Tokenizer


def ended(text: str, strings: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, read letter by letter, and that string."""
    for end in range(len(text) + 1):
        if found := [stop for stop in strings if text[:end].endswith(stop)]:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_text_ends_before_the_first_stop_string(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = kind()
    ids = tokenizer.encode(data.draw(st.sampled_from(docstrings()))).ids
    ids += data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=10))
    ids = ids[-60:]
    text = tokenizer.decode(ids)
    places = st.tuples(st.integers(0, len(text)), st.integers(1, 9)).map(lambda cut: text[cut[0] : sum(cut)])
    strings = tuple(filter(None, data.draw(st.lists(places | st.text("the .\n", max_size=3), max_size=4))))
    stream, given_out = TextStream(tokenizer, Stops(strings=strings)), ""
    for token in ids:
        given_out += stream.add(token)
        if stream.stopped is not None:
            break
    assert (given_out + stream.finish(), stream.stopped) == ended(text, strings)
    assert stream.finish() == ""


def fed(stream: TextStream, text: str) -> list[str]:
    return [stream.add(token) for token in byte_level().encode(text).ids]


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    stream = TextStream(byte_level(), Stops(strings=("zqzqx",)))
    letters = [byte_level().token_to_id(letter) for letter in "azqzqzqyzq"]
    assert [stream.add(letter) for letter in letters] == ["a", "", "", "", "", "zq", "", "zqzqy", "", ""]
    assert (stream.finish(), stream.stopped) == ("zq", None)


def test_of_several_stop_strings_the_first_complete_one_counts() -> None:
    for strings in (("zqx", "qx", "azqxj"), ("azqxj", "qx", "zqx")):
        stream = TextStream(byte_level(), Stops(strings=strings))
        assert ["".join(fed(stream, "azqx")), stream.stopped] == ["a", "zqx"]


def test_an_end_id_ends_the_row_with_all_that_was_held() -> None:
    end = byte_level().token_to_id(END)
    stream = TextStream(byte_level(), Stops(ids=frozenset({end, 7}), strings=("zqx",)))
    assert "".join(fed(stream, "azq")) == "a"
    assert (stream.add(end), stream.stopped) == ("zq", end)
    assert stream.finish() == ""
    ordinary = byte_level().token_to_id("z")
    stream = TextStream(byte_level(), Stops(ids={0, ordinary}))
    assert (stream.add(ordinary), stream.stopped) == ("", ordinary)
    zero = TextStream(byte_level(), Stops(ids={0}))
    assert (zero.add(0), zero.stopped) == ("", 0)


def test_a_stop_string_in_what_the_end_sets_free_counts() -> None:
    """Of a run of byte tokens nothing is certain before it ends."""
    ids = [byte_fallback().token_to_id(name) for name in ("a", "<0x62>", "<0xC3>", "<0xA9>", "<0x63>")]
    for last in ([], [byte_fallback().token_to_id(END)]):
        stream = TextStream(byte_fallback(), Stops(frozenset(last), ("é",)))
        assert [*(stream.add(token) for token in [*ids, *last]), stream.finish()][4 + len(last) :] == (
            ["b"] if last else ["", "b"]
        ) + ([""] if last else [])
        assert stream.stopped == "é"


def test_stop_strings_are_not_looked_for_in_the_context() -> None:
    ids = whole_words().encode("the of the").ids
    stream = TextStream(whole_words(), Stops(strings=("the",)), context=ids[:1])
    assert [stream.add(token) for token in ids[1:]] == [" of", " "]
    assert stream.stopped == "the"


def test_lists_and_numbers_of_numpy_are_taken() -> None:
    taken: Any = Stops(ids=[np.int64(3), 3, 4], strings=["a"])
    assert taken == Stops(frozenset({3, 4}), ("a",))
    assert {type(token) for token in taken.ids} == {int}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": [-1]}, "stop ids: expected whole numbers, 0 or above, got -1"),
        ({"ids": [2.0]}, "stop ids: expected whole numbers, 0 or above, got 2.0"),
        ({"ids": [True]}, "stop ids: expected whole numbers, 0 or above, got True"),
        ({"ids": 2}, "stop ids: expected a list, got 2"),
        ({"strings": "the"}, "stop strings: expected a list, got 'the'"),
        ({"strings": [""]}, "stop strings: expected texts of 1 to 1024 letters, got ''"),
        ({"strings": ["a" * 1025]}, "stop strings: expected texts of 1 to 1024 letters, got 'aaaa"),
        ({"strings": [b"a"]}, "stop strings: expected texts of 1 to 1024 letters, got b'a'"),
        ({"strings": ["a", "\ud83d"]}, "stop strings: half of a surrogate pair, which is no character, in "),
        ({"strings": ["a"] * 65}, "stop strings: expected at most 64, got 65"),
        ({"strings": math.nan}, "stop strings: expected a list, got nan"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Stops(**options)
    assert str(caught.value).startswith(message)
