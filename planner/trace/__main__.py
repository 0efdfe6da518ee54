"""`python -m planner.trace timm:NAME [precision] [batch]`: the events of two steps, as text."""

from __future__ import annotations

import argparse

from planner.schema import SwinConfig, TrainSetting
from planner.trace.dump import format_events
from planner.trace.run import trace_training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="timm:NAME")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--in-place", action="store_true", help="gradient sums as eager does them")
    given = parser.parse_args()
    import timm

    setting = TrainSetting(batch_size=given.batch_size, precision=given.precision)
    model = SwinConfig(library="timm", image_size=(given.image_size, given.image_size))
    trace = trace_training(
        lambda: timm.create_model(given.model.removeprefix("timm:")),
        model,
        setting,
        gradient_sums="in_place" if given.in_place else "out_of_place",
    )
    print("\n".join(format_events(trace)))


if __name__ == "__main__":
    main()
