"""The storages of two traced steps, as text to lay beside another list of them.

python -m planner.trace timm:swin_tiny_patch4_window7_224 --batch-size 2 precision=bf16
python -m planner.trace my_models:build batch_size=4 optimizer=sgd
"""

from __future__ import annotations

import argparse
import sys

from planner.errors import PlannerError, unknown_name
from planner.libraries.registry import SPECS
from planner.schema import FactoryModel, SwinConfig, TrainSetting, parse
from planner.trace.dump import format_events
from planner.trace.ledger import build_for
from planner.trace.run import trace_training


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m planner.trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="LIBRARY:NAME or package.module:factory")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--in-place", action="store_true", help="sum gradients as eager does")
    parser.add_argument("setting", nargs="*", help="FIELD=VALUE of the training setting")
    given = parser.parse_intermixed_args()
    fields = dict(entry.split("=", 1) for entry in given.setting)
    try:
        setting = parse(TrainSetting, {"batch_size": given.batch_size, **fields}, "the setting")
        model = find_model(given.model)
        sums = "in_place" if given.in_place else "out_of_place"
        trace = trace_training(build_for(model, setting), model, setting, gradient_sums=sums)  # type: ignore[arg-type]
    except PlannerError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    print("\n".join(format_events(trace)))


def find_model(text: str) -> SwinConfig | FactoryModel:
    """A published name of a library, else a factory of the user's own."""
    library, _, name = text.partition(":")
    if library not in SPECS:
        return FactoryModel(factory=text)
    found = SPECS[library].find(name)
    if found is None:
        raise unknown_name(f"model of {library}", name, SPECS[library].published)
    return found


if __name__ == "__main__":
    main()
