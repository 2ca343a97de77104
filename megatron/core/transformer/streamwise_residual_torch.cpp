// The streamwise operators on CPU tensors, differentiable, as operators of PyTorch.
//
// Built with the kernels by streamwise_residual_library.py, called by streamwise_residual_compiled.py. Here and not in
// Python, because a training step runs some hundred of them: see docs/performance.md. They check what memory safety
// needs; what users get wrong is refused in Python before.
//
// What always holds: the backward is written by hand and differentiable once; only what a wanted gradient needs is
// saved, and for the write and read that is its inputs alone, or Y where it is kept anyway. A norm adds one or two numbers per token, never
// z. Without retention the gradient of a write's stream is the incoming gradient itself.
//
// Names: k streams; x and y wide streams [..., k*d], u and z branch tensors [..., d], p padded controller.

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "streamwise_residual_tensors.h"

namespace streamwise {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What an operator is told beside tensors
struct Options : torch::CustomClassHolder {
  int64_t k = 0;
  bool is_logit = true;
  double max_forget = 0;
  at::ScalarType x_type = at::kFloat, u_type = at::kFloat, z_type = at::kFloat;
  int64_t norm = NO_NORM;
  double eps = 0;
  bool has_retention = false, has_bias = false, keeps_y = false;

  Kind kind(Kind of_logits) const { return is_logit ? of_logits : FACTOR; }
};
using OptionsPtr = c10::intrusive_ptr<Options>;

void keep(AutogradContext *ctx, const OptionsPtr &options) {
  ctx->saved_data["options"] = c10::IValue::make_capsule(options);
}
OptionsPtr kept(AutogradContext *ctx) {
  return c10::static_intrusive_pointer_cast<Options>(ctx->saved_data.at("options").toCapsule());
}

void refuse_second_derivative() {  // grad mode is on in a backward only where that is itself to be differentiated
  TORCH_CHECK(!at::GradMode::is_enabled(),
              "The streamwise residual operators are differentiable once: create_graph=True is not supported.");
}

int threads() { return at::get_num_threads(); }

// z, and what the norm keeps
Tensor read(const Tensor &x_in, const Tensor &read_p, const Options &o, NormCall &norm) {
  const Tensor x = x_in.contiguous();
  const Sizes size(x, o.k);
  const Tensor z = empty_with_width(x, size.d, o.z_type);
  const ControllerCall f(read_p, o.k, o.kind(READ));
  for_types(o.x_type, o.z_type, [&]<class TX, class TU, class A>() {
    read_forward(size.n, size.k, size.d, threads(), in<TX>(x), f.pointer(), out<TU>(z),
                 norm.forward<A>(size.n, size.d));
  });
  return z;
}

// The gradients of x, to which `through` is added, and of read_p. Without x there is none of read_p.
std::pair<Tensor, Tensor> read_gradients(const Tensor &grad_in, const Tensor &x_in, const Tensor &read_p,
                                         const Tensor &through_in, bool wants_x, const Options &o, NormCall &norm,
                                         const Tensor &mean, const Tensor &scale) {
  const Tensor grad_z = grad_in.contiguous(), x = contiguous(x_in), through = contiguous(through_in);
  const int64_t d = grad_z.size(-1), n = grad_z.numel() / d;
  Tensor grad_x;
  if (wants_x) grad_x = empty_with_width(grad_z, o.k * d, o.x_type);
  const ControllerCall f(read_p, o.k, o.kind(READ), 0, x.defined());
  for_types(o.x_type, grad_z.scalar_type(), [&]<class TX, class TU, class A>() {
    read_backward(n, o.k, d, threads(), in<TU>(grad_z), in<TX>(x), f.pointer(), in<TX>(through), out<TX>(grad_x),
                  norm.backward<A>(d, mean, scale));
  });
  return {grad_x, f.gradient};
}

// Y, and z where a read_p is given and update and z are of one type
std::pair<Tensor, Tensor> write(const Tensor &x_in, const Tensor &u_in, const Tensor &bias_in, const Tensor &write_p,
                                const Tensor &retention_p, const Tensor &read_p, const Options &o, NormCall &norm) {
  const Tensor x = x_in.contiguous(), u = u_in.contiguous(), bias = contiguous(bias_in);
  const Sizes size(x, o.k);
  size.check(u);
  TORCH_CHECK(!bias.defined() || (bias.numel() == size.d && bias.scalar_type() == o.u_type), "a bias of ", size.d,
              " like the update is wanted, got ", bias.sizes());
  const Tensor y = at::empty_like(x);
  Tensor z;
  if (read_p.defined()) z = at::empty_like(u);
  const ControllerCall w(write_p, o.k, o.kind(WRITE)), g(retention_p, o.k, o.kind(RETENTION), o.max_forget),
      f(read_p, o.k, o.kind(READ));
  for_types(o.x_type, o.u_type, [&]<class TX, class TU, class A>() {
    write_read_forward(size.n, size.k, size.d, threads(), in<TX>(x), in<TU>(u), in<TU>(bias), w.pointer(), g.pointer(),
                       f.pointer(), out<TX>(y), out<TU>(z),
                       z.defined() ? norm.forward<A>(size.n, size.d) : static_cast<const Norm<A> *>(nullptr));
  });
  return {y, z};
}

struct WriteGradients {
  Tensor x, u, write_p, retention_p, bias;
};

// Room for the sum over the tokens of a bias's gradient
Tensor bias_sums(const Tensor &bias, const Options &o) {
  return bias.defined() ? at::empty(bias.sizes(), sums_of(o.x_type)) : Tensor();
}
Tensor bias_gradient(const Tensor &sums, const Tensor &bias) {
  return sums.defined() ? sums.to(bias.scalar_type()) : Tensor();
}

// Without u there is no gradient of write_p, without x none of retention_p.
WriteGradients write_gradients(const Tensor &grad_in, const Tensor &x_in, const Tensor &u_in, const Tensor &bias_in,
                               const Tensor &write_p, const Tensor &retention_p, bool wants_x, bool wants_u,
                               const Options &o) {
  const Tensor grad_y = grad_in.contiguous(), x = contiguous(x_in), u = contiguous(u_in), bias = contiguous(bias_in);
  const Sizes size(grad_y, o.k);
  Tensor grad_x, grad_u, sums;
  if (wants_x && o.has_retention) grad_x = at::empty_like(grad_y);
  if (wants_u) {
    grad_u = empty_with_width(grad_y, size.d, o.u_type);
    sums = bias_sums(bias, o);
  }
  const ControllerCall w(write_p, o.k, o.kind(WRITE), 0, u.defined()),
      g(retention_p, o.k, o.kind(RETENTION), o.max_forget, x.defined());
  for_types(o.x_type, o.u_type, [&]<class TX, class TU, class A>() {
    write_backward(size.n, size.k, size.d, threads(), in<TX>(grad_y), in<TX>(x), in<TU>(u), in<TU>(bias), w.pointer(),
                   g.pointer(), out<TX>(grad_x), out<TU>(grad_u), out<A>(sums));
  });
  if (wants_x && !o.has_retention) grad_x = grad_y;
  return {grad_x, grad_u, w.gradient, g.gradient, bias_gradient(sums, bias)};
}

// z = sum_k f_k X_k, f = sigmoid(read_p) or read_p; with a norm, norm(z). With `passes` (z, X): the gradient of what
// uses that X is added to that of the read, in one pass, with the bits of autograd's own addition.
struct StreamwiseRead : torch::autograd::Function<StreamwiseRead> {
  static variable_list forward(AutogradContext *ctx, const Tensor &x, const Tensor &read_p, const MaybeTensor &weight,
                               const MaybeTensor &bias, const OptionsPtr &options, bool passes) {
    NormCall norm(options->norm, options->eps, or_undefined(weight), or_undefined(bias));
    const Tensor z = read(x, read_p, *options, norm);
    const bool needs_x = read_p.requires_grad() || options->norm != NO_NORM;  // a norm's input is made from x again
    ctx->save_for_backward(
        {needs_x ? x : Tensor(), read_p, or_undefined(weight), or_undefined(bias), norm.mean, norm.scale});
    ctx->set_materialize_grads(false);
    keep(ctx, options);
    return passes ? variable_list{z, x} : variable_list{z};
  }

  static variable_list backward(AutogradContext *ctx, const variable_list &grads) {
    refuse_second_derivative();
    const Tensor through = grads.size() > 1 ? grads[1] : Tensor();
    if (!grads[0].defined()) return {through, {}, {}, {}, {}, {}};
    const auto saved = ctx->get_saved_variables();
    const auto o = kept(ctx);
    NormCall norm(o->norm, o->eps, saved[2], saved[3]);
    const auto [grad_x, grad_p] = read_gradients(grads[0], saved[0], saved[1], through, ctx->needs_input_grad(0), *o,
                                                 norm, saved[4], saved[5]);
    return {grad_x, grad_p, norm.gradient_of_weight(), norm.gradient_of_bias(), {}, {}};
  }
};

// Y_k = g_k X_k + w_k (u + bias), w = 2 sigmoid(write_p), g = 1 - F sigmoid(-retention_p), or w and g given
struct StreamwiseWrite : torch::autograd::Function<StreamwiseWrite> {
  static variable_list forward(AutogradContext *ctx, const Tensor &x, const Tensor &u, const Tensor &write_p,
                               const MaybeTensor &retention_p, const MaybeTensor &bias, const OptionsPtr &options) {
    NormCall none(NO_NORM, 0, {}, {});
    const Tensor q = or_undefined(retention_p), b = or_undefined(bias);
    const Tensor y = write(x, u, b, write_p, q, {}, *options, none).first;
    const bool needs_x = q.defined() && q.requires_grad();
    ctx->save_for_backward({needs_x ? x : Tensor(), write_p.requires_grad() ? u : Tensor(), b, write_p, q});
    keep(ctx, options);
    return {y};
  }

  static variable_list backward(AutogradContext *ctx, const variable_list &grads) {
    refuse_second_derivative();
    const auto o = kept(ctx);
    const bool needs_bias = o->has_bias && ctx->needs_input_grad(3 + o->has_retention);
    const bool needs_u = ctx->needs_input_grad(1) || needs_bias;
    if (!o->has_retention && !needs_u && !ctx->needs_input_grad(2)) return {grads[0], {}, {}, {}, {}, {}};
    const auto saved = ctx->get_saved_variables();
    const auto found = write_gradients(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4],
                                       ctx->needs_input_grad(0), needs_u, *o);
    return {found.x, found.u, found.write_p, found.retention_p, found.bias, {}};
  }
};

// (Y, z): a write, and the read of the branch after it in the same pass over the stream; with a norm, norm(z)
struct StreamwiseWriteRead : torch::autograd::Function<StreamwiseWriteRead> {
  static variable_list forward(AutogradContext *ctx, const Tensor &x, const Tensor &u, const Tensor &write_p,
                               const Tensor &read_p, const MaybeTensor &retention_p, const MaybeTensor &bias,
                               const MaybeTensor &weight, const MaybeTensor &norm_bias, const OptionsPtr &options) {
    const Tensor q = or_undefined(retention_p), b = or_undefined(bias);
    NormCall norm(options->norm, options->eps, or_undefined(weight), or_undefined(norm_bias));
    const bool in_one = options->u_type == options->z_type;
    auto [y, z] = write(x, u, b, write_p, q, in_one ? read_p : Tensor(), *options, norm);
    if (!in_one) z = read(y, read_p, *options, norm);
    TORCH_CHECK(!(options->keeps_y && q.defined()), "retention's gradient needs the stream before the write");
    ctx->save_for_backward({options->keeps_y ? y : x, u, b, write_p, q, read_p, or_undefined(weight),
                            or_undefined(norm_bias), norm.mean, norm.scale});
    keep(ctx, options);
    return {y, z};
  }

  static variable_list backward(AutogradContext *ctx, const variable_list &grads) {
    refuse_second_derivative();
    const auto saved = ctx->get_saved_variables();
    const auto o = kept(ctx);
    NormCall norm(o->norm, o->eps, saved[6], saved[7]);
    const auto gradients = o->u_type == o->z_type ? in_one_pass : one_after_the_other;
    Tensor grad_read_p;
    const auto found = gradients(grads, saved, *o, norm, grad_read_p);
    return {found.x,
            found.u,
            found.write_p,
            grad_read_p,
            found.retention_p,
            found.bias,
            norm.gradient_of_weight(),
            norm.gradient_of_bias(),
            {}};
  }

 private:
  // saved[0] is Y where that was kept, else X
  static WriteGradients in_one_pass(const variable_list &grads, const variable_list &saved, const Options &o,
                                    NormCall &norm, Tensor &grad_read_p) {
    const Tensor grad_y = grads[0].contiguous(), grad_z = grads[1].contiguous();
    const Tensor x = saved[0].contiguous(), u = saved[1].contiguous(), bias = contiguous(saved[2]);
    const Tensor grad_x = at::empty_like(x), grad_u = at::empty_like(u), sums = bias_sums(bias, o);
    const ControllerCall w(saved[3], o.k, o.kind(WRITE), 0, true), f(saved[5], o.k, o.kind(READ), 0, true),
        g(saved[4], o.k, o.kind(RETENTION), o.max_forget, true);
    const Sizes size(x, o.k);
    for_types(o.x_type, o.u_type, [&]<class TX, class TU, class A>() {
      const Norm<A> *of_norm = norm.backward<A>(size.d, saved[8], saved[9]);
      if (o.keeps_y)
        write_read_kept_backward(size.n, size.k, size.d, threads(), in<TX>(grad_y), in<TU>(grad_z), in<TX>(x),
                                 in<TU>(u), in<TU>(bias), w.pointer(), f.pointer(), out<TX>(grad_x), out<TU>(grad_u),
                                 out<A>(sums), of_norm);
      else
        write_read_backward(size.n, size.k, size.d, threads(), in<TX>(grad_y), in<TU>(grad_z), in<TX>(x), in<TU>(u),
                            in<TU>(bias), w.pointer(), g.pointer(), f.pointer(), out<TX>(grad_x), out<TU>(grad_u),
                            out<A>(sums), of_norm);
    });
    grad_read_p = f.gradient;
    return {grad_x, grad_u, w.gradient, g.gradient, bias_gradient(sums, bias)};
  }

  // For an update and a z of different types: Y, unless it was kept, is computed again, then the backward of the read,
  // then of the write
  static WriteGradients one_after_the_other(const variable_list &grads, const variable_list &saved, const Options &o,
                                            NormCall &norm, Tensor &grad_read_p) {
    NormCall none(NO_NORM, 0, {}, {});
    const Tensor &x = saved[0], &u = saved[1], &bias = saved[2], &write_p = saved[3], &retention_p = saved[4];
    const Tensor y = o.keeps_y ? x : write(x, u, bias, write_p, retention_p, {}, o, none).first;
    Tensor grad;
    std::tie(grad, grad_read_p) =
        read_gradients(grads[1], y, saved[5], grads[0], true, o, norm, saved[8], saved[9]);
    return write_gradients(grad, o.has_retention ? x : Tensor(), u, bias, write_p, retention_p, true, true, o);
  }
};

OptionsPtr options_of(const Tensor &x, int64_t k, bool is_logit, int64_t norm, double eps) {
  auto options = c10::make_intrusive<Options>();
  options->k = k;
  options->is_logit = is_logit;
  options->x_type = x.scalar_type();
  options->norm = norm;
  options->eps = eps;
  return options;
}

OptionsPtr write_options_of(const Tensor &x, const Tensor &u, const MaybeTensor &retention_p, const MaybeTensor &bias,
                            int64_t k, bool is_logit, double max_forget, int64_t norm, double eps) {
  auto options = options_of(x, k, is_logit, norm, eps);
  options->u_type = u.scalar_type();
  options->max_forget = max_forget;
  options->has_retention = retention_p.has_value();
  options->has_bias = bias.has_value();
  return options;
}

Tensor op_read(const Tensor &x, const Tensor &read_p, const MaybeTensor &weight, const MaybeTensor &bias, int64_t k,
               bool is_logit, at::ScalarType z_type, int64_t norm, double eps) {
  const auto options = options_of(x, k, is_logit, norm, eps);
  options->z_type = z_type;
  return StreamwiseRead::apply(x, read_p, weight, bias, options, false)[0];
}

std::tuple<Tensor, Tensor> op_read_through(const Tensor &x, const Tensor &read_p, const MaybeTensor &weight,
                                           const MaybeTensor &bias, int64_t k, bool is_logit, at::ScalarType z_type,
                                           int64_t norm, double eps) {
  const auto options = options_of(x, k, is_logit, norm, eps);
  options->z_type = z_type;
  const auto found = StreamwiseRead::apply(x, read_p, weight, bias, options, true);
  return {found[0], found[1]};
}

Tensor op_write(const Tensor &x, const Tensor &u, const Tensor &write_p, const MaybeTensor &retention_p,
                const MaybeTensor &bias, int64_t k, bool is_logit, double max_forget) {
  const auto options = write_options_of(x, u, retention_p, bias, k, is_logit, max_forget, NO_NORM, 0);
  return StreamwiseWrite::apply(x, u, write_p, retention_p, bias, options)[0];
}

std::tuple<Tensor, Tensor> op_write_read(const Tensor &x, const Tensor &u, const Tensor &write_p, const Tensor &read_p,
                                         const MaybeTensor &retention_p, const MaybeTensor &bias,
                                         const MaybeTensor &weight, const MaybeTensor &norm_bias, int64_t k,
                                         bool is_logit, double max_forget, bool keeps_y, at::ScalarType z_type,
                                         int64_t norm, double eps) {
  const auto options = write_options_of(x, u, retention_p, bias, k, is_logit, max_forget, norm, eps);
  options->keeps_y = keeps_y;
  options->z_type = z_type;
  const auto found =
      StreamwiseWriteRead::apply(x, u, write_p, read_p, retention_p, bias, weight, norm_bias, options);
  return {found[0], found[1]};
}

}  // namespace
}  // namespace streamwise

// The name differs with every build, so that two of them can live in one process.
#define STREAMWISE_LIBRARY(name, library) TORCH_LIBRARY(name, library)
STREAMWISE_LIBRARY(STREAMWISE_NAME, library) {
  library.def("read(Tensor x, Tensor read_p, Tensor? weight, Tensor? bias, int k, bool is_logit, ScalarType z_type, "
              "int norm, float eps) -> Tensor",
              streamwise::op_read);
  library.def("read_through(Tensor x, Tensor read_p, Tensor? weight, Tensor? bias, int k, bool is_logit, "
              "ScalarType z_type, int norm, float eps) -> (Tensor, Tensor)",
              streamwise::op_read_through);
  library.def("write(Tensor x, Tensor u, Tensor write_p, Tensor? retention_p, Tensor? bias, int k, bool is_logit, "
              "float max_forget) -> Tensor",
              streamwise::op_write);
  library.def("write_read(Tensor x, Tensor u, Tensor write_p, Tensor read_p, Tensor? retention_p, Tensor? bias, "
              "Tensor? weight, Tensor? norm_bias, int k, bool is_logit, float max_forget, bool keeps_y, "
              "ScalarType z_type, int norm, float eps) -> (Tensor, Tensor)",
              streamwise::op_write_read);
}
