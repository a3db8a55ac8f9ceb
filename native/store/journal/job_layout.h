// Which shards a job has, as its ledger keeps it: a record, and the changes that were appended to
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "store/format/catalogue.h"

namespace memd {

/// `record` has no extents.
struct JobLayout {
  JobRecord record;
  std::vector<uint32_t> shard_ids;  // of record.shards
};

/// Shards of a job that came or went; parameters come in new buckets, and never go. An id can be in
/// both. Daemons of before the first parameter in a change refuse it as damaged.
struct LayoutChange {
  std::vector<uint32_t> removed;
  /// The job with them only, without any extent, generation or "written". Its buckets follow those
  /// that the job has, and its shards count them from 0.
  JobRecord added;
  std::vector<uint32_t> added_ids;
};

/// Changes of a job itself, and of shards that it has. Daemons of before the first one refuse it as
/// damaged.
struct LayoutFacts {
  /// As a catalogue describes the job itself, without shards and buckets; none: as before.
  std::optional<JobRecord> job;
  /// By a parameter's id: whether its optimizer state has a maximum.
  std::vector<std::pair<uint32_t, bool>> maxima;
  /// Their tiles have a place for maxima from here on.
  std::vector<uint32_t> buckets_with_maxima;
};

std::vector<std::byte> encode_layout(const JobRecord& record,
                                     const std::vector<uint32_t>& shard_ids);
/// `sequence` is that of the layout that it changes.
std::vector<std::byte> encode_change(const LayoutChange& change, uint64_t sequence);
std::vector<std::byte> encode_facts(const LayoutFacts& facts, uint64_t sequence);
/// `bytes` are the record, `record_bytes` long, and all changes that follow it.
Result<JobLayout> decode_layout(std::span<const std::byte> bytes,
                                uint64_t record_bytes,
                                uint64_t sequence,
                                uint64_t job_id);

}  // namespace memd
