import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from nestforge import whole_file
from nestforge.bundle.files import to_json
from nestforge.compiler.work.staging import Stage, is_resumable, link, publish, staged, write_synced
from nestforge.errors import OutputError, ParityError
from nestforge.whole_file import exchange

KEY = "one job"


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def compile_with(work: Callable[[Stage], object], output: Path) -> None:
    with staged(output, KEY) as stage:
        work(stage)


def stage_of(output: Path) -> Stage:
    root = output.with_name(f"{output.name}.partial")
    return Stage(root / "output", root / "work")


def interrupted(output: Path) -> Stage:
    """A compile that was stopped after it had finished two results and begun two more."""

    def work(stage: Stage) -> None:
        stage.once(stage.work / "template", _write)
        stage.once(stage.folder / "weights", _write)
        (stage.folder / "graph.writing").write_bytes(b"ha")
        (stage.work / "scores.writing").write_bytes(b"ha")
        (stage.folder / ".tmpA1b2C3").write_bytes(b"ha")  # what safetensors leaves when it is killed
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_with(work, output)
    return stage_of(output)


def _write(path: Path) -> None:
    path.write_bytes(b"whole")


def test_what_passes_is_published_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    output = tmp_path / "new" / "folder" / "out"
    with staged(output, KEY) as stage:
        assert not output.exists()
        write_synced(stage.folder / "engine", b"1")
        stage.memo("receipt", dict[str, int], lambda: {"a": 1})
    assert left(output) == ["engine"]
    assert left(output.parent) == ["out"]


@pytest.mark.parametrize(
    "failure",
    [ParityError("no"), OSError(errno.EIO, "broken disk"), RuntimeError("no memory")],
    ids=["gate", "disk", "PyTorch"],
)
def test_what_fails_leaves_nothing(tmp_path: Path, failure: Exception) -> None:
    def work(stage: Stage) -> None:
        write_synced(stage.folder / "engine", b"1")
        raise failure

    with pytest.raises((ParityError, OutputError, RuntimeError)):
        compile_with(work, tmp_path / "out")
    assert left(tmp_path) == []


def test_an_interrupted_compile_goes_on_with_what_it_had_finished(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    assert left(tmp_path) == ["out.partial"]
    made = []

    def make(path: Path) -> None:
        made.append(path.name)
        path.touch()

    with staged(tmp_path / "out", KEY) as stage:
        assert left(stage.folder) == ["weights"]
        assert left(stage.work) == ["key", "template"]
        stage.once(stage.work / "template", make)
        stage.once(stage.work / "scores", make)
    assert made == ["scores.writing"]
    assert left(tmp_path / "out") == ["weights"]


def test_another_compile_starts_afresh(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    with staged(tmp_path / "out", "another") as stage:
        assert left(stage.folder) == []
        assert left(stage.work) == ["key"]


def test_a_stage_without_its_key_starts_afresh(tmp_path: Path) -> None:
    stage = interrupted(tmp_path / "out")
    (stage.work / "key").unlink()
    with staged(tmp_path / "out", KEY) as again:
        assert left(again.folder) == []
        assert left(again.work) == ["key"]


def test_a_stage_without_its_folder_starts_afresh(tmp_path: Path) -> None:
    """It was published, and what was published has been moved away since."""
    shutil.rmtree(interrupted(tmp_path / "out").folder)
    with staged(tmp_path / "out", KEY) as again:
        assert not again.is_published
        assert left(again.work) == ["key"]


def test_what_was_published_before_the_job_had_ended_is_known(tmp_path: Path) -> None:
    """Work may go on at the output itself: plans are built there."""

    def stopped(stage: Stage) -> None:
        write_synced(stage.folder / "engine", b"1")
        publish(stage, tmp_path / "out")
        assert left(tmp_path) == ["out", "out.partial"]
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            compile_with(stopped if not (tmp_path / "out").exists() else interrupted_again, tmp_path / "out")
    with staged(tmp_path / "out", KEY) as stage:
        assert stage.is_published
    assert left(tmp_path) == ["out"]
    assert left(tmp_path / "out") == ["engine"]


def interrupted_again(stage: Stage) -> None:
    assert stage.is_published
    raise KeyboardInterrupt


def test_what_another_job_had_published_is_refused_and_its_stage_removed(tmp_path: Path) -> None:
    def stopped(stage: Stage) -> None:
        publish(stage, tmp_path / "out")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_with(stopped, tmp_path / "out")
    with pytest.raises(OutputError, match=r"out: exists already"):
        staged(tmp_path / "out", "another").__enter__()
    assert left(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["empty", "copy", "changed", "link"])
def test_what_stands_where_the_output_was_published_is_not_taken_for_it(tmp_path: Path, kind: str) -> None:
    output, moved = tmp_path / "out", tmp_path / "moved"

    def stopped(stage: Stage) -> None:
        write_synced(stage.folder / "engine", b"1")
        publish(stage, output)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_with(stopped, output)
    match kind:
        case "changed":
            (output / "engine").write_bytes(b"2")
        case _:
            output.rename(moved)
            if kind == "link":
                output.symlink_to(moved)
            elif kind == "copy":
                shutil.copytree(moved, output)
            else:
                output.mkdir()
    with pytest.raises(OutputError, match=r"out: exists already"):
        staged(output, KEY).__enter__()
    assert not (tmp_path / "out.partial").exists()


def test_an_output_beside_unfinished_work_is_refused_and_both_are_kept(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match=r"out: exists already"):
        staged(tmp_path / "out", KEY).__enter__()
    (tmp_path / "out").rmdir()
    with staged(tmp_path / "out", KEY) as stage:
        assert left(stage.folder) == ["weights"]


def test_resumable_is_what_had_begun_to_work(tmp_path: Path) -> None:
    assert not is_resumable(tmp_path / "out")
    interrupted(tmp_path / "out")
    assert is_resumable(tmp_path / "out")
    assert not is_resumable(Path("x" * 5000))


def test_a_result_that_fails_is_not_taken_for_finished(tmp_path: Path) -> None:
    stage = Stage(tmp_path, tmp_path)

    def half(path: Path) -> None:
        path.write_bytes(b"ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage.once(stage.work / "scores", half)
    assert not (stage.work / "scores").exists()
    assert stage.memo("x", tuple[float, ...], lambda: (1, 2.5)) == (1, 2.5)
    assert stage.memo("x", tuple[float, ...], lambda: pytest.fail("computed again")) == (1, 2.5)


def test_a_result_whose_files_are_gone_is_made_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "output", tmp_path / "work")
    stage.folder.mkdir()
    stage.work.mkdir()
    (stage.folder / "engine").touch()
    assert not stage.has("x")
    assert [stage.memo("x", int, lambda n=n: n, ["engine"]) for n in (1, 2)] == [1, 1]
    (stage.folder / "engine").unlink()
    assert stage.has("x")
    assert stage.memo("x", int, lambda: 3, ["engine"]) == 3
    (stage.work / "x.json").write_text('"three"')
    with pytest.raises(OutputError, match=r"x\.json: expected a whole number, got str 'three'"):
        stage.memo("x", int, lambda: 4)


@pytest.mark.parametrize("kind", ["folder", "empty", "file", "link", "dangling"])
def test_an_output_that_exists_is_refused_and_untouched(tmp_path: Path, kind: str) -> None:
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    match kind:
        case "folder" | "empty":
            output.mkdir()
            if kind == "folder":
                (output / "mine").touch()
        case "file":
            output.touch()
        case _:
            if kind == "link":
                elsewhere.mkdir()
            output.symlink_to(elsewhere)
    before = left(tmp_path)
    with pytest.raises(OutputError, match=r"out: exists already; choose another `output` or `overwrite=True`$"):
        staged(output, KEY).__enter__()
    assert left(tmp_path) == before


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_no_compile_left_is_never_cleared(tmp_path: Path, kind: str) -> None:
    """``OUT.partial`` could be anything of the user's; clearing it would take his files."""
    folder, mine = tmp_path / "out.partial", tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis").touch()
    match kind:
        case "folder":
            mine.rename(folder)
        case "file":
            folder.touch()
        case "link":
            folder.symlink_to(mine)
    with pytest.raises(OutputError, match=r"out\.partial: not a folder that a compile left"):
        staged(tmp_path / "out", KEY).__enter__()
    assert (folder if kind == "folder" else mine).joinpath("thesis").exists()


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    mine, root = tmp_path / "mine", tmp_path / "out.partial"
    mine.write_text("precious")
    root.mkdir()
    (root / ".lock").symlink_to(mine)
    with pytest.raises(OutputError, match=r"out\.partial: not a folder that a compile left"):
        staged(tmp_path / "out", KEY).__enter__()
    assert mine.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_staging_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    stage = interrupted(tmp_path / "out")
    os.chown(stage.folder.parent, 65534, -1)
    with pytest.raises(OutputError, match=r"out\.partial: not a folder that a compile left"):
        staged(tmp_path / "out", KEY).__enter__()
    assert left(stage.folder) == [".tmpA1b2C3", "graph.writing", "weights"]


def test_one_compile_at_a_time(tmp_path: Path) -> None:
    with staged(tmp_path / "out", KEY) as stage:
        (stage.folder / "engine").touch()
        with pytest.raises(
            OutputError, match=r"out.partial: another compile is working on this output: process \d+ \("
        ):
            staged(tmp_path / "out", "a third").__enter__()
        assert (stage.folder / "engine").exists()
    assert left(tmp_path / "out") == ["engine"]


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    def meanwhile(stage: Stage) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").touch()

    with pytest.raises(OutputError, match="cannot be written"):
        compile_with(meanwhile, tmp_path / "out")
    assert left(tmp_path) == ["out"]
    assert left(tmp_path / "out") == ["mine"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "the disk is full; nothing was published"),
        (errno.EDQUOT, "the disk is full; nothing was published"),
        (errno.EROFS, "cannot be written (Read-only file system)"),
        (errno.EFBIG, "cannot be written (File too large)"),
        (errno.EIO, "cannot be written (Input/output error)"),
    ],
)
def test_what_the_disk_refuses_is_one_line(tmp_path: Path, number: int, message: str) -> None:
    with pytest.raises(OutputError) as refusal, staged(tmp_path / "out", KEY):
        raise OSError(number, os.strerror(number))
    assert str(refusal.value) == f"{tmp_path / 'out'}: {message}"
    assert left(tmp_path) == []


def test_what_was_finished_is_kept_where_the_disk_is_full(tmp_path: Path) -> None:
    """And what was half written is not: it takes the room that is missing."""

    def write(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    def whole(path: Path) -> None:
        path.write_bytes(b"whole")

    def work(stage: Stage) -> None:
        stage.once(stage.folder / "first", whole)
        (stage.work / "deep").mkdir()
        stage.once(stage.work / "deep" / "second", write)

    kept = "make room, and the same command goes on where this one was, or remove .*out.partial to give it up"
    with pytest.raises(OutputError, match=f"out: the disk is full; nothing was published; {kept}$"):
        compile_with(work, tmp_path / "out")
    assert left(tmp_path / "out.partial" / "output") == ["first"]
    assert left(tmp_path / "out.partial" / "work" / "deep") == []
    with staged(tmp_path / "out", KEY) as stage:
        stage.once(stage.folder / "first", lambda _: pytest.fail("written again"))
    assert left(tmp_path) == ["out"]


def test_a_disk_that_is_full_from_the_start_leaves_no_empty_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("nestforge.compiler.work.staging.write_synced", full)
    with pytest.raises(OutputError, match="the disk is full"):
        staged(tmp_path / "out", KEY).__enter__()
    assert left(tmp_path) == []


def test_an_error_that_is_not_the_outputs_keeps_its_trace(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), staged(tmp_path / "out", KEY):
        (tmp_path / "gone").read_bytes()
    assert left(tmp_path) == []


@pytest.mark.parametrize("output", ["out", "./out", "{}/out"])
def test_a_refusal_of_the_disk_names_the_file_that_it_is_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    """Whether the output is relative or not; a model beside it is not the output."""
    monkeypatch.chdir(tmp_path)
    place = Path(output.format(tmp_path))
    with (
        pytest.raises(OutputError, match=r"out: cannot be written \(Permission denied\)$"),
        staged(place, KEY) as stage,
    ):
        raise PermissionError(errno.EACCES, "Permission denied", str(stage.work / "x.json"))
    for other in (tmp_path / "model" / "weights", tmp_path / "out2", Path("model")):
        with pytest.raises(PermissionError), staged(place, KEY):
            raise PermissionError(errno.EACCES, "Permission denied", str(other))
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "file/out"], ids=["long", "longer", "below a file"])
def test_names_that_the_file_system_refuses(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot be written \("):
        staged(tmp_path / name, KEY).__enter__()
    assert left(tmp_path) == ["file"]


@pytest.mark.parametrize("output", ["/proc/x/y", "/proc/y", "/dev/full", "/dev/full/y", "/sys/y"])
def test_places_that_hold_no_folders(output: str) -> None:
    with pytest.raises(OutputError, match=r"cannot be written \(|exists already"):
        staged(Path(output), KEY).__enter__()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(OutputError, match=r"cannot be written \(Permission denied\)"):
            staged(closed / "out", KEY).__enter__()
    finally:
        os.seteuid(0)
    assert left(closed) == []


def test_json_is_the_same_for_the_same_data() -> None:
    assert to_json({"b": [1, 2.5, None], "a": "ü"}) == '{\n "a": "ü",\n "b": [\n  1,\n  2.5,\n  null\n ]\n}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(float("nan"))


def replaced_by(output: Path, content: bytes, key: str) -> None:
    with staged(output, key, ("engine",)) as stage:
        write_synced(stage.folder / "engine", content)


def test_an_output_of_its_kind_is_replaced_once_the_new_one_is_whole(tmp_path: Path) -> None:
    output = tmp_path / "out"
    replaced_by(output, b"1", KEY)
    (output / "older").touch()
    opened = (output / "engine").open("rb")
    with staged(output, "another", ("engine",)) as stage:
        write_synced(stage.folder / "engine", b"2")
        assert (output / "engine").read_bytes() == b"1"
    assert left(output) == ["engine"]
    assert (output / "engine").read_bytes() == b"2"
    assert opened.read() == b"1", "who has the old one open keeps it"
    opened.close()
    assert left(tmp_path) == ["out"]


def test_what_fails_replaces_nothing(tmp_path: Path) -> None:
    output = tmp_path / "out"
    replaced_by(output, b"1", KEY)

    def fails() -> None:
        with staged(output, "another", ("engine",)) as stage:
            write_synced(stage.folder / "engine", b"2")
            raise ParityError("no")

    with pytest.raises(ParityError):
        fails()
    assert (output / "engine").read_bytes() == b"1"
    assert left(tmp_path) == ["out"]


def test_nothing_of_another_kind_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").touch()
    with pytest.raises(OutputError, match="out: has no engine, and `overwrite` replaces no other folder"):
        replaced_by(output, b"2", KEY)
    assert left(output) == ["thesis.txt"]
    assert left(tmp_path) == ["out"]


def test_one_file_of_a_name_that_others_use_does_not_make_a_folder_ours(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "manifest.json").touch()  # of a browser's extension, say
    with pytest.raises(OutputError, match=r"out: has no build\.json, and `overwrite` replaces no other folder"):
        staged(output, KEY, ("manifest.json", "build.json")).__enter__()
    assert left(output) == ["manifest.json"]


def test_a_link_to_an_output_is_not_replaced(tmp_path: Path) -> None:
    replaced_by(tmp_path / "mine", b"1", KEY)
    (tmp_path / "out").symlink_to(tmp_path / "mine")
    with pytest.raises(OutputError, match="out: is a link, and `overwrite` replaces no link"):
        replaced_by(tmp_path / "out", b"2", KEY)
    assert left(tmp_path) == ["mine", "out"]


def test_one_killed_after_the_exchange_is_known_for_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    replaced_by(output, b"1", KEY)

    def killed(new: Path, old: Path) -> None:
        exchange(new, old)
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_file, "exchange", killed)
    with pytest.raises(KeyboardInterrupt):
        replaced_by(output, b"2", "another")
    monkeypatch.undo()
    with staged(output, "another", ("engine",)) as stage:
        assert stage.is_published
    assert (output / "engine").read_bytes() == b"2"
    assert left(tmp_path) == ["out"]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_link_replaces_what_an_interrupted_run_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    source, target = tmp_path / "weights", tmp_path / "link"
    source.write_bytes(b"weights")
    target.write_bytes(b"wei")
    if not has_links:

        def refuse(*_paths: Path) -> None:
            raise PermissionError

        monkeypatch.setattr(os, "link", refuse)
    link(source, target)
    assert target.read_bytes() == b"weights"
    assert target.samefile(source) == has_links
