// The loops of adam_avx2.cc and adam_avx512.cc, vectorised by the compiler. Written as plain C,
// because every function here is compiled with wide instructions: nothing may be shared with other
// files, so no function of the standard library is called.
//
// Only correctly rounded operations are used, so a vector, its tail and the plain reference give
// the same bits. Settings are template arguments: a branch inside the loop would keep it from being
// vectorised.
#pragma once

#include "optim/adam_variants.h"

namespace memd::internal {
namespace {

enum class Decay { none, decoupled, l2 };

template <Decay decay, bool lerp_from_end, bool amsgrad>
[[gnu::always_inline]] inline void update_element(
    const AdamScalars& s, float& theta, float& m, float& v, float& v_max, float g) {
  g = g * s.gradient_sign;
  if constexpr (decay == Decay::decoupled) theta = theta * s.lr_factor;
  if constexpr (decay == Decay::l2) g = __builtin_fmaf(theta, s.weight_decay, g);
  const float step_to_g = g - m;
  if constexpr (lerp_from_end) {
    m = __builtin_fmaf(s.one_minus_beta1 - 1.0F, step_to_g, g);
  } else {
    m = __builtin_fmaf(s.one_minus_beta1, step_to_g, m);
  }
  v = __builtin_fmaf(s.one_minus_beta2 * g, g, v * s.beta2);
  if constexpr (amsgrad) {
    // Without a short circuit, which would be a branch. A NaN stays one.
    const bool is_larger = (v > v_max) | (v != v);
    v_max = is_larger ? v : v_max;
  }
  const float v_hat = amsgrad ? v_max : v;
  const float denominator = __builtin_sqrtf(v_hat) / s.bias_correction2_sqrt + s.eps;
  theta = theta - s.step_size * m / denominator;
}

template <Decay decay, bool lerp_from_end, bool amsgrad>
void update(const AdamScalars& scalars, const AdamFp32& arrays) {
  const AdamScalars s = scalars;
  const size_t count = arrays.count;
  float* __restrict parameter = arrays.parameter;
  float* __restrict exp_avg = arrays.exp_avg;
  float* __restrict exp_avg_sq = arrays.exp_avg_sq;
  float* __restrict max_exp_avg_sq = arrays.max_exp_avg_sq;
  const float* __restrict gradient = arrays.gradient;
  for (size_t i = 0; i < count; ++i) {
    float theta = parameter[i];
    float m = exp_avg[i];
    float v = exp_avg_sq[i];
    float v_max = 0;
    if constexpr (amsgrad) v_max = max_exp_avg_sq[i];
    update_element<decay, lerp_from_end, amsgrad>(s, theta, m, v, v_max, gradient[i]);
    parameter[i] = theta;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if constexpr (amsgrad) max_exp_avg_sq[i] = v_max;
  }
}

template <Decay decay, bool lerp_from_end, bool amsgrad>
void update(const AdamScalars& scalars, const AdamBf16& arrays) {
  const AdamScalars s = scalars;
  const size_t count = arrays.count;
  uint16_t* __restrict half = arrays.half;
  int16_t* __restrict remainder = arrays.remainder;
  float* __restrict exp_avg = arrays.exp_avg;
  float* __restrict exp_avg_sq = arrays.exp_avg_sq;
  float* __restrict max_exp_avg_sq = arrays.max_exp_avg_sq;
  const uint16_t* __restrict gradient = arrays.gradient;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t old_bits =
        (uint32_t{half[i]} << 16) + static_cast<uint32_t>(int32_t{remainder[i]});
    float theta = __builtin_bit_cast(float, old_bits);
    float m = exp_avg[i];
    float v = exp_avg_sq[i];
    float v_max = 0;
    if constexpr (amsgrad) v_max = max_exp_avg_sq[i];
    update_element<decay, lerp_from_end, amsgrad>(
        s, theta, m, v, v_max, __builtin_bit_cast(float, uint32_t{gradient[i]} << 16));
    const uint32_t bits = __builtin_bit_cast(uint32_t, theta);
    const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
    const uint32_t rounded = (bits + 0x8000U) >> 16;
    const uint32_t new_half = is_nan ? (bits >> 16) | 0x0040U : rounded;
    const uint32_t new_remainder = is_nan ? 0U : bits - (rounded << 16);
    half[i] = static_cast<uint16_t>(new_half);
    remainder[i] = static_cast<int16_t>(new_remainder);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if constexpr (amsgrad) max_exp_avg_sq[i] = v_max;
  }
}

template <bool lerp_from_end, bool amsgrad, typename Arrays>
void update_with_decay(const AdamScalars& scalars, const Arrays& arrays) {
  if (!scalars.decays) return update<Decay::none, lerp_from_end, amsgrad>(scalars, arrays);
  if (scalars.decoupled) {
    return update<Decay::decoupled, lerp_from_end, amsgrad>(scalars, arrays);
  }
  return update<Decay::l2, lerp_from_end, amsgrad>(scalars, arrays);
}

template <bool lerp_from_end, typename Arrays>
void update_with_lerp(const AdamScalars& scalars, const Arrays& arrays) {
  if (scalars.amsgrad) return update_with_decay<lerp_from_end, true>(scalars, arrays);
  return update_with_decay<lerp_from_end, false>(scalars, arrays);
}

template <typename Arrays>
void update_any(const AdamScalars& scalars, const Arrays& arrays) {
  if (scalars.lerp_from_end) return update_with_lerp<true>(scalars, arrays);
  return update_with_lerp<false>(scalars, arrays);
}

}  // namespace
}  // namespace memd::internal
