"""Every error the package raises: text for people, found by slug or by message (`kvcanary explain`)."""

from __future__ import annotations

import re
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
        slug="kv-canary-must-be-exported",
        message="{name} must be exported by its library through DLPack, got {got}",
        trigger="The array's own library refuses to export it, or exports a version of DLPack that is not known.",
        cause="A JAX array sharded over several devices, or a library newer than this package.",
        fix="pass one addressable shard (JAX: array.addressable_data(0)), or a copy in a plain array",
        prevention="Keep the canary's inputs unsharded; each device checks its own pages.",
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
        slug="kv-canary-must-be-a-bool",
        message="{name} must be a bool, got {got}",
        trigger="A number, an array or None stands where True or False belongs.",
        cause="A device flag passed as a host flag, or arguments in the wrong order.",
        fix="pass True or False",
        prevention="Keep host switches and device flags apart: what changes between graph replays is an array.",
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
        trigger="A number is larger than the kernels, or the output that reports it, have room for.",
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
    # -- plan entries and scatter -----------------------------------------------------------------------------
    CatalogueEntry(
        slug="kv-canary-must-be-a-plan",
        message="{name} must be a {expected} of this package, got {got}",
        trigger="Something else stands where a launcher takes a plan.",
        cause="The two plans were exchanged, or a plan type of another program is used.",
        fix="build a VerifyPlan and a WritePlan around the arrays, or call their allocate()",
        prevention="Build both plans once, when the pool is allocated.",
    ),
    CatalogueEntry(
        slug="kv-canary-window-needs-the-mapping",
        message="launch_canary_plan_kernels requires full_to_swa_index_mapping when swa_window_size > 0",
        trigger="A window was given for a table of slots, without the mapping to the sliding-window pool's slots.",
        cause="The full-attention group's call copied for the sliding-window group.",
        fix="pass the pool's full_to_swa_index_mapping, or swa_window_size=0 for full attention",
        prevention="Keep window and mapping together in one place, for each group of layers.",
    ),
    CatalogueEntry(
        slug="kv-canary-verify-capacity-must-equal-the-plans-length",
        message="verify_capacity must equal the verify plan's length {plan_length}, got {got}",
        trigger="The capacity that decides about skipping a step is not the room that the plan has.",
        cause="A plan of another group of layers, or a capacity that was changed after the plan was allocated.",
        fix="pass the length of verify_plan_out.verify_slot_indices",
        prevention="Derive the argument from the plan.",
    ),
    # -- canary buffers and real KV ---------------------------------------------------------------------------
    CatalogueEntry(
        slug="kv-canary-must-be-a-multiple",
        message="{name} must be a multiple of {factor}, got {got}",
        trigger="A size or stride in bytes is not a multiple of what the kernels load at once.",
        cause="A head size or a layout whose tokens do not start at 16-byte boundaries, or padding inside of records.",
        fix="round the size down to a multiple, or pass a view whose rows start at multiples",
        prevention="Pad KV rows to 16 bytes and records to 8; read_bytes may cover a part of a token.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-aligned",
        message="{name} must start at a multiple of {alignment} bytes, got address {got}",
        trigger="The first element's address is not aligned for the kernels' loads.",
        cause="A view that starts in the middle of a token or element, or memory that was cut by hand.",
        fix="pass a view that starts at an aligned element",
        prevention="Allocate with the array library, which aligns to 64 bytes or more, and slice by whole tokens.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-have-rows",
        message="{name} must have at least 2 dimensions, got shape {got}",
        trigger="A real-KV tensor has no row dimension.",
        cause="A flattened KV buffer.",
        fix="reshape it to [rows, bytes or elements of a row]",
        prevention="Pass KV as [pages, ...] or [slots, ...].",
    ),
    CatalogueEntry(
        slug="kv-canary-row-must-hold-a-page",
        message="row of {name} must hold page_size * num_bytes_per_token = {needed} bytes, got {got}",
        trigger="A row of the real-KV tensor is narrower than a page of tokens.",
        cause="page_size of another layout, or bytes per token counted for K and V together.",
        fix="pass the page_size and num_bytes_per_token of this very tensor",
        prevention="Derive both from the tensor's shape and itemsize.",
    ),
    CatalogueEntry(
        slug="kv-canary-source-must-cover-the-slots",
        message="{name} must cover the {num_slots} slots of canary_buf, got {got}",
        trigger="The real-KV tensor has fewer slots (rows times page_size) than the canary buffer.",
        cause="A canary buffer sized for another pool, such as the full pool beside a sliding-window tensor.",
        fix="allocate canary_buf with as many slots as the tensor has",
        prevention="Derive the number of slots from the pool that the tensor belongs to.",
    ),
    CatalogueEntry(
        slug="kv-canary-at-most-4-real-kv-sources",
        message="at most 4 RealKvSource entries supported, got {got}",
        trigger="A context has more than four real-KV sources.",
        cause="One source for each layer.",
        fix="choose up to four layers, or use several contexts",
        prevention="Sample layers: a page that is lost is lost in all of them.",
    ),
    CatalogueEntry(
        slug="kv-canary-real-kv-hash-mode-must-be-known",
        message="{name} must be 0 (NONE), 1 (PARTIAL) or 2 (ALL), got {got}",
        trigger="real_kv_hash_mode is no RealKvHashMode.",
        cause="A mode of another program.",
        fix="pass a RealKvHashMode",
        prevention="Use the enum instead of numbers.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-a-context",
        message="{name} must be a VerifyOrWriteContext or a sequence of them, got {got}",
        trigger="Something else was passed as the context of a write or verify.",
        cause="A canary buffer passed without its context.",
        fix="build a VerifyOrWriteContext around the buffer",
        prevention="Build the contexts once, when the pool is allocated.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-1-to-12-contexts",
        message="{name} must be 1 to {most} contexts, got {got}",
        trigger="A launch was given no context, or more than it has room for.",
        cause="Contexts of several pools joined into one list.",
        fix="launch once for each dozen",
        prevention="One context for each CanaryLaunchTag is the most that a step needs.",
    ),
    CatalogueEntry(
        slug="kv-canary-chain-must-be-known",
        message="{name} must be 'splitmix64' or 'affine', got {got}",
        trigger="The chain argument is no kind of chain.",
        cause="A misspelt name.",
        fix="pass chain='splitmix64' (compatible with the peer) or chain='affine' (parallel writes)",
        prevention="Leave chain out for the default.",
    ),
    CatalogueEntry(
        slug="kv-canary-chain-must-be-that-of-the-buffer",
        message="{name} must be {expected}, with which the buffer was written, got {got}",
        trigger="A buffer that holds records of one kind of chain is written or verified with the other.",
        cause="One of the launches was switched to another chain, the others were not.",
        fix="pass the same chain everywhere; to switch, clear the buffer and call forget_chain(canary_buf)",
        prevention="Keep the chain in one constant beside the contexts.",
    ),
    CatalogueEntry(
        slug="kv-canary-expected-tokens-and-valid-lens-go-together",
        message="{name} must be given with req_to_verify_expected_tokens, and only then",
        trigger="One of the pool of expected tokens and its valid lengths was given without the other.",
        cause="The pool was added to a call, the lengths were not, or the other way round.",
        fix="pass both, or None for both",
        prevention="Keep the pool and the lengths in one object of the engine.",
    ),
    # -- write ------------------------------------------------------------------------------------------------
    CatalogueEntry(
        slug="kv-canary-expected-input-tensors-are-required",
        message="expected input tensors are required when enable_write_input_assert=True",
        trigger="The input check is on, but expected_input_tokens or expected_input_positions is None.",
        cause="The flag was switched on where the engine does not keep the expected inputs.",
        fix="pass both arrays, or enable_write_input_assert=False",
        prevention="Decide the flag from whether the arrays exist.",
    ),
    CatalogueEntry(
        slug="kv-canary-expected-input-tensors-must-be-none",
        message="expected input tensors must be None when enable_write_input_assert=False",
        trigger="Expected inputs were passed, but the input check is off.",
        cause="The flag was switched off, the arrays were left in the call.",
        fix="pass None for both arrays, or enable_write_input_assert=True",
        prevention="Decide the flag from whether the arrays exist.",
    ),
    # -- where it runs ----------------------------------------------------------------------------------------
    CatalogueEntry(
        slug="kv-canary-like-must-be-known",
        message="{name} must be numpy, cupy, torch, jax or an array of one of them, got {got}",
        trigger="The library that results are asked for in is not one of the four.",
        cause="A misspelt name, a module instead of its name, or an array of another library.",
        fix="pass one of the names; any other library may import the results through DLPack",
        prevention="Leave like out: results are then of the inputs' library.",
    ),
    CatalogueEntry(
        slug="kv-canary-like-must-fit-the-device",
        message="{name} must be a library with arrays on the inputs' device ({device}), got {got}",
        trigger="NumPy results were asked for on CUDA, or CuPy results on the CPU.",
        cause="Code written for the CPU was run on CUDA arrays, or the other way round.",
        fix="leave like out and copy the results (CuPy: .get()), or ask for torch or jax",
        prevention="Results share the memory that was computed into; a copy to another device is the caller's.",
    ),
    CatalogueEntry(
        slug="kv-canary-like-must-be-imported",
        message="{name} must be a library that was imported, got {got}",
        trigger="Results were asked for in torch or JAX, which the program has not imported.",
        cause="A name in a configuration of a program that uses another library.",
        fix="import the library first; this package never does",
        prevention="Pass an array of the library instead of its name.",
    ),
    CatalogueEntry(
        slug="kv-canary-device-must-exist",
        message="{name} must be a CUDA device of this machine, got {got}",
        trigger="Arrays are, or are to be, on a CUDA device that the driver does not show.",
        cause="No driver, CUDA_VISIBLE_DEVICES, a wrong index, or an array that claims a device it is not on.",
        fix="run kvcanary doctor, which shows the driver and the device",
        prevention="Take the device from the KV pool's own tensors.",
        is_runtime_error=True,
    ),
    CatalogueEntry(
        slug="kv-canary-must-name-a-device",
        message="{name} must be cpu, cuda, cuda:N or a device object, got {got}",
        trigger="The device to allocate on is not one.",
        cause="A misspelt name, a bare index, or the device of a library that is not supported.",
        fix="pass 'cpu', 'cuda', 'cuda:1', or a torch or CuPy device",
        prevention="Take the device from the KV pool's own tensors.",
    ),
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
        slug="kv-canary-must-be-warmed-up",
        message="kernel {name} must be loaded before a graph is captured, got {got}",
        trigger="The first launch of a kernel on a device happens inside a CUDA graph capture.",
        cause="The engine captures its graphs before it ever ran a step.",
        fix="call cupy_kvcanary.warmup() before the capture: it compiles and loads every kernel for a device",
        prevention="Warm up once for each device when the engine starts.",
        is_runtime_error=True,
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-allocated-before-a-capture",
        message="{name} must be allocated before a graph is captured, got a first call inside a capture",
        trigger="A call that allocates was made inside a CUDA graph capture.",
        cause="A high-level call in the captured step, or launch_canary_plan_kernels without a scratch.",
        fix="capture the launchers, which work in place; pass verify_offsets_scratch or make one call before",
        prevention="Allocate every buffer when the pool is allocated.",
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
    # -- traces and replay ------------------------------------------------------------------------------------
    CatalogueEntry(
        slug="kv-canary-trace-must-be-readable",
        message="{name} must be a readable trace file, got {got}",
        trigger="The trace does not exist, is a folder, or may not be read.",
        cause="A mistyped path, or a path relative to another folder.",
        fix="check the path; leave TRACE out to replay a generated trace",
        prevention="Give absolute paths in scripts.",
    ),
    CatalogueEntry(
        slug="kv-canary-trace-must-be-text",
        message="{name} must be UTF-8 text, got {got}",
        trigger="The trace holds bytes that are no text.",
        cause="A compressed trace, a spreadsheet, or a file in UTF-16.",
        fix="unpack the file, or save it as UTF-8 text",
        prevention="Keep traces as plain .jsonl or .csv.",
    ),
    CatalogueEntry(
        slug="kv-canary-trace-must-not-be-empty",
        message="{name} must hold at least one request, got {got}",
        trigger="The trace has no lines, or only a header.",
        cause="A download that failed, or a filter that kept nothing.",
        fix="fetch the trace again",
        prevention="Compare sizes or checksums after a download.",
    ),
    CatalogueEntry(
        slug="kv-canary-trace-must-be-of-a-known-format",
        message="{name} must be Mooncake JSON lines or an Azure CSV trace, got a first line {got}",
        trigger="The first line is neither a JSON object nor TIMESTAMP,ContextTokens,GeneratedTokens.",
        cause="Another trace format, a CSV without its header, or columns in another order.",
        fix="convert the file: one JSON object a line, or the three columns under that header",
        prevention="Keep the header when cutting rows out of a CSV.",
    ),
    CatalogueEntry(
        slug="kv-canary-trace-line-must-be-json",
        message="{name} must be a JSON object, got {got}",
        trigger="A line of a Mooncake trace is not one whole JSON object.",
        cause="The file was cut in the middle of a line, or pretty-printed over several lines.",
        fix="remove or repair that line",
        prevention="Cut traces by lines (head -n), not by bytes.",
    ),
    CatalogueEntry(
        slug="kv-canary-trace-line-must-have-field",
        message="{name} must have the field {field}, got {got}",
        trigger="A line of a Mooncake trace lacks timestamp, input_length or output_length.",
        cause="A trace of another kind, or renamed fields.",
        fix="add the field; times are in milliseconds, lengths in tokens",
        prevention="Keep the field names of the published trace.",
    ),
    CatalogueEntry(
        slug="kv-canary-trace-line-must-have-three-columns",
        message="{name} must have three columns, got {got}",
        trigger="A row of an Azure trace does not have exactly three values.",
        cause="A row that was cut, or a number written with a thousands separator.",
        fix="write the row as TIMESTAMP,ContextTokens,GeneratedTokens",
        prevention="Do not pass the trace through a spreadsheet.",
    ),
    CatalogueEntry(
        slug="kv-canary-trace-line-must-be-timed",
        message="{name} must give {field} as milliseconds >= 0 (Mooncake) or date and time (Azure), got {got}",
        trigger="The time of a request cannot be read.",
        cause="A negative or missing time, a local date format, or seconds written as text.",
        fix="write timestamp as a number, or TIMESTAMP as YYYY-MM-DD hh:mm:ss.fffffff in UTC",
        prevention="Do not pass the trace through a spreadsheet.",
    ),
    CatalogueEntry(
        slug="kv-canary-trace-line-must-count-tokens",
        message="{name} must give {field} as a whole number in [{least}, {most}], got {got}",
        trigger="A length is negative, not a whole number, or beyond any context; a prompt has at least one token.",
        cause="A failed request logged with length 0 or -1, or a number written as text.",
        fix="remove the line, or write the number of tokens",
        prevention="Filter failed requests out when the trace is recorded.",
    ),
    CatalogueEntry(
        slug="kv-canary-trace-line-must-be-in-time-order",
        message="{name} must not arrive before the line above it, got {got}",
        trigger="The trace is not sorted by time.",
        cause="Logs of several servers joined one after another, or a request logged when it ended.",
        fix="sort the file by arrival",
        prevention="Sort after joining.",
    ),
    CatalogueEntry(
        slug="kv-canary-trace-line-must-be-one-id-per-block",
        message="{name} must give hash_ids as one whole number per 512 prompt tokens, got {got}",
        trigger="The ids of a prompt's blocks are not a list of whole numbers, or too few or too many.",
        cause="A trace with another block length, or an input_length that was changed.",
        fix="write ceil(input_length / 512) ids, or leave hash_ids out: then nothing is shared",
        prevention="Scale lengths and ids together.",
    ),
    CatalogueEntry(
        slug="kv-canary-trace-line-must-keep-the-prefix-of-an-id",
        message="{name} must keep block id {block_id} {known} as in the lines above, got it {got}",
        trigger="The same block id stands after different blocks, so it cannot mean one prefix.",
        cause="Ids that hash a block alone and not all tokens before it, or ids of two traces mixed.",
        fix="number blocks by their whole prefix, or leave hash_ids out: then nothing is shared",
        prevention="Renumber the ids when joining traces.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-divide",
        message="{name} must divide {whole}, got {got}",
        trigger="A page size does not divide the tokens of a prefix block.",
        cause="A page size that is no power of two, or one larger than a block.",
        fix="use 1, 2, 4, ... 512",
        prevention="Take the page size of the engine.",
    ),
    CatalogueEntry(
        slug="kv-canary-pool-must-hold-the-longest-request",
        message="{name} must be at least {least} to hold the longest request, got {got}",
        trigger="A slot pool is smaller than one request of the trace needs, so that one could never run.",
        cause="A small pool with a trace of long prompts.",
        fix="enlarge the pool, or leave its size out: it is then derived from the trace",
        prevention="Size pools from the longest context that is served.",
    ),
    CatalogueEntry(
        slug="kv-canary-must-be-a-finite-positive-number",
        message="{name} must be a finite number above 0, got {got}",
        trigger="A speed-up or step time is zero, negative, infinite or not a number.",
        cause="0 meant as 'no limit', or a result of a division by zero.",
        fix="pass a number above 0; a speed-up of 1 is the trace's own clock",
        prevention="Leave the option out for its default.",
    ),
    CatalogueEntry(
        slug="kv-canary-replay-must-fit-in-memory",
        message="{name} must fit in memory, got {got}",
        trigger="The page table of a replay (running requests times longest request) or its pool is too large.",
        cause="A large --max-running with a trace of long prompts, or a huge pool of small pages.",
        fix="lower --max-running or --pool-slots, or raise --page-size",
        prevention="A table takes 4 bytes for every running request and position.",
        is_runtime_error=True,
    ),
    CatalogueEntry(
        slug="kv-canary-device-must-be-known",
        message="{name} must be auto, cpu or cuda, got {got}",
        trigger="A replay was asked to run on a device of another name.",
        cause="A device with its number, such as cuda:1, or a name of another library.",
        fix="pass auto, cpu or cuda; CUDA_VISIBLE_DEVICES chooses among GPUs",
        prevention="Leave the device out: auto takes CUDA where there is a usable GPU.",
    ),
    CatalogueEntry(
        slug="kv-canary-gpu-must-be-usable",
        message="{name} must have a usable GPU for cuda, got {got}",
        trigger="CUDA was asked for, CuPy is installed, but it finds no GPU.",
        cause="No driver, a driver older than the CUDA runtime, or a container without access to the GPU.",
        fix="run kvcanary doctor; pass --device cpu to run without a GPU",
        prevention="Leave the device at auto where a GPU is not certain.",
        is_runtime_error=True,
    ),
    CatalogueEntry(
        slug="kv-canary-output-file-must-be-writable",
        message="{name} must be a file that can be written, got {got}",
        trigger="The target of --json or --plot is a folder, lies in no existing folder, or may not be written.",
        cause="A mistyped folder, or one that belongs to another user.",
        fix="create the folder, or choose another path",
        prevention="It is tried before the replay starts, so nothing is lost.",
    ),
    CatalogueEntry(
        slug="kv-canary-matplotlib-must-be-installed",
        message="matplotlib must be installed to draw a plot, got {got}",
        trigger="--plot was given but `import matplotlib` fails.",
        cause="The package was installed without the extra for plots.",
        fix="pip install 'cupy-kvcanary[plot]'",
        prevention="Name the extra in the requirements.",
        is_runtime_error=True,
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
    return max(matching, key=lambda entry: len(re.sub(r"{\w+}", "", entry.message)))


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
