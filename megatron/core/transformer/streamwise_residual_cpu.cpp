// CPU kernels of the streamwise residual operators: one pass over memory, one parallel region per call.
//
// Built and loaded by streamwise_residual_compiled.py (no PyTorch header is needed), called with raw pointers to
// contiguous memory. Sums are held in float (double for double inputs) and rounded once, at the store.
//
// What always holds: the arithmetic of a token does not depend on the number of tokens or threads, and the sums over
// tokens are made over blocks of TOKEN_BLOCK tokens in a fixed order, so results are the same bits for any thread count.
//
// Names: n tokens, k streams, d branch width; X wide stream [n, k, d], u and z branch tensors [n, d].

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

constexpr int64_t TOKEN_BLOCK = 16;      // tokens per partial sum of a controller's gradient
constexpr int64_t WIDTH_BLOCK = 256;     // elements of a row that stay in the first cache while streams are mixed
constexpr int64_t SERIAL_ELEMENTS = 1 << 15;  // below this a parallel region costs more than it saves

struct bf16 {
  uint16_t bits;
};

inline float load(float value) { return value; }
inline double load(double value) { return value; }
inline float load(bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void store(float &to, float value) { to = value; }
inline void store(double &to, double value) { to = value; }
inline void store(bf16 &to, float value) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

int threads_for(int64_t elements, int threads) { return elements < SERIAL_ELEMENTS ? 1 : threads; }

// A row of at most WIDTH_BLOCK elements in the accumulation type: the row itself where it has that type, else `buffer`.
template <class A>
inline const A *widen(const A *row, A *, int64_t) {
  return row;
}
template <class A, class T>
inline const A *widen(const T *row, A *buffer, int64_t length) {
#pragma omp simd
  for (int64_t i = 0; i < length; i++) buffer[i] = load(row[i]);
  return buffer;
}

template <class A, class TX, class TV>
inline A dot(const TX *x, const TV *v, int64_t length) {
  A product = 0;
#pragma omp simd reduction(+ : product)
  for (int64_t i = 0; i < length; i++) product += load(x[i]) * load(v[i]);
  return product;
}

template <class A, class TV, class TZ>
inline void scale(const TV *v, A factor, TZ *out, int64_t length) {
#pragma omp simd
  for (int64_t i = 0; i < length; i++) store(out[i], factor * load(v[i]));
}

template <class A, class TX>
inline void accumulate(const TX *x, A factor, A *sum, int64_t length) {
#pragma omp simd
  for (int64_t i = 0; i < length; i++) sum[i] += factor * load(x[i]);
}

// The same for four rows, `stride` apart. Added in pairs, so that four or eight equal streams, read by 1/4 or 1/8 each,
// give the stream exactly.
template <class A, class TX>
inline void accumulate_four(const TX *x, int64_t stride, const A *f, A *sum, int64_t length) {
  const TX *x1 = x + stride, *x2 = x1 + stride, *x3 = x2 + stride;
  const A f0 = f[0], f1 = f[1], f2 = f[2], f3 = f[3];
#pragma omp simd
  for (int64_t i = 0; i < length; i++)
    sum[i] += (f0 * load(x[i]) + f1 * load(x1[i])) + (f2 * load(x2[i]) + f3 * load(x3[i]));
}

// accumulate() and dot() of one row in one loop
template <class A, class TX>
inline A accumulate_and_dot(const TX *x, A factor, A *sum, const A *v, int64_t length) {
  A product = 0;
#pragma omp simd reduction(+ : product)
  for (int64_t i = 0; i < length; i++) {
    const A value = load(x[i]);
    sum[i] += factor * value;
    product += v[i] * value;
  }
  return product;
}

// scale() and dot() of one row in one loop
template <class A, class TV, class TX>
inline A scale_and_dot(const TV *v, A factor, TX *out, const TX *x, int64_t length) {
  A product = 0;
#pragma omp simd reduction(+ : product)
  for (int64_t i = 0; i < length; i++) {
    const A value = load(v[i]);
    store(out[i], factor * value);
    product += load(x[i]) * value;
  }
  return product;
}

template <bool IS_KEPT_SCALED, class A, class TX>
inline void add_scaled(const TX *x, A kept, const A *v, A factor, TX *out, int64_t length) {
#pragma omp simd
  for (int64_t i = 0; i < length; i++) {
    A value = load(x[i]);
    if (IS_KEPT_SCALED) value *= kept;
    store(out[i], value + factor * v[i]);
  }
}

// Calls body(start, length) for consecutive blocks of a row; the length of all but the last is a constant.
template <class Body>
inline void for_blocks(int64_t d, Body body) {
  int64_t start = 0;
  for (; start + WIDTH_BLOCK <= d; start += WIDTH_BLOCK) body(start, std::integral_constant<int64_t, WIDTH_BLOCK>());
  if (start < d) body(start, d - start);
}

template <class TX, class TU, class A>
void read_forward(int64_t n, int64_t k, int64_t d, int threads, const TX *x, const A *f, TU *z) {
#pragma omp parallel for schedule(static) num_threads(threads_for(n * k * d, threads))
  for (int64_t t = 0; t < n; t++)
    for_blocks(d, [&](int64_t start, auto length) {
      const TX *row = x + t * k * d + start;
      A sum[WIDTH_BLOCK] = {};
      int64_t s = 0;
      for (; s + 4 <= k; s += 4) accumulate_four(row + s * d, d, f + s, sum, length);
      for (; s < k; s++) accumulate(row + s * d, f[s], sum, length);
      scale(sum, A(1), z + t * d + start, length);
    });
}

template <class TX, class TU, class A>
void write_forward(int64_t n, int64_t k, int64_t d, int threads, const TX *x, const TU *u, const A *w, const A *g,
                   TX *y) {
#pragma omp parallel for schedule(static) num_threads(threads_for(n * k * d, threads))
  for (int64_t t = 0; t < n; t++)
    for_blocks(d, [&](int64_t start, auto length) {
      A buffer[WIDTH_BLOCK];
      const A *update = widen<A>(u + t * d + start, buffer, length);
      for (int64_t s = 0; s < k; s++) {
        const int64_t row = (t * k + s) * d + start;
        if (g)
          add_scaled<true>(x + row, g[s], update, w[s], y + row, length);
        else
          add_scaled<false>(x + row, A(1), update, w[s], y + row, length);
      }
    });
}

int64_t token_blocks(int64_t n) { return (n + TOKEN_BLOCK - 1) / TOKEN_BLOCK; }

// total[s] = sum over blocks of partial[block][s], in order
void sum_blocks(int64_t blocks, int64_t k, const double *partial, double *total) {
  for (int64_t s = 0; s < k; s++) total[s] = 0;
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t s = 0; s < k; s++) total[s] += partial[b * k + s];
}

// grad_x = f_k grad_z, grad_f = sum X_k grad_z. Either may be null, x too where grad_f is. partial is [blocks, k].
template <class TX, class TU, class A>
void read_backward(int64_t n, int64_t k, int64_t d, int threads, const TU *grad_z, const TX *x, const A *f, TX *grad_x,
                   double *partial, double *grad_f) {
  const int64_t blocks = token_blocks(n);
#pragma omp parallel for schedule(static) num_threads(threads_for(n * k * d, threads))
  for (int64_t b = 0; b < blocks; b++) {
    double *sum_f = partial + b * k;
    for (int64_t s = 0; s < k; s++) sum_f[s] = 0;
    for (int64_t t = b * TOKEN_BLOCK; t < n && t < (b + 1) * TOKEN_BLOCK; t++)
      for_blocks(d, [&](int64_t start, auto length) {
        A buffer[WIDTH_BLOCK];
        const A *grad = widen<A>(grad_z + t * d + start, buffer, length);
        for (int64_t s = 0; s < k; s++) {
          const int64_t row = (t * k + s) * d + start;
          if (grad_x && grad_f)
            sum_f[s] += scale_and_dot(grad, f[s], grad_x + row, x + row, length);
          else if (grad_x)
            scale(grad, f[s], grad_x + row, length);
          else
            sum_f[s] += dot<A>(x + row, grad, length);
        }
      });
  }
  if (grad_f) sum_blocks(blocks, k, partial, grad_f);
}

// grad_x = g_k grad_y, grad_u = sum_k w_k grad_y_k, grad_w = sum u grad_y_k, grad_g = sum X_k grad_y_k. Each result may
// be null, and what it alone is made from then too. partial is [2, blocks, k].
template <class TX, class TU, class A>
void write_backward(int64_t n, int64_t k, int64_t d, int threads, const TX *grad_y, const TX *x, const TU *u,
                    const A *w, const A *g, TX *grad_x, TU *grad_u, double *partial, double *grad_w, double *grad_g) {
  const int64_t blocks = token_blocks(n);
#pragma omp parallel for schedule(static) num_threads(threads_for(n * k * d, threads))
  for (int64_t b = 0; b < blocks; b++) {
    double *sum_w = partial + b * k, *sum_g = sum_w + blocks * k;
    for (int64_t s = 0; s < k; s++) sum_w[s] = sum_g[s] = 0;
    for (int64_t t = b * TOKEN_BLOCK; t < n && t < (b + 1) * TOKEN_BLOCK; t++)
      for_blocks(d, [&](int64_t start, auto length) {
        A buffer[WIDTH_BLOCK], sum_u[WIDTH_BLOCK] = {};
        const A *update = grad_w ? widen<A>(u + t * d + start, buffer, length) : nullptr;
        for (int64_t s = 0; s < k; s++) {
          const int64_t row = (t * k + s) * d + start;
          const TX *grad = grad_y + row;
          if (grad_u && grad_w)
            sum_w[s] += accumulate_and_dot(grad, w[s], sum_u, update, length);
          else if (grad_u)
            accumulate(grad, w[s], sum_u, length);
          else if (grad_w)
            sum_w[s] += dot<A>(grad, update, length);
          if (grad_x && grad_g)
            sum_g[s] += scale_and_dot(grad, g[s], grad_x + row, x + row, length);
          else if (grad_x)
            scale(grad, g[s], grad_x + row, length);
          else if (grad_g)
            sum_g[s] += dot<A>(grad, x + row, length);
        }
        if (grad_u) scale(sum_u, A(1), grad_u + t * d + start, length);
      });
  }
  if (grad_w) sum_blocks(blocks, k, partial, grad_w);
  if (grad_g) sum_blocks(blocks, k, partial + blocks * k, grad_g);
}

}  // namespace

#define STREAMWISE_KERNELS(SUFFIX, TX, TU, A)                                                                        \
  extern "C" void read_forward_##SUFFIX(int64_t n, int64_t k, int64_t d, int threads, const TX *x, const A *f,       \
                                        TU *z) {                                                                     \
    read_forward(n, k, d, threads, x, f, z);                                                                         \
  }                                                                                                                  \
  extern "C" void read_backward_##SUFFIX(int64_t n, int64_t k, int64_t d, int threads, const TU *grad_z,             \
                                         const TX *x, const A *f, TX *grad_x, double *partial, double *grad_f) {     \
    read_backward(n, k, d, threads, grad_z, x, f, grad_x, partial, grad_f);                                          \
  }                                                                                                                  \
  extern "C" void write_forward_##SUFFIX(int64_t n, int64_t k, int64_t d, int threads, const TX *x, const TU *u,     \
                                         const A *w, const A *g, TX *y) {                                            \
    write_forward(n, k, d, threads, x, u, w, g, y);                                                                  \
  }                                                                                                                  \
  extern "C" void write_backward_##SUFFIX(int64_t n, int64_t k, int64_t d, int threads, const TX *grad_y,            \
                                          const TX *x, const TU *u, const A *w, const A *g, TX *grad_x, TU *grad_u,  \
                                          double *partial, double *grad_w, double *grad_g) {                         \
    write_backward(n, k, d, threads, grad_y, x, u, w, g, grad_x, grad_u, partial, grad_w, grad_g);                   \
  }

STREAMWISE_KERNELS(float_float, float, float, float)
STREAMWISE_KERNELS(float_bf16, float, bf16, float)
STREAMWISE_KERNELS(bf16_float, bf16, float, float)
STREAMWISE_KERNELS(bf16_bf16, bf16, bf16, float)
STREAMWISE_KERNELS(double_double, double, double, double)
