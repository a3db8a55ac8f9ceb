// Adam and AdamW on a contiguous run of elements, with the bits of torch's fused CPU kernel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memd {

/// torch's kernel updates vectors of this many elements on every processor with AVX2 and later, and
/// each element behind a parameter's last whole vector by itself, in its *tail*. Its threads take
/// whole vectors, so their number changes nothing.
constexpr size_t kTorchVectorElements = 8;

/// How many elements of a parameter lie before its tail.
constexpr size_t elements_before_tail(size_t count) { return count - count % kTorchVectorElements; }

/// One parameter group's settings, as torch names them.
struct AdamSettings {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decoupled =
      true;  // true: AdamW (decay of the parameter); false: Adam (L2 term in the gradient)
  bool maximize = false;  // the update follows the gradient upwards
  bool amsgrad = false;   // the largest exp_avg_sq so far divides, not the last one

  bool operator==(const AdamSettings&) const = default;
};

/// Factors of the inner loop, computed in double and rounded to float once per group and step.
struct AdamScalars {
  float gradient_sign;  // -1: maximize; a factor of 1 changes no bit
  float lr_factor;      // AdamW: 1 - lr * weight_decay, multiplied into the parameter
  float weight_decay;   // Adam: added to the gradient, times the parameter
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float bias_correction2_sqrt;  // sqrt(1 - beta2^t)
  float step_size;              // lr / (1 - beta1^t)
  float eps;
  bool decoupled;
  bool decays;         // weight_decay != 0
  bool lerp_from_end;  // one_minus_beta1 >= 0.5: torch's lerp then counts from the gradient
  bool amsgrad;
  // The elements are a parameter's tail. There torch fuses the other product of exp_avg_sq, lerps
  // with the other sign of zero, and its maximum of amsgrad ignores a NaN.
  bool in_tail;
};

/// The scalars outside of the tail. `t` is the number of this update, from 1.
AdamScalars adam_scalars(const AdamSettings& settings, uint64_t t);

enum class Isa : uint8_t { plain, avx2, avx512 };

/// The widest instruction set of this processor that a kernel was compiled for.
Isa isa_best();

/// fp32: `parameter`, `exp_avg`, `exp_avg_sq` are updated in place; `gradient` is read. `count`
/// elements each, of one parameter, all before its tail or all in it. The arrays may start on any
/// 4-byte boundary and must not overlap. The same bits for every `isa`, and for any split of the
/// elements over calls. `max_exp_avg_sq` is updated too, and is there exactly where the settings
/// say amsgrad.
void adam_update(Isa isa,
                 const AdamScalars& scalars,
                 size_t count,
                 float* parameter,
                 float* exp_avg,
                 float* exp_avg_sq,
                 const float* gradient,
                 float* max_exp_avg_sq = nullptr);

/// bf16: the fp32 parameter is stored exactly as `half` = (bits + 0x8000) >> 16 (ties away from
/// zero), which is the published bf16 parameter, and `remainder` = bits - (half << 16), a signed
/// 16-bit number. A number that rounds beyond bf16 is published as infinity and kept exactly. A NaN
/// is stored as a quiet NaN with remainder 0: it stays a NaN, and loses its lower payload bits.
void adam_update(Isa isa,
                 const AdamScalars& scalars,
                 size_t count,
                 uint16_t* half,
                 int16_t* remainder,
                 float* exp_avg,
                 float* exp_avg_sq,
                 const uint16_t* gradient,
                 float* max_exp_avg_sq = nullptr);

}  // namespace memd
