"""Where a row's text ends, and that no piece goes beyond it."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.errors import BundleCorruptError, InputError
from nestforge.runtime.generation.text_stream import Detokenizer, Stops, TextStream
from support.tokenizer_files import (
    END,
    KINDS,
    SPECIAL,
    byte_fallback,
    byte_level,
    docstrings,
    metaspace,
    trained_word_pieces,
    whole_words,
)
from tokenizers import Tokenizer, decoders


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
    """Nothing of a run of byte tokens is certain before it ends."""
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": [-1]}, "stop ids: expected whole numbers, 0 or above, got -1"),
        ({"strings": [""]}, "stop strings: expected texts of 1 to 1024 letters, got ''"),
        ({"strings": ["a" * 1025]}, "stop strings: expected texts of 1 to 1024 letters, got 'aaaa"),
        ({"strings": ["a", "\ud83d"]}, r"stop strings: '\ud83d': half of a surrogate pair, which is no character"),
        ({"strings": ["a"] * 65}, "stop strings: expected at most 64, got 65"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Stops(**options)
    assert str(caught.value).startswith(message)


BYTE = re.compile("<0x..>")
LETTERS = st.sampled_from("aé€日😀 \n.'") | st.characters(codec="utf-8")


@st.composite
def tokens(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """For texts, any ids, and ids that belong to no token."""
    ids = st.integers(0, tokenizer.get_vocab_size() + 3)
    text = (st.sampled_from(docstrings()) | st.text(LETTERS, max_size=20)).map(lambda text: tokenizer.encode(text).ids)
    parts = draw(st.lists(text | st.lists(ids, max_size=8), max_size=4))
    return [token for part in parts for token in part][:150]


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    stream = Detokenizer(tokenizer, context)
    return [*(stream.add(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_pieces_joined_are_the_decoded_tokens(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = kind()
    ids = data.draw(tokens(tokenizer))
    stream, given_out = Detokenizer(tokenizer), ""
    for number, token in enumerate(ids, 1):
        given_out += stream.add(token)
        so_far = tokenizer.decode(ids[:number])
        named = [name for each in ids[:number] if (name := tokenizer.id_to_token(each)) and name not in SPECIAL]
        if not (so_far.endswith("\ufffd") or (named and BYTE.fullmatch(named[-1]))):
            assert given_out == so_far, "held back without a reason"
    assert given_out + stream.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_behind_a_context_they_are_what_the_tokens_add(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = kind()
    context = tokenizer.encode(data.draw(st.sampled_from(docstrings()))).ids
    ids = data.draw(tokens(tokenizer))
    whole = tokenizer.decode([*context, *ids])
    if not any(BYTE.fullmatch(tokenizer.id_to_token(each)) for each in context[-1:]):
        assert "".join(pieces_of(tokenizer, ids, context)) == whole.removeprefix(tokenizer.decode(context))


def test_a_context_keeps_the_space_before_the_first_word() -> None:
    for kind in (byte_fallback, metaspace, trained_word_pieces):
        prompt, reply = (kind().encode(text).ids for text in ("the name", "of the"))
        assert "".join(pieces_of(kind(), reply)) == "of the"
        assert "".join(pieces_of(kind(), reply, prompt)) == " of the"


def ids_of(tokenizer: Tokenizer, *names: str) -> list[int]:
    found = [tokenizer.token_to_id(name) for name in names]
    assert None not in found
    return found


def test_a_letter_comes_whole() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("\U0001f9ff.").ids
    assert len(ids) == 5
    assert pieces_of(tokenizer, ids) == ["", "", "", "\U0001f9ff", ".", ""]
    assert pieces_of(tokenizer, ids[:2]) == ["", "", "\ufffd"]
    assert pieces_of(tokenizer, [ids[0], ids[4], ids[1], ids[0]]) == ["", "\ufffd.", "", "\ufffd", "\ufffd"]


def test_a_letter_that_the_context_began_comes_whole() -> None:
    for kind in (byte_level, byte_fallback):
        ids = kind().encode("\U0001f9ff").ids
        assert "".join(pieces_of(kind(), ids[-3:], ids[:-3])) == "\U0001f9ff"


def test_bytes_wait_for_the_end_of_their_run() -> None:
    """Any byte of a run that fits nothing makes U+FFFD of all its bytes, of letters that were complete too."""
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, "a", "<0xC3>", "<0xA9>", "<0x61>", "b")
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "éab", ""]
    broken = ids_of(tokenizer, "a", "<0xC3>", "<0xA9>", END, "<0xFF>", "b", "a")
    assert pieces_of(tokenizer, broken) == ["a", "", "", "", "", "\ufffd\ufffd\ufffdb", "a", ""]
    assert pieces_of(tokenizer, ids[:3]) == ["a", "", "", "é"]


def test_spaces_are_stripped_from_the_beginning_of_the_row_alone() -> None:
    tokenizer = Tokenizer.from_str(byte_fallback().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)])
    a, space = ids_of(tokenizer, "a", "\u2581")
    ids = [*[space] * 5, *[a] * 20, *[space] * 30, a, space]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == f"  {'a' * 20}{' ' * 30}a "


def test_a_token_costs_the_same_however_many_came_before() -> None:
    tokenizer, decoded = byte_level(), []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, ids: list[int], **options: bool) -> str:
            decoded.append(len(ids))
            return tokenizer.decode(ids, **options)

    ids = [token for text in docstrings()[:30] for token in tokenizer.encode(text).ids]
    assert len(ids) > 1000
    assert "".join(pieces_of(Counting(), ids)) == tokenizer.decode(ids)
    assert max(decoded) <= 24
    assert len(decoded) < 1.5 * len(ids)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Strip(" ", 0, 1),
        decoders.Sequence([decoders.Fuse(), decoders.Replace(" .", ".")]),
        decoders.Sequence([decoders.Sequence([decoders.Fuse()]), decoders.Strip(" ", 1, 2)]),
    ],
    ids=str,
)
def test_decoders_that_change_earlier_text_are_refused(decoder: Any) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoder
    with pytest.raises(InputError, match=r"tokenizer: expected a decoder whose text only grows with every token, got "):
        Detokenizer(tokenizer)


def test_a_tokenizer_that_fails_is_named() -> None:
    class Failing:
        decoder = None
        get_added_tokens_decoder = staticmethod(dict)

        def decode(self, ids: list[int], **options: bool) -> str:
            raise OverflowError("out of range")

    with pytest.raises(BundleCorruptError, match=r"^tokenizer: cannot decode \(out of range\)$"):
        Detokenizer(Failing())
