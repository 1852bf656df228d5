import pytest
from nestforge.errors import InputError
from nestforge.optional import needed


def test_a_library_that_is_here_is_imported() -> None:
    assert needed("json.decoder", "x", "json", "do without").JSONDecoder


def test_one_that_is_missing_is_named_with_what_to_do() -> None:
    with pytest.raises(InputError) as error:
        needed("no_such_library.part", "similarity", "no-such-library", "use numpy")
    assert str(error.value) == (
        "similarity: needs no-such-library, which is not installed here; install it, or use numpy"
    )
