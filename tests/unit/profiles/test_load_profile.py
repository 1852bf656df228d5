import string
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.compiler.planning.levels import levels
from nestforge.compiler.planning.plan import make_plan
from nestforge.errors import ProfileError
from nestforge.exporters.source import ModelSource, open_source
from nestforge.profiles import load_profile as module
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.device_profile import SCHEMA_VERSION, DeviceProfile, Rates, read_profile
from nestforge.profiles.load_profile import builtin_profiles, dump_profile, load_profile
from nestforge.profiles.strict_yaml import MAX_YAML_BYTES
from support.tiny_models import save_tiny_encoder

FILES = sorted((Path(module.__file__).parent / "builtin").glob("*.yaml"))


def test_builtin_names() -> None:
    assert builtin_profiles() == (
        "host-cpu",
        "h200",
        "jetson-agx-orin",
        "jetson-orin-nano-8gb",
        "l4",
        "laptop-x86",
        "raspberry-pi-5",
        "rtx-4090",
        "t4",
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_builtin_profile_loads_under_its_own_name(path: Path) -> None:
    profile = load_profile(path.stem)
    assert profile.name == path.stem
    assert profile == load_profile(path)
    assert {"full", "balanced", "fast", "tiny"} <= profile.budgets.keys()
    assert profile.rates.source is not None
    assert profile.rates.batched_gemm_gflops <= profile.rates.gemm_gflops


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_builtin_figure_states_its_source(path: Path) -> None:
    figures = {"cores", "memory_mb", "width_multiple"} | Rates.__dataclass_fields__.keys() - {
        "source",
        "at",
        "others_share",
    }
    lines = {line.strip().partition(":")[0]: line for line in path.read_text().splitlines()}
    named = figures | (load_profile(path).rates.at or {}).keys()
    assert [figure for figure in sorted(named) if "  # " not in lines[figure]] == []


@pytest.fixture(scope="module")
def small_bert(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """BERT-tiny's sizes: nearly all of its parameters are embeddings, which no axis shrinks."""
    sizes = {"vocab_size": 30522, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("small") / "bert"
    return open_source(save_tiny_encoder(folder, **sizes, intermediate_size=512, max_position_embeddings=512))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_small_bert_meets_every_builtin_budget(path: Path, small_bert: ModelSource) -> None:
    profile = load_profile(path)
    steps = levels(small_bert.spec, profile.levels, profile.width_multiple)
    plan = make_plan(small_bert, profile, levels=steps)
    assert [budget.name for budget in plan.budgets] == list(profile.budgets)


def test_unknown_name_lists_what_is_built_in() -> None:
    with pytest.raises(ProfileError) as failure:
        load_profile("jetson-agx-orni")
    assert str(failure.value) == (
        "profile 'jetson-agx-orni': neither a file nor a built-in profile; did you mean 'jetson-agx-orin'? Built "
        "in are host-cpu, h200, jetson-agx-orin, jetson-orin-nano-8gb, l4, laptop-x86, raspberry-pi-5, rtx-4090, t4"
    )
    with pytest.raises(ProfileError) as failure:
        load_profile("xxxxxxxx")
    assert str(failure.value) == (
        "profile 'xxxxxxxx': neither a file nor a built-in profile; expected one of "
        "h200, host-cpu, jetson-agx-orin, jetson-orin-nano-8gb, l4, laptop-x86, raspberry-pi-5, rtx-4090, t4"
    )


def test_folder_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="neither a file nor a built-in profile"):
        load_profile(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "line 2, column 1: key 'a' stands twice"),
        ("a: {b: 1, b: 2}\n", "line 1, column 11: key 'b' stands twice"),
        ("a: &x [1]\nb: *x\n", r"line 2, column 4: aliases are not allowed \(\*x\)"),
        ("? [1]\n: 2\n", "line 1, column 3: a key must be a plain name"),
        ("a: [1\n", "line 2, column 1: expected"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1, column 4: could not determine a constructor"),
        ("a: 2001-99-99\n", "month must be in 1..12"),
        ("[" * 10_000, "not a readable YAML file"),
        ("a: \x00", "not a readable YAML file"),
        *((f"a: !!{tag}", "not a readable YAML file") for tag in ("bool x", "int ''", "float '\u00b2'", "timestamp x")),
        ("a: !!omap {b: c}", "not a readable YAML file"),
        ("", "expected a mapping, got nothing"),
        ("- 1\n", "expected a mapping, got a list"),
        ("nmae: x\n", "unknown key 'nmae'; did you mean 'name'"),
        ("name: x\n" + "#" * MAX_YAML_BYTES, "bytes, more than the 262144 allowed"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message) as failure:
        load_profile(path)
    assert str(failure.value).startswith(str(path))
    assert "\n" not in str(failure.value)


positive = st.floats(min_value=1e-6, max_value=1e9)
names = st.text(string.ascii_letters + "é: #-'\"", min_size=1)
shares = st.integers(1, 100).map("{} %".format)
limits = st.none() | positive | shares
counts = st.none() | st.integers(1, 10**15) | shares


@st.composite
def profiles(draw: st.DrawFn) -> DeviceProfile:
    buckets = draw(st.lists(st.builds(Bucket, st.integers(1, 64), st.integers(1, 512)), min_size=1, unique=True))
    return DeviceProfile(
        schema_version=SCHEMA_VERSION,
        name=draw(names),
        description=draw(st.text(string.printable)),
        backend=draw(st.sampled_from(["onnxruntime", "tensorrt"])),
        cores=draw(st.integers(1, 512)),
        memory_mb=draw(positive),
        rates=draw(st.builds(Rates, *[positive] * 5, st.none() | names)),
        width_multiple=draw(st.sampled_from([8, 16, 64])),
        buckets=tuple(buckets),
        budgets=draw(
            st.dictionaries(names, st.builds(BudgetSpec, limits, limits, counts, counts), min_size=1, max_size=3)
        ),
        levels=draw(st.none() | st.dictionaries(names, st.lists(positive).map(tuple), max_size=2)),
    )


@given(profiles())
def test_dump_round_trips(profile: DeviceProfile) -> None:
    assert read_profile(yaml.safe_load(dump_profile(profile)), "dumped") == profile


def test_dumped_builtin_is_read_back_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(dump_profile(load_profile("t4")))
    assert load_profile(path) == load_profile("t4")
