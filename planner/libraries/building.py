"""What makes the real module of any model. Imports no torch before a library or a factory does."""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.core.errors import PlannerError, UsageError, unknown_name
from planner.core.schema import FactoryModel, Model, NamedModel, TrainSetting
from planner.core.schema.model import is_factory
from planner.libraries.names import build_named, find_library
from planner.libraries.torchvision import declare_missing_operators

# `package.module:name`: a model of the user's own, found, called and checked. Imports no torch
# before the factory does.


def load_factory(spec: str) -> Callable[[], Any]:
    """The function that `spec` (`package.module:name`) names, wrapped to report what goes wrong.

    The current directory is searched first, as `python -m` does. Calling the result calls the
    factory: what it prints goes to standard error, and PlannerError is raised where it raises.
    What it may return, `planner.training.tasks.as_task` says. A name may also be a task itself.
    Raises UsageError where there is no such module or name, PlannerError where importing fails.
    """
    if not is_factory(spec):
        raise UsageError(
            f"a factory is written package.module:name, and {spec!r} is not.",
            "For example my_models.swin:build, where build() returns the torch.nn.Module.",
        )
    module_name, _, attribute = spec.partition(":")
    factory = _find(_import(module_name, spec), module_name, attribute)
    return lambda: _call(factory, spec)


def _import(module_name: str, spec: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _failure(f"importing {module_name}", spec, error) from error
        raise _no_module(error.name, spec) from error
    except (Exception, SystemExit) as error:
        raise _failure(f"importing {module_name}", spec, error) from error


def check_factory(spec: str) -> None:
    """Raises UsageError where the package that `spec` begins with is nowhere, or a file is named in
    place of a module: both can be told before anything is imported."""
    module, _, attribute = spec.partition(":")
    package, *within = module.split(".")
    if within[-1:] == ["py"] and Path(*module.split(".")[:-1]).with_suffix(".py").is_file():
        raise UsageError(
            f"{module!r} is a file, and a factory is of a module.",
            f"Write {module.removesuffix('.py')}:{attribute}.",
        )
    if package == "__main__":
        raise UsageError(
            f"{spec} is of the program that runs, and another process imports the factory.",
            f"Write it into a file of the current folder: my_model:{attribute}.",
        )
    is_here = package in sys.modules or Path(package).is_dir() or Path(f"{package}.py").is_file()
    if not is_here and importlib.util.find_spec(package) is None:
        raise _no_module(package, spec)


def _no_module(name: str, spec: str) -> UsageError:
    return UsageError(
        f"there is no module {name!r} (for the factory {spec}).",
        f"Python looked in {Path.cwd()} and among its installed packages.",
    )


def _find(module: ModuleType, module_name: str, attribute: str) -> Callable[[], Any]:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise unknown_name(f"name in {module_name}", attribute, public)
        found = getattr(found, part)
    if _is_task(found):
        return lambda: found
    if not callable(found):
        raise UsageError(
            f"{module_name}:{attribute} is {_described(found)}, and a factory is a function.",
            "Name a function (or class) that is called without arguments and returns the model.",
        )
    return found  # type: ignore[no-any-return]


def _is_task(found: Any) -> bool:
    """An object with a task's methods, or some of them, which `as_task` tells; a class of such
    objects is called to make one, and so is a function."""
    has = [hasattr(found, name) for name in ("module", "batch", "loss")]
    return not isinstance(found, type) and (all(has) or (any(has) and not callable(found)))


def _call(factory: Callable[[], Any], spec: str) -> Any:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            made = factory()
    except PlannerError:
        raise
    except (Exception, SystemExit) as error:
        raise _failure(f"{spec}()", spec, error) from error
    return made


def _failure(what: str, spec: str, error: BaseException) -> PlannerError:
    """Whose fault it is, in one line: the exception and the line of the user's that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_of_user(f.filename)]
    frames *= not isinstance(error, SyntaxError)  # it names its own line
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    said = " ".join(str(error).split())
    return PlannerError(
        f"{what} raised {type(error).__name__}{f': {said}' if said else ''}{place}.",
        f'Try it by itself: python -c "import {spec.partition(":")[0]} as m; '
        f'm.{spec.partition(":")[2]}()"',
    )


def _is_of_user(filename: str) -> bool:
    return filename != __file__ and not filename.startswith("<frozen ")


def _described(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a value of type {type(value).__name__}"


Build = Callable[[], Any]
"""Makes a module, or whatever else a user's factory returns (`planner.training.tasks.as_task`)."""


def build_for(model: Model, setting: TrainSetting) -> Build:
    """What makes the module of `model`: its library, or the user's factory, which may make a task.

    Raises UsageError or PlannerError, and so does calling the result.
    """
    if isinstance(model, FactoryModel):
        declare_missing_operators()  # of torchvision, which the factory may import
        return load_factory(model.factory)
    if isinstance(model, NamedModel):
        return partial(build_named, model, setting.attention)
    spec = find_library(model.library)
    return partial(spec.build, model, spec.resolve(model, setting))
