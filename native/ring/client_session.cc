#include "ring/client_session.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/pause_cpu.h"
#include "base/streaming_copy.h"
#include "ring/protocol.h"

namespace memd {
namespace {

// One look at the connection takes as long as some leases.
constexpr uint64_t kHitsUnwatched = 1024;
// Spinning answers in well under a microsecond while the daemon's core is free; beyond 20 µs the
// daemon waits for a disk, and the core is better given to it.
constexpr uint64_t kSpinNs = 20'000;
// A module has a few parameters; a whole model that is gathered must not fill the ring.
constexpr size_t kLeasesTogether = 64;

// So many threads may pin one shard at one moment, each once, without a look at what others do.
constexpr uint32_t kResidentReadersMargin = 1u << 12;

Status given_up() {
  return error(
      StatusCode::fenced,
      "the daemon gave this session up (it detached, its job was dropped, or the daemon stopped); "
      "connect again");
}

Status daemon_has_ended() {
  return error(StatusCode::unavailable,
               "the daemon has ended; start it again and connect anew, the job stands at its last "
               "commit");
}

/// Zeros, of which only touched pages are memory.
std::atomic<uint32_t>* no_pins() {
  void* counters = std::calloc(kPinCount, sizeof(std::atomic<uint32_t>));
  MEMD_CHECK(counters != nullptr);
  return static_cast<std::atomic<uint32_t>*>(counters);
}

}  // namespace

Result<std::shared_ptr<ClientSession>> ClientSession::create(ClientSessionOptions options) {
  auto memory = SharedMemory::map(std::move(options.session), sizeof(SessionLayout));
  if (!memory.is_ok()) return memory.status();
  auto table = SharedMemory::map(std::move(options.table), sizeof(TableLayout));
  if (!table.is_ok()) return table.status();
  const auto* header = reinterpret_cast<const SessionHeader*>(memory.value().data());
  if (header->magic != kSessionMagic || !is_protocol_spoken(header->protocol_version)) {
    return error(StatusCode::invalid_argument,
                 "client and daemon speak different versions of the session protocol; install the "
                 "same version: ",
                 kProtocolVersion,
                 " here, ",
                 header->protocol_version,
                 " there");
  }
  auto arena = MappedArena::reserve(
      options.arena_reserved_bytes, options.segment_bytes, std::move(options.more_segments));
  if (!arena.is_ok()) return arena.status();
  auto views = ReadViews::reserve(arena.value()->base(), options.arena_reserved_bytes);
  if (!views.is_ok()) return views.status();
  return std::shared_ptr<ClientSession>(new ClientSession(std::move(memory).value(),
                                                          std::move(table).value(),
                                                          std::move(options),
                                                          std::move(arena).value(),
                                                          std::move(views).value()));
}

ClientSession::ClientSession(SharedMemory memory,
                             SharedMemory table,
                             ClientSessionOptions options,
                             std::unique_ptr<MappedArena> arena,
                             std::unique_ptr<ReadViews> views)
    : memory_(std::move(memory)),
      table_(std::move(table)),
      layout_(reinterpret_cast<SessionLayout*>(memory_.data())),
      rows_(reinterpret_cast<const TableLayout*>(table_.data())),
      doorbell_(std::move(options.doorbell)),
      connection_(std::move(options.connection)),
      arena_(std::move(arena)),
      reads_(std::move(views), forks_),
      held_(no_pins(), &std::free),
      stalls_(layout_->header.stalls, forks_) {}

ClientSession::~ClientSession() {
  if (!forks_.is_in_child()) return;
  memory_.forget();
  table_.forget();
}

Status ClientSession::refuse_if_unusable() const {
  if (forks_.is_in_child()) {
    return error(StatusCode::invalid_argument,
                 "this session belongs to the parent process; connect anew in the child: parent ",
                 forks_.pid(),
                 ", child ",
                 getpid());
  }
  if (closed_.load(std::memory_order_relaxed)) {
    return error(StatusCode::invalid_argument, "the session is closed; connect anew");
  }
  if (layout_->header.ended.load(std::memory_order_relaxed) != 0) return given_up();
  return Status::ok();
}

Status ClientSession::submit(std::span<const Request> requests) {
  const uint32_t head = layout_->header.request_head.load(std::memory_order_acquire);
  if (request_tail_ - head + requests.size() > kRingEntries) {
    return error(StatusCode::unavailable, "the daemon takes no requests: its ring is full");
  }
  for (const Request& request : requests) {
    std::memcpy(&layout_->requests[request_tail_ % kRingEntries], &request, sizeof(request));
    ++request_tail_;
  }
  // Publishes the entries to ServerRing::poll(), and is ordered before the load of server_sleeping:
  // see ServerRing::prepare_to_sleep().
  layout_->header.request_tail.store(request_tail_, std::memory_order_seq_cst);
  if (layout_->header.server_sleeping.load(std::memory_order_seq_cst) != 0) ring_doorbell();
  return Status::ok();
}

void ClientSession::ring_doorbell() noexcept {
  const uint64_t one = 1;
  // A full counter means that the doorbell rings already; there is nothing else that can go wrong
  // with an eventfd.
  [[maybe_unused]] const ssize_t written = write(doorbell_.get(), &one, sizeof(one));
}

void ClientSession::take_completions() {
  bool taken = false;
  for (;;) {
    const uint32_t tail = layout_->header.completion_tail.load(std::memory_order_acquire);
    if (tail == completion_head_) break;
    Completion completion;
    std::memcpy(
        &completion, &layout_->completions[completion_head_ % kRingEntries], sizeof(completion));
    ++completion_head_;
    if (const auto found = waiting_.find(completion.request_id); found != waiting_.end()) {
      found->second->completion = completion;
      found->second->done = true;
      if (completion.code == 0) {
        held_.get()[completion.pin % kPinCount].fetch_add(found->second->pin,
                                                          std::memory_order_relaxed);
      } else {
        const char* text = layout_->messages[completion.message % kMessageCount];
        found->second->message.assign(text, strnlen(text, kMessageBytes));
      }
      waiting_.erase(found);
      taken = true;
    } else if (const auto late = abandoned_.find(completion.request_id); late != abandoned_.end()) {
      if (completion.code == 0) give_back(completion.pin, late->second);
      abandoned_.erase(late);
    }
    layout_->header.completion_head.store(completion_head_, std::memory_order_release);
  }
  if (taken) completed_.notify_all();
}

Status ClientSession::wait_for(uint64_t request_id, uint64_t timeout_ns, Waiting* result) {
  const SteadyClock clock;
  const uint64_t start_ns = clock.now_ns();
  auto& header = layout_->header;
  for (;;) {
    std::unique_lock lock(mutex_);
    take_completions();
    if (result->done) return Status::ok();
    if (result->is_given_up) return daemon_has_ended();
    if (header.ended.load(std::memory_order_seq_cst) != 0) {
      waiting_.erase(request_id);
      return given_up();
    }
    const uint64_t waited_ns = clock.now_ns() - start_ns;
    // The daemon answers at the deadline itself and says on what it waited; the extra second is for
    // a daemon that is gone.
    if (waited_ns > timeout_ns + 1'000'000'000) {
      waiting_.erase(request_id);
      abandoned_[request_id] = result->pin;
      return error(StatusCode::unavailable,
                   "the daemon did not answer within ",
                   waited_ns / 1'000'000,
                   " ms");
    }
    if (waited_ns < kSpinNs) {
      const uint32_t seen = completion_head_;
      lock.unlock();
      while (clock.now_ns() - start_ns < kSpinNs &&
             header.completion_tail.load(std::memory_order_relaxed) == seen) {
        pause_cpu();
      }
      continue;
    }
    if (someone_waits_in_kernel_) {
      // Another thread sleeps on the futex and will take our completion with its own.
      completed_.wait_for(lock, std::chrono::milliseconds(10));
      continue;
    }
    someone_waits_in_kernel_ = true;
    const uint32_t seen = completion_head_;
    lock.unlock();
    header.client_sleeping.store(1, std::memory_order_seq_cst);
    if (header.completion_tail.load(std::memory_order_seq_cst) == seen) {
      const timespec at_most{.tv_sec = 0, .tv_nsec = 100'000'000};
      syscall(SYS_futex, &header.completion_tail, FUTEX_WAIT, seen, &at_most, nullptr, 0);
    }
    header.client_sleeping.store(0, std::memory_order_seq_cst);
    const bool gone = daemon_is_gone();
    lock.lock();
    someone_waits_in_kernel_ = false;
    take_completions();
    completed_.notify_all();
    if (gone && !result->done && !result->is_given_up) {
      waiting_.erase(request_id);
      return daemon_has_ended();
    }
  }
}

bool ClientSession::daemon_is_gone() const {
  const std::lock_guard lock(connection_mutex_);
  if (!connection_.is_open()) return false;
  pollfd other_end{.fd = connection_.get(), .events = 0, .revents = 0};
  return poll(&other_end, 1, 0) == 1 && (other_end.revents & (POLLHUP | POLLERR)) != 0;
}

void ClientSession::suspend() {
  if (forks_.is_in_child()) return;
  const std::lock_guard lock(mutex_);
  is_suspended_ = true;
  take_completions();
  for (const auto& ahead : ahead_) forget(ahead->asked);
  ahead_.clear();
  for (const auto& [request_id, waiting] : waiting_) waiting->is_given_up = true;
  waiting_.clear();
  completed_.notify_all();
}

void ClientSession::reconnect(OwnedFd connection) {
  if (forks_.is_in_child()) return;
  const std::lock_guard lock(mutex_);
  MEMD_CHECK(is_suspended_);
  take_completions();
  // A few instructions each. A lease that begins now sees that the session is suspended.
  while (resident_leases_.load(std::memory_order_seq_cst) != 0) sched_yield();
  // The next daemon drops what was asked of the one before: nobody answers these any more.
  abandoned_.clear();
  give_back_untold_pins();
  {
    const std::lock_guard swap(connection_mutex_);
    if (!closed_.load(std::memory_order_relaxed)) connection_ = std::move(connection);
  }
  is_suspended_ = false;
}

void ClientSession::close() {
  closed_.store(true, std::memory_order_relaxed);
  const std::lock_guard lock(connection_mutex_);
  connection_ = OwnedFd();
}

void ClientSession::give_back_untold_pins() {
  for (uint32_t index = 0; index < kPinCount; ++index) {
    // In this order, the reverse of release(): who gives back meanwhile makes the shared one look
    // smaller, and never larger.
    const uint32_t held = held_.get()[index].load(std::memory_order_seq_cst);
    const uint32_t shared = layout_->pins[index].load(std::memory_order_seq_cst);
    if (pin_readers(shared) > pin_readers(held))
      give_back(index, kReaderPin * (pin_readers(shared) - pin_readers(held)));
    if (pin_writers(shared) > pin_writers(held))
      give_back(index, kWriterPin * (pin_writers(shared) - pin_writers(held)));
  }
}

bool ClientSession::begin_resident_lease() noexcept {
  resident_leases_.fetch_add(1, std::memory_order_seq_cst);
  // Ordered after the count: either reconnect(), which is called when it is suspended, waits for
  // us, or we see that.
  if (!is_suspended_.load(std::memory_order_seq_cst)) return true;
  end_resident_lease();
  return false;
}

std::optional<LeasedBytes> ClientSession::lease_resident(uint32_t shard_id) noexcept {
  if (shard_id >= kTableRows || forks_.is_in_child()) return std::nullopt;
  if (closed_.load(std::memory_order_relaxed)) return std::nullopt;
  if (layout_->header.ended.load(std::memory_order_relaxed) != 0) return std::nullopt;
  if (!begin_resident_lease()) return std::nullopt;
  const PinWords<std::atomic> words{.counters = layout_->pins,
                                    .counter_count = kPinCount,
                                    .release_wanted = layout_->header.release_wanted,
                                    .requests_only = layout_->header.requests_only,
                                    .resident_call = layout_->header.resident_call,
                                    .in_group = layout_->header.in_group,
                                    .after_call = after_call_.load(std::memory_order_relaxed)};
  const auto place = pin_resident(
      rows_->rows[shard_id],
      words,
      [this](uint32_t pin) {
        // Before the shared one: who compares them must not find a pin there that is not here. Far
        // enough below the limit for every thread to add one at once.
        const uint32_t before = held_.get()[pin].fetch_add(kReaderPin, std::memory_order_seq_cst);
        if (pin_readers(before) < kPinReadersMax - kResidentReadersMargin) return true;
        held_.get()[pin].fetch_sub(kReaderPin, std::memory_order_seq_cst);
        return false;
      },
      [this](uint32_t pin) { held_.get()[pin].fetch_sub(kReaderPin, std::memory_order_seq_cst); },
      [this] { ring_doorbell(); });
  end_resident_lease();
  if (!place) return std::nullopt;
  LeasedBytes lease{.data = nullptr,
                    .length_bytes = place->length_bytes,
                    .generation = place->generation,
                    .pin_index = place->pin,
                    .pin = kReaderPin,
                    .shard_id = shard_id};
  leases_held_.fetch_add(1, std::memory_order_relaxed);
  if (!arena_->has(place->offset_bytes, place->length_bytes)) {
    // A segment has to be mapped first, which waits.
    release(lease);
    return std::nullopt;
  }
  const uint64_t hits = hits_.fetch_add(1, std::memory_order_relaxed);
  note_use(shard_id, Part::value, LeaseMode::read, true);
  if (hits % kHitsUnwatched == kHitsUnwatched - 1 && daemon_is_gone()) {
    // Nobody changes the table any more: by request it is found out what has become of the job.
    release(lease);
    return std::nullopt;
  }
  if (reads_.begin(place->offset_bytes, &lease)) return lease;
  release(lease);
  return std::nullopt;  // by request the caller learns why
}

Result<LeasedBytes> ClientSession::lease(
    uint32_t shard_id, Part part, LeaseMode mode, uint64_t timeout_ns, StallPlace place) {
  if (part == Part::value && mode == LeaseMode::read) {
    if (const auto resident = lease_resident(shard_id)) return *resident;
  }
  return lease_by_request(shard_id, part, mode, timeout_ns, place);
}

Result<LeasedBytes> ClientSession::lease_by_request(
    uint32_t shard_id, Part part, LeaseMode mode, uint64_t timeout_ns, StallPlace place) {
  const WantedLease wanted{
      .shard_id = shard_id, .part = part, .mode = mode, .stall_group = place.group};
  Asked asked;
  ask_and_wait({&wanted, 1}, {&asked, 1}, timeout_ns, place.phase);
  return finish(wanted, asked);
}

std::vector<Result<LeasedBytes>> ClientSession::lease_together(
    const std::vector<WantedLease>& wanted, uint64_t timeout_ns, StallPhase phase) {
  std::vector<Result<LeasedBytes>> leases;
  leases.reserve(wanted.size());
  for (size_t begin = 0; begin < wanted.size(); begin += kLeasesTogether) {
    const std::span some =
        std::span(wanted).subspan(begin, std::min(kLeasesTogether, wanted.size() - begin));
    std::vector<Asked> asked(some.size());
    ask_and_wait(some, asked, timeout_ns, phase);
    for (size_t i = 0; i < some.size(); ++i) leases.push_back(finish(some[i], asked[i]));
  }
  return leases;
}

Status ClientSession::overwrite_gradient(const WantedLease& wanted,
                                         std::span<const std::byte> bytes,
                                         uint64_t timeout_ns,
                                         StallPhase phase) {
  MEMD_CHECK(wanted.part == Part::gradient && wanted.mode == LeaseMode::overwrite);
  Asked asked;
  ask_and_wait({&wanted, 1}, {&asked, 1}, timeout_ns, phase);
  const auto lease = finish(wanted, asked);
  if (!lease.is_ok()) return lease.status();
  const bool fits = lease.value().length_bytes == bytes.size();
  if (fits) copy_past_caches(lease.value().data, bytes);
  release(lease.value());
  if (fits) return Status::ok();
  return error(StatusCode::invalid_argument,
               "the gradient does not fit the shard: ",
               bytes.size(),
               " bytes against ",
               lease.value().length_bytes);
}

Status ClientSession::ask(std::span<const WantedLease> wanted,
                          std::span<Asked> asked,
                          uint64_t start_ns,
                          uint64_t timeout_ns) {
  const SteadyClock clock;
  std::unique_lock lock(mutex_);
  while (!is_suspended_ && !has_places(wanted.size())) {
    if (layout_->header.ended.load(std::memory_order_seq_cst) != 0) return given_up();
    if (clock.now_ns() - start_ns >= timeout_ns) {
      return error(StatusCode::unavailable,
                   "too many leases wait at once, or the daemon takes no requests: ",
                   waiting_.size(),
                   " wait");
    }
    take_completions();
    completed_.wait_for(lock, std::chrono::milliseconds(1));
  }
  if (is_suspended_) return daemon_has_ended();
  std::array<Request, kLeasesTogether> requests{};
  size_t count = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!take_ahead(wanted[i], &asked[i]))
      requests[count++] = request(wanted[i], timeout_ns, &asked[i]);
  }
  if (count == 0) return Status::ok();
  const Status status = submit(std::span(requests).first(count));
  if (!status.is_ok()) {
    for (Asked& each : asked)
      each.is_expected ? forget(each) : void(waiting_.erase(each.request_id));
  }
  return status;
}

bool ClientSession::has_places(size_t count) const {
  // Half of the ring: completions have to find room too.
  const uint32_t head = layout_->header.request_head.load(std::memory_order_acquire);
  return waiting_.size() + abandoned_.size() + count <= kRingEntries / 2 &&
         request_tail_ - head + count <= kRingEntries;
}

Request ClientSession::request(const WantedLease& wanted, uint64_t timeout_ns, Asked* asked) {
  asked->waiting.pin = wanted.mode == LeaseMode::read ? kReaderPin : kWriterPin;
  asked->request_id = request_id_next_++;
  waiting_[asked->request_id] = &asked->waiting;
  Request request{};
  request.request_id = asked->request_id;
  request.opcode = Opcode::lease;
  request.shard_id = wanted.shard_id;
  request.part = wanted.part;
  request.mode = wanted.mode;
  request.timeout_ns = timeout_ns;
  request.after_call = wanted.follows ? after_call_.load(std::memory_order_relaxed) : 0;
  return request;
}

void ClientSession::ask_and_wait(std::span<const WantedLease> wanted,
                                 std::span<Asked> asked,
                                 uint64_t timeout_ns,
                                 StallPhase phase) {
  timeout_ns = std::min(timeout_ns, kTimeoutNsMax);
  const SteadyClock clock;
  const uint64_t start_ns = clock.now_ns();
  Status status = refuse_if_unusable();
  if (status.is_ok()) status = ask(wanted, asked, start_ns, timeout_ns);
  if (!status.is_ok()) {
    for (Asked& each : asked) each.status = status;
  }
  uint64_t counted_ns = start_ns;
  for (size_t i = 0; i < asked.size(); ++i) {
    if (status.is_ok())
      asked[i].status = wait_for(asked[i].request_id, timeout_ns, &asked[i].waiting);
    // The caller stands still once for all of them: each counts what it kept the caller after the
    // one before it.
    const uint64_t now_ns = clock.now_ns();
    const uint64_t waited_ns = now_ns - std::exchange(counted_ns, now_ns);
    lease_wait_ns_.fetch_add(waited_ns, std::memory_order_relaxed);
    const StallPlace place{.phase = phase, .group = wanted[i].stall_group};
    const Completion& completion = asked[i].waiting.completion;
    const uint64_t told_ns =
        asked[i].waiting.done ? std::min<uint64_t>(completion.wait_ns, waited_ns) : 0;
    if (told_ns != 0) stalls_.note(place, completion.wait_reason % kLeaseWaitCount, told_ns);
    stalls_.note(place, kStallRing, waited_ns - told_ns);
  }
  for (size_t i = 0; i < asked.size(); ++i) {
    if (!asked[i].status.is_ok()) continue;
    // The outcome of an earlier question is no answer to this one: its deadline was another, and
    // other leases were held. And slots that are asked for ahead may be the room that this one
    // lacks.
    const auto code = static_cast<StatusCode>(asked[i].waiting.completion.code);
    const bool is_no_answer = code != StatusCode::ok && asked[i].is_expected;
    if (!is_no_answer && !(code == StatusCode::capacity && forget_asked())) continue;
    asked[i] = {};
    ask_and_wait(wanted.subspan(i, 1), asked.subspan(i, 1), timeout_ns, phase);
  }
}

Result<LeasedBytes> ClientSession::finish(const WantedLease& wanted, Asked& asked) {
  if (!asked.status.is_ok()) return asked.status;
  const Completion& completion = asked.waiting.completion;
  if (completion.code != 0) {
    return Status(static_cast<StatusCode>(completion.code),
                  std::move(asked.waiting.message),
                  completion.error_number);
  }
  lease_count_.fetch_add(1, std::memory_order_relaxed);
  if (completion.wait_ns == 0) granted_at_once_.fetch_add(1, std::memory_order_relaxed);
  leases_held_.fetch_add(1, std::memory_order_relaxed);
  LeasedBytes lease{.data = arena_->base() + completion.offset_bytes,
                    .length_bytes = completion.length_bytes,
                    .generation = completion.generation,
                    .pin_index = completion.pin,
                    .pin = asked.waiting.pin,
                    .shard_id = wanted.shard_id};
  if (Status status = arena_->map_up_to(completion.offset_bytes + completion.length_bytes, reads_);
      !status.is_ok()) {
    release(lease);
    return status;
  }
  const bool is_for_reading = wanted.part == Part::value && wanted.mode == LeaseMode::read;
  if (is_for_reading && !reads_.begin(completion.offset_bytes, &lease)) {
    release(lease);
    return device_error(ENOMEM,
                        concat("a second view of bytes that this process has written, which needs ",
                               lease.length_bytes,
                               " bytes of its own"));
  }
  note_use(wanted.shard_id, wanted.part, wanted.mode, false);
  return lease;
}

void ClientSession::release(const LeasedBytes& lease) noexcept {
  // rings and counters are not mapped in a child
  if (forks_.is_in_child()) return;
  if (lease.is_view && !reads_.end(lease)) return;
  give_back(lease.pin_index, lease.pin);
  held_.get()[lease.pin_index % kPinCount].fetch_sub(lease.pin, std::memory_order_seq_cst);
  leases_held_.fetch_sub(1, std::memory_order_relaxed);
}

void ClientSession::give_back(uint32_t pin_index, uint32_t pin) noexcept {
  unpin(layout_->pins[pin_index % kPinCount], pin, layout_->header.release_wanted, [this] {
    ring_doorbell();
  });
}

void ClientSession::note_use(uint32_t shard_id,
                             Part part,
                             LeaseMode mode,
                             bool is_resident) noexcept {
  auto& header = layout_->header;
  const uint64_t index = header.use_tail.fetch_add(1, std::memory_order_relaxed);
  // Ordered before the loads: see ServerRing::want_use_after() and prepare_to_sleep().
  layout_->uses[index % kUseLogEntries].store(use_word(index, shard_id, part, mode, is_resident),
                                              std::memory_order_seq_cst);
  const uint64_t wanted = header.use_wanted.load(std::memory_order_seq_cst);
  if (wanted == 0 || index + 1 < wanted) return;
  if (header.server_sleeping.load(std::memory_order_seq_cst) == 0) return;
  if (header.use_wanted.exchange(0, std::memory_order_seq_cst) != 0) ring_doorbell();
}

Status ClientSession::prefetch(uint32_t shard_id) { return hint(Opcode::prefetch, shard_id); }

Status ClientSession::gradient_is_final(uint32_t shard_id) {
  return hint(Opcode::gradient_is_final, shard_id);
}

Status ClientSession::hint(Opcode opcode, uint32_t shard_id) {
  if (Status status = refuse_if_unusable(); !status.is_ok()) return status;
  const std::lock_guard lock(mutex_);
  if (is_suspended_) return daemon_has_ended();
  return send_hint(opcode, shard_id);
}

Status ClientSession::send_hint(Opcode opcode, uint32_t shard_id) {
  Request request{};
  request.opcode = opcode;
  request.shard_id = shard_id;
  request.after_call = after_call_.load(std::memory_order_relaxed);
  const uint32_t head = layout_->header.request_head.load(std::memory_order_acquire);
  if (request_tail_ - head >= kRingEntries / 2) return Status::ok();  // leases come first
  return submit({&request, 1});
}

ClientStatistics ClientSession::statistics() const {
  const uint64_t hits = hits_.load(std::memory_order_relaxed);
  return {.lease_count = lease_count_.load(std::memory_order_relaxed) + hits,
          .hits = hits,
          .resident_count = granted_at_once_.load(std::memory_order_relaxed) + hits,
          .lease_wait_ns = lease_wait_ns_.load(std::memory_order_relaxed),
          .stalls = stalls_.sums(),
          .leases_held = leases_held_.load(std::memory_order_relaxed)};
}

}  // namespace memd
