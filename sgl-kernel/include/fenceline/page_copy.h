// Page copy: KV pages of all layers between the device's pool and pinned host memory, in one launch, read or written by
// SMs through unified addressing.
//
// A chunk is one page of one layer's keys or values: chunk_bytes = page_size * num_kv_heads * head_dim * itemsize,
// contiguous on both sides.
//   device chunk (page p, layer l, c = 0 keys | 1 values):  buffers[2 * l + c] + p * chunk_bytes
//   host chunk   (page p, layer l, c):  host + p * host_page_stride + l * host_layer_stride + c * host_kv_stride
// which covers layer_first, host [layers][k|v][slot], and page_first, host [page][layer][k|v][token].
// For i < num_pages: page device_pages[i] of the device and page host_pages[i] of the host become equal. A page named twice
// as a destination gets either source. A page number outside its side's bounds is skipped and counted.
#pragma once

#include <algorithm>

#include "fenceline/common.h"

namespace fenceline {

constexpr int kMaxPageCopyLayers = 128;  // per launch; more layers take more launches
constexpr int kMaxPageCopyCtas = 1024;

// Part of the C ABI: python/fenceline_kernel/library.py mirrors it.
struct PageCopyRequest {
  char* const* buffers;         // host array [2 * num_layers] of device pointers: k0, v0, k1, v1, ...
  char* host;                   // pinned, of the first layer copied
  const void* device_pages;     // device array [num_pages] of int32 or int64
  const void* host_pages;       // the same
  int32_t* num_rejected;        // device counter or null: += 1 for each page skipped, per launch
  int64_t host_page_stride;     // bytes
  int64_t host_layer_stride;
  int64_t host_kv_stride;
  int64_t chunk_bytes;
  int64_t num_device_pages;     // bounds of the page numbers
  int64_t num_host_pages;
  int64_t num_pages;
  int32_t num_layers;
  int32_t index_bytes;          // 4 or 8
  int32_t num_ctas;             // upper bound; the rest of the SMs stay with whoever else runs
  int32_t to_host;              // 1: device -> host, 0: host -> device
};
static_assert(sizeof(PageCopyRequest) == 112, "mirrored in Python");

// The kernel's argument, passed by value.
struct PageCopyParams {
  char* buffers[2 * kMaxPageCopyLayers];
  char* host;
  const void* device_pages;
  const void* host_pages;
  int32_t* num_rejected;
  int64_t host_page_stride;
  int64_t host_layer_stride;
  int64_t host_kv_stride;
  int64_t chunk_bytes;
  int64_t num_device_pages;
  int64_t num_host_pages;
  FastDivisor units_per_chunk;
  FastDivisor chunks_per_page;
  uint32_t num_units;
  int32_t index_bytes;
};
static_assert(sizeof(PageCopyParams) <= 4096, "kernel arguments");

// Both ends of one unit; null where there is nothing to copy. `first` marks the first unit of a page.
struct PageUnit {
  char* device;
  char* host;
  bool first;
};

FENCELINE_HD int64_t page_at(const void* pages, int32_t index_bytes, uint32_t i) {
  return index_bytes == 8 ? static_cast<const int64_t*>(pages)[i] : static_cast<const int32_t*>(pages)[i];
}

// Unit `index` of the copy, counted over [page][layer][k|v][unit of the chunk].
template <typename Unit>
FENCELINE_HD PageUnit locate_unit(const PageCopyParams& p, uint32_t index) {
  const uint32_t chunk = p.units_per_chunk.quotient(index);
  const uint32_t unit = index - chunk * p.units_per_chunk.divisor;
  const uint32_t i = p.chunks_per_page.quotient(chunk);
  const uint32_t part = chunk - i * p.chunks_per_page.divisor;
  const int64_t device_page = page_at(p.device_pages, p.index_bytes, i);
  const int64_t host_page = page_at(p.host_pages, p.index_bytes, i);
  const bool first = unit == 0 && part == 0;
  if (device_page < 0 || device_page >= p.num_device_pages || host_page < 0 || host_page >= p.num_host_pages) {
    return PageUnit{nullptr, nullptr, first};
  }
  const int64_t offset = static_cast<int64_t>(unit) * static_cast<int64_t>(sizeof(Unit));
  return PageUnit{p.buffers[part] + device_page * p.chunk_bytes + offset,
                  p.host + host_page * p.host_page_stride + (part >> 1) * p.host_layer_stride +
                      (part & 1) * p.host_kv_stride + offset,
                  first};
}

inline const char* check_page_copy(const PageCopyRequest& r) {
  if (r.num_layers < 1 || r.num_pages < 0) return "num_layers or num_pages is out of range";
  if (r.chunk_bytes < 1 || r.chunk_bytes > (int64_t{1} << 24)) return "a page of one layer has 1 byte to 16 MiB";
  if (r.index_bytes != 4 && r.index_bytes != 8) return "page numbers are int32 or int64";
  if (r.num_ctas < 1 || r.num_ctas > kMaxPageCopyCtas) return "num_ctas is 1 to 1024";
  return nullptr;
}

inline uint32_t page_copy_unit(const PageCopyRequest& r) {
  uint64_t bits = static_cast<uint64_t>(r.chunk_bytes) | static_cast<uint64_t>(r.host_page_stride) |
                  static_cast<uint64_t>(r.host_layer_stride) | static_cast<uint64_t>(r.host_kv_stride) |
                  reinterpret_cast<uintptr_t>(r.host);
  for (int32_t i = 0; i < 2 * r.num_layers; ++i) bits |= reinterpret_cast<uintptr_t>(r.buffers[i]);
  const uint32_t width = widest_unit(bits);
  return width == 16 ? 16 : width >= 4 ? 4 : 1;  // narrower ones are for odd tests, not for speed
}

// The part of a request that one launch does: layers [first_layer, +num_layers), pages [first_page, +num_pages).
inline PageCopyParams page_copy_params(const PageCopyRequest& r, int32_t first_layer, int32_t num_layers,
                                       int64_t first_page, int64_t num_pages, uint32_t unit_bytes) {
  PageCopyParams p{};
  std::copy_n(r.buffers + 2 * first_layer, 2 * num_layers, p.buffers);
  p.host = r.host + first_layer * r.host_layer_stride;
  p.device_pages = static_cast<const char*>(r.device_pages) + first_page * r.index_bytes;
  p.host_pages = static_cast<const char*>(r.host_pages) + first_page * r.index_bytes;
  p.num_rejected = r.num_rejected;
  p.host_page_stride = r.host_page_stride;
  p.host_layer_stride = r.host_layer_stride;
  p.host_kv_stride = r.host_kv_stride;
  p.chunk_bytes = r.chunk_bytes;
  p.num_device_pages = r.num_device_pages;
  p.num_host_pages = r.num_host_pages;
  p.units_per_chunk = FastDivisor(static_cast<uint32_t>(r.chunk_bytes / unit_bytes));
  p.chunks_per_page = FastDivisor(static_cast<uint32_t>(2 * num_layers));
  p.num_units = static_cast<uint32_t>(num_pages * 2 * num_layers * (r.chunk_bytes / unit_bytes));
  p.index_bytes = r.index_bytes;
  return p;
}

// Calls launch(params, unit_bytes, to_host, num_ctas) -> const char* for each launch; null, or what went wrong.
// One launch unless there are more than 128 layers or 2^31 units (32 GiB).
template <typename Launch>
const char* copy_pages(const PageCopyRequest& r, Launch launch) {
  if (const char* wrong = check_page_copy(r)) return wrong;
  const uint32_t unit_bytes = page_copy_unit(r);
  for (int32_t layer = 0; layer < r.num_layers; layer += kMaxPageCopyLayers) {
    const int32_t num_layers = std::min(r.num_layers - layer, kMaxPageCopyLayers);
    const int64_t units_per_page = 2 * num_layers * (r.chunk_bytes / unit_bytes);
    const int64_t most = std::max<int64_t>(((int64_t{1} << 31) - 1) / units_per_page, 1);
    for (int64_t page = 0; page < r.num_pages; page += most) {
      const int64_t num_pages = std::min(r.num_pages - page, most);
      const PageCopyParams p = page_copy_params(r, layer, num_layers, page, num_pages, unit_bytes);
      if (const char* wrong = launch(p, unit_bytes, r.to_host != 0, r.num_ctas)) return wrong;
    }
  }
  return nullptr;
}

}  // namespace fenceline
