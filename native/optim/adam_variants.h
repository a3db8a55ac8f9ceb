// One Adam loop per instruction set; adam.cc chooses. The wide ones are compiled in their own files
// with everything internal, so that no wide instruction leaks into code that runs on every
// processor.
#pragma once

#include "optim/adam.h"

namespace memd::internal {

struct AdamFp32 {
  size_t count;
  float* parameter;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // nullptr without amsgrad
  const float* gradient;
};

struct AdamBf16 {
  size_t count;
  uint16_t* half;
  int16_t* remainder;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // nullptr without amsgrad
  const uint16_t* gradient;
};

void adam_reference(const AdamScalars& scalars, const AdamFp32& arrays);
void adam_reference(const AdamScalars& scalars, const AdamBf16& arrays);
#if defined(__x86_64__)
void adam_avx2(const AdamScalars& scalars, const AdamFp32& arrays);
void adam_avx2(const AdamScalars& scalars, const AdamBf16& arrays);
void adam_avx512(const AdamScalars& scalars, const AdamFp32& arrays);
void adam_avx512(const AdamScalars& scalars, const AdamBf16& arrays);
#endif

}  // namespace memd::internal
