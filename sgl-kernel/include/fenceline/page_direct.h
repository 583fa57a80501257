// Divides a page copy into copies of the copy engine: pages that are consecutive on both sides are copied together.
#pragma once

#include "fenceline/page_copy.h"

namespace fenceline {

// `rows` rows of row_bytes, device_stride bytes apart on the device and host_stride on the host. One row: a plain copy.
struct CopyPiece {
  char* device;
  char* host;
  int64_t row_bytes;
  int64_t rows;
  int64_t device_stride;
  int64_t host_stride;
};

constexpr int64_t kMaxPitch = 2147483647;  // cudaDeviceProp::memPitch of every GPU so far

// How many pairs from the i-th on are pages that are consecutive on both sides.
inline int64_t run_length(const PageCopyRequest& r, int64_t i) {
  int64_t n = 1;
  while (i + n < r.num_pages && r.device_pages[i + n] == r.device_pages[i] + n && r.host_pages[i + n] == r.host_pages[i] + n) {
    ++n;
  }
  return n;
}

// Bytes between a page's keys, its values, the next layer's keys, ... on the device; 0 where they are not evenly apart, or
// too far for one strided copy on either side.
inline int64_t even_stride(const PageCopyRequest& r) {
  if (r.host_layer_stride != 2 * r.host_kv_stride || r.host_kv_stride > kMaxPitch) return 0;
  const int64_t stride = r.buffers[1] - r.buffers[0];
  if (stride < r.chunk_bytes || stride > kMaxPitch) return 0;
  for (int32_t part = 2; part < 2 * r.num_layers; ++part) {
    if (r.buffers[part] - r.buffers[part - 1] != stride) return 0;
  }
  return stride;
}

// Calls emit(piece) -> const char* for each piece. Returns null, or what went wrong.
template <typename Emit>
const char* direct_pieces(PageCopyRequest& r, Emit emit) {
  if (const char* wrong = check_page_copy(r)) return wrong;
  const int32_t parts = 2 * r.num_layers;
  const int64_t stride = parts >= r.min_rows ? even_stride(r) : 0;
  for (int64_t i = 0, n = 0; i < r.num_pages; i += n) {
    n = run_length(r, i);
    const bool plain = r.host_page_stride == r.chunk_bytes;  // pages are contiguous on the host as well
    const int64_t row_bytes = plain ? n * r.chunk_bytes : r.chunk_bytes;
    if (stride > 0 && (plain ? row_bytes <= stride : n <= parts)) {  // all layers of a page, or of a run, in one piece
      for (int64_t done = 0; done < n; done += plain ? n : 1) {
        const CopyPiece piece{r.buffers[0] + (r.device_pages[i] + done) * r.chunk_bytes,
                              r.host + (r.host_pages[i] + done) * r.host_page_stride, row_bytes, parts, stride,
                              r.host_kv_stride};
        if (const char* wrong = emit(piece)) return wrong;
      }
      continue;
    }
    const int64_t pages = plain || n < r.min_rows ? 1 : n;  // in each piece that is not plain
    for (int32_t part = 0; part < parts; ++part) {
      char* device = r.buffers[part] + r.device_pages[i] * r.chunk_bytes;
      char* host = r.host + r.host_pages[i] * r.host_page_stride + (part >> 1) * r.host_layer_stride +
                   (part & 1) * r.host_kv_stride;
      for (int64_t done = 0; done < n; done += plain ? n : pages) {
        const CopyPiece piece{device + done * r.chunk_bytes, host + done * r.host_page_stride, row_bytes, pages,
                              r.chunk_bytes, r.host_page_stride};
        if (const char* wrong = emit(piece)) return wrong;
      }
    }
  }
  return nullptr;
}

}  // namespace fenceline
