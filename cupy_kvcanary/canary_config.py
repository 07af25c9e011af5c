"""What a canary is built from: the geometry of the KV pool, the configuration, and the memory that both ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

from .arrays import as_device, view_array
from .buffers import CHAINS, Chain, RealKvSource
from .catalogue import error
from .checks import check_at_most, check_bool, check_int, check_non_negative, check_padding_slot, check_positive
from .constants import (
    CANARY_SLOT_BYTES,
    INT32_MAX,
    MAX_REAL_KV_SOURCES,
    VIOLATION_DETAIL_FIELDS,
    VIOLATION_FIELDS,
    CanaryLaunchTag,
    RealKvHashMode,
)
from .types import VerifyPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

Mode = Literal["off", "log", "raise"]
MODES: tuple[Mode, ...] = get_args(Mode)
RealKvHash = Literal["none", "partial", "all"]
GroupName = Literal["full", "swa"]
_PARTS = ("K", "V")
_ENDS = ("HEAD", "TAIL")


@dataclass(frozen=True, kw_only=True)
class KvPool:
    """Geometry of an engine's KV pool. All checks run when it is built.

    Without a window there is one group of slots, the full one. With a window and a mapping there are two, the full and
    the sliding-window one. With a window alone the pool itself is read through the window: one sliding-window group.
    """

    num_slots: int
    """Slots of the pool, the padding slot included; one slot holds one token."""
    max_reqs: int
    """Requests of the largest batch, padding requests included."""
    max_seq_len: int
    """Tokens of the longest request."""
    page_size: int = 1
    """Slots of a page."""
    padding_slot: int | None = 0
    """Slot of dummy writes; None where every slot is real."""
    swa_window_size: int = 0
    """Tokens that sliding-window layers still read; 0 without such layers."""
    full_to_swa_index_mapping: Any | None = None
    """int32 or int64 [lut_len], device: sliding-window slot of each full slot; None without a second pool."""
    swa_num_slots: int = 0
    """Slots of the second pool."""
    k_layers: Sequence[Any] = ()
    """K of each layer: a tensor of any dtype [slots, ...] or [pages, page_size, ...], or a `RealKvSource`. Without
    `v_layers` it is a pool with one tensor a layer, such as MLA's latent one."""
    v_layers: Sequence[Any] = ()
    swa_k_layers: Sequence[Any] = ()
    """Likewise of the sliding-window layers that have the second pool."""
    swa_v_layers: Sequence[Any] = ()
    layers: Sequence[int] | None = None
    """Layers whose KV bytes are hashed, at most 8, negative ones from the last; None for the first and the last. The
    head buffers hash the first half of them, the tail buffers the second (with one layer, both hash it)."""
    kv_token_id_vs_position_offset: int = 0
    """Expected token of a position p is the pool's at p plus this: 1 for a draft model whose inputs are rotated."""
    device: Any = "cpu"
    """`cpu`, `cuda`, `cuda:1`, or a torch or CuPy device."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_reqs", "max_seq_len", "page_size"):
            check_positive(name, check_int(name, getattr(self, name)))
            check_at_most(name, getattr(self, name), INT32_MAX)
        for name in ("swa_window_size", "swa_num_slots"):
            check_non_negative(name, check_int(name, getattr(self, name)))
            check_at_most(name, getattr(self, name), INT32_MAX)
        check_padding_slot(self.padding_slot)
        check_int("kv_token_id_vs_position_offset", self.kv_token_id_vs_position_offset)
        if self.full_to_swa_index_mapping is not None:
            check_positive("swa_window_size", self.swa_window_size)
            check_positive("swa_num_slots", self.swa_num_slots)
        as_device(self.device)

    def groups(self) -> list[Group]:
        """The groups of slots, in the order of their tags."""
        full = Group("full", self.num_slots, 0, None, self.k_layers, self.v_layers)
        if not self.swa_window_size:
            return [full]
        if self.full_to_swa_index_mapping is None:
            return [full._replace(name="swa", window=self.swa_window_size)]
        swa = Group(
            "swa",
            self.swa_num_slots,
            self.swa_window_size,
            self.full_to_swa_index_mapping,
            self.swa_k_layers,
            self.swa_v_layers,
        )
        return [full, swa]


class Group(NamedTuple):
    """Slots that are read in one way, in a pool of their own."""

    name: GroupName
    num_slots: int
    window: int
    mapping: Any | None
    k_layers: Sequence[Any]
    v_layers: Sequence[Any]

    def tags(self) -> list[CanaryLaunchTag]:
        """Its buffers."""
        parts = ("K",) if self.k_layers and not self.v_layers else _PARTS
        return [CanaryLaunchTag[f"{end}_{part}_{self.name.upper()}"] for end in _ENDS for part in parts]

    def sources(self, tag: CanaryLaunchTag, pool: KvPool) -> tuple[RealKvSource, ...]:
        """The KV bytes that the records of a buffer are checked against."""
        end, part, _ = tag.name.split("_")
        prefix = "swa_" if self.name == "swa" and self.mapping is not None else ""
        layers = self.k_layers if part == "K" else self.v_layers
        name = f"{prefix}{part.lower()}_layers"
        if not layers:
            raise error("kv-canary-real-kv-needs-layers", name=name, got=len(layers))
        chosen = _chosen(name, layers, pool.layers)
        half = (len(chosen) + 1) // 2
        of_end = chosen[:half] if end == "HEAD" else chosen[len(chosen) // 2 :]
        return tuple(_source(layer, self.num_slots, pool.page_size) for layer in of_end)


def _chosen(name: str, layers: Sequence[Any], indices: Sequence[int] | None) -> list[Any]:
    if indices is None:
        indices = (0,) if len(layers) == 1 else (0, -1)
    check_positive("len(layers)", len(indices))
    check_at_most("len(layers)", len(indices), 2 * MAX_REAL_KV_SOURCES)
    for index in indices:
        if not -len(layers) <= check_int("layers", index) < len(layers):
            raise error("kv-canary-layer-must-exist", name="layers", layers=name, count=len(layers), got=index)
    return [layers[index] for index in indices]


def _source(layer: Any, num_slots: int, page_size: int) -> RealKvSource:
    """A layer's tensor as a source: rows are slots, or pages where there are too few rows for that."""
    if isinstance(layer, RealKvSource):
        return layer
    view = view_array("layer", layer)
    row_bytes = view.itemsize
    for extent in view.shape[1:]:
        row_bytes *= extent
    slots_per_row = 1 if not view.shape or view.shape[0] >= num_slots else page_size
    per_token = row_bytes // slots_per_row
    return RealKvSource(tensor=layer, page_size=slots_per_row, num_bytes_per_token=per_token, read_bytes=per_token)


@dataclass(frozen=True, kw_only=True)
class CanaryConfig:
    """How a canary works. All checks run when it is built."""

    mode: Mode = "log"
    """`off`: nothing runs or is allocated. `log`: reports are logged and nothing ever raises. `raise`: a violation
    raises `KvCorruptionError` in the step after the one that found it."""
    real_kv_hash: RealKvHash = "none"
    """KV bytes of a token that are hashed into its records: none, 16 of each layer looked at, or all of each."""
    chain: Chain = "affine"
    """`affine` is written by a parallel scan; `splitmix64` has the records of sglang's kv-canary."""
    check_holes: bool = True
    """Report padding slots below a request's prefix length in the full group, where nothing is evicted."""
    expected_tokens: bool = False
    """Compare records with the tokens that a batch expects: finds whole rows that were exchanged."""
    verify_interval: int = 1
    """Steps from one verification to the next; records are stamped in every step."""
    verify_capacity: int | None = None
    """Entries a step verifies at most; a step with more is skipped and counted. None: every step is verified."""
    sweep_interval: int = 1
    """Steps from one slice of a sweep to the next."""
    sweep_slice: int = 16384
    """Entries of a slice."""
    ring_size: int = 256
    """Violations that are kept in full between two steps; more are counted."""
    stats_interval: int = 0
    """Steps from one line of statistics in the log to the next; 0 for none."""

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("real_kv_hash", get_args(RealKvHash)), ("chain", CHAINS)):
            if getattr(self, name) not in known:
                expected = ", ".join(known)
                raise error("kv-canary-must-be-one-of", name=name, expected=expected, got=repr(getattr(self, name)))
        for name in ("check_holes", "expected_tokens"):
            check_bool(name, getattr(self, name))
        for name in ("verify_interval", "sweep_interval", "sweep_slice", "ring_size"):
            check_positive(name, check_int(name, getattr(self, name)))
            check_at_most(name, getattr(self, name), INT32_MAX)
        check_non_negative("stats_interval", check_int("stats_interval", self.stats_interval))
        if self.verify_capacity is not None:
            check_positive("verify_capacity", check_int("verify_capacity", self.verify_capacity))
            check_at_most("verify_capacity", self.verify_capacity, INT32_MAX)

    @property
    def hash_mode(self) -> RealKvHashMode:
        """`real_kv_hash` as the kernels know it."""
        return RealKvHashMode[self.real_kv_hash.upper()]


# ---- memory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CanaryMemory:
    """Bytes that a canary allocates, once, when it is built."""

    records: int
    """32 bytes a slot and buffer."""
    log: int
    """Ring of violations with details, and the counters."""
    plans: int
    """Offsets of the batch, and the entries of a sweep's slice."""
    pinned_host: int
    """Page-locked memory of the host that the log is copied to; 0 on the CPU."""

    @property
    def device(self) -> int:
        """Bytes on the pool's device."""
        return self.records + self.log + self.plans

    def __str__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)} | {"device": self.device}
        return ", ".join(f"{name.replace('_', ' ')} {_as_size(size)}" for name, size in shown.items())


def _as_size(size: int) -> str:
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


@dataclass(frozen=True, slots=True)
class LogLayout:
    """Where things lie in the log, one array of int64 that one copy brings to the host. In words.

    Each group has two words: verify_num_valid and enable as int32, then write_num_valid_reqs. Each buffer has eight:
    slot and kernel run counters of verify, of write and of the sweep, then two skip counters.
    """

    num_groups: int
    num_buffers: int
    ring_size: int

    WRITE_INDEX: ClassVar = 0
    """int32 violation_write_index, then int32 status."""
    ASSERTION: ClassVar = 1
    """int32: the chain position check of writes is on."""
    GROUPS: ClassVar = 8
    WORDS_OF_GROUP: ClassVar = 2
    WORDS_OF_BUFFER: ClassVar = 8

    def group(self, index: int) -> int:
        """First word of a group."""
        return self.GROUPS + index * self.WORDS_OF_GROUP

    def buffer(self, index: int) -> int:
        """First word of a buffer, counted over all groups."""
        return self.group(self.num_groups) + index * self.WORDS_OF_BUFFER

    @property
    def ring(self) -> int:
        """First word of the ring."""
        return self.buffer(self.num_buffers)

    @property
    def details(self) -> int:
        """First word of the details."""
        return self.ring + self.ring_size * VIOLATION_FIELDS

    @property
    def size(self) -> int:
        """Words of all."""
        return self.details + self.ring_size * VIOLATION_DETAIL_FIELDS


def log_layout(pool: KvPool, config: CanaryConfig) -> LogLayout:
    """The log of a canary."""
    groups = pool.groups()
    return LogLayout(len(groups), sum(len(group.tags()) for group in groups), config.ring_size)


def memory_of(pool: KvPool, config: CanaryConfig) -> CanaryMemory:
    """What `Canary(pool, config)` will allocate; nothing is allocated here."""
    if config.mode == "off":
        return CanaryMemory(records=0, log=0, plans=0, pinned_host=0)
    groups = pool.groups()
    log = 8 * log_layout(pool, config).size
    of_a_group = 8 * (3 * pool.max_reqs + 2) + VerifyPlan.allocation_bytes(config.sweep_slice)
    return CanaryMemory(
        records=sum(group.num_slots * CANARY_SLOT_BYTES * len(group.tags()) for group in groups),
        log=log,
        plans=len(groups) * of_a_group + 8 * pool.max_reqs,
        pinned_host=0 if as_device(pool.device).type == "cpu" else log,
    )
