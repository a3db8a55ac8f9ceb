// Reads from an image in memory, at once.
#pragma once

#include <cerrno>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "io/io_queue.h"

namespace memd::powercut {

/// Devices lie one after the other in the image. Recovery has nothing to write: a write or sync is
/// a failure, unless the image is one to be written to.
class ImageQueue final : public IoQueue {
 public:
  ImageQueue(std::span<const std::byte> image, uint64_t device_bytes)
      : image_(image), device_bytes_(device_bytes) {}
  ImageQueue(std::span<std::byte> image, uint64_t device_bytes)
      : image_(image), writable_(image), device_bytes_(device_bytes) {}

  std::string_view name() const override { return "image"; }
  uint16_t add_device(OwnedFd, std::string) override { return device_count_++; }
  void add_memory(std::span<std::byte>, PageKind) override {}
  void remove_memory(std::span<std::byte>) override {}
  void submit(IoRequest request) override { waiting_.push_back(std::move(request)); }
  size_t reap() override {
    const auto requests = std::exchange(waiting_, {});
    for (const IoRequest& request : requests) request.complete(run(request));
    return requests.size();
  }
  std::vector<IoInFlight> in_flight() const override { return {}; }
  IoQueueStatistics statistics() const override { return {}; }
  IoDeviceStatistics device_statistics(uint16_t) const override { return {}; }

 private:
  Status run(const IoRequest& request) {
    if (request.kind != IoKind::read && writable_.empty())
      return device_error(EROFS, "an image is only read");
    if (request.kind == IoKind::sync) return Status::ok();
    const uint64_t begin = request.device * device_bytes_ + request.offset_bytes;
    if (request.device >= device_count_ || request.offset_bytes > device_bytes_ ||
        request.data.size() > device_bytes_ - request.offset_bytes) {
      return device_error(EIO, concat("a read beyond the device: at ", request.offset_bytes));
    }
    if (request.kind == IoKind::write) {
      std::memcpy(writable_.data() + begin, request.data.data(), request.data.size());
    } else {
      std::memcpy(request.data.data(), image_.data() + begin, request.data.size());
    }
    return Status::ok();
  }

  const std::span<const std::byte> image_;
  const std::span<std::byte> writable_;
  const uint64_t device_bytes_;
  uint16_t device_count_ = 0;
  std::vector<IoRequest> waiting_;
};

}  // namespace memd::powercut
