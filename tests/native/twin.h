// What a test trains, and plain memory that is trained beside it.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "optim/adam_variants.h"
#include "store/job/job.h"

namespace memd::testing {

inline ShardSpec parameter(const std::string& name,
                           uint64_t elements,
                           DType dtype = DType::float32) {
  return {.name = name,
          .kind = ShardKind::parameter,
          .dtype = dtype,
          .tier = Tier::nvme,
          .shape = {elements}};
}
inline ShardSpec with_maximum(ShardSpec spec, bool keeps_maximum = true) {
  spec.keeps_maximum = keeps_maximum;
  return spec;
}
inline ShardSpec bytes_shard(const std::string& name,
                             uint64_t bytes,
                             ShardKind kind = ShardKind::blob) {
  return {.name = name, .kind = kind, .dtype = DType::uint8, .tier = Tier::nvme, .shape = {bytes}};
}

inline std::vector<uint8_t> pattern(uint64_t bytes, uint8_t seed) {
  std::vector<uint8_t> values(bytes);
  for (uint64_t i = 0; i < bytes; ++i) values[i] = static_cast<uint8_t>(i * 31 + seed + i / 251);
  return values;
}
inline std::vector<float> numbers(uint64_t count, uint32_t seed) {
  std::vector<float> values(count);
  uint32_t x = seed * 2654435761U + 1;
  for (float& value : values) {
    x = x * 1664525U + 1013904223U;
    value = static_cast<float>(static_cast<int32_t>(x)) * 1e-9F;
  }
  return values;
}
inline std::vector<uint16_t> halves(uint64_t count, uint32_t seed) {
  std::vector<uint16_t> out;
  for (const float value : numbers(count, seed)) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    out.push_back(static_cast<uint16_t>((bits + 0x8000U) >> 16));
  }
  return out;
}

/// What plain memory holds after the same steps.
struct Twin {
  std::vector<float> theta;
  std::vector<uint16_t> half;
  std::vector<int16_t> remainder;
  std::vector<float> m, v;
  std::vector<float> v_max;  // of all elements, also without amsgrad
  uint64_t t = 0;

  static Twin fp32(std::vector<float> values) {
    Twin twin;
    twin.theta = std::move(values);
    twin.m.resize(twin.theta.size());
    twin.v.resize(twin.theta.size());
    twin.v_max.resize(twin.theta.size());
    return twin;
  }
  static Twin bf16(std::vector<uint16_t> values) {
    Twin twin;
    twin.half = std::move(values);
    twin.remainder.resize(twin.half.size());
    twin.m.resize(twin.half.size());
    twin.v.resize(twin.half.size());
    twin.v_max.resize(twin.half.size());
    return twin;
  }
  void step(const AdamSettings& settings, const std::vector<float>& gradient) {
    update_parts(settings, [&](const AdamScalars& scalars, size_t first, size_t count) {
      internal::adam_reference(scalars,
                               internal::AdamFp32{count,
                                                  theta.data() + first,
                                                  m.data() + first,
                                                  v.data() + first,
                                                  maximum(settings, first),
                                                  gradient.data() + first});
    });
  }
  void step(const AdamSettings& settings, const std::vector<uint16_t>& gradient) {
    update_parts(settings, [&](const AdamScalars& scalars, size_t first, size_t count) {
      internal::adam_reference(scalars,
                               internal::AdamBf16{count,
                                                  half.data() + first,
                                                  remainder.data() + first,
                                                  m.data() + first,
                                                  v.data() + first,
                                                  maximum(settings, first),
                                                  gradient.data() + first});
    });
  }

 private:
  float* maximum(const AdamSettings& settings, size_t first) {
    return settings.amsgrad ? v_max.data() + first : nullptr;
  }
  template <typename Update>
  void update_parts(const AdamSettings& settings, const Update& update) {
    AdamScalars scalars = adam_scalars(settings, ++t);
    const size_t tail_first = m.size() - m.size() % 8;
    update(scalars, 0, tail_first);
    scalars.in_tail = true;
    update(scalars, tail_first, m.size() - tail_first);
  }
};

}  // namespace memd::testing
