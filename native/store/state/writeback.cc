#include "store/state/writeback.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"

namespace memd {
namespace {

/// The user wrote new bf16 values: those are the parameter exactly. Untouched values keep their
/// fp32 remainder.
void take_halves(const TileBytes& bytes) {
  auto* const half = reinterpret_cast<uint16_t*>(bytes.value);
  const auto* const written = reinterpret_cast<const uint16_t*>(bytes.arena_value);
  auto* const remainder = reinterpret_cast<int16_t*>(bytes.rest + bytes.elements * 8);
  for (uint64_t i = 0; i < bytes.elements; ++i) {
    if (half[i] != written[i]) remainder[i] = 0;
    half[i] = written[i];
  }
}

void copy_value(const TileBytes& bytes) {
  copy_bytes(bytes.value, bytes.arena_value, bytes.value_bytes);
}

/// Into the place of a tile of tier host.
void take_value(const TileBytes& bytes, DType dtype) {
  // Without a rest there is no remainder to keep.
  dtype == DType::bfloat16&& bytes.rest != nullptr ? take_halves(bytes) : copy_value(bytes);
}

}  // namespace

TileTask Writeback::value_task(Entry& entry, size_t index) {
  Bucket* const bucket =
      entry.kind() == EntryKind::parameter ? &parts_.shards.bucket(entry.owner()) : nullptr;
  TileTask task;
  task.entry = &entry;
  task.index = index;
  task.writes_value = true;
  task.work = copy_value;
  if (bucket != nullptr && bucket->is_host()) {
    task.bucket = bucket;
    task.work = [dtype = bucket->dtype](const TileBytes& bytes) { take_value(bytes, dtype); };
    return task;
  }
  const bool keeps_remainder = bucket != nullptr && bucket->dtype == DType::bfloat16 &&
                               bucket->rest[index].exists() && entry.replicas()[index].exists();
  if (keeps_remainder) {
    task.bucket = bucket;
    task.reads_value = true;
    task.reads_rest = true;
    task.writes_rest = true;
    task.work = take_halves;
  }
  return task;
}

void Writeback::write_back(Entry& entry, const std::shared_ptr<StepReport>& report, Done done) {
  MEMD_FAILPOINT("writeback.started");
  parts_.residencies.move(entry, Residency::dirty, Residency::draining);
  auto join = Join::start([this, &entry, done = std::move(done)](const Status& status) {
    end(entry, status);
    done(status);
  });
  for (size_t i = 0; i < entry.replicas().size(); ++i) {
    TileTask task = value_task(entry, i);
    task.report = report;
    task.done = join->branch();
    tasks_.submit(std::move(task));
  }
  join->finish(Status::ok());
}

void Writeback::end(Entry& entry, const Status& status) {
  MEMD_FAILPOINT("writeback.finished");
  if (status.is_ok() && entry.kind() == EntryKind::parameter) {
    for (const uint32_t id : parts_.shards.bucket(entry.owner()).shards) {
      parts_.shards[id].is_on_disk = parts_.shards[id].written;
    }
  }
  const Residency after = status.is_ok() ? Residency::clean : Residency::dirty;
  parts_.residencies.move(entry, Residency::draining, after);
  // A spilled extent is in no catalogue before the next commit.
  if (status.is_ok() && space_use_of(entry) == SpaceUse::state) parts_.durable.note_change();
}

bool Writeback::is_due(const Entry& entry, bool with_bytes) const {
  if (space_use_of(entry) != SpaceUse::state) return false;
  if (entry.residency() != Residency::dirty || entry.tier() != Tier::nvme) return false;
  if (entry.replicas().empty()) return false;
  if (entry.kind() == EntryKind::parameter) return true;
  // The buffer that a staged one replaced goes as soon as the step is committed.
  return with_bytes && parts_.shards[entry.owner()].written;
}

void Writeback::write_back_all(bool with_bytes,
                               const std::shared_ptr<StepReport>& report,
                               Done done) {
  parts_.residencies.await_dirty();
  write_back_awaited(with_bytes, report, Join::start(std::move(done)));
}

void Writeback::write_back_awaited(bool with_bytes,
                                   const std::shared_ptr<StepReport>& report,
                                   const std::shared_ptr<Join>& all) {
  for (size_t count = 0; count < kSubmittedMax; ++count) {
    Entry* const entry = parts_.residencies.take_awaited();
    if (entry == nullptr) return all->finish(Status::ok());
    if (is_due(*entry, with_bytes)) write_back(*entry, report, all->branch());
  }
  parts_.conditions.go_on(
      [this, with_bytes, report, all] { write_back_awaited(with_bytes, report, all); });
}

struct Writeback::Flush {
  uint64_t key_next = 0;
  std::optional<std::vector<uint32_t>> buckets;
  uint64_t dirtied_count = 0;  // when it was asked for: what became dirty later is not its concern
  std::shared_ptr<StepReport> report;
  std::shared_ptr<Join> all;
};

void Writeback::flush_tiles(std::optional<std::vector<uint32_t>> buckets,
                            const std::shared_ptr<StepReport>& report,
                            Done done) {
  MEMD_CHECK(!buckets || std::is_sorted(buckets->begin(), buckets->end()));
  flush_next(std::make_shared<Flush>(Flush{.buckets = std::move(buckets),
                                           .dirtied_count = parts_.tiles.dirtied_count(),
                                           .report = report,
                                           .all = Join::start(std::move(done))}));
}

void Writeback::flush_next(const std::shared_ptr<Flush>& flush) {
  size_t submitted_count = 0;
  for (size_t count = 0; count < kLookedAtMax && submitted_count < kSubmittedMax; ++count) {
    const auto dirty = parts_.tiles.next_dirty(flush->key_next);
    if (!dirty) return flush->all->finish(Status::ok());
    flush->key_next = dirty->key + 1;
    if (const auto& buckets = flush->buckets) {
      const uint32_t found = bucket_of(dirty->key);
      const auto bucket = std::lower_bound(buckets->begin(), buckets->end(), found);
      if (bucket == buckets->end()) return flush->all->finish(Status::ok());
      if (*bucket != found) {
        flush->key_next = tile_key(*bucket, 0);
        continue;
      }
    }
    if (dirty->dirtied_before >= flush->dirtied_count) continue;
    ++submitted_count;
    tasks_.submit_flush(dirty->key, flush->report, flush->all->branch());
  }
  parts_.conditions.go_on([this, flush] { flush_next(flush); });
}

}  // namespace memd
