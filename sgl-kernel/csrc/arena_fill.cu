#include <algorithm>

#include "fenceline/abi.h"
#include "launch.cuh"

namespace fenceline {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kMaxBlocksPerField = 64;

// Grid (blocks, fields): a field's units are divided among the blocks of its row of the grid.
__global__ void __launch_bounds__(kThreads) arena_fill_kernel(const __grid_constant__ FillParams params) {
  const int64_t num_live = params.num_live_ptr != nullptr ? *params.num_live_ptr : params.num_live;
  fill_any_field(params.fields[blockIdx.y], num_live, blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads);
}

uint32_t num_blocks(const FillParams& params) {
  uint32_t most = 1;
  for (int32_t i = 0; i < params.num_fields; ++i) {
    const FillField& field = params.fields[i];
    most = std::max(most, (field.size * (field.row_bytes / field.unit_bytes) + kThreads - 1) / kThreads);
  }
  return std::min(most, kMaxBlocksPerField);
}

}  // namespace
}  // namespace fenceline

extern "C" const char* fenceline_arena_fill(const fenceline::FillField* fields, int32_t num_fields, int64_t num_live,
                                            const int64_t* num_live_ptr, void* stream) {
  using namespace fenceline;
  FillParams params{};
  if (const char* wrong = plan_fill(fields, num_fields, num_live, num_live_ptr, &params)) return wrong;
  const dim3 grid(num_blocks(params), static_cast<uint32_t>(num_fields));
  return launch(arena_fill_kernel, grid, kThreads, params, stream);
}
