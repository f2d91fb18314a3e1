// OVQ attention on the CPU: forward (decoding is its case of one token) and backward.
//
// One task is one key-value head of one sequence. It walks over the chunks of its sequence; inside a
// chunk, panels of rows (queries or keys, see products.h) are independent of one another. Tasks run in
// parallel where they fill the threads, panels do otherwise. No sum depends on which of the two it
// was, or on the number of threads, so results are the same bit for bit.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <atomic>
#include <optional>
#include <tuple>

#include "dictionary.h"
#include "products.h"

namespace ovq {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr float kSlack = 16.0f;       // how far logits may exceed the running maximum: 2^16
constexpr int64_t kFewRows = 8;       // up to here a read goes row by row: decoding
constexpr int64_t kPart = 256;        // slots of a part of such a read
constexpr int64_t kGroupRows = 128;   // rows whose weights the backward holds at a time

// Sizes, and where the tokens of the call stand: row r of the state has `tail[r]` tokens that came in
// with it, then `length[r]` tokens from token `start[r]` of the flattened [B * T] on.
struct Call {
  Rule rule;
  int64_t R, H, G, J, K, V, N, C;
  std::vector<int64_t> tail, start, length;

  Call(
      const Rule& rule, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& tail_length,
      const OptionalTensor& starts, const OptionalTensor& lengths)
      : rule(rule), R(tail_length.size(0)), H(q.size(2)), G(k.size(2)), J(H / G), K(k.size(3)),
        V(v.size(3)), N(rule.num_centroids), C(rule.chunk_size) {
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
  bool completes(int64_t r) const { return num_full(r) > 0; }
};

// Runs f(row, head) for all rows and heads: in parallel, the longest first, if that fills the threads.
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
        own(tokens + (c.start[row] * heads + head) * D), tail_length(c.tail[row]),
        stride(heads * D), D(D) {}

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

// What the queries of a chunk attend to: slots (bias = log2 of the counts) or the chunk's own tokens,
// which a lane sees up to its limit.
struct Rows {
  const float *keys, *values;
  int64_t key_stride, value_stride, count;
  const float* bias;  // nullptr for tokens
};

// The online softmax of one panel, in base 2: weights are 2^(logit - top), and top lags behind the
// maximum by at most kSlack, so that sums are seldom rescaled.
struct Softmax {
  float *top, *total, *sums;  // [kLanes], [kLanes], [V, kLanes]

  void start(int64_t V) const {
    std::fill_n(top, kLanes, -kInfinity);
    std::fill_n(total, kLanes, 0.0f);
    std::fill_n(sums, V * kLanes, 0.0f);
  }

  void raise(const Vec& most0, const Vec& most1, int64_t V) const {
    const Vec top0 = Vec::loadu(top), top1 = Vec::loadu(top + kWidth), slack(kSlack);
    const Vec above0 = most0 > top0 + slack, above1 = most1 > top1 + slack;
    constexpr int none = (1 << kWidth) - 1;
    if (above0.zero_mask() == none && above1.zero_mask() == none) return;
    const Vec next0 = Vec::blendv(top0, most0, above0), next1 = Vec::blendv(top1, most1, above1);
    // The first block comes in at top = -inf with nothing summed: 2^(-inf) = 0 is right there too.
    const Vec by0 = Vec::blendv(Vec(1.0f), exp2(top0 - next0), above0);
    const Vec by1 = Vec::blendv(Vec(1.0f), exp2(top1 - next1), above1);
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
    const Softmax& softmax, const float* panel, int64_t K, int64_t V, const Rows& rows, int64_t first,
    int64_t count, const float* limits) {
  alignas(64) float weights[kBlock * kLanes];
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
    s0.store(weights + m * kLanes);
    s1.store(weights + m * kLanes + kWidth);
  };
  scores(panel, K, rows.keys + first * rows.key_stride, rows.key_stride, count, emit);
  softmax.raise(most0, most1, V);
  const Vec top0 = Vec::loadu(softmax.top), top1 = Vec::loadu(softmax.top + kWidth);
  Vec total0(0.0f), total1(0.0f);
  for (int64_t i = 0; i < count * kLanes; i += kLanes) {
    const Vec w0 = exp2(Vec::loadu(weights + i) - top0);
    const Vec w1 = exp2(Vec::loadu(weights + i + kWidth) - top1);
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

  void head(int64_t row, int64_t g) const;
};

// The reads of one head's chunks.
template <class T>
class Reader {
 public:
  Reader(const Forward<T>& f, int64_t row, int64_t g)
      : f_(f), c_(f.call), g_(g),
        q_(c_, nullptr, f.q, row, g * c_.J, c_.H, c_.K),
        o_(f.o + (c_.start[row] * c_.H + g * c_.J) * c_.V),
        lse_(f.lse + c_.start[row] * c_.H + g * c_.J) {
    const int64_t most = round_up(std::min(c_.C, c_.length[row]) * c_.J, kLanes);
    queries_ = Buffer<float>(most * c_.K);
    limits_ = Buffer<float>(most);
    state_ = Buffer<float>(most * (c_.V + 2));
  }

  // The reads of `count` tokens from token `first` of the call on, the first of which stands at place
  // `offset` of its chunk; beside them, `nearest` (if any) meets the same slots.
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
          nearest->compare(p, slots.keys + m * c_.K, slots.bias + m, size, m);
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

  float scale(int64_t r) const { return f_.beta[g_ * c_.J + r % c_.J] * kLog2E; }

  const T* query(int64_t r) const {
    return q_.own + (first_ + r / c_.J) * q_.stride + r % c_.J * c_.K;
  }

  void pack(int64_t num_panels) {
    for (int64_t r = 0; r < num_panels * kLanes; ++r) {
      float* lane = panel(r / kLanes) + r % kLanes;
      const float by = r < num_rows_ ? scale(r) : 0.0f;
      const T* q = query(std::min(r, num_rows_ - 1));
      for (int64_t d = 0; d < c_.K; ++d) lane[d * kLanes] = by * static_cast<float>(q[d]);
    }
  }

  void write(int64_t r, float top, float total, const float* sums, int64_t stride) {
    const int64_t at = (first_ + r / c_.J) * c_.H + r % c_.J;
    const float by = 1.0f / total;
    for (int64_t d = 0; d < c_.V; ++d) o_[at * c_.V + d] = static_cast<T>(sums[d * stride] * by);
    lse_[at] = (top + std::log2(total)) * kLn2;
  }

  void finish(int64_t p) {
    const Softmax s = softmax(p);
    for (int64_t lane = 0; lane < std::min(kLanes, num_rows_ - p * kLanes); ++lane)
      write(p * kLanes + lane, s.top[lane], s.total[lane], s.sums + lane, kLanes);
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
      float top = -kInfinity, total = 0.0f;
      for (int64_t p = 0; p < parts; ++p) top = std::max(top, found[(p * num_rows_ + r) * size]);
      float* sums = state_;
      std::fill_n(sums, c_.V, 0.0f);
      for (int64_t p = 0; p < parts; ++p) {
        const float* part = found + (p * num_rows_ + r) * size;
        const float by = exp2(part[0] - top);
        total += by * part[1];
        add_scaled(sums, part + 2, by, c_.V);
      }
      write(r, top, total, sums, 1);
    }
  }

  void read_part(const Rows& rows, int64_t first, int64_t count, float* found) {
    alignas(64) float logits[kFewRows][kPart];
    for (int64_t m = 0; m < count; ++m) {
      const float* key = rows.keys + (first + m) * rows.key_stride;
      for (int64_t r = 0; r < num_rows_; ++r) {
        const float s = dot(queries_ + r * c_.K, key, c_.K);
        if (rows.bias != nullptr)
          logits[r][m] = s + rows.bias[first + m];
        else
          logits[r][m] = static_cast<float>(first + m) > limits_[r] ? -kInfinity : s;
      }
    }
    const int64_t padded = round_up(count, kWidth);
    for (int64_t r = 0; r < num_rows_; ++r, found += c_.V + 2) {
      float* weights = logits[r];
      std::fill_n(weights + count, padded - count, -kInfinity);
      float top = -kInfinity;
      for (int64_t m = 0; m < count; ++m) top = weights[m] > top ? weights[m] : top;
      Vec total(0.0f);
      for (int64_t m = 0; m < padded; m += kWidth) {
        const Vec w = exp2(Vec::loadu(weights + m) - Vec(top));
        total = total + w;
        w.store(weights + m);
      }
      found[0] = top;
      found[1] = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, total);
      sum_values(weights, rows, first, count, found + 2);
    }
  }

  // out[d] = sum over m of weights[m] * values[m, d]
  void sum_values(const float* weights, const Rows& rows, int64_t first, int64_t count, float* out) {
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
  Buffer<float> queries_, limits_, state_;
};

template <class T>
void Forward<T>::head(int64_t row, int64_t g) const {
  const Call& c = call;
  const int64_t C = c.C, K = c.K, V = c.V, tail = c.tail[row], length = tail + c.length[row];
  const Stream<T> key_stream(c, tail_keys, k, row, g, c.G, K);
  const Stream<T> value_stream(c, tail_values, v, row, g, c.G, V);
  float* const tail_k = new_tail_keys + (row * C * c.G + g) * K;
  float* const tail_v = new_tail_values + (row * C * c.G + g) * V;
  const int64_t rest = length - c.num_full(row), slab = row * c.G + g;
  key_stream.load(tail_k, c.G * K, length - rest, rest);
  value_stream.load(tail_v, c.G * V, length - rest, rest);
  for (int64_t i = rest; i < C; ++i) {
    std::memset(tail_k + i * c.G * K, 0, K * sizeof(float));
    std::memset(tail_v + i * c.G * V, 0, V * sizeof(float));
  }
  for (int64_t i = 0; i < C; ++i) slots_tail[(row * C + i) * c.G + g] = -1;
  active_after[slab] = num_active[row];
  if (c.length[row] == 0) return;

  Dictionary dictionary(
      c.rule, K, V, num_active[row], keys + slab * c.N * K, values + slab * c.N * V,
      counts + slab * c.N);
  Reader<T> reader(*this, row, g);
  std::optional<Nearest> nearest;
  Buffer<float> chunk_keys, chunk_values;
  std::vector<int64_t> slots(C);
  if (c.completes(row)) {
    nearest.emplace(C, K);
    chunk_keys = Buffer<float>(C * K);
    chunk_values = Buffer<float>(C * V);
  }
  for (int64_t start = 0; start < length; start += C) {
    const bool full = start + C <= length, assign = full && fed_tokens == nullptr;
    if (full) {
      key_stream.load(chunk_keys, K, start, C);
      value_stream.load(chunk_values, V, start, C);
    }
    const int64_t first = std::max(start, tail), stop = std::min(start + C, length);
    const Rows old{dictionary.read_keys(), dictionary.values, K, V, dictionary.active, dictionary.bias};
    Rows tokens{tail_k, tail_v, c.G * K, c.G * V, stop - start, nullptr};
    if (full) tokens = {chunk_keys, chunk_values, K, V, C, nullptr};
    if (assign) nearest->start(chunk_keys);
    reader.read(
        first - tail, stop - first, first - start, old, tokens, assign ? &*nearest : nullptr);
    const auto slot_of = [&](auto* of_tail, auto* of_tokens, int64_t i) {
      const int64_t p = start + i;
      return p < tail ? of_tail + (row * C + p) * c.G + g
                      : of_tokens + (c.start[row] + p - tail) * c.G + g;
    };
    if (!full) {
      for (int64_t i = 0; i < stop - start; ++i) *slot_of(slots_tail, slots_tokens, i) = -1;
      break;
    }
    if (assign)
      choose_slots(
          slots.data(), dictionary, *nearest, chunk_keys, num_absorbed[row] + start, g, c.G);
    for (int64_t i = 0; i < C; ++i) {
      if (!assign) {
        slots[i] = *slot_of(fed_tail, fed_tokens, i);
        TORCH_CHECK_VALUE(
            slots[i] >= 0 && slots[i] < c.N, "slots must lie in [0, ", c.N,
            ") for the tokens of full chunks, got ", slots[i]);
      }
      *slot_of(slots_tail, slots_tokens, i) = slots[i];
    }
    dictionary.absorb(chunk_keys, chunk_values, slots.data());
  }
  active_after[slab] = dictionary.active;
}

template <class T>
const T* data_or_null(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

// [o, lse, slots of tails, slots of tokens, tail keys, tail values, tail lengths], and where a chunk was
// completed the rest of the state too: [key means, value means, counts, num active, num absorbed].
std::vector<Tensor> forward(
    const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& beta_in,
    const Tensor& key_means, const Tensor& value_means, const Tensor& counts,
    const Tensor& num_active, const Tensor& num_absorbed, const Tensor& tail_keys_in,
    const Tensor& tail_values_in, const Tensor& tail_length, const OptionalTensor& fed_tail_in,
    const OptionalTensor& fed_tokens_in, const OptionalTensor& starts, const OptionalTensor& lengths,
    int64_t num_centroids, int64_t chunk_size, int64_t growth, int64_t growth_length,
    int64_t seeding, int64_t seed, bool unit) {
  const Tensor q = q_in.contiguous(), k = k_in.contiguous(), v = v_in.contiguous();
  const Tensor beta = beta_in.to(at::kFloat).contiguous();
  const Tensor tail_keys = tail_keys_in.contiguous(), tail_values = tail_values_in.contiguous();
  const OptionalTensor fed_tail = contiguous(fed_tail_in), fed_tokens = contiguous(fed_tokens_in);
  const Call call(
      Rule{num_centroids, chunk_size, growth, growth_length, seeding, seed, unit}, q, k, v,
      tail_length, starts, lengths);
  bool completes = false;
  for (int64_t r = 0; r < call.R; ++r) completes |= call.completes(r);

  Tensor o = at::empty({q.size(0), q.size(1), call.H, call.V}, q.options());
  Tensor lse = at::empty({q.size(0), q.size(1), call.H}, beta.options());
  Tensor slots_tail = at::empty({call.R, call.C, call.G}, counts.options());
  Tensor slots_tokens = at::empty({k.size(0), k.size(1), call.G}, counts.options());
  Tensor new_tail_keys = at::empty_like(tail_keys), new_tail_values = at::empty_like(tail_values);
  Tensor new_tail_length = at::empty_like(tail_length);
  const auto own = [&](const Tensor& t) {
    return completes ? t.clone(at::MemoryFormat::Contiguous) : t.contiguous();
  };
  Tensor new_keys = own(key_means), new_values = own(value_means), new_counts = own(counts);
  std::vector<int64_t> active_after(call.R * call.G);

  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const Forward<T> f{
        call, q.const_data_ptr<T>(), k.const_data_ptr<T>(), v.const_data_ptr<T>(),
        beta.const_data_ptr<float>(), tail_keys.const_data_ptr<float>(),
        tail_values.const_data_ptr<float>(), new_keys.data_ptr<float>(),
        new_values.data_ptr<float>(), new_counts.data_ptr<int64_t>(),
        num_active.const_data_ptr<int64_t>(), num_absorbed.const_data_ptr<int64_t>(),
        data_or_null<int64_t>(fed_tail), data_or_null<int64_t>(fed_tokens), o.data_ptr<T>(),
        lse.data_ptr<float>(), new_tail_keys.data_ptr<float>(), new_tail_values.data_ptr<float>(),
        slots_tail.data_ptr<int64_t>(), slots_tokens.data_ptr<int64_t>(), active_after.data()};
    for_each_head(call, [&](int64_t row, int64_t g) { f.head(row, g); });
  };
  if (q.scalar_type() == at::kBFloat16)
    run(at::BFloat16{});
  else
    run(float{});

  auto* new_lengths = new_tail_length.data_ptr<int64_t>();
  for (int64_t r = 0; r < call.R; ++r)
    new_lengths[r] = call.tail[r] + call.length[r] - call.num_full(r);
  std::vector<Tensor> out{
      o, lse, slots_tail, slots_tokens, new_tail_keys, new_tail_values, new_tail_length};
  if (!completes) return out;
  Tensor new_active = at::empty_like(num_active), new_absorbed = num_absorbed.clone();
  for (int64_t r = 0; r < call.R; ++r) {
    const auto first = active_after.begin() + r * call.G;
    new_active.data_ptr<int64_t>()[r] = *std::max_element(first, first + call.G);
    new_absorbed.data_ptr<int64_t>()[r] += call.num_full(r);
  }
  out.insert(out.end(), {new_keys, new_values, new_counts, new_active, new_absorbed});
  return out;
}

#include "backward.h"

}  // namespace
}  // namespace ovq

TORCH_LIBRARY(ovq_cpu, library) {
  library.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor key_means, Tensor value_means, "
      "Tensor counts, Tensor num_active, Tensor num_absorbed, Tensor tail_keys, Tensor tail_values, "
      "Tensor tail_length, Tensor? fed_tail, Tensor? fed_tokens, Tensor? starts, Tensor? lengths, "
      "int num_centroids, int chunk_size, int growth, int growth_length, int seeding, int seed, "
      "bool unit) -> Tensor[]");
  library.impl("forward", c10::DispatchKey::CPU, ovq::forward);
  library.def(
      "backward(Tensor grad_o, Tensor grad_key_means, Tensor grad_value_means, "
      "Tensor grad_tail_keys, Tensor grad_tail_values, Tensor q, Tensor k, Tensor v, Tensor beta, "
      "Tensor tail_keys, Tensor tail_values, Tensor tail_length, Tensor key_means, "
      "Tensor value_means, Tensor counts, Tensor slots_tail, Tensor slots_tokens, Tensor lse, "
      "Tensor? starts, Tensor? lengths, int num_centroids, int chunk_size, bool unit) -> Tensor[]");
  library.impl("backward", c10::DispatchKey::CPU, ovq::backward);
}
