"""The damage driver: one seed damages the files of one subject in one way, and uses them.

Acceptable is a refusal in one line, the answer of the whole files, or another answer that ``check="full"`` finds out.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

from nestforge.errors import NestforgeError

from ..outcomes import Result
from ..worker import GOLDEN, begin, golden_bundles
from .subjects import (
    ArraysSubject,
    BundleSubject,
    CalibrationSubject,
    CheckpointSubject,
    Files,
    ForgedBundle,
    IndexSubject,
    ProfileSubject,
    Subject,
    TokenizerSubject,
    Unprintable,
    bundle_files,
    calibrated_files,
)

# Characters of a message; paths in it are short here.
LONGEST_MESSAGE = 800


def open_driver(folder: Path) -> Callable[[int], Result]:
    """See the package. Subjects take turns by seed, bundles more often than the rest."""
    bundles = golden_bundles()
    subjects: list[Subject] = []
    for path in bundles:
        files = bundle_files(path)
        subjects += [BundleSubject(path.name, files), ForgedBundle(f"forged {path.name}", files)]
    subjects.append(BundleSubject("calibrated bundle-exits", calibrated_files(GOLDEN / "bundle-exits")))
    subjects += [
        CheckpointSubject(GOLDEN / "peft" / "bert" / "base"),
        ProfileSubject(),
        TokenizerSubject(bundles[0]),
        ArraysSubject(),
    ]
    subjects += [IndexSubject(GOLDEN / "bundle-ranges", folder), CalibrationSubject(GOLDEN / "bundle-exits")]
    sites = [Site(subject, folder / f"subject-{number}") for number, subject in enumerate(subjects)]
    return lambda seed: sites[seed % len(sites)].attempt(seed)


class Site:
    """A folder that holds a subject's files, whole again after each attempt."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self._subject = subject
        self._folder = folder
        folder.mkdir()
        self._write(subject.files)
        self._expected = {way: subject.use(folder, way) for way in subject.ways}

    def attempt(self, seed: int) -> Result:
        """Damages the files as ``seed`` says, uses them, and restores them."""
        subject, rng = self._subject, Random(f"{self._subject.name} {seed}")
        files, how = subject.change(rng)
        if all(subject.files.get(name) == content for name, content in files.items()):
            return Result(seed, "skipped", subject.name, how)
        begin(subject.name, how)
        self._write(files)
        try:
            outcome, message = self._outcome(rng.choice(subject.ways))
        finally:
            self._write({name: subject.files[name] for name in files})
        return Result(seed, outcome, subject.name, how, message)

    def _write(self, files: Files) -> None:
        # Never into a file that a session may still map.
        for name, content in files.items():
            (self._folder / name).unlink(missing_ok=True)
            (self._folder / name).write_bytes(content)

    def _outcome(self, way: str) -> tuple[str, str]:
        refusal, answer = _tried(lambda: self._subject.use(self._folder, way))
        if refusal is not None:
            return refusal
        if answer == self._expected[way]:
            return "same", ""
        if not self._subject.sealed:
            return "answered", ""
        refusal, _ = _tried(lambda: self._subject.check_fully(self._folder))
        if refusal is None:
            return "wrong", f"{answer!r:.300}"
        return ("found by full", refusal[1]) if refusal[0] == "refused" else refusal


def _tried(call: Callable[[], object]) -> tuple[tuple[str, str] | None, object]:
    """The outcome and message of a call that raises, or None and what it returned."""
    try:
        return None, call()
    except NestforgeError as failure:
        text = str(failure)
        fine = text.isprintable() and 0 < len(text) <= LONGEST_MESSAGE
        return ("refused" if fine else "unprintable", repr(text)[:600]), None
    except Unprintable as failure:
        return ("unprintable", str(failure)), None
    except MemoryError:
        return ("memory", traceback.format_exc()[-1500:]), None
    except BaseException as failure:  # whatever it is, it is what this driver looks for
        if isinstance(failure, (KeyboardInterrupt, GeneratorExit)):
            raise
        return ("escaped", traceback.format_exc()[-1500:]), None
