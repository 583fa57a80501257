// Arena fill: the live rows of up to 32 graph inputs and the padding behind them, in one launch.
//
// Field f:  dst [size, row_bytes]  contiguous, device
//           src [src_rows, src_row_bytes], rows src_row_stride bytes apart; device memory or pinned host memory (UVA)
// After it: dst[r, :src_row_bytes] = src[r]      for r < live,  live = min(num_live, size, src_rows)
//           every other byte b of a row = byte b % 8 of `pad`
// num_live is a number (fixed when a graph is captured) or is read from device memory when the kernel runs.
// No source may overlap any destination: blocks run in any order.
#pragma once

#include "fenceline/common.h"

namespace fenceline {

constexpr int kMaxFillFields = 32;

// Part of the C ABI: python/fenceline_kernel/library.py mirrors it.
struct FillField {
  const char* src;          // may be null if src_rows is 0: then everything is padding
  char* dst;
  uint64_t pad;             // eight bytes, the pad value repeated
  uint32_t src_rows;
  uint32_t src_row_bytes;   // <= row_bytes: the rest of each row is padding (a page table's columns)
  uint32_t src_row_stride;  // bytes
  uint32_t size;            // rows of dst
  uint32_t row_bytes;
  uint32_t unit_bytes;      // bytes per access; set by plan_fill
};
static_assert(sizeof(FillField) == 48, "mirrored in Python");

// The kernel's argument, passed by value, so nothing is copied to the device before the launch. 1,560 of 4,096 bytes.
struct FillParams {
  FillField fields[kMaxFillFields];
  const int64_t* num_live_ptr;  // null: num_live counts
  int64_t num_live;
  int32_t num_fields;
};

// Copies the descriptors and chooses the access widths. Returns null, or what is wrong with the arguments.
inline const char* plan_fill(const FillField* fields, int32_t num_fields, int64_t num_live,
                             const int64_t* num_live_ptr, FillParams* params) {
  if (num_fields < 1 || num_fields > kMaxFillFields) return "arena_fill takes 1 to 32 fields";
  if (num_live < 0) return "num_live is negative";
  params->num_live_ptr = num_live_ptr;
  params->num_live = num_live;
  params->num_fields = num_fields;
  for (int32_t i = 0; i < num_fields; ++i) {
    FillField field = fields[i];
    if (field.dst == nullptr || field.row_bytes == 0) return "a field has no destination";
    if (field.src == nullptr && field.src_rows != 0) return "a field has rows to copy but no source";
    if (field.src_row_bytes > field.row_bytes) return "a source row is longer than its destination row";
    if (field.src_rows == 0) field.src_row_bytes = field.src_row_stride = 0;
    field.unit_bytes = widest_unit(reinterpret_cast<uintptr_t>(field.src) | reinterpret_cast<uintptr_t>(field.dst) |
                                   field.src_row_bytes | field.src_row_stride | field.row_bytes);
    if (uint64_t{field.size} * (field.row_bytes / field.unit_bytes) >= (uint64_t{1} << 31)) return "a field is too large";
    params->fields[i] = field;
  }
  return nullptr;
}

FENCELINE_HD uint32_t live_rows(const FillField& field, int64_t num_live) {
  int64_t live = num_live < 0 ? 0 : num_live;
  live = live < field.size ? live : field.size;
  return static_cast<uint32_t>(live < field.src_rows ? live : field.src_rows);
}

// The pad bytes of one unit that starts at byte `offset` of a row.
template <typename Unit>
FENCELINE_HD Unit pad_unit(uint64_t pad, uint32_t offset) {
  return static_cast<Unit>(pad >> ((offset & 7u) * 8u));
}

template <>
FENCELINE_HD Unit16 pad_unit<Unit16>(uint64_t pad, uint32_t) {
  const uint32_t low = static_cast<uint32_t>(pad), high = static_cast<uint32_t>(pad >> 32);
  return Unit16{low, high, low, high};
}

// One thread's share of a field: every `step`-th unit from `first`.
template <typename Unit>
FENCELINE_HD void fill_field(const FillField& field, uint32_t live, uint32_t first, uint32_t step) {
  const uint32_t units_per_row = field.row_bytes / static_cast<uint32_t>(sizeof(Unit));
  const uint32_t num_units = field.size * units_per_row;
  Unit* dst = reinterpret_cast<Unit*>(field.dst);
  for (uint32_t i = first; i < num_units; i += step) {
    const uint32_t row = i / units_per_row;
    const uint32_t offset = (i - row * units_per_row) * static_cast<uint32_t>(sizeof(Unit));
    Unit value = pad_unit<Unit>(field.pad, offset);
    if (row < live && offset < field.src_row_bytes) {
      value = *reinterpret_cast<const Unit*>(field.src + uint64_t{row} * field.src_row_stride + offset);
    }
    dst[i] = value;
  }
}

FENCELINE_HD void fill_any_field(const FillField& field, int64_t num_live, uint32_t first, uint32_t step) {
  const uint32_t live = live_rows(field, num_live);
  switch (field.unit_bytes) {
    case 16: return fill_field<Unit16>(field, live, first, step);
    case 8: return fill_field<uint64_t>(field, live, first, step);
    case 4: return fill_field<uint32_t>(field, live, first, step);
    case 2: return fill_field<uint16_t>(field, live, first, step);
    default: return fill_field<uint8_t>(field, live, first, step);
  }
}

}  // namespace fenceline
