"""The arrays of the surrogate: one entry per candidate, or per pair of them."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.intp]
Values = NDArray[np.str_]
