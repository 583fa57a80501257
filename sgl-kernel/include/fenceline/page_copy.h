// Page copy: KV pages of all layers between the device's pool and pinned host memory, read or written by SMs through
// unified addressing (page_copy.cu) or by the copy engine (page_direct.cu).
//
// A chunk is one page of one layer's keys or values: chunk_bytes = page_size * num_kv_heads * head_dim * itemsize,
// contiguous on both sides.
//   device chunk (page p, layer l, c = 0 keys | 1 values):  buffers[2 * l + c] + p * chunk_bytes
//   host chunk   (page p, layer l, c):  host + p * host_page_stride + l * host_layer_stride + c * host_kv_stride
// which covers layer_first, host [layers][k|v][slot], and page_first, host [page][layer][k|v][token].
// For i < num_pages: page device_pages[i] of the device and page host_pages[i] of the host become equal. A page that is
// listed twice as a destination gets either source. A request with a page out of bounds does nothing.
//
// The lists are host memory, read before the call returns: SMs get them as kernel arguments, so nothing is uploaded and
// there is no staging memory to protect.
#pragma once

#include <algorithm>

#include "fenceline/common.h"

namespace fenceline {

constexpr int kMaxPageCopyLayers = 128;  // per launch; more layers take more launches
constexpr int kMaxPageCopyCtas = 1024;

// Part of the C ABI: python/fenceline_kernel/pages.py mirrors it.
struct PageCopyRequest {
  char* const* buffers;         // host array [2 * num_layers] of device pointers: k0, v0, k1, v1, ...
  char* host;                   // pinned; begins with the first layer that is copied
  const int32_t* device_pages;  // host array [num_pages]
  const int32_t* host_pages;    // the same
  int64_t host_page_stride;     // bytes
  int64_t host_layer_stride;
  int64_t host_kv_stride;
  int64_t chunk_bytes;
  int64_t num_device_pages;     // bounds of the page numbers
  int64_t num_host_pages;
  int64_t num_pages;
  int64_t bad_pair;             // out: the first pair that is out of bounds, -1 if there is none
  int32_t num_layers;
  int32_t num_ctas;             // SMs only: upper bound, so that other kernels can use the other SMs
  int32_t to_host;              // 1: device -> host, 0: host -> device
  int32_t min_rows;             // copy engine only: the fewest consecutive pieces that one strided copy takes
};
static_assert(sizeof(PageCopyRequest) == 112, "mirrored in Python");

struct PagePair {
  int32_t device;
  int32_t host;
};

// The values that the launches of a copy need besides the pages.
struct PageCopyShape {
  char* buffers[2 * kMaxPageCopyLayers];
  char* host;
  int64_t host_page_stride;
  int64_t host_layer_stride;
  int64_t host_kv_stride;
  int64_t chunk_bytes;
  FastDivisor units_per_chunk;
  FastDivisor chunks_per_page;
  uint32_t num_units;
};

// The kernel's argument, passed by value. There are two sizes; the larger is the maximum of CUDA 12.1 from sm_70 on.
template <int kMaxPages>
struct PageCopyParams {
  PageCopyShape shape;
  PagePair pages[kMaxPages];
};
constexpr int kFewPages = 240;
constexpr int kManyPages = 3824;
static_assert(sizeof(PageCopyParams<kFewPages>) <= 4096, "kernel arguments");
static_assert(sizeof(PageCopyParams<kManyPages>) <= 32764, "kernel arguments from CUDA 12.1 on");

// Both ends of one unit.
struct PageUnit {
  char* device;
  char* host;
};

// Unit `index` of the copy, counted over [page][layer][k|v][unit of the chunk].
template <typename Unit>
FENCELINE_HD PageUnit locate_unit(const PageCopyShape& s, const PagePair* pages, uint32_t index) {
  const uint32_t chunk = s.units_per_chunk.quotient(index);
  const uint32_t unit = index - chunk * s.units_per_chunk.divisor;
  const uint32_t i = s.chunks_per_page.quotient(chunk);
  const uint32_t part = chunk - i * s.chunks_per_page.divisor;
  const int64_t offset = static_cast<int64_t>(unit) * static_cast<int64_t>(sizeof(Unit));
  return PageUnit{s.buffers[part] + pages[i].device * s.chunk_bytes + offset,
                  s.host + pages[i].host * s.host_page_stride + (part >> 1) * s.host_layer_stride +
                      (part & 1) * s.host_kv_stride + offset};
}

// Returns null, or what is wrong with the request; sets bad_pair.
inline const char* check_page_copy(PageCopyRequest& r) {
  r.bad_pair = -1;
  if (r.num_layers < 1 || r.num_pages < 0) return "num_layers or num_pages is out of range";
  if (r.chunk_bytes < 1 || r.chunk_bytes > (int64_t{1} << 24)) return "a page of one layer has 1 byte to 16 MiB";
  if (r.num_ctas < 1 || r.num_ctas > kMaxPageCopyCtas) return "num_ctas is 1 to 1024";
  if (r.min_rows < 1) return "min_rows is at least 1";
  for (int64_t i = 0; i < r.num_pages; ++i) {
    const bool inside = r.device_pages[i] >= 0 && r.device_pages[i] < r.num_device_pages && r.host_pages[i] >= 0 &&
                        r.host_pages[i] < r.num_host_pages;
    if (inside) continue;
    r.bad_pair = i;
    return "a page is out of bounds";
  }
  return nullptr;
}

inline uint32_t page_copy_unit(const PageCopyRequest& r) {
  uint64_t bits = static_cast<uint64_t>(r.chunk_bytes) | static_cast<uint64_t>(r.host_page_stride) |
                  static_cast<uint64_t>(r.host_layer_stride) | static_cast<uint64_t>(r.host_kv_stride) |
                  reinterpret_cast<uintptr_t>(r.host);
  for (int32_t i = 0; i < 2 * r.num_layers; ++i) bits |= reinterpret_cast<uintptr_t>(r.buffers[i]);
  const uint32_t width = widest_unit(bits);
  return width == 16 ? 16 : width >= 4 ? 4 : 1;  // the narrower widths occur in tests only
}

// The part of a request that one launch does: layers [first_layer, +num_layers), pages [first_page, +num_pages).
template <int kMaxPages>
PageCopyParams<kMaxPages> page_copy_params(const PageCopyRequest& r, int32_t first_layer, int32_t num_layers,
                                           int64_t first_page, int64_t num_pages, uint32_t unit_bytes) {
  PageCopyParams<kMaxPages> p;  // not cleared: unused entries are never read
  PageCopyShape& s = p.shape;
  std::copy_n(r.buffers + 2 * first_layer, 2 * num_layers, s.buffers);
  s.host = r.host + first_layer * r.host_layer_stride;
  s.host_page_stride = r.host_page_stride;
  s.host_layer_stride = r.host_layer_stride;
  s.host_kv_stride = r.host_kv_stride;
  s.chunk_bytes = r.chunk_bytes;
  s.units_per_chunk = FastDivisor(static_cast<uint32_t>(r.chunk_bytes / unit_bytes));
  s.chunks_per_page = FastDivisor(static_cast<uint32_t>(2 * num_layers));
  s.num_units = static_cast<uint32_t>(num_pages * 2 * num_layers * (r.chunk_bytes / unit_bytes));
  for (int64_t i = 0; i < num_pages; ++i) {
    p.pages[i] = PagePair{r.device_pages[first_page + i], r.host_pages[first_page + i]};
  }
  return p;
}

// Calls launch(params, unit_bytes) -> const char* for each launch. Returns null, or what went wrong.
// One launch unless there are more than 3,824 pages, 128 layers or 2^31 units (32 GiB).
template <typename Launch>
const char* copy_pages(PageCopyRequest& r, Launch launch) {
  if (const char* wrong = check_page_copy(r)) return wrong;
  const uint32_t unit_bytes = page_copy_unit(r);
  for (int32_t layer = 0; layer < r.num_layers; layer += kMaxPageCopyLayers) {
    const int32_t num_layers = std::min(r.num_layers - layer, kMaxPageCopyLayers);
    const int64_t units_per_page = 2 * num_layers * (r.chunk_bytes / unit_bytes);
    const int64_t most = std::clamp<int64_t>(((int64_t{1} << 31) - 1) / units_per_page, 1, kManyPages);
    for (int64_t page = 0; page < r.num_pages; page += most) {
      const int64_t num_pages = std::min(r.num_pages - page, most);
      const char* wrong =
          num_pages <= kFewPages
              ? launch(page_copy_params<kFewPages>(r, layer, num_layers, page, num_pages, unit_bytes), unit_bytes)
              : launch(page_copy_params<kManyPages>(r, layer, num_layers, page, num_pages, unit_bytes), unit_bytes);
      if (wrong != nullptr) return wrong;
    }
  }
  return nullptr;
}

}  // namespace fenceline
