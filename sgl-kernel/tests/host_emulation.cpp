// The C ABI on the CPU: the headers' own planning, checks and address arithmetic, where the threads of a launch run one
// after the other. With it the CPU suite runs the kernels' logic, and the Python bindings over it, without a GPU.
//   g++ -std=c++17 -O1 -Wall -Wextra -Werror -shared -fPIC -I include tests/host_emulation.cpp
#include <cstring>

#include "fenceline/abi.h"
#include "fenceline/page_direct.h"

namespace {

int32_t num_launches = 0;
int32_t num_plain = 0;    // copies of the copy engine
int32_t num_strided = 0;

template <typename Unit, int kMaxPages>
void copy_all_units(const fenceline::PageCopyParams<kMaxPages>& params, bool to_host) {
  for (uint32_t i = 0; i < params.shape.num_units; ++i) {
    const fenceline::PageUnit unit = fenceline::locate_unit<Unit>(params.shape, params.pages, i);
    std::memcpy(to_host ? unit.host : unit.device, to_host ? unit.device : unit.host, sizeof(Unit));
  }
}

}  // namespace

extern "C" const char* fenceline_arena_fill(const fenceline::FillField* fields, int32_t num_fields, int64_t num_live,
                                            const int64_t* num_live_ptr, void*) {
  fenceline::FillParams params{};
  if (const char* wrong = fenceline::plan_fill(fields, num_fields, num_live, num_live_ptr, &params)) return wrong;
  ++num_launches;
  const int64_t live = params.num_live_ptr != nullptr ? *params.num_live_ptr : params.num_live;
  constexpr uint32_t kStep = 5;  // as many threads
  for (int32_t i = 0; i < params.num_fields; ++i) {
    for (uint32_t first = 0; first < kStep; ++first) fenceline::fill_any_field(params.fields[i], live, first, kStep);
  }
  return nullptr;
}

extern "C" const char* fenceline_copy_pages(fenceline::PageCopyRequest* request, void*) {
  return fenceline::copy_pages(*request, [request](const auto& params, uint32_t unit_bytes) -> const char* {
    ++num_launches;
    const bool to_host = request->to_host != 0;
    if (unit_bytes == 16) copy_all_units<fenceline::Unit16>(params, to_host);
    else if (unit_bytes == 4) copy_all_units<uint32_t>(params, to_host);
    else copy_all_units<uint8_t>(params, to_host);
    return nullptr;
  });
}

extern "C" const char* fenceline_copy_pages_direct(fenceline::PageCopyRequest* request, void*) {
  return fenceline::direct_pieces(*request, [request](const fenceline::CopyPiece& piece) -> const char* {
    ++(piece.rows > 1 ? num_strided : num_plain);
    for (int64_t row = 0; row < piece.rows; ++row) {
      char* device = piece.device + row * piece.device_stride;
      char* host = piece.host + row * piece.host_stride;
      std::memcpy(request->to_host ? host : device, request->to_host ? device : host, static_cast<size_t>(piece.row_bytes));
    }
    return nullptr;
  });
}

// For the tests alone.
extern "C" int32_t emulation_num_launches() { return num_launches; }
extern "C" int32_t emulation_num_plain() { return num_plain; }
extern "C" int32_t emulation_num_strided() { return num_strided; }
extern "C" uint32_t emulation_quotient(uint32_t n, uint32_t divisor) { return fenceline::FastDivisor(divisor).quotient(n); }
extern "C" uint32_t emulation_widest_unit(uint64_t bits) { return fenceline::widest_unit(bits); }
