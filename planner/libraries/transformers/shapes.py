"""transformers' Swin on shapes (transformers/models/swin/modeling_swin.py, 5.24).

To be laid beside that file: same classes, same order of operations, same names for locals, since
what a local keeps alive is memory. B batch, L tokens of the feature map, C channels, nW windows an
image, N tokens a window. Version 2 is in `shapes_v2.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.blocks import Merging, as_tokens, four_parities, pad_to_even
from planner.libraries.maps import BlockPlan, Pair, padding, plan_blocks
from planner.libraries.windows import crop, spread_bias, window_partition, window_reverse
from planner.step.attention import scaled_dot_product_attention
from planner.step.masks import compare, masked_fill
from planner.step.matmul import matmul
from planner.step.nn import GELU, Conv2d, Dropout, Identity, LayerNorm, Linear, Module, buffer
from planner.step.normalization import softmax
from planner.step.pointwise import add, binary, dropout, mul, new_empty, scale, to_dtype, unary
from planner.step.pooling import adaptive_avg_pool1d
from planner.step.tensor import Device, Parameter, Tensor, empty
from planner.step.views import (
    contiguous,
    expand,
    flatten,
    pad,
    pad_image,
    permute,
    reshape,
    roll,
    transpose,
    unsqueeze,
    view,
)

Attended = tuple[Tensor, Tensor | None]


class SwinDropPath(Module):
    """Stochastic depth by image: a random [B, 1, 1] of x's dtype, made in two steps, kept."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not hidden_states.device.training:
            return hidden_states
        shape = (hidden_states.shape[0], *(1,) * (len(hidden_states.shape) - 1))
        random_tensor = new_empty(hidden_states, shape, label="aten.rand")
        random_tensor = unary(unary(random_tensor, "aten.add"), "aten.floor")
        return mul(scale(hidden_states, "aten.div"), random_tensor)


def drop_path_of(rate: float) -> Module:
    return SwinDropPath(rate) if rate > 0 else Identity()


class SwinPatchEmbeddings(Module):
    """[B, in, height, width] to [B, L, C]; an image that patches do not divide is padded."""

    def __init__(self, device: Device, config: SwinConfig) -> None:
        self.patch_size = config.patch_size
        self.projection = Conv2d(device, config.in_channels, config.embed_dim, config.patch_size)

    def maybe_pad(self, pixel_values: Tensor) -> Tensor:
        _, _, height, width = pixel_values.shape
        if width % self.patch_size:
            pixel_values = pad_image(pixel_values, 0, padding(width, self.patch_size))
        if height % self.patch_size:
            pixel_values = pad_image(pixel_values, padding(height, self.patch_size), 0)
        return pixel_values

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Pair]:
        pixel_values = self.maybe_pad(pixel_values)
        embeddings = self.projection(pixel_values)
        _, _, height, width = embeddings.shape
        embeddings = transpose(flatten(embeddings, 2), 1, 2)
        return embeddings, (height, width)


class SwinEmbeddings(Module):
    """Patches, their norm, and absolute positions where the configuration has them."""

    def __init__(self, device: Device, config: SwinConfig) -> None:
        self.position_embeddings: Parameter | None = None
        if config.absolute_position_embedding:
            height, width = (side // config.patch_size for side in config.image_size)
            self.position_embeddings = Parameter(device, (1, height * width, config.embed_dim))
        self.patch_embeddings = SwinPatchEmbeddings(device, config)
        self.norm = LayerNorm(device, config.embed_dim)
        self.dropout = Dropout(config.drop_rate)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Pair]:
        embeddings, output_dimensions = self.patch_embeddings(pixel_values)
        embeddings = self.norm(embeddings)
        if self.position_embeddings is not None:
            embeddings = add(embeddings, self.position_embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings, output_dimensions


class SwinPatchMerging(Merging):
    """[B, L, C] to [B, L/4, 2C]."""

    def forward(self, input_feature: Tensor, input_dimensions: Pair) -> Tensor:
        return self.reduce(as_tokens(four_parities(even_map(input_feature, input_dimensions))))


def even_map(input_feature: Tensor, input_dimensions: Pair) -> Tensor:
    """[B, L, C] to [B, H, W, C] with even sides."""
    batch_size, _, num_channels = input_feature.shape
    return pad_to_even(view(input_feature, batch_size, *input_dimensions, num_channels))


class SwinRelativePositionBias(Module):
    """The table of biases and the lookup in it: [1, heads, N, N]."""

    def __init__(self, device: Device, heads: int, window: int) -> None:
        self.window_area = window * window
        self.relative_position_bias_table = Parameter(device, ((2 * window - 1) ** 2, heads))
        self.relative_position_index = buffer(device, (self.window_area**2,), "int64")

    def forward(self, table: Tensor) -> Tensor:
        return unsqueeze(spread_bias(table, self.relative_position_index, self.window_area), 0)


def eager_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, rate: float
) -> Attended:
    attn_weights = scale(matmul(query, transpose(key, 2, 3)))
    attn_weights = add(attn_weights, attention_mask)
    attn_weights = to_dtype(softmax(to_dtype(attn_weights, "float32")), query.dtype)
    attn_weights = dropout(attn_weights, rate)
    attn_output = matmul(attn_weights, value)
    attn_output = contiguous(transpose(attn_output, 1, 2))
    return attn_output, attn_weights


def sdpa_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, rate: float
) -> Attended:
    """transformers/integrations/sdpa_attention.py."""
    attn_output = scaled_dot_product_attention(query, key, value, attention_mask, rate)
    attn_output = contiguous(transpose(attn_output, 1, 2))
    return attn_output, None


class SwinAttention(Module):
    """Three projections, position bias and mask combined, then either kind of attention."""

    def __init__(self, device: Device, config: SwinConfig, plan: BlockPlan, fused: bool) -> None:
        dim = plan.channels
        self.head_dim = dim // plan.heads
        self.attention_dropout = config.attn_drop_rate
        self.attend = sdpa_attention_forward if fused else eager_attention_forward
        self.q_proj = Linear(device, dim, dim, bias=config.qkv_bias)
        self.k_proj = Linear(device, dim, dim, bias=config.qkv_bias)
        self.v_proj = Linear(device, dim, dim, bias=config.qkv_bias)
        self.o_proj = Linear(device, dim, dim)
        self.relative_position_bias = SwinRelativePositionBias(device, plan.heads, plan.window)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Attended:
        windows, seq_len = input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states = transpose(view(self.q_proj(hidden_states), *hidden_shape), 1, 2)
        key_states = transpose(view(self.k_proj(hidden_states), *hidden_shape), 1, 2)
        value_states = transpose(view(self.v_proj(hidden_states), *hidden_shape), 1, 2)

        bias = self.relative_position_bias
        relative_position_bias = bias(bias.relative_position_bias_table)
        if attention_mask is not None:
            num_windows = attention_mask.shape[0]
            batch_size = windows // num_windows
            attention_mask = reshape(
                expand(unsqueeze(unsqueeze(attention_mask, 1), 0), batch_size, -1, -1, -1, -1),
                -1, 1, seq_len, seq_len,
            )  # fmt: skip
            combined_mask = add(relative_position_bias, attention_mask)
        else:
            combined_mask = relative_position_bias

        attn_output, attn_weights = self.attend(
            query_states, key_states, value_states, combined_mask, self.attention_dropout
        )
        attn_output = contiguous(reshape(attn_output, *input_shape, -1))
        attn_output = self.o_proj(attn_output)
        return attn_output, attn_weights


class SwinMLP(Module):
    def __init__(self, device: Device, plan: BlockPlan) -> None:
        self.activation_fn = GELU()
        self.fc1 = Linear(device, plan.channels, plan.hidden)
        self.fc2 = Linear(device, plan.hidden, plan.channels)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.activation_fn(hidden_states)
        hidden_states = self.fc2(hidden_states)
        return hidden_states


def get_attn_mask(hidden_states: Tensor, window: int, shift: int) -> Tensor | None:
    """[nW, N, N], made anew in every forward of a shifted layer."""
    if shift <= 0:
        return None
    _, height, width, _ = hidden_states.shape
    return shift_mask(hidden_states.device, height, width, hidden_states.dtype, window)


def shift_mask(device: Device, height: int, width: int, dtype: str, window: int) -> Tensor:
    h_idx = empty(device, (height,), "int64", "aten.arange")
    w_idx = empty(device, (width,), "int64", "aten.arange")
    h_region = binary(_past(h_idx), _past(h_idx), "aten.add")
    w_region = binary(_past(w_idx), _past(w_idx), "aten.add")
    img_mask = to_dtype(
        binary(
            unary(view(h_region, 1, height, 1, 1), "aten.mul"),
            view(w_region, 1, 1, width, 1),
            "aten.add",
        ),
        dtype,
    )
    mask_windows = window_partition(img_mask, (window, window))
    mask_windows = view(mask_windows, -1, window * window)
    attn_mask = binary(unsqueeze(mask_windows, 1), unsqueeze(mask_windows, 2), "aten.sub")
    attn_mask = masked_fill(
        masked_fill(attn_mask, compare(attn_mask, "aten.ne")), compare(attn_mask, "aten.eq")
    )
    return attn_mask


def _past(index: Tensor) -> Tensor:
    """`(index >= number).long()`."""
    return to_dtype(unary(index, "aten.ge", "bool"), "int64")


class SwinLayer(Module):
    """transformers' SwinLayer. A window that covers one side of the map leaves no shift at all."""

    def __init__(self, device: Device, config: SwinConfig, plan: BlockPlan, fused: bool) -> None:
        self.window_size = plan.window
        self.shift_size = self.window_size // 2 if plan.shifted else 0
        self.attention = SwinAttention(device, config, plan, fused)
        self.layernorm_before = LayerNorm(device, plan.channels)
        self.layernorm_after = LayerNorm(device, plan.channels)
        self.mlp = SwinMLP(device, plan)
        self.dropout = Dropout(config.drop_rate)
        self.drop_path = drop_path_of(plan.drop_path)

    def forward(self, hidden_states: Tensor, input_dimensions: Pair) -> Attended:
        height, width = input_dimensions
        if min(input_dimensions) <= self.window_size:
            self.shift_size = 0
        window = (self.window_size, self.window_size)
        batch_size, _, channels = hidden_states.shape
        shortcut = hidden_states

        hidden_states = self.layernorm_before(hidden_states)
        hidden_states = view(hidden_states, batch_size, height, width, channels)
        hidden_states = pad(
            hidden_states, padding(height, self.window_size), padding(width, self.window_size)
        )
        _, height_pad, width_pad, _ = hidden_states.shape

        hidden_states_windows = window_partition(self.cyclic_shift(hidden_states), window)
        hidden_states_windows = view(hidden_states_windows, -1, self.window_size**2, channels)
        attn_mask = get_attn_mask(hidden_states, self.window_size, self.shift_size)

        attention_output, attn_weights = self.attention(hidden_states_windows, attn_mask)
        attention_output = self.dropout(attention_output)

        attention_windows = view(attention_output, -1, self.window_size, self.window_size, channels)
        attention_windows = self.cyclic_shift(
            window_reverse(attention_windows, window, height_pad, width_pad)
        )
        if (height, width) != (height_pad, width_pad):
            attention_windows = contiguous(crop(attention_windows, height, width))

        attention_windows = view(attention_windows, batch_size, height * width, channels)
        hidden_states = add(shortcut, self.drop_path(attention_windows))

        residual = hidden_states
        hidden_states = self.layernorm_after(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = add(self.dropout(hidden_states), residual)
        return hidden_states, attn_weights

    def cyclic_shift(self, hidden_states: Tensor) -> Tensor:
        if self.shift_size > 0:
            hidden_states = roll(hidden_states)
        return hidden_states


class SwinStage(Module):
    """transformers' SwinStage: its output is copied once more as a feature map, used or not."""

    def __init__(self, device: Device, config: SwinConfig, stage: int, fused: bool) -> None:
        self.blocks = [
            SwinLayer(device, config, plan, fused) for plan in plan_blocks(config, stage)
        ]
        last = stage == config.num_stages - 1
        channels = config.stage_channels(stage)
        self.downsample = None if last else SwinPatchMerging(device, channels, config.version)

    def get_reshaped_hidden_states(self, hidden_states: Tensor, height: int, width: int) -> Tensor:
        if self.downsample is not None:
            spatial_state, h, w = hidden_states, (height + 1) // 2, (width + 1) // 2
        else:
            spatial_state, h, w = hidden_states, height, width
        batch_size, _, hidden_size = spatial_state.shape
        return contiguous(permute(view(spatial_state, batch_size, h, w, hidden_size), 0, 3, 1, 2))

    def forward(
        self, hidden_states: Tensor, input_dimensions: Pair
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        height, width = input_dimensions
        last_attn_weights = None
        for layer_module in self.blocks:
            hidden_states, last_attn_weights = layer_module(hidden_states, input_dimensions)

        hidden_states_before_downsampling = hidden_states
        if self.downsample is not None:
            hidden_states = self.downsample(hidden_states_before_downsampling, input_dimensions)

        reshaped_hidden_states = self.get_reshaped_hidden_states(hidden_states, height, width)
        return hidden_states, reshaped_hidden_states, last_attn_weights


class SwinEncoder(Module):
    """transformers' SwinEncoder. The last feature map and attention stay alive to the next."""

    def __init__(self, device: Device, config: SwinConfig, fused: bool) -> None:
        self.layers = [
            SwinStage(device, config, stage, fused) for stage in range(config.num_stages)
        ]

    def forward(self, hidden_states: Tensor, input_dimensions: Pair) -> tuple[Tensor]:
        for layer_module in self.layers:
            hidden_states, _reshaped, _ = layer_module(hidden_states, input_dimensions)
            if layer_module.downsample is not None:
                height, width = input_dimensions
                input_dimensions = ((height + 1) // 2, (width + 1) // 2)
        return (hidden_states,)


class SwinModel(Module):
    """transformers' SwinModel, or its Swinv2Model: (last hidden state, pooled output)."""

    def __init__(
        self, device: Device, config: SwinConfig, make_encoder: Callable[[], Module]
    ) -> None:
        self.embeddings = SwinEmbeddings(device, config)
        self.encoder = make_encoder()
        self.layernorm = LayerNorm(device, config.stage_channels(config.num_stages - 1))

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        embedding_output, input_dimensions = self.embeddings(pixel_values)
        encoder_outputs = self.encoder(embedding_output, input_dimensions)
        sequence_output = encoder_outputs[0]
        sequence_output = self.layernorm(sequence_output)
        return sequence_output, pooled(sequence_output)


def pooled(sequence_output: Tensor) -> Tensor:
    """[B, L, C] to [B, C]: `AdaptiveAvgPool1d(1)` of the transpose, flattened."""
    pooled_output = adaptive_avg_pool1d(transpose(sequence_output, 1, 2))
    pooled_output = flatten(pooled_output, 1)
    return pooled_output


class SwinForImageClassification(Module):
    """transformers' SwinForImageClassification: images [B, in, height, width] to logits."""

    def __init__(self, device: Device, config: SwinConfig, setting: TrainSetting) -> None:
        fused = setting.attention == "sdpa"
        self.swin = SwinModel(device, config, lambda: SwinEncoder(device, config, fused))
        channels = config.stage_channels(config.num_stages - 1)
        self.classifier = Linear(device, channels, config.num_classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        outputs = self.swin(pixel_values)
        pooled_output = outputs[1]
        logits = self.classifier(pooled_output)
        return logits  # type: ignore[no-any-return]
