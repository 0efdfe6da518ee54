"""The planner's estimate for a whole space of settings, in seconds: settings that differ only in
what hardly moves memory share one recorded step."""

from __future__ import annotations

from dataclasses import replace

from planner.errors import UnsupportedError
from planner.estimate import Estimate, Throughput, choose, judge, step_ledger
from planner.hardware import Gpu, recognise_gpu
from planner.schema import DeviceInfo, SwinConfig, TrainSetting
from planner.throughput import DeviceRates, predict_step, rates_for


class DeviceEstimator:
    """Estimates settings for `device`, by the `rates` measured on it or those of the catalogue.

    A compiled setting is given the memory of its eager one, which is what it may need at most, and
    tf32 that of fp32; their times are the shared step's, times a factor predicted once an arm. On a
    CPU, where a CUDA device's bytes are only a rough guess, optimizers share a step too.
    None for a setting that is not modelled (which can still be probed).
    """

    def __init__(self, device: DeviceInfo, rates: DeviceRates | None = None) -> None:
        self.device = device
        cuda = device.kind == "cuda"
        self.gpu: Gpu | None = recognise_gpu(device.name, device.total_bytes) if cuda else None
        self.rates = rates_for(self.gpu) if rates is None and self.gpu else rates
        self._shared: dict[TrainSetting, Estimate | None] = {}
        self._factors: dict[TrainSetting, float] = {}

    def __call__(self, model: SwinConfig, setting: TrainSetting) -> Estimate | None:
        shared = self.shared_setting(setting)
        if shared not in self._shared:
            self._shared[shared] = self._estimate(model, shared)
        found = self._shared[shared]
        if found is None or shared == setting:
            return found
        return replace(
            found, setting=setting, throughput=self._scaled(model, shared, setting, found)
        )

    def shared_setting(self, setting: TrainSetting) -> TrainSetting:
        """The setting whose recorded step stands for that of `setting`."""
        changes: dict[str, object] = {"compile": "off"}
        if setting.precision == "tf32":
            changes["precision"] = "fp32"
        if self.device.kind == "cpu":
            changes["optimizer"] = setting.optimizer_family
        return setting.model_copy(update=changes)

    def _estimate(self, model: SwinConfig, setting: TrainSetting) -> Estimate | None:
        try:
            config, chosen = choose(model, setting, self.gpu, {})
            ledger = step_ledger(config, chosen)
            return judge(config, chosen, ledger, self.gpu, rates=self.rates)
        except UnsupportedError:
            return None

    def _scaled(
        self, model: SwinConfig, shared: TrainSetting, setting: TrainSetting, found: Estimate
    ) -> Throughput | None:
        if self.rates is None or found.throughput is None:
            return None
        arm = setting.model_copy(update={"batch_size": 1})
        if arm not in self._factors:
            operations = list(step_ledger(model, shared).operations())
            step = predict_step(operations, self.rates, setting)
            plain = predict_step(operations, self.rates, shared)
            self._factors[arm] = step.step_seconds / plain.step_seconds
        factor = self._factors[arm]
        return Throughput(
            found.throughput.step_seconds * factor,
            found.throughput.images_per_second / factor,
            found.throughput.basis,
        )
