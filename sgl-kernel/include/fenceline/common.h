// Definitions that the headers share. They include neither torch nor CUDA headers, so a host compiler reads them as
// well, and the tests run the kernels' own address arithmetic on the CPU.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FENCELINE_HD __host__ __device__ __forceinline__
#else
#define FENCELINE_HD inline
#endif

namespace fenceline {

// One access of 16 bytes, the widest that every GPU has.
struct alignas(16) Unit16 {
  uint32_t x, y, z, w;
};

// Quotients by a divisor known only at run time, as a multiplication and a shift (Granlund and Montgomery, "Division by
// invariant integers using multiplication", 1994, figure 4.1). Dividends are below 2^31, the divisor is in [1, 2^31).
struct FastDivisor {
  uint32_t divisor = 1;
  uint32_t multiplier = 1;
  uint32_t shift = 0;

  FastDivisor() = default;

  explicit FastDivisor(uint32_t d) : divisor(d) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }

  FENCELINE_HD uint32_t quotient(uint32_t n) const {
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> 32);
    return (high + n) >> shift;
  }
};

// The largest of 16, 8, 4, 2 and 1 that divides every number that was joined into `bits` with |.
inline uint32_t widest_unit(uint64_t bits) {
  uint32_t width = 16;
  while (bits & (width - 1)) width >>= 1;
  return width;
}

}  // namespace fenceline
