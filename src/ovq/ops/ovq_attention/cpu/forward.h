// The forward: the reads of a chunk, and the walk over a head's chunks.
#pragma once

#include "sequences.h"

namespace ovq {

constexpr float kSlack = 12.0f;  // how far logits may exceed the running maximum
constexpr int64_t kFewRows = 8;  // up to here a read goes row by row: decoding
constexpr int64_t kPart = 256;   // slots of a part of such a read

// The online softmax of one panel, where weights are e^(logit - top), and top lags behind the
// maximum by at most kSlack, so that sums are seldom rescaled. A logit of NaN or +inf makes its own
// weight NaN and with it the total, so that it shows in the output; it never hides in the maximum.
struct Softmax {
  float *top, *total, *sums;  // [kLanes], [kLanes], [V, kLanes]

  void start(int64_t V) const {
    std::fill_n(top, kLanes, kLowest);
    std::fill_n(total, kLanes, 0.0f);
    std::fill_n(sums, V * kLanes, 0.0f);
  }

  void raise(const Vec& most0, const Vec& most1, int64_t V) const {
    const Vec top0 = Vec::loadu(top), top1 = Vec::loadu(top + kWidth), slack(kSlack);
    const Vec above0 = most0 > top0 + slack, above1 = most1 > top1 + slack;
    constexpr int none = (1 << kWidth) - 1;
    if (above0.zero_mask() == none && above1.zero_mask() == none) return;
    const Vec next0 = Vec::blendv(top0, most0, above0), next1 = Vec::blendv(top1, most1, above1);
    // The first block comes in at the lowest top with nothing summed: whatever it is scaled by.
    const Vec by0 = Vec::blendv(Vec(1.0f), exp(top0 - next0), above0);
    const Vec by1 = Vec::blendv(Vec(1.0f), exp(top1 - next1), above1);
    next0.store(top);
    next1.store(top + kWidth);
    (Vec::loadu(total) * by0).store(total);
    (Vec::loadu(total + kWidth) * by1).store(total + kWidth);
    for (int64_t i = 0; i < V * kLanes; i += kLanes) {
      (Vec::loadu(sums + i) * by0).store(sums + i);
      (Vec::loadu(sums + i + kWidth) * by1).store(sums + i + kWidth);
    }
  }
};

// Adds up to kBlock slots or tokens, of which the first has place `first`, to a panel's softmax.
template <bool causal>
void read_block(
    const Softmax& softmax, const float* panel, int64_t K, int64_t V, const Rows& rows,
    int64_t first, int64_t count, const float* limits) {
  alignas(64) float weights[kBlock * kLanes];
  const auto [most0, most1] = logits<causal>(panel, K, rows, first, count, limits, weights);
  softmax.raise(most0, most1, V);
  const Vec top0 = Vec::loadu(softmax.top), top1 = Vec::loadu(softmax.top + kWidth);
  Vec total0(0.0f), total1(0.0f);
  for (int64_t i = 0; i < count * kLanes; i += kLanes) {
    const Vec w0 = exp(Vec::loadu(weights + i) - top0);
    const Vec w1 = exp(Vec::loadu(weights + i + kWidth) - top1);
    total0 = total0 + w0;
    total1 = total1 + w1;
    w0.store(weights + i);
    w1.store(weights + i + kWidth);
  }
  (Vec::loadu(softmax.total) + total0).store(softmax.total);
  (Vec::loadu(softmax.total + kWidth) + total1).store(softmax.total + kWidth);
  weighted_sums(
      weights, count, rows.values + first * rows.value_stride, rows.value_stride, V, softmax.sums);
}

// The tensors of a forward call; those of the state are the ones to be returned, already copied.
template <class T>
struct Forward {
  const Call& call;
  const T *q, *k, *v;
  const float *beta, *tail_keys, *tail_values;
  float *keys, *values;
  int64_t* counts;
  const int64_t *num_active, *num_absorbed, *fed_tail, *fed_tokens;
  T* o;
  float *lse, *new_tail_keys, *new_tail_values;
  int64_t *slots_tail, *slots_tokens, *active_after;  // the last [R, G]

  void tails(int64_t row) const;
  void head(int64_t row, int64_t g) const;
};

// The reads of one head's chunks.
template <class T>
class Reader {
 public:
  Reader(const Forward<T>& f, int64_t row, int64_t g)
      : f_(f),
        c_(f.call),
        g_(g),
        q_(c_, nullptr, f.q, row, g * c_.J, c_.H, c_.K),
        o_(f.o + (c_.start[row] * c_.H + g * c_.J) * c_.V),
        lse_(f.lse + c_.start[row] * c_.H + g * c_.J) {
    const int64_t most = round_up(std::min(c_.C, c_.length[row]) * c_.J, kLanes);
    queries_ = Buffer<float>(most * c_.K);
    limits_ = Buffer<float>(most);
    natural_ = Buffer<float>(kLanes * c_.K);
    state_ = Buffer<float>(most * (c_.V + 2));
  }

  // The reads of `count` tokens from token `first` of the call on, the first of which stands at
  // place `offset` of the exact tokens; beside them, `nearest` (if any) meets the same slots.
  void read(
      int64_t first, int64_t count, int64_t offset, const Rows& slots, Rows tokens,
      Nearest* nearest) {
    first_ = first;
    num_rows_ = count * c_.J;
    const bool few = num_rows_ <= kFewRows;
    const int64_t num_panels = few ? 0 : round_up(num_rows_, kLanes) / kLanes;
    for (int64_t r = 0; r < round_up(num_rows_, kLanes); ++r)
      limits_[r] = static_cast<float>(offset + std::min(r, num_rows_ - 1) / c_.J);
    if (few)
      read_few(slots, tokens);
    else
      pack(num_panels);
    const int64_t both = std::max(num_panels, nearest == nullptr ? 0 : nearest->num_panels);
    at::parallel_for(0, both, 1, [&](int64_t begin, int64_t end) {
      const int64_t stop = std::min(end, num_panels);
      const int64_t nearest_stop = nearest == nullptr ? 0 : std::min(end, nearest->num_panels);
      for (int64_t p = begin; p < stop; ++p) softmax(p).start(c_.V);
      for (int64_t m = 0; m < slots.count; m += kBlock) {
        const int64_t size = std::min(kBlock, slots.count - m);
        for (int64_t p = begin; p < stop; ++p)
          read_block<false>(softmax(p), panel(p), c_.K, c_.V, slots, m, size, nullptr);
        for (int64_t p = begin; p < nearest_stop; ++p)
          nearest->compare(p, nearest->centroids + m * c_.K, slots.bias + m, size, m);
      }
      for (int64_t p = begin; p < stop; ++p) {
        const float* limits = limits_ + p * kLanes;
        const int64_t seen = static_cast<int64_t>(limits[kLanes - 1]) + 1;
        for (int64_t m = 0; m < seen; m += kBlock)
          read_block<true>(
              softmax(p), panel(p), c_.K, c_.V, tokens, m, std::min(kBlock, seen - m), limits);
        finish(p);
      }
    });
  }

 private:
  float* panel(int64_t p) { return queries_ + p * kLanes * c_.K; }

  Softmax softmax(int64_t p) {
    float* start = state_ + p * kLanes * (c_.V + 2);
    return {start, start + kLanes, start + 2 * kLanes};
  }

  float scale(int64_t r) const { return f_.beta[g_ * c_.J + r % c_.J]; }

  const T* query(int64_t r) const {
    return q_.own + (first_ + r / c_.J) * q_.stride + r % c_.J * c_.K;
  }

  // Queries as panels: scaled rows, then transposed.
  void pack(int64_t num_panels) {
    for (int64_t r = 0; r < num_panels * kLanes; ++r) {
      float* row = natural_ + r % kLanes * c_.K;
      const float by = r < num_rows_ ? scale(r) : 0.0f;
      const T* q = query(std::min(r, num_rows_ - 1));
      if (r + kAhead < num_rows_) prefetch(query(r + kAhead), c_.K);
      for (int64_t d = 0; d < c_.K; ++d) row[d] = by * static_cast<float>(q[d]);
      if (r % kLanes == kLanes - 1)
        transpose(panel(r / kLanes), kLanes, natural_, c_.K, kLanes, c_.K);
    }
  }

  void write(int64_t r, float top, float total, const float* sums) {
    const int64_t at = (first_ + r / c_.J) * c_.H + r % c_.J;
    const float by = 1.0f / total;
    for (int64_t d = 0; d < c_.V; ++d) o_[at * c_.V + d] = static_cast<T>(sums[d] * by);
    lse_[at] = top + std::log(total);
  }

  void finish(int64_t p) {
    const Softmax s = softmax(p);
    Buffer<float> rows(kLanes * c_.V);
    transpose(rows, c_.V, s.sums, kLanes, c_.V, kLanes);
    for (int64_t lane = 0; lane < std::min(kLanes, num_rows_ - p * kLanes); ++lane)
      write(p * kLanes + lane, s.top[lane], s.total[lane], rows + lane * c_.V);
  }

  // A read of few rows: the slots and tokens are split into parts of fixed size, merged in order.
  void read_few(const Rows& slots, const Rows& tokens) {
    for (int64_t r = 0; r < num_rows_; ++r)
      for (int64_t d = 0; d < c_.K; ++d)
        queries_[r * c_.K + d] = scale(r) * static_cast<float>(query(r)[d]);
    const int64_t seen = static_cast<int64_t>(limits_[num_rows_ - 1]) + 1;
    const int64_t of_slots = round_up(slots.count, kPart) / kPart;
    const int64_t parts = of_slots + round_up(seen, kPart) / kPart;
    const int64_t size = c_.V + 2;
    Buffer<float> found(parts * num_rows_ * size);  // of each part and row: top, total, sums
    at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const bool of_tokens = p >= of_slots;
        const int64_t first = (of_tokens ? p - of_slots : p) * kPart;
        const int64_t left = (of_tokens ? seen : slots.count) - first;
        read_part(
            of_tokens ? tokens : slots, first, std::min(kPart, left), found + p * num_rows_ * size);
      }
    });
    for (int64_t r = 0; r < num_rows_; ++r) {
      float top = kLowest, total = 0.0f;
      for (int64_t p = 0; p < parts; ++p) top = std::max(top, found[(p * num_rows_ + r) * size]);
      float* sums = state_;
      std::fill_n(sums, c_.V, 0.0f);
      for (int64_t p = 0; p < parts; ++p) {
        const float* part = found + (p * num_rows_ + r) * size;
        const float by = std::exp(part[0] - top);
        total += by * part[1];
        add_scaled(sums, part + 2, by, c_.V);
      }
      write(r, top, total, sums);
    }
  }

  // Of each row: the maximum, the sum of the weights and that of the weighted values of a part.
  void read_part(const Rows& rows, int64_t first, int64_t count, float* found) {
    alignas(64) float logits[kFewRows][kPart];
    const float* keys = rows.keys + first * rows.key_stride;
    const auto seen = [&](int64_t r) {  // tokens up to the row's limit
      return rows.bias != nullptr ? count
                                  : std::min(count, static_cast<int64_t>(limits_[r]) + 1 - first);
    };
    int64_t m = 0;
    for (; m + kWidth <= count; m += kWidth)
      for (int64_t r = 0; r < num_rows_; ++r)
        dots(queries_ + r * c_.K, keys + m * rows.key_stride, rows.key_stride, c_.K)
            .store(logits[r] + m);
    for (; m < count; ++m)
      for (int64_t r = 0; r < num_rows_; ++r)
        logits[r][m] = dot(queries_ + r * c_.K, keys + m * rows.key_stride, c_.K);
    const int64_t padded = round_up(count, kWidth);
    for (int64_t r = 0; r < num_rows_; ++r, found += c_.V + 2) {
      float* weights = logits[r];
      if (rows.bias != nullptr)
        for (int64_t i = 0; i < count; ++i) weights[i] += rows.bias[first + i];
      for (int64_t i = std::max<int64_t>(seen(r), 0); i < padded; ++i) weights[i] = -kInfinity;
      Vec most(kLowest), total(0.0f);
      for (int64_t i = 0; i < padded; i += kWidth)
        most = at::vec::clamp_min(most, Vec::loadu(weights + i));
      const auto larger = [](Vec& x, Vec& y) { return at::vec::clamp_min(x, y); };
      const float top = at::vec::vec_reduce_all<float>(larger, most);
      for (int64_t i = 0; i < padded; i += kWidth) {
        const Vec w = exp(Vec::loadu(weights + i) - Vec(top));
        total = total + w;
        w.store(weights + i);
      }
      found[0] = top;
      found[1] = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, total);
      sum_values(weights, rows, first, count, found + 2);
    }
  }

  // out[d] = sum over m of weights[m] * values[m, d]
  void sum_values(
      const float* weights, const Rows& rows, int64_t first, int64_t count, float* out) {
    const float* values = rows.values + first * rows.value_stride;
    int64_t d = 0;
    for (; d + 8 * kWidth <= c_.V; d += 8 * kWidth) {
      Vec sums[1][8];
      for (int j = 0; j < 8; ++j) sums[0][j] = Vec(0.0f);
      multiply_add<1, 8>(sums, values + d, rows.value_stride, weights, 0, 1, count);
      for (int j = 0; j < 8; ++j) sums[0][j].store(out + d + j * kWidth);
    }
    for (; d + kWidth <= c_.V; d += kWidth) {
      Vec sums[1][1] = {{Vec(0.0f)}};
      multiply_add<1, 1>(sums, values + d, rows.value_stride, weights, 0, 1, count);
      sums[0][0].store(out + d);
    }
    for (; d < c_.V; ++d) {
      out[d] = 0.0f;
      for (int64_t m = 0; m < count; ++m) out[d] += weights[m] * values[m * rows.value_stride + d];
    }
  }

  const Forward<T>& f_;
  const Call& c_;
  int64_t g_, first_ = 0, num_rows_ = 0;
  Stream<T> q_;
  T* o_;
  float* lse_;
  Buffer<float> queries_, limits_, natural_, state_;
};

// The keys and values that stay exact at the call's end, all heads at once: it comes first, as the
// last read takes them from there.
template <class T>
void Forward<T>::tails(int64_t row) const {
  const int64_t L = call.L, length = call.tail[row] + call.length[row];
  const int64_t first = call.num_leaving(row), rest = length - first;
  const auto write = [&](float* out, const float* old, const T* own, int64_t width) {
    Stream<T>(call, old, own, row, 0, 1, width).load(out + row * L * width, width, first, rest);
    std::memset(out + (row * L + rest) * width, 0, (L - rest) * width * sizeof(float));
  };
  write(new_tail_keys, tail_keys, k, call.G * call.K);
  write(new_tail_values, tail_values, v, call.G * call.V);
  std::fill_n(slots_tail + row * L * call.G, L * call.G, -1);
}

template <class T>
void Forward<T>::head(int64_t row, int64_t g) const {
  const Call& c = call;
  const int64_t C = c.C, K = c.K, V = c.V, tail = c.tail[row], length = tail + c.length[row];
  const int64_t slab = row * c.G + g;
  const Stream<T> key_stream(c, tail_keys, k, row, g, c.G, K);
  const Stream<T> value_stream(c, tail_values, v, row, g, c.G, V);
  active_after[slab] = num_active[row];
  if (c.length[row] == 0) return;

  Dictionary dictionary(
      c.rule, K, V, num_active[row], keys + slab * c.N * K, values + slab * c.N * V,
      counts + slab * c.N);
  Reader<T> reader(*this, row, g);
  std::optional<Nearest> nearest;
  if (c.absorbs(row)) nearest.emplace(C, K);
  Band exact_keys(c, K), exact_values(c, V);
  std::vector<int64_t> slots(C);
  const auto slot_of = [&](auto* of_tail, auto* of_tokens, int64_t p) {
    return p < tail ? of_tail + (row * c.L + p) * c.G + g
                    : of_tokens + (c.start[row] + p - tail) * c.G + g;
  };
  for (int64_t start = tail / C * C; start < length; start += C) {
    const int64_t first = std::max(start, tail), stop = std::min(start + C, length);
    const int64_t oldest = std::max<int64_t>(start - c.W, 0);
    const bool leaves = start >= c.W && stop - start == C;  // tokens [oldest, oldest + C) then do
    const bool assign = leaves && fed_tokens == nullptr;
    const Dictionary& d = dictionary;
    const Rows old{d.read_keys(), d.values, K, V, d.active, d.bias};
    Rows exact{
        new_tail_keys + (row * c.L * c.G + g) * K, new_tail_values + (row * c.L * c.G + g) * V,
        c.G * K, c.G * V, stop - oldest, nullptr};
    if (leaves || stop < length) {
      exact_keys.cover(oldest, stop, [&](float* out, int64_t position, int64_t count) {
        key_stream.load(out, K, position, count);
      });
      exact_values.cover(oldest, stop, [&](float* out, int64_t position, int64_t count) {
        value_stream.load(out, V, position, count);
      });
      exact = {exact_keys.row(oldest), exact_values.row(oldest), K, V, stop - oldest, nullptr};
    }
    if (assign) nearest->start(exact.keys, d.compared_keys());
    reader.read(
        first - tail, stop - first, first - oldest, old, exact, assign ? &*nearest : nullptr);
    if (!leaves) continue;
    if (assign)
      choose_slots(slots.data(), d, *nearest, exact.keys, num_absorbed[row] + oldest, g, c.G);
    for (int64_t i = 0; i < C; ++i) {
      if (!assign) {
        slots[i] = *slot_of(fed_tail, fed_tokens, oldest + i);
        TORCH_CHECK_VALUE(
            slots[i] >= 0 && slots[i] < c.N, "slots must lie in [0, ", c.N,
            ") for the tokens that are absorbed, got ", slots[i]);
      }
      *slot_of(slots_tail, slots_tokens, oldest + i) = slots[i];
    }
    dictionary.absorb(exact.keys, exact.values, slots.data());
  }
  for (int64_t p = std::max(c.num_leaving(row), tail); p < length; ++p)
    *slot_of(slots_tail, slots_tokens, p) = -1;
  active_after[slab] = dictionary.active;
}

}  // namespace ovq
