// CPU kernels of the streamwise residual operators: one pass over memory, one parallel region per call.
//
// Built by streamwise_residual_library.py (no PyTorch header is needed), called by streamwise_residual_torch.cpp with raw
// pointers to contiguous memory. Sums are held in float (double for double inputs) and rounded once, at the store.
// With a norm (streamwise_residual_norm.h; null for none) what a read returns is normed before it leaves the cache.
//
// What always holds: the arithmetic of a token does not depend on the number of tokens or threads, and the sums over
// tokens are made over blocks of TOKEN_BLOCK tokens in a fixed order, so results are the same bits for any number of
// threads.
//
// Names: n tokens, k streams, d branch width; X wide stream [n, k, d], u and z branch tensors [n, d]; w write, g
// retention and f read factors [k].

#include "streamwise_residual_kernels.h"
#include "streamwise_residual_rows.h"

namespace streamwise {

template <class TX, class TU, class A>
void read_forward(int64_t n, int64_t k, int64_t d, int threads, const TX *x, const Controller *read, TU *z,
                  const Norm<A> *norm) {
  const Factors<A> f(read, k);
  const bool past = !norm && goes_past(z, n, 1, d);  // a norm reads it again
  for_shared(n, threads_for(n * k * d, threads), [&](int64_t t) {
    for_blocks(d, [&](int64_t start, int64_t length) {
      read_block<false>(k, d, x + t * k * d + start, f.all(), z + t * d + start, length, past);
    });
    if (norm) norm_row(*norm, t, d, z + t * d);
  });
}

// The write, and with `read` and z the read of what it stored: the same bits as the two calls.
template <class TX, class TU, class A>
void write_read_forward(int64_t n, int64_t k, int64_t d, int threads, const TX *x, const TU *u, const TU *bias,
                        const Controller *write, const Controller *retention, const Controller *read, TX *y, TU *z,
                        const Norm<A> *norm) {
  const Factors<A> w(write, k), g(retention, k), f(read, k);
  // With the streams side by side a line that two vectors do not fill stays open, and one of many is sent half filled.
  constexpr int64_t PAIRS_PER_LINE = PAST_ALIGNMENT / (2 * COUNT<A> * sizeof(TX));
  const bool goes = goes_past(y, n, k, d), past = goes && !z;
  const bool joins = goes && z && (PAIRS_PER_LINE <= 1 || k * PAIRS_PER_LINE <= OPEN_LINES);
  for_shared(n, threads_for(n * k * d, threads), [&](int64_t t) {
    for_blocks(d, [&](int64_t start, int64_t length) {
      A buffer[WIDTH_BLOCK];
      const A *update = update_row<TX>(u + t * d + start, bias ? bias + start : nullptr, buffer, length);
      const int64_t row = t * k * d + start;
      if (joins) {
        write_read_block(k, d, x + row, update, w.all(), g.all(), f.all(), y + row, z + t * d + start, length);
        return;
      }
      write_block(k, d, x + row, update, w.all(), g.all(), y + row, length, past);
      if (z) read_block<true>(k, d, y + row, f.all(), z + t * d + start, length);
    });
    if (norm) norm_row(*norm, t, d, z + t * d);
  });
}

// The gradient of token t's read from that of its norm, grad; read(z) computes again what was normed. The result is
// valid until this thread's next call.
template <class TU, class A, class Read>
const A *norm_backward(const Norm<A> &norm, A *partial, int64_t t, int64_t d, const TU *grad, Read read) {
  TU *z = scratch<0, TU>(d);
  A *grad_z = scratch<1, A>(d), *sums = partial + (t / TOKEN_BLOCK) * norm.sums() * d;
  if (t % TOKEN_BLOCK == 0) std::memset(sums, 0, norm.sums() * d * sizeof(A));
  read(z);
  (norm.is_layer_norm ? norm_backward_row<true, A, TU> : norm_backward_row<false, A, TU>)(norm, t, d, grad + t * d, z,
                                                                                          sums, grad_z);
  return grad_z;
}

// Room for the sums of a norm's gradients over each block of tokens: [blocks, 1 or 2, d], of w and then b
template <class A>
std::unique_ptr<A[]> norm_sums(const Norm<A> *norm, int64_t n, int64_t d) {
  return std::unique_ptr<A[]>(norm ? new A[token_blocks(n) * norm->sums() * d] : nullptr);
}

// The second level of these sums
template <class A>
void finish_norm(const Norm<A> &norm, int64_t n, int64_t d, int threads, const A *partial) {
  const int64_t stride = norm.sums() * d;
  sum_columns(token_blocks(n), stride, d, threads, partial, norm.grad_weight);
  if (norm.is_layer_norm) sum_columns(token_blocks(n), stride, d, threads, partial + d, norm.grad_bias);
}

// grad_x = f_k grad_z, added to `through` where that is there, and the controller's gradient from sum X_k grad_z. Both
// may be unwanted; x is null where neither the latter nor a norm needs it. With a norm grad_z is the gradient of what
// was normed.
template <class TX, class TU, class A>
void read_backward(int64_t n, int64_t k, int64_t d, int threads, const TU *grad_z, const TX *x, const Controller *read,
                   const TX *through, TX *grad_x, const Norm<A> *norm) {
  threads = threads_for(n * k * d, threads);
  const Factors<A> f(read, k);
  const bool has_f = read->gradient, past = goes_past(grad_x, n, k, d);
  const auto backward_row = read_backward_row_for<A, TX>(grad_x, has_f, through);
  const auto norm_partial = norm_sums(norm, n, d);
  TokenSums sums(n, k);
  sums.for_tokens(threads, [&](int64_t t, double *sum_f) {
    const A *of_norm = !norm ? nullptr : norm_backward(*norm, norm_partial.get(), t, d, grad_z, [&](TU *z) {
      for_blocks(d, [&](int64_t start, int64_t length) {
        read_block<false>(k, d, x + t * k * d + start, f.all(), z + start, length);
      });
    });
    if (!grad_x && !has_f) return;
    for_blocks(d, [&](int64_t start, int64_t length) {
      A buffer[WIDTH_BLOCK];
      const A *grad = norm ? of_norm + start : in_accumulation_type(grad_z + t * d + start, buffer, length);
      for (int64_t s = 0; s < k; s++) {
        const int64_t row = (t * k + s) * d + start;
        sum_f[s] += backward_row(grad, has_f ? x + row : nullptr, f[s], through ? through + row : nullptr,
                                 grad_x ? grad_x + row : nullptr, length, past);
      }
    });
  });
  sums.finish(0, k, read);
  if (norm) finish_norm(*norm, n, d, threads, norm_partial.get());
}

// grad_x = g_k grad_y, grad_u = sum_k w_k grad_y_k, and the controllers' gradients from sum u grad_y_k and sum X_k
// grad_y_k. Each result may be unwanted, and what it alone is made from null then.
template <class TX, class TU, class A>
void write_backward(int64_t n, int64_t k, int64_t d, int threads, const TX *grad_y, const TX *x, const TU *u,
                    const TU *bias, const Controller *write, const Controller *retention, TX *grad_x, TU *grad_u,
                    A *grad_bias) {
  threads = threads_for(n * k * d, threads);
  const Factors<A> w(write, k), g(retention, k);
  ColumnSums<A> bias_sums(grad_bias ? n : 0, d);
  const bool has_w = write->gradient, has_g = retention && retention->gradient;
  const bool alone = grad_u && has_w && !grad_x && !has_g;  // the backward without retention
  const bool past = goes_past(grad_x, n, k, d), past_u = !grad_bias && goes_past(grad_u, n, 1, d);
  const auto backward_row = write_backward_row_for<A, TX>(grad_u, grad_x, has_w, has_g);
  TokenSums sums(n, 2 * k);
  sums.for_tokens(threads, [&](int64_t t, double *sum) {
    for_blocks(d, [&](int64_t start, int64_t length) {
      A buffer[WIDTH_BLOCK], sum_u[WIDTH_BLOCK];
      const TX *rows = grad_y + t * k * d + start;
      TU *to_u = grad_u + t * d + start;
      const TU *from_u = has_w ? u + t * d + start : nullptr;
      if (alone && !bias && !grad_bias)  // u is converted as it is loaded
        return write_backward_block<false>(k, d, rows, from_u, w.all(), sum_u, to_u, sum, length, past_u);
      const A *update = has_w ? update_row<TX>(from_u, bias ? bias + start : nullptr, buffer, length) : nullptr;
      if (alone) {
        write_backward_block<false>(k, d, rows, update, w.all(), sum_u, to_u, sum, length, past_u);
        return bias_sums.add(t, start, to_u, length);
      }
      if (grad_u) std::memset(sum_u, 0, length * sizeof(A));
      for (int64_t s = 0; s < k; s++) {
        const int64_t row = (t * k + s) * d + start;
        backward_row(grad_y + row, has_g ? x + row : nullptr, update, w[s], grad_x ? g[s] : A(1), sum_u,
                     grad_x ? grad_x + row : nullptr, sum + s, sum + k + s, length, past);
      }
      if (!grad_u) return;
      copy_row<A>(sum_u, to_u, length);
      bias_sums.add(t, start, to_u, length);
    });
  });
  sums.finish(0, k, write);
  sums.finish(k, k, retention);
  if (grad_bias) bias_sums.finish(threads, grad_bias);
}

// All gradients of a write and read. With a norm grad_z is the gradient of what was normed.
template <class TX, class TU, class A>
void write_read_backward(int64_t n, int64_t k, int64_t d, int threads, const TX *grad_y, const TU *grad_z, const TX *x,
                         const TU *u, const TU *bias, const Controller *write, const Controller *retention,
                         const Controller *read, TX *grad_x, TU *grad_u, A *grad_bias, const Norm<A> *norm) {
  threads = threads_for(n * k * d, threads);
  ColumnSums<A> bias_sums(grad_bias ? n : 0, d);
  const Factors<A> w(write, k), g(retention, k), f(read, k);
  const bool has_g = retention, past = goes_past(grad_x, n, k, d);
  constexpr auto retained = write_read_backward_row<true, true, A, TX>;
  constexpr auto retained_alone = write_read_backward_row<true, false, A, TX>;
  constexpr auto whole = write_read_backward_row<false, true, A, TX>;
  constexpr auto whole_alone = write_read_backward_row<false, false, A, TX>;
  const auto backward_row = has_g ? (norm ? retained : retained_alone) : (norm ? whole : whole_alone);
  const auto norm_partial = norm_sums(norm, n, d);
  TokenSums sums(n, 3 * k);
  sums.for_tokens(threads, [&](int64_t t, double *sum) {
    const TU *u_row = u + t * d;
    const auto update_at = [&](int64_t start, A *buffer, int64_t length) {
      return update_row<TX>(u_row + start, bias ? bias + start : nullptr, buffer, length);
    };
    TX *y = norm ? scratch<2, TX>(k * d) : nullptr;
    const A *of_norm = !norm ? nullptr : norm_backward(*norm, norm_partial.get(), t, d, grad_z, [&](TU *z) {
      for_blocks(d, [&](int64_t start, int64_t length) {
        A buffer[WIDTH_BLOCK];
        const A *update = update_at(start, buffer, length);
        write_block(k, d, x + t * k * d + start, update, w.all(), g.all(), y + start, length, false);
        read_block<true>(k, d, y + start, f.all(), z + start, length);
      });
    });
    for_blocks(d, [&](int64_t start, int64_t length) {
      A update_buffer[WIDTH_BLOCK], grad_buffer[WIDTH_BLOCK], sum_u[WIDTH_BLOCK];
      std::memset(sum_u, 0, length * sizeof(A));
      const A *update = update_at(start, update_buffer, length);
      const A *grad = norm ? of_norm + start : in_accumulation_type(grad_z + t * d + start, grad_buffer, length);
      for (int64_t s = 0; s < k; s++) {
        const int64_t row = (t * k + s) * d + start;
        backward_row(grad_y + row, grad, x + row, norm ? y + s * d + start : nullptr, update, w[s],
                     has_g ? g[s] : A(1), f[s], sum_u, grad_x + row, sum + s, sum + k + s, sum + 2 * k + s, length,
                     past);
      }
      copy_row<A>(sum_u, grad_u + t * d + start, length);
      bias_sums.add(t, start, grad_u + t * d + start, length);
    });
  });
  sums.finish(0, k, write);
  sums.finish(k, k, retention);
  sums.finish(2 * k, k, read);
  if (grad_bias) bias_sums.finish(threads, grad_bias);
  if (norm) finish_norm(*norm, n, d, threads, norm_partial.get());
}

// All gradients of a write without retention and the read of y, what it wrote, with the bits of the backward of the read
// and then of the write. With a norm grad_z is the gradient of what was normed.
template <class TX, class TU, class A>
void write_read_kept_backward(int64_t n, int64_t k, int64_t d, int threads, const TX *grad_y, const TU *grad_z,
                              const TX *y, const TU *u, const TU *bias, const Controller *write,
                              const Controller *read, TX *grad_x, TU *grad_u, A *grad_bias, const Norm<A> *norm) {
  threads = threads_for(n * k * d, threads);
  ColumnSums<A> bias_sums(grad_bias ? n : 0, d);
  const Factors<A> w(write, k), f(read, k);
  const bool past = goes_past(grad_x, n, k, d);
  const auto norm_partial = norm_sums(norm, n, d);
  TokenSums sums(n, 2 * k);
  sums.for_tokens(threads, [&](int64_t t, double *sum) {
    const A *of_norm = !norm ? nullptr : norm_backward(*norm, norm_partial.get(), t, d, grad_z, [&](TU *z) {
      for_blocks(d, [&](int64_t start, int64_t length) {
        read_block<false>(k, d, y + t * k * d + start, f.all(), z + start, length);
      });
    });
    TX *rows = scratch<2, TX>(k * WIDTH_BLOCK);  // the gradient of what was written, of a block, which stays in cache
    for_blocks(d, [&](int64_t start, int64_t length) {
      A update_buffer[WIDTH_BLOCK], grad_buffer[WIDTH_BLOCK], sum_u[WIDTH_BLOCK];
      const A *grad = norm ? of_norm + start : in_accumulation_type(grad_z + t * d + start, grad_buffer, length);
      for (int64_t s = 0; s < k; s++) {
        const int64_t row = (t * k + s) * d + start;
        sum[k + s] += read_backward_row<true, true, true>(grad, y + row, f[s], grad_y + row, rows + s * WIDTH_BLOCK,
                                                          length, false);
      }
      const A *update = update_row<TX>(u + t * d + start, bias ? bias + start : nullptr, update_buffer, length);
      TU *to_u = grad_u + t * d + start;
      write_backward_block<true>(k, WIDTH_BLOCK, rows, update, w.all(), sum_u, to_u, sum, length, false);
      bias_sums.add(t, start, to_u, length);
      for (int64_t s = 0; s < k; s++) {
        copy_row<A>(rows + s * WIDTH_BLOCK, grad_x + (t * k + s) * d + start, length, past);
      }
    });
  });
  sums.finish(0, k, write);
  sums.finish(k, k, read);
  if (grad_bias) bias_sums.finish(threads, grad_bias);
  if (norm) finish_norm(*norm, n, d, threads, norm_partial.get());
}

#define STREAMWISE_KERNELS(TX, TU, A)                                                                               \
  template void read_forward(int64_t, int64_t, int64_t, int, const TX *, const Controller *, TU *, const Norm<A> *); \
  template void read_backward(int64_t, int64_t, int64_t, int, const TU *, const TX *, const Controller *,            \
                              const TX *, TX *, const Norm<A> *);                                                    \
  template void write_read_forward(int64_t, int64_t, int64_t, int, const TX *, const TU *, const TU *,               \
                                   const Controller *, const Controller *, const Controller *, TX *, TU *,           \
                                   const Norm<A> *);                                                                 \
  template void write_backward(int64_t, int64_t, int64_t, int, const TX *, const TX *, const TU *, const TU *,       \
                               const Controller *, const Controller *, TX *, TU *, A *);                             \
  template void write_read_backward(int64_t, int64_t, int64_t, int, const TX *, const TU *, const TX *, const TU *,  \
                                    const TU *, const Controller *, const Controller *, const Controller *, TX *,    \
                                    TU *, A *, const Norm<A> *);                                                     \
  template void write_read_kept_backward(int64_t, int64_t, int64_t, int, const TX *, const TU *, const TX *,         \
                                         const TU *, const TU *, const Controller *, const Controller *, TX *, TU *, \
                                         A *, const Norm<A> *);

STREAMWISE_TYPES(STREAMWISE_KERNELS)

}  // namespace streamwise
