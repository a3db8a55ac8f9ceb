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

#include "ring/protocol.h"

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
  if (header.magic != kSessionMagic || !is_protocol_spoken(header.protocol_version)) {
    ring.broken_ = true;
    return ring;
  }
  if (header.ended.load(std::memory_order_acquire) != 0) {
    return error(StatusCode::fenced, "the session was ended by the daemon before");
  }
  // The daemon's own words: a client that changed them gets wrong answers, as both are checked
  // against its own before they are used. They also tell whether the job's last grant was
  // announced.
  ring.request_head_ = header.request_head.load(std::memory_order_acquire);
  ring.completion_tail_ = header.completion_tail.load(std::memory_order_acquire);
  ring.use_head_ = header.use_head.load(std::memory_order_acquire);
  ring.want_use_after(0);
  // The daemon before accounted for both; this one has not yet.
  ring.set_in_group(false);
  ring.set_resident_call(0);
  ring.is_paused_ = true;
  ring.wake();
  ring.want_release(false);
  return ring;
}

void ServerRing::set_in_group(bool in_group) {
  in_group_ = in_group;
  header().in_group.store(in_group ? 1 : 0, std::memory_order_seq_cst);
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

uint64_t ServerRing::use_tail() const {
  const uint64_t written = layout_->header.use_tail.load(std::memory_order_acquire) - use_head_;
  return use_head_ + std::min<uint64_t>(written, kUseLogEntries);
}

bool ServerRing::take_uses(std::vector<Use>* uses, uint64_t count_max) {
  bool follows = true;
  const size_t count_before = uses->size();
  // Its client may be writing as fast as it is read.
  for (uint64_t count = 0; count < count_max && !broken_; ++count) {
    // Pairs with the store in ClientSession::note_use(): who has leased is seen to have.
    const uint64_t word = layout_->uses[use_head_ % kUseLogEntries].load(std::memory_order_acquire);
    const int distance = use_lap_distance(word, use_head_);
    if (distance < 0) break;
    if (distance > 0) {
      use_head_ = header().use_tail.load(std::memory_order_acquire);
      uses->resize(count_before);
      follows = false;
      continue;
    }
    const Use use{.shard_id = static_cast<uint32_t>(word),
                  .part = static_cast<Part>(word >> 36 & 0xf),
                  .mode = static_cast<LeaseMode>(word >> 40),
                  .is_resident = (word >> 32 & 0xf) != 0};
    if (use.part > Part::rank_sum || use.mode > LeaseMode::overwrite) {
      broken_ = true;
      break;
    }
    uses->push_back(use);
    ++use_head_;
  }
  header().use_head.store(use_head_, std::memory_order_release);
  return follows;
}

void ServerRing::want_use_after(uint64_t count) {
  use_wanted_ = count == 0 ? 0 : use_head_ + count;
  // Ordered before the look at the log in prepare_to_sleep(): either the client sees that the use
  // is wanted when it has written it, or the server sees the use.
  header().use_wanted.store(use_wanted_, std::memory_order_seq_cst);
}

bool ServerRing::wanted_use_came() {
  const auto is_written = [this](uint64_t index) {
    return use_lap_distance(layout_->uses[index % kUseLogEntries].load(std::memory_order_seq_cst),
                            index) >= 0;
  };
  // The thread that took the first place may write last. A use that can't be taken keeps nobody
  // awake.
  if (use_wanted_ == 0 || !is_written(use_head_) || !is_written(use_wanted_ - 1)) return false;
  use_wanted_ = 0;
  return true;
}

bool ServerRing::prepare_to_sleep() {
  // Ordered before the load of request_tail: either the server sees the request, or the client sees
  // that the server sleeps. So it is with the log of uses.
  header().server_sleeping.store(1, std::memory_order_seq_cst);
  if (broken_ || is_paused_) return false;
  return header().request_tail.load(std::memory_order_seq_cst) != request_head_ ||
         wanted_use_came();
}

void ServerRing::want_release(bool wanted) {
  header().release_wanted.store(wanted ? 1 : 0, std::memory_order_seq_cst);
}

void ServerRing::end() {
  header().ended.store(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &header().completion_tail, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace memd
