// How a kernel goes over the tokens: shared out among threads, with sums over them in two levels.
//
//   TokenSums sums(n, k);
//   sums.for_tokens(threads, [&](int64_t t, double *sum) { sum[0] += ...; });    // every token once
//   sums.finish(0, k, controller);                                               // the controller's gradient
//
// Used by streamwise_residual_cpu.cpp. What always holds: sums are made over blocks of TOKEN_BLOCK tokens, then over
// all blocks in order, so that they are the same bits for any number of threads.
//
// Names: n tokens, k streams, d branch width.

#pragma once

#include <algorithm>
#include <memory>

#include "streamwise_residual_controllers.h"
#include "streamwise_residual_norm.h"
#include "streamwise_residual_vectors.h"

namespace streamwise {

constexpr int64_t TOKEN_BLOCK = 16;           // tokens per partial sum of a controller's gradient
constexpr int64_t WIDTH_BLOCK = 1024;         // elements of a row that stay in the first cache while streams are mixed
constexpr int64_t SERIAL_ELEMENTS = 1 << 15;  // below this a parallel region costs more than it saves

constexpr int64_t PAST_BYTES = 4 << 20;       // a stream of this size is in no near cache when it is used next
constexpr int64_t OPEN_LINES = 8;             // that a processor surely holds until they are whole

// Whether the rows of a stream that is written are stored past the caches
template <class T>
inline bool goes_past(const T *stream, int64_t n, int64_t k, int64_t d) {
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

inline int threads_for(int64_t elements, int threads) { return elements < SERIAL_ELEMENTS ? 1 : threads; }

// Calls body(start, length) for consecutive blocks of a row.
template <class Body>
inline void for_blocks(int64_t d, Body body) {
  for (int64_t start = 0; start < d; start += WIDTH_BLOCK) body(start, std::min(WIDTH_BLOCK, d - start));
}

inline int64_t token_blocks(int64_t n) { return (n + TOKEN_BLOCK - 1) / TOKEN_BLOCK; }

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

}  // namespace streamwise
