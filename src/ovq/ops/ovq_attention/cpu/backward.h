// The backward: from the last chunk to the first, undoing the updates.
//
// With A[m] = dD[m] / c[m], the gradient of a slot's means over its count: A does not change when
// the slot absorbs further members, and it is what each member receives. So the keys and values
// that left after a chunk get A[slot] from later chunks; the update is undone in the sums S = c D;
// then the chunk's read adds dD / c, with the counts before, to A, and its share to the exact
// tokens.
#pragma once

#include "sequences.h"

namespace ovq {

constexpr int64_t kGroupRows = 128;  // rows whose weights the backward holds at a time

class Past;

// The gradients of a read to one list of keys and values, columns padded to whole vectors.
struct RowGradients {
  float *keys, *values;  // [count, Kp], [count, Vp]
};

template <class T>
struct Backward {
  const Call& call;
  const T *grad_o, *q, *k, *v;
  const float *beta, *lse, *tail_keys, *tail_values, *means_keys, *means_values;
  const float *grad_keys, *grad_values, *grad_tail_keys, *grad_tail_values;
  const int64_t *counts, *slots_tail, *slots_tokens;
  T *dq, *dk, *dv;
  float *dkeys, *dvalues, *dtail_keys, *dtail_values;
  double* dbeta;  // [R, H]

  void head(int64_t row, int64_t g) const;

 private:
  void walk(int64_t row, int64_t g, Past& past) const;
};

// The dictionary while it is undone, and the accumulators A.
class Past {
 public:
  Past(
      const Rule& rule, int64_t K, int64_t V, const float* keys, const float* values,
      const int64_t* counts)
      : K(K),
        V(V),
        Kp(round_up(K, kWidth)),
        Vp(round_up(V, kWidth)),
        rule_(rule),
        active(rule.num_centroids),
        keys(active * K),
        values(active * V),
        grads{Buffer<float>(active * Kp), Buffer<float>(active * Vp)},
        bias(active),
        inverse(active),
        counts(counts, counts + active) {
    drop_empty();
    key_sums_ = Buffer<double>(active * K);
    value_sums_ = Buffer<double>(active * V);
    if (rule.reads_units()) units_ = Buffer<float>(active * K), norms_ = Buffer<float>(active);
    for (int64_t m = 0; m < active; ++m) {
      const auto count = static_cast<double>(counts[m]);
      for (int64_t d = 0; d < K; ++d) key_sums_[m * K + d] = count * keys[m * K + d];
      for (int64_t d = 0; d < V; ++d) value_sums_[m * V + d] = count * values[m * V + d];
      refresh(m);
    }
  }

  const float* read_keys() const { return rule_.reads_units() ? units_ : keys; }

  // Takes the members of a chunk out again.
  void undo(const int64_t* slots, const float* old_keys, const float* old_values) {
    for (int64_t i = 0; i < rule_.chunk_size; ++i) {
      const int64_t m = slots[i];
      --counts[m];
      for (int64_t d = 0; d < K; ++d) key_sums_[m * K + d] -= old_keys[i * K + d];
      for (int64_t d = 0; d < V; ++d) value_sums_[m * V + d] -= old_values[i * V + d];
    }
    for (int64_t i = 0; i < rule_.chunk_size; ++i) refresh(slots[i]);
    drop_empty();
  }

  // A += dD / c for `count` slots from `first` on.
  void add(int64_t first, int64_t count, float* of_keys, const float* of_values) {
    for (int64_t m = first; m < first + count; ++m, of_keys += Kp, of_values += Vp) {
      if (rule_.reads_units()) through_norm(m, of_keys);
      add_scaled(grads.keys + m * Kp, of_keys, inverse[m], Kp);
      add_scaled(grads.values + m * Vp, of_values, inverse[m], Vp);
    }
  }

  int64_t K, V, Kp, Vp;

 private:
  const Rule& rule_;

 public:
  int64_t active;
  Buffer<float> keys, values;
  struct {
    Buffer<float> keys, values;
  } grads;  // A, [N, Kp] and [N, Vp]
  Buffer<float> bias, inverse;
  std::vector<int64_t> counts;

 private:
  void drop_empty() {
    while (active > 0 && counts[active - 1] == 0) --active;
  }

  void refresh(int64_t m) {
    const double by = counts[m] > 0 ? 1.0 / static_cast<double>(counts[m]) : 0.0;
    inverse[m] = static_cast<float>(by);
    bias[m] = std::log(static_cast<float>(counts[m]));
    for (int64_t d = 0; d < K; ++d) keys[m * K + d] = static_cast<float>(by * key_sums_[m * K + d]);
    for (int64_t d = 0; d < V; ++d)
      values[m * V + d] = static_cast<float>(by * value_sums_[m * V + d]);
    if (rule_.reads_units()) norms_[m] = unit_row(units_ + m * K, keys + m * K, K);
  }

  // The gradient of a key at unit norm becomes that of the key.
  void through_norm(int64_t m, float* grad) const {
    const float norm = norms_[m];
    const float* unit = units_ + m * K;
    const float along = norm > 1e-6f ? dot(grad, unit, K) : 0.0f;
    for (int64_t d = 0; d < K; ++d) grad[d] = (grad[d] - along * unit[d]) / norm;
  }

  Buffer<double> key_sums_, value_sums_;
  Buffer<float> units_, norms_;
};

// The backward of the reads of one head, kGroupRows rows at a time: their weights and the gradients
// of these are held for all slots and tokens, [panel, slot or token, lane].
template <class T>
class ReaderBackward {
 public:
  ReaderBackward(const Backward<T>& b, int64_t row, int64_t g, int64_t most_slots)
      : b_(b),
        c_(b.call),
        g_(g),
        Kp_(round_up(c_.K, kWidth)),
        Vp_(round_up(c_.V, kWidth)),
        first_head_(c_.start[row] * c_.H + g * c_.J),
        dbeta_(b.dbeta + row * c_.H + g * c_.J),
        most_rows_(round_up(std::min(kGroupRows, std::min(c_.C, c_.length[row]) * c_.J), kLanes)),
        queries_(most_rows_ * c_.K),
        grads_(most_rows_ * c_.V),
        scaled_(most_rows_ * Kp_),
        grad_rows_(most_rows_ * Vp_),
        lse_(most_rows_),
        limits_(most_rows_),
        mean_(most_rows_),
        total_(most_rows_),
        with_query_(most_rows_),
        sums_(most_rows_ * c_.K),
        weights_(most_rows_ * (most_slots + c_.L)),
        grad_weights_(most_rows_ * (most_slots + c_.L)) {}

  void read(
      int64_t first, int64_t count, int64_t offset, Past& past, const Rows& slots,
      const Rows& tokens, const RowGradients& of_tokens) {
    const int64_t total = count * c_.J;
    for (int64_t r = 0; r < total; r += most_rows_) {
      first_row_ = first * c_.J + r;
      num_rows_ = std::min(most_rows_, total - r);
      num_panels_ = round_up(num_rows_, kLanes) / kLanes;
      pack(offset - first);
      read_group(past, slots, tokens, of_tokens);
      for (int64_t i = 0; i < num_rows_; ++i) dbeta_[(first_row_ + i) % c_.J] += with_query_[i];
    }
  }

 private:
  int64_t token_head(int64_t r) const {
    return first_head_ + (first_row_ + r) / c_.J * c_.H + (first_row_ + r) % c_.J;
  }
  float beta(int64_t r) const { return b_.beta[g_ * c_.J + (first_row_ + r) % c_.J]; }
  float* weights(int64_t p, int64_t m) { return weights_ + (p * num_seen_ + m) * kLanes; }
  float* grad_weights(int64_t p, int64_t m) { return grad_weights_ + (p * num_seen_ + m) * kLanes; }
  int64_t seen(int64_t p) const { return static_cast<int64_t>(limits_[(p + 1) * kLanes - 1]) + 1; }

  // Queries (times beta) and output gradients: as rows, and transposed as panels.
  void pack(int64_t offset) {
    for (int64_t r = 0; r < num_panels_ * kLanes; ++r) {
      const bool real = r < num_rows_;
      const int64_t source = token_head(std::min(r, num_rows_ - 1));
      if (r + kAhead < num_rows_) {
        const int64_t later = token_head(r + kAhead);
        prefetch(b_.q + later * c_.K, c_.K);
        prefetch(b_.grad_o + later * c_.V, c_.V);
      }
      float *scaled = scaled_ + r * Kp_, *grad = grad_rows_ + r * Vp_;
      std::fill_n(scaled, Kp_, 0.0f);
      std::fill_n(grad, Vp_, 0.0f);
      const float by = real ? beta(r) : 0.0f, one = real ? 1.0f : 0.0f;
      for (int64_t d = 0; d < c_.K; ++d)
        scaled[d] = by * static_cast<float>(b_.q[source * c_.K + d]);
      for (int64_t d = 0; d < c_.V; ++d)
        grad[d] = one * static_cast<float>(b_.grad_o[source * c_.V + d]);
      lse_[r] = real ? b_.lse[source] : kInfinity;
      limits_[r] = static_cast<float>(offset + (first_row_ + std::min(r, num_rows_ - 1)) / c_.J);
    }
    for (int64_t r = 0; r < num_panels_ * kLanes; r += kLanes) {
      float* panel = queries_ + r * c_.K;
      transpose(panel, kLanes, scaled_ + r * Kp_, Kp_, kLanes, c_.K);
      transpose(grads_ + r * c_.V, kLanes, grad_rows_ + r * Vp_, Vp_, kLanes, c_.V);
    }
  }

  void read_group(
      Past& past, const Rows& slots, const Rows& tokens, const RowGradients& of_tokens) {
    num_seen_ = slots.count + seen(num_panels_ - 1);
    at::parallel_for(0, num_panels_, 1, [&](int64_t begin, int64_t end) {
      std::fill_n(mean_ + begin * kLanes, (end - begin) * kLanes, 0.0f);
      std::fill_n(total_ + begin * kLanes, (end - begin) * kLanes, 0.0f);
      std::fill_n(sums_ + begin * kLanes * c_.K, (end - begin) * kLanes * c_.K, 0.0f);
      for (int64_t m = 0; m < slots.count; m += kBlock)
        for (int64_t p = begin; p < end; ++p)
          weigh<false>(p, slots, m, std::min(kBlock, slots.count - m), m);
      for (int64_t p = begin; p < end; ++p)
        for (int64_t m = 0; m < seen(p); m += kBlock)
          weigh<true>(p, tokens, m, std::min(kBlock, seen(p) - m), slots.count + m);
      // The weights sum to 1 but for the rounding of lse; so a row's logit gradients sum to 0.
      for (int64_t r = begin * kLanes; r < end * kLanes; ++r)
        if (total_[r] > 0.0f) mean_[r] /= total_[r];
      for (int64_t m = 0; m < slots.count; m += kBlock)
        for (int64_t p = begin; p < end; ++p)
          to_queries(p, slots, m, std::min(kBlock, slots.count - m), m);
      for (int64_t p = begin; p < end; ++p) {
        for (int64_t m = 0; m < seen(p); m += kBlock)
          to_queries(p, tokens, m, std::min(kBlock, seen(p) - m), slots.count + m);
        hide(p, slots.count + seen(p));
        finish(p);
      }
    });
    const int64_t of_slots = round_up(slots.count, kBlock) / kBlock;
    const int64_t in_tokens = num_seen_ - slots.count;
    const int64_t blocks = of_slots + round_up(in_tokens, kBlock) / kBlock;
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      Buffer<float> of_keys(kBlock * Kp_), of_values(kBlock * Vp_);
      for (int64_t block = begin; block < end; ++block) {
        const bool old = block < of_slots;
        const int64_t m = (old ? block : block - of_slots) * kBlock;
        const int64_t size = std::min(kBlock, (old ? slots.count : in_tokens) - m);
        int64_t p = 0;  // the first panel that sees the block
        while (!old && seen(p) <= m) ++p;
        to_rows(p, old ? m : slots.count + m, size, of_keys, of_values);
        if (old) {
          past.add(m, size, of_keys, of_values);
          continue;
        }
        for (int64_t i = 0; i < size * Kp_; ++i) of_tokens.keys[m * Kp_ + i] += of_keys[i];
        for (int64_t i = 0; i < size * Vp_; ++i) of_tokens.values[m * Vp_ + i] += of_values[i];
      }
    });
  }

  // Weights P of a panel for some slots or tokens, their gradients dP, and the rows' sums of P and
  // P dP.
  template <bool causal>
  void weigh(int64_t p, const Rows& rows, int64_t first, int64_t count, int64_t at) {
    float *weight = weights(p, at), *grad = grad_weights(p, at), *mean = mean_ + p * kLanes;
    logits<causal>(
        queries_ + p * kLanes * c_.K, c_.K, rows, first, count, limits_ + p * kLanes, weight);
    scores(
        grads_ + p * kLanes * c_.V, c_.V, rows.values + first * rows.value_stride,
        rows.value_stride, count, [&](int64_t m, const Vec& g0, const Vec& g1) {
          g0.store(grad + m * kLanes);
          g1.store(grad + m * kLanes + kWidth);
        });
    for (int64_t half = 0; half < kLanes; half += kWidth) {
      const Vec lse = Vec::loadu(lse_ + p * kLanes + half), zero(0.0f);
      Vec sum = Vec::loadu(mean + half), total = Vec::loadu(total_ + p * kLanes + half);
      for (int64_t i = half; i < count * kLanes; i += kLanes) {
        const Vec w = exp(at::vec::clamp_max(Vec::loadu(weight + i) - lse, zero));
        sum = at::vec::fmadd(w, Vec::loadu(grad + i), sum);
        total = total + w;
        w.store(weight + i);
      }
      sum.store(mean + half);
      total.store(total_ + p * kLanes + half);
    }
  }

  // Gradients of the logits, P (dP - mean), in place of dP; what they send to the queries.
  void to_queries(int64_t p, const Rows& rows, int64_t first, int64_t count, int64_t at) {
    const float *weight = weights(p, at), *mean = mean_ + p * kLanes;
    float* grad = grad_weights(p, at);
    const Vec mean0 = Vec::loadu(mean), mean1 = Vec::loadu(mean + kWidth);
    for (int64_t i = 0; i < count * kLanes; i += kLanes) {
      (Vec::loadu(weight + i) * (Vec::loadu(grad + i) - mean0)).store(grad + i);
      (Vec::loadu(weight + i + kWidth) * (Vec::loadu(grad + i + kWidth) - mean1))
          .store(grad + i + kWidth);
    }
    weighted_sums(
        grad, count, rows.keys + first * rows.key_stride, rows.key_stride, c_.K,
        sums_ + p * kLanes * c_.K);
  }

  // Nothing goes from a panel's rows to the tokens it does not see.
  void hide(int64_t p, int64_t at) {
    std::fill_n(weights(p, at), (num_seen_ - at) * kLanes, 0.0f);
    std::fill_n(grad_weights(p, at), (num_seen_ - at) * kLanes, 0.0f);
  }

  // What weights and logits send to the values and keys of some slots or tokens.
  void to_rows(int64_t panel, int64_t at, int64_t count, float* of_keys, float* of_values) {
    const int64_t step = num_seen_ * kLanes, left = num_panels_ - panel, row = panel * kLanes;
    outer_sums(grad_weights(panel, at), step, left, scaled_ + row * Kp_, Kp_, count, of_keys);
    outer_sums(weights(panel, at), step, left, grad_rows_ + row * Vp_, Vp_, count, of_values);
  }

  void finish(int64_t p) {
    Buffer<float> rows(kLanes * c_.K);
    transpose(rows, c_.K, sums_ + p * kLanes * c_.K, kLanes, c_.K, kLanes);
    for (int64_t r = p * kLanes; r < std::min((p + 1) * kLanes, num_rows_); ++r) {
      const float* row = rows + r % kLanes * c_.K;
      const int64_t at = token_head(r) * c_.K;
      float with_query = 0.0f;
      for (int64_t d = 0; d < c_.K; ++d) {
        with_query += row[d] * static_cast<float>(b_.q[at + d]);
        b_.dq[at + d] = static_cast<T>(beta(r) * row[d]);
      }
      with_query_[r] = with_query;
    }
  }

 private:
  const Backward<T>& b_;
  const Call& c_;
  int64_t g_, Kp_, Vp_, first_head_;
  double* dbeta_;
  int64_t most_rows_, first_row_ = 0, num_rows_ = 0, num_panels_ = 0, num_seen_ = 0;
  Buffer<float> queries_, grads_, scaled_, grad_rows_, lse_, limits_, mean_, total_, with_query_,
      sums_, weights_, grad_weights_;
};

template <class T>
void Backward<T>::head(int64_t row, int64_t g) const {
  const Call& c = call;
  const int64_t C = c.C, K = c.K, V = c.V, tail = c.tail[row], slab = row * c.G + g;
  const int64_t length = c.length[row] ? tail + c.length[row] : 0;
  Past past(
      c.rule, K, V, means_keys + slab * c.N * K, means_values + slab * c.N * V,
      counts + slab * c.N);
  const int64_t Kp = past.Kp, Vp = past.Vp, held = past.active;
  for (int64_t m = 0; m < held; ++m) {
    std::memset(past.grads.keys + m * Kp, 0, Kp * sizeof(float));
    std::memset(past.grads.values + m * Vp, 0, Vp * sizeof(float));
    add_scaled(past.grads.keys + m * Kp, grad_keys + (slab * c.N + m) * K, past.inverse[m], K);
    add_scaled(past.grads.values + m * Vp, grad_values + (slab * c.N + m) * V, past.inverse[m], V);
  }
  if (length > 0) walk(row, g, past);
  const auto tail_at = [&](int64_t i) { return (row * c.L + i) * c.G + g; };
  for (int64_t i = length > 0 ? tail : 0; i < c.L; ++i) {
    const bool waits = length == 0 && i < tail;
    for (int64_t d = 0; d < K; ++d)
      dtail_keys[tail_at(i) * K + d] = waits ? grad_tail_keys[tail_at(i) * K + d] : 0.0f;
    for (int64_t d = 0; d < V; ++d)
      dtail_values[tail_at(i) * V + d] = waits ? grad_tail_values[tail_at(i) * V + d] : 0.0f;
  }
  for (int64_t m = 0; m < c.N; ++m) {
    const float count = m < past.active ? static_cast<float>(past.counts[m]) : 0.0f;
    float *to_keys = dkeys + (slab * c.N + m) * K, *to_values = dvalues + (slab * c.N + m) * V;
    for (int64_t d = 0; d < K; ++d)
      to_keys[d] = count > 0.0f ? count * past.grads.keys[m * Kp + d] : 0.0f;
    for (int64_t d = 0; d < V; ++d)
      to_values[d] = count > 0.0f ? count * past.grads.values[m * Vp + d] : 0.0f;
  }
}

// The chunks that hold queries, from the last. A token's gradient comes into the bands with what
// reaches it from later, and is written once the chunk that holds the token has been read.
template <class T>
void Backward<T>::walk(int64_t row, int64_t g, Past& past) const {
  const Call& c = call;
  const int64_t C = c.C, K = c.K, V = c.V, Kp = past.Kp, Vp = past.Vp, tail = c.tail[row];
  const int64_t length = tail + c.length[row], num_leaving = c.num_leaving(row);
  const Stream<T> key_stream(c, tail_keys, k, row, g, c.G, K);
  const Stream<T> value_stream(c, tail_values, v, row, g, c.G, V);
  const auto tail_at = [&](int64_t p) { return (row * c.L + p) * c.G + g; };
  const auto own_at = [&](int64_t p) { return (c.start[row] + p - tail) * c.G + g; };
  const auto slot = [&](int64_t p) {
    return p < tail ? slots_tail[tail_at(p)] : slots_tokens[own_at(p)];
  };
  // From the slot, or from the place in the returned tail.
  const auto arrive = [&](float* out, const float* of_slots, const float* of_tail, int64_t D,
                          int64_t position, int64_t count) {
    const int64_t stride = round_up(D, kWidth);
    std::memset(out, 0, count * stride * sizeof(float));
    for (int64_t p = position; p < position + count; ++p, out += stride) {
      const float* from = p < num_leaving ? of_slots + slot(p) * stride
                                          : of_tail + tail_at(p - num_leaving) * D;
      std::memcpy(out, from, D * sizeof(float));
    }
  };
  const auto write = [&](const float* from, float* of_tail, T* of_tokens, int64_t D, int64_t p) {
    for (int64_t d = 0; d < D; ++d) {
      if (p < tail)
        of_tail[tail_at(p) * D + d] = from[d];
      else
        of_tokens[own_at(p) * D + d] = static_cast<T>(from[d]);
    }
  };
  Band exact_keys(c, K), exact_values(c, V), of_keys(c, Kp), of_values(c, Vp);
  std::vector<int64_t> slots(C);
  ReaderBackward<T> reader(*this, row, g, past.active);
  const int64_t earliest = tail / C * C;
  for (int64_t start = (length - 1) / C * C; start >= earliest; start -= C) {
    const int64_t stop = std::min(start + C, length), first = std::max(start, tail);
    const int64_t oldest = std::max<int64_t>(start - c.W, 0);
    exact_keys.cover(oldest, stop, [&](float* out, int64_t position, int64_t count) {
      key_stream.load(out, K, position, count);
    });
    exact_values.cover(oldest, stop, [&](float* out, int64_t position, int64_t count) {
      value_stream.load(out, V, position, count);
    });
    of_keys.cover(oldest, stop, [&](float* out, int64_t position, int64_t count) {
      arrive(out, past.grads.keys, grad_tail_keys, K, position, count);
    });
    of_values.cover(oldest, stop, [&](float* out, int64_t position, int64_t count) {
      arrive(out, past.grads.values, grad_tail_values, V, position, count);
    });
    const float *keys = exact_keys.row(oldest), *values = exact_values.row(oldest);
    if (start >= c.W && stop - start == C) {
      for (int64_t i = 0; i < C; ++i) slots[i] = slot(oldest + i);
      past.undo(slots.data(), keys, values);
    }
    const Rows old{past.read_keys(), past.values, K, V, past.active, past.bias};
    const Rows exact{keys, values, K, V, stop - oldest, nullptr};
    reader.read(
        first - tail, stop - first, first - oldest, past, old, exact,
        {of_keys.row(oldest), of_values.row(oldest)});
    for (int64_t p = start > earliest ? start : 0; p < stop; ++p) {
      write(of_keys.row(p), dtail_keys, dk, K, p);
      write(of_values.row(p), dtail_values, dv, V, p);
    }
  }
}

}  // namespace ovq
