"""timm's `train.py`, watched: `python -m planner.watching.timm --plan RUN train.py ARGUMENTS`.

That script has no hooks and takes no callbacks, so it runs here as it is, in this process, with
what stands around it watched: `timm.data.create_loader` (and `create_naflex_loader`) gives a
training loader that is timed, and a step of the optimizer is seen by the hook that torch has for
all optimizers. Not a line of the script is changed. Under torchrun: `torchrun … -m
planner.watching.timm train.py …`.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from planner.watching.watch import Watch

_MAKERS = ("create_loader", "create_naflex_loader")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m planner.watching.timm", description=__doc__)
    parser.add_argument("--plan", help="what 'planner tune' wrote, or an estimate's JSON")
    parser.add_argument("--log", help="folder for watch.jsonl (that of the plan)")
    parser.add_argument("script", help="timm's train.py")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="its own arguments")
    options = parser.parse_args(arguments)
    with Watch(options.plan, options.log) as watch:
        hook(watch)
        sys.argv = [options.script, *options.rest]
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        runpy.run_path(options.script, run_name="__main__")


def hook(watch: Watch) -> None:
    """Watch the training loaders that timm makes and the optimizers that torch runs, from now on.
    A fault here is the watch's, and the script runs without."""
    with watch._survive("timm cannot be hooked"):
        from planner.libraries.missing_operators import declare_missing_operators

        declare_missing_operators()  # of torchvision, which timm imports
        import timm.data
        from torch.optim.optimizer import register_optimizer_step_post_hook

        for name in _MAKERS:
            maker = getattr(timm.data, name, None)
            if maker is not None:
                setattr(timm.data, name, _timing(maker, watch))
        register_optimizer_step_post_hook(lambda *_: watch.step())


def _timing(maker: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    @functools.wraps(maker)
    def made(*args: Any, **kwargs: Any) -> Any:
        loader = maker(*args, **kwargs)
        if inspect.signature(maker).bind(*args, **kwargs).arguments.get("is_training"):
            watch.time(loader)
        return loader

    return made


if __name__ == "__main__":
    main()
