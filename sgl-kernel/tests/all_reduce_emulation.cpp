// The all-reduce's kernels on the CPU, with the same code except all_reduce_device.cuh: several ranks at once, every CUDA
// thread a thread of the process. The two words of one store arrive in either order, at different times. Launches of all
// kinds and sizes follow each other, ranks are late at random, and the generation passes 2^32.
//   g++ -std=c++20 -O1 -pthread -DFENCELINE_RANKS=2 -DFENCELINE_SIZE=2 -I include -I csrc tests/all_reduce_emulation.cpp
// FENCELINE_SIZE: the number of ranks that the kernels are compiled for, 0 if they learn it at run time. The status is 0
// if all results are right; else a line says what was wrong first.
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint4 {
  uint32_t x, y, z, w;
};
struct Index {
  uint32_t x;
};

#include "fenceline/all_reduce.h"

namespace {

class Barrier {
 public:
  void arrive(uint32_t threads, bool waits) {
    std::unique_lock lock(mutex_);
    const uint64_t turn = turn_;
    if (++arrived_ == threads) {
      arrived_ = 0, ++turn_;
      changed_.notify_all();
    } else if (waits) {
      changed_.wait(lock, [&] { return turn_ != turn; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t arrived_ = 0;
  uint64_t turn_ = 0;
};

struct Block {
  Barrier barriers[3], warps[16];
  float parts[2][32], lanes[512];
};

thread_local Index threadIdx, blockIdx, gridDim;
thread_local Block* block;
thread_local std::minstd_rand random_numbers;

uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
float __shfl_xor_sync(uint32_t, float value, int lanes) {
  Barrier& warp = block->warps[threadIdx.x / 32];
  block->lanes[threadIdx.x] = value;
  warp.arrive(32, true);
  const float other = block->lanes[threadIdx.x ^ static_cast<uint32_t>(lanes)];
  warp.arrive(32, true);
  return other;
}

}  // namespace

namespace fenceline {

using Word = std::atomic_ref<uint64_t>;

inline Word word_at(const char* at) { return Word(*reinterpret_cast<uint64_t*>(const_cast<char*>(at))); }
inline void hesitate() {
  if (random_numbers() % 4 == 0) std::this_thread::yield();
}
inline void store_release(uint64_t* flag, uint64_t value) { Word(*flag).store(value, std::memory_order_release); }
inline uint64_t load_acquire(const uint64_t* flag) {
  hesitate();
  return Word(*const_cast<uint64_t*>(flag)).load(std::memory_order_acquire);
}
inline void store_words(char* to, uint64_t a, uint64_t b) {
  const bool second_first = random_numbers() % 2;
  word_at(second_first ? to + 8 : to).store(second_first ? b : a, std::memory_order_relaxed);
  hesitate();
  word_at(second_first ? to : to + 8).store(second_first ? a : b, std::memory_order_relaxed);
}
inline void load_words(const char* from, uint64_t& a, uint64_t& b) {
  hesitate();
  a = word_at(from).load(std::memory_order_relaxed);
  b = word_at(from + 8).load(std::memory_order_relaxed);
}
inline uint64_t load_relaxed(const uint64_t* from) { return Word(*const_cast<uint64_t*>(from)).load(std::memory_order_relaxed); }
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}
using Watch = std::atomic_ref<uint32_t>;
inline uint32_t load_watch(const uint32_t* at) { return Watch(*const_cast<uint32_t*>(at)).load(std::memory_order_relaxed); }
inline void store_watch(uint32_t* at) { Watch(*at).store(1, std::memory_order_relaxed); }
inline uint64_t nanoseconds() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }
inline void named_sync(uint32_t id, uint32_t threads) { block->barriers[id].arrive(threads, true); }
inline void named_arrive(uint32_t id, uint32_t threads) { block->barriers[id].arrive(threads, false); }
inline float (&shared_parts())[2][32] { return block->parts; }

template <typename T>
struct Values;

template <>
struct Values<float> {
  static constexpr int kCount = 4;
  static void unpack(const uint4& v, float (&f)[4]) { std::memcpy(f, &v, sizeof(v)); }
  static uint4 pack(const float (&f)[4]) {
    uint4 v;
    std::memcpy(&v, f, sizeof(v));
    return v;
  }
};

}  // namespace fenceline

#include "all_reduce_thread.cuh"

using namespace fenceline;

namespace {

constexpr int kRanks = FENCELINE_RANKS;
constexpr uint64_t kBefore = (uint64_t{1} << 32) - 6;  // launches before the first one
constexpr int kRounds = kRanks > 4 ? 1 : 4;  // many ranks on few cores wait for each other most of the time

struct Launch {
  int kind;
  uint32_t num_vectors, num_blocks, num_threads, row_vectors;
};
constexpr uint32_t kRowThreads = kRanks > 4 ? 64 : 32;  // a thread has at most four vectors of a row
constexpr Launch kLaunches[] = {
    {0, 33, 2, 32, 0},   {5, 5, 1, 32, 0},    {2, 80, 2, 64, 40}, {1, 65, 2, 32, 0},  {0, 200, 3, 32, 0},
    {2, 195, 1, 32, 39}, {2, 200, 2, 32, 100}, {0, 1, 1, 32, 0},   {1, 300, 1, 64, 0}, {5, 100, 2, 32, 0},
    {0, 64, 2, 32, 0},   {2, 3, 1, 32, 1},    {0, 130, 2, 64, 0},
    // Two shots of rows, with flags and in words: one row at a time, several, fewer than the threads have room for.
    {3, 32 * kRanks * 2, 2, kRowThreads, 32 * kRanks}, {4, 32 * kRanks * 2, 1, kRowThreads, 32 * kRanks},
    {3, 8 * kRanks * 7, 2, 32, 8 * kRanks}, {4, 8 * kRanks * 7, 2, 32, 8 * kRanks},
    {3, 16 * kRanks * 3, 2, 64, 16 * kRanks}, {4, 16 * kRanks * 4, 2, 64, 16 * kRanks},
};
using Inputs = std::vector<std::vector<float>>;  // by rank

float sum_of(const Inputs& inputs, size_t at) {
  float sum = inputs[0][at];
  for (int rank = 1; rank < kRanks; ++rank) sum += inputs[rank][at];
  return sum;
}

void run_threads(const AllReduceRequest& r, unsigned seed) {
  void (*const kernels[])(AllReduceRequest) = {one_shot_kernel<float, FENCELINE_SIZE>, two_shot_kernel<float, FENCELINE_SIZE>,
                                               fused_kernel<float, FENCELINE_SIZE>,
                                               fused_two_shot_kernel<float, FENCELINE_SIZE>,
                                               fused_word_shot_kernel<float, FENCELINE_SIZE>, gather_kernel};
  std::vector<std::unique_ptr<Block>> blocks(r.num_blocks);
  std::vector<std::thread> threads;
  for (uint32_t b = 0; b < r.num_blocks; ++b) {
    blocks[b] = std::make_unique<Block>();
    for (uint32_t t = 0; t < r.num_threads + 32; ++t) {
      threads.emplace_back([&, b, t] {
        threadIdx = {t}, blockIdx = {b}, gridDim = {r.num_blocks}, block = blocks[b].get();
        random_numbers.seed(seed + 1000 * b + t + 1);
        kernels[r.kind](r);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

// Whether one launch of one rank is right.
bool run_launch(AllReduceRequest r, const Launch& launch, const Inputs& inputs, unsigned seed) {
  const size_t count = launch.num_vectors * 4, row = launch.row_vectors * 4;
  std::vector<float> x = inputs[r.rank], gathered(count * kRanks), residual(count), weight(row), normed(count);
  for (size_t i = 0; i < count; ++i) residual[i] = static_cast<float>(i % 7);
  for (size_t i = 0; i < row; ++i) weight[i] = static_cast<float>(1 + i % 3);
  const std::vector<float> before = residual;
  r.kind = launch.kind, r.dtype = 2, r.num_vectors = launch.num_vectors, r.row_vectors = launch.row_vectors;
  r.num_blocks = launch.num_blocks, r.num_threads = launch.num_threads;
  r.x = reinterpret_cast<char*>(x.data());
  r.residual = reinterpret_cast<const char*>(residual.data()), r.weight = reinterpret_cast<const char*>(weight.data());
  r.hidden = reinterpret_cast<char*>(launch.kind == 5 ? gathered.data() : residual.data());
  r.normed = reinterpret_cast<char*>(normed.data());
  if (check_all_reduce(r) != nullptr) return false;
  run_threads(r, seed);
  for (size_t i = 0; i < count; ++i) {
    const float sum = sum_of(inputs, i);
    if (launch.kind < 2 && x[i] != sum) return false;
    for (int rank = 0; launch.kind == 5 && rank < kRanks; ++rank) {
      if (gathered[rank * count + i] != inputs[rank][i]) return false;
    }
    if (launch.kind < 2 || launch.kind > 4) continue;
    float squares = 0.0f;
    for (size_t c = 0; c < row; ++c) squares += residual[i / row * row + c] * residual[i / row * row + c];
    const float wanted = residual[i] / std::sqrt(squares / static_cast<float>(row) + r.eps) * weight[i % row];
    if (residual[i] != sum + before[i] || std::fabs(normed[i] - wanted) > 1e-4f * std::fabs(wanted) + 1e-5f) return false;
  }
  return true;
}

}  // namespace

int main() {
  constexpr int kCount = static_cast<int>(std::size(kLaunches)) * kRounds;
  AllReduceRequest base{};
  PeerWatch watch{};
  base.watch = &watch;  // nobody gives up, however late a rank is
  base.size = kRanks, base.words_capacity = 200, base.sums_capacity = kRanks > 4 ? 512 : 300, base.eps = 1e-6f;
  std::vector<std::vector<uint4>> memory(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    memory[rank].resize(peer_bytes(base) / sizeof(uint4));
    base.buffers[rank] = reinterpret_cast<char*>(memory[rank].data());
    for (uint64_t& launched : reinterpret_cast<PeerFlags*>(base.buffers[rank])->launched) launched = kBefore;
    for (uint64_t at = sizeof(PeerFlags); at < words_end(base); at += 8) {  // by now all have been rewritten
      const uint64_t old = uint64_t{0x55555555} << 32;
      std::memcpy(base.buffers[rank] + at, &old, 8);
    }
  }
  std::minstd_rand numbers(1);
  std::vector<Inputs> inputs(kCount, Inputs(kRanks));
  for (int i = 0; i < kCount; ++i) {
    for (std::vector<float>& x : inputs[i]) {
      x.resize(kLaunches[i % std::size(kLaunches)].num_vectors * 4);
      for (float& value : x) value = static_cast<float>(static_cast<int>(numbers() % 2001) - 1000) / 333.0f;
    }
  }
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      std::minstd_rand late(rank + 1);
      for (int i = 0; i < kCount; ++i) {
        AllReduceRequest r = base;
        r.rank = rank;
        if (late() % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        const Launch& launch = kLaunches[i % std::size(kLaunches)];
        if (!run_launch(r, launch, inputs[i], late())) {
          std::printf("launch %d of rank %d, kind %d, is wrong\n", i, rank, launch.kind);
          std::fflush(stdout);
          std::_Exit(1);  // the other ranks may wait for this one
        }
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (int rank = 0; rank < kRanks; ++rank) {
    for (const uint64_t launched : reinterpret_cast<PeerFlags*>(base.buffers[rank])->launched) {
      if (launched != kBefore + kCount) return std::printf("a block of rank %d has counted %llu\n", rank, (unsigned long long)launched), 1;
    }
  }
  if (watch.lost || watch.given_up) return std::printf("a rank has given up the others\n"), 1;
  for (const uint32_t given_up : {0u, 1u}) {  // a rank alone: its waits end at their limit, or when the process says so
    for (const int number : {0, 3}) {
      watch = {given_up, 0};
      AllReduceRequest r = base;
      r.limit_ns = given_up ? 0 : 1000000;
      run_launch(r, kLaunches[number], inputs[number], 1);
      if (!watch.lost || !watch.given_up) return std::printf("a rank alone has not said that it gave up\n"), 1;
    }
  }
  return 0;
}
