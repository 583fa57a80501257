// The skinny GEMM on the CPU, with the same code except skinny_device.cuh: every CUDA thread of a cluster is a fiber.
// Where the GPU allows several orders, the emulation takes the one in which an error shows.
//   eager 0: an asynchronous copy ends when it is waited for, and until then its destination holds NaN
//   eager 1: it ends at once, and overwrites what still had to be read there
// x and the residual hold NaN until every thread of a cluster waits for the preceding kernel. A copy or a load beyond its
// operand, or beyond shared memory, is an error.
// FENCELINE_NUMBERS is one of fenceline::Numbers.
//   g++ -std=c++17 -O1 -DFENCELINE_NUMBERS=kBf16 -shared -fPIC -I include -I csrc tests/skinny_emulation.cpp
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline

struct uint4 {
  uint32_t x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct Index {
  uint32_t x;
};

namespace {

struct Barrier {
  uint32_t size = 0, arrived = 0, generation = 0;
};

struct Copy {
  char* to;
  size_t size;
  char bytes[16];
};

struct Warp {
  Barrier barrier;
  uint32_t words[32][6];
  float values[32];
};

struct Cta {
  Barrier barrier;
  std::vector<char> shared;
  std::vector<Warp> warps;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  uint32_t thread = 0, rank = 0;
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
  std::vector<Copy> open;
  bool done = false;
};

// The preceding kernel: its outputs appear once all threads wait for it.
struct Front {
  std::vector<uint16_t> x, residual;
  uint16_t* x_at = nullptr;
  uint16_t* residual_at = nullptr;

  void hide() const {
    std::fill_n(x_at, x.size(), uint16_t{0x7fc0});
    std::fill_n(residual_at, residual.size(), uint16_t{0x7fc0});
  }
  void show() const {
    std::copy(x.begin(), x.end(), x_at);
    std::copy(residual.begin(), residual.end(), residual_at);
  }
};

struct Cluster {
  std::vector<Fiber> fibers;
  std::vector<Cta> ctas;
  Barrier barrier;
  Barrier at_front;  // where all wait for the preceding kernel
  const Front* front = nullptr;
  ucontext_t scheduler;
  uint32_t current = 0;
};

constexpr uint32_t kNan = 0x7fc07fc0u;  // as one float, and as two bfloat16

Index threadIdx, blockIdx, blockDim, gridDim;
Cluster* cluster = nullptr;
bool eager_copies = false;

uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }

Fiber& self() { return cluster->fibers[cluster->current]; }
Cta& cta() { return cluster->ctas[self().rank]; }
Warp& warp() { return cta().warps[self().thread / 32]; }
uint32_t lane() { return self().thread % 32; }

void enter(uint32_t fiber) {
  cluster->current = fiber;
  threadIdx.x = self().thread;
}

void yield() {
  Fiber& fiber = self();
  swapcontext(&fiber.context, &cluster->scheduler);
}

void meet(Barrier& barrier) {
  const uint32_t generation = barrier.generation;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    while (barrier.generation == generation) yield();
  }
}

// ---- skinny_device.cuh's functions and CUDA's own -----------------------------------------------------------------

void __syncthreads() { meet(cta().barrier); }
void __syncwarp() { meet(warp().barrier); }
void cluster_barrier() { meet(cluster->barrier); }
void let_next_kernel_start() {}
void wait_for_previous_kernel() {
  meet(cluster->at_front);
  cluster->front->show();
}
void prefetch_l2(const char* from, uint32_t bytes);

float fast_exp(float v) { return std::exp(v); }
float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
using std::fmaf;

float as_float(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

uint16_t narrow(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  if (v != v) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  const uint32_t low = narrow(as_float(a << 16) * as_float(b << 16));
  const uint32_t high = narrow(as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u));
  return low | high << 16;
}

float __shfl_xor_sync(uint32_t, float v, uint32_t mask) {
  warp().values[lane()] = v;
  __syncwarp();
  const float other = warp().values[lane() ^ mask];
  __syncwarp();
  return other;
}

uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - cta().shared.data());
}

float load_from_cta(const float* mine, uint32_t rank) {
  float v;
  std::memcpy(&v, cluster->ctas[rank].shared.data() + shared_address(mine), 4);
  return v;
}

uint4 load_shared(uint32_t from) {
  uint4 v;
  std::memcpy(&v, cta().shared.data() + from, 16);
  return v;
}

uint32_t load_shared_word(uint32_t from) {
  uint32_t v;
  std::memcpy(&v, cta().shared.data() + from, 4);
  return v;
}

uint2 load_shared_words(uint32_t from) { return {load_shared_word(from), load_shared_word(from + 4)}; }
uint32_t load_shared_byte(uint32_t from) { return static_cast<uint8_t>(cta().shared[from]); }
uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; }

uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xffff) | b << 16; }
uint32_t high_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); }

// Whether global memory that is read belongs to an operand; if not, that is remembered.
std::vector<std::pair<const char*, const char*>> operands;
bool stray_access = false;
bool is_inside(const void* from, size_t size) {
  const char* first = static_cast<const char*>(from);
  for (const auto& [start, end] : operands) {
    if (first >= start && first + size <= end) return true;
  }
  stray_access = true;
  return false;
}

uint4 load_global(const char* from) {
  uint4 v{kNan, kNan, kNan, kNan};
  if (is_inside(from, 16)) std::memcpy(&v, from, 16);
  return v;
}
uint4 load_weight(const char* from, uint64_t) { return load_global(from); }

void start_copy(uint32_t to, const void* from, bool live, size_t size) {
  if (to + size > cta().shared.size()) {
    stray_access = true;
    return;
  }
  Copy copy{cta().shared.data() + to, size, {}};
  if (live && is_inside(from, size)) std::memcpy(copy.bytes, from, size);
  if (eager_copies) {
    std::memcpy(copy.to, copy.bytes, size);
    return;
  }
  for (size_t i = 0; i < size; i += 4) std::memcpy(copy.to + i, &kNan, 4);
  self().open.push_back(copy);
}

void copy_async(uint32_t to, const char* from, bool live) { start_copy(to, from, live, 16); }
void copy_word_async(uint32_t to, const void* from, bool live) { start_copy(to, from, live, 4); }
void copy_weight_async(uint32_t to, const char* from, bool live, uint64_t) { copy_async(to, from, live); }
uint64_t evict_first_policy() { return 0; }

void commit_copies() {
  self().groups.push_back(std::move(self().open));
  self().open.clear();
}

void wait_for_oldest(uint32_t depth) {
  std::vector<std::vector<Copy>>& groups = self().groups;
  while (groups.size() > depth - 1) {
    for (const Copy& copy : groups.front()) std::memcpy(copy.to, copy.bytes, copy.size);
    groups.erase(groups.begin());
  }
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  Warp& mine = warp();
  const uint32_t words[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(mine.words[lane()], words, sizeof(words));
  __syncwarp();
  const auto element = [&](uint32_t owner, uint32_t word, uint32_t k) {
    const uint32_t pair = mine.words[owner][word];
    return as_float(k % 2 ? pair & 0xffff0000u : pair << 16);
  };
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = lane() / 4 + (i / 2) * 8, column = (lane() % 4) * 2 + i % 2;
    for (uint32_t k = 0; k < 16; ++k) {
      const uint32_t quad = k % 8 / 2, half = k / 8;
      const float a = element(row % 8 * 4 + quad, half * 2 + row / 8, k);
      const float b = element(column * 4 + quad, 4 + half, k);
      d[i] += a * b;
    }
  }
  __syncwarp();
}

}  // namespace

#include "skinny_direct.cuh"
#include "skinny_kernel.cuh"

namespace {

using namespace fenceline;

constexpr Numbers kNumbers = Numbers::FENCELINE_NUMBERS;
SkinnyGemmParams params;
const char* weight_end = nullptr;
bool stray_prefetch = false;

void prefetch_l2(const char* from, uint32_t bytes) {
  stray_prefetch |= from < params.weight || from + bytes > weight_end || bytes % 16 != 0 || bytes == 0;
}

template <int kRowTiles, int kTiles>
void run_thread(bool norm) {
  char* shared = cta().shared.data();
  if (norm) {
    SkinnyGemm<kNumbers, kRowTiles, kTiles, true>(params, shared).run();
  } else {
    SkinnyGemm<kNumbers, kRowTiles, kTiles, false>(params, shared).run();
  }
}

const SkinnyGemmRequest* request = nullptr;

template <int kDepth>
void run_direct_thread(bool norm) {
  if constexpr (kNumbers == Numbers::kFp8 || kNumbers == Numbers::kInt4) {
    char* shared = cta().shared.data();
    if (norm) {
      DirectGemm<kNumbers, kDepth, true>(params, shared).run();
    } else {
      DirectGemm<kNumbers, kDepth, false>(params, shared).run();
    }
  }
}

// With FENCELINE_ONE_KERNEL only the kernel for 8 rows and 2 tiles is compiled, which takes a quarter of the time.
void fiber_main() {
  const bool norm = request->norm_weight != nullptr;
  if (request->direct) {
    request->depth == 2 ? run_direct_thread<2>(norm) : run_direct_thread<4>(norm);
    self().done = true;
    yield();
  }
#ifdef FENCELINE_ONE_KERNEL
  run_thread<1, 2>(norm);
#else
  const bool few = request->rows <= 8;
  switch (request->tiles) {
    case 2: few ? run_thread<1, 2>(norm) : run_thread<2, 2>(norm); break;
    case 3: run_thread<1, 3>(norm); break;
    case 4: few ? run_thread<1, 4>(norm) : run_thread<2, 4>(norm); break;
    default: run_thread<1, 6>(norm);
  }
#endif
  self().done = true;
  yield();
}

void run_cluster(uint32_t first_block, uint32_t num_warps, const Front& front) {
  front.hide();
  Cluster mine;
  const uint32_t threads = num_warps * 32, ctas = params.cluster;
  mine.front = &front;
  mine.barrier.size = mine.at_front.size = threads * ctas;
  mine.ctas.resize(ctas);
  for (Cta& one : mine.ctas) {
    one.barrier.size = threads;
    one.shared.assign(shared_bytes(*request, params), 0);
    for (size_t i = 0; i + 4 <= one.shared.size(); i += 4) std::memcpy(one.shared.data() + i, &kNan, 4);
    one.warps.resize(num_warps);
    for (Warp& each : one.warps) each.barrier.size = 32;
  }
  mine.fibers.resize(threads * ctas);
  cluster = &mine;
  for (uint32_t i = 0; i < mine.fibers.size(); ++i) {
    constexpr size_t kStack = 64 << 10;
    Fiber& fiber = mine.fibers[i];
    fiber.thread = i % threads;
    fiber.rank = i / threads;
    fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
  }
  bool ended = false;
  while (!ended) {
    ended = true;
    for (uint32_t end = static_cast<uint32_t>(mine.fibers.size()); end > 0; end -= 32) {
      const Barrier& barrier = mine.ctas[(end - 1) / threads].warps[(end - 1) % threads / 32].barrier;
      uint32_t before;
      do {  // a warp runs as far as it can, and only then the others
        before = barrier.generation;
        for (uint32_t i = end; i-- > end - 32;) {  // lanes that copy for others run last
          if (mine.fibers[i].done) continue;
          ended = false;
          enter(i);
          blockIdx.x = first_block + self().rank;
          swapcontext(&mine.scheduler, &mine.fibers[i].context);
        }
      } while (barrier.generation != before);
    }
  }
  cluster = nullptr;
}

}  // namespace

// Like fenceline_skinny_gemm, on the CPU; num_ctas 0 means one block for each CTA, as there.
extern "C" const char* fenceline_emulate_skinny_gemm(const SkinnyGemmRequest* asked, int32_t eager) {
  if (const char* wrong = check_skinny_gemm(*asked)) return wrong;
  if (numbers_of(*asked) != kNumbers) return "compiled for other numbers";
  SkinnyGemmRequest own = *asked;
  const size_t num_x = static_cast<size_t>(own.rows) * own.k;
  std::vector<uint4> x((num_x + 7) / 8);  // aligned to 16 bytes
  std::vector<uint16_t> residual;
  Front front;
  front.x.assign(static_cast<const uint16_t*>(own.x), static_cast<const uint16_t*>(own.x) + num_x);
  own.x = front.x_at = reinterpret_cast<uint16_t*>(x.data());
  if (own.residual != nullptr) {
    const uint16_t* from = static_cast<const uint16_t*>(own.residual);
    front.residual.assign(from, from + static_cast<size_t>(own.rows) * own.num_out);
    residual.resize(front.residual.size());
    own.residual = front.residual_at = residual.data();
  }
  request = &own;
  params = plan_skinny_gemm(own);
  weight_end = params.weight + static_cast<size_t>(params.weight_rows) * own.k * bits_of(kNumbers) / 8;
  stray_prefetch = stray_access = false;
  const size_t groups = own.group == 0 ? 1 : (own.k + own.group - 1) / own.group, num_scales = groups * params.weight_rows;
  operands = {{params.x, params.x + num_x * 2}, {params.weight, weight_end}};
  if (params.norm_weight) operands.push_back({params.norm_weight, params.norm_weight + own.k * 2});
  if (params.scales) operands.push_back({(const char*)params.scales, (const char*)(params.scales + num_scales)});
  if (params.zeros) operands.push_back({params.zeros, params.zeros + num_scales});
  eager_copies = eager != 0;
  const uint32_t num_warps = static_cast<uint32_t>(own.warps_n * own.warps_k);
  blockDim.x = num_warps * 32;
  const uint32_t most = params.num_blocks * params.cluster;
  gridDim.x = own.num_ctas == 0 ? most : std::min(most, static_cast<uint32_t>(own.num_ctas));
  for (uint32_t block = 0; block < gridDim.x; block += params.cluster) {
    run_cluster(block, num_warps, front);
  }
  if (stray_access) return "a copy or a load left its operand";
  return stray_prefetch ? "a prefetch left the weight" : nullptr;
}
