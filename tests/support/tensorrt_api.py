"""The interface of NVIDIA's Python bindings, read from the bindings themselves without TensorRT or a GPU.

The bindings link against three libraries and nine entry points of them. Three libraries that only have those, made by
the C compiler, let the bindings be imported; every class then states its methods, keywords and types in docstrings.
``surface_of`` reads them, ``write_stubs`` turns them into type stubs, against which mypy checks the back end.

As a program: ``python tests/support/tensorrt_api.py FOLDER`` records what the back end uses of the bindings that were
unpacked into FOLDER, in ``tests/golden/tensorrt_api``: for releases that cannot be installed beside the pinned one.
"""

import ast
import json
import keyword
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ENTRY_POINTS = {
    "nvinfer": (
        *("createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL"),
        *("getPluginRegistry", "getBuilderPluginRegistry"),
    ),
    "nvonnxparser": ("createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getNvOnnxParserVersion"),
    "nvinfer_plugin": ("initLibNvInferPlugins",),
}
ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "tests" / "golden" / "tensorrt_api"
# Runs in a process of its own: what it imports would stay. Members come with what their docstrings say of them.
_READER = """
import json, sys
sys.path[:0] = sys.argv[1:]
import tensorrt_bindings as trt

def signatures(function):
    lines = [line.strip() for line in (getattr(function, "__doc__", None) or "").splitlines()]
    return [line for line in lines if " -> " in line and "(" in line and not line.startswith(":")]

def members(cls):
    for name in dir(cls):
        value = getattr(cls, name)
        if isinstance(value, type):
            if name != "__class__":
                yield name, {"class": described(value)}
        elif isinstance(value, cls):
            yield name, {"constant": True}
        elif isinstance(value, property):
            yield name, {"get": signatures(value.fget), "set": value.fset is not None}
        elif callable(value) and (found := signatures(value)):
            yield name, {"call": found}

def described(cls):
    bases = [base.__name__ for base in cls.__bases__ if base.__module__ == cls.__module__]
    return {"bases": bases, "buffer": "buffer protocol" in (cls.__doc__ or ""), "members": dict(members(cls))}

classes = {name: described(value) for name, value in vars(trt).items() if isinstance(value, type)}
print(json.dumps({"version": trt.__version__, "classes": classes}))
"""
# Names of some of them in C++.
_OTHER_NAMES = {"IParserError": "ParserError", "IBuilder": "Builder", "IRefitter": "Refitter", "IRuntime": "Runtime"}
_PLAIN = {"int", "float", "bool", "str", "None", "bytes"}


def make_libraries(folder: Path, major: int) -> None:
    """The three libraries of TensorRT ``major``, with nothing behind their entry points."""
    for library, names in ENTRY_POINTS.items():
        file = f"lib{library}.so.{major}"
        code = "".join(f"void {name}(void) {{}}\n" for name in names)
        arguments = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{file}", "-x", "c", "-", "-o", str(folder / file)]
        subprocess.run(arguments, input=code, text=True, check=True, capture_output=True)


def surface_of(*places: Path) -> dict[str, Any]:
    """Every class of the bindings in this environment, or of those unpacked into ``places``."""
    with tempfile.TemporaryDirectory() as folder:
        for major in (10, 11):
            make_libraries(Path(folder), major)
        environment = {**os.environ, "LD_LIBRARY_PATH": folder}
        command = [sys.executable, "-W", "ignore", "-c", _READER, *map(str, places)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def touched(surface: Mapping[str, Any], sources: Iterable[str]) -> dict[str, Any]:
    """The part of ``surface`` that programs can reach: classes that they name, and what the members return that they
    name, over and over; of those classes only the members that they name."""
    words = set(re.findall(r"\w+", " ".join(sources)))
    kept: dict[str, Any] = {}
    waiting = [name for name in surface["classes"] if name in words]
    while waiting:
        name = waiting.pop()
        if name in kept or name not in surface["classes"]:
            continue
        cls = surface["classes"][name]
        members = {key: facts for key, facts in cls["members"].items() if key in words or key.startswith("__")}
        kept[name] = {**cls, "members": members}
        waiting += [*cls["bases"], *re.findall(r"\w+", json.dumps(members))]
    return {"version": surface["version"], "classes": dict(sorted(kept.items()))}


def write_stubs(surface: Mapping[str, Any], package: Path) -> None:
    """``package/__init__.pyi``: the surface as types. A class that it lacks is ``object``, without a method."""
    package.mkdir(parents=True)
    known = set(surface["classes"]) | {
        f"{outer}.{name}"
        for outer, cls in surface["classes"].items()
        for name, member in cls["members"].items()
        if "class" in member
    }
    # The bindings break rules of Python's types, such as overloads that differ in nothing.
    lines = ["# mypy: ignore-errors", "from collections.abc import Iterator", "from typing import ClassVar, overload"]
    lines.append("__version__: str")
    for name, cls in surface["classes"].items():
        lines += _class(name, cls, known, "")
    (package / "__init__.pyi").write_text("\n".join(lines) + "\n")


def _class(name: str, cls: Mapping[str, Any], known: set[str], indent: str, path: str = "") -> Iterator[str]:
    path = f"{path}.{name}" if path else name
    bases = ", ".join(base for base in cls["bases"] if base in known)
    yield f"{indent}class {name}({bases}):"
    inner = f"{indent}    "
    yield f"{inner}..."
    members = cls["members"]
    for member, facts in sorted(members.items(), key=lambda item: "class" not in item[1]):
        if "class" in facts:
            yield from _class(member, facts["class"], known, inner, path)
        elif "constant" in facts:
            yield f"{inner}{member}: ClassVar[{path}]"
        elif "get" in facts:
            kind = _type(facts["get"][0].rpartition(" -> ")[2], known) if facts["get"] else "object"
            yield from (f"{inner}@property", f"{inner}def {member}(self) -> {kind}: ...")
            if facts["set"]:
                yield from (f"{inner}@{member}.setter", f"{inner}def {member}(self, value: {kind}) -> None: ...")
        elif not member.startswith("__") or member in ("__init__", "__int__", "__len__"):
            calls = [call for call in facts["call"] if "*args, **kwargs" not in call]
            for call in calls:
                yield from ([f"{inner}@overload"] if len(calls) > 1 else [])
                result = _type(call.rpartition(" -> ")[2], known)
                yield f"{inner}def {member}({_parameters(call, known)}) -> {result}: ..."
    if {"__len__", "__getitem__"} <= members.keys():
        yield f"{inner}def __iter__(self) -> Iterator[int]: ..."
    if cls["buffer"]:
        yield f"{inner}def __buffer__(self, flags: int, /) -> memoryview: ..."


def _parameters(call: str, known: set[str]) -> str:
    inside = call[call.index("(") + 1 : call.rindex(") -> ")]
    found, optional = [], ""
    for number, part in enumerate(_split(inside)):
        name, _, rest = part.strip().partition(":")
        kind, default, _ = rest.partition(" = ")
        if number == 0 and name in ("self", "arg0"):
            found.append("self")
        elif name in ("/", "*"):
            found.append(name)
        else:
            optional = " = ..." if default else optional  # Python wants one behind the first that has it
            name += "_" if keyword.iskeyword(name) else ""
            found.append(f"{name}: {_type(kind, known)}{' | None' if rest.endswith('= None') else ''}{optional}")
    return ", ".join(found)


def _split(text: str) -> list[str]:
    """At the commas that stand in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(<{") - (letter in "])>}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _type(text: str, known: set[str]) -> str:
    """A type of the docstrings as Python's, or ``object``."""
    text = re.sub(r"tensorrt_bindings\.tensorrt\.|typing\.|collections\.abc\.|typing_extensions\.", "", text.strip())
    if match := re.fullmatch(r"(?:List|list|Sequence)\[(.*)\]", text):
        return f"list[{_type(match[1], known)}]"
    if match := re.fullmatch(r"(?:Tuple|tuple)\[(.*)\]", text):
        return f"tuple[{', '.join(_type(part, known) for part in _split(match[1]))}]"
    text = text.rpartition("::")[2]
    text = _OTHER_NAMES.get(text, text)
    if text in ("SupportsInt", "SupportsIndex"):
        return "int"
    if text in ("buffer", "Buffer"):
        return "bytes"
    if text in _PLAIN or text in known:
        return text
    return "list[int]" if text in ("tuple", "list") else "object"


def importers(module: str) -> list[Path]:
    """The package's files that import ``module`` or a part of it."""
    packages = [ROOT / name for name in ("profiles", "runtime", "exporters", "compiler", "tools")]
    return [path for package in packages for path in sorted(package.rglob("*.py")) if _imports(path, module)]


def _imports(path: Path, module: str) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(name == module or name.startswith(f"{module}.") for name in names):
            return True
    return False


def main(places: list[str]) -> None:
    """Writes a record of the bindings in each folder."""
    sources = [path.read_text() for path in importers("tensorrt")]
    for place in places:
        surface = touched(surface_of(Path(place)), sources)
        text = json.dumps(surface, indent=1, sort_keys=True)
        (RECORDS / f"{surface['version']}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
