// How torch reaches devices, streams and events, whatever the accelerator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "current_stream.h"
#include "device_memory.h"
#include "install.h"
#include "pinned_memory.h"
#include "tensor_bytes.h"

namespace sim {
namespace {

c10::Stream as_stream(Actor stream) {
  auto device = device_at(static_cast<c10::DeviceIndex>(device_of(stream)));
  return c10::Stream(c10::Stream::UNSAFE, device, id_of(stream));
}

Actor as_actor(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

MarkPtr& mark_of(void* event) { return *static_cast<MarkPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device next) const override {
    auto last = getDevice();
    setDevice(next);
    return last;
  }
  c10::Device getDevice() const override { return device_at(current.device); }
  void setDevice(c10::Device device) const override { current.device = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current.device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return as_stream(current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream(stream_of(index_of(device), 0));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return as_stream(machine().next_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return as_stream(machine().next_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto last = getStream(next.device());
    current.streams.at(next.device_index()) = next.id();
    return last;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return machine().query(machine().mark(as_actor(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    machine().finish(as_actor(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    machine().finish_device(device);
  }

  void record(void** event,
              const c10::Stream& stream,
              c10::DeviceIndex,
              c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    mark_of(*event) = machine().mark(as_actor(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    machine().block(as_actor(stream), mark_of(event));
  }
  bool queryEvent(void* event) const override { return machine().query(mark_of(event)); }
  void synchronizeEvent(void* event) const override { machine().wait(mark_of(event)); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  /// Simulated milliseconds. torch asks only for events that are over.
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    return static_cast<double>(mark_of(end)->time - mark_of(begin)->time) * 1e-6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& user) const override {
    memory().recordStream(data, user);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current.device; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current.device = index_of(device_at(device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current.device, index_of(device_at(device)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current.device : exchangeDevice(device);
  }
  at::Device getDeviceFromPtr(void* address) const override {
    auto holder = memory().holder_of(address);
    return holder < 0 ? c10::Device(c10::kCPU) : device_at(holder);
  }
  bool isPinnedPtr(const void* address) const override { return pinned().find(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

}  // namespace

void install_devices() {
  c10::SetAllocator(kType, &memory());
  static c10::impl::DeviceGuardImplRegistrar guard(kType, new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace sim
