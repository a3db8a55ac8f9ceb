#include "ring/server_ring.h"

#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string_view>

namespace memd {
namespace {

/// By its name alone: file flags belong to the client as well, which could make a read block, and
/// block it in turn, between a look at them and the read.
bool is_eventfd(int fd) {
  constexpr std::string_view kName = "anon_inode:[eventfd]";
  char name[kName.size() + 1];
  const std::string path = concat("/proc/self/fd/", fd);
  const ssize_t length = readlink(path.c_str(), name, sizeof(name));
  return length > 0 && std::string_view(name, static_cast<size_t>(length)) == kName;
}

}  // namespace

Result<ServerRing> ServerRing::create() {
  auto memory = SharedMemory::create("memd-session", sizeof(SessionLayout));
  if (!memory.is_ok()) return memory.status();
  OwnedFd doorbell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!doorbell.is_open()) return device_error(errno, "eventfd");
  ServerRing ring(std::move(memory).value(), std::move(doorbell));
  ring.header().magic = kSessionMagic;
  ring.header().protocol_version = kProtocolVersion;
  return ring;
}

Result<ServerRing> ServerRing::adopt(OwnedFd session, OwnedFd doorbell) {
  auto memory = SharedMemory::adopt("a session", std::move(session), sizeof(SessionLayout));
  if (!memory.is_ok()) return memory.status();
  if (!is_eventfd(doorbell.get()))
    return error(StatusCode::invalid_argument, "what was kept as a session's doorbell is none");
  ServerRing ring(std::move(memory).value(), std::move(doorbell));
  SessionHeader& header = ring.header();
  if (header.magic != kSessionMagic || header.protocol_version != kProtocolVersion) {
    ring.broken_ = true;
    return ring;
  }
  if (header.ended.load(std::memory_order_acquire) != 0) {
    return error(StatusCode::fenced, "the session was ended by the daemon before");
  }
  // The daemon's own words: a client that changed them gets wrong answers, as both are checked
  // against its own before they are used. Of the job they say whether the last grant was told.
  ring.request_head_ = header.request_head.load(std::memory_order_acquire);
  ring.completion_tail_ = header.completion_tail.load(std::memory_order_acquire);
  ring.is_paused_ = true;
  ring.wake();
  ring.want_release(false);
  return ring;
}

void ServerRing::discard_requests() {
  is_paused_ = false;
  const uint32_t tail = header().request_tail.load(std::memory_order_acquire);
  if (tail - request_head_ > kRingEntries) {
    broken_ = true;
    return;
  }
  request_head_ = tail;
  header().request_head.store(request_head_, std::memory_order_release);
}

std::optional<Request> ServerRing::poll() {
  if (broken_ || is_paused_) return std::nullopt;
  // Pairs with the release store in ClientSession::submit(): every field of the entry is seen.
  const uint32_t tail = header().request_tail.load(std::memory_order_acquire);
  const uint32_t available = tail - request_head_;
  if (available == 0) return std::nullopt;
  if (available > kRingEntries) {
    broken_ = true;
    return std::nullopt;
  }
  Request request;
  std::memcpy(&request, &layout_->requests[request_head_ % kRingEntries], sizeof(request));
  ++request_head_;
  // Pairs with the acquire load in ClientSession::submit(): the client reuses the entry only after
  // it was copied.
  header().request_head.store(request_head_, std::memory_order_release);
  return request;
}

bool ServerRing::publish(const Completion& fields, const Status& status) {
  Completion completion = fields;
  const uint32_t head = header().completion_head.load(std::memory_order_acquire);
  if (completion_tail_ - head >= kRingEntries) {
    broken_ = true;
    return false;
  }
  completion.code = static_cast<uint32_t>(status.code());
  completion.error_number = status.error_number();
  if (!status.is_ok()) {
    completion.message = completion_tail_ % kMessageCount;
    char* text = layout_->messages[completion.message];
    const size_t length = std::min<size_t>(status.message().size(), kMessageBytes - 1);
    std::memcpy(text, status.message().data(), length);
    text[length] = '\0';
  }
  std::memcpy(
      &layout_->completions[completion_tail_ % kRingEntries], &completion, sizeof(completion));
  ++completion_tail_;
  // Publishes the completion (release), and is ordered before the load of client_sleeping
  // (sequential consistency): either the client sees the new tail before it sleeps, or the server
  // sees that it sleeps.
  header().completion_tail.store(completion_tail_, std::memory_order_seq_cst);
  if (header().client_sleeping.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, &header().completion_tail, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  return true;
}

bool ServerRing::prepare_to_sleep() {
  // Ordered before the load of request_tail: either the server sees the request, or the client sees
  // that the server sleeps.
  header().server_sleeping.store(1, std::memory_order_seq_cst);
  return !broken_ && !is_paused_ &&
         header().request_tail.load(std::memory_order_seq_cst) != request_head_;
}

void ServerRing::want_release(bool wanted) {
  header().release_wanted.store(wanted ? 1 : 0, std::memory_order_seq_cst);
}

void ServerRing::end() {
  header().ended.store(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &header().completion_tail, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace memd
