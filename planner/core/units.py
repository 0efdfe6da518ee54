"""Bytes, seconds and shares as people write and read them. Inside, a size is an `int`."""

import re
from numbers import Integral

from planner.core.errors import UsageError, shorten

KIB, MIB, GIB = 1024, 1024**2, 1024**3

_BINARY = {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1024**4}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]+)\s*")
MAX_MEMORY_BYTES = 1024**6  # 1 EiB: more is a typing error
MAX_SECONDS = 10 * 365 * 24 * 3600.0


def parse_bytes(text: str) -> int:
    """`24GiB` (binary) or `24GB` (decimal) to bytes. A bare number is refused: its unit is unknown.

    Raises UsageError.
    """
    match = _SIZE.fullmatch(text)
    unit = match.group(2).upper() if match else ""
    scale = {"B": 1, **_BINARY, **_DECIMAL}.get(unit)
    if match is None or scale is None:
        raise UsageError(
            f"a size is a number with a unit, and {shorten(text)} is not.",
            "Write 24GiB (24 × 1024³ bytes) or 24GB (24 × 10⁹ bytes).",
        )
    size = float(match.group(1)) * scale
    return check_memory(int(size) if size <= MAX_MEMORY_BYTES else size, shorten(text.strip()))


def check_memory(num_bytes: float | Integral, shown: str = "") -> int:
    """A memory to fit into, as whole bytes. Raises UsageError for one that nobody has."""
    if isinstance(num_bytes, Integral) and not isinstance(num_bytes, bool):
        num_bytes = int(num_bytes)  # numpy's
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int | float):
        raise UsageError(
            f"a memory is a number of bytes, and {shorten(num_bytes)} is not.",
            "Write 24 * 1024**3.",
        )
    if not 1 <= num_bytes <= MAX_MEMORY_BYTES:
        raise UsageError(
            f"a memory is from 1 byte to 1 EiB, and {shown or shorten(num_bytes)} is not.",
            "Write 24GiB (24 × 1024³ bytes) or 24GB (24 × 10⁹ bytes).",
        )
    return int(num_bytes)


def format_rate(rate: float | None) -> str:
    """A rate with about four digits: `1,268`, `843.8`, `0.512`."""
    if rate is None:
        return "-"
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def format_bytes(count: int) -> str:
    """Bytes in the largest binary unit that keeps the figure at 1 or more: `1.25 GiB`."""
    size = float(abs(count))
    sign = "-" if count < 0 else ""
    for name, scale in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale:
            return f"{sign}{size / scale:.2f} {name}"
    return f"{sign}{int(size)} B"


def format_range(low: int, high: int) -> str:
    """`2.78–6.32 GiB`, or with both units where they are not the same."""
    least, most = format_bytes(low), format_bytes(high)
    number, _, unit = least.partition(" ")
    return f"{number if most.endswith(f' {unit}') else least}–{most}"


def exact_bytes(count: int) -> str:
    """Bytes as `parse_bytes` reads them back to the last: `24GiB`, `15093MiB`, `1000000B`."""
    units = ((GIB, "GiB"), (MIB, "MiB"), (1, "B"))
    return next(f"{count // size}{unit}" for size, unit in units if count % size == 0)


def parse_seconds(text: str) -> float:
    """`90s`, `10m`, `1h30m` to seconds; a bare number could mean minutes. Raises UsageError."""
    compact = text.strip().lower()
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(h|m|s)", compact)
    if not parts or "".join(n + u for n, u in parts) != compact:
        way = "Write 90s, 10m or 1h30m."
        if re.fullmatch("[0-9]{1,9}", compact):
            way = f"Write {compact}m for minutes, or {compact}s for seconds."
        raise UsageError(f"a duration is a number with a unit, and {shorten(text)} is not.", way)
    seconds = sum(float(n) * {"h": 3600, "m": 60, "s": 1}[u] for n, u in parts)
    if seconds > MAX_SECONDS:
        raise UsageError(
            f"a duration is ten years at most, and {shorten(text)} is more.", "Write 10m or 1h30m."
        )
    return seconds


def format_seconds(seconds: float) -> str:
    """Seconds at a scale people read: `12.3 ms`, `4.2 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def format_few(number: float) -> str:
    """As many digits as a prediction is worth: `0.25`, `4.1`, `67`, `1,340`."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}"


def parse_percent(text: str) -> float:
    """`5%` or `0.05` to the fraction 0.05, in [0, 1). Raises UsageError."""
    compact = text.strip()
    try:
        value = float(compact.removesuffix("%")) / (100 if compact.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(
            f"a share is from 0% to under 100%, and {shorten(text)} is not.",
            "Write 5% or 0.05.",
        )
    return value
