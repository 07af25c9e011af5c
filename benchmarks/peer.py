"""The peer's launchers, where `sglang` can be imported: called on our arrays, under the names that both have."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary.libraries import library_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .case import PeerLaunch

LAUNCHERS = (
    "launch_plan_offsets_kernel",
    "launch_plan_entries_kernel",
    "launch_canary_plan_kernels",
    "launch_canary_write_kernel",
    "launch_canary_verify_kernel",
    "launch_scatter_req_token_ids_kernel",
)


def find_peer() -> Peer | None:
    """None where it is not installed, or has no canary."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    names: dict[str, str] = {}
    for folder in map(Path, spec.submodule_search_locations):
        for path in sorted(folder.glob("**/kv_canary/*.py")):
            # Its engine has a folder of that name too, which defines none of them; its tests' references end in _ref.
            defined = re.findall(r"^(?:def|class) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
            if set(defined) & {*LAUNCHERS, "RealKvHashMode", "RealKvSource"} and "test" not in path.parts:
                module = ".".join(("sglang", *path.relative_to(folder).with_suffix("").parts))
                names |= dict.fromkeys(defined, module)
    found = {name: getattr(importlib.import_module(module), name) for name, module in names.items()}
    return Peer(found) if any(name in found for name in LAUNCHERS) else None


class Peer:
    """What the peer's modules define, by name."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def call_of(self, launches: Sequence[PeerLaunch]) -> Callable[[], None]:
        """One call of all; KeyError where the peer has no such launcher. Arguments are converted here, once."""
        calls = []
        for name, arguments in launches:
            launcher = self._names[name]
            known = inspect.signature(launcher).parameters
            given = {key: self._as_its_own(value) for key, value in arguments.items() if key in known}
            calls.append((launcher, given))

        def call() -> None:
            for launcher, given in calls:
                launcher(**given)

        return call

    def _as_its_own(self, value: Any) -> Any:
        """Arrays as torch tensors of the same memory; structures and enumerations as the peer's of the same name."""
        if library_of(value) in ("numpy", "cupy"):
            torch = importlib.import_module("torch")
            return torch.from_numpy(value) if isinstance(value, np.ndarray) else torch.from_dlpack(value)
        if isinstance(value, tuple):
            return tuple(map(self._as_its_own, value))
        own_type = self._names.get(type(value).__name__)
        if own_type is None:
            return value
        if isinstance(value, enum.Enum):
            return own_type(value.value)
        fields = [field.name for field in dataclasses.fields(own_type) if field.init]
        return own_type(**{name: self._as_its_own(getattr(value, name)) for name in fields})
