"""Each card as the driver describes it: health, modes, power, clocks, and who else is on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.core.units import format_bytes
from planner.machine.facts import Card, Facts, names
from planner.machine.findings.finding import UNKNOWN_COST, Finding
from planner.machine.hardware.catalogue import recognise_gpu
from planner.machine.hardware.throttling import DISTURBING_REASONS
from planner.machine.smi import Process, SmiCard

# From this share on what others hold is worth a warning. A judgement, not a measurement.
BUSY_SHARE = 0.05
_MEMORY_ERRORS = "NVIDIA, GPU Memory Error Management"


def judge_cards(facts: Facts) -> Iterator[Finding]:
    yield from _visibility(facts)
    for card in facts.cards:
        for finding in _one(facts, card):
            yield replace(finding, subject=card.title)
    yield from _order(facts)


def _one(facts: Facts, card: Card) -> Iterator[Finding]:
    yield from _whole(card)
    if card.smi is not None:
        yield from _health(card, card.smi)
        yield from _memory_errors(card, card.smi)
        yield from _modes(facts, card, card.smi)
        yield from _power(card, card.smi)
        yield from _clocks(card, card.smi)


def _visibility(facts: Facts) -> Iterator[Finding]:
    if facts.cards and not facts.visible:
        value = facts.variables.get("CUDA_VISIBLE_DEVICES", "")
        yield Finding(
            "fault", "card", "card.hidden",
            f"CUDA_VISIBLE_DEVICES={value} hides every GPU of this machine",
            f"environment; {facts.machine.gpus_from} lists {len(facts.cards)}",
            "everything runs on the CPU", "Unset CUDA_VISIBLE_DEVICES, or set it to 0.",
        )  # fmt: skip


def _whole(card: Card) -> Iterator[Finding]:
    """What detection alone tells, so also where nvidia-smi is missing."""
    gpu = card.gpu
    if gpu.is_split:
        instances = card.smi.mig_instances if card.smi else None
        if instances == 0:
            yield Finding(
                "fault", "card", "card.mig-empty",
                f"{card.title} is in MIG mode and has no instance",
                f"{card.told_by}: mig_mode Enabled, no mig_device",
                "CUDA sees no device on this card",
                f"sudo nvidia-smi mig -i {gpu.index} -lgip lists the sizes, and -cgi ID -C makes "
                f"one; sudo nvidia-smi -i {gpu.index} -mig 0 ends MIG mode.",
            )  # fmt: skip
        else:
            count = "" if instances is None else f" ({instances} of them)"
            yield Finding(
                "note", "card", "card.mig",
                f"{card.title} is split into MIG instances{count}: the figures here are of the "
                "whole card",
                f"{card.told_by}: mig_mode Enabled",
                "an instance has its share of the memory and of the multiprocessors",
                "Choose an instance with CUDA_VISIBLE_DEVICES=MIG-… (nvidia-smi -L lists them).",
            )  # fmt: skip
    elif recognise_gpu(gpu.name, gpu.total_bytes) is None:
        yield Finding(
            "note", "card", "card.unknown",
            f"{card.title} is not in the catalogue, so its time is not predicted",
            "planner gpus", "estimates of it have no seconds",
            "Measure it: planner doctor --rates.",
        )  # fmt: skip
    yield from _busy(card)


def _busy(card: Card) -> Iterator[Finding]:
    gpu = card.gpu
    if not gpu.total_bytes or not gpu.used_bytes or gpu.used_bytes <= BUSY_SHARE * gpu.total_bytes:
        return
    others = card.smi.processes if card.smi else ()
    who = f": {names([_process(process) for process in others])}" if others else (
        "; the driver names no process, as in a container"
    )  # fmt: skip
    yield Finding(
        "warning", "card", "card.busy",
        f"{card.title}: {format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} are in "
        "use by other processes",
        f"memory in use by {card.told_by}{who}",
        "that memory, and their share of the time: measurements beside them are not reliable",
        "End them, or choose another card with CUDA_VISIBLE_DEVICES.",
    )  # fmt: skip


def _process(process: Process) -> str:
    size = f", {format_bytes(process.used_bytes)}" if process.used_bytes is not None else ""
    return f"{process.name or 'a process'} ({process.pid}{size})"


def _health(card: Card, smi: SmiCard) -> Iterator[Finding]:
    if smi.is_lost or smi.recovery:
        said = "the driver has lost it" if smi.is_lost else f"the driver asks for: {smi.recovery}"
        yield Finding(
            "fault", "card", "card.reset", f"{card.title} needs a reset: {said}",
            f"{card.told_by}: gpu_reset_status, gpu_recovery_action, fields that say 'GPU is lost'",
            "programs on it fail",
            f"End what uses it and sudo nvidia-smi --gpu-reset -i {card.gpu.index}; if that is "
            "refused, reboot.",
        )  # fmt: skip
    elif smi.unanswered:
        yield Finding(
            "note", "card", "card.unanswered",
            f"{card.title}: the driver cannot tell {names(smi.unanswered)}",
            f"{card.told_by}: 'Unknown Error' in these fields", "those checks were left out",
            "A newer driver may answer.",
        )  # fmt: skip


def _memory_errors(card: Card, smi: SmiCard) -> Iterator[Finding]:
    """Faults of the card's memory, and what NVIDIA says to do about each."""
    ecc, reset = smi.ecc, f"sudo nvidia-smi --gpu-reset -i {card.gpu.index}"
    if ecc.rows_failed:
        yield Finding(
            "fault", "card", "card.remap-failed",
            f"{card.title} could not replace a broken row of its memory",
            f"{card.told_by}: remapped_row_failure Yes",
            f"wrong or aborted programs; the card is due for exchange ({_MEMORY_ERRORS})",
            "Run NVIDIA's field diagnostic, and have the card exchanged.",
        )  # fmt: skip
    if ecc.rows_pending or ecc.pages_pending:
        what = "remapped_row_pending" if ecc.rows_pending else "pending_retirement"
        yield Finding(
            "fault", "card", "card.reset-pending",
            f"{card.title} has found broken memory, and takes it out of use at its next reset",
            f"{card.told_by}: {what} Yes, {ecc.rows_remapped} rows remapped for uncorrectable "
            "errors",
            f"until then a program may meet it again and be ended ({_MEMORY_ERRORS})",
            f"End what uses it and {reset}.",
        )  # fmt: skip
    if ecc.uncorrectable:
        yield Finding(
            "fault", "card", "card.ecc-errors",
            f"{card.title}: {ecc.uncorrectable} uncorrectable memory errors since the driver was "
            "loaded",
            f"{card.told_by}: ecc_errors, volatile ({ecc.uncorrectable_ever} in its life)",
            "each ends the program that reads the broken word",
            f"End what uses it and {reset}; if they come again, have the card exchanged.",
        )  # fmt: skip
    if None not in (ecc.enabled, ecc.pending) and ecc.enabled != ecc.pending:
        to = "on" if ecc.pending else "off"
        yield Finding(
            "note", "card", "card.ecc-pending", f"{card.title} turns ECC {to} at its next reset",
            f"{card.told_by}: current_ecc and pending_ecc differ",
            "its memory will be another size then, so records from now will not fit it",
            f"End what uses it and {reset}, before anything is measured.",
        )  # fmt: skip


def _modes(facts: Facts, card: Card, smi: SmiCard) -> Iterator[Finding]:
    index = card.gpu.index
    mode = smi.compute_mode.lower().replace(" ", "_")
    if mode == "prohibited":
        yield Finding(
            "fault", "card", "card.prohibited", f"{card.title} is closed to all computing",
            f"{card.told_by}: compute_mode Prohibited", "CUDA programs cannot use it",
            f"sudo nvidia-smi -i {index} -c DEFAULT.",
        )  # fmt: skip
    elif mode.startswith("exclusive"):
        yield Finding(
            "note", "card", "card.exclusive", f"{card.title} serves one process at a time",
            f"{card.told_by}: compute_mode {smi.compute_mode}",
            "a probe fails while anything else runs on it",
            f"sudo nvidia-smi -i {index} -c DEFAULT, if several are to share it.",
        )  # fmt: skip
    if smi.mig != smi.mig_pending:
        yield Finding(
            "note", "card", "card.mig-pending",
            f"{card.title} turns MIG mode {'on' if smi.mig_pending else 'off'} at its next reset",
            f"{card.told_by}: current_mig and pending_mig differ", "",
            f"End what uses it and sudo nvidia-smi --gpu-reset -i {index}.",
        )  # fmt: skip
    if smi.persistence is False and not facts.is_wsl:
        yield Finding(
            "note", "card", "card.persistence", f"{card.title}: persistence mode is off",
            f"{card.told_by}: persistence_mode Disabled",
            "some seconds whenever the first program starts (NVIDIA, Driver Persistence); none "
            "while one runs",
            f"sudo nvidia-smi -i {index} -pm 1.",
        )  # fmt: skip
    if smi.has_display:
        yield Finding(
            "note", "card", "card.display", f"{card.title} drives a display",
            f"{card.told_by}: display_active Enabled",
            "the desktop's memory, and kernels that wait while it draws; how long is unknown",
            "Leave the estimate some room: --memory; or use the display of the processor's own "
            "graphics.",
        )  # fmt: skip
    if smi.driver_model == "WDDM":
        yield Finding(
            "note", "card", "card.wddm", f"{card.title} runs under Windows' display driver model",
            f"{card.told_by}: driver_model WDDM",
            "Windows manages its memory: what does not fit is moved to the host without an error",
            "Keep below the card's memory; a data-centre card can run as TCC or MCDM.",
        )  # fmt: skip


def _power(card: Card, smi: SmiCard) -> Iterator[Finding]:
    limit, default = smi.power_limit, smi.default_power_limit
    if limit and default and limit < 0.99 * default:
        yield Finding(
            "warning", "card", "card.power-limit",
            f"{card.title} is limited to {limit:g} W, and its default is {default:g} W",
            f"{card.told_by}: power limit, default_power_limit",
            "lower clocks under full load; how much depends on the model",
            f"sudo nvidia-smi -i {card.gpu.index} -pl {default:g}, if the cooling and the supply "
            "allow it.",
        )  # fmt: skip


def _clocks(card: Card, smi: SmiCard) -> Iterator[Finding]:
    found = [name for name in DISTURBING_REASONS if name in smi.reasons]
    at = f"; {smi.sm_mhz} of {smi.max_sm_mhz} MHz" if smi.sm_mhz and smi.max_sm_mhz else ""
    if found:
        heat = f", {smi.temperature} °C" if smi.temperature is not None else ""
        yield Finding(
            "warning", "card", "card.throttled", f"{card.title}: {DISTURBING_REASONS[found[0]]}",
            f"{card.told_by}: {', '.join(found)} Active{at}{heat}",
            _clock_cost(smi),
            "Check the fans, dust, the air around it and the power cables, and measure again.",
        )  # fmt: skip
    set_to, default = smi.application_mhz, smi.default_application_mhz
    if set_to and default and set_to < default:
        yield Finding(
            "warning", "card", "card.application-clocks",
            f"{card.title} is held to {set_to} MHz by its application clocks (default {default})",
            f"{card.told_by}: applications_clocks, default_applications_clocks",
            f"up to {1 - set_to / default:.0%} of what is bound by computing, by the clocks' ratio",
            f"sudo nvidia-smi -i {card.gpu.index} -rac.",
        )  # fmt: skip


def _clock_cost(smi: SmiCard) -> str:
    if not smi.sm_mhz or not smi.max_sm_mhz or smi.is_resting:
        return UNKNOWN_COST
    lost = 1 - smi.sm_mhz / smi.max_sm_mhz
    return f"up to {lost:.0%} of what is bound by computing, by the clocks' ratio now"


def _order(facts: Facts) -> Iterator[Finding]:
    """Cards that differ are numbered by speed by CUDA itself, and by their bus everywhere here."""
    kinds = sorted({card.gpu.name for card in facts.visible})
    if len(kinds) > 1 and "CUDA_DEVICE_ORDER" not in facts.variables:
        yield Finding(
            "note", "card", "card.unlike",
            "the GPUs differ: CUDA numbers them by speed, planner by their position on the bus",
            f"{facts.machine.gpus_from}: {', '.join(kinds)}; CUDA_DEVICE_ORDER is not set",
            "cuda:0 of a training may be another card than that of a probe",
            "Train with CUDA_DEVICE_ORDER=PCI_BUS_ID.",
        )  # fmt: skip
