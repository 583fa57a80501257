// Numbers of a weight and of x in the registers of the skinny GEMM. Uses the functions of skinny_device.cuh, which must be
// included before this file.
#pragma once

#include <cstdint>

namespace fenceline {

__device__ __forceinline__ float low(uint32_t pair) { return as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widen(uint16_t v) { return as_float(static_cast<uint32_t>(v) << 16); }

__device__ __forceinline__ float sum_of_squares(const uint4& v) {
  float sum = low(v.x) * low(v.x);
  sum = fmaf(high(v.x), high(v.x), sum);
  sum = fmaf(low(v.y), low(v.y), sum);
  sum = fmaf(high(v.y), high(v.y), sum);
  sum = fmaf(low(v.z), low(v.z), sum);
  sum = fmaf(high(v.z), high(v.z), sum);
  sum = fmaf(low(v.w), low(v.w), sum);
  return fmaf(high(v.w), high(v.w), sum);
}

__device__ __forceinline__ float sum_of(const uint4& v) {
  return ((low(v.x) + high(v.x)) + (low(v.y) + high(v.y))) + ((low(v.z) + high(v.z)) + (low(v.w) + high(v.w)));
}

__device__ __forceinline__ uint4 times(const uint4& a, const uint4& b) {
  return make_uint4(multiply_pairs(a.x, b.x), multiply_pairs(a.y, b.y), multiply_pairs(a.z, b.z), multiply_pairs(a.w, b.w));
}

constexpr uint32_t kOnes = 0x3f803f80u;   // two bfloat16
constexpr uint32_t kLarge = 0x5d805d80u;  // 2^60, twice
constexpr uint32_t kLargeFloat = 0x5d800000u;

// The numbers of bytes 0 and 2, and of bytes 1 and 3, of a word of E4M3, as bfloat16 times 2^-120: sign, exponent and
// mantissa are moved to their places in bfloat16, without a correction for the different bias of the exponent.
// Subnormal numbers of E4M3 become subnormal numbers of bfloat16. (E4M3's NaN becomes 480.)
__device__ __forceinline__ uint32_t even_fp8(uint32_t word) {
  return ((word << 8) & 0x80008000u) | ((word << 4) & 0x07f007f0u);
}
__device__ __forceinline__ uint32_t odd_fp8(uint32_t word) { return (word & 0x80008000u) | ((word >> 4) & 0x07f007f0u); }

// x in the order of fp8's pairs: of every four elements first 0 and 2, then 1 and 3, times 2^60, so that with the
// weight's 2^-120 no product leaves float32's normal numbers.
__device__ __forceinline__ uint4 pair_for_fp8(const uint4& v) {
  return make_uint4(multiply_pairs(low_halves(v.x, v.y), kLarge), multiply_pairs(high_halves(v.x, v.y), kLarge),
                    multiply_pairs(low_halves(v.z, v.w), kLarge), multiply_pairs(high_halves(v.z, v.w), kLarge));
}

// Two of a word's eight whole numbers, those in bits 0 and 16 on: 128 + number as bfloat16, whose last bit is worth 1
// from 128 to 255.
__device__ __forceinline__ uint32_t int4_pair(uint32_t word) { return and_or(word, 0x000f000fu, 0x43004300u); }
// The amount by which int4_pair's numbers are too large, 128 + zero point, as a float, whose last bit is worth 1 from
// 2^23 on.
__device__ __forceinline__ float int4_zero(uint32_t byte) { return as_float(0x4b000000u | byte) - (8388608.0f - 128.0f); }

}  // namespace fenceline
