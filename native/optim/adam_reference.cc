// Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019), one element after the other,
// in the papers' symbols. The order of operations is that of torch's fused CPU kernel, found by
// experiment: every line is one rounding, or one fused multiply-add. The tail of a parameter has
// another order.
#include <cmath>
#include <cstring>

#include "optim/adam_variants.h"

namespace memd::internal {
namespace {

/// `v_max`: nullptr without amsgrad.
void update_element(const AdamScalars& s, float& theta, float& m, float& v, float* v_max, float g) {
  g = g * s.gradient_sign;
  if (s.decays && s.decoupled) theta = theta * s.lr_factor;
  if (s.decays && !s.decoupled) g = std::fma(theta, s.weight_decay, g);
  const float step_to_g = g - m;
  // torch's lerp: for weights of a half and more it counts from the end, which rounds differently.
  if (!s.lerp_from_end) {
    m = std::fma(s.one_minus_beta1, step_to_g, m);
  } else if (s.in_tail) {
    m = std::fma(-step_to_g, 1.0F - s.one_minus_beta1, g);  // beta1 = 0: a zero of the other sign
  } else {
    m = std::fma(s.one_minus_beta1 - 1.0F, step_to_g, g);
  }
  if (s.in_tail) {
    v = std::fma(v, s.beta2, s.one_minus_beta2 * g * g);
  } else {
    v = std::fma(s.one_minus_beta2 * g, g, v * s.beta2);
  }
  // AMSGrad (Reddi and others, 2018). torch's maximum of a number and a NaN is NaN, but in the
  // tail.
  if (v_max != nullptr && (v > *v_max || (std::isnan(v) && !s.in_tail))) *v_max = v;
  const float v_hat = v_max != nullptr ? *v_max : v;
  const float denominator = std::sqrt(v_hat) / s.bias_correction2_sqrt + s.eps;
  theta = theta - s.step_size * m / denominator;
}

/// nullptr stays nullptr.
float* at(float* array, size_t i) { return array == nullptr ? nullptr : array + i; }

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace

void adam_reference(const AdamScalars& scalars, const AdamFp32& arrays) {
  for (size_t i = 0; i < arrays.count; ++i) {
    update_element(scalars,
                   arrays.parameter[i],
                   arrays.exp_avg[i],
                   arrays.exp_avg_sq[i],
                   at(arrays.max_exp_avg_sq, i),
                   arrays.gradient[i]);
  }
}

void adam_reference(const AdamScalars& scalars, const AdamBf16& arrays) {
  for (size_t i = 0; i < arrays.count; ++i) {
    const uint32_t old_bits =
        (uint32_t{arrays.half[i]} << 16) + static_cast<uint32_t>(int32_t{arrays.remainder[i]});
    float theta = float_of(old_bits);
    update_element(scalars,
                   theta,
                   arrays.exp_avg[i],
                   arrays.exp_avg_sq[i],
                   at(arrays.max_exp_avg_sq, i),
                   float_of(uint32_t{arrays.gradient[i]} << 16));
    const uint32_t bits = bits_of(theta);
    if (std::isnan(theta)) {
      arrays.half[i] = static_cast<uint16_t>((bits >> 16) | 0x0040U);
      arrays.remainder[i] = 0;
    } else {
      const uint32_t half = (bits + 0x8000U) >> 16;
      arrays.half[i] = static_cast<uint16_t>(half);
      arrays.remainder[i] = static_cast<int16_t>(bits - (half << 16));
    }
  }
}

}  // namespace memd::internal
