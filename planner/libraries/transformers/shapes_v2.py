"""transformers' Swin V2 on shapes (transformers/models/swinv2/modeling_swinv2.py, 5.24).

To be laid beside that file: same classes, same order of operations, same names for locals, since
what a local keeps alive is memory. Shapes as in `shapes.py`.
"""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.blocks import Merging, as_tokens, four_parities
from planner.libraries.maps import BlockPlan, Pair, padding, plan_blocks
from planner.libraries.transformers.shapes import SwinModel, drop_path_of, even_map, get_attn_mask
from planner.libraries.windows import (
    crop,
    position_bias_mlp,
    spread_bias,
    window_partition,
    window_reverse,
)
from planner.step.matmul import matmul
from planner.step.nn import GELU, Dropout, LayerNorm, Linear, Module, buffer
from planner.step.normalization import normalize, softmax
from planner.step.pointwise import add, clamp, exp, mul, scale, sigmoid
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import contiguous, pad, permute, roll, transpose, unsqueeze, view

StageOutputs = tuple[Tensor, Tensor, tuple[int, int, int, int]]


class Swinv2PatchMerging(Merging):
    """[B, L, C] to [B, L/4, 2C]. What was padded lives until the end, in the names of its parts."""

    def forward(self, input_feature: Tensor, input_dimensions: Pair) -> Tensor:
        parities = four_parities(even_map(input_feature, input_dimensions))
        return self.reduce(as_tokens(parities))


class Swinv2SelfAttention(Module):
    """Cosine attention with continuous position bias; the shift mask is added twice, as there."""

    def __init__(self, device: Device, config: SwinConfig, plan: BlockPlan, window: int) -> None:
        dim, heads = plan.channels, plan.heads
        self.heads = heads
        self.head_size = dim // heads
        self.window_area = window * window
        self.logit_scale = Parameter(device, (heads, 1, 1))
        self.continuous_position_bias_mlp = position_bias_mlp(device, heads)
        self.relative_coords_table = buffer(device, (1, 2 * window - 1, 2 * window - 1, 2))
        self.relative_position_index = buffer(device, (self.window_area, self.window_area), "int64")
        self.query = Linear(device, dim, dim, bias=config.qkv_bias)
        self.key = Linear(device, dim, dim, bias=False)
        self.value = Linear(device, dim, dim, bias=config.qkv_bias)
        self.dropout = Dropout(config.attn_drop_rate)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> tuple[Tensor]:
        windows, area, dim = hidden_states.shape
        heads = self.heads
        shape = (windows, -1, heads, self.head_size)
        query_layer = transpose(view(self.query(hidden_states), *shape), 1, 2)
        key_layer = transpose(view(self.key(hidden_states), *shape), 1, 2)
        value_layer = transpose(view(self.value(hidden_states), *shape), 1, 2)

        attention_scores = matmul(normalize(query_layer), transpose(normalize(key_layer), -2, -1))
        logit_scale = exp(clamp(self.logit_scale))
        attention_scores = mul(attention_scores, logit_scale)
        relative_position_bias_table = view(
            self.continuous_position_bias_mlp(self.relative_coords_table), -1, heads
        )
        relative_position_bias = spread_bias(
            relative_position_bias_table, self.relative_position_index, area
        )
        relative_position_bias = scale(sigmoid(relative_position_bias))
        attention_scores = add(attention_scores, unsqueeze(relative_position_bias, 0))

        if attention_mask is not None:
            mask_shape = attention_mask.shape[0]
            attention_scores = add(
                view(attention_scores, windows // mask_shape, mask_shape, heads, area, area),
                unsqueeze(unsqueeze(attention_mask, 1), 0),
            )
            attention_scores = add(attention_scores, unsqueeze(unsqueeze(attention_mask, 1), 0))
            attention_scores = view(attention_scores, -1, heads, area, area)

        attention_probs = softmax(attention_scores)
        attention_probs = self.dropout(attention_probs)

        context_layer = matmul(attention_probs, value_layer)
        context_layer = contiguous(permute(context_layer, 0, 2, 1, 3))
        context_layer = view(context_layer, windows, area, dim)
        return (context_layer,)


class Swinv2SelfOutput(Module):
    def __init__(self, device: Device, config: SwinConfig, dim: int) -> None:
        self.dense = Linear(device, dim, dim)
        self.dropout = Dropout(config.attn_drop_rate)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return hidden_states


class Swinv2Attention(Module):
    def __init__(self, device: Device, config: SwinConfig, plan: BlockPlan, window: int) -> None:
        self.self = Swinv2SelfAttention(device, config, plan, window)
        self.output = Swinv2SelfOutput(device, config, plan.channels)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> tuple[Tensor]:
        self_outputs = self.self(hidden_states, attention_mask)
        attention_output = self.output(self_outputs[0], hidden_states)
        return (attention_output,)


class Swinv2Intermediate(Module):
    def __init__(self, device: Device, plan: BlockPlan) -> None:
        self.dense = Linear(device, plan.channels, plan.hidden)
        self.intermediate_act_fn = GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.intermediate_act_fn(hidden_states)
        return hidden_states


class Swinv2Output(Module):
    def __init__(self, device: Device, config: SwinConfig, plan: BlockPlan) -> None:
        self.dense = Linear(device, plan.hidden, plan.channels)
        self.dropout = Dropout(config.drop_rate)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return hidden_states


class Swinv2Layer(Module):
    """transformers' Swinv2Layer. Window and shift are those that the map's height allows.

    `height` is of the patch grid halved without rounding up, as the library reckons it.
    """

    def __init__(self, device: Device, config: SwinConfig, plan: BlockPlan, height: int) -> None:
        self.window_size = min(height, plan.window)
        is_shifted = plan.shifted and height > self.window_size
        self.shift_size = plan.window // 2 if is_shifted else 0
        self.attention = Swinv2Attention(device, config, plan, self.window_size)
        self.layernorm_before = LayerNorm(device, plan.channels)
        self.drop_path = drop_path_of(plan.drop_path)
        self.intermediate = Swinv2Intermediate(device, plan)
        self.output = Swinv2Output(device, config, plan)
        self.layernorm_after = LayerNorm(device, plan.channels)

    def forward(self, hidden_states: Tensor, input_dimensions: Pair) -> tuple[Tensor]:
        height, width = input_dimensions
        window = (self.window_size, self.window_size)
        batch_size, _, channels = hidden_states.shape
        shortcut = hidden_states

        hidden_states = view(hidden_states, batch_size, height, width, channels)
        hidden_states = pad(
            hidden_states, padding(height, self.window_size), padding(width, self.window_size)
        )
        _, height_pad, width_pad, _ = hidden_states.shape
        shifted_hidden_states = roll(hidden_states) if self.shift_size > 0 else hidden_states

        hidden_states_windows = window_partition(shifted_hidden_states, window)
        hidden_states_windows = view(hidden_states_windows, -1, self.window_size**2, channels)
        attn_mask = get_attn_mask(hidden_states, self.window_size, self.shift_size)

        attention_outputs = self.attention(hidden_states_windows, attn_mask)
        attention_output = attention_outputs[0]

        attention_windows = view(attention_output, -1, self.window_size, self.window_size, channels)
        shifted_windows = window_reverse(attention_windows, window, height_pad, width_pad)
        attention_windows = roll(shifted_windows) if self.shift_size > 0 else shifted_windows
        if (height, width) != (height_pad, width_pad):
            attention_windows = contiguous(crop(attention_windows, height, width))

        attention_windows = view(attention_windows, batch_size, height * width, channels)
        hidden_states = self.layernorm_before(attention_windows)
        hidden_states = add(shortcut, self.drop_path(hidden_states))

        layer_output = self.intermediate(hidden_states)
        layer_output = self.output(layer_output)
        layer_output = add(hidden_states, self.drop_path(self.layernorm_after(layer_output)))
        return (layer_output,)


class Swinv2Stage(Module):
    """transformers' Swinv2Stage: its output also as it was before the downsampling."""

    def __init__(self, device: Device, config: SwinConfig, stage: int) -> None:
        height = (config.image_size[0] // config.patch_size) // 2**stage
        self.blocks = [
            Swinv2Layer(device, config, plan, height) for plan in plan_blocks(config, stage)
        ]
        last = stage == config.num_stages - 1
        channels = config.stage_channels(stage)
        self.downsample = None if last else Swinv2PatchMerging(device, channels, config.version)

    def forward(self, hidden_states: Tensor, input_dimensions: Pair) -> StageOutputs:
        height, width = input_dimensions
        for layer_module in self.blocks:
            layer_outputs = layer_module(hidden_states, input_dimensions)
            hidden_states = layer_outputs[0]

        hidden_states_before_downsampling = hidden_states
        if self.downsample is not None:
            output_dimensions = (height, width, (height + 1) // 2, (width + 1) // 2)
            hidden_states = self.downsample(hidden_states_before_downsampling, input_dimensions)
        else:
            output_dimensions = (height, width, height, width)
        return (hidden_states, hidden_states_before_downsampling, output_dimensions)


class Swinv2Encoder(Module):
    """transformers' Swinv2Encoder. A stage's output before downsampling lives through the next."""

    def __init__(self, device: Device, config: SwinConfig) -> None:
        self.layers = [Swinv2Stage(device, config, stage) for stage in range(config.num_stages)]

    def forward(self, hidden_states: Tensor, input_dimensions: Pair) -> tuple[Tensor]:
        for layer_module in self.layers:
            layer_outputs = layer_module(hidden_states, input_dimensions)
            hidden_states = layer_outputs[0]
            output_dimensions = layer_outputs[2]
            input_dimensions = (output_dimensions[-2], output_dimensions[-1])
        return (hidden_states,)


class Swinv2ForImageClassification(Module):
    """transformers' Swinv2ForImageClassification: images [B, in, height, width] to logits."""

    def __init__(self, device: Device, config: SwinConfig) -> None:
        self.swinv2 = SwinModel(device, config, lambda: Swinv2Encoder(device, config))
        channels = config.stage_channels(config.num_stages - 1)
        self.classifier = Linear(device, channels, config.num_classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        outputs = self.swinv2(pixel_values)
        pooled_output = outputs[1]
        logits = self.classifier(pooled_output)
        return logits  # type: ignore[no-any-return]
