// OVQ attention on the CPU: forward (decoding is its case of one token) and backward.
//
// One task is one key-value head of one sequence. It walks over the chunks of its sequence; inside
// a chunk, panels of rows (queries or keys, see products.h) are independent of one another. Tasks
// run in parallel where they fill the threads, panels do otherwise. No sum depends on which of the
// two it was, or on the number of threads, so results are the same bit for bit.
#include <torch/library.h>

#include "backward.h"
#include "forward.h"

namespace ovq {
namespace {

// Numbers of the dictionaries that a call may read, each once a query, on the calling thread alone.
constexpr int64_t kSerialReads = 1 << 20;

template <class T>
const T* data_or_null(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

// [o, lse, slots of tails, slots of tokens, tail keys, tail values, tail lengths], and where a
// chunk was absorbed the rest of the state too: [key means, value means, counts, num active, num
// absorbed].
std::vector<Tensor> forward(
    const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& beta_in,
    const Tensor& key_means, const Tensor& value_means, const Tensor& counts,
    const Tensor& num_active_in, const Tensor& num_absorbed_in, const Tensor& tail_keys_in,
    const Tensor& tail_values_in, const Tensor& tail_length_in, const OptionalTensor& fed_tail_in,
    const OptionalTensor& fed_tokens_in, const OptionalTensor& starts,
    const OptionalTensor& lengths, int64_t num_centroids, int64_t chunk_size, int64_t window_size,
    int64_t growth, int64_t growth_length, int64_t seeding, int64_t seed, int64_t centroid) {
  const Tensor q = q_in.contiguous(), k = k_in.contiguous(), v = v_in.contiguous();
  const Tensor beta = beta_in.to(at::kFloat).contiguous();
  const Tensor tail_keys = tail_keys_in.contiguous(), tail_values = tail_values_in.contiguous();
  const Tensor num_active = num_active_in.contiguous(), tail_length = tail_length_in.contiguous();
  const Tensor num_absorbed = num_absorbed_in.contiguous();
  const OptionalTensor fed_tail = contiguous(fed_tail_in), fed_tokens = contiguous(fed_tokens_in);
  Call::check_part("tail_length", tail_length, {key_means.size(0)}, at::kLong);
  const Call call(
      Rule{
          num_centroids, chunk_size, window_size, growth, growth_length, seeding, seed, centroid},
      q, k, v, tail_length, starts, lengths);
  call.check_state(
      key_means, value_means, counts, num_active, num_absorbed, tail_keys, tail_values);
  bool absorbs = false;
  for (int64_t r = 0; r < call.R; ++r) absorbs |= call.absorbs(r);

  Tensor o = at::empty({q.size(0), q.size(1), call.H, call.V}, q.options());
  Tensor lse = at::empty({q.size(0), q.size(1), call.H}, beta.options());
  Tensor slots_tail = at::empty({call.R, call.L, call.G}, counts.options());
  Tensor slots_tokens = at::empty({k.size(0), k.size(1), call.G}, counts.options());
  Tensor new_tail_keys = at::empty_like(tail_keys), new_tail_values = at::empty_like(tail_values);
  Tensor new_tail_length = at::empty_like(tail_length);
  const auto own = [&](const Tensor& t) {
    return absorbs ? t.clone(at::MemoryFormat::Contiguous) : t.contiguous();
  };
  Tensor new_keys = own(key_means), new_values = own(value_means), new_counts = own(counts);
  std::vector<int64_t> active_after(call.R * call.G);

  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const Forward<T> f{
        call,
        q.const_data_ptr<T>(),
        k.const_data_ptr<T>(),
        v.const_data_ptr<T>(),
        beta.const_data_ptr<float>(),
        tail_keys.const_data_ptr<float>(),
        tail_values.const_data_ptr<float>(),
        new_keys.data_ptr<float>(),
        new_values.data_ptr<float>(),
        new_counts.data_ptr<int64_t>(),
        num_active.const_data_ptr<int64_t>(),
        num_absorbed.const_data_ptr<int64_t>(),
        data_or_null<int64_t>(fed_tail),
        data_or_null<int64_t>(fed_tokens),
        o.data_ptr<T>(),
        lse.data_ptr<float>(),
        new_tail_keys.data_ptr<float>(),
        new_tail_values.data_ptr<float>(),
        slots_tail.data_ptr<int64_t>(),
        slots_tokens.data_ptr<int64_t>(),
        active_after.data()};
    at::parallel_for(0, call.R, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) f.tails(row);
    });
    for_each_head(call, [&](int64_t row, int64_t g) { f.head(row, g); });
  };
  // A fork costs what a decoding step does, and far more where other work has the other cores.
  std::optional<c10::ParallelGuard> alone;
  if (!absorbs && call.num_reads(num_active) < kSerialReads) alone.emplace(true);
  if (q.scalar_type() == at::kBFloat16)
    run(at::BFloat16{});
  else
    run(float{});

  auto* new_lengths = new_tail_length.data_ptr<int64_t>();
  for (int64_t r = 0; r < call.R; ++r)
    new_lengths[r] = call.tail[r] + call.length[r] - call.num_leaving(r);
  std::vector<Tensor> out{
      o, lse, slots_tail, slots_tokens, new_tail_keys, new_tail_values, new_tail_length};
  if (!absorbs) return out;
  Tensor new_active = at::empty_like(num_active), new_absorbed = num_absorbed.clone();
  for (int64_t r = 0; r < call.R; ++r) {
    const auto first = active_after.begin() + r * call.G;
    new_active.data_ptr<int64_t>()[r] = *std::max_element(first, first + call.G);
    new_absorbed.data_ptr<int64_t>()[r] += call.num_leaving(r);
  }
  out.insert(out.end(), {new_keys, new_values, new_counts, new_active, new_absorbed});
  return out;
}

// The gradients of q, k, v, beta, key means, value means, tail keys and tail values.
std::vector<Tensor> backward(
    const Tensor& grad_o_in, const Tensor& grad_keys_in, const Tensor& grad_values_in,
    const Tensor& grad_tail_keys_in, const Tensor& grad_tail_values_in, const Tensor& q_in,
    const Tensor& k_in, const Tensor& v_in, const Tensor& beta_in, const Tensor& tail_keys_in,
    const Tensor& tail_values_in, const Tensor& tail_length, const Tensor& key_means_in,
    const Tensor& value_means_in, const Tensor& counts_in, const Tensor& slots_tail_in,
    const Tensor& slots_tokens_in, const Tensor& lse_in, const OptionalTensor& starts,
    const OptionalTensor& lengths, int64_t num_centroids, int64_t chunk_size, int64_t window_size,
    int64_t centroid) {
  const Tensor grad_o = grad_o_in.contiguous(), q = q_in.contiguous(), k = k_in.contiguous();
  const Tensor v = v_in.contiguous(), beta = beta_in.to(at::kFloat).contiguous();
  const Tensor tail_keys = tail_keys_in.contiguous(), tail_values = tail_values_in.contiguous();
  const Tensor keys = key_means_in.contiguous(), values = value_means_in.contiguous();
  const Tensor grad_keys = grad_keys_in.contiguous(), grad_values = grad_values_in.contiguous();
  const Tensor grad_tail_keys = grad_tail_keys_in.contiguous();
  const Tensor grad_tail_values = grad_tail_values_in.contiguous();
  const Tensor counts = counts_in.contiguous(), slots_tail = slots_tail_in.contiguous();
  const Tensor slots_tokens = slots_tokens_in.contiguous(), lse = lse_in.contiguous();
  const Call call(
      Rule{num_centroids, chunk_size, window_size, 0, 0, 0, 0, centroid}, q, k, v, tail_length,
      starts, lengths);
  Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  Tensor dkeys = at::empty_like(keys), dvalues = at::empty_like(values);
  Tensor dtail_keys = at::empty_like(tail_keys), dtail_values = at::empty_like(tail_values);
  Tensor dbeta = at::zeros({call.R, call.H}, beta.options().dtype(at::kDouble));
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const auto f = [](const Tensor& t) { return t.const_data_ptr<float>(); };
    const auto i = [](const Tensor& t) { return t.const_data_ptr<int64_t>(); };
    const Backward<T> b{
        call,
        grad_o.const_data_ptr<T>(),
        q.const_data_ptr<T>(),
        k.const_data_ptr<T>(),
        v.const_data_ptr<T>(),
        f(beta),
        f(lse),
        f(tail_keys),
        f(tail_values),
        f(keys),
        f(values),
        f(grad_keys),
        f(grad_values),
        f(grad_tail_keys),
        f(grad_tail_values),
        i(counts),
        i(slots_tail),
        i(slots_tokens),
        dq.data_ptr<T>(),
        dk.data_ptr<T>(),
        dv.data_ptr<T>(),
        dkeys.data_ptr<float>(),
        dvalues.data_ptr<float>(),
        dtail_keys.data_ptr<float>(),
        dtail_values.data_ptr<float>(),
        dbeta.data_ptr<double>()};
    for_each_head(call, [&](int64_t row, int64_t g) { b.head(row, g); });
  };
  if (q.scalar_type() == at::kBFloat16)
    run(at::BFloat16{});
  else
    run(float{});
  return {dq,    dk,      dv,         dbeta.sum(0).to(beta_in.scalar_type()),
          dkeys, dvalues, dtail_keys, dtail_values};
}

}  // namespace
}  // namespace ovq

TORCH_LIBRARY(ovq_cpu, library) {
  library.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor key_means, Tensor value_means, "
      "Tensor counts, Tensor num_active, Tensor num_absorbed, Tensor tail_keys, Tensor "
      "tail_values, "
      "Tensor tail_length, Tensor? fed_tail, Tensor? fed_tokens, Tensor? starts, Tensor? lengths, "
      "int num_centroids, int chunk_size, int window_size, int growth, int growth_length, "
      "int seeding, int seed, int centroid) -> Tensor[]");
  library.impl("forward", c10::DispatchKey::CPU, ovq::forward);
  library.def(
      "backward(Tensor grad_o, Tensor grad_key_means, Tensor grad_value_means, "
      "Tensor grad_tail_keys, Tensor grad_tail_values, Tensor q, Tensor k, Tensor v, Tensor beta, "
      "Tensor tail_keys, Tensor tail_values, Tensor tail_length, Tensor key_means, "
      "Tensor value_means, Tensor counts, Tensor slots_tail, Tensor slots_tokens, Tensor lse, "
      "Tensor? starts, Tensor? lengths, int num_centroids, int chunk_size, int window_size, "
      "int centroid) -> Tensor[]");
  library.impl("backward", c10::DispatchKey::CPU, ovq::backward);
}
