// The all-reduce on the GPU: the instructions of each step.
//
// Between GPUs, only st.release.sys and ld.acquire.sys order accesses. Words are st.relaxed.sys and ld.relaxed.sys of
// 64 bits, each one access that holds data and generation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "all_reduce_kernel.cuh"

namespace fenceline {

__device__ __forceinline__ void store_release(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void store_words(char* to, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}

__device__ __forceinline__ void load_words(const char* from, uint64_t& a, uint64_t& b) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
}

__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// The words of PeerWatch, which lie in the host's memory.
__device__ __forceinline__ uint32_t load_watch(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_watch(uint32_t* to) {
  asm volatile("st.relaxed.sys.global.u32 [%0], 1;" ::"l"(to) : "memory");
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

// Counts this block as one that has read the generation; returns how many blocks did before.
__device__ __forceinline__ uint32_t take_ticket(uint32_t* ticket) {
  uint32_t number;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(number) : "l"(ticket) : "memory");
  return number;
}

// Barrier `id` of `threads` threads of the block: named_sync waits there, named_arrive arrives without waiting.
__device__ __forceinline__ void named_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <typename T>
struct Values;

template <>
struct Values<__nv_bfloat16> {
  static constexpr int kCount = 8;
  static __device__ __forceinline__ void unpack(const uint4& v, float (&f)[8]) {
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = __bfloat1622float2(pairs[i]);
      f[2 * i] = two.x, f[2 * i + 1] = two.y;
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[8]) {
    uint4 v;
    __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
    return v;
  }
};

template <>
struct Values<__half> {
  static constexpr int kCount = 8;
  static __device__ __forceinline__ void unpack(const uint4& v, float (&f)[8]) {
    const __half2* pairs = reinterpret_cast<const __half2*>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = __half22float2(pairs[i]);
      f[2 * i] = two.x, f[2 * i + 1] = two.y;
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[8]) {
    uint4 v;
    __half2* pairs = reinterpret_cast<__half2*>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(f[2 * i], f[2 * i + 1]);
    return v;
  }
};

template <>
struct Values<float> {
  static constexpr int kCount = 4;
  static __device__ __forceinline__ void unpack(const uint4& v, float (&f)[4]) {
    f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y), f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[4]) {
    return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
  }
};

constexpr uint32_t kArrived = 1, kShot = 2;  // numbers of the block's barriers

// One thread of the kernel. Its registers hold the generation and the half of the buffers that follows from it.
// `kSize` is the number of ranks, 0 if it is known only at run time.
template <typename T, int kSize>
class GpuThread {
 public:
  using Vector = uint4;
  struct Sum {
    float values[Values<T>::kCount];
  };

  __device__ GpuThread(const AllReduceRequest& request) : r_(request), flags_(own_flags(request)) {}

  __device__ uint32_t block() const { return blockIdx.x; }
  __device__ uint32_t num_blocks() const { return gridDim.x; }
  __device__ uint32_t thread() const { return threadIdx.x; }
  __device__ uint32_t num_threads() const { return r_.num_threads; }
  __device__ int flag_thread() const { return static_cast<int>(threadIdx.x - r_.num_threads); }
  __device__ int num_flag_threads() const { return 32; }

  __device__ void begin() {
    generation_ = load_relaxed(&flags_->launched) + 1;
    half_ = static_cast<uint32_t>(generation_ & 1);
  }
  __device__ void arrive() const { named_arrive(kArrived, r_.num_threads + 32); }
  __device__ void ticket() const {
    named_sync(kArrived, r_.num_threads + 32);
    if (flag_thread() == 0 && take_ticket(&flags_->ticket) == gridDim.x - 1) {
      flags_->ticket = 0;
      flags_->launched = generation_;  // the next launch reads it, which begins when this one has ended
    }
  }
  __device__ void release_start(int peer) const { store_release(&flags_of(peer)->start[r_.rank], generation_); }
  __device__ void acquire_start(int peer) const { spin(&flags_->start[peer]); }
  __device__ void refresh(int peer) const {
    const uint32_t vector = static_cast<uint32_t>(generation_ / 2 % r_.words_capacity);
    if (r_.kind == 1 || vector >= r_.num_vectors) put_words(peer, vector, make_uint4(0, 0, 0, 0));
  }

  __device__ Vector own(uint32_t v) const { return reinterpret_cast<const uint4*>(r_.x)[v]; }
  __device__ Vector read(uint32_t v) const { return own(v); }
  __device__ void push_words(int peer, uint32_t v, const Vector& value) const { put_words(peer, v, value); }
  // Loads all peers' words at once, and again until every word has this generation.
  __device__ Sum sum_of_words(const Vector& own, uint32_t v) const {
    const char* from = r_.buffers[r_.rank] + words_at(r_, half_, 0, v);
    const uint64_t stride = uint64_t{r_.words_capacity} * kWordsBytes;
    const uint32_t tag = static_cast<uint32_t>(generation_);
    uint4 parts[kMost];
    Patience patience;
    uint32_t wrong;
    do {
      wrong = 0;
#pragma unroll
      for (int rank = 0; rank < kMost; ++rank) {
        parts[rank] = own;
        if (!takes_part(rank) || rank == r_.rank) continue;
        uint64_t a, b, c, d;
        load_words(from + rank * stride, a, b);
        load_words(from + rank * stride + 16, c, d);
        wrong |= (uint32_t(a >> 32) ^ tag) | (uint32_t(b >> 32) ^ tag) | (uint32_t(c >> 32) ^ tag) | (uint32_t(d >> 32) ^ tag);
        parts[rank] = make_uint4(uint32_t(a), uint32_t(b), uint32_t(c), uint32_t(d));
      }
    } while (wrong != 0 && goes_on(patience));
    return add_up(parts);
  }
  // Vector `v` of `peer`, unchanged, from this rank's buffer.
  __device__ Vector words_of(int peer, uint32_t v) const {
    const char* from = r_.buffers[r_.rank] + words_at(r_, half_, peer, v);
    const uint32_t tag = static_cast<uint32_t>(generation_);
    Patience patience;
    uint64_t a, b, c, d;
    uint32_t wrong;
    do {
      load_words(from, a, b);
      load_words(from + 16, c, d);
      wrong = (uint32_t(a >> 32) ^ tag) | (uint32_t(b >> 32) ^ tag) | (uint32_t(c >> 32) ^ tag) | (uint32_t(d >> 32) ^ tag);
    } while (wrong != 0 && goes_on(patience));
    return make_uint4(uint32_t(a), uint32_t(b), uint32_t(c), uint32_t(d));
  }
  __device__ void store(uint32_t v, const Sum& sum) const { reinterpret_cast<uint4*>(r_.x)[v] = Values<T>::pack(sum.values); }

  __device__ void push(int peer, uint32_t v, uint32_t offset) const {
    *reinterpret_cast<uint4*>(r_.buffers[peer] + staged_at(r_, half_, r_.rank, offset)) = own(v);
  }
  __device__ void barrier() const { named_sync(kShot, r_.num_threads); }
  __device__ void release(int peer, int shot) const {
    store_release(&flags_of(peer)->shots[shot][blockIdx.x][r_.rank], generation_);
  }
  __device__ void acquire(int peer, int shot) const { spin(&flags_->shots[shot][blockIdx.x][peer]); }
  __device__ Sum sum_of_staged(const Vector& own, uint32_t, uint32_t offset) const {
    uint4 parts[kMost];
#pragma unroll
    for (int rank = 0; rank < kMost; ++rank) {
      parts[rank] = own;
      if (!takes_part(rank) || rank == r_.rank) continue;
      parts[rank] = *reinterpret_cast<const uint4*>(r_.buffers[r_.rank] + staged_at(r_, half_, rank, offset));
    }
    return add_up(parts);
  }
  __device__ void push_sum(int peer, uint32_t v, const Sum& sum) const {
    char* to = r_.outputs != nullptr ? r_.outputs[peer] + uint64_t{v} * kVectorBytes
                                     : r_.buffers[peer] + sums_at(r_, half_, v);
    *reinterpret_cast<uint4*>(to) = Values<T>::pack(sum.values);
  }
  __device__ void take(int, uint32_t v) const {
    const uint4 value = *reinterpret_cast<const uint4*>(r_.buffers[r_.rank] + sums_at(r_, half_, v));
    reinterpret_cast<uint4*>(r_.x)[v] = value;
  }

 private:
  static constexpr int kMost = kSize == 0 ? kMaxRanks : kSize;

  __device__ bool takes_part(int rank) const { return kSize != 0 || rank < r_.size; }
  // Adds in float32, in the order of ranks. The sum is rounded when it is stored.
  __device__ Sum add_up(const uint4 (&parts)[kMost]) const {
    Sum sum;
#pragma unroll
    for (int rank = 0; rank < kMost; ++rank) {
      float part[Values<T>::kCount];
      Values<T>::unpack(parts[rank], part);
#pragma unroll
      for (int i = 0; i < Values<T>::kCount; ++i) {
        if (rank == 0) {
          sum.values[i] = part[i];
        } else if (takes_part(rank)) {
          sum.values[i] += part[i];
        }
      }
    }
    return sum;
  }
  static __device__ PeerFlags* own_flags(const AllReduceRequest& r) {
    return reinterpret_cast<PeerFlags*>(r.buffers[r.rank]);
  }
  __device__ PeerFlags* flags_of(int peer) const { return reinterpret_cast<PeerFlags*>(r_.buffers[peer]); }
  __device__ void spin(const uint64_t* flag) const {
    Patience patience;
    while (load_acquire(flag) < generation_ && goes_on(patience)) {
    }
  }
  // How long a wait has lasted.
  struct Patience {
    uint32_t polls = 0;
    uint64_t began = 0;
  };
  // Whether a wait continues: false if the process has given up the peers, or if the wait has lasted too long. The
  // host's memory and the clock are read only every few milliseconds, so a wait for ranks that are alive costs only a
  // counter.
  __device__ __forceinline__ bool goes_on(Patience& patience) const {
    return ++patience.polls % kPolls != 0 || r_.watch == nullptr || !is_given_up(r_, patience);
  }
  static __device__ __forceinline__ bool is_given_up(const AllReduceRequest& r, Patience& patience) {
    const uint64_t now = nanoseconds();
    if (patience.began == 0) patience.began = now;
    const bool too_long = r.limit_ns != 0 && now - patience.began > r.limit_ns;
    if (!too_long && load_watch(&r.watch->given_up) == 0) return false;
    store_watch(&r.watch->lost);
    store_watch(&r.watch->given_up);
    return true;
  }
  __device__ void put_words(int peer, uint32_t v, const uint4& value) const {
    char* to = r_.buffers[peer] + words_at(r_, half_, r_.rank, v);
    const uint64_t tag = generation_ << 32;
    store_words(to, tag | value.x, tag | value.y);
    store_words(to + 16, tag | value.z, tag | value.w);
  }

  const AllReduceRequest& r_;
  PeerFlags* flags_;
  uint64_t generation_ = 0;
  uint32_t half_ = 0;
};

}  // namespace fenceline
