// A row that was read from the streams, normed while it is in cache, and the gradient of that.
//
//   RMSNorm    n = w zhat,        zhat = z scale,            scale = 1 / sqrt(mean(z^2) + eps)
//   LayerNorm  n = w zhat + b,    zhat = (z - mean) scale,   scale = 1 / sqrt(var(z) + eps)
//
// Used by streamwise_residual_cpu.cpp. What always holds: z is normed as it is stored, rounded to its type; statistics
// are of the accumulation type; gradients of w and b are summed over the tokens of a block, then over blocks, in a
// fixed order.
//
// Names: n tokens, d branch width.

#pragma once

#include <cmath>
#include <vector>

#include "streamwise_residual_vectors.h"

namespace streamwise {

// What streamwise_residual_tensors.h lays out; pointers that a call does not use are null.
template <class A>
struct Norm {
  int64_t is_layer_norm;  // else RMSNorm
  double eps;
  const A *weight, *bias;            // [d]; no bias in an RMSNorm
  A *mean, *scale;                   // [n]: the forward writes them, the backward reads them; no mean in an RMSNorm
  A *grad_weight, *grad_bias;        // [d], set by the backward; no bias's in an RMSNorm
  int64_t sums() const { return is_layer_norm ? 2 : 1; }
};

// Memory of this thread for `count` numbers, which the next call with the same SLOT takes over
template <int SLOT, class T>
inline T *scratch(int64_t count) {
  static thread_local std::vector<words> memory;
  const size_t wanted = (count * sizeof(T) + sizeof(words) - 1) / sizeof(words);
  if (memory.size() < wanted) memory.resize(wanted);
  return reinterpret_cast<T *>(memory.data());
}

// Sum over a row of term(i, count, value), where `value` is the loaded element
template <class A, class T, class Term>
inline double sum_row(const T *row, int64_t d, Term term) {
  lanes<A> sum[2] = {};
  for_vectors<A>(d, [&](int64_t i, auto count, auto slot) { sum[slot] += term(i, count, load<A>(row + i, count)); });
  return total<A>(sum[0] + sum[1]);
}

// `value` with zeros behind `count` lanes, where a row's end has none: they must not count in a sum.
template <class A, class Count>
inline lanes<A> only(lanes<A> value, Count count) {
  if constexpr (!std::is_same<Count, All<A>>::value) {
    lanes<A> kept = {};
    std::memcpy(&kept, &value, count * sizeof(A));
    return kept;
  }
  return value;
}

// Norms row t in place.
template <class A, class T>
void norm_row(const Norm<A> &norm, int64_t t, int64_t d, T *row) {
  const A *weight = norm.weight, *bias = norm.bias;
  if (!norm.is_layer_norm) {
    const double squares = sum_row<A>(row, d, [](int64_t, auto, lanes<A> z) { return z * z; });
    const A scale = 1 / std::sqrt(squares / d + norm.eps);
    norm.scale[t] = scale;
    for_vectors<A>(d, [&](int64_t i, auto count, auto) {
      store<A>(row + i, load<A>(row + i, count) * scale * load<A>(weight + i, count), count);
    });
    return;
  }
  const A mean = sum_row<A>(row, d, [](int64_t, auto, lanes<A> z) { return z; }) / d;
  const double squares = sum_row<A>(row, d, [&](int64_t, auto count, lanes<A> z) {
    const lanes<A> centred = only<A>(z - mean, count);
    return centred * centred;
  });
  const A scale = 1 / std::sqrt(squares / d + norm.eps);
  norm.mean[t] = mean;
  norm.scale[t] = scale;
  for_vectors<A>(d, [&](int64_t i, auto count, auto) {
    const lanes<A> unit = (load<A>(row + i, count) - mean) * scale;
    store<A>(row + i, unit * load<A>(weight + i, count) + load<A>(bias + i, count), count);
  });
}

// grad_z = scale (w g - mean(w g) - zhat mean(w g zhat)) of row t, without the first mean in an RMSNorm; g zhat and g
// are added to the sums [1 or 2, d].
template <bool IS_LAYER_NORM, class A, class T>
void norm_backward_row(const Norm<A> &norm, int64_t t, int64_t d, const T *grad, const T *z, A *sums, A *grad_z) {
  const A *weight = norm.weight;
  const A scale = norm.scale[t], mean = IS_LAYER_NORM ? norm.mean[t] : A(0);
  const auto unit = [&](int64_t i, auto count) {
    const lanes<A> value = load<A>(z + i, count);
    return (IS_LAYER_NORM ? value - mean : value) * scale;
  };
  lanes<A> product[2] = {}, sum[2] = {};
  for_vectors<A>(d, [&](int64_t i, auto count, auto slot) {
    const lanes<A> g = load<A>(grad + i, count), zhat = unit(i, count);  // zero in g's tail
    const lanes<A> scaled = g * load<A>(weight + i, count);
    product[slot] += scaled * zhat;
    if (IS_LAYER_NORM) sum[slot] += scaled;
    store<A>(sums + i, load<A>(sums + i, count) + g * zhat, count);
    if (IS_LAYER_NORM) store<A>(sums + d + i, load<A>(sums + d + i, count) + g, count);
  });
  const A along = total<A>(product[0] + product[1]) / d, offset = total<A>(sum[0] + sum[1]) / d;
  for_vectors<A>(d, [&](int64_t i, auto count, auto) {
    const lanes<A> scaled = load<A>(grad + i, count) * load<A>(weight + i, count);
    const lanes<A> rest = scaled - unit(i, count) * along;
    store<A>(grad_z + i, scale * (IS_LAYER_NORM ? rest - offset : rest), count);
  });
}

// result[i] = sum over blocks of partial[block * stride + i], in order; `threads` share the columns.
template <class A>
void sum_columns(int64_t blocks, int64_t stride, int64_t d, int threads, const A *partial, A *result) {
  constexpr int64_t COLUMNS = 64;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t start = 0; start < d; start += COLUMNS) {
    const int64_t length = start + COLUMNS < d ? COLUMNS : d - start;
    double sums[COLUMNS] = {};
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t i = 0; i < length; i++) sums[i] += partial[b * stride + start + i];
    for (int64_t i = 0; i < length; i++) result[start + i] = sums[i];
  }
}

}  // namespace streamwise
