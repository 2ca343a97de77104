// A controller as the CPU kernels take it: one number per stream, its factors, and the gradient of its numbers.
//
//   kind        factor                        d factor / d value
//   FACTOR      v                             1
//   READ        sigmoid(v)                    sigmoid'(v)
//   WRITE       2 sigmoid(v)                  2 sigmoid'(v)
//   RETENTION   1 - max_forget sigmoid(-v)    max_forget sigmoid'(v)
//
// Used by streamwise_residual_cpu.cpp; streamwise_residual_controllers.py has the same for other devices. What always
// holds: factors are computed in double and rounded once, to the type of the values; the gradient is rounded to that
// type, and exactly zero behind the first k.

#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

namespace streamwise {

enum Kind : int64_t { FACTOR, READ, WRITE, RETENTION };

// What streamwise_residual_tensors.h lays out
struct Controller {
  const void *values;  // [length], float or double
  void *gradient;      // of their type; null for none
  int64_t length, is_double, kind;
  double max_forget;
};

inline double sigmoid(double value) { return 1 / (1 + std::exp(-value)); }

inline double value_of(const Controller &controller, int64_t s) {
  return controller.is_double ? static_cast<const double *>(controller.values)[s]
                              : static_cast<const float *>(controller.values)[s];
}

inline double factor_of(const Controller &controller, int64_t s) {
  const double value = value_of(controller, s);
  switch (controller.kind) {
    case READ: return sigmoid(value);
    case WRITE: return 2 * sigmoid(value);
    case RETENTION: return 1 - controller.max_forget * sigmoid(-value);
    default: return value;
  }
}

// The first k factors of a controller in the accumulation type; none of no controller
template <class A>
class Factors {
 public:
  Factors(const Controller *controller, int64_t k) : values(controller ? k : 0) {
    for (int64_t s = 0; s < static_cast<int64_t>(values.size()); s++) {
      const double factor = factor_of(*controller, s);
      values[s] = controller->is_double ? static_cast<A>(factor) : static_cast<A>(static_cast<float>(factor));
    }
  }
  A operator[](int64_t s) const { return values[s]; }
  const A *all() const { return values.empty() ? nullptr : values.data(); }

 private:
  std::vector<A> values;
};

// The gradient of the values from the k gradients of the factors
inline void set_gradient(const Controller &controller, int64_t k, const double *of_factors) {
  const double scale = controller.kind == WRITE ? 2 : controller.kind == RETENTION ? controller.max_forget : 1;
  for (int64_t s = 0; s < controller.length; s++) {
    double gradient = 0;
    if (s < k) {
      const double half = sigmoid(value_of(controller, s));
      gradient = controller.kind == FACTOR ? of_factors[s] : of_factors[s] * (scale * (half * (1 - half)));
    }
    if (controller.is_double)
      static_cast<double *>(controller.gradient)[s] = gradient;
    else
      static_cast<float *>(controller.gradient)[s] = static_cast<float>(gradient);
  }
}

}  // namespace streamwise
