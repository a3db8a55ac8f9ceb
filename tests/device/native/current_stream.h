// The device and streams on which the calling thread queues.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <array>

#include "vector_clock.h"

namespace sim {

constexpr auto kType = c10::DeviceType::PrivateUse1;

struct Current {
  c10::DeviceIndex device = 0;
  std::array<int64_t, kDevices> streams{};
};
inline thread_local Current current;

inline c10::Device device_at(c10::DeviceIndex index) { return {kType, index}; }
/// The device's index; the current one's if it names none.
inline c10::DeviceIndex index_of(c10::Device device) {
  if (!device.has_index()) return current.device;
  TORCH_CHECK(device.index() < kDevices, "there is no device ", device);
  return device.index();
}
inline Actor current_stream(int device) { return stream_of(device, current.streams.at(device)); }

}  // namespace sim
