"""Launchers: functions that check their arguments and launch, with a fast path for calls of a form seen before.

Checking everything costs tens of microseconds in Python, several times a launch. Most calls repeat one form: the same
dtypes, shapes, strides and numbers, only other addresses. The first call of a form is checked in full and leaves a
template of its launches; later ones check what depends on the addresses and fill these in.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec

from .buffers import VerifyOrWriteContext, chains_generation
from .catalogue import error
from .checks import check_length_at_least, check_one_device
from .launch import BACKENDS, Backend, Call, CudaBackend, PreparedLaunches
from .page_tables import BlockTable, PageList
from .types import VerifyPlan, WritePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

P = ParamSpec("P")

_MAX_TEMPLATES = 256
_KNOWN_BY_IDENTITY = (VerifyOrWriteContext, VerifyPlan, WritePlan, BlockTable, PageList)


class BoundLaunch:
    """Checked arguments, ready to launch: calling it only launches. Keeps its arrays alive."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._launch = _backend_of(calls[0]).bind(calls)

    def __call__(self) -> None:
        """Launch on the stream that was bound, else on the current stream of the arrays' library."""
        self._launch()


class Launcher(Generic[P]):
    """Call it to check and launch; `bind` it to check once and launch many times."""

    def __init__(self, check: Callable[P, Call]) -> None:
        functools.update_wrapper(self, check)
        # To readers it is a function that returns nothing.
        self.__signature__ = inspect.signature(check).replace(return_annotation=None)
        self._check = check
        self._templates: dict[tuple[Any, ...], _Template] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Check the arguments and launch; see the function's own documentation."""
        form = None if args else _form_of(kwargs)
        template = self._templates.get(form.key) if form is not None else None
        if template is not None and form is not None and template.launch(form):
            return
        call = self._check(*args, **kwargs)
        backend = _backend_of(call)
        if form is None or not isinstance(backend, CudaBackend):
            backend.run(*call)
            return
        launches = backend.prepare(*call)
        launches.launch(call.stream)
        template = _Template.of(form, call, launches)
        if template is not None:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            self._templates[form.key] = template

    def __repr__(self) -> str:
        return f"<launcher {self._check.__name__}>"

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundLaunch:
        """Check the arguments once, with the errors of a call, for an object that only launches when it is called."""
        return BoundLaunch([self._check(*args, **kwargs)])


def bind_all(calls: Iterable[tuple[Launcher[Any], Mapping[str, Any]]]) -> BoundLaunch:
    """Check several launches once, for one object that only launches them, in order, when it is called.

    On a GPU they are one CUDA graph: a whole step costs the host less than a single launch would.

    Parameters
    ----------
    calls : launchers with their keyword arguments, all on one device and for the same `stream`.

    Raises
    ------
    KvCanaryError
        There are no calls, or an argument is wrong. Nothing was launched.

    """
    checked = [launcher._check(**arguments) for launcher, arguments in calls]
    check_length_at_least("calls", len(checked), 1)
    check_one_device({f"{name} of call {i}": view for i, call in enumerate(checked) for name, view in call.named_views})
    for call in checked:
        if call.stream != checked[0].stream:
            raise error("kv-canary-stream-must-be-the-same", expected=checked[0].stream, got=call.stream)
    return BoundLaunch(checked)


def _backend_of(call: Call) -> Backend:
    return BACKENDS[call.views[0].device.type]


class _Form(NamedTuple):
    """What a call's arguments look like (`key`), and where their arrays are."""

    key: tuple[Any, ...]
    pointers: list[int]
    objects: list[Any]
    """Arguments that are known by identity."""
    stream: Any


def _form_of(arguments: Mapping[str, Any]) -> _Form | None:
    """The form of a call on CUDA arrays of torch and CuPy; None where there is another kind of argument."""
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    ndarray_type = getattr(sys.modules.get("cupy"), "ndarray", None)
    key: list[Any] = [tuple(arguments), chains_generation()]
    pointers: list[int] = []
    objects: list[Any] = []
    stream = None
    for name, value in arguments.items():
        kind = type(value)
        if kind is tensor_type:
            if not value.is_cuda or value.requires_grad:
                return None
            key.append((value.dtype, value.shape, value.stride(), value.get_device()))
            pointers.append(value.data_ptr())
        elif kind is ndarray_type:
            memory = value.data
            key.append((value.dtype.num, value.shape, value.strides, memory.device_id))
            pointers.append(memory.ptr)
        elif name == "stream":
            stream = value
            key.append(value is None)
        elif value is None or kind is int or kind is str:
            key.append(value)
        elif kind is bool:
            key.append((kind, value))  # True == 1
        elif kind in _KNOWN_BY_IDENTITY:
            key.append(id(value))
            objects.append(value)
        elif name == "context" and kind in (list, tuple):
            key.append(tuple(map(id, value)))
            objects.extend(value)
        else:
            return None
    return _Form(tuple(key), pointers, objects, stream)


class _Template:
    """The launches of a call that was checked, for calls of the same form."""

    def __init__(self, form: _Form, call: Call, launches: PreparedLaunches, places: list[tuple[int, int, int]]) -> None:
        self._launches = launches
        self._places = places
        self._objects = [weakref.ref(value) for value in form.objects]
        # Another thread's launch may not take the addresses of this one's.
        self._lock = threading.Lock()
        self._checked = form.pointers
        by_pointer = {view.pointer: (name, view) for name, view in call.named_views if view.pointer in form.pointers}
        self._extents = []
        for pointer in form.pointers:
            name, view = by_pointer.get(pointer, ("", None))
            low, high = (0, 0) if view is None else (end - pointer for end in view.span)
            self._extents.append((low, high, name in call.operation.outputs, 1 if view is None else view.itemsize))
        self._fixed = {
            (*view.span, name in call.operation.outputs)
            for name, view in call.named_views
            if view.pointer not in form.pointers
        }

    @classmethod
    def of(cls, form: _Form, call: Call, launches: PreparedLaunches) -> _Template | None:
        """None where it cannot be said which address in the launches is whose, or streams need ordering."""
        given = [pointer for pointer in form.pointers if pointer]
        viewed = [view.pointer for view in call.views]
        if any(viewed.count(pointer) != 1 for pointer in given):
            return None
        if launches.streams.are_several and form.stream is None:
            return None
        places = []
        for index, launch in enumerate(launches.launches):
            for word in launch.pointer_words():
                address = launch.words[word]
                if address and address in given:
                    places.append((index, word, form.pointers.index(address)))
        if {form.pointers[argument] for _, _, argument in places} != set(given):
            return None
        return cls(form, call, launches, places)

    def launch(self, form: _Form) -> bool:
        """Launch with the addresses of `form`; False where the full check has to decide."""
        for reference, value in zip(self._objects, form.objects, strict=True):
            if reference() is not value:  # another object that has the place of one that is gone
                return False
        pointers = form.pointers
        with self._lock:
            if pointers != self._checked:
                if not self._are_apart_and_aligned(pointers):
                    return False
                launches = self._launches.launches
                for launch, word, argument in self._places:
                    launches[launch].words[word] = pointers[argument]
                self._checked = pointers
            self._launches.launch(form.stream)
        return True

    def _are_apart_and_aligned(self, pointers: list[int]) -> bool:
        """Whether outputs are apart from everything else, at addresses that their elements may have."""
        spans = list(self._fixed)
        for pointer, (low, high, is_output, itemsize) in zip(pointers, self._extents, strict=True):
            if pointer % itemsize or (not pointer and low < high):  # misaligned, or an array whose memory is gone
                return False
            spans.append((pointer + low, pointer + high, is_output))
        spans.sort()
        end = output_end = 0
        for first, last, is_output in spans:
            if first < output_end or (is_output and first < end):
                return False
            if last > first:
                end = max(end, last)
                output_end = max(output_end, last) if is_output else output_end
        return True
