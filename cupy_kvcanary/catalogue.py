"""Every error the package raises: text for people, found by slug or by message (`kvcanary explain`)."""

from __future__ import annotations

from typing import Any

from .errors import PREFIX, CatalogueEntry, KvCanaryError, KvCanaryRuntimeError

_ENTRIES = (
    # -- arrays -----------------------------------------------------------------------------------------------
    CatalogueEntry(
        slug="kv-canary-must-be-an-array",
        message="{name} must be an array (NumPy, DLPack or __cuda_array_interface__), got {got}",
        trigger="An argument that must be an array has none of the array interfaces.",
        cause="A Python list, a number or None where the strict launchers want a buffer that already exists.",
        fix="pass a NumPy array, a torch tensor, a CuPy array or any object with __dlpack__",
        prevention="Allocate the buffers once, next to the KV pool. `plan_offsets` also takes lists.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-not-require-grad",
        message="{name} must not require grad, got a tensor with requires_grad=True",
        trigger="A torch tensor that autograd tracks was passed.",
        cause="The tensor is a parameter, or was computed from one outside `torch.no_grad()`.",
        fix="pass tensor.detach(): it shares the memory and is not tracked",
        prevention="Keep index and KV buffers out of autograd: create them under `torch.inference_mode()`.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-on-a-known-device",
        message="{name} must be on a CPU or CUDA device, got {got}",
        trigger="The array's memory is on a device that is neither CPU nor CUDA.",
        cause="A ROCm, Metal, Vulkan or similar tensor.",
        fix="copy the array to the CPU or to a CUDA device first",
        prevention="Keep the canary's buffers on the device of the KV pool.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-contiguous",
        message="{name} must be contiguous",
        trigger="The array's elements do not lie one after another in C order.",
        cause="A slice with a step, a column slice, a transpose or a broadcast view.",
        fix="pass a contiguous copy (torch: .contiguous(), NumPy and CuPy: ascontiguousarray)",
        prevention="Give every buffer its own allocation. `plan_offsets` takes a page table with strided rows.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-have-contiguous-rows",
        message="{name} must have contiguous rows, got strides {got}",
        trigger="The elements of one row of a 2-D array do not lie one after another.",
        cause="A transposed page table, or a slice that takes every n-th column.",
        fix="pass a view whose last dimension has stride 1; rows may be any positive distance apart",
        prevention="Store the page table row-major, one request a row.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-have-dtype",
        message="{name} must have dtype {expected}, got {got}",
        trigger="The array's element type is not the one that the kernel reads or writes.",
        cause="int32 index buffers in an engine that uses int64, or a page table that was built as int64.",
        fix="create the buffer with the named dtype; nothing is cast silently",
        prevention="Index arrays are int64, page tables and scalars int32. `plan_offsets` takes int32 and int64.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-n-d",
        message="{name} must be {rank}-D, got shape {got}",
        trigger="The array has the wrong number of dimensions.",
        cause="A batch dimension too many, a scalar instead of a one-element array, or a flattened page table.",
        fix="reshape it: index arrays are 1-D, page tables are 2-D [request rows, positions]",
        prevention="Take the shapes from the launcher's docstring.",
    ),
    CatalogueEntry(
        slug="kv-canary-length-must-be",
        message="{name} length must be {expected}, got {got}",
        trigger="An array does not have exactly the length that the other arguments imply.",
        cause="Arrays of different batches were mixed, or a one-element output was allocated larger.",
        fix="pass arrays of one batch; for padded static buffers give bs= as well",
        prevention="Slice all index arrays of a batch by the same bs.",
    ),
    CatalogueEntry(
        slug="kv-canary-length-must-be-at-least",
        message="{name} length must be >= {least}, got {got}",
        trigger="An array is too short for what the kernel writes to it or reads from it.",
        cause="A scratch of bs_block_size elements (it needs one more, for the total), or bs larger than a buffer.",
        fix="allocate at least the named number of elements",
        prevention="Size buffers from the same constants: scratch bs_block_size + 1, write offsets capacity + 1.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-on-one-device",
        message="{name} must be on {reference}'s device {expected}, got {got}",
        trigger="The arrays of one call are on different devices.",
        cause="A host array among CUDA arrays, or two GPUs mixed up.",
        fix="move the named array to the other arrays' device",
        prevention="Allocate every buffer of a pool on the pool's device.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-writable",
        message="{name} must be writable, got a read-only array",
        trigger="An output array is read-only.",
        cause="A JAX array (these are immutable), a NumPy array with writeable=False, or a view of one.",
        fix="pass a buffer that may be written: a NumPy or CuPy array or a torch tensor",
        prevention="Allocate outputs with NumPy, CuPy or torch.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-not-overlap",
        message="{name} must not overlap {other}, got shared memory",
        trigger="An output shares memory with another argument.",
        cause="The same buffer passed twice, or two slices of one buffer that meet.",
        fix="give each output memory of its own",
        prevention="Allocate outputs separately, or cut them from one buffer without overlap.",
    ),
    # -- numbers ----------------------------------------------------------------------------------------------
    CatalogueEntry(
        slug="kv-canary-must-be-an-int",
        message="{name} must be an int, got {got}",
        trigger="A bool, a float or another object stands where a whole number belongs.",
        cause="A size computed with `/`, a flag passed in the wrong place, or a device scalar.",
        fix="pass a Python int (NumPy integers are taken too)",
        prevention="Compute sizes with `//`, and keep capacities on the host.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-non-negative",
        message="{name} must be non-negative, got {got}",
        trigger="A size, capacity or window is below zero.",
        cause="A sentinel such as -1 for 'no window' or 'no limit', or a difference that went negative.",
        fix="pass 0 or more; a window of 0 means full attention",
        prevention="Use 0 for no window, and None where a parameter's default is None.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-positive",
        message="{name} must be positive, got {got}",
        trigger="A length or a row stride is zero or less.",
        cause="An empty output (write offsets hold at least the total), a page table without columns or broadcast.",
        fix="allocate at least one element; a page table needs at least one column and real rows",
        prevention="Allocate write offsets as capacity + 1, and page tables for the longest sequence.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-at-most",
        message="{name} must be at most {most}, got {got}",
        trigger="A capacity or batch is larger than the int32 output that reports it can hold.",
        cause="A 'no limit' sentinel such as 2**63 - 1 used as a capacity.",
        fix="pass a capacity that fits int32, or leave verify_capacity of plan_offsets at None",
        prevention="Derive capacities from the pool: rows times longest sequence.",
    ),
    CatalogueEntry(
        slug="kv-canary-offsets-kernel-bs-must-be-in-0-plan",
        message="offsets kernel bs must be in [0, {bs_block_size}], got {got}",
        trigger="The strict launcher was given more requests than bs_block_size, or a negative bs.",
        cause="A batch beyond 4096 requests in code written for a single-block kernel.",
        fix="launch in chunks, raise bs_block_size (with a scratch to match), or use plan_offsets, which has no bound",
        prevention="Set bs_block_size to the engine's largest batch when the buffers are allocated.",
    ),
    CatalogueEntry(
        slug="kv-canary-lut-len-must-be-positive",
        message="lut_len must be positive when has_swa_lut is True",
        trigger="full_to_swa_index_mapping was given but is empty.",
        cause="A mapping that was not filled yet, or an engine without a sliding window passing an empty one.",
        fix="pass the filled mapping, or None where there is no sliding-window pool",
        prevention="Create the mapping together with the sliding-window pool.",
    ),
    CatalogueEntry(
        slug="kv-canary-write-offsets-len-must-equal-write-req-capacity-plus-1",
        message="write_offsets_len must equal write_req_capacity + 1, got {got} and {write_req_capacity}",
        trigger="out_write_offsets is not one longer than out_write_seed_slot_indices.",
        cause="Both outputs were allocated with the same length; the offsets also hold the total.",
        fix="allocate out_write_offsets with one element more than out_write_seed_slot_indices",
        prevention="Allocate the two together.",
    ),
    CatalogueEntry(
        slug="kv-canary-bs-exceeds-write-req-capacity",
        message="bs={got} exceeds write_req_capacity={write_req_capacity}",
        trigger="There are more requests than the write outputs have room for.",
        cause="The write outputs were sized for a smaller batch.",
        fix="allocate the write outputs for the largest batch",
        prevention="Size every per-request buffer from one largest batch.",
    ),
    # -- where it runs ----------------------------------------------------------------------------------------
    CatalogueEntry(
        slug="kv-canary-stream-must-be-a-stream",
        message="stream must be None, an int handle or a stream object, got {got}",
        trigger="The stream argument has neither `ptr`, `cuda_stream` nor `__cuda_stream__` and is no int.",
        cause="A device, an event or a context manager passed as the stream.",
        fix="pass a CuPy or torch stream, its int handle, or None for the arrays' current stream",
        prevention="Leave stream at None unless the launch must go on a stream that is not current.",
    ),
    CatalogueEntry(
        slug="kv-canary-stream-must-be-none-for-cpu-arrays",
        message="stream must be None for CPU arrays, got {got}",
        trigger="A stream was given, but the arrays are in host memory.",
        cause="Code written for the GPU was run on CPU arrays.",
        fix="leave stream out for CPU arrays",
        prevention="Take the stream and the arrays from the same device object.",
    ),
    CatalogueEntry(
        slug="kv-canary-cupy-must-be-installed",
        message="cupy must be installed to run on CUDA arrays, got {got}",
        trigger="CUDA arrays were passed but `import cupy` fails.",
        cause="The package was installed without the extra for the machine's CUDA version.",
        fix="pip install 'cupy-kvcanary[cuda12x]' (CUDA 12) or 'cupy-kvcanary[cuda13x]' (CUDA 13)",
        prevention="Name the extra in the deployment's requirements.",
        is_runtime_error=True,
    ),
    CatalogueEntry(
        slug="kv-canary-sources-must-be-installed",
        message="kernels/{name} must be readable, got {got}",
        trigger="A CUDA source file of the package is missing.",
        cause="A broken installation, or a packaging tool that dropped the .cu files.",
        fix="reinstall cupy-kvcanary",
        prevention="Package the folder cupy_kvcanary/kernels with its .cu and .cuh files.",
        is_runtime_error=True,
    ),
    CatalogueEntry(
        slug="kv-canary-kernel-must-compile",
        message="kernel {name} must compile, got {got}",
        trigger="NVRTC or the driver refused a kernel of the package.",
        cause="A driver older than the NVRTC that is installed, two CuPy wheels, or a read-only kernel cache.",
        fix="run kvcanary doctor; it shows driver, NVRTC and cache folder (CUPY_CACHE_DIR moves the cache)",
        prevention="Match the CuPy wheel to the driver: cuda12x for CUDA 12, cuda13x for CUDA 13.",
        is_runtime_error=True,
    ),
    CatalogueEntry(
        slug="kv-canary-kernel-must-launch",
        message="kernel {name} must launch, got {got}",
        trigger="The driver refused to launch a kernel.",
        cause="An earlier, unrelated fault left the CUDA context unusable, or the stream belongs to another device.",
        fix="look for the first CUDA error of the process (CUDA_LAUNCH_BLOCKING=1 helps), and check the stream",
        prevention="Pass streams of the arrays' own device.",
        is_runtime_error=True,
    ),
    # -- command line -----------------------------------------------------------------------------------------
    CatalogueEntry(
        slug="kv-canary-slug-must-be-known",
        message="slug must be a slug or a message of the catalogue, got {got}",
        trigger="`kvcanary explain` was asked about a text that matches no entry.",
        cause="A message of another program, or one that was cut.",
        fix="kvcanary explain --list shows every slug",
        prevention="Copy the slug from the last line of the error.",
    ),
)

CATALOGUE: dict[str, CatalogueEntry] = {entry.slug: entry for entry in _ENTRIES}


def error(slug: str, **fields: Any) -> KvCanaryError | KvCanaryRuntimeError:
    """The exception of `slug`, with the fields of its message filled in. The caller raises it."""
    entry = CATALOGUE[slug]
    return (KvCanaryRuntimeError if entry.is_runtime_error else KvCanaryError)(entry, fields)


def find_entry(slug_or_message: str) -> CatalogueEntry:
    """The entry that a slug names or that a message (with or without its prefix) belongs to."""
    text = slug_or_message.strip()
    if text in CATALOGUE:
        return CATALOGUE[text]
    matching = [entry for entry in _ENTRIES if text and entry.matches(text)]
    if not matching:
        raise error("kv-canary-slug-must-be-known", name="slug", got=repr(slug_or_message))
    # Where a message fits several patterns, the one with the most fixed text is its own.
    return max(matching, key=lambda entry: len(entry.message))


def as_markdown() -> str:
    """The whole catalogue as the page docs/errors.md."""
    lines = ["# Errors", "", "Generated from the catalogue by `kvcanary explain --markdown`; do not edit.", ""]
    for entry in _ENTRIES:
        lines += [f"## `{entry.slug}`", "", f"`{PREFIX}{entry.message}`", "", *_body(entry), ""]
    return "\n".join(lines)


def as_text(entry: CatalogueEntry) -> str:
    """One entry for a terminal."""
    return "\n".join([entry.slug, f"  {PREFIX}{entry.message}", "", *_body(entry)])


def _body(entry: CatalogueEntry) -> list[str]:
    kind = KvCanaryRuntimeError.__name__ if entry.is_runtime_error else KvCanaryError.__name__
    return [
        f"- Raised as: {kind}",
        f"- What triggers it: {entry.trigger}",
        f"- Where it usually comes from: {entry.cause}",
        f"- How to fix it: {entry.fix}",
        f"- How to prevent it: {entry.prevention}",
    ]
