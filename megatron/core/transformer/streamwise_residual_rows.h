// What the kernels do with one token's rows, or a block of them that stays in the first cache.
//
// Used by streamwise_residual_cpu.cpp. What always holds: the arithmetic of an element is that of its token alone; what
// is read or written past the caches has the same bits.
//
// Names: k streams, d branch width; x, y rows of a wide stream [k, d], u and z branch rows [d]; w write, g retention, f
// read factors.

#pragma once

#include "streamwise_residual_tokens.h"

namespace streamwise {

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
inline void read_block(int64_t k, int64_t d, const TX *x, const A *f, TU *z, int64_t length, bool past = false) {
  for_vectors<A>(length, [&](int64_t i, auto count, auto slot) {
    lanes<A> sum = {};
    int64_t s = 0;
    for (; s + 4 <= k; s += 4) {
      const TX *row = x + s * d + i;
      if (!IN_CACHE)
        for (int r = 0; r < 4; r++) ask_ahead<A>(row + r * d, slot);
      sum += (f[s] * load<A>(row, count) + f[s + 1] * load<A>(row + d, count)) +
             (f[s + 2] * load<A>(row + 2 * d, count) + f[s + 3] * load<A>(row + 3 * d, count));
    }
    for (; s < k; s++) {
      if (!IN_CACHE) ask_ahead<A>(x + s * d + i, slot);
      sum += f[s] * load<A>(x + s * d + i, count);
    }
    store_or_past<A>(past, z + i, sum, count);
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
      for_vectors<A>(length, [&](int64_t i, auto count, auto slot) {
        ask_ahead<A>(from + i, slot);
        store_or_past<A>(past, to + i, g[s] * load<A>(from + i, count) + w[s] * load<A>(u + i, count), count);
      });
    else
      for_vectors<A>(length, [&](int64_t i, auto count, auto slot) {
        ask_ahead<A>(from + i, slot);
        store_or_past<A>(past, to + i, load<A>(from + i, count) + w[s] * load<A>(u + i, count), count);
      });
  }
}

// The same with z = sum_s f_s y_s of what is stored, as read_block adds it up, for a stream that goes past the caches.
// Two vectors of a stream at a time, which make a line of most types: one that is left half filled is sent twice.
template <class A, class TX, class TU>
inline void write_read_block(int64_t k, int64_t d, const TX *x, const A *u, const A *w, const A *g, const A *f, TX *y,
                             TU *z, int64_t length) {
  for_pairs<A>(length, [&](int64_t i, auto count, auto vectors) {
    constexpr int V = decltype(vectors)::value;
    constexpr std::integral_constant<int, 0> first;
    struct Lanes {
      lanes<A> of[V];
    };
    lanes<A> update[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) update[v] = load<A>(u + i + v * COUNT<A>, count);
    const auto written = [&](int64_t s) {
      Lanes stored;
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        const int64_t at = s * d + i + v * COUNT<A>;
        if (v == 0 || COUNT<A> * sizeof(TX) * 2 > LINE) ask_ahead<A>(x + at, first);
        const lanes<A> kept = load<A>(x + at, count);
        const lanes<A> value = g ? g[s] * kept + w[s] * update[v] : kept + w[s] * update[v];
        store_past<A>(y + at, value, count);
        stored.of[v] = uncontracted(rounded<TX, A>(value));
      }
      return stored;
    };
    lanes<A> sum[V] = {};
    int64_t s = 0;
    for (; s + 4 <= k; s += 4) {
      const Lanes y0 = written(s), y1 = written(s + 1), y2 = written(s + 2), y3 = written(s + 3);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++)
        sum[v] += (f[s] * y0.of[v] + f[s + 1] * y1.of[v]) + (f[s + 2] * y2.of[v] + f[s + 3] * y3.of[v]);
    }
    for (; s < k; s++) {
      const Lanes one = written(s);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sum[v] += f[s] * one.of[v];
    }
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) store<A>(z + i + v * COUNT<A>, sum[v], count);
  });
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
      ask_ahead<A>(x + i, slot);
      product[slot] += load<A>(x + i, count) * grad;
    }
    if (HAS_THROUGH) ask_ahead<A>(through + i, slot);
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
  const auto joined = has_f ? read_backward_row<true, true, true, A, TX> : read_backward_row<true, false, true, A, TX>;
  const auto alone = has_f ? read_backward_row<true, true, false, A, TX> : read_backward_row<true, false, false, A, TX>;
  return has_through ? joined : alone;
}

// One row of a write's backward: sum_u += w grad_y, grad_x = g grad_y, and the products of u and x with grad_y, added
// to sum_w and sum_g. The flags HAS_U, HAS_X, HAS_W, HAS_G say which.
template <bool HAS_U, bool HAS_X, bool HAS_W, bool HAS_G, class A, class TX, class TU = A>
void write_backward_row(const TX *grad_y, const TX *x, const TU *u, A w, A g, A *sum_u, TX *grad_x, double *sum_w,
                        double *sum_g, int64_t length, bool past) {
  lanes<A> product_w[2] = {}, product_g[2] = {};
  for_vectors<A>(length, [&](int64_t i, auto count, auto slot) {
    ask_ahead<A>(grad_y + i, slot);
    if (HAS_G) ask_ahead<A>(x + i, slot);
    const lanes<A> grad = load<A>(grad_y + i, count);
    if (HAS_G) product_g[slot] += load<A>(x + i, count) * grad;
    if (HAS_W) product_w[slot] += load<A>(u + i, count) * grad;
    if (HAS_U) store<A>(sum_u + i, load<A>(sum_u + i, count) + w * grad, count);
    if (HAS_X) store_or_past<A>(past, grad_x + i, g * grad, count);
  });
  if (HAS_W) *sum_w += total<A>(product_w[0] + product_w[1]);
  if (HAS_G) *sum_g += total<A>(product_g[0] + product_g[1]);
}

// The same for R streams at once where nothing of a stream's size is written. All there are go straight to grad_u, some
// of more are added to sum_u. Unless IN_CACHE, what lies ahead is asked for. TV is the type of u, which need not be that
// of the sums.
template <int R, bool ALL_THERE_ARE, bool IN_CACHE, class A, class TX, class TV, class TU>
void write_backward_rows(int64_t d, const TX *grad_y, const TV *u, const A *w, A *sum_u, TU *grad_u, double *sum_w,
                         int64_t length, bool past) {
  static_assert(R < 4 || R % 4 == 0, "streams are added in pairs of pairs");
  lanes<A> product[R] = {};
  for_vectors<A>(length, [&](int64_t i, auto count, auto slot) {
    const lanes<A> update = load<A>(u + i, count);
    lanes<A> grad[R], sum = {};
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      if (!IN_CACHE) ask_ahead<A>(grad_y + r * d + i, slot);
      grad[r] = load<A>(grad_y + r * d + i, count);
      product[r] += update * grad[r];
    }
#pragma GCC unroll 2
    for (int r = 0; r + 4 <= R; r += 4)
      sum += (w[r] * grad[r] + w[r + 1] * grad[r + 1]) + (w[r + 2] * grad[r + 2] + w[r + 3] * grad[r + 3]);
#pragma GCC unroll 3
    for (int r = R / 4 * 4; r < R; r++) sum += w[r] * grad[r];
    if (ALL_THERE_ARE)
      store_or_past<A>(past, grad_u + i, sum, count);
    else
      store<A>(sum_u + i, load<A>(sum_u + i, count) + sum, count);
  });
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) sum_w[r] += total<A>(product[r]);
}

// grad_u = sum w_s grad_y_s of one block and the products of u with grad_y, for a write without retention: rows of
// grad_y lie `d` apart.
template <bool IN_CACHE, class A, class TX, class TV, class TU>
void write_backward_block(int64_t k, int64_t d, const TX *grad_y, const TV *u, const A *w, A *sum_u, TU *grad_u,
                          double *sum_w, int64_t length, bool past) {
  if (k == 2) return write_backward_rows<2, true, IN_CACHE>(d, grad_y, u, w, sum_u, grad_u, sum_w, length, past);
  if (k == 3) return write_backward_rows<3, true, IN_CACHE>(d, grad_y, u, w, sum_u, grad_u, sum_w, length, past);
  if (k == 4) return write_backward_rows<4, true, IN_CACHE>(d, grad_y, u, w, sum_u, grad_u, sum_w, length, past);
  if (k == 8) return write_backward_rows<8, true, IN_CACHE>(d, grad_y, u, w, sum_u, grad_u, sum_w, length, past);
  std::memset(sum_u, 0, length * sizeof(A));
  int64_t s = 0;
  for (; s + 4 <= k; s += 4)
    write_backward_rows<4, false, IN_CACHE>(d, grad_y + s * d, u, w + s, sum_u, grad_u, sum_w + s, length, false);
  for (; s < k; s++)
    write_backward_row<true, false, true, false, A, TX, TV>(grad_y + s * d, nullptr, u, w[s], A(1), sum_u, nullptr,
                                                            sum_w + s, nullptr, length, false);
  copy_row<A>(sum_u, grad_u, length, past);
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

// One row of the backward of a write and read. T = grad_y + f grad_z: sum_u += w T, grad_x = g T, and the products of u
// and x with T, and of y, without HAS_Y computed again as g x + w u, with grad_z. g is 1 without HAS_G, and there is no
// sum_g.
template <bool HAS_G, bool HAS_Y, class A, class TX>
void write_read_backward_row(const TX *grad_y, const A *grad_z, const TX *x, const TX *y, const A *u, A w, A g, A f,
                             A *sum_u, TX *grad_x, double *sum_w, double *sum_g, double *sum_f, int64_t length,
                             bool past) {
  lanes<A> product_w[2] = {}, product_g[2] = {}, product_f[2] = {};
  for_vectors<A>(length, [&](int64_t i, auto count, auto slot) {
    ask_ahead<A>(grad_y + i, slot);
    if (!HAS_Y) ask_ahead<A>(x + i, slot);  // with y, x was looked at for it
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

}  // namespace streamwise
