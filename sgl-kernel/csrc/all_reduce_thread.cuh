// The all-reduce on the GPU: one thread, and the kernels. all_reduce_device.cuh, or what takes its place, comes first.
#pragma once

#include "all_reduce_kernel.cuh"

namespace fenceline {

constexpr uint32_t kArrived = 1, kShot = 2;  // numbers of the block's barriers

// One thread of the kernel. Its registers hold the generation and the half of the buffers that follows from it.
// `kSize` is the number of ranks, 0 if it is known only at run time.
template <typename T, int kSize>
class GpuThread {
 public:
  static constexpr int kMost = kSize == 0 ? kMaxRanks : kSize;
  using Vector = uint4;
  struct Sum {
    float values[Values<T>::kCount];
  };

  // No thread may touch memory before this: the launch may have begun while the preceding kernel was still running.
  __device__ GpuThread(const AllReduceRequest& request) : r_(request), flags_(own_flags(request)) {
    if (request.pdl > 1) let_next_kernel_start();
    wait_for_previous_kernel();
  }

  __device__ uint32_t block() const { return blockIdx.x; }
  __device__ uint32_t num_blocks() const { return gridDim.x; }
  __device__ uint32_t thread() const { return threadIdx.x; }
  __device__ uint32_t num_threads() const { return r_.num_threads; }
  __device__ int num_ranks() const { return kSize == 0 ? r_.size : kSize; }
  __device__ int count_thread() const { return static_cast<int>(threadIdx.x - r_.num_threads); }
  __device__ int num_count_threads() const { return 32; }

  __device__ void begin() {
    generation_ = load_relaxed(&flags_->launched[blockIdx.x]) + 1;
    half_ = static_cast<uint32_t>(generation_ & 1);
  }
  __device__ void arrive() const { named_arrive(kArrived, r_.num_threads + 32); }
  // The next launch reads what is written here. It begins when this one has ended.
  __device__ void count() const {
    named_sync(kArrived, r_.num_threads + 32);
    if (count_thread() == 0) flags_->launched[blockIdx.x] = generation_;
  }
  __device__ void count_absent() const {
    for (uint32_t i = gridDim.x + count_thread(); i < kMaxBlocks; i += 32) flags_->launched[i] = generation_;
  }
  __device__ void refresh(int peer) const {
    const uint32_t vector = refreshed(r_, generation_);
    if (vector < r_.words_capacity) put_words(peer, vector, make_uint4(0, 0, 0, 0));
  }

  __device__ Vector own(uint32_t v) const { return reinterpret_cast<const uint4*>(r_.x)[v]; }
  __device__ Vector read(uint32_t v) const { return own(v); }
  __device__ void push_words(int peer, uint32_t v, const Vector& value) const { put_words(peer, v, value); }
  __device__ Sum sum_of_words(const Vector& own, uint32_t v) const {
    uint4 vectors[kMost];
    await_words(own, v, vectors);
    return add_up(vectors);
  }
  // All ranks' vectors `v`. Loads all peers' words at once, and again until every word has this generation.
  __device__ void await_words(const Vector& own, uint32_t v, uint4 (&vectors)[kMost]) const {
    Patience patience;
    uint32_t wrong;
    do {
      wrong = 0;
#pragma unroll
      for (int rank = 0; rank < kMost; ++rank) {
        vectors[rank] = own;
        if (takes_part(rank) && rank != r_.rank) wrong |= load_vector(rank, v, vectors[rank]);
      }
    } while (wrong != 0 && goes_on(patience));
  }
  // Vector `v` of those that `rank` has pushed in words.
  __device__ Vector await_vector(int rank, uint32_t v) const {
    Patience patience;
    Vector vector;
    while (load_vector(rank, v, vector) != 0 && goes_on(patience)) {
    }
    return vector;
  }
  __device__ static Vector rounded(const Sum& sum) { return Values<T>::pack(sum.values); }
  // Where rows are divided, this rank's sums lie where others push theirs with flags.
  __device__ void store(uint32_t v, const Sum& sum) const {
    (divides_rows(r_) ? total(v) : reinterpret_cast<uint4*>(r_.x)[v]) = rounded(sum);
  }

  __device__ void push(int peer, uint32_t, uint32_t offset, const Vector& value) const {
    *reinterpret_cast<uint4*>(r_.buffers[peer] + staged_at(r_, half_, r_.rank, offset)) = value;
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
    *reinterpret_cast<uint4*>(to) = rounded(sum);
  }
  __device__ void take(int, uint32_t v) const { reinterpret_cast<uint4*>(r_.x)[v] = total(v); }
  // Vector v of the sums that others push, or that `store` has left there.
  __device__ uint4& total(uint32_t v) const {
    return *reinterpret_cast<uint4*>(r_.buffers[r_.rank] + sums_at(r_, half_, v));
  }

  __device__ bool takes_part(int rank) const { return kSize != 0 || rank < r_.size; }

 private:
  // Loads a vector that `rank` has pushed in words. Not 0 if a word has another generation.
  __device__ __forceinline__ uint32_t load_vector(int rank, uint32_t v, uint4& vector) const {
    const char* from = r_.buffers[r_.rank] + words_at(r_, half_, rank, 0, v);
    const uint32_t tag = static_cast<uint32_t>(generation_);
    uint64_t a, b, c, d;
    load_words(from, a, b);
    load_words(from + uint64_t{r_.words_capacity} * kVectorBytes, c, d);
    vector = make_uint4(uint32_t(a), uint32_t(b), uint32_t(c), uint32_t(d));
    return (uint32_t(a >> 32) ^ tag) | (uint32_t(b >> 32) ^ tag) | (uint32_t(c >> 32) ^ tag) | (uint32_t(d >> 32) ^ tag);
  }
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
    char* to = r_.buffers[peer];
    const uint64_t tag = generation_ << 32;
    store_words(to + words_at(r_, half_, r_.rank, 0, v), tag | value.x, tag | value.y);
    store_words(to + words_at(r_, half_, r_.rank, 1, v), tag | value.z, tag | value.w);
  }

  const AllReduceRequest& r_;
  PeerFlags* flags_;
  uint64_t generation_ = 0;
  uint32_t half_ = 0;
};

namespace {

template <typename T, int kSize>
__global__ void __launch_bounds__(kMaxThreads + 32) one_shot_kernel(const __grid_constant__ AllReduceRequest r) {
  GpuThread<T, kSize> thread(r);
  if (threadIdx.x >= r.num_threads) {
    count_steps(thread, r);
  } else {
    one_shot_steps(thread, r);
  }
}

template <typename T, int kSize>
__global__ void __launch_bounds__(kMaxThreads + 32) two_shot_kernel(const __grid_constant__ AllReduceRequest r) {
  GpuThread<T, kSize> thread(r);
  if (threadIdx.x >= r.num_threads) {
    count_steps(thread, r);
  } else {
    two_shot_steps(thread, r);
  }
}

// The sum of `value` over the threads for data of a block, the same for all of them.
__device__ __forceinline__ float block_sum(float value, uint32_t num_threads, float* parts) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  named_sync(kShot, num_threads);
  float total = 0.0f;
  for (uint32_t i = 0; i < num_threads / 32; ++i) total += parts[i];
  return total;
}

// What follows a row's sum: hidden = round(sum) + residual, normed = hidden / sqrt(mean of squares + eps) * weight.
template <typename T>
class RowEnd {
 public:
  static constexpr int kMost = 4;  // vectors of a row that a thread has

  // Reads weights, while other ranks' vectors are on their way.
  __device__ explicit RowEnd(const AllReduceRequest& request) : r_(request) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const uint32_t c = threadIdx.x + k * r_.num_threads;
      if (c < r_.row_vectors) ahead_[k] = weight(c);
    }
  }

  // `sum_of(v)` is vector v of the sum, rounded. Of the block's threads each has some columns of the row.
  template <typename SumOf>
  __device__ __forceinline__ void finish(uint32_t row, SumOf sum_of) {
    constexpr int kCount = Values<T>::kCount;
    float(&parts)[2][32] = shared_parts();
    uint4 hidden[kMost];
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const uint32_t c = threadIdx.x + k * r_.num_threads;
      if (c >= r_.row_vectors) break;
      const uint32_t v = row * r_.row_vectors + c;
      const uint4 residual = reinterpret_cast<const uint4*>(r_.residual)[v];  // read while `sum_of` waits
      float sum[kCount], added[kCount];
      Values<T>::unpack(sum_of(v), sum);
      Values<T>::unpack(residual, added);
#pragma unroll
      for (int i = 0; i < kCount; ++i) added[i] += sum[i];
      hidden[k] = Values<T>::pack(added);
      reinterpret_cast<uint4*>(r_.hidden)[v] = hidden[k];
      Values<T>::unpack(hidden[k], added);
#pragma unroll
      for (int i = 0; i < kCount; ++i) squares += added[i] * added[i];
    }
    const float mean = block_sum(squares, r_.num_threads, parts[turn_++ % 2]) / (r_.row_vectors * kCount);
    const float scale = rsqrtf(mean + r_.eps);
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const uint32_t c = threadIdx.x + k * r_.num_threads;
      if (c >= r_.row_vectors) break;
      float factors[kCount], values[kCount];
      Values<T>::unpack(k < kAhead ? ahead_[k] : weight(c), factors);
      Values<T>::unpack(hidden[k], values);
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = values[i] * scale * factors[i];
      reinterpret_cast<uint4*>(r_.normed)[row * r_.row_vectors + c] = Values<T>::pack(values);
    }
  }

 private:
  static constexpr int kAhead = 2;  // of kMost, those whose weight is read ahead
  __device__ uint4 weight(uint32_t c) const { return reinterpret_cast<const uint4*>(r_.weight)[c]; }

  const AllReduceRequest& r_;
  uint4 ahead_[kAhead]{};
  uint32_t turn_ = 0;
};

// One shot, a block for each row.
template <typename T, int kSize>
__global__ void __launch_bounds__(kMaxThreads + 32) fused_kernel(const __grid_constant__ AllReduceRequest r) {
  GpuThread<T, kSize> thread(r);
  if (threadIdx.x >= r.num_threads) {
    count_steps(thread, r);
    return;
  }
  const uint32_t num_rows = r.num_vectors / r.row_vectors;
  const uint32_t first = blockIdx.x * r.row_vectors + threadIdx.x;
  const bool has_first = threadIdx.x < r.row_vectors && blockIdx.x < num_rows;
  uint4 own{};
  if (has_first) own = thread.read(first);  // before the generation, as in push_all
  thread.begin();
  thread.arrive();
  if (has_first) push_vector(thread, r, own, first);
  for (uint32_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    for (uint32_t c = threadIdx.x; c < r.row_vectors; c += r.num_threads) {
      const uint32_t v = row * r.row_vectors + c;
      if (v != first) push_vector(thread, r, thread.read(v), v);
    }
  }
  RowEnd<T> end(r);
  for (uint32_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    end.finish(row, [&](uint32_t v) { return thread.rounded(thread.sum_of_words(thread.own(v), v)); });
  }
}

// Two shots. A block takes as many rows at a time as its threads have parts of rows.
template <typename T, int kSize, bool kWords>
__device__ __forceinline__ void fused_shots(const AllReduceRequest& r) {
  GpuThread<T, kSize> thread(r);
  if (threadIdx.x >= r.num_threads) {
    count_steps(thread, r);
    return;
  }
  RowEnd<T> end(r);
  if (kWords) {
    word_shot_steps(thread, r);
  } else {
    two_shot_steps(thread, r);
  }
  const uint32_t part = r.row_vectors / r.size, num_rows = r.num_vectors / r.row_vectors, together = r.num_threads / part;
  for (uint32_t first = blockIdx.x * together; first < num_rows; first += gridDim.x * together) {
    for (uint32_t row = first; row < first + together && row < num_rows; ++row) {
      end.finish(row, [&](uint32_t v) {
        if (!kWords) return thread.total(v);
        const uint32_t column = v - row * r.row_vectors, rank = column / part;
        if (static_cast<int>(rank) == r.rank) return thread.total(v);
        return thread.await_vector(rank, slice_size(r) + row * part + column - rank * part);
      });
    }
  }
}

template <typename T, int kSize>
__global__ void __launch_bounds__(kMaxThreads + 32) fused_two_shot_kernel(const __grid_constant__ AllReduceRequest r) {
  fused_shots<T, kSize, false>(r);
}

template <typename T, int kSize>
__global__ void __launch_bounds__(kMaxThreads + 32) fused_word_shot_kernel(const __grid_constant__ AllReduceRequest r) {
  fused_shots<T, kSize, true>(r);
}

// One shot without a sum: a rank gets all ranks' vectors, in the order of ranks.
__global__ void __launch_bounds__(kMaxThreads + 32) gather_kernel(const __grid_constant__ AllReduceRequest r) {
  GpuThread<float, 0> thread(r);  // of any type: nothing is added up
  if (threadIdx.x >= r.num_threads) {
    count_steps(thread, r);
    return;
  }
  const uint32_t first = blockIdx.x * r.num_threads + threadIdx.x, step = gridDim.x * r.num_threads;
  push_all(thread, r, first, step);
  uint4* out = reinterpret_cast<uint4*>(r.hidden);
  for (uint32_t v = first; v < r.num_vectors; v += step) {
    uint4 vectors[kMaxRanks];
    thread.await_words(thread.own(v), v, vectors);
#pragma unroll
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      if (thread.takes_part(rank)) out[uint64_t{r.num_vectors} * rank + v] = vectors[rank];
    }
  }
}

}  // namespace
}  // namespace fenceline
