// What an operator of streamwise_residual_torch.cpp is given, as its kernels take it: tensors to pointers, types to
// template arguments, controllers and norms to their structures.
//
//   ControllerCall read(read_p, k, READ, 0, wants_gradient);     // read.pointer() for the kernel, then read.gradient
//   for_types(x.scalar_type(), u.scalar_type(), [&]<class TX, class TU, class A>() {
//     kernel(in<TX>(x), read.pointer(), out<TU>(z), norm.forward<A>(n).get());
//   });
//
// What always holds: what a structure points to lives as long as its owner here; an undefined tensor is a null pointer.
//
// Names: n tokens, d branch width, p padded controller.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <memory>
#include <optional>

#include "streamwise_residual_kernels.h"

namespace streamwise {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline Tensor or_undefined(const MaybeTensor &x) { return x.has_value() ? *x : Tensor(); }
inline Tensor contiguous(const Tensor &x) { return x.defined() ? x.contiguous() : x; }

template <class T>
const T *in(const Tensor &x) {
  return x.defined() ? static_cast<const T *>(x.const_data_ptr()) : nullptr;
}
template <class T>
T *out(const Tensor &x) {
  return x.defined() ? static_cast<T *>(x.mutable_data_ptr()) : nullptr;
}

template <class T>
inline constexpr at::ScalarType dtype_of = at::kFloat;
template <>
inline constexpr at::ScalarType dtype_of<bf16> = at::kBFloat16;
template <>
inline constexpr at::ScalarType dtype_of<double> = at::kDouble;

// Calls f<TX, TU, A>() for a stream of dtype x and branch tensors of dtype u
template <class F>
void for_types(at::ScalarType x, at::ScalarType u, F f) {
#define STREAMWISE_CALL(TX, TU, A) \
  if (x == dtype_of<TX> && u == dtype_of<TU>) return f.template operator()<TX, TU, A>();
  STREAMWISE_TYPES(STREAMWISE_CALL)
#undef STREAMWISE_CALL
  TORCH_CHECK(false, "no compiled kernel for a stream of ", x, " and branches of ", u);
}

// Refuses a fake tensor, which says that it is on the CPU and has no memory; an undefined one passes.
inline void check_memory(const Tensor &tensor) {
  TORCH_CHECK(!tensor.defined() || !tensor.key_set().has(c10::DispatchKey::Python),
              "a tensor in memory is wanted, got one of a class that stands for it (a fake tensor); take ",
              "MEGATRON_STREAMWISE_BACKEND=eager for it");
}

inline at::ScalarType sums_of(at::ScalarType x) { return x == at::kDouble ? at::kDouble : at::kFloat; }

// A tensor with the leading dimensions of `like` and another last one
inline Tensor empty_with_width(const Tensor &like, int64_t width, at::ScalarType dtype) {
  at::DimVector sizes(like.sizes());
  sizes.back() = width;
  return at::empty(sizes, like.options().dtype(dtype));
}

// (n, k, d) of a wide stream
struct Sizes {
  int64_t n, k, d;
  Sizes(const Tensor &x, int64_t k) : n(x.numel() / x.size(-1)), k(k), d(x.size(-1) / k) {
    check_memory(x);
    TORCH_CHECK(x.device().is_cpu() && k > 0 && k * d == x.size(-1), "a stream of ", k, "*D on the CPU is wanted, got ",
                x.sizes(), " on ", x.device());
  }
  // Refuses a branch tensor of other tokens or another width
  void check(const Tensor &u) const {
    check_memory(u);
    TORCH_CHECK(u.device().is_cpu() && u.size(-1) == d && u.numel() == n * d, "[..., ", d, "] for ", n,
                " tokens on the CPU is wanted, got ", u.sizes(), " on ", u.device());
  }
};

// A controller in one call of a kernel, with the gradient that the kernel gives it; no controller of an undefined tensor
class ControllerCall {
 public:
  ControllerCall(const Tensor &values_p, int64_t k, Kind kind, double max_forget = 0, bool wants_gradient = false)
      : values(contiguous(values_p)) {
    if (!values.defined()) return;
    check_memory(values);
    const bool fits = values.device().is_cpu() && values.dim() == 1 && values.size(0) >= k;
    const bool is_wide = values.scalar_type() == at::kFloat || values.scalar_type() == at::kDouble;
    TORCH_CHECK(fits && is_wide, "an fp32 or fp64 controller of ", k, " streams on the CPU is wanted, got ",
                values.sizes(), " of ", values.scalar_type(), " on ", values.device());
    if (wants_gradient) gradient = at::empty_like(values);
    structure = {values.const_data_ptr(),
                 gradient.defined() ? gradient.mutable_data_ptr() : nullptr,
                 values.size(0),
                 values.scalar_type() == at::kDouble,
                 kind,
                 max_forget};
  }
  ControllerCall(const ControllerCall &) = delete;
  const Controller *pointer() const { return values.defined() ? &structure : nullptr; }

  Tensor gradient;  // [p], undefined where none is wanted

 private:
  const Tensor values;
  Controller structure = {};
};

enum NormKind : int64_t { NO_NORM, RMS_NORM, LAYER_NORM };

// A norm in one call of a kernel; the forward fills `mean` and `scale` [n], the backward `grad_weight` and `grad_bias`
// [d]; mean and grad_bias are a LayerNorm's alone.
class NormCall {
 public:
  NormCall(int64_t kind, double eps, const Tensor &weight, const Tensor &bias)
      : kind(kind), eps(eps), weight(weight), bias(bias) {}
  NormCall(const NormCall &) = delete;

  template <class A>
  const Norm<A> *forward(int64_t n, int64_t d) {
    if (kind == NO_NORM) return nullptr;
    scale = at::empty({n}, dtype_of<A>);
    if (kind == LAYER_NORM) mean = at::empty({n}, dtype_of<A>);
    return lay_out<A>(d);
  }
  template <class A>
  const Norm<A> *backward(int64_t d, const Tensor &saved_mean, const Tensor &saved_scale) {
    if (kind == NO_NORM) return nullptr;
    mean = saved_mean;
    scale = saved_scale;
    grad_weight = at::empty({d}, dtype_of<A>);
    if (kind == LAYER_NORM) grad_bias = at::empty({d}, dtype_of<A>);
    return lay_out<A>(d);
  }
  Tensor gradient_of_weight() const { return like_parameter(grad_weight, weight); }
  Tensor gradient_of_bias() const { return like_parameter(grad_bias, bias); }

  Tensor mean, scale;

 private:
  template <class A>
  const Norm<A> *lay_out(int64_t d) {
    for (const Tensor &parameter : {weight, bias}) {
      check_memory(parameter);
      TORCH_CHECK(!parameter.defined() || (parameter.device().is_cpu() && parameter.numel() == d), "a norm over ", d,
                  " is wanted, got ", parameter.sizes());
    }
    values_of_weight = weight.defined() ? weight.to(dtype_of<A>).contiguous() : at::ones({d}, dtype_of<A>);
    if (kind == LAYER_NORM)
      values_of_bias = bias.defined() ? bias.to(dtype_of<A>).contiguous() : at::zeros({d}, dtype_of<A>);
    const auto norm = std::make_shared<Norm<A>>();
    *norm = {kind == LAYER_NORM, eps,           in<A>(values_of_weight), in<A>(values_of_bias), out<A>(mean),
             out<A>(scale),      out<A>(grad_weight), out<A>(grad_bias)};
    structure = norm;
    return norm.get();
  }
  // A gradient in the dtype of its parameter; none where the norm has no such parameter
  static Tensor like_parameter(const Tensor &gradient, const Tensor &parameter) {
    return parameter.defined() && gradient.defined() ? gradient.to(parameter.scalar_type()) : Tensor();
  }

  const int64_t kind;
  const double eps;
  const Tensor weight, bias;
  Tensor grad_weight, grad_bias, values_of_weight, values_of_bias;
  std::shared_ptr<void> structure;
};

}  // namespace streamwise
