#include "store/verify/scrub.h"

#include <algorithm>

namespace memd {
namespace {

// A small job is not read again and again.
constexpr uint64_t kPassIntervalNs = 3600ull * 1'000'000'000;

}  // namespace

void Scrub::set_rate(uint64_t bytes_per_second) {
  rate_ = bytes_per_second;
  // Bytes that were read before do not hold back a faster one.
  due_ns_ = std::min(due_ns_, clock_.now_ns());
  if (rate_ == 0 && is_idle()) verification_.free_memory();
}

uint64_t Scrub::next_ns() const {
  if (rate_ == 0 || !is_idle()) return 0;
  return std::max<uint64_t>(in_pass_ ? due_ns_ : std::max(due_ns_, pass_due_ns_), 1);
}

bool Scrub::advance() {
  if (rate_ == 0 || !is_idle()) return false;
  const uint64_t now_ns = clock_.now_ns();
  if (now_ns < due_ns_ || (!in_pass_ && now_ns < pass_due_ns_)) return false;
  if (!in_pass_) begin_pass();
  const auto found = walk_.next();
  if (found && extents_.is_whole(found->extent, pass_)) {
    const uint64_t bytes = found->extent.length_bytes;
    statistics_.pass_bytes_all -= std::min(statistics_.pass_bytes_all, bytes);
    return true;
  }
  if (found) {
    verification_.begin(
        *found, pass_, [this, found = *found](Verdict verdict, const Status& status) {
          told(found, verdict, status);
        });
    return true;
  }
  if (walk_.at_end()) end_pass();
  return in_pass_;
}

void Scrub::begin_pass() {
  in_pass_ = true;
  pass_due_ns_ = clock_.now_ns() + kPassIntervalNs;
  walk_.begin();
  pass_ = extents_.begin_verification();
  statistics_.pass_bytes = 0;
  statistics_.pass_bytes_all = 0;
  for (const uint64_t job_id : places_.jobs().ids()) {
    statistics_.pass_bytes_all += places_.state_bytes(job_id);
  }
}

void Scrub::end_pass() {
  in_pass_ = false;
  verification_.free_memory();
  last_pass_ns_ = clock_.now_ns();
  ++statistics_.pass_count;
}

void Scrub::told(const ExtentWalk::Found& found, Verdict verdict, const Status& status) {
  if (verdict != Verdict::whole && verdict != Verdict::released) {
    ++statistics_.errors;
    statistics_.last_error = status.message();
  }
  const uint64_t bytes = found.extent.length_bytes;
  statistics_.bytes += bytes;
  if (found.place.kind != ExtentPlace::Kind::catalogue) statistics_.pass_bytes += bytes;
  if (rate_ == 0) return verification_.free_memory();
  // From here on: what a busy disk held up is not made up for.
  due_ns_ = clock_.now_ns() +
            static_cast<uint64_t>(static_cast<double>(bytes) * 1e9 / static_cast<double>(rate_));
}

ScrubStatistics Scrub::statistics() const {
  ScrubStatistics out = statistics_;
  out.bytes_per_second = rate_;
  out.in_pass = in_pass_;
  // Jobs grow and go during a pass.
  out.pass_bytes_all = std::max(out.pass_bytes_all, out.pass_bytes);
  if (out.pass_count > 0) out.last_pass_age_ns = clock_.now_ns() - last_pass_ns_;
  return out;
}

}  // namespace memd
