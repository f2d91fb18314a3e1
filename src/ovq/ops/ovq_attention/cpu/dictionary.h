// The dictionary of one key-value head of one sequence: how it grows, who joins which slot, the
// means.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "products.h"

namespace ovq {

enum Growth : int64_t { kSaturating, kLinear, kImmediate };
enum Seeding : int64_t { kSpread, kRandom, kNovel };
enum Centroid : int64_t { kMean, kUnit, kDirection };

// The fields of DictionaryConfig that a kernel needs.
struct Rule {
  int64_t num_centroids, chunk_size, window_size, growth, growth_length, seeding, seed, centroid;

  bool reads_units() const { return centroid == kUnit; }     // in prediction
  bool compares_units() const { return centroid != kMean; }  // in scoring and assignment

  // Active slots once `t` tokens are in, `n` before the chunk.
  int64_t num_active_after(int64_t n, int64_t t) const {
    int64_t schedule = std::min(num_centroids, t);
    if (growth == kSaturating) schedule = num_centroids * t / (t + num_centroids);
    if (growth == kLinear) schedule = num_centroids * t / growth_length;
    const int64_t wanted = std::max<int64_t>(1, schedule);
    return std::max(n, std::min({n + chunk_size, num_centroids, wanted}));
  }
};

// The score of `random` seeding: a hash of (seed, position, head), 24 bits.
inline float random_score(int64_t position, int64_t head, int64_t num_heads, int64_t seed) {
  uint64_t x = static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15ull +
               static_cast<uint64_t>(position * num_heads + head);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return static_cast<float>((x >> 31) & 0xFFFFFF);
}

// Scales a row to unit norm; returns the norm, at least 1e-6.
inline float unit_row(float* out, const float* row, int64_t K) {
  const float norm = std::max(std::sqrt(dot(row, row, K)), 1e-6f);
  for (int64_t d = 0; d < K; ++d) out[d] = row[d] / norm;
  return norm;
}

inline void log_counts(float* out, const int64_t* counts, int64_t n) {
  for (int64_t m = 0; m < n; ++m) out[m] = static_cast<float>(counts[m]);
  int64_t m = 0;
  for (; m + kWidth <= n; m += kWidth) Vec::loadu(out + m).log().store(out + m);
  if (m < n) Vec::loadu(out + m, n - m).log().store(out + m, n - m);
}

// Rows of means and counts, [N, K], [N, V] and [N], that this struct writes only in `absorb`.
struct Dictionary {
  const Rule& rule;
  int64_t K, V, active;
  float *keys, *values;
  int64_t* counts;
  Buffer<float> bias;   // log of the counts: -inf in a slot that only fed slots have skipped
  Buffer<float> units;  // the key centroids at unit norm, where they are compared so
  Buffer<float> sums;   // of the new members of the touched slots, [C, K + V]
  std::vector<int32_t> place, touched;

  Dictionary(
      const Rule& rule, int64_t K, int64_t V, int64_t active, float* keys, float* values,
      int64_t* counts)
      : rule(rule),
        K(K),
        V(V),
        active(active),
        keys(keys),
        values(values),
        counts(counts),
        bias(rule.num_centroids) {
    log_counts(bias, counts, active);
    if (!rule.compares_units()) return;
    units = Buffer<float>(rule.num_centroids * K);
    for (int64_t m = 0; m < active; ++m) unit_row(units + m * K, keys + m * K, K);
  }

  // The key centroids as prediction sees them, and as scoring and assignment do.
  const float* read_keys() const { return rule.reads_units() ? units : keys; }
  const float* compared_keys() const { return rule.compares_units() ? units : keys; }

  // Moves the means once the tokens of a full chunk have joined their slots.
  void absorb(const float* new_keys, const float* new_values, const int64_t* slots) {
    const int64_t C = rule.chunk_size, D = K + V;
    if (place.empty()) {
      place.assign(rule.num_centroids, -1);
      sums = Buffer<float>(C * D);
    }
    touched.clear();
    std::vector<int64_t> members;
    for (int64_t i = 0; i < C; ++i) {
      const int64_t m = slots[i];
      if (place[m] < 0) {
        place[m] = static_cast<int32_t>(touched.size());
        touched.push_back(static_cast<int32_t>(m));
        members.push_back(0);
        std::memset(sums + place[m] * D, 0, D * sizeof(float));
        active = std::max(active, m + 1);
        prefetch(keys + m * K, K);
        prefetch(values + m * V, V);
      }
      ++members[place[m]];
      add_scaled(sums + place[m] * D, new_keys + i * K, 1.0f, K);
      add_scaled(sums + place[m] * D + K, new_values + i * V, 1.0f, V);
    }
    for (size_t t = 0; t < touched.size(); ++t) {
      const int64_t m = touched[t];
      counts[m] += members[t];
      move(keys + m * K, sums + t * D, members[t], counts[m], K);
      move(values + m * V, sums + t * D + K, members[t], counts[m], V);
      if (rule.compares_units()) unit_row(units + m * K, keys + m * K, K);
      place[m] = -1;
    }
    log_counts(bias, counts, active);
  }

 private:
  // mean += (sum of the new members - their number * mean) / count; an infinite sum makes it NaN,
  // as a key centroid with an infinite number could weigh nothing and so hide it.
  static void move(float* mean, const float* sum, int64_t members, int64_t count, int64_t D) {
    const float weight = 1.0f / static_cast<float>(count), number = static_cast<float>(members);
    for (int64_t d = 0; d < D; ++d)
      mean[d] += weight * (sum[d] - number * mean[d]) + (sum[d] - sum[d]);
  }
};

// The nearest slot of each key of a leaving chunk so far. Products are compared on the grid of
// 2^-16, which is exact in float32 as the keys are packed times 2^16; the first, lowest slot wins a
// tie.
struct Nearest {
  int64_t C, K, num_panels;
  Buffer<float> panels, product, slot;  // [num_panels, K, kLanes], [C padded], [C padded]
  const float* centroids = nullptr;     // [n, K], those the keys are to meet

  Nearest(int64_t C, int64_t K)
      : C(C),
        K(K),
        num_panels(round_up(C, kLanes) / kLanes),
        panels(num_panels * kLanes * K),
        product(num_panels * kLanes),
        slot(num_panels * kLanes) {
    std::memset(panels, 0, num_panels * kLanes * K * sizeof(float));
  }

  void start(const float* keys, const float* compared_keys) {
    centroids = compared_keys;
    for (int64_t p = 0; p < num_panels; ++p) {
      float* panel = panels + p * kLanes * K;
      transpose(panel, kLanes, keys + p * kLanes * K, K, std::min(kLanes, C - p * kLanes), K);
      for (int64_t i = 0; i < kLanes * K; ++i) panel[i] *= 65536.0f;
    }
    std::fill_n(static_cast<float*>(product), num_panels * kLanes, -kInfinity);
    std::fill_n(static_cast<float*>(slot), num_panels * kLanes, 0.0f);
  }

  // Compares the keys of panel p with `count` more centroids, the first of which is slot `first`.
  void compare(int64_t p, const float* rows, const float* bias, int64_t count, int64_t first) {
    float *best = product + p * kLanes, *at = slot + p * kLanes;
    Vec best0 = Vec::loadu(best), best1 = Vec::loadu(best + kWidth);
    Vec at0 = Vec::loadu(at), at1 = Vec::loadu(at + kWidth);
    scores(
        panels + p * kLanes * K, K, rows, K, count, [&](int64_t m, const Vec& s0, const Vec& s1) {
          if (bias != nullptr && bias[m] == -kInfinity) return;  // a slot nobody has joined
          const Vec index(static_cast<float>(first + m)), g0 = s0.round(), g1 = s1.round();
          const Vec more0 = g0 > best0, more1 = g1 > best1;
          at0 = Vec::blendv(at0, index, more0);
          at1 = Vec::blendv(at1, index, more1);
          best0 = Vec::blendv(best0, g0, more0);
          best1 = Vec::blendv(best1, g1, more1);
        });
    best0.store(best);
    best1.store(best + kWidth);
    at0.store(at);
    at1.store(at + kWidth);
  }

  // Raises each key's score, [C padded], to its largest product with an earlier key of the chunk.
  void raise_to_earlier(float* score, const float* keys) const {
    for (int64_t p = 0; p < num_panels; ++p) {
      const auto first = static_cast<float>(p * kLanes);
      const Vec lanes0 = Vec::arange(first, 1), lanes1 = Vec::arange(first + kWidth, 1);
      float* most = score + p * kLanes;
      Vec most0 = Vec::loadu(most), most1 = Vec::loadu(most + kWidth);
      const int64_t count = std::min(C, (p + 1) * kLanes) - 1;
      scores(
          panels + p * kLanes * K, K, keys, K, count, [&](int64_t j, const Vec& s0, const Vec& s1) {
            const Vec place(static_cast<float>(j)), g0 = s0.round(), g1 = s1.round();
            most0 = Vec::blendv(most0, g0, (g0 > most0) & (lanes0 > place));
            most1 = Vec::blendv(most1, g1, (g1 > most1) & (lanes1 > place));
          });
      most0.store(most);
      most1.store(most + kWidth);
    }
  }
};

// The slot of every token of a leaving chunk, `nearest` holding its comparison with the old slots.
inline void choose_slots(
    int64_t* slots, const Dictionary& dictionary, Nearest& nearest, const float* keys,
    int64_t position, int64_t head, int64_t num_heads) {
  const Rule& rule = dictionary.rule;
  const int64_t C = rule.chunk_size, K = dictionary.K, n = dictionary.active;
  const int64_t num_new = rule.num_active_after(n, position + C) - n;
  std::vector<char> is_seed(C, 0);
  if (num_new > 0) {
    std::vector<float> score(nearest.product + 0, nearest.product + nearest.num_panels * kLanes);
    for (int64_t i = 0; i < C && rule.seeding == kRandom; ++i)
      score[i] = random_score(position + i, head, num_heads, rule.seed);
    if (rule.seeding == kNovel) nearest.raise_to_earlier(score.data(), keys);
    std::vector<int64_t> order(C);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(
        order.begin(), order.end(), [&](int64_t a, int64_t b) { return score[a] < score[b]; });
    for (int64_t i = 0; i < num_new; ++i) is_seed[order[i]] = 1;
    Buffer<float> seeds(num_new * K);
    for (int64_t i = 0, s = 0; i < C; ++i) {
      if (!is_seed[i]) continue;
      if (rule.compares_units())
        unit_row(seeds + s * K, keys + i * K, K);
      else
        std::memcpy(seeds + s * K, keys + i * K, K * sizeof(float));
      ++s;
    }
    for (int64_t p = 0; p < nearest.num_panels; ++p) nearest.compare(p, seeds, nullptr, num_new, n);
  }
  for (int64_t i = 0, next = n; i < C; ++i)
    slots[i] = is_seed[i] ? next++ : static_cast<int64_t>(nearest.slot[i]);
}

}  // namespace ovq
