// All-reduce of 2 to 8 GPUs of one host over memory that they have opened for each other: the memory of a rank, the
// arguments of a launch, and the slices. python/fenceline_sim/all_reduce.py says how it works and why
// flags and buffers can be used again.
//
// x [n] becomes the sum of all ranks' x, added in float32 in the order of ranks and rounded once; or a rank gets all
// ranks' x as they are (kind 5).
#pragma once

#include "fenceline/common.h"

namespace fenceline {

constexpr int kMaxRanks = 8;
constexpr uint32_t kMaxBlocks = 128;      // of a launch; they must all fit the GPU at once
constexpr uint32_t kMaxThreads = 512;     // for data, of a block
constexpr uint32_t kVectorBytes = 16;     // of the message that a thread handles at a time
constexpr uint32_t kParts = 2;            // of 16 bytes that a vector becomes: words of 4 bytes of data, 4 of the generation
constexpr uint32_t kPolls = 4096;         // of a wait, between two checks whether to give it up

// At the beginning of a rank's memory, zero at first. Peers write `shots`, the rank itself the rest.
struct PeerFlags {
  uint64_t launched[kMaxBlocks];             // by block: launches so far, also those that had fewer blocks
  uint64_t shots[2][kMaxBlocks][kMaxRanks];  // by shot, block and peer: the generation that has been pushed
};
constexpr uint32_t kRefresh = 64;  // a pair of launches of so many refreshes a vector's words

// In pinned host memory: through it a launch that waits and the process communicate.
struct PeerWatch {
  uint32_t given_up;  // not 0: no launch waits for a peer any more; set by the process, or by a wait beyond its limit
  uint32_t lost;      // not 0: a launch has given up a wait, so its results, and all that follow, are no sums
};

// Part of the C ABI: python/fenceline_kernel/all_reduce.py mirrors it.
struct AllReduceRequest {
  char* buffers[kMaxRanks];  // all ranks' memory as this process sees it
  char* x;                   // [n], contiguous, a multiple of 16 bytes, at a multiple of 16
  char* const* outputs;      // all ranks' x of this launch, if peers may write there in the second shot; else null
  const char* residual;      // fused only: [rows, row] of the type of x
  const char* weight;        // [row]
  char* hidden;              // [rows, row]: sum + residual; may be `residual`. Kind 5: all ranks' x [size, n]
  char* normed;              // [rows, row]: RMSNorm of hidden
  PeerWatch* watch;          // null: waits have no end
  uint64_t limit_ns;         // of one wait; 0: only the process ends it
  uint32_t num_vectors;
  uint32_t row_vectors;      // fused only: vectors of a row
  uint32_t words_capacity;   // vectors that the words of one rank and half hold
  uint32_t sums_capacity;    // vectors of the largest message in two shots
  uint32_t num_blocks;
  uint32_t num_threads;      // for data, a multiple of 32; 32 more count the launch
  int32_t rank, size;
  int32_t dtype;             // 0 bfloat16, 1 float16, 2 float32
  int32_t kind;              // 0 one shot, 1 two shots, 2 and 3 the same fused with residual and RMSNorm, 4 like 3, but in
                             // words, 5 gather
  float eps;
  // From sm_90 on. 1: launch while the preceding kernel ends; the kernel waits for it before it reads anything. 2: also let
  // the next kernel of the stream start early, which must wait in the same way. Its blocks start when all blocks of this
  // one run, so they take the place of none on this GPU; but where ranks share a GPU, they could take that of a peer's.
  int32_t pdl;
};
static_assert(sizeof(AllReduceRequest) == 176, "mirrored in Python");

FENCELINE_HD bool takes_flags(const AllReduceRequest& r) { return r.kind == 1 || r.kind == 3; }

// Whether each rank adds up a part of every row.
FENCELINE_HD bool divides_rows(const AllReduceRequest& r) { return r.kind == 3 || r.kind == 4; }

FENCELINE_HD uint32_t slice_size(const AllReduceRequest& r) {
  return (r.num_vectors + static_cast<uint32_t>(r.size) - 1) / static_cast<uint32_t>(r.size);
}

// How many vectors the slice has that `rank` adds up in two shots.
FENCELINE_HD uint32_t slice_length(const AllReduceRequest& r, int rank) {
  const uint32_t size = slice_size(r), start = static_cast<uint32_t>(rank) * size;
  if (start >= r.num_vectors) return 0;
  return r.num_vectors - start < size ? r.num_vectors - start : size;
}

// Vector number `offset` of the slice of `rank`. Slices follow each other, or each has a part of every row, so that the
// block that adds up parts of a row is the one that gets the others.
FENCELINE_HD uint32_t slice_vector(const AllReduceRequest& r, int rank, uint32_t offset) {
  if (!divides_rows(r)) return static_cast<uint32_t>(rank) * slice_size(r) + offset;
  const uint32_t part = r.row_vectors / static_cast<uint32_t>(r.size);
  return offset / part * r.row_vectors + static_cast<uint32_t>(rank) * part + offset % part;
}

// How many vectors a rank pushes to each peer in words. In two shots those of the peer's slice are followed by the sums of
// its own.
FENCELINE_HD uint32_t num_words(const AllReduceRequest& r) {
  return takes_flags(r) ? 0 : r.kind == 4 ? 2 * slice_size(r) : r.num_vectors;
}

// Words hold 32 bits of the generation. So that no word is older than 2^32 launches, some launches write the words of a
// vector without data: all vectors in turn. Returns which vector launch `generation` writes, words_capacity if none; a
// launch leaves out those of its message.
FENCELINE_HD uint32_t refreshed(const AllReduceRequest& r, uint64_t generation) {
  const uint64_t pair = generation / 2;
  if (pair % kRefresh != 0) return r.words_capacity;
  const uint32_t vector = static_cast<uint32_t>(pair / kRefresh % r.words_capacity);
  return vector >= num_words(r) ? vector : r.words_capacity;
}

// Where things lie in a rank's memory; `half` is the generation's last bit. The first parts of all vectors are followed
// by the second ones, so that the threads of a warp write whole lines.
FENCELINE_HD uint64_t words_at(const AllReduceRequest& r, uint32_t half, int from, uint32_t part, uint32_t vector) {
  return sizeof(PeerFlags) +
         (((uint64_t{half} * r.size + from) * kParts + part) * r.words_capacity + vector) * kVectorBytes;
}

FENCELINE_HD uint64_t words_end(const AllReduceRequest& r) { return words_at(r, 2, 0, 0, 0); }

FENCELINE_HD uint32_t slice_capacity(const AllReduceRequest& r) {
  return (r.sums_capacity + static_cast<uint32_t>(r.size) - 1) / static_cast<uint32_t>(r.size);
}

// Vector number `offset` of this rank's slice, as `from` has pushed it.
FENCELINE_HD uint64_t staged_at(const AllReduceRequest& r, uint32_t half, int from, uint32_t offset) {
  return words_end(r) + ((uint64_t{half} * r.size + from) * slice_capacity(r) + offset) * kVectorBytes;
}

FENCELINE_HD uint64_t sums_at(const AllReduceRequest& r, uint32_t half, uint32_t vector) {
  return staged_at(r, 2, 0, 0) + (uint64_t{half} * r.sums_capacity + vector) * kVectorBytes;
}

// Bytes of a rank's memory.
FENCELINE_HD uint64_t peer_bytes(const AllReduceRequest& r) { return sums_at(r, 2, 0); }

inline const char* check_all_reduce(const AllReduceRequest& r) {
  if (r.size < 2 || r.size > kMaxRanks || r.rank < 0 || r.rank >= r.size) return "2 to 8 ranks can take part";
  if (r.num_vectors == 0) return "there is nothing to add up";
  if (r.num_blocks == 0 || r.num_blocks > kMaxBlocks) return "1 to 128 blocks";
  if (r.num_threads == 0 || r.num_threads % 32 || r.num_threads > kMaxThreads) return "32 to 512 threads, a multiple of 32";
  if (r.kind < 0 || r.kind > 5 || r.dtype < 0 || r.dtype > 2) return "no such kind or type";
  if (uint64_t{2} * kRefresh * r.words_capacity >= uint64_t{1} << 32) return "words would not be rewritten in time";
  const bool two = takes_flags(r) || r.kind == 4;
  if (!two && r.num_vectors > r.words_capacity) return "the message is too long for one shot";
  if (two && r.num_vectors > r.sums_capacity) return "the message is too long for two shots";
  if (num_words(r) > r.words_capacity) return "the message is too long for words";
  if (r.kind >= 2 && r.kind <= 4) {
    if (r.row_vectors == 0 || r.num_vectors % r.row_vectors) return "the message must be whole rows";
    if (r.row_vectors > 4 * r.num_threads) return "a row is too long for its threads";
    if (two && r.row_vectors % r.size) return "ranks must have equal parts of a row";
    if (two && r.num_threads % (r.row_vectors / r.size)) return "the block's threads must take whole rows";
    if (!r.residual || !r.weight || !r.hidden || !r.normed) return "fused needs a residual, a weight and outputs";
  }
  if (r.kind == 5 && !r.hidden) return "a gather needs an output";
  return nullptr;
}

}  // namespace fenceline
