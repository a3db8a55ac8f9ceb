#include "optim/adam.h"

#include <cmath>

#include "base/check.h"
#include "optim/adam_variants.h"

namespace memd {
namespace {

Isa widest_isa() {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return Isa::avx512;
  if (avx2) return Isa::avx2;
#endif
  return Isa::plain;
}

template <typename Arrays>
void update(Isa isa, const AdamScalars& scalars, const Arrays& arrays) {
  MEMD_CHECK(isa <= isa_best());
  // An empty array may be anywhere.
  MEMD_CHECK(arrays.count == 0 || scalars.amsgrad == (arrays.max_exp_avg_sq != nullptr));
  // A parameter has 7 such elements at most: a vector would be no faster.
  if (scalars.in_tail) return internal::adam_reference(scalars, arrays);
#if defined(__x86_64__)
  if (isa == Isa::avx512) return internal::adam_avx512(scalars, arrays);
  if (isa == Isa::avx2) return internal::adam_avx2(scalars, arrays);
#endif
  internal::adam_reference(scalars, arrays);
}

}  // namespace

AdamScalars adam_scalars(const AdamSettings& settings, uint64_t t) {
  MEMD_CHECK_GT(t, uint64_t{0});
  const auto step = static_cast<double>(t);
  const double bias_correction1 = 1.0 - std::pow(settings.beta1, step);
  const double bias_correction2 = 1.0 - std::pow(settings.beta2, step);
  AdamScalars scalars{};
  scalars.gradient_sign = settings.maximize ? -1.0F : 1.0F;
  scalars.lr_factor = static_cast<float>(1.0 - settings.lr * settings.weight_decay);
  scalars.weight_decay = static_cast<float>(settings.weight_decay);
  scalars.beta1 = static_cast<float>(settings.beta1);
  scalars.one_minus_beta1 = static_cast<float>(1.0 - settings.beta1);
  scalars.beta2 = static_cast<float>(settings.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1.0 - settings.beta2);
  scalars.bias_correction2_sqrt = static_cast<float>(std::sqrt(bias_correction2));
  scalars.step_size = static_cast<float>(settings.lr / bias_correction1);
  scalars.eps = static_cast<float>(settings.eps);
  scalars.decoupled = settings.decoupled;
  scalars.decays = settings.weight_decay != 0.0;
  scalars.lerp_from_end = scalars.one_minus_beta1 >= 0.5F;
  scalars.amsgrad = settings.amsgrad;
  return scalars;
}

Isa isa_best() {
  static const Isa isa = widest_isa();
  return isa;
}

void adam_update(Isa isa,
                 const AdamScalars& scalars,
                 size_t count,
                 float* parameter,
                 float* exp_avg,
                 float* exp_avg_sq,
                 const float* gradient,
                 float* max_exp_avg_sq) {
  update(isa,
         scalars,
         internal::AdamFp32{count, parameter, exp_avg, exp_avg_sq, max_exp_avg_sq, gradient});
}

void adam_update(Isa isa,
                 const AdamScalars& scalars,
                 size_t count,
                 uint16_t* half,
                 int16_t* remainder,
                 float* exp_avg,
                 float* exp_avg_sq,
                 const uint16_t* gradient,
                 float* max_exp_avg_sq) {
  update(isa,
         scalars,
         internal::AdamBf16{count, half, remainder, exp_avg, exp_avg_sq, max_exp_avg_sq, gradient});
}

}  // namespace memd
