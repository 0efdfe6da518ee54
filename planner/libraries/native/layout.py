"""How native's Swin cuts a stage's feature map into windows, in numbers. Imports no torch."""

from __future__ import annotations

from planner.libraries.maps import Pair, clamped_window, padding


class WindowLayout:
    """The window is clamped to the feature map on each axis, and an axis that it covers is not
    shifted. A feature map that the window does not divide is padded with zeros at the bottom and on
    the right, and attention sees the padding, as it does in the other libraries.

    All pairs are (height, width) in tokens, `counts` in windows.
    """

    def lay_out(self, feature_map: Pair, side: int) -> None:
        """`side` is the window's, as it is configured."""
        rows, columns = feature_map
        self.feature_map = feature_map
        self.window, self.shift = clamped_window(feature_map, side, shifted=True)
        height, width = self.window
        self.padding = (padding(rows, height), padding(columns, width))
        self.counts = (-(-rows // height), -(-columns // width))
        self.has_shift = any(self.shift)
        self.has_padding = any(self.padding)
        self.num_windows = self.counts[0] * self.counts[1]
        self.num_tokens = height * width
        self.num_positions = (2 * height - 1) * (2 * width - 1)
