// The steps of the all-reduce's threads as the kernel's own code makes them, for comparison with
// python/fenceline_sim/all_reduce.py: a text of "act peer vector" lines.
//   g++ -std=c++17 -O1 -shared -fPIC -I include -I csrc tests/all_reduce_trace.cpp
#include <cstring>
#include <string>

#include "all_reduce_kernel.cuh"

using namespace fenceline;

namespace {

class Trace {
 public:
  static constexpr int kMost = kMaxRanks;
  struct Vector {};
  struct Sum {};

  Trace(const AllReduceRequest& request, uint32_t block, uint32_t thread) : r_(request), block_(block), thread_(thread) {}

  uint32_t block() const { return block_; }
  uint32_t num_blocks() const { return r_.num_blocks; }
  uint32_t thread() const { return thread_; }
  uint32_t num_threads() const { return r_.num_threads; }
  int num_ranks() const { return r_.size; }
  int count_thread() const { return 0; }
  int num_count_threads() const { return 1; }

  void begin() { note("begin"); }
  void arrive() { note("arrive"); }
  void count() { note("count"); }
  void count_absent() { note("count_absent"); }
  void refresh(int peer) { note("refresh", peer); }
  Vector own(uint32_t) { return {}; }
  Vector read(uint32_t v) { return note("read", -1, v), Vector{}; }
  void push_words(int peer, uint32_t v, const Vector&) { note("push_words", peer, v); }
  Sum sum_of_words(const Vector&, uint32_t v) { return parts("await_words", v); }
  void store(uint32_t v, const Sum&) { note("sum", -1, v); }
  Vector rounded(const Sum&) { return {}; }
  void push(int peer, uint32_t v, uint32_t, const Vector&) { note("push", peer, v); }
  void barrier() { note("barrier"); }
  void release(int peer, int shot) { note("release", peer, shot); }
  void acquire(int peer, int shot) { note("acquire", peer, shot); }
  Sum sum_of_staged(const Vector&, uint32_t v, uint32_t) { return parts("load", v); }
  void push_sum(int peer, uint32_t v, const Sum&) { note("push_sum", peer, v); }
  void take(int peer, uint32_t v) { note("take", peer, v); }

  std::string text;

 private:
  Sum parts(const char* act, uint32_t v) {
    for (int rank = 0; rank < r_.size; ++rank) {
      if (rank != r_.rank) note(act, rank, v);
    }
    return {};
  }
  void note(const char* act, int peer = -1, int64_t vector = -1) {
    text += std::string(act) + " " + std::to_string(peer) + " " + std::to_string(vector) + "\n";
  }

  const AllReduceRequest& r_;
  uint32_t block_, thread_;
};

}  // namespace

// The steps of `thread` of `block`; thread `num_threads` is the one that counts. Returns how many bytes the text has, and
// writes those that fit.
extern "C" uint64_t fenceline_trace_all_reduce(const AllReduceRequest* request, uint32_t block, uint32_t thread, char* out,
                                               uint64_t room) {
  Trace trace(*request, block, thread);
  if (thread == request->num_threads) {
    count_steps(trace, *request);
  } else if (takes_flags(*request)) {
    two_shot_steps(trace, *request);
  } else if (request->kind == 4) {
    word_shot_steps(trace, *request);
  } else {
    one_shot_steps(trace, *request);
  }
  if (trace.text.size() <= room) std::memcpy(out, trace.text.data(), trace.text.size());
  return trace.text.size();
}

extern "C" uint64_t fenceline_peer_bytes(const AllReduceRequest* request) { return peer_bytes(*request); }

// Where things lie in a rank's memory: the first and the second part of words, staging, sums.
extern "C" uint64_t fenceline_place(const AllReduceRequest* request, int32_t part, uint32_t half, int32_t from, uint32_t at) {
  if (part < 2) return words_at(*request, half, from, part, at);
  return part == 2 ? staged_at(*request, half, from, at) : sums_at(*request, half, at);
}

extern "C" uint32_t fenceline_refreshed(const AllReduceRequest* request, uint64_t generation) {
  return refreshed(*request, generation);
}

extern "C" const char* fenceline_check_all_reduce(const AllReduceRequest* request) { return check_all_reduce(*request); }
