// Slots of gradients that are asked for before somebody comes for them.
#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "ring/client_session.h"

namespace memd {
namespace {

// How many, and how long the daemon keeps them. A lease that finds a failed one asks again.
constexpr size_t kAheadMax = 64;
constexpr uint64_t kAheadTimeoutNs = 5'000'000'000;

}  // namespace

void ClientSession::ask_ahead(std::span<const uint32_t> shard_ids) {
  if (!refuse_if_unusable().is_ok()) return;
  const std::lock_guard lock(mutex_);
  std::array<Request, kAheadMax> requests;
  size_t count = 0;
  for (const uint32_t shard_id : shard_ids) {
    // lease() asks where this does not, and says what is wrong.
    if (is_suspended_ || ahead_.size() == kAheadMax || !has_places(count + 1)) break;
    const bool is_asked = std::any_of(ahead_.begin(), ahead_.end(), [&](const auto& ahead) {
      return ahead->shard_id == shard_id;
    });
    if (is_asked) continue;
    auto ahead = std::make_unique<Ahead>();
    ahead->shard_id = shard_id;
    ahead->after_call = after_call_.load(std::memory_order_relaxed);
    requests[count] =
        request({.shard_id = shard_id, .part = Part::gradient, .mode = LeaseMode::overwrite},
                kAheadTimeoutNs,
                &ahead->asked);
    requests[count++].is_expected = 1;
    ahead_.push_back(std::move(ahead));
  }
  if (count == 0) return;
  MEMD_CHECK(submit(std::span(requests).first(count)).is_ok());  // there are places for them
}

bool ClientSession::take_ahead(const WantedLease& wanted, Asked* asked) {
  if (wanted.part != Part::gradient) return false;
  const auto found = std::find_if(ahead_.begin(), ahead_.end(), [&](const auto& ahead) {
    return ahead->shard_id == wanted.shard_id;
  });
  if (found == ahead_.end()) return false;
  const auto ahead = std::move(*found);
  ahead_.erase(found);
  if (wanted.mode != LeaseMode::overwrite ||
      ahead->after_call != after_call_.load(std::memory_order_relaxed)) {
    // A writer of the same bytes would wait for itself.
    forget_told(*ahead);
    return false;
  }
  *asked = std::move(ahead->asked);
  asked->is_expected = true;
  if (!asked->waiting.done) waiting_[asked->request_id] = &asked->waiting;
  return true;
}

void ClientSession::forget(Asked& asked) {
  take_completions();
  if (!asked.waiting.done) {
    waiting_.erase(asked.request_id);
    abandoned_[asked.request_id] = asked.waiting.pin;
    return;
  }
  if (asked.waiting.completion.code != 0) return;
  const uint32_t pin = asked.waiting.completion.pin;
  give_back(pin, asked.waiting.pin);
  held_.get()[pin % kPinCount].fetch_sub(asked.waiting.pin, std::memory_order_seq_cst);
}

bool ClientSession::forget_asked() {
  if (forks_.is_in_child()) return false;
  const std::lock_guard lock(mutex_);
  for (const auto& ahead : ahead_) forget_told(*ahead);
  return !std::exchange(ahead_, {}).empty();
}

// The daemon takes a gradient that was leased for writing for one that is there.
void ClientSession::forget_told(Ahead& ahead) {
  forget(ahead.asked);
  // Without a place for the hint its slot is taken until its next step, and nothing else.
  [[maybe_unused]] const Status status = send_hint(Opcode::gradient_unused, ahead.shard_id);
}

}  // namespace memd
