"""A command of ours: options under headings, and examples that run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

Headings = Mapping[str, Sequence[str]]
# What an option is of, by its parameter's name, in the order in which --help shows the headings.
HEADINGS: Headings = {
    "Model": ("image_size", "num_classes", "drop_path"),
    "Setting": (
        "batch_size", "max_batch", "accumulate", "precision", "checkpointing", "compile",
        "attention", "optimizer", "fields",
    ),
    "Device": ("device", "gpu", "memory", "headroom", "allocator"),
    "Several GPUs": ("gpus", "nodes", "parallelism", "link", "global_batch"),
    "Whole training": ("steps", "epochs", "images_per_epoch", "price_per_hour"),
    "What may change": ("keep", "allow"),
    "Data": ("data",),
    "Search": (
        "from_", "way", "start", "trials", "budget", "tolerance", "strategy", "no_baseline", "seed",
        "replay",
    ),
    "Study": ("storage", "study_name", "accept_different"),
    "Trace": ("traced", "retrace"),
    "Output": (
        "output", "title", "force", "detail", "as_json", "quiet",
        "timeline", "chrome_trace",
    ),
}  # fmt: skip
OTHERS = "Other options"
HELP_SETTINGS = {"help_option_names": ["-h", "--help"]}
FEW = 12  # options need no headings

Record = tuple[str, str]


class Command(click.Command):
    """A click command whose --help lists many options under headings, and ends with `examples`.

    `headings` are its own, shown before HEADINGS and in their place for the options they name.
    """

    def __init__(
        self, *args: Any, examples: Sequence[str] = (), headings: Headings | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        # Also where one is called by itself: click keeps the first help option that it made.
        kwargs["context_settings"] = {**HELP_SETTINGS, **(kwargs.get("context_settings") or {})}
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.headings = headings or {}
        for parameter in self.params:
            _complete_its_values(parameter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, records in self.sections(ctx):
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
                for example in self.examples:
                    formatter.write(f"  {example}\n")  # never wrapped: it is to be copied

    def sections(self, ctx: click.Context) -> list[tuple[str, list[Record]]]:
        """The options as --help shows them: (how it is written, what it does) by heading."""
        found: dict[str, list[Record]] = {}
        for heading, parameter in self._by_heading(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                found.setdefault(heading, []).append(record)
        if sum(map(len, found.values())) <= FEW:
            return [("Options", [record for records in found.values() for record in records])]
        return list(found.items())

    def _by_heading(self, ctx: click.Context) -> Iterator[tuple[str, click.Parameter]]:
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        for heading, names in (*self.headings.items(), *HEADINGS.items()):
            for option in [o for o in options if o.name in names]:
                options.remove(option)
                yield heading, option
        *others, showing_help = options  # click's own comes last
        yield from ((OTHERS, option) for option in others)
        yield (OTHERS if others else "Output"), showing_help


def _complete_its_values(parameter: click.Parameter) -> None:
    """A shell that asks for values of `parameter` gets ours, and click's where we know none."""
    usual = parameter.shell_complete

    def complete(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from planner.cli.values import complete_value

        found = complete_value(parameter, ctx, incomplete)
        return usual(ctx, incomplete) if found is None else found

    parameter.shell_complete = complete  # type: ignore[method-assign]
