"""Format numbers of bytes, FLOPs and seconds with a suitable unit."""

SCALES = {"bytes": (2**30, "GiB", 2**20, "MiB"), "FLOPs": (1e12, "TFLOP", 1e9, "GFLOP"), "s": (1, "s", 1e-3, "ms")}


def amount(x: float | None, unit: str) -> str:
    """Format a number with a suitable unit: amount(3e9, "bytes") is "2.794 GiB"."""
    if x is None:
        return "-"
    large, name, small, small_name = SCALES[unit]
    return f"{x / large:,.3f} {name}" if x >= large / 10 else f"{x / small:,.3f} {small_name}"
