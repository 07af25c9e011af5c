"""The package's exceptions. What each one means stands in `catalogue`, under its slug."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

PREFIX = "kv-canary: "


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """One kind of error: its message and what a person needs to get past it."""

    slug: str
    message: str
    """Format string of the first line, after the prefix."""
    trigger: str
    cause: str
    fix: str
    prevention: str
    is_runtime_error: bool = False
    """False: an argument or input is wrong (ValueError). True: the machine failed (RuntimeError)."""

    def matches(self, message: str) -> bool:
        """Whether the first line of `message` is this entry's, with any values filled in."""
        first_line = message.strip().splitlines()[0].removeprefix(PREFIX)
        pattern = re.sub(r"\\{\w+\\}", ".+", re.escape(self.message))
        return re.fullmatch(pattern, first_line, flags=re.DOTALL) is not None


class _ExplainedError(Exception):
    """Carries the slug, the offending argument's name and the value that it had."""

    def __init__(self, entry: CatalogueEntry, fields: dict[str, Any]) -> None:
        self.slug = entry.slug
        self.name: str | None = fields.get("name")
        self.got: Any = fields.get("got")
        message = PREFIX + entry.message.format(**fields)
        super().__init__(f"{message}\nfix: {entry.fix}\nkvcanary explain {entry.slug}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process boundaries (multiprocessing, pytest-xdist); the message alone is enough there.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(cls: type[_ExplainedError], args: tuple[Any, ...], state: dict[str, Any]) -> _ExplainedError:
    exception = cls.__new__(cls, *args)
    exception.__dict__.update(state)
    return exception


class KvCanaryError(_ExplainedError, ValueError):
    """An argument or an input is not what it must be. Nothing was launched and no output was touched.

    Attributes: `slug` (stable name in the catalogue), `name` (the argument, or None), `got` (its value, or None).
    """


class KvCanaryRuntimeError(_ExplainedError, RuntimeError):
    """The machine could not do it: no CuPy, no device, a kernel that does not compile or launch.

    Attributes as in `KvCanaryError`.
    """


class KvCorruptionError(RuntimeError):
    """KV-cache corruption was found, and the canary's mode is `raise`. `report` says where and what it means."""

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self.report = report
        """The `Report`."""


class KvCanaryWarning(UserWarning):
    """Something in the installation will lead to trouble."""
