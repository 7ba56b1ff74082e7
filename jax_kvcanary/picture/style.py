"""Colours and markers of the PNG: told apart by people who do not see red from green, and in grey by shape."""

from __future__ import annotations

import numpy as np

from jax_kvcanary.picture.incident import FindingKind

INK, MUTED, BROKEN = "#1f2328", "#59636e", "#b3261e"
VICTIM, OTHER = "#0072b2", "#e69f00"

KIND_COLOURS = {
    FindingKind.RECORD: "#d62d20",
    FindingKind.KV_BYTES: "#7b2d8b",
    FindingKind.TOKEN: "#ffffff",
    FindingKind.RANGE: "#000000",
}
KIND_MARKERS = {FindingKind.RECORD: "s", FindingKind.KV_BYTES: "D", FindingKind.TOKEN: "^", FindingKind.RANGE: "X"}


def mix(colour: str, strength: float = 1.0) -> np.ndarray:
    """A colour "#rrggbb" on white: float [3] from 0 to 1."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return 1 - strength * (1 - rgb)
