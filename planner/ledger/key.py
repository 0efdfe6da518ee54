"""What a recorded step depends on, found without importing any of it: the key it is kept under."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import planner
from planner.core.schema import FactoryModel, Model, TrainSetting
from planner.ledger.ledger import WORKSPACE_VARIABLE

Key = dict[str, Any]
OURS = frozenset(("planner", "search"))
# The rooms whose code decides what a recorded ledger holds.
MAKERS = ("core/schema", "ledger", "libraries", "memory", "step", "recording", "training")


def ledger_key(model: Model, setting: TrainSetting, batch: int) -> Key | None:
    """All that decides the ledger: the model, what of its source lies outside installed packages,
    the setting without its batch, and versions. None where a factory's source cannot be found."""
    packages = {"torch", getattr(model, "library", "")}
    if setting.needs_torchao:
        packages.add("torchao")
    sources: dict[str, str] = {}
    if isinstance(model, FactoryModel):
        if _source_of(model.parts[0]) is None:
            return None
        found = _read_sources(model.parts[0])
        sources = found.digests
        packages |= found.packages
    return {
        "title": model.title,
        "model": {"kind": type(model).__name__, **model.model_dump(mode="json")},
        "setting": setting.model_dump(mode="json", exclude={"batch_size"}),
        "batch": batch,
        "sources": sources,
        "workspace": os.environ.get(WORKSPACE_VARIABLE, ""),
        "versions": _versions(packages - OURS),
    }


def name_key(fields: Key) -> Key:
    """Of what a library says of a model's name; `fields` tell which."""
    library = fields["library"]
    return {
        "title": f"{library}:{fields['name']}",
        "name": fields,
        "versions": _versions({library, "torch"}),
    }


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those installed, of Python and of planner."""
    return {
        "planner": f"{planner.__version__} ({own_digest()})",
        "python": ".".join(map(str, sys.version_info[:2])),
        **{name: found for name in sorted(packages) if (found := _version(name))},
    }


class _Sources(NamedTuple):
    """The digest of each file of the user's that importing a module reads, by its module's name;
    the installed packages that these files import; and the files, with when they were changed."""

    digests: dict[str, str]
    packages: set[str]
    files: dict[str, tuple[Path, int]]


@cache
def _read_sources(module: str) -> _Sources:
    digests: dict[str, str] = {}
    files: dict[str, tuple[Path, int]] = {}
    packages, seen = set(OURS), set[str]()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in seen or top in packages or top in sys.stdlib_module_names:
            continue
        seen.add(name)
        file = _source_of(name)
        if file is None:  # a name in a module, or what has no Python source
            continue
        if _is_installed(file):
            packages.add(top)
            continue
        files[name] = (file, _changed_ns(file))
        data = file.read_bytes()
        digests[name] = hashlib.sha256(data).hexdigest()[:16]
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        above = name.rpartition(".")[0]
        waiting += [*_imported(data, package), *([above] if above else [])]
    return _Sources(digests, packages, files)


def have_changed(module: str) -> bool:
    """Whether a module's files are others than those of its keys so far; if so, the next key is of
    them. Of a module without a file nobody can tell."""
    files = _read_sources(module).files
    first, _ = files.get(module, (None, 0))
    same = first == _source_of(module) and all(_changed_ns(f) == at for f, at in files.values())
    if first is None or not same:
        _read_sources.cache_clear()
        return True
    return False


def _changed_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _source_of(module: str) -> Path | None:
    """The Python file of a module, which is not imported for it."""
    first, *rest = module.split(".")
    for base in _folders(first):
        place = base.joinpath(first, *rest)
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                return file
    return None


def _folders(package: str) -> Iterator[Path]:
    """Where a package may lie: the current folder, Python's path, and where an editable install
    says that it is."""
    yield from (Path.cwd(), *map(Path, sys.path))
    with suppress(ValueError):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]


def _is_installed(file: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def _imported(source: bytes, package: str) -> Iterator[str]:
    """The names that a file of `package` imports: modules, and what may be a module in one."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def _version(package: str) -> str:
    try:
        return version(package) if package else ""
    except PackageNotFoundError:
        return ""


@cache
def own_digest(rooms: tuple[str, ...] = MAKERS) -> str:
    """Of the source that makes ledgers, or of other rooms (from where `planner` lies, "." for all
    of it): while it is worked on its version says too little."""
    digest = hashlib.sha256()
    for room in rooms:
        for file in sorted((Path(planner.__file__).parent / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
