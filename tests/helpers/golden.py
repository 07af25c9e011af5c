"""Recorded inputs and outputs of the peer's kernels. Outputs were filled with FILL before each launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

FILL = -7777
_FOLDER = Path(__file__).resolve().parent.parent / "golden"


class GoldenFile:
    """`case(name)` gives (inputs, outputs) by the launchers' keyword names; scalars are ints."""

    def __init__(self, name: str) -> None:
        with np.load(_FOLDER / name) as archive:
            self._arrays = dict(archive)
        self.cases = sorted({key.split("/")[0] for key in self._arrays})

    def case(self, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        inputs: dict[str, Any] = {}
        outputs: dict[str, np.ndarray[Any, Any]] = {}
        for key, value in self._arrays.items():
            case, direction, argument = key.split("/")
            if case == name and direction == "in":
                inputs[argument] = int(value) if value.ndim == 0 else value
            elif case == name:
                outputs[argument] = value
        return inputs, outputs
