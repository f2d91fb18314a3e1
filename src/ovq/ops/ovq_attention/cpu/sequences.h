// Where the tokens of a call stand, how they are read, and what a task is.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <optional>

#include "dictionary.h"

namespace ovq {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Sizes, and where the tokens of the call stand: row r of the state has `tail[r]` tokens that came
// in with it, then `length[r]` tokens from token `start[r]` of the flattened [B * T] on.
struct Call {
  Rule rule;
  int64_t R, H, G, J, K, V, N, C;
  std::vector<int64_t> tail, start, length;

  Call(
      const Rule& rule, const Tensor& q, const Tensor& k, const Tensor& v,
      const Tensor& tail_length, const OptionalTensor& starts, const OptionalTensor& lengths)
      : rule(rule),
        R(tail_length.size(0)),
        H(q.size(2)),
        G(k.size(2)),
        J(H / G),
        K(k.size(3)),
        V(v.size(3)),
        N(rule.num_centroids),
        C(rule.chunk_size) {
    const auto* tails = tail_length.const_data_ptr<int64_t>();
    tail.assign(tails, tails + R);
    for (int64_t r = 0; r < R; ++r) {
      start.push_back(starts ? starts->const_data_ptr<int64_t>()[r] : r * q.size(1));
      length.push_back(lengths ? lengths->const_data_ptr<int64_t>()[r] : q.size(1));
      TORCH_CHECK_VALUE(
          tail[r] >= 0 && tail[r] < C, "state must have tails shorter than the chunk of ", C,
          ", got ", tail[r], " in row ", r);
    }
  }

  int64_t num_full(int64_t r) const { return length[r] ? (tail[r] + length[r]) / C * C : 0; }
  // How many numbers of keys and values the queries read, of dictionaries and chunks.
  int64_t num_reads(const Tensor& num_active) const {
    int64_t total = 0;
    for (int64_t r = 0; r < R; ++r)
      total += length[r] * H * (K + V) * (num_active.const_data_ptr<int64_t>()[r] + tail[r]);
    return total;
  }

  bool completes(int64_t r) const { return num_full(r) > 0; }
};

// Runs f(row, head) for all rows and heads: in parallel, the longest first, if that fills the
// threads.
template <class F>
void for_each_head(const Call& call, const F& f) {
  const int64_t tasks = call.R * call.G, threads = at::get_num_threads();
  std::vector<int64_t> order(tasks);
  std::iota(order.begin(), order.end(), 0);
  const auto cost = [&](int64_t task) { return call.length[task / call.G] + 1; };
  std::stable_sort(
      order.begin(), order.end(), [&](int64_t a, int64_t b) { return cost(a) > cost(b); });
  std::vector<int64_t> load(std::max<int64_t>(threads, 1), 0);
  int64_t total = 0;
  for (const int64_t task : order) {
    *std::min_element(load.begin(), load.end()) += cost(task);
    total += cost(task);
  }
  const int64_t longest = *std::max_element(load.begin(), load.end());
  if (tasks < threads || 4 * longest * threads > 5 * total) {
    for (const int64_t task : order) f(task / call.G, task % call.G);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < tasks; i = next++) f(order[i] / call.G, order[i] % call.G);
  });
}

// One head's tokens [tokens, D] as float32, from the tail [C, G, D] of its row and the call's own.
template <class T>
struct Stream {
  const float* tail;  // of the row and head; nullptr where only the call's own are asked for
  const T* own;       // of the first token of the call in this row, and the head
  int64_t tail_length, stride, D;

  Stream(
      const Call& c, const float* tails, const T* tokens, int64_t row, int64_t head, int64_t heads,
      int64_t D)
      : tail(tails == nullptr ? nullptr : tails + (row * c.C * heads + head) * D),
        own(tokens + (c.start[row] * heads + head) * D),
        tail_length(c.tail[row]),
        stride(heads * D),
        D(D) {}

  // Positions count from the tail's start.
  void load(float* out, int64_t out_stride, int64_t position, int64_t count) const {
    for (int64_t i = 0; i < count; ++i, out += out_stride) {
      const int64_t p = position + i;
      if (p < tail_length)
        std::memcpy(out, tail + p * stride, D * sizeof(float));
      else
        for (int64_t d = 0; d < D; ++d)
          out[d] = static_cast<float>(own[(p - tail_length) * stride + d]);
    }
  }
};

// What the queries of a chunk attend to: slots (bias = log of the counts) or the chunk's own
// tokens, which a lane sees up to its limit.
struct Rows {
  const float *keys, *values;
  int64_t key_stride, value_stride, count;
  const float* bias;  // nullptr for tokens
};

// The logits of a panel for up to kBlock slots or tokens, of which the first has place `first`,
// into [count, kLanes]; returns the largest of each lane.
template <bool causal>
inline std::pair<Vec, Vec> logits(
    const float* panel, int64_t K, const Rows& rows, int64_t first, int64_t count,
    const float* limits, float* out) {
  Vec most0(-kInfinity), most1(-kInfinity), limit0(0.0f), limit1(0.0f);
  if (causal) limit0 = Vec::loadu(limits), limit1 = Vec::loadu(limits + kWidth);
  const auto emit = [&](int64_t m, Vec s0, Vec s1) {
    if (causal) {
      const Vec place(static_cast<float>(first + m)), hidden(-kInfinity);
      s0 = Vec::blendv(s0, hidden, place > limit0);
      s1 = Vec::blendv(s1, hidden, place > limit1);
    } else {
      const Vec bias(rows.bias[first + m]);
      s0 = s0 + bias;
      s1 = s1 + bias;
    }
    most0 = at::vec::clamp_min(most0, s0);
    most1 = at::vec::clamp_min(most1, s1);
    s0.store(out + m * kLanes);
    s1.store(out + m * kLanes + kWidth);
  };
  scores(panel, K, rows.keys + first * rows.key_stride, rows.key_stride, count, emit);
  return {most0, most1};
}

}  // namespace ovq
