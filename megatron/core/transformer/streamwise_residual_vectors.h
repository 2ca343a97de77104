// Rows of memory as vectors of the machine's widest registers, in the portable notation of GCC and clang, with the
// instructions of x86 where that is slow.
//
//   for_vectors<A>(length, [&](int64_t i, auto count, auto slot) {       // A: float or double, in which one computes
//     sum[slot] += load<A>(row + i, count) * factor;                     // row: float, bf16 or double
//     store<A>(out + i, load<A>(row + i, count) * factor, count);
//   });
//
// Used by streamwise_residual_cpu.cpp. Explicit vectors, because compilers left to themselves turn the conversions from
// and to bf16 into many narrow operations.
//
// What always holds: bf16 is rounded to nearest even, subnormal numbers are kept (the processor's own conversion would
// make them zero), and NaN stays NaN.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace streamwise {

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

struct bf16 {
  uint16_t bits;
};

// lanes<A>: COUNT<A> numbers of the accumulation type A
template <class A>
struct Vector;
template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(VECTOR_BYTES)));
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(VECTOR_BYTES)));
};
template <class A>
using lanes = typename Vector<A>::type;
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t halves __attribute__((vector_size(VECTOR_BYTES / 2)));
template <class A>
constexpr int64_t COUNT = VECTOR_BYTES / sizeof(A);
template <class A>
using All = std::integral_constant<int64_t, COUNT<A>>;

// The bits of one vector as another
template <class To, class From>
inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Vectors as they lie in memory, and back
inline lanes<float> widen(lanes<float> value) { return value; }
inline lanes<double> widen(lanes<double> value) { return value; }
#if defined(__AVX512F__)  // of __builtin_convertvector GCC makes three to five instructions instead of one
inline words each_a_word(halves bits) { return as<words>(_mm512_cvtepu16_epi32(as<__m256i>(bits))); }
inline halves low_halves(words bits) { return as<halves>(_mm512_cvtepi32_epi16(as<__m512i>(bits))); }
#elif defined(__AVX2__)
inline words each_a_word(halves bits) { return as<words>(_mm256_cvtepu16_epi32(as<__m128i>(bits))); }
inline halves low_halves(words bits) { return __builtin_convertvector(bits, halves); }
#else
inline words each_a_word(halves bits) { return __builtin_convertvector(bits, words); }
inline halves low_halves(words bits) { return __builtin_convertvector(bits, halves); }
#endif
inline lanes<float> widen(halves bits) { return as<lanes<float>>(each_a_word(bits) << 16); }
inline void narrow(lanes<float> value, lanes<float> *to) { *to = value; }
inline void narrow(lanes<double> value, lanes<double> *to) { *to = value; }
inline void narrow(lanes<float> value, halves *to) {  // round to nearest even; NaN stays NaN
  const words bits = as<words>(value);
  const words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
#if defined(__AVX512F__)
  const __mmask16 is_nan = _mm512_cmp_ps_mask(as<__m512>(value), as<__m512>(value), _CMP_UNORD_Q);
  const words whole = as<words>(_mm512_mask_mov_epi32(as<__m512i>(rounded), is_nan, _mm512_set1_epi32(0x7fc00000)));
#else
  const words is_nan = as<words>(value != value), whole = (rounded & ~is_nan) | (is_nan & 0x7fc00000u);
#endif
  *to = low_halves(whole >> 16);
}
template <class T>
struct Stored {
  using type = lanes<T>;
};
template <>
struct Stored<bf16> {
  using type = halves;
};

// `count` elements from memory, zeros behind them; `count` is All<A> but for the end of a row.
template <class A, class T, class Count>
inline lanes<A> load(const T *from, Count count) {
  typename Stored<T>::type stored = {};
  std::memcpy(&stored, from, count * sizeof(T));
  return widen(stored);
}
template <class A, class T, class Count>
inline void store(T *to, lanes<A> value, Count count) {
  typename Stored<T>::type stored;
  narrow(value, &stored);
  std::memcpy(to, &stored, count * sizeof(T));
}

// Stores that go past the caches, where the processor has them: a line is then not read before it is overwritten, and
// pushes nothing out. For memory larger than the caches, whose rows begin at multiples of 64 bytes.
constexpr int64_t PAST_ALIGNMENT = 64;
template <class A, class T, class Count>
inline void store_past(T *to, lanes<A> value, Count count) {
#if defined(__AVX__)
  if constexpr (std::is_same<Count, All<A>>::value) {
    typename Stored<T>::type stored;
    narrow(value, &stored);
    if constexpr (sizeof stored == 16) return _mm_stream_si128(reinterpret_cast<__m128i *>(to), as<__m128i>(stored));
    if constexpr (sizeof stored == 32) return _mm256_stream_si256(reinterpret_cast<__m256i *>(to), as<__m256i>(stored));
#if defined(__AVX512F__)
    if constexpr (sizeof stored == 64) return _mm512_stream_si512(reinterpret_cast<__m512i *>(to), as<__m512i>(stored));
#endif
  }
#endif
  store<A>(to, value, count);
}
template <class A, class T, class Count>
inline void store_or_past(bool past, T *to, lanes<A> value, Count count) {
  if (past)
    store_past<A>(to, value, count);
  else
    store<A>(to, value, count);
}
// To be called by every thread behind its stores past the caches, before another one reads what they wrote
inline void finish_past() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// What a store of T and a load make of a value
template <class T, class A>
inline lanes<A> rounded(lanes<A> value) {
  typename Stored<T>::type stored;
  narrow(value, &stored);
  return widen(stored);
}

// The same value, whose last operation the compiler may not make one with the next: what was rounded stays rounded.
template <class Lanes>
inline Lanes uncontracted(Lanes value) {
#if defined(__x86_64__)
  __asm__("" : "+x"(value));
#elif defined(__aarch64__)
  __asm__("" : "+w"(value));
#else
  __asm__("" : "+m"(value));
#endif
  return value;
}

template <class A>
inline A total(lanes<A> value) {
#if defined(__AVX512F__)
  if constexpr (std::is_same<A, float>::value)
    return _mm512_reduce_add_ps(as<__m512>(value));
  else
    return _mm512_reduce_add_pd(as<__m512d>(value));
#else
  A parts[COUNT<A>];
  std::memcpy(parts, &value, sizeof parts);
  for (int64_t half = COUNT<A> / 2; half; half /= 2)
    for (int64_t i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
#endif
}

// Calls body(start, count, slot) for the vectors of a row. Neighbours have different slots, 0 and 1, so that what is
// summed up per slot does not wait for the last addition.
template <class A, class Body>
inline void for_vectors(int64_t length, Body body) {
  constexpr All<A> all;
  const std::integral_constant<int, 0> even;
  const std::integral_constant<int, 1> odd;
  int64_t i = 0;
  for (; i + 2 * all <= length; i += 2 * all) {
    body(i, all, even);
    body(i + all, all, odd);
  }
  if (i + all <= length) {
    body(i, all, even);
    i += all;
  }
  if (i < length) body(i, length - i, odd);
}

// Calls body(i, count, vectors) for the vectors of a row, two at a time where there are two: `vectors` is 2 or 1.
template <class A, class Body>
inline void for_pairs(int64_t length, Body body) {
  constexpr All<A> all;
  const std::integral_constant<int, 1> one;
  const std::integral_constant<int, 2> two;
  int64_t i = 0;
  for (; i + 2 * all <= length; i += 2 * all) body(i, all, two);
  if (i + all <= length) {
    body(i, all, one);
    i += all;
  }
  if (i < length) body(i, length - i, one);
}

// Asks for the memory AHEAD of the vector of this slot, once where two neighbours lie in one cache line. Nothing is read,
// so it may lie behind the end. (The processor's own prefetchers stop at the end of a page.)
constexpr int64_t AHEAD = 32768;  // bytes
constexpr int64_t LINE = 64;      // bytes, at least
template <class A, class T, class Slot>
inline void ask_ahead(const T *from, Slot) {
  constexpr bool asked_before = Slot::value && COUNT<A> * sizeof(T) * 2 <= LINE;
  if (!asked_before) __builtin_prefetch(reinterpret_cast<const char *>(from) + AHEAD);
}

template <class A, class From, class To>
inline void copy_row(const From *from, To *to, int64_t length, bool past = false) {
  for_vectors<A>(length, [&](int64_t i, auto count, auto) {
    store_or_past<A>(past, to + i, load<A>(from + i, count), count);
  });
}

}  // namespace streamwise
