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
  int64_t R, H, G, J, K, V, N, C, W, L;  // L = W + C: places of a tail
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
        C(rule.chunk_size),
        W(rule.window_size),
        L(W + C) {
    const auto* tails = tail_length.const_data_ptr<int64_t>();
    tail.assign(tails, tails + R);
    for (int64_t r = 0; r < R; ++r) {
      start.push_back(starts ? starts->const_data_ptr<int64_t>()[r] : r * q.size(1));
      length.push_back(lengths ? lengths->const_data_ptr<int64_t>()[r] : q.size(1));
      TORCH_CHECK_VALUE(
          tail[r] >= 0 && tail[r] < L, "state must have tail_length within [0, ", L, "), got ",
          tail[r], " in row ", r);
    }
  }

  // What a state made by hand may break: all that says where in memory its numbers are.
  void check_state(
      const Tensor& key_means, const Tensor& value_means, const Tensor& counts,
      const Tensor& num_active, const Tensor& num_absorbed, const Tensor& tail_keys,
      const Tensor& tail_values) const {
    check_part("key_means", key_means, {R, G, N, K}, at::kFloat);
    check_part("value_means", value_means, {R, G, N, V}, at::kFloat);
    check_part("counts", counts, {R, G, N}, at::kLong);
    check_part("num_active", num_active, {R}, at::kLong);
    check_part("num_absorbed", num_absorbed, {R}, at::kLong);
    check_part("tail_keys", tail_keys, {R, L, G, K}, at::kFloat);
    check_part("tail_values", tail_values, {R, L, G, V}, at::kFloat);
    for (int64_t r = 0; r < R; ++r) {
      const int64_t active = num_active.const_data_ptr<int64_t>()[r];
      const int64_t absorbed = num_absorbed.const_data_ptr<int64_t>()[r];
      TORCH_CHECK_VALUE(
          active >= 0 && active <= N, "state must have num_active within [0, ", N, "], got ",
          active, " in row ", r);
      TORCH_CHECK_VALUE(
          absorbed >= 0, "state must have num_absorbed of at least 0, got ", absorbed, " in row ",
          r);
      TORCH_CHECK_VALUE(
          absorbed % C == 0, "state must have num_absorbed in whole chunks of ", C, ", got ",
          absorbed, " in row ", r);
      TORCH_CHECK_VALUE(
          absorbed == 0 || tail[r] >= W, "state must have tail_length of at least ", W,
          " once tokens are absorbed, got ", tail[r], " in row ", r);
    }
  }

  static void check_part(
      const char* name, const Tensor& tensor, at::IntArrayRef shape, at::ScalarType dtype) {
    TORCH_CHECK_VALUE(
        tensor.sizes() == shape && tensor.scalar_type() == dtype, "state must have ", name, " of ",
        shape, " ", dtype, ", got ", tensor.sizes(), " ", tensor.scalar_type());
  }

  // How many of a row's tokens, from the tail's start on, the call absorbs.
  int64_t num_leaving(int64_t r) const {
    return length[r] ? std::max<int64_t>(0, (tail[r] + length[r]) / C * C - W) : 0;
  }
  // How many numbers of keys and values the queries read, of dictionaries and exact tokens.
  int64_t num_reads(const Tensor& num_active) const {
    int64_t total = 0;
    for (int64_t r = 0; r < R; ++r)
      total += length[r] * H * (K + V) * (num_active.const_data_ptr<int64_t>()[r] + tail[r]);
    return total;
  }

  bool absorbs(int64_t r) const { return num_leaving(r) > 0; }
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

// One head's tokens [tokens, D] as float32, from the tail [L, G, D] of its row and the call's own.
template <class T>
struct Stream {
  const float* tail;  // of the row and head; nullptr where only the call's own are asked for
  const T* own;       // of the first token of the call in this row, and the head
  int64_t tail_length, stride, D;

  Stream(
      const Call& c, const float* tails, const T* tokens, int64_t row, int64_t head, int64_t heads,
      int64_t D)
      : tail(tails == nullptr ? nullptr : tails + (row * c.L * heads + head) * D),
        own(tokens + (c.start[row] * heads + head) * D),
        tail_length(c.tail[row]),
        stride(heads * D),
        D(D) {}

  // Positions count from the tail's start.
  void load(float* out, int64_t out_stride, int64_t position, int64_t count) const {
    for (int64_t i = 0; i < count; ++i, out += out_stride) {
      const int64_t p = position + i;
      if (i + kAhead < count && p + kAhead >= tail_length)
        prefetch(own + (p + kAhead - tail_length) * stride, D);
      if (p < tail_length)
        std::memcpy(out, tail + p * stride, D * sizeof(float));
      else
        for (int64_t d = 0; d < D; ++d)
          out[d] = static_cast<float>(own[(p - tail_length) * stride + d]);
    }
  }
};

// Rows of numbers for the exact tokens of a chunk, positions [oldest, stop), kept as the chunks
// pass in either direction. There is room for a window more than they need, so that few rows ever
// move.
class Band {
 public:
  Band(const Call& c, int64_t width) : width_(width), room_(2 * c.W + c.C) {}

  float* row(int64_t position) { return rows_ + (at_ + position - oldest_) * width_; }

  // Goes to other positions: rows of those it has had stay, fill(row, position, count) the others.
  template <class F>
  void cover(int64_t oldest, int64_t stop, const F& fill) {
    if (rows_ == nullptr) rows_ = Buffer<float>(room_ * width_);
    const bool meets = oldest < stop_ && oldest_ < stop;
    const int64_t from = meets ? std::max(oldest, oldest_) : stop;
    const int64_t to = meets ? std::min(stop, stop_) : stop;
    int64_t at = at_ + oldest - oldest_;
    if (at < 0 || at + stop - oldest > room_) {
      at = stop > stop_ ? 0 : room_ - (stop - oldest);
      if (meets)
        std::memmove(
            rows_ + (at + from - oldest) * width_, rows_ + (at_ + from - oldest_) * width_,
            (to - from) * width_ * sizeof(float));
    }
    at_ = at;
    oldest_ = oldest;
    stop_ = stop;
    if (from > oldest) fill(row(oldest), oldest, from - oldest);
    if (stop > to) fill(row(to), to, stop - to);
  }

 private:
  int64_t width_, room_, at_ = 0, oldest_ = 0, stop_ = 0;
  Buffer<float> rows_;
};

// What the queries of a chunk attend to: slots (bias = log of the counts) or exact tokens, of the
// window and of the chunk itself, which a lane sees up to its limit.
struct Rows {
  const float *keys, *values;
  int64_t key_stride, value_stride, count;
  const float* bias;  // nullptr for tokens
};

// The logits of a panel for up to kBlock slots or tokens, of which the first has place `first`,
// into [count, kLanes]; returns the largest of each lane, NaN aside, at least kLowest: above -inf,
// so that logits of -inf alone weigh 0 and not NaN.
template <bool causal>
inline std::pair<Vec, Vec> logits(
    const float* panel, int64_t K, const Rows& rows, int64_t first, int64_t count,
    const float* limits, float* out) {
  Vec most0(kLowest), most1(kLowest), limit0(0.0f), limit1(0.0f);
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
