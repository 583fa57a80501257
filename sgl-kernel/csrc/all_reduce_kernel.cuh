// The steps of the all-reduce for one thread, the same and in the same order as in fenceline_sim/all_reduce.py.
// `Machine` carries them out: the GPU (all_reduce_thread.cuh), or the trace of tests/all_reduce_trace.cpp, which is
// compared with Python's.
#pragma once

#include "fenceline/all_reduce.h"

namespace fenceline {

// Other ranks, beginning with the next one.
FENCELINE_HD int peer_number(const AllReduceRequest& r, int i) {
  const int number = r.rank + i;
  return number < r.size ? number : number - r.size;
}

// The thread of a block that counts the launch. If there are several, they divide the peers among themselves.
template <typename Machine>
FENCELINE_HD void count_steps(Machine& m, const AllReduceRequest& r) {
  m.begin();
  const bool first = m.block() == 0;
  if (first) {
    for (int i = 1 + m.count_thread(); i < r.size; i += m.num_count_threads()) m.refresh(peer_number(r, i));
  }
  m.count();
  if (first) m.count_absent();
}

template <typename Machine>
FENCELINE_HD void push_vector(Machine& m, const AllReduceRequest& r, const typename Machine::Vector& own, uint32_t v) {
  for (int i = 1; i < m.num_ranks(); ++i) m.push_words(peer_number(r, i), v, own);
}

// Pushes vectors first, first + step, ... to all peers. The first one is read before the generation, so that the thread
// waits for both at once.
template <typename Machine>
FENCELINE_HD void push_all(Machine& m, const AllReduceRequest& r, uint32_t first, uint32_t step) {
  typename Machine::Vector own{};
  if (first < r.num_vectors) own = m.read(first);
  m.begin();
  m.arrive();
  if (first < r.num_vectors) push_vector(m, r, own, first);
  for (uint32_t v = first + step; v < r.num_vectors; v += step) push_vector(m, r, m.read(v), v);
}

template <typename Machine>
FENCELINE_HD void one_shot_steps(Machine& m, const AllReduceRequest& r) {
  const uint32_t first = m.block() * m.num_threads() + m.thread(), step = m.num_blocks() * m.num_threads();
  push_all(m, r, first, step);
  for (uint32_t v = first; v < r.num_vectors; v += step) m.store(v, m.sum_of_words(m.own(v), v));
}

// Releases what the block has pushed to the same block of each peer, and acquires what theirs have pushed.
template <typename Machine>
FENCELINE_HD void shot(Machine& m, const AllReduceRequest& r, int number) {
  m.barrier();
  const int first = 1 + static_cast<int>(m.thread()), step = static_cast<int>(m.num_threads());
  for (int i = first; i < r.size; i += step) m.release(peer_number(r, i), number);
  for (int i = first; i < r.size; i += step) m.acquire(peer_number(r, i), number);
  m.barrier();
}

// Reads what the thread has of the peers' slices and hands it to `push`: the peer, the vector's number, its number in the
// slice, and the vector.
template <typename Machine, typename Push>
FENCELINE_HD void push_slices(Machine& m, const AllReduceRequest& r, uint32_t first, uint32_t step, Push push) {
  for (uint32_t offset = first; offset < slice_size(r); offset += step) {
    typename Machine::Vector vectors[Machine::kMost];  // all are read before one is written, so that they come together
#pragma unroll
    for (int i = 1; i < Machine::kMost; ++i) {
      const int peer = peer_number(r, i);
      if (i < m.num_ranks() && offset < slice_length(r, peer)) vectors[i] = m.own(slice_vector(r, peer, offset));
    }
#pragma unroll
    for (int i = 1; i < Machine::kMost; ++i) {
      const int peer = peer_number(r, i);
      if (i < m.num_ranks() && offset < slice_length(r, peer)) {
        push(peer, slice_vector(r, peer, offset), offset, vectors[i]);
      }
    }
  }
}

template <typename Machine>
FENCELINE_HD void two_shot_steps(Machine& m, const AllReduceRequest& r) {
  m.begin();
  m.arrive();
  const uint32_t first = m.block() * m.num_threads() + m.thread(), step = m.num_blocks() * m.num_threads();
  const uint32_t size = slice_size(r), length = slice_length(r, r.rank);
  push_slices(m, r, first, step, [&](int peer, uint32_t v, uint32_t offset, const typename Machine::Vector& vector) {
    m.push(peer, v, offset, vector);
  });
  shot(m, r, 0);
  for (uint32_t offset = first; offset < length; offset += step) {
    const uint32_t v = slice_vector(r, r.rank, offset);
    const typename Machine::Vector own = m.read(v);
    const typename Machine::Sum sum = m.sum_of_staged(own, v, offset);
    m.store(v, sum);
    for (int i = 1; i < m.num_ranks(); ++i) m.push_sum(peer_number(r, i), v, sum);
  }
  shot(m, r, 1);
  if (divides_rows(r) || r.outputs != nullptr) return;
  for (uint32_t offset = first; offset < size; offset += step) {
    for (int i = 1; i < m.num_ranks(); ++i) {
      const int peer = peer_number(r, i);
      if (offset < slice_length(r, peer)) m.take(peer, slice_vector(r, peer, offset));
    }
  }
}

// Two shots in words. Whoever reads the sums of others waits for their words.
template <typename Machine>
FENCELINE_HD void word_shot_steps(Machine& m, const AllReduceRequest& r) {
  m.begin();
  m.arrive();
  const uint32_t first = m.block() * m.num_threads() + m.thread(), step = m.num_blocks() * m.num_threads();
  push_slices(m, r, first, step, [&](int peer, uint32_t, uint32_t offset, const typename Machine::Vector& vector) {
    m.push_words(peer, offset, vector);
  });
  for (uint32_t offset = first; offset < slice_length(r, r.rank); offset += step) {
    const uint32_t v = slice_vector(r, r.rank, offset);
    const typename Machine::Sum sum = m.sum_of_words(m.read(v), offset);
    m.store(v, sum);
    for (int i = 1; i < m.num_ranks(); ++i) m.push_words(peer_number(r, i), slice_size(r) + offset, m.rounded(sum));
  }
  m.barrier();  // the block's threads read each other's sums
}

}  // namespace fenceline
