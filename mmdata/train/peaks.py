"""What GPUs can do at most, by name."""

from __future__ import annotations

import re

PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A40": 150.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""10¹² operations a second in dense products of bfloat16 with sums in float32; the makers' data sheets."""
_OTHER = re.compile(r"laptop|max-q|mobile|ti\b|super|\bD\b|MIG", re.IGNORECASE)
"""A part that has another peak than the one whose name it bears."""


def peak_flops(name: str) -> float | None:
    """Operations a second of a device in dense products of bfloat16; None: not in the table.

    Example:
        "NVIDIA H100 80GB HBM3" gives 989e12; "NVIDIA L40" gives 181e12, not that of the L4.
    """
    if _OTHER.search(name):
        return None
    known = [each for each in PEAK_TFLOPS if re.search(rf"(?<![\w-]){re.escape(each)}(?![\w])", name)]
    return 1e12 * PEAK_TFLOPS[max(known, key=len)] if known else None
