"""NumPy in CuPy's place, for code that keeps arrays on a device."""

from __future__ import annotations

from typing import Any

import numpy as np


class DeviceArray(np.ndarray[Any, Any]):
    """A NumPy array with what the replay uses of CuPy's: host copies are explicit."""

    def get(self) -> Any:
        """A copy in host memory."""
        return np.array(self)

    def set(self, values: Any) -> None:
        """Copy from host memory."""
        self[...] = values
