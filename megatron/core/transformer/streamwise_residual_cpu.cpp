// CPU kernels of the streamwise residual operators: one pass over memory, one parallel region per call.
//
// Built and loaded by streamwise_residual_compiled.py (no PyTorch header is needed), called with raw pointers to
// contiguous memory. Sums are held in float (double for double inputs) and rounded once, at the store. With a norm
// (streamwise_residual_norm.h; null for none) what a read returns is normed before it leaves the cache.
//
// What always holds: the arithmetic of a token does not depend on the number of tokens or threads, and the sums over
// tokens are made over blocks of TOKEN_BLOCK tokens in a fixed order, so results are the same bits for any number of
// threads.
//
// Names: n tokens, k streams, d branch width; X wide stream [n, k, d], u and z branch tensors [n, d]; w write, g
// retention and f read factors [k].

#include <algorithm>

#include "streamwise_residual_controllers.h"
#include "streamwise_residual_norm.h"
#include "streamwise_residual_vectors.h"

namespace {

using namespace streamwise;

constexpr int64_t TOKEN_BLOCK = 16;           // tokens per partial sum of a controller's gradient
constexpr int64_t WIDTH_BLOCK = 1024;         // elements of a row that stay in the first cache while streams are mixed
constexpr int64_t SERIAL_ELEMENTS = 1 << 15;  // below this a parallel region costs more than it saves
constexpr int64_t AHEAD = 32768;              // bytes; the processor's own prefetchers stop at the end of a page

constexpr int64_t PAST_BYTES = 4 << 20;       // a stream of this size is in no near cache when it is used next
constexpr int64_t OPEN_LINES = 8;             // that a processor surely holds until they are whole

// Whether the rows of a stream that is written are stored past the caches
template <class T>
bool goes_past(const T *stream, int64_t n, int64_t k, int64_t d) {
  const int64_t row = d * static_cast<int64_t>(sizeof(T)), start = reinterpret_cast<intptr_t>(stream);
  return stream && n * k * row >= PAST_BYTES && row % PAST_ALIGNMENT == 0 && start % PAST_ALIGNMENT == 0;
}

// Calls body(i) for 0 <= i < count, shared out among threads in order
template <class Body>
inline void for_shared(int64_t count, int threads, Body body) {
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < count; i++) body(i);
    finish_past();
  }
}

int threads_for(int64_t elements, int threads) { return elements < SERIAL_ELEMENTS ? 1 : threads; }

// Calls body(start, length) for consecutive blocks of a row.
template <class Body>
inline void for_blocks(int64_t d, Body body) {
  for (int64_t start = 0; start < d; start += WIDTH_BLOCK) body(start, std::min(WIDTH_BLOCK, d - start));
}

// A row in the accumulation type: itself where it has that type, else `buffer`
template <class A>
inline const A *in_accumulation_type(const A *row, A *, int64_t) {
  return row;
}
template <class A, class T>
inline const A *in_accumulation_type(const T *row, A *buffer, int64_t length) {
  copy_row<A>(row, buffer, length);
  return buffer;
}

// What a write adds, in the accumulation type: u, or with a bias their sum, rounded as PyTorch would store it where the
// stream is no wider.
template <class TX, class A, class TU>
inline const A *update_row(const TU *u, const TU *bias, A *buffer, int64_t length) {
  if (!bias) return in_accumulation_type(u, buffer, length);
  for_vectors<A>(length, [&](int64_t i, auto count, auto) {
    const lanes<A> sum = load<A>(u + i, count) + load<A>(bias + i, count);
    store<A>(buffer + i, std::is_same<TX, TU>::value ? rounded<TU, A>(sum) : sum, count);
  });
  return buffer;
}

// z = sum_s f_s x_s of one block. Streams are added in pairs of pairs, so that four or eight equal streams, read by 1/4
// or 1/8 each, give the stream exactly. Unless IN_CACHE, what lies ahead is asked for.
template <bool IN_CACHE, class A, class TX, class TU>
inline void read_block(int64_t k, int64_t d, const TX *x, const A *f, TU *z, int64_t length) {
  for_vectors<A>(length, [&](int64_t i, auto count, auto) {
    lanes<A> sum = {};
    int64_t s = 0;
    for (; s + 4 <= k; s += 4) {
      const TX *row = x + s * d + i;
      if (!IN_CACHE)
        for (int r = 0; r < 4; r++) prefetch(row + r * d, AHEAD);
      sum += (f[s] * load<A>(row, count) + f[s + 1] * load<A>(row + d, count)) +
             (f[s + 2] * load<A>(row + 2 * d, count) + f[s + 3] * load<A>(row + 3 * d, count));
    }
    for (; s < k; s++) {
      if (!IN_CACHE) prefetch(x + s * d + i, AHEAD);
      sum += f[s] * load<A>(x + s * d + i, count);
    }
    store<A>(z + i, sum, count);
  });
}

// y_s = g_s x_s + w_s u of one block; g may be null
template <class A, class TX>
inline void write_block(int64_t k, int64_t d, const TX *x, const A *u, const A *w, const A *g, TX *y, int64_t length,
                        bool past) {
  for (int64_t s = 0; s < k; s++) {
    const TX *from = x + s * d;
    TX *to = y + s * d;
    if (g)
      for_vectors<A>(length, [&](int64_t i, auto count, auto) {
        prefetch(from + i, AHEAD);
        store_or_past<A>(past, to + i, g[s] * load<A>(from + i, count) + w[s] * load<A>(u + i, count), count);
      });
    else
      for_vectors<A>(length, [&](int64_t i, auto count, auto) {
        prefetch(from + i, AHEAD);
        store_or_past<A>(past, to + i, load<A>(from + i, count) + w[s] * load<A>(u + i, count), count);
      });
  }
}

// The same with z = sum_s f_s y_s of what is stored, as read_block adds it up, for a stream that goes past the caches
template <class A, class TX, class TU>
inline void write_read_block(int64_t k, int64_t d, const TX *x, const A *u, const A *w, const A *g, const A *f, TX *y,
                             TU *z, int64_t length) {
  for_vectors<A>(length, [&](int64_t i, auto count, auto) {
    const lanes<A> update = load<A>(u + i, count);
    const auto written = [&](int64_t s) {
      const TX *from = x + s * d + i;
      prefetch(from, AHEAD);
      const lanes<A> kept = load<A>(from, count);
      const lanes<A> value = g ? g[s] * kept + w[s] * update : kept + w[s] * update;
      store_past<A>(y + s * d + i, value, count);
      return uncontracted(rounded<TX, A>(value));
    };
    lanes<A> sum = {};
    int64_t s = 0;
    for (; s + 4 <= k; s += 4) {
      const lanes<A> y0 = written(s), y1 = written(s + 1), y2 = written(s + 2), y3 = written(s + 3);
      sum += (f[s] * y0 + f[s + 1] * y1) + (f[s + 2] * y2 + f[s + 3] * y3);
    }
    for (; s < k; s++) sum += f[s] * written(s);
    store<A>(z + i, sum, count);
  });
}

template <class TX, class TU, class A>
void read_forward(int64_t n, int64_t k, int64_t d, int threads, const TX *x, const Controller *read, TU *z,
                  const Norm<A> *norm) {
  const Factors<A> f(read, k);
  for_shared(n, threads_for(n * k * d, threads), [&](int64_t t) {
    for_blocks(d, [&](int64_t start, int64_t length) {
      read_block<false>(k, d, x + t * k * d + start, f.all(), z + t * d + start, length);
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
  // With the streams side by side every line is open until it is whole; many or half-written ones are sent too early.
  constexpr int64_t STORES_PER_LINE = PAST_ALIGNMENT / (COUNT<A> * sizeof(TX));
  const bool goes = goes_past(y, n, k, d), joins = goes && z && k * STORES_PER_LINE <= OPEN_LINES, past = goes && !z;
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

int64_t token_blocks(int64_t n) { return (n + TOKEN_BLOCK - 1) / TOKEN_BLOCK; }

// Sums over the tokens of `count` numbers, in two levels: those of a block of tokens, then of all blocks in order.
class TokenSums {
 public:
  TokenSums(int64_t n, int64_t count) : n(n), count(count), partial(new double[token_blocks(n) * count]) {}

  // Calls body(token, sums) for every token; `sums` are the token block's own, zero at its start.
  template <class Body>
  void for_tokens(int threads, Body body) {
    for_shared(token_blocks(n), threads, [&](int64_t b) {
      double *sums = partial.get() + b * count;
      for (int64_t s = 0; s < count; s++) sums[s] = 0;
      for (int64_t t = b * TOKEN_BLOCK; t < n && t < (b + 1) * TOKEN_BLOCK; t++) body(t, sums);
    });
  }

  // Gives a controller of k factors the gradient that numbers first to first + k make, if it wants one.
  void finish(int64_t first, int64_t k, const Controller *controller) const {
    if (!controller || !controller->gradient) return;
    std::vector<double> sums(k, 0.0);
    for (int64_t b = 0; b < token_blocks(n); b++)
      for (int64_t s = 0; s < k; s++) sums[s] += partial[b * count + first + s];
    set_gradient(*controller, k, sums.data());
  }

 private:
  const int64_t n, count;
  const std::unique_ptr<double[]> partial;
};

// Sums over the tokens of branch rows, in the same two levels; none for n = 0.
template <class A>
class ColumnSums {
 public:
  ColumnSums(int64_t n, int64_t d) : n(n), d(d), partial(new A[token_blocks(n) * d]) {}

  // Adds elements start to start + length of token t's row. A block's tokens come in order, from one thread.
  template <class T>
  void add(int64_t t, int64_t start, const T *row, int64_t length) {
    if (!n) return;
    A *sums = partial.get() + t / TOKEN_BLOCK * d + start;
    if (t % TOKEN_BLOCK == 0) return copy_row<A>(row, sums, length);
    for_vectors<A>(length, [&](int64_t i, auto count, auto) {
      store<A>(sums + i, load<A>(sums + i, count) + load<A>(row + i, count), count);
    });
  }
  void finish(int threads, A *result) const { sum_columns(token_blocks(n), d, d, threads, partial.get(), result); }

 private:
  const int64_t n, d;
  const std::unique_ptr<A[]> partial;
};

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

// In the rows of all backwards, loads come before stores: rows are often a multiple of 4 KiB apart, and a load waits
// for an earlier store to an address with the same last 12 bits.

// One row of a read's backward: grad_x = f grad_z where HAS_X, rounded to the stream's type and then added to `through`
// where HAS_THROUGH, as an addition of its own would; returns sum x grad_z where HAS_F.
template <bool HAS_X, bool HAS_F, bool HAS_THROUGH, class A, class TX>
A read_backward_row(const A *grad_z, const TX *x, A f, const TX *through, TX *grad_x, int64_t length, bool past) {
  lanes<A> product[2] = {};
  for_vectors<A>(length, [&](int64_t i, auto count, auto slot) {
    const lanes<A> grad = load<A>(grad_z + i, count);
    if (HAS_F) {
      prefetch(x + i, AHEAD);
      product[slot] += load<A>(x + i, count) * grad;
    }
    if (HAS_THROUGH) prefetch(through + i, AHEAD);
    if (HAS_X && HAS_THROUGH)
      store_or_past<A>(past, grad_x + i, load<A>(through + i, count) + uncontracted(rounded<TX, A>(f * grad)), count);
    else if (HAS_X)
      store_or_past<A>(past, grad_x + i, f * grad, count);
  });
  return HAS_F ? total<A>(product[0] + product[1]) : A(0);
}

template <class A, class TX>
using ReadBackwardRow = A (*)(const A *, const TX *, A, const TX *, TX *, int64_t, bool);

template <class A, class TX>
ReadBackwardRow<A, TX> read_backward_row_for(bool has_x, bool has_f, bool has_through) {
  if (!has_x) return read_backward_row<false, true, false, A, TX>;
  if (has_through) return has_f ? read_backward_row<true, true, true, A, TX> : read_backward_row<true, false, true, A, TX>;
  return has_f ? read_backward_row<true, true, false, A, TX> : read_backward_row<true, false, false, A, TX>;
}

// grad_x = f_k grad_z, added to `through` where that is there, and the controller's gradient from sum X_k grad_z. grad_x
// and the latter may be unwanted; x is null where neither it nor a norm needs it. With a norm grad_z is the gradient of
// what was normed.
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

// One row of a write's backward: sum_u += w grad_y, grad_x = g grad_y, and the products of u and x with grad_y, added
// to sum_w and sum_g. The flags HAS_U, HAS_X, HAS_W, HAS_G say which.
template <bool HAS_U, bool HAS_X, bool HAS_W, bool HAS_G, class A, class TX>
void write_backward_row(const TX *grad_y, const TX *x, const A *u, A w, A g, A *sum_u, TX *grad_x, double *sum_w,
                        double *sum_g, int64_t length, bool past) {
  lanes<A> product_w[2] = {}, product_g[2] = {};
  for_vectors<A>(length, [&](int64_t i, auto count, auto slot) {
    prefetch(grad_y + i, AHEAD);
    if (HAS_G) prefetch(x + i, AHEAD);
    const lanes<A> grad = load<A>(grad_y + i, count);
    if (HAS_G) product_g[slot] += load<A>(x + i, count) * grad;
    if (HAS_W) product_w[slot] += load<A>(u + i, count) * grad;
    if (HAS_U) store<A>(sum_u + i, load<A>(sum_u + i, count) + w * grad, count);
    if (HAS_X) store_or_past<A>(past, grad_x + i, g * grad, count);
  });
  if (HAS_W) *sum_w += total<A>(product_w[0] + product_w[1]);
  if (HAS_G) *sum_g += total<A>(product_g[0] + product_g[1]);
}

// The same for four streams at once where nothing of a stream's size is written. All there are go straight to grad_u,
// some of more are added to sum_u.
template <bool ALL_THERE_ARE, class A, class TX, class TU>
void write_backward_rows(int64_t d, const TX *grad_y, const A *u, const A *w, A *sum_u, TU *grad_u, double *sum_w,
                         int64_t length) {
  lanes<A> product[4] = {};
  for_vectors<A>(length, [&](int64_t i, auto count, auto) {
    for (int r = 0; r < 4; r++) prefetch(grad_y + r * d + i, AHEAD);
    const lanes<A> update = load<A>(u + i, count);
    const lanes<A> g0 = load<A>(grad_y + i, count), g1 = load<A>(grad_y + d + i, count),
                   g2 = load<A>(grad_y + 2 * d + i, count), g3 = load<A>(grad_y + 3 * d + i, count);
    product[0] += update * g0;
    product[1] += update * g1;
    product[2] += update * g2;
    product[3] += update * g3;
    const lanes<A> sum = (w[0] * g0 + w[1] * g1) + (w[2] * g2 + w[3] * g3);
    if (ALL_THERE_ARE)
      store<A>(grad_u + i, sum, count);
    else
      store<A>(sum_u + i, load<A>(sum_u + i, count) + sum, count);
  });
  for (int r = 0; r < 4; r++) sum_w[r] += total<A>(product[r]);
}

template <class A, class TX>
using WriteBackwardRow = void (*)(const TX *, const TX *, const A *, A, A, A *, TX *, double *, double *, int64_t,
                                  bool);

template <class A, class TX>
WriteBackwardRow<A, TX> write_backward_row_for(bool has_u, bool has_x, bool has_w, bool has_g) {
#define STREAMWISE_ROWS(U, X)                                                                   \
  {write_backward_row<U, X, false, false, A, TX>, write_backward_row<U, X, false, true, A, TX>, \
   write_backward_row<U, X, true, false, A, TX>, write_backward_row<U, X, true, true, A, TX>}
  static const WriteBackwardRow<A, TX> rows[4][4] = {STREAMWISE_ROWS(false, false), STREAMWISE_ROWS(false, true),
                                                     STREAMWISE_ROWS(true, false), STREAMWISE_ROWS(true, true)};
#undef STREAMWISE_ROWS
  return rows[2 * has_u + has_x][2 * has_w + has_g];
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
  const bool past = goes_past(grad_x, n, k, d);
  const auto backward_row = write_backward_row_for<A, TX>(grad_u, grad_x, has_w, has_g);
  TokenSums sums(n, 2 * k);
  sums.for_tokens(threads, [&](int64_t t, double *sum) {
    for_blocks(d, [&](int64_t start, int64_t length) {
      A buffer[WIDTH_BLOCK], sum_u[WIDTH_BLOCK];
      const TX *rows = grad_y + t * k * d + start;
      TU *to_u = grad_u + t * d + start;
      const bool in_fours = grad_u && has_w && !grad_x && !has_g;
      if (in_fours && k == 4) {
        const A *update = update_row<TX>(u + t * d + start, bias ? bias + start : nullptr, buffer, length);
        write_backward_rows<true>(d, rows, update, w.all(), sum_u, to_u, sum, length);
        return bias_sums.add(t, start, to_u, length);
      }
      if (grad_u) std::memset(sum_u, 0, length * sizeof(A));
      const A *update = !has_w ? nullptr : update_row<TX>(u + t * d + start, bias ? bias + start : nullptr, buffer, length);
      int64_t s = 0;
      for (; in_fours && s + 4 <= k; s += 4)
        write_backward_rows<false>(d, rows + s * d, update, w.all() + s, sum_u, to_u, sum + s, length);
      for (; s < k; s++) {
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

// One row of the backward of a write and read. T = grad_y + f grad_z: sum_u += w T, grad_x = g T, and the products of u
// and x with T, and of y, without HAS_Y computed again as g x + w u, with grad_z. g is 1 without HAS_G, and there is no
// sum_g.
template <bool HAS_G, bool HAS_Y, class A, class TX>
void write_read_backward_row(const TX *grad_y, const A *grad_z, const TX *x, const TX *y, const A *u, A w, A g, A f,
                             A *sum_u, TX *grad_x, double *sum_w, double *sum_g, double *sum_f, int64_t length, bool past) {
  lanes<A> product_w[2] = {}, product_g[2] = {}, product_f[2] = {};
  for_vectors<A>(length, [&](int64_t i, auto count, auto slot) {
    prefetch(grad_y + i, AHEAD);
    if (!HAS_Y) prefetch(x + i, AHEAD);  // with y, x was looked at for it
    const lanes<A> grad_read = load<A>(grad_z + i, count), update = load<A>(u + i, count);
    const lanes<A> kept = load<A>(x + i, count);
    const lanes<A> grad = load<A>(grad_y + i, count) + f * grad_read;
    product_f[slot] +=
        grad_read * (HAS_Y ? load<A>(y + i, count) : rounded<TX, A>((HAS_G ? g * kept : kept) + w * update));
    product_w[slot] += update * grad;
    if (HAS_G) product_g[slot] += kept * grad;
    store<A>(sum_u + i, load<A>(sum_u + i, count) + w * grad, count);
    store_or_past<A>(past, grad_x + i, HAS_G ? g * grad : grad, count);
  });
  *sum_w += total<A>(product_w[0] + product_w[1]);
  if (HAS_G) *sum_g += total<A>(product_g[0] + product_g[1]);
  *sum_f += total<A>(product_f[0] + product_f[1]);
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
  const auto with_norm = has_g ? write_read_backward_row<true, true, A, TX> : write_read_backward_row<false, true, A, TX>;
  const auto without = has_g ? write_read_backward_row<true, false, A, TX> : write_read_backward_row<false, false, A, TX>;
  const auto backward_row = norm ? with_norm : without;
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

}  // namespace

#define STREAMWISE_KERNELS(SUFFIX, TX, TU, A)                                                                         \
  extern "C" void read_forward_##SUFFIX(int64_t n, int64_t k, int64_t d, int threads, const TX *x,                    \
                                        const Controller *read, TU *z, const Norm<A> *norm) {                         \
    read_forward(n, k, d, threads, x, read, z, norm);                                                                 \
  }                                                                                                                   \
  extern "C" void read_backward_##SUFFIX(int64_t n, int64_t k, int64_t d, int threads, const TU *grad_z, const TX *x, \
                                         const Controller *read, const TX *through, TX *grad_x,                       \
                                         const Norm<A> *norm) {                                                       \
    read_backward(n, k, d, threads, grad_z, x, read, through, grad_x, norm);                                          \
  }                                                                                                                   \
  extern "C" void write_backward_##SUFFIX(int64_t n, int64_t k, int64_t d, int threads, const TX *grad_y,             \
                                          const TX *x, const TU *u, const TU *bias, const Controller *write,          \
                                          const Controller *retention, TX *grad_x, TU *grad_u, A *grad_bias) {        \
    write_backward(n, k, d, threads, grad_y, x, u, bias, write, retention, grad_x, grad_u, grad_bias);                \
  }                                                                                                                   \
  extern "C" void write_read_forward_##SUFFIX(int64_t n, int64_t k, int64_t d, int threads, const TX *x, const TU *u, \
                                              const TU *bias, const Controller *write, const Controller *retention,   \
                                              const Controller *read, TX *y, TU *z, const Norm<A> *norm) {            \
    write_read_forward(n, k, d, threads, x, u, bias, write, retention, read, y, z, norm);                             \
  }                                                                                                                   \
  extern "C" void write_read_backward_##SUFFIX(                                                                       \
      int64_t n, int64_t k, int64_t d, int threads, const TX *grad_y, const TU *grad_z, const TX *x, const TU *u,     \
      const TU *bias, const Controller *write, const Controller *retention, const Controller *read, TX *grad_x,       \
      TU *grad_u, A *grad_bias, const Norm<A> *norm) {                                                                \
    write_read_backward(n, k, d, threads, grad_y, grad_z, x, u, bias, write, retention, read, grad_x, grad_u,         \
                        grad_bias, norm);                                                                             \
  }

STREAMWISE_KERNELS(float_float, float, float, float)
STREAMWISE_KERNELS(float_bf16, float, bf16, float)
STREAMWISE_KERNELS(bf16_float, bf16, float, float)
STREAMWISE_KERNELS(bf16_bf16, bf16, bf16, float)
STREAMWISE_KERNELS(double_double, double, double, double)
