"""How to build the real module of any model: a user's factory, found, called and checked, or a
library. Imports no torch before a library or a factory does."""

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


def load_factory(spec: str) -> Callable[[], Any]:
    """The function that `spec` (`package.module:name`) names, with its failures reported.

    The current directory is searched first, as `python -m` does. Calling the result calls the
    factory: its output goes to standard error, and PlannerError is raised if it raises.
    `planner.training.tasks.as_task` says what it may return. The name may also be that of a task.
    Raises UsageError if there is no such module or name, PlannerError if importing it fails.
    """
    if not is_factory(spec):
        raise UsageError(
            f"a factory is written package.module:name, and {spec!r} is not.",
            "For example my_models.swin:build, where build() returns the torch.nn.Module.",
        )
    module_name, _, attribute = spec.partition(":")
    factory = _find_attribute(_import_module(module_name, spec), module_name, attribute)
    return lambda: _call_factory(factory, spec)


def _import_module(module_name: str, spec: str) -> ModuleType:
    current_folder = str(Path.cwd())
    if current_folder not in sys.path:
        sys.path.insert(0, current_folder)
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
    """Raises UsageError if the package that `spec` begins with does not exist, or if `spec` names a
    file in place of a module. Both are checked before anything is imported."""
    module, _, attribute = spec.partition(":")
    package, *names = module.split(".")
    if names[-1:] == ["py"] and Path(*module.split(".")[:-1]).with_suffix(".py").is_file():
        raise UsageError(
            f"{module!r} is a file, and a factory is of a module.",
            f"Write {module.removesuffix('.py')}:{attribute}.",
        )
    if package == "__main__":
        raise UsageError(
            f"{spec} is of the program that runs, and another process imports the factory.",
            f"Write it into a file of the current folder: my_model:{attribute}.",
        )
    is_local = package in sys.modules or Path(package).is_dir() or Path(f"{package}.py").is_file()
    if not is_local and importlib.util.find_spec(package) is None:
        raise _no_module(package, spec)


def _no_module(name: str, spec: str) -> UsageError:
    return UsageError(
        f"there is no module {name!r} (for the factory {spec}).",
        f"Run it where {name.partition('.')[0]}.py is, or put that folder on PYTHONPATH: it is "
        f"neither in {Path.cwd()} nor installed.",
    )


def _find_attribute(module: ModuleType, module_name: str, attribute: str) -> Callable[[], Any]:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            own = [n for n in public if getattr(vars(module)[n], "__module__", "") == module_name]
            write = f"Write def {attribute}() there, which returns the module."
            way_out = f"It defines {', '.join(own[:8])}." if own else write
            raise unknown_name(f"name in {module_name}", attribute, public, way_out)
        value = getattr(value, part)
    if _is_task(value):
        return lambda: value
    if not callable(value):
        raise UsageError(
            f"{module_name}:{attribute} is {_describe_value(value)}, and a factory is a function.",
            "Name a function (or class) that is called without arguments and returns the model.",
        )
    return value  # type: ignore[no-any-return]


def _is_task(value: Any) -> bool:
    """Whether `value` is a task, or an object with some of its methods, whose faults `as_task`
    reports. A class or a function with them is a factory of tasks."""
    has = [hasattr(value, name) for name in ("module", "batch", "loss")]
    return not isinstance(value, type) and (all(has) or (any(has) and not callable(value)))


def _call_factory(factory: Callable[[], Any], spec: str) -> Any:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return factory()
    except PlannerError:
        raise
    except (Exception, SystemExit) as error:
        raise _failure(f"{spec}()", spec, error) from error


def _failure(action: str, spec: str, error: BaseException) -> PlannerError:
    """The failure in one line: the exception, and the line of the user's code that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_user_file(f.filename)]
    frames *= not isinstance(error, SyntaxError)  # it names its own line
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    message = " ".join(str(error).split())
    return PlannerError(
        f"{action} raised {type(error).__name__}{f': {message}' if message else ''}{place}.",
        f'Try it by itself: python -c "import {spec.partition(":")[0]} as m; '
        f'm.{spec.partition(":")[2]}()"',
    )


def _is_user_file(filename: str) -> bool:
    return filename != __file__ and not filename.startswith("<frozen ")


def _describe_value(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a value of type {type(value).__name__}"


Build = Callable[[], Any]
"""Builds a module, or what else a user's factory returns (`planner.training.tasks.as_task`)."""


def make_builder(model: Model, setting: TrainSetting) -> Build:
    """The function that builds the module of `model`: that of its library, or the user's factory,
    which may return a task.

    Raises UsageError or PlannerError, and so does calling the result.
    """
    if isinstance(model, FactoryModel):
        declare_missing_operators()  # the factory may import torchvision
        return load_factory(model.factory)
    if isinstance(model, NamedModel):
        return partial(build_named, model, setting.attention)
    spec = find_library(model.library)
    return partial(spec.build, model, spec.resolve(model, setting))
