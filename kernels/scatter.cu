// Scatter request token ids: each request's tokens of a flat array go to the start of its row of the pool.
// Several consecutive blocks own a request, a thread every so many of its tokens. Where two requests have one row, each
// token is that of either. No atomics but the status bits. Rows outside the pool and tokens outside the flat array are
// skipped. Cost: 8 bytes read and 4 written a token.

struct ScatterArgs {
  const i64* flat_in;
  const i64* offsets;
  const i64* req_pool_indices;
  int* pool_out;
  int* out_status;
  i64 num_tokens;
  i64 num_rows;
  i64 max_context_len;
  i64 stride0;
  i64 blocks_per_request;
};

// Grid: bs * args.blocks_per_request.
extern "C" __global__ void __launch_bounds__(kScatterThreads) kvc_scatter(const ScatterArgs args) {
  const i64 r = blockIdx.x / args.blocks_per_request;
  const i64 row = args.req_pool_indices[r];
  const i64 start = args.offsets[r];
  const i64 end = args.offsets[r + 1];
  bool is_skipped = row < 0 || row >= args.num_rows || end < start;
  if (!is_skipped) {
    // Unsigned, since hostile offsets may be further apart than 2^63.
    const u64 len = static_cast<u64>(end) - static_cast<u64>(start);
    const u64 num_copied = len < static_cast<u64>(args.max_context_len) ? len : static_cast<u64>(args.max_context_len);
    const u64 step = static_cast<u64>(args.blocks_per_request) * kScatterThreads;
#pragma unroll 4
    for (u64 i = blockIdx.x % args.blocks_per_request * kScatterThreads + threadIdx.x; i < num_copied; i += step) {
      const u64 source = static_cast<u64>(start) + i;
      if (source < static_cast<u64>(args.num_tokens)) {
        args.pool_out[row * args.stride0 + static_cast<i64>(i)] = static_cast<int>(__ldg(args.flat_in + source));
      } else {
        is_skipped = true;
      }
    }
  }
  if (is_skipped) report_status(args.out_status, kStatusScatterOutOfRange);
}
