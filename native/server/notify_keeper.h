// Descriptors kept by systemd, or by a holder process that speaks the same words.
#pragma once

#include <atomic>
#include <string>
#include <utility>

#include "base/descriptor_keeper.h"
#include "base/owned_fd.h"

namespace memd {

/// Sends sd_notify's `FDSTORE=1` and `FDSTOREREMOVE=1` on a connected datagram or packet socket.
/// Waits for the reader only when the socket is full, and then at most kPatienceMs, once. A keeper
/// that failed stays failed; the daemon runs on without one.
class NotifyKeeper final : public DescriptorKeeper {
 public:
  static constexpr int kPatienceMs = 5000;

  explicit NotifyKeeper(OwnedFd socket) : socket_(std::move(socket)) {}

  void keep(const std::string& name, int fd) override;
  void forget(const std::string& name) override;

  bool has_failed() const override { return has_failed_.load(std::memory_order_relaxed); }

 private:
  void send(const std::string& text, int fd);

  OwnedFd socket_;
  std::atomic<bool> has_failed_{false};
};

}  // namespace memd
