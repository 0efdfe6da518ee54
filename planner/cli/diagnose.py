"""`planner doctor` and `planner explain`: faults of this machine, and why a training ended."""

from pathlib import Path

from planner.cli.options import WORLD, Fields, Json, argument, of_schema, option, reads
from planner.cli.rows import one_setting, parse_gpu
from planner.cli.show import answer
from planner.core.errors import refuse_if, shorten
from planner.core.files import is_pipe
from planner.core.terminal import shows_seconds
from planner.estimation.estimate import Estimate, default_precision, estimate
from planner.machine.doctor import install_line, load_facts, read_facts
from planner.machine.findings import judge
from planner.report.doctor import facts_text

TRAINING = "The training"  # a heading of --help


class DoctorRequest(Json):
    """The request of `planner doctor`."""

    file: str | None = argument("FILE", "file", default=None)


@reads(DoctorRequest)
def doctor(request: DoctorRequest) -> int:
    """Show what is installed, which devices are available, and what slows them down.

    Exits with status 1 if something must be fixed first. FILE holds a machine as --json wrote it:
    it is judged in place of this one.

    Examples:
      planner doctor
      planner doctor --json > here.json
    """
    facts = read_facts() if request.file is None else load_facts(request.file)
    findings = judge(facts)
    is_healthy = all(finding.level != "fault" for finding in findings)
    install = install_line(facts) or None
    data = {"healthy": is_healthy, "findings": findings, "to_type": install, "machine": facts}
    answer(request, data, lambda: facts_text(facts))
    return 0 if is_healthy else 1


class ExplainRequest(Json):
    """The request of `planner explain`."""

    source: str = argument("SNAPSHOT|LOG", "file")
    model: str | None = argument("MODEL", "models", default=None)
    plan: str | None = option("What 'planner tune' or 'planner estimate --json' wrote.", "RUN",
                              TRAINING, values="file")  # fmt: skip
    gpu: str | None = option("'planner gpus' lists cards.", "NAME", TRAINING, values="gpus")
    allocator: str | None = option("Used in place of PYTORCH_CUDA_ALLOC_CONF.", "OPTIONS", TRAINING)
    fields: Fields = of_schema("one", without=WORLD)


@reads(ExplainRequest)
def explain(request: ExplainRequest) -> int:
    """Explain a training that failed or runs badly, from its log (of any size and many ranks; - is
    standard input) or a snapshot of torch's allocator.

    With --plan RUN, or MODEL and its setting, it compares what it saw with the prediction, and
    names the changes that free enough memory, with their predicted rates. Exit status 1 where
    nothing is recognised.

    Examples:
      planner explain train.log
      planner explain train.log --plan run
      planner explain - --plan run
    """
    from planner.programs import explanation
    from planner.report.programs import explanation_text

    plan: str | Estimate | None = request.plan
    gpu, allocator, source = request.gpu, request.allocator, request.source
    law = "a setting needs a model."
    refuse_if(request.fields.flags and not request.model, law, "Name MODEL behind the log.")
    if request.model is not None:
        refuse_if(plan, "a plan says the model and its setting.", "Omit --plan, or MODEL.")
        precision = default_precision(parse_gpu(gpu))
        config, setting = one_setting(request.model, request.fields, precision, "a training")
        plan = estimate(config, setting, gpu=gpu, allocator=allocator)
    ending = ", until its writer ends (Ctrl-C ends this)" if is_pipe(Path(source)) else ""
    with shows_seconds(f"Still at work on {shorten(source)}{ending}"):
        result = explanation.explain(source, plan, gpu=gpu, allocator=allocator)
    answer(request, result, lambda: explanation_text(result))
    return 0 if result.findings or result.kind != "log" else 1
