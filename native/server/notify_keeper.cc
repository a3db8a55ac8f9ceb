#include "server/notify_keeper.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/status.h"

namespace memd {

void NotifyKeeper::keep(const std::string& name, int fd) {
  send(concat("FDSTORE=1\nFDNAME=", name, "\n"), fd);
}

void NotifyKeeper::forget(const std::string& name) {
  send(concat("FDSTOREREMOVE=1\nFDNAME=", name, "\n"), -1);
}

void NotifyKeeper::send(const std::string& text, int fd) {
  if (has_failed()) return;
  iovec bytes{.iov_base = const_cast<char*>(text.data()), .iov_len = text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  for (;;) {
    if (::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return;
    if (errno == EINTR) continue;
    const int error_number = errno;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) break;
    if (error_number == EAGAIN) {
      pollfd room{.fd = socket_.get(), .events = POLLOUT, .revents = 0};
      ::poll(&room, 1, static_cast<int>(left.count()));
    } else if (error_number == ENOBUFS || error_number == ETOOMANYREFS) {
      // Too many descriptors are on their way: nothing tells when fewer are.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else {
      break;
    }
  }
  has_failed_.store(true, std::memory_order_relaxed);
}

}  // namespace memd
