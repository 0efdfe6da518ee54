"""Files of people, read within bounds; files of ours, written whole or not at all; what `--json`
prints."""

import errno
import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, Any, cast

from planner.core.errors import PlannerError, UsageError, alternatives, printable, shorten
from planner.core.units import MIB, format_bytes

# What lies in the --output of `planner tune`.
TUNE_RESULT, TUNE_PROBES = "recommendation.json", "probes.jsonl"

STANDARD_INPUT, _ANOTHER = "-", "name another file"
_GZIP = b"\x1f\x8b"
_PAIRS = "changes"  # the field that holds pairs, and is printed as an object
_SPOOL_BYTES = 64 * MIB  # of a pipe that are held in memory; more lie in a file

# A model file has some twenty fields, a recommendation a few thousand settings at most.
MAX_MODEL_BYTES = MIB // 4
MAX_RESULT_BYTES = 64 * MIB


class NoFileError(UsageError):
    """There is no such file."""


def named_path(value: object, name: str) -> Path:
    """The path that the argument `name` holds. Raises UsageError where it holds none; an empty text
    is none, since it would mean the current folder."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise UsageError(
            f"{name} is a path, and {shorten(value)} is not.",
            "Pass text, or a Path." if value else "Is a variable unset? The current folder is '.'.",
        )
    return Path(value)


def is_pipe(path: Path) -> bool:
    """Whether a path is read until its writer ends: standard input, or a named pipe."""
    return str(path) == STANDARD_INPUT or (path.exists() and stat.S_ISFIFO(path.stat().st_mode))


def opened_whole(path: Path) -> IO[bytes]:
    """A file that can be read again from its beginning, also where it is a pipe; unpacked where it
    is gzipped. Raises UsageError where standard input is closed, and OSError; reading it raises
    EOFError and zlib.error."""
    import gzip

    file = _spool(path) if is_pipe(path) else path.open("rb")
    is_packed = file.read(2) == _GZIP
    file.seek(0)
    return cast("IO[bytes]", gzip.GzipFile(fileobj=file, mode="rb")) if is_packed else file


def _spool(path: Path) -> IO[bytes]:
    import shutil
    from tempfile import SpooledTemporaryFile

    spool = cast("IO[bytes]", SpooledTemporaryFile(_SPOOL_BYTES))  # noqa: SIM115
    if str(path) != STANDARD_INPUT:
        with path.open("rb") as pipe:
            shutil.copyfileobj(pipe, spool)
    elif sys.stdin is None:
        raise UsageError("standard input is closed.", "Name a file, or pipe a log into it.")
    else:
        shutil.copyfileobj(sys.stdin.buffer, spool)
    spool.seek(0)
    return spool


def read_text(path: Path, limit_bytes: int) -> str:
    """The text of `path`, UTF-8 with or without a byte order mark. Raises UsageError where the file
    cannot be read, and where it has more than `limit_bytes` (a device may have no end)."""
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except FileNotFoundError as error:
        raise NoFileError(
            f"{path} cannot be read: {error.strerror}.", "Name a file that is there."
        ) from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder, and not a file.", "Name a file in it.") from None
    except (OSError, ValueError) as error:  # ValueError: a path that holds a NUL
        way_out = "Name a file that 'cat' can print."
        raise UsageError(f"{path} cannot be read: {_reason(error)}.", way_out) from None
    if len(data) > limit_bytes:
        raise UsageError(
            f"{path} cannot be read: it is larger than {format_bytes(limit_bytes)}.",
            "No file of this kind is so large: name another.",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        way_out = "Save it as UTF-8, or name another file."
        raise UsageError(f"{path} cannot be read: it is not text.", way_out) from None


def parse_json(text: str, source: str) -> Any:
    """The value of a JSON text. Raises UsageError, naming `source`, where it is no JSON, has a key
    twice, or has numbers or nesting beyond reason."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        reason = f"line {error.lineno}: {error.msg}"
        way_out = "Mend it there, or write it anew; 'python -m json.tool FILE' shows the place."
        raise UsageError(f"{source} is not whole JSON ({reason}).", way_out) from None
    except (RecursionError, ValueError) as error:  # a key twice, a number of thousands of digits
        way_out = "Mend it, or write it anew."
        raise UsageError(f"{source} cannot be read: {_reason(error)}.", way_out) from None


def to_json(value: Any) -> Any:
    """A value as `--json` prints it. A dataclass becomes an object of its fields and of the
    properties that its `computed` names, or what its own `as_json` returns; pairs of changes become
    an object; everything else is as pydantic writes it."""
    from pydantic_core import to_jsonable_python

    if hasattr(value, "as_json"):
        return to_json(value.as_json())
    if is_dataclass(value):
        names = (*(field.name for field in fields(value)), *getattr(value, "computed", ()))
        return {n: to_json(dict(v) if n == _PAIRS else v)
                for n, v in ((n, getattr(value, n)) for n in names)}  # fmt: skip
    if isinstance(value, Mapping):
        return {str(key): to_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    return to_jsonable_python(value)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML document. Raises UsageError as `parse_json` does, and for an alias: few
    aliases of aliases stand for more than any memory holds."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, *place: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it holds an alias (*): write out what that stands for")
            return super().compose_node(*place)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twin := _first_repeated(keys):
                line = node.start_mark.line + 1
                raise ValueError(f"{twin[:80]!r} occurs twice (from line {line} on)")
            return super().construct_mapping(node, deep)

    way_out = "Mend it there, or write it anew."
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        reason = getattr(error, "problem", None) or "it cannot be parsed"
        raise UsageError(f"{source} is not YAML: {reason}{where}.", way_out) from None
    except (RecursionError, ValueError) as error:  # a date that is none, a number of many digits
        raise UsageError(f"{source} cannot be read: {_reason(error)}.", way_out) from None


def check_output(path: str | os.PathLike[str], what: str, endings: Sequence[str]) -> Path:
    """The path of a file to which `what` ("a page") can be written.

    Raises UsageError where it names a folder or has none of the `endings`, PlannerError where no
    file can be written there.
    """
    path = named_path(path, "output")
    shown = shorten(str(path))
    example = f"{what.split()[-1]}{endings[0]}"
    try:
        if path.is_dir():
            raise UsageError(
                f"{shown} is a folder, and {what} is one file.",
                f"Name a file in it, as {printable(str(path / example))}.",
            )
        if not path.name[1:].lower().endswith(tuple(endings)):
            raise UsageError(
                f"{what}'s file name ends in {alternatives(endings)}, and {shown} does not.",
                f"For example {example}.",
            )
        if not path.parent.is_dir():
            why = f"the folder {shorten(str(path.parent))} does not exist"
            raise FileNotFoundError(errno.ENOENT, why)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "its folder may not be written to")
    except (OSError, ValueError) as error:  # ValueError: a path that holds a NUL
        raise unwritable(path, error) from None
    return path


def write_output(path: Path, data: bytes) -> Path:
    """Writes a file for a person, whole or not at all; a symbolic link stays one. Raises
    PlannerError."""
    try:
        write_whole(path.resolve(), data)
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None
    return path


def unwritable(path: Path | str, error: Exception, instead: str = _ANOTHER) -> PlannerError:
    """The error where nothing can be written, with what to do about `error`, or `instead`."""
    message = f"{shorten(str(path))} cannot be written: {_reason(error)}."
    return PlannerError(message, way_to_write(error, instead))


def way_to_write(error: Exception, instead: str) -> str:
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"Free space, or {instead}."
    if number == errno.ENOENT:
        return f"Make its folder, or {instead}."
    return f"{instead[:1].upper()}{instead[1:]}."


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all: beside `path`, then moved into its place, and on disk when
    this returns. Raises OSError."""
    beside = path.with_name(f".{os.urandom(8).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(beside, flags, 0o666), "wb") as file:  # noqa: PTH123
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def cache_directory() -> Path:
    """The folder for what can be made again: PLANNER_CACHE_DIR, or the user's own cache."""
    if folder := os.environ.get("PLANNER_CACHE_DIR"):
        return Path(folder)
    from platformdirs import user_cache_path

    return user_cache_path("planner", appauthor=False)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"{_first_repeated(key for key, _ in pairs)[:80]!r} occurs twice")
    return fields


def _first_repeated(keys: Iterable[str]) -> str:
    """The first key that stands there twice; "" where none does."""
    return next((key for key, number in Counter(keys).items() if number > 1), "")


def _reason(error: Exception) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if "integer string conversion" in str(error):
        return "a number in it has thousands of digits"
    return getattr(error, "strerror", None) or str(error)
