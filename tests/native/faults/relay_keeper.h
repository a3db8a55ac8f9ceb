// Memory that outlives killed daemons, in tests: a parent keeps what its child hands it.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "base/check.h"
#include "base/descriptor_keeper.h"

namespace memd::testing {

/// In the daemon's process. A message is one call of sendmsg(): a kill finds it sent or not begun,
/// and what is in the socket outlives the sender.
class RelayKeeper final : public DescriptorKeeper {
 public:
  explicit RelayKeeper(OwnedFd socket) : socket_(std::move(socket)) {}
  void keep(const std::string& name, int fd) override { send('+', name, fd); }
  void forget(const std::string& name) override { send('-', name, -1); }

 private:
  void send(char kind, const std::string& name, int fd) {
    std::string text = kind + name;
    struct iovec part{.iov_base = text.data(), .iov_len = text.size()};
    alignas(struct cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    struct msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (fd >= 0) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      struct cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof fd);
      std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    ssize_t sent = -1;
    do {
      sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    MEMD_CHECK_EQ(sent, static_cast<ssize_t>(text.size()));
  }

  const OwnedFd socket_;
};

/// In the parent: what one daemon after the other has kept.
class Keepsakes {
 public:
  /// Runs `body` in a child with a keeper; the child's wait status, when all it sent is here.
  int in_child(const std::function<void(DescriptorKeeper&)>& body) {
    int ends[2];
    MEMD_CHECK_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    OwnedFd here(ends[0]);
    OwnedFd there(ends[1]);
    const pid_t pid = ::fork();
    MEMD_CHECK_GE(pid, 0);
    if (pid == 0) {
      here.reset();
      [&]() noexcept {
        RelayKeeper keeper(std::move(there));
        body(keeper);
      }();
      std::fflush(stderr);
      _exit(0);
    }
    there.reset();
    while (receive(here.get())) {
    }
    int status = 0;
    MEMD_CHECK_EQ(::waitpid(pid, &status, 0), pid);
    return status;
  }

  KeptDescriptors hand_over() const {
    KeptDescriptors copies;
    for (const auto& [name, fd] : kept_) {
      copies.push_back({.name = name, .fd = OwnedFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0))});
    }
    return copies;
  }
  size_t count(const std::string& prefix) const {
    size_t found = 0;
    for (const auto& [name, fd] : kept_) found += name.starts_with(prefix) ? 1 : 0;
    return found;
  }
  void clear() { kept_.clear(); }

 private:
  bool receive(int socket) {
    std::array<char, 256> text{};
    struct iovec part{.iov_base = text.data(), .iov_len = text.size()};
    alignas(struct cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    struct msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t length = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (length < 0 && errno == EINTR) return true;
    if (length < 0) MEMD_CHECK_EQ(errno, ECONNRESET);  // it died without reading
    if (length <= 0) return false;
    const std::string name(text.data() + 1, static_cast<size_t>(length) - 1);
    if (text[0] == '-') {
      kept_.erase(name);
      return true;
    }
    const struct cmsghdr* const header = CMSG_FIRSTHDR(&message);
    MEMD_CHECK(header != nullptr);
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    kept_[name] = OwnedFd(fd);
    return true;
  }

  std::map<std::string, OwnedFd> kept_;
};

}  // namespace memd::testing
