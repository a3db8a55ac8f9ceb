#include "store/scrub.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "base/check.h"

namespace memd {
namespace {

// What is small is not read again and again.
constexpr uint64_t kPassIntervalNs = 3600ull * 1'000'000'000;
// Places looked at in one turn: most of a job without durability are named by no catalogue, and
// leases are not to wait for the walk over them.
constexpr int kPlacesInTurn = 1000;

bool same(const ExtentRecord& a, const ExtentRecord& b) {
  return a.address.device == b.address.device && a.address.offset_bytes == b.address.offset_bytes &&
         a.length_bytes == b.length_bytes && a.checksum == b.checksum;
}

}  // namespace

void Scrub::set_rate(uint64_t bytes_per_second) {
  rate_ = bytes_per_second;
  // What was read before does not hold back a faster one.
  due_ns_ = std::min(due_ns_, parts_.clock.now_ns());
  if (rate_ == 0 && !reading_) buffer_.reset();
}

uint64_t Scrub::next_ns() const {
  if (rate_ == 0 || reading_) return 0;
  return std::max<uint64_t>(in_pass_ ? due_ns_ : std::max(due_ns_, pass_due_ns_), 1);
}

bool Scrub::advance() {
  const uint64_t now_ns = parts_.clock.now_ns();
  if (rate_ == 0 || reading_ || now_ns < due_ns_) return false;
  if (!in_pass_ && now_ns < pass_due_ns_) return false;
  if (!in_pass_) begin_pass();
  const std::optional<ExtentRecord> extent = walk();
  if (extent) {
    read(*extent);
    return true;
  }
  return in_pass_;
}

void Scrub::begin_pass() {
  in_pass_ = true;
  pass_due_ns_ = parts_.clock.now_ns() + kPassIntervalNs;
  cursor_ = {};
  statistics_.pass_bytes = 0;
  statistics_.pass_bytes_all = 0;
  for (const auto& [job_id, job] : parts_.jobs) {
    job->for_each_replica([this](const Replica& replica) {
      if (replica.referenced) statistics_.pass_bytes_all += replica.extent.length_bytes;
    });
  }
}

const Job* Scrub::find(uint64_t job_id) const {
  const auto found = parts_.jobs.find(job_id);
  // Of a job that is being dropped nothing is missed.
  return found == parts_.jobs.end() || found->second->ending ? nullptr : found->second.get();
}

std::optional<ExtentRecord> Scrub::named(const Place& place) const {
  if (place.kind == Kind::catalogue) {
    const std::span<const ExtentRecord> extents = parts_.commits.catalogue(place.job_id);
    if (place.index >= extents.size()) return std::nullopt;
    return extents[place.index];
  }
  const Job* const job = find(place.job_id);
  if (job == nullptr) return std::nullopt;
  const std::vector<Replica>* replicas = nullptr;
  if (place.kind == Kind::value) {
    const bool exists = place.owner < job->entries.size() && job->entries[place.owner] != nullptr;
    if (exists) replicas = &job->entries[place.owner]->replicas;
  } else if (place.owner < job->buckets.size()) {
    replicas = &job->buckets[place.owner].rest;
  }
  if (replicas == nullptr || place.index >= replicas->size()) return std::nullopt;
  const Replica& replica = (*replicas)[place.index];
  if (!replica.referenced || !replica.extent.exists()) return std::nullopt;
  return replica.extent;
}

std::optional<ExtentRecord> Scrub::walk() {
  for (int looked = 0; looked < kPlacesInTurn; ++looked) {
    const auto found = named(cursor_);
    // Where the cursor goes on: within its owner, else to the next owner, kind or job.
    const Job* const job = find(cursor_.job_id);
    size_t index_count = 0;
    size_t owner_count = 1;
    if (cursor_.kind == Kind::catalogue) {
      index_count = parts_.commits.catalogue(cursor_.job_id).size();
    } else if (job != nullptr && cursor_.kind == Kind::value) {
      owner_count = job->entries.size();
      const bool exists = cursor_.owner < owner_count && job->entries[cursor_.owner] != nullptr;
      if (exists) index_count = job->entries[cursor_.owner]->replicas.size();
    } else if (job != nullptr) {
      owner_count = job->buckets.size();
      if (cursor_.owner < owner_count) index_count = job->buckets[cursor_.owner].rest.size();
    }
    if (found) return found;
    if (cursor_.index + 1 < index_count) {
      ++cursor_.index;
      continue;
    }
    cursor_.index = 0;
    if (job != nullptr && cursor_.owner + 1 < owner_count) {
      ++cursor_.owner;
      continue;
    }
    cursor_.owner = 0;
    if (job != nullptr && cursor_.kind != Kind::rest) {
      cursor_.kind = cursor_.kind == Kind::catalogue ? Kind::value : Kind::rest;
      continue;
    }
    cursor_.kind = Kind::catalogue;
    uint64_t next = std::numeric_limits<uint64_t>::max();
    for (const auto& [job_id, each] : parts_.jobs) {
      if (job_id > cursor_.job_id) next = std::min(next, job_id);
    }
    if (next == std::numeric_limits<uint64_t>::max()) {
      in_pass_ = false;
      buffer_.reset();
      last_pass_ns_ = parts_.clock.now_ns();
      ++statistics_.pass_count;
      return std::nullopt;
    }
    cursor_.job_id = next;
  }
  return std::nullopt;
}

bool Scrub::still_named(const ExtentRecord& extent) const {
  const auto now = named(cursor_);
  return now && same(*now, extent);
}

void Scrub::read(const ExtentRecord& extent) {
  reading_ = true;
  if (buffer_ == nullptr || buffer_->span().size() < extent.length_bytes) {
    buffer_ = std::make_unique<BlockBytes>(uint64_t{extent.length_bytes});
  }
  const std::span<std::byte> into = buffer_->span().first(extent.length_bytes);
  parts_.extents.read_unverified(
      extent, into, IoPriority::scrub, [this, extent, into](const Status& status) {
        if (!status.is_ok()) return compared(extent, false, false);
        parts_.workers.submit(
            [this, extent, into] { matches_ = ExtentStore::matches(extent, into); },
            [this, extent] { compared(extent, matches_, true); });
      });
}

void Scrub::compared(const ExtentRecord& extent, bool is_whole, bool was_read) {
  // Released meanwhile, its place may hold anything.
  if (is_whole || !still_named(extent)) return finish_read(extent);
  if (was_read) parts_.extents.count_checksum_failure(extent);
  parts_.extents.read_again(extent,
                            buffer_->span().first(extent.length_bytes),
                            IoPriority::scrub,
                            describe(),
                            [this, extent](const Status& status) { read_twice(extent, status); });
}

void Scrub::read_twice(const ExtentRecord& extent, const Status& status) {
  if (status.code() == StatusCode::integrity && still_named(extent)) {
    ++statistics_.errors;
    statistics_.last_error = status.message();
    if (cursor_.kind == Kind::catalogue) {
      parts_.write_anew(cursor_.job_id);
    } else if (!is_being_replaced()) {
      Job& job = *parts_.jobs.at(cursor_.job_id);
      const Entry& entry = cursor_.kind == Kind::value ? *job.entries[cursor_.owner]
                                                       : *job.buckets[cursor_.owner].value;
      job.lose(entry, cursor_.index, status);
    }
  }
  finish_read(extent);
}

bool Scrub::is_being_replaced() const {
  const Job& job = *find(cursor_.job_id);
  if (cursor_.kind == Kind::rest) {
    return job.is_tile_dirty(*job.buckets[cursor_.owner].value, cursor_.index);
  }
  const Entry& entry = *job.entries[cursor_.owner];
  return entry.residency() == Residency::dirty || entry.residency() == Residency::draining ||
         job.is_tile_dirty(entry, cursor_.index);
}

std::string Scrub::describe() const {
  if (cursor_.kind == Kind::catalogue) {
    return cursor_.job_id == 0 ? "the list of jobs"
                               : concat("the catalogue of job ", cursor_.job_id);
  }
  const Job& job = *find(cursor_.job_id);
  if (cursor_.kind == Kind::value) {
    return concat("shard ", job.describe(*job.entries[cursor_.owner], cursor_.index));
  }
  return concat("shard ",
                job.describe(*job.buckets[cursor_.owner].value, cursor_.index),
                ", optimizer state of tile ",
                cursor_.index);
}

void Scrub::finish_read(const ExtentRecord& extent) {
  reading_ = false;
  ++cursor_.index;
  statistics_.bytes += extent.length_bytes;
  if (cursor_.kind != Kind::catalogue) statistics_.pass_bytes += extent.length_bytes;
  if (rate_ == 0) {
    buffer_.reset();
    return;
  }
  // From here on: what a busy disk held up is not made up for.
  due_ns_ = parts_.clock.now_ns() + static_cast<uint64_t>(static_cast<double>(extent.length_bytes) *
                                                          1e9 / static_cast<double>(rate_));
}

ScrubStatistics Scrub::statistics() const {
  ScrubStatistics out = statistics_;
  out.bytes_per_second = rate_;
  out.in_pass = in_pass_;
  // Jobs grow and go during a pass.
  out.pass_bytes_all = std::max(out.pass_bytes_all, out.pass_bytes);
  if (out.pass_count > 0) out.last_pass_age_ns = parts_.clock.now_ns() - last_pass_ns_;
  return out;
}

}  // namespace memd
