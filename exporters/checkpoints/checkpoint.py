"""A checkpoint on disk, read without torch: configuration, tensor headers, hashes. Nothing here loads weights."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ...bundle.files import stream_sha256
from ...errors import CheckpointError
from ...outside import library_errors
from ...outside_file import folder_problem, read_json

# By it sentence-transformers says which modules run behind the model (exporters/sentence_transformers/).
MODULES_FILE = "modules.json"
_MAX_NAME_LENGTH = 120
_TOKENIZER_FILE = "tokenizer.json"
# By these transformers makes a tokenizer where there is no such file.
_VOCABULARY_FILES = (
    *("vocab.txt", "vocab.json", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_PICKLED = "pickled weights are refused since loading them can run code"
CONFIG_SAYS = "config.json says"
# Classes of several media whose text model is one by itself, and its class; its tensors are called so.
_TEXT_PARTS = {"Gemma3nForConditionalGeneration": "Gemma3nForCausalLM"}
_TEXT_TENSORS = ("model.language_model.", "lm_head.")
_READABLE_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class TensorHeader:
    """Shape and storage type of one tensor, as its safetensors header states them."""

    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face style folder: ``config.json`` and safetensors weights, in one file or sharded with an index.

    A model that is not trained yet has no ``tensors``; ``missing`` then says why, in one line. Its ``folder`` need not
    exist. ``left_out``: the parts of the folder's model that this is not, if it is not the whole. ``hub`` is the name
    and the commit, ``OWNER/NAME@COMMIT``, of one that was fetched.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader]
    missing: str | None = None
    left_out: str | None = None
    hub: str | None = None

    @property
    def has_weights(self) -> bool:
        return self.missing is None

    @property
    def stated_in(self) -> str:
        """Name of the model in messages."""
        return str(self.folder / "config.json")

    def misfit(self, problem: str) -> CheckpointError:
        """Error for a ``problem`` of its configuration."""
        return CheckpointError(f"{self.stated_in}: {problem}")

    def not_finite(self, tensor: str) -> CheckpointError:
        """Error for a ``tensor`` that no engine could answer with."""
        return CheckpointError(f"{self.folder}: tensor {tensor} holds NaN or infinite values")

    def lacks(self, tensor: str) -> CheckpointError:
        """Error for a ``tensor`` that the model has and its files have not."""
        return CheckpointError(f"{self.folder}: tensor {tensor:.200} is missing from the weights")

    def has_no_place(self, tensor: str) -> CheckpointError:
        """Error for a ``tensor`` of its files that the model has not."""
        return CheckpointError(
            f"{self.folder}: tensor {tensor!r:.200} has no place in the model that config.json describes"
        )

    def header(self, tensor: str, shape: Sequence[int], says: str = CONFIG_SAYS) -> TensorHeader:
        """The header of a ``tensor``. Raises CheckpointError for one that is missing, holds no floating-point numbers,
        or is not of the ``shape``; ``says`` names its source."""
        header = self.tensors.get(tensor)
        if header is None:
            raise self.lacks(tensor)
        if header.shape != tuple(shape):
            raise CheckpointError(
                f"{self.folder}: tensor {tensor:.200} has shape {list(header.shape)}; expected {list(shape)} as {says}"
            )
        if header.dtype not in _READABLE_DTYPES:
            raise CheckpointError(
                f"{self.folder}: tensor {tensor:.200} holds {header.dtype}; expected F32, F16 or BF16"
            )
        return header

    def require_weights(self) -> None:
        """Raises CheckpointError for a model that is not trained yet."""
        if self.missing is not None:
            raise CheckpointError(self.missing)

    @property
    def name(self) -> str:
        """The last part of its name on the hub, of what ``config.json`` calls the model, else the folder's name; always
        one short line."""
        if self.hub is not None:
            return self.hub.partition("@")[0].rpartition("/")[2]
        stated = self.config.get("_name_or_path")
        name = stated.rstrip("/").rpartition("/")[2] if isinstance(stated, str) else ""
        return name if name.isprintable() and 0 < len(name) <= _MAX_NAME_LENGTH else self.folder.resolve().name

    @property
    def has_modules(self) -> bool:
        """Whether this is a folder of sentence-transformers."""
        return (self.folder / MODULES_FILE).is_file()

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """The file by which texts are tokenised, else those of a vocabulary that one is made of; none of a model that
        takes no text."""
        whole = self.folder / _TOKENIZER_FILE
        vocabulary = (self.folder / name for name in _VOCABULARY_FILES)
        return (whole,) if whole.is_file() else tuple(path for path in vocabulary if path.is_file())

    @property
    def architecture(self) -> str | None:
        """Name of the model class that ``config.json`` states, or None: sentence-transformers takes the base model,
        whatever class was saved."""
        named = None if self.has_modules else self.config.get("architectures")
        return str(named[0] if isinstance(named, list) else named) if named else None

    def class_among(self, known: Collection[str]) -> str:
        """The one of the ``known`` classes that ``config.json`` names; without a name it is the base model, the first,
        as for transformers. Raises CheckpointError for another."""
        name = self.architecture or next(iter(known))
        if name not in known:
            raise self.misfit(f"architecture {name!r:.80} is not supported; supported are {', '.join(known)}")
        return name

    def source_files(self) -> list[Path]:
        """The files of the folder itself that say what the model is, sorted by name (those of modules beside it are
        read by exporters/sentence_transformers/). Raises CheckpointError without weights."""
        self.require_weights()
        weights = {self.folder / header.file for header in self.tensors.values()}
        files = {*weights, *self.folder.glob("*.json"), *self.tokenizer_files}
        return sorted(path for path in files if path.is_file())


def open_checkpoint(folder: Path, untrained: bool = False) -> Checkpoint:
    """Reads the headers of the checkpoint in ``folder``; where ``untrained``, ``config.json`` alone is enough.

    Raises CheckpointError for a missing, damaged or refused (pickle) file.
    """
    if problem := folder_problem("model", folder):
        raise CheckpointError(problem)
    config = read_json(folder / "config.json", CheckpointError)
    files = _weight_files(folder)
    if not files:
        missing = (
            f"{folder / 'model.safetensors'}: no such file; expected it or model.safetensors.index.json with its shards"
        )
        if not untrained:
            raise CheckpointError(missing)
        return Checkpoint(folder, config, {}, missing)
    tensors: dict[str, TensorHeader] = {}
    for path in files:
        tensors.update(read_headers(path, path.name))
    return Checkpoint(folder, config, tensors)


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """The text model in a ``checkpoint`` of several media that has one by itself, with its tensors alone; any other as
    it is. Raises CheckpointError for a configuration that does not describe it."""
    architecture = _TEXT_PARTS.get(checkpoint.architecture or "")
    if architecture is None or checkpoint.has_modules:
        return checkpoint
    text = checkpoint.config.get("text_config")
    if not isinstance(text, dict):
        raise checkpoint.misfit("text_config: expected the configuration of the text model")
    config = {**text, "architectures": [architecture], "_name_or_path": checkpoint.config.get("_name_or_path")}
    tensors = {name: header for name, header in checkpoint.tensors.items() if name.startswith(_TEXT_TENSORS)}
    return replace(checkpoint, config=config, tensors=tensors, left_out="images and audio")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as stream:
        return stream_sha256(stream)


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        weight_map = read_json(index, CheckpointError).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: expected a weight_map of tensor names to files")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{index}: shard {name!r} leaves the model folder; expected a plain file name")
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder / name}: no such file; {index.name} lists it")
        return [folder / name for name in names]
    pickles = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]}: {_PICKLED}; convert once with transformers: "
            f"AutoModel.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)"
        )
    return []


def open_weights(path: Path, pickled: str, remedy: str) -> Checkpoint:
    """One safetensors file as a checkpoint without a configuration.

    Raises CheckpointError with the ``remedy`` where it is missing, perhaps since there is a ``pickled`` one, and for a
    damaged one.
    """
    if not path.is_file():
        if (pickle := path.with_name(pickled)).is_file():
            raise CheckpointError(f"{pickle}: {_PICKLED}; {remedy}")
        raise CheckpointError(f"{path}: no such file; {remedy}")
    return Checkpoint(path.parent, {}, read_headers(path, path.name))


def read_headers(path: Path, file: str) -> dict[str, TensorHeader]:
    """The headers of one safetensors file, which the checkpoint calls ``file``. Raises CheckpointError for damage."""
    with (
        library_errors(lambda said: CheckpointError(f"{path}: not a whole safetensors file ({said}); fetch it again")),
        safe_open(path, framework="numpy") as opened,
    ):
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a dict)
        return {name: TensorHeader(tuple(part.get_shape()), part.get_dtype(), file) for name, part in slices.items()}


def compare_with_headers(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str] | None = None,
    unused: Callable[[str], object] = lambda _: False,
    says: str = CONFIG_SAYS,
) -> None:
    """Raises CheckpointError unless the files hold exactly the parameters of ``shapes``, as floating-point numbers.

    ``names`` maps a parameter to its tensor, for every tensor of the files; by default they are called alike.
    Parameters that ``unused`` names may be there too: published files carry them for other classes of the model.
    ``says`` names the source of the shapes.
    """
    names = {name: name for name in checkpoint.tensors} if names is None else names
    for parameter, shape in shapes.items():
        if parameter not in names:
            raise checkpoint.lacks(parameter)
        checkpoint.header(names[parameter], shape, says)
    for parameter in sorted(names.keys() - shapes.keys()):
        if not unused(parameter):  # it would be passed over in silence
            raise checkpoint.has_no_place(names[parameter])
