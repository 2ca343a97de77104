// The kernels of streamwise_residual_cpu.cpp, as streamwise_residual_torch.cpp calls them: raw pointers to contiguous
// memory, null for what a call does not have or want.
//
// Names: n tokens, k streams, d branch width; x, y, through wide streams [n, k, d], u and z branch tensors [n, d]. TX and
// TU are the types of these, A that of the sums. What each kernel computes stands with it.

#pragma once

#include "streamwise_residual_controllers.h"
#include "streamwise_residual_norm.h"

namespace streamwise {

template <class TX, class TU, class A>
void read_forward(int64_t n, int64_t k, int64_t d, int threads, const TX *x, const Controller *read, TU *z,
                  const Norm<A> *norm);

template <class TX, class TU, class A>
void read_backward(int64_t n, int64_t k, int64_t d, int threads, const TU *grad_z, const TX *x, const Controller *read,
                   const TX *through, TX *grad_x, const Norm<A> *norm);

template <class TX, class TU, class A>
void write_read_forward(int64_t n, int64_t k, int64_t d, int threads, const TX *x, const TU *u, const TU *bias,
                        const Controller *write, const Controller *retention, const Controller *read, TX *y, TU *z,
                        const Norm<A> *norm);

template <class TX, class TU, class A>
void write_backward(int64_t n, int64_t k, int64_t d, int threads, const TX *grad_y, const TX *x, const TU *u,
                    const TU *bias, const Controller *write, const Controller *retention, TX *grad_x, TU *grad_u,
                    A *grad_bias);

template <class TX, class TU, class A>
void write_read_backward(int64_t n, int64_t k, int64_t d, int threads, const TX *grad_y, const TU *grad_z, const TX *x,
                         const TU *u, const TU *bias, const Controller *write, const Controller *retention,
                         const Controller *read, TX *grad_x, TU *grad_u, A *grad_bias, const Norm<A> *norm);

template <class TX, class TU, class A>
void write_read_kept_backward(int64_t n, int64_t k, int64_t d, int threads, const TX *grad_y, const TU *grad_z,
                              const TX *y, const TU *u, const TU *bias, const Controller *write,
                              const Controller *read, TX *grad_x, TU *grad_u, A *grad_bias, const Norm<A> *norm);

// Applies MACRO(TX, TU, A) to the types that there are kernels for.
#define STREAMWISE_TYPES(MACRO) \
  MACRO(float, float, float)    \
  MACRO(float, bf16, float)     \
  MACRO(bf16, float, float)     \
  MACRO(bf16, bf16, float)      \
  MACRO(double, double, double)

}  // namespace streamwise
