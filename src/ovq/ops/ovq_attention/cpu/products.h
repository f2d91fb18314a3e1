// Small dense products and the exponential, in portable vectors.
//
// Every product of this operator is one loop: vectors times broadcast scalars, accumulated in
// registers. What differs is which axis lies in the lanes. In scores and in weighted sums the lanes
// are *rows of the chunk* (queries or keys), so that maxima, exponentials, masks and ties need no
// reduction across lanes, and the dictionary is read as it lies in memory, one slot after another.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

namespace ovq {

using Vec = at::vec::Vectorized<float>;

constexpr int64_t kWidth = Vec::size();
constexpr int64_t kLanes = 2 * kWidth;  // rows of a panel
constexpr int64_t kTile = 6;            // slots of a register tile: 12 sums, 2 vectors, 1 scalar
constexpr int64_t kAhead = 8;           // rows that are asked for before they are read
constexpr int64_t kBlock = 96;          // slots whose weights stay in the first-level cache
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Asks for the `count` numbers from `data` on: rows that lie apart come late otherwise.
template <class T>
C10_ALWAYS_INLINE void prefetch(const T* data, int64_t count) {
  constexpr auto line = static_cast<int64_t>(64 / sizeof(T));
  for (int64_t i = 0; i < count; i += line) __builtin_prefetch(data + i);
}

// Uninitialised memory on a cache line's boundary.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) : data_(static_cast<T*>(c10::alloc_cpu(count * sizeof(T)))) {}
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~Buffer() { c10::free_cpu(data_); }
  operator T*() { return data_; }
  operator const T*() const { return data_; }

 private:
  T* data_ = nullptr;
};

// sums[i][j] += sum over d of scalars[i * scalar_row + d * scalar_step] * vectors[d * vector_step +
// j]
template <int M, int X>
C10_ALWAYS_INLINE void multiply_add(
    Vec (&sums)[M][X], const float* vectors, int64_t vector_step, const float* scalars,
    int64_t scalar_row, int64_t scalar_step, int64_t depth) {
  for (int64_t d = 0; d < depth; ++d) {
    Vec x[X];
#pragma GCC unroll 8
    for (int j = 0; j < X; ++j) x[j] = Vec::loadu(vectors + j * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const Vec y(scalars[i * scalar_row]);
#pragma GCC unroll 8
      for (int j = 0; j < X; ++j) sums[i][j] = at::vec::fmadd(y, x[j], sums[i][j]);
    }
    vectors += vector_step;
    scalars += scalar_step;
  }
}

// Calls f(std::integral_constant<int, M>, first) over [0, count) in tiles of M = kTile and a rest.
template <class F>
C10_ALWAYS_INLINE void in_tiles(int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + kTile <= count; i += kTile) f(std::integral_constant<int, kTile>{}, i);
  switch (count - i) {
    case 1:
      f(std::integral_constant<int, 1>{}, i);
      break;
    case 2:
      f(std::integral_constant<int, 2>{}, i);
      break;
    case 3:
      f(std::integral_constant<int, 3>{}, i);
      break;
    case 4:
      f(std::integral_constant<int, 4>{}, i);
      break;
    case 5:
      f(std::integral_constant<int, 5>{}, i);
      break;
    default:
      break;
  }
}

// The inner products of a panel's rows with `count` rows of D numbers: emit(m, first half of the
// lanes, second half). A panel holds kLanes rows transposed: [D, kLanes].
template <class Emit>
C10_ALWAYS_INLINE void scores(
    const float* panel, int64_t D, const float* rows, int64_t stride, int64_t count,
    const Emit& emit) {
  in_tiles(count, [&](auto tile, int64_t m) {
    constexpr int M = decltype(tile)::value;
    Vec sums[M][2];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) sums[i][0] = sums[i][1] = Vec(0.0f);
    multiply_add<M, 2>(sums, panel, kLanes, rows + m * stride, stride, 1, D);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) emit(m + i, sums[i][0], sums[i][1]);
  });
}

// sums[c, lane] += sum over m of weights[m, lane] * rows[m, c]: a panel's weighted sums.
inline void weighted_sums(
    const float* weights, int64_t count, const float* rows, int64_t stride, int64_t columns,
    float* sums) {
  in_tiles(columns, [&](auto tile, int64_t c) {
    constexpr int M = decltype(tile)::value;
    Vec found[M][2];
    float* into = sums + c * kLanes;
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      found[i][0] = Vec::loadu(into + i * kLanes);
      found[i][1] = Vec::loadu(into + i * kLanes + kWidth);
    }
    multiply_add<M, 2>(found, weights, kLanes, rows + c, 1, stride, count);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      found[i][0].store(into + i * kLanes);
      found[i][1].store(into + i * kLanes + kWidth);
    }
  });
}

// out[m, c] = sum over panels p and lanes l of weights[p][m, l] * rows[p * kLanes + l, c], for
// `count` slots m; panels of weights lie `panel_step` apart. Here the lanes are columns: `width` of
// them, a multiple of kWidth, which is also the stride of rows and of out.
template <int X>
inline void outer_columns(
    const float* weights, int64_t panel_step, int64_t num_panels, const float* rows, int64_t width,
    int64_t count, float* out) {
  in_tiles(count, [&](auto tile, int64_t m) {
    constexpr int M = decltype(tile)::value;
    Vec sums[M][X];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < X; ++j) sums[i][j] = Vec(0.0f);
    for (int64_t p = 0; p < num_panels; ++p)
      multiply_add<M, X>(
          sums, rows + p * kLanes * width, width, weights + p * panel_step + m * kLanes, kLanes, 1,
          kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < X; ++j) sums[i][j].store(out + (m + i) * width + j * kWidth);
  });
}

inline void outer_sums(
    const float* weights, int64_t panel_step, int64_t num_panels, const float* rows, int64_t width,
    int64_t count, float* out) {
  int64_t c = 0;
  for (; c + 2 * kWidth <= width; c += 2 * kWidth)
    outer_columns<2>(weights, panel_step, num_panels, rows + c, width, count, out + c);
  if (c < width) outer_columns<1>(weights, panel_step, num_panels, rows + c, width, count, out + c);
}

// e^x for x <= 80, relative error below 3e-7 near 0, exactly 0 below -88, exactly 1 at 0, NaN for
// NaN.
C10_ALWAYS_INLINE Vec exp(const Vec& unbounded) {
  // Adding 1.5 * 2^23 rounds to an integer, adding 127 makes it the exponent field of 2^integer: 0,
  // of the number 0, at the lower bound. `clamp_min` lets NaN pass.
  const Vec log2_e(1.44269504f), magic(12582912.0f + 127.0f);
  const Vec x = at::vec::clamp_min(unbounded, Vec(-88.0f));
  const Vec shifted = at::vec::fmadd(x, log2_e, magic);
  const Vec r = at::vec::fmadd(x, log2_e, magic - shifted);  // in [-0.5, 0.5]
  Vec p(0.00132647273f);                                     // of 2^r, by least maximum error
  p = at::vec::fmadd(p, r, Vec(0.00967151299f));
  p = at::vec::fmadd(p, r, Vec(0.0555073358f));
  p = at::vec::fmadd(p, r, Vec(0.240222424f));
  p = at::vec::fmadd(p, r, Vec(0.693147004f));
  p = at::vec::fmadd(p, r, Vec(1.0f));
  using Int = at::vec::Vectorized<int32_t>;
  const Int power = at::vec::cast<int32_t, float>(shifted) << Int(23);
  return p * at::vec::cast<float, int32_t>(power);
}

inline float dot(const float* a, const float* b, int64_t D) {
  Vec sum(0.0f);
  int64_t d = 0;
  for (; d + kWidth <= D; d += kWidth)
    sum = at::vec::fmadd(Vec::loadu(a + d), Vec::loadu(b + d), sum);
  float total = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, sum);
  for (; d < D; ++d) total += a[d] * b[d];
  return total;
}

// The inner products of `row` with kWidth rows of D numbers, one in each lane.
inline Vec dots(const float* row, const float* rows, int64_t stride, int64_t D) {
  Vec sums[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) sums[i] = Vec(0.0f);
  int64_t d = 0;
  for (; d + kWidth <= D; d += kWidth) {
    const Vec x = Vec::loadu(row + d);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i)
      sums[i] = at::vec::fmadd(x, Vec::loadu(rows + i * stride + d), sums[i]);
  }
  alignas(64) float parts[kWidth * kWidth], across[kWidth * kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) sums[i].store(parts + i * kWidth);
  at::vec::transpose_mxn<float, kWidth, kWidth>(parts, kWidth, across, kWidth);
  Vec total = Vec::loadu(across);
  for (int i = 1; i < kWidth; ++i) total = total + Vec::loadu(across + i * kWidth);
  for (; d < D; ++d) {
    for (int i = 0; i < kWidth; ++i) parts[i] = rows[i * stride + d];
    total = at::vec::fmadd(Vec(row[d]), Vec::loadu(parts), total);
  }
  return total;
}

// out[c, r] = in[r, c] for `rows` times `columns` numbers.
inline void transpose(
    float* out, int64_t out_stride, const float* in, int64_t in_stride, int64_t rows,
    int64_t columns) {
  for (int64_t r = 0; r < rows; r += kWidth) {
    const int64_t height = std::min(kWidth, rows - r);
    int64_t c = 0;
    for (; height == kWidth && c + kWidth <= columns; c += kWidth)
      at::vec::transpose_mxn<float, kWidth, kWidth>(
          in + r * in_stride + c, in_stride, out + c * out_stride + r, out_stride);
    for (; c < columns; ++c)
      for (int64_t i = r; i < r + height; ++i) out[c * out_stride + i] = in[i * in_stride + c];
  }
}

// into += weight * row
inline void add_scaled(float* into, const float* row, float weight, int64_t D) {
  for (int64_t d = 0; d < D; ++d) into[d] += weight * row[d];
}

}  // namespace ovq
