"""Templates that would never end, or fill the memory: each ends in one line."""

from typing import Any

import pytest
from nestforge.errors import InputError
from nestforge.runtime.generation import bounded_templates as module
from nestforge.runtime.generation.bounded_templates import (
    MOST_LETTERS,
    Allowance,
    letters_of,
    require_formatted,
    require_numbers,
    require_operation,
    require_replaced,
)
from nestforge.runtime.generation.chat import ChatTemplate

CHAT = [{"role": "user", "content": "hi"}]
HELD = "{% set n = namespace(x='aaaaaaaa', l=['a']) %}{% for i in range(99) %}"


def rendered(source: str) -> str:
    return ChatTemplate(source, {}).render(CHAT)


def refused(source: str) -> str:
    with pytest.raises(InputError) as caught:
        rendered(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if range(99999)|select('eq', -1)|list %}{% endfor %}",
        "{% for i in range(99999) recursive %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(k) %}{% if k %}{{ m(k - 1) }}{{ m(k - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m() %}{% for i in range(99999) %}{{ caller() }}{{ caller() }}{% endfor %}{% endmacro %}"
        "{% call m() %}{% call m() %}{% endcall %}{% endcall %}",
        "{% set x = 'a' * 4000000 %}{% set y = x[1:] ~ 'a' %}{% for i in range(99999) %}{{ x == y }}{% endfor %}",
    ],
)
def test_loops_end(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", 0.05)
    assert refused(source) == ("chat template: cannot render this chat (it takes more than 0.05 s of the processor)")


@pytest.mark.parametrize(
    "search",
    [
        "rfind(b)",
        "rindex(b)",
        "rpartition(b)",
        "rsplit(b)",
        "rsplit(sep=b)",
        "strip(b)",
        "lstrip(b)",
        "rstrip(b)",
    ],
)
def test_a_search_that_takes_long_is_refused(search: str) -> None:
    """Each compares every letter with every other."""
    source = "{% set a, b = 'a' * 400000, 'ab' ~ 'a' * 200000 %}{{ a.SEARCH }}".replace("SEARCH", search)
    assert "(it looks for 200002 letters in 400000, which takes too long)" in refused(source)


def test_filters_of_elements_take_nothing_as_before() -> None:
    said = "{{ none|select|list }}{{ messages[9]|sort }}{{ ''|unique|list }}{{ (3, 1, 2)|sort }}{{ 'ba'|sort }}"
    assert rendered(said) == "[][][][1, 2, 3]['a', 'b']"


def test_a_filter_searches_as_the_method_does() -> None:
    said = "(it looks for 200002 letters in 400000, which takes too long)"
    for filtered in ("a|trim(b)", "a|trim(chars=b)", "([a]|map('trim', b))|list"):
        assert said in refused(
            "{% set a, b = 'a' * 400000, 'ab' ~ 'a' * 200000 %}{{ FILTERED }}".replace("FILTERED", filtered)
        )


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 1000000000 * ['a'] }}",
        "{{ messages * 10**6 }}",
        HELD + "{% set n.x = n.x + n.x %}{% endfor %}",
        HELD + "{% set n.x = n.x ~ n.x %}{% endfor %}",
        HELD + "{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
        HELD + "{% set n.x = n.x|replace('a', 'aa') %}{% endfor %}",
        HELD + "{% set n.x = n.x.join(n.x) %}{% endfor %}",
        HELD + "{% set n.x = n.x|join(n.x) %}{% endfor %}",
        HELD + "{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}",
        HELD + "{% set n.x = '%s%s'|format(n.x, n.x) %}{% endfor %}",
        HELD + "{% set n.x = '{0}{0}'.format(n.x) %}{% endfor %}",
        HELD + "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        HELD + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
        HELD + "{% set n.l = (n.l, n.l) %}{% endfor %}{{ n.l == n.l }}",
        HELD + "{% set n.l = {'a': n.l, 'b': n.l} %}{% endfor %}{{ n.l|tojson }}",
        HELD + "{% set n.l = dict(a=n.l, b=n.l) %}{% endfor %}",
        HELD + "{% set n.l = n.l + n.l %}{% endfor %}",
        "{% macro m(k) %}{{ m(k - 1, varargs, varargs) if k else varargs }}{% endmacro %}{{ m(60) }}",
        "{{ ('a\\n' * 1000)|indent(100000) }}",
        "{{ (range(99999)|list)|tojson(indent=100000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ ('a' * 400000)|sort(attribute='x') }}",
        "{{ ('a' * 400000)|groupby('x') }}",
        "{{ ('a' * 400000)|unique(attribute='x')|list }}",
        "{{ ('a' * 400000)|select('eq', 'b')|list }}",
        "{{ ('a' * 400000)|rejectattr('x', 'undefined')|list }}",
        "{{ strftime_now('%c' * 200000) }}",
        "{{ strftime_now('%_999999999Y' ~ 'a' * 1000) }}",
        "{{ 'a' * 4000000 }}{{ 'a' * 4000000 }}",
    ],
)
def test_what_grows_is_refused(source: str) -> None:
    assert "cannot render this chat (it makes a value of " in refused(source)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ 'a'.center(10**9) }}", "it asks for 1e+09 of something"),
        ("{{ 'a'|center(1000000000) }}", "it asks for 1e+09 of something"),
        ("{{ [1]|batch(1000000000, 'x')|list }}", "it asks for 1e+09 of something"),
        ("{{ 5|round(-1000000000, 'floor') }}", "it asks for -1e+09 of something"),
        ("{{ range(99999)|map('center', 99999)|list }}", "it makes more than 134217728 letters in all"),
        ("{% for x in range(99999)|map('center', 99999) %}{% endfor %}", "it makes more than 134217728 letters in all"),
        (
            "{% for i in range(99) %}{% set x = 'a' * 4000000 %}{% endfor %}",
            "it makes more than 134217728 letters in all",
        ),
        ("{{ 10**(10**6) }}", "it makes a number of more than 4096 bits"),
        ("{{ '{:{}}'.format(1, 1000000000) }}", "it formats by a width that is a value"),
        ("{{ ('\\t' * 4000000).expandtabs(1000) }}", "access to attribute 'expandtabs' of 'str' object is unsafe"),
        ("{{ lipsum(n=100000000) }}", "'lipsum' is undefined"),
        ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth exceeded"),
        ("{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}", "maximum recursion depth exceeded"),
    ],
)
def test_other_ways_to_go_on_for_ever(source: str, said: str) -> None:
    assert f"chat template: cannot render this chat ({said}" in refused(source)


def test_filters_that_take_long_are_missing() -> None:
    assert refused("{{ ('<' * 4000000)|striptags }}").startswith(
        "chat template: cannot be compiled (No filter named 'striptags'."
    )


def test_compiling_applies_no_filter_to_constants() -> None:
    ChatTemplate("{{ 'x'|center(4000000) }}" * 100, {})
    assert rendered("{{ none|default(1700000000, true) }}") == "1700000000"


def test_a_namespace_that_holds_itself_is_written() -> None:
    assert rendered("{% set n = namespace() %}{% set n.a = [n] %}{{ n.a }}{{ n }}") == "[<Namespace>]<Namespace>"


def test_long_chats_fit() -> None:
    grown = "{% for m in messages %}{% set n.x = n.x + m.content ~ '\\n' %}{% endfor %}"
    source = "{% set n = namespace(x='') %}" + grown + "{{ n.x }}"
    chat = [{"role": "user", "content": "a" * 2000}] * 200
    assert ChatTemplate(source, {}).render(chat) == ("a" * 2000 + "\n") * 200


def test_a_list_counts_what_it_holds_as_often_as_it_is_there() -> None:
    doubled: list[Any] = ["ab"]
    for _ in range(60):
        doubled = [doubled, doubled]
    assert letters_of("abc") == 3
    assert letters_of(["abc", ("d",), {"e": 5}]) == (16 + 3) + (16 + 16 + 1) + (16 + 16 + 1 + 16 + 1)
    assert letters_of(doubled) > 2**60  # in sixty steps
    with pytest.raises(ValueError, match="a number of more than 4096 bits"):
        letters_of([2**4096])


def test_values_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LETTERS_IN_ALL", 10)
    allowed = Allowance()
    assert list(allowed.each(["abc", "def", "ghi"])) == ["abc", "def", "ghi"]
    with pytest.raises(ValueError, match=r"^it makes more than 10 letters in all$"):
        allowed.made("jk")


def test_time_is_that_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Allowance().step()
    monkeypatch.setattr(module, "MOST_SECONDS", -1.0)
    with pytest.raises(ValueError, match=r"^it takes more than -1 s of the processor$"):
        Allowance().step()


@pytest.mark.parametrize(
    ("text", "mark", "values", "fits"),
    [
        ("%s and %5d%%, 123456789", "%", ["a" * 1000, 7], True),
        ("%0000000009999999d", "%", [7], False),
        ("%s%s", "%", ["a" * (MOST_LETTERS // 2), "b"], False),
        ("%*d", "%", [(9, 7)], False),
        ("**%s**", "%", ["a"], True),
        ('{{"a": {}}} in 123456789', "{", ["b"], True),
        ("{:9999999}", "{", ["b"], False),
        ("{a:{b}}", "{", ["b", "9999999"], False),
        ("{" + ":" * 200_000, "{", [], True),
        ("%" + "0" * 200_000, "%", [], True),
        ("{0}" * 100_000, "{", ["a" * 100], False),
    ],
    ids=lambda value: str(value)[:20],
)
def test_formats(text: str, mark: str, values: list[object], fits: bool) -> None:
    if fits:
        require_formatted(text, mark, values)
    else:
        with pytest.raises(ValueError, match=r"^it (makes a value of \d+ letters|formats by a width that is a value)"):
            require_formatted(text, mark, values)


def test_what_is_about_to_be_made_and_fits() -> None:
    require_operation("*", "a", MOST_LETTERS)
    require_operation("*", 3.5, 10**9)
    require_operation("**", 2, 2048)
    require_operation("**", 0.5, 10**9)
    require_replaced("aba", "a", "b" * (MOST_LETTERS // 2 - 2))
    require_numbers([MOST_LETTERS, "a", None, 1e300])
    with pytest.raises(ValueError, match=r"^it makes a number of more"):
        require_operation("**", 2, 2049)
    for left, right in (("%9999999d", 1), ("%s", "a" * (MOST_LETTERS + 1))):
        with pytest.raises(ValueError, match=r"^it makes a value of \d+ letters"):
            require_operation("%", left, right)
    with pytest.raises(ValueError, match=r"^it makes a value of \d+ letters"):
        require_replaced("aba", "a", "b" * MOST_LETTERS)
    with pytest.raises(ValueError, match=r"^it asks for 1e\+09 of something, more than 4194304$"):
        require_numbers([1, 10**9])
