"""transformers' Swin V2 on shapes (transformers/models/swinv2/modeling_swinv2.py, 5.23).

To be laid beside that file: same classes, same order of operations, same names for locals, since
what a local keeps alive is memory. Shapes as in `shapes.py`.
"""

from __future__ import annotations

from planner.libraries.maps import CPB_HIDDEN
from planner.libraries.transformers.shapes import (
    Pair,
    SwinEmbeddings,
    drop_path_of,
    every_second,
    pad_to_even,
    pooled,
    shift_mask,
    window_partition,
    window_reverse,
)
from planner.libraries.windows import crop, padding
from planner.schema import SwinConfig
from planner.step.matmul import matmul
from planner.step.nn import (
    GELU,
    Dropout,
    LayerNorm,
    Linear,
    Module,
    ReLU,
    Sequential,
    buffer,
)
from planner.step.normalization import normalize, softmax
from planner.step.pointwise import add, clamp, exp, mul, scale, sigmoid
from planner.step.tensor import Device, Parameter, Tensor
from planner.step.views import (
    cat,
    contiguous,
    pad,
    permute,
    roll,
    take_rows,
    transpose,
    unsqueeze,
    view,
)

StageOutputs = tuple[Tensor, Tensor, tuple[int, int, int, int]]


class Swinv2PatchMerging(Module):
    """[B, L, C] to [B, L/4, 2C]: the norm comes after the reduction."""

    def __init__(self, device: Device, dim: int) -> None:
        self.reduction = Linear(device, 4 * dim, 2 * dim, bias=False)
        self.norm = LayerNorm(device, 2 * dim)

    def forward(self, input_feature: Tensor, input_dimensions: Pair) -> Tensor:
        height, width = input_dimensions
        batch_size, _, num_channels = input_feature.shape
        input_feature = view(input_feature, batch_size, height, width, num_channels)
        input_feature = pad_to_even(input_feature, height, width)
        input_feature_0 = every_second(input_feature, 0, 0)
        input_feature_1 = every_second(input_feature, 1, 0)
        input_feature_2 = every_second(input_feature, 0, 1)
        input_feature_3 = every_second(input_feature, 1, 1)
        input_feature = cat(
            [input_feature_0, input_feature_1, input_feature_2, input_feature_3], -1
        )
        input_feature = view(input_feature, batch_size, -1, 4 * num_channels)

        input_feature = self.reduction(input_feature)
        input_feature = self.norm(input_feature)
        return input_feature


class Swinv2SelfAttention(Module):
    """Cosine attention with continuous position bias; the shift mask is added twice, as there."""

    def __init__(
        self, device: Device, config: SwinConfig, dim: int, heads: int, window: int
    ) -> None:
        self.heads = heads
        self.head_size = dim // heads
        self.window_area = window * window
        self.logit_scale = Parameter(device, (heads, 1, 1))
        self.continuous_position_bias_mlp = Sequential(
            Linear(device, 2, CPB_HIDDEN),
            ReLU(in_place=True),
            Linear(device, CPB_HIDDEN, heads, bias=False),
        )
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
        relative_position_bias = view(
            take_rows(relative_position_bias_table, view(self.relative_position_index, -1)),
            self.window_area, self.window_area, -1,
        )  # fmt: skip
        relative_position_bias = contiguous(permute(relative_position_bias, 2, 0, 1))
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
    def __init__(
        self, device: Device, config: SwinConfig, dim: int, heads: int, window: int
    ) -> None:
        self.self = Swinv2SelfAttention(device, config, dim, heads, window)
        self.output = Swinv2SelfOutput(device, config, dim)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> tuple[Tensor]:
        self_outputs = self.self(hidden_states, attention_mask)
        attention_output = self.output(self_outputs[0], hidden_states)
        return (attention_output,)


class Swinv2Intermediate(Module):
    def __init__(self, device: Device, config: SwinConfig, dim: int) -> None:
        self.dense = Linear(device, dim, int(config.mlp_ratio * dim))
        self.intermediate_act_fn = GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.intermediate_act_fn(hidden_states)
        return hidden_states


class Swinv2Output(Module):
    def __init__(self, device: Device, config: SwinConfig, dim: int) -> None:
        self.dense = Linear(device, int(config.mlp_ratio * dim), dim)
        self.dropout = Dropout(config.drop_rate)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return hidden_states


class Swinv2Layer(Module):
    """transformers' Swinv2Layer. Window and shift are those that the map's height allows.

    `height` is of the patch grid halved without rounding up, as the library reckons it.
    """

    def __init__(
        self,
        device: Device,
        config: SwinConfig,
        dim: int,
        heads: int,
        height: int,
        drop_path: float,
        shifted: bool,
    ) -> None:
        window = config.windows[0]
        self.window_size = min(height, window)
        self.shift_size = window // 2 if shifted and height > self.window_size else 0
        self.attention = Swinv2Attention(device, config, dim, heads, self.window_size)
        self.layernorm_before = LayerNorm(device, dim)
        self.drop_path = drop_path_of(drop_path)
        self.intermediate = Swinv2Intermediate(device, config, dim)
        self.output = Swinv2Output(device, config, dim)
        self.layernorm_after = LayerNorm(device, dim)

    def get_attn_mask(self, hidden_states: Tensor) -> Tensor | None:
        if self.shift_size <= 0:
            return None
        _, height, width, _ = hidden_states.shape
        return shift_mask(
            hidden_states.device, height, width, hidden_states.dtype, self.window_size
        )

    def forward(self, hidden_states: Tensor, input_dimensions: Pair) -> tuple[Tensor]:
        height, width = input_dimensions
        batch_size, _, channels = hidden_states.shape
        shortcut = hidden_states

        hidden_states = view(hidden_states, batch_size, height, width, channels)
        hidden_states = pad(
            hidden_states, padding(height, self.window_size), padding(width, self.window_size)
        )
        _, height_pad, width_pad, _ = hidden_states.shape
        shifted_hidden_states = roll(hidden_states) if self.shift_size > 0 else hidden_states

        hidden_states_windows = window_partition(shifted_hidden_states, self.window_size)
        hidden_states_windows = view(hidden_states_windows, -1, self.window_size**2, channels)
        attn_mask = self.get_attn_mask(hidden_states)

        attention_outputs = self.attention(hidden_states_windows, attn_mask)
        attention_output = attention_outputs[0]

        attention_windows = view(attention_output, -1, self.window_size, self.window_size, channels)
        shifted_windows = window_reverse(attention_windows, self.window_size, height_pad, width_pad)
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
        dim = config.stage_channels(stage)
        height = (config.image_size[0] // config.patch_size) // 2**stage
        rates = config.drop_path_rates()[stage]
        heads = config.num_heads[stage]
        self.blocks = [
            Swinv2Layer(device, config, dim, heads, height, rates[index], index % 2 == 1)
            for index in range(config.depths[stage])
        ]
        last = stage == config.num_stages - 1
        self.downsample = None if last else Swinv2PatchMerging(device, dim)

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


class Swinv2Model(Module):
    """transformers' Swinv2Model: (last hidden state, pooled output)."""

    def __init__(self, device: Device, config: SwinConfig) -> None:
        self.embeddings = SwinEmbeddings(device, config)
        self.encoder = Swinv2Encoder(device, config)
        self.layernorm = LayerNorm(device, config.stage_channels(config.num_stages - 1))

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        embedding_output, input_dimensions = self.embeddings(pixel_values)
        encoder_outputs = self.encoder(embedding_output, input_dimensions)
        sequence_output = encoder_outputs[0]
        sequence_output = self.layernorm(sequence_output)
        return sequence_output, pooled(sequence_output)


class Swinv2ForImageClassification(Module):
    """transformers' Swinv2ForImageClassification: images [B, in, height, width] to logits."""

    def __init__(self, device: Device, config: SwinConfig) -> None:
        self.swinv2 = Swinv2Model(device, config)
        channels = config.stage_channels(config.num_stages - 1)
        self.classifier = Linear(device, channels, config.num_classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        outputs = self.swinv2(pixel_values)
        pooled_output = outputs[1]
        logits = self.classifier(pooled_output)
        return logits  # type: ignore[no-any-return]
