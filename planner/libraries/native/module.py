"""Native's Swin, built from a SwinConfig. Needs torch."""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.core.schema.setting import Attention
from planner.libraries.native import native_swin
from planner.libraries.native.spec import class_arguments


def build(config: SwinConfig, attention: Attention) -> native_swin.SwinTransformer:
    """As every library's spec has it; `attention` is resolved (eager or sdpa)."""
    how: native_swin.Attention = "eager" if attention == "eager" else "sdpa"
    return native_swin.build_swin(native_swin.SwinConfig(**class_arguments(config)), how)
