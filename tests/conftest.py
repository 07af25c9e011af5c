from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cupy_kvcanary.launch import BACKENDS
from tests.helpers.backends import BACKEND_PARAMS, ArrayBackend, HostBackend, require_gpu
from tests.helpers.host_backend import FLAVOURS, HostKernels

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def host_kernels() -> Iterator[dict[str, HostKernels]]:
    """Workers that run the CUDA sources on the CPU, by flavour."""
    kernels = {flavour: HostKernels(flavour) for flavour in FLAVOURS}
    yield kernels
    for flavour in kernels.values():
        flavour.close()


@pytest.fixture(scope="module", params=BACKEND_PARAMS)
def backend(request: pytest.FixtureRequest, host_kernels: dict[str, HostKernels]) -> Iterator[ArrayBackend]:
    """Where a kernel test runs; the test itself does not know."""
    name: str = request.param
    if name == "gpu":
        require_gpu()
    with pytest.MonkeyPatch.context() as patch:
        if name.startswith("host-"):
            patch.setitem(BACKENDS, "cpu", HostBackend(host_kernels[name.removeprefix("host-")]))
        yield ArrayBackend(name)
