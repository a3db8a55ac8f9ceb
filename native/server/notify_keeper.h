// Descriptors kept by systemd, or by a holder process that speaks the same words.
#pragma once

#include <atomic>
#include <string>
#include <utility>

#include "base/descriptor_keeper.h"
#include "base/owned_fd.h"

namespace memd {

/// Sends sd_notify's `FDSTORE=1` and `FDSTOREREMOVE=1` on a connected datagram or packet socket.
/// Who reads is not waited for, unless it reads nothing for so long that the socket is full: then
/// up to kPatienceMs, once. A keeper that failed stays so; the daemon goes on, without a net.
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
