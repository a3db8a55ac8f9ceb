#include "powercut/state.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>

#include "base/clock.h"
#include "base/owned_fd.h"
#include "base/units.h"
#include "base/workers.h"
#include "powercut/image_queue.h"
#include "powercut/volumes.h"
#include "store/space/commit.h"

namespace memd::powercut {
namespace {

void put(std::vector<std::byte>& out, const void* bytes, size_t count) {
  const auto* first = static_cast<const std::byte*>(bytes);
  out.insert(out.end(), first, first + count);
}
void put(std::vector<std::byte>& out, uint64_t value) { put(out, &value, sizeof(value)); }
void put(std::vector<std::byte>& out, const std::string& text) {
  put(out, text.size());
  put(out, text.data(), text.size());
}
void put(std::vector<std::byte>& out, const std::vector<std::byte>& bytes) {
  put(out, bytes.size());
  put(out, bytes.data(), bytes.size());
}
void put(std::vector<std::byte>& out, const ShardState& shard) {
  put(out, shard.name);
  put(out, static_cast<uint64_t>(shard.kind));
  put(out, static_cast<uint64_t>(shard.dtype));
  put(out, shard.shape.size());
  for (const uint64_t size : shard.shape) put(out, size);
  put(out, shard.generation);
  put(out, uint64_t{shard.written});
  for (const auto* bytes : {&shard.value, &shard.exp_avg, &shard.exp_avg_sq, &shard.remainder}) {
    put(out, *bytes);
  }
}

std::string difference(const ShardState& expected, const ShardState& found) {
  if (!found.lost.is_ok()) return "is lost: " + found.lost.message();
  if (expected.kind != found.kind || expected.dtype != found.dtype ||
      expected.shape != found.shape) {
    return "has another kind, dtype or shape";
  }
  if (expected.generation != found.generation) {
    return concat("generation: ", found.generation, " instead of ", expected.generation);
  }
  if (expected.written != found.written) {
    return concat("written: ", found.written, " instead of ", expected.written);
  }
  const auto bytes = [](const char* what,
                        const std::vector<std::byte>& wanted,
                        const std::vector<std::byte>& got) -> std::string {
    if (wanted == got) return {};
    if (wanted.size() != got.size()) {
      return concat(what, ": ", got.size(), " bytes instead of ", wanted.size());
    }
    const auto at = std::mismatch(wanted.begin(), wanted.end(), got.begin()).first;
    return concat(what, ": other bytes from ", at - wanted.begin(), " of ", wanted.size());
  };
  for (const std::string& text : {bytes("value", expected.value, found.value),
                                  bytes("exp_avg", expected.exp_avg, found.exp_avg),
                                  bytes("exp_avg_sq", expected.exp_avg_sq, found.exp_avg_sq),
                                  bytes("remainder", expected.remainder, found.remainder)}) {
    if (!text.empty()) return text;
  }
  return {};
}

/// Reads extents of one set, each with a status of its own.
class Reader {
 public:
  Reader(ExtentStore& extents, const std::function<void()>& turn)
      : extents_(extents), turn_(turn) {}

  Status read(const ExtentRecord& extent, const std::string& what, std::vector<std::byte>& into) {
    if (block_.span().size() < extent.length_bytes) block_ = BlockBytes(extent.length_bytes);
    const auto bytes = block_.span().first(extent.length_bytes);
    std::optional<Status> finished;
    extents_.read(
        extent, bytes, {.job = kDaemonJob}, what, [&](const Status& status) { finished = status; });
    while (!finished) {
      extents_.advance();
      turn_();
    }
    if (finished->is_ok()) into.insert(into.end(), bytes.begin(), bytes.end());
    return *finished;
  }

 private:
  ExtentStore& extents_;
  const std::function<void()>& turn_;
  BlockBytes block_{uint64_t{64_KiB}};
};

/// A bucket's bytes, tile after tile without the padding in between.
struct BucketBytes {
  std::vector<std::byte> value, exp_avg, exp_avg_sq, remainder;
  Status value_lost, rest_lost;
};

BucketBytes read_bucket(Reader& reader, const BucketRecord& bucket, const std::string& what) {
  BucketBytes out;
  std::vector<std::byte> bytes;
  uint64_t elements_left = bucket.element_count;
  const bool is_half = bucket.dtype == DType::bfloat16;
  for (const TileRecord& tile : bucket.tiles) {
    const uint64_t elements = std::min(elements_left, kTileElements);
    elements_left -= elements;
    const auto part = [&](std::vector<std::byte>& to, uint64_t first, uint64_t count) {
      const auto begin = bytes.begin() + static_cast<ptrdiff_t>(first);
      to.insert(to.end(), begin, begin + static_cast<ptrdiff_t>(count));
    };
    const uint64_t value_bytes = elements * dtype_bytes(bucket.dtype);
    if (tile.parameter.exists()) {
      bytes.clear();
      const Status status = reader.read(tile.parameter, what + " parameter", bytes);
      if (!status.is_ok()) out.value_lost = status;
      bytes.resize(std::max<size_t>(bytes.size(), value_bytes));
      part(out.value, 0, value_bytes);
    } else {
      out.value.resize(out.value.size() + value_bytes);
    }
    bytes.clear();
    if (tile.rest.exists()) {
      const Status status = reader.read(tile.rest, what + " moments", bytes);
      if (!status.is_ok()) out.rest_lost = status;
    }
    bytes.resize(std::max<size_t>(bytes.size(), elements * 10));
    part(out.exp_avg, 0, elements * 4);
    part(out.exp_avg_sq, elements * 4, elements * 4);
    if (is_half) part(out.remainder, elements * 8, elements * 2);
  }
  return out;
}

std::vector<std::byte> slice(const std::vector<std::byte>& bytes, uint64_t first, uint64_t count) {
  const auto begin = bytes.begin() + static_cast<ptrdiff_t>(first);
  return {begin, begin + static_cast<ptrdiff_t>(count)};
}

JobState read_job(Reader& reader, const JobRecord& record) {
  JobState job{.name = record.name, .step = record.step, .shards = {}};
  std::vector<BucketBytes> buckets;
  for (size_t i = 0; i < record.buckets.size(); ++i) {
    buckets.push_back(read_bucket(reader, record.buckets[i], concat(record.name, " bucket ", i)));
  }
  for (const ShardRecord& shard : record.shards) {
    ShardState out;
    out.name = shard.name;
    out.kind = shard.kind;
    out.dtype = shard.dtype;
    out.shape = shard.shape;
    out.generation = shard.generation;
    uint64_t elements = 1;
    for (const uint64_t size : shard.shape) elements *= size;
    if (shard.kind == ShardKind::parameter) {
      const BucketBytes& bucket = buckets[shard.bucket];
      const uint64_t element_bytes = dtype_bytes(shard.dtype);
      out.written = shard.written;
      if (out.written) {
        out.value =
            slice(bucket.value, shard.element_offset * element_bytes, elements * element_bytes);
      }
      out.exp_avg = slice(bucket.exp_avg, shard.element_offset * 4, elements * 4);
      out.exp_avg_sq = slice(bucket.exp_avg_sq, shard.element_offset * 4, elements * 4);
      if (shard.dtype == DType::bfloat16) {
        out.remainder = slice(bucket.remainder, shard.element_offset * 2, elements * 2);
      }
      out.lost = bucket.value_lost.is_ok() ? bucket.rest_lost : bucket.value_lost;
    } else {
      out.written = !shard.extents.empty();
      for (const ExtentRecord& extent : shard.extents) {
        const Status status = reader.read(extent, concat(record.name, "/", shard.name), out.value);
        if (!status.is_ok()) out.lost = status;
      }
      if (out.written) out.value.resize(elements * dtype_bytes(shard.dtype));
    }
    job.shards.push_back(std::move(out));
  }
  return job;
}

/// A job with tier host goes back to a snapshot.
JobState read_left(Reader& reader,
                   const JobRecord& record,
                   const std::vector<LoadedSnapshot>& snapshots) {
  const JobRecord* last = nullptr;
  for (const LoadedSnapshot& each : snapshots) {
    if (each.entry.job.job_id == record.job_id && each.record != nullptr &&
        each.entry.step < record.undurable_since)
      last = each.record.get();
  }
  return last == nullptr ? JobState{.name = record.name} : read_job(reader, *last);
}

/// The job returns to this record if a load into it broke off; nullptr where none did.
const JobRecord* before_load(const JobRecord& record,
                             const std::vector<LoadedSnapshot>& snapshots) {
  for (const LoadedSnapshot& each : snapshots) {
    if (each.entry.job.job_id == record.job_id && is_load_name(each.entry.name))
      return each.record.get();
  }
  return nullptr;
}

Status reserve_all(ExtentStore& extents, const JobRecord& job) {
  const auto reserve = [&](const ExtentRecord& extent) {
    return extent.exists() ? extents.reserve(extent) : Status::ok();
  };
  for (const ShardRecord& shard : job.shards) {
    for (const ExtentRecord& extent : shard.extents) {
      if (Status status = reserve(extent); !status.is_ok()) return status;
    }
  }
  for (const BucketRecord& bucket : job.buckets) {
    for (const TileRecord& tile : bucket.tiles) {
      if (Status status = reserve(tile.parameter); !status.is_ok()) return status;
      if (Status status = reserve(tile.rest); !status.is_ok()) return status;
    }
  }
  return Status::ok();
}

}  // namespace

void sort_by_name(SetState& state) {
  const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
  std::sort(state.begin(), state.end(), by_name);
  for (JobState& job : state) std::sort(job.shards.begin(), job.shards.end(), by_name);
}

uint64_t digest(const SetState& state) {
  thread_local std::vector<std::byte> bytes;
  bytes.clear();
  for (const JobState& job : state) {
    put(bytes, job.name);
    put(bytes, job.step);
    put(bytes, job.shards.size());
    for (const ShardState& shard : job.shards) put(bytes, shard);
  }
  return record_checksum(bytes);
}

uint64_t digest(const ShardState& shard) {
  std::vector<std::byte> bytes;
  put(bytes, shard);
  return record_checksum(bytes);
}

std::string difference(const SetState& expected, const SetState& found) {
  if (expected.size() != found.size()) {
    return concat(found.size(), " jobs instead of ", expected.size());
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    const JobState& wanted = expected[i];
    const JobState& got = found[i];
    if (wanted.name != got.name) return concat("job ", got.name, " instead of ", wanted.name);
    if (wanted.step != got.step) {
      return concat("job ", got.name, " at step ", got.step, " instead of ", wanted.step);
    }
    if (wanted.shards.size() != got.shards.size()) {
      return concat(
          "job ", got.name, ": ", got.shards.size(), " shards instead of ", wanted.shards.size());
    }
    for (size_t j = 0; j < wanted.shards.size(); ++j) {
      if (wanted.shards[j].name != got.shards[j].name) {
        return concat("shard ", got.shards[j].name, " instead of ", wanted.shards[j].name);
      }
      const std::string text = difference(wanted.shards[j], got.shards[j]);
      if (!text.empty()) return concat("shard ", got.name, "/", got.shards[j].name, " ", text);
    }
  }
  return {};
}

Recovered recover(IoQueue& io, VolumeSet set) {
  Recovered out;
  out.sequence = set.superblock.sequence;
  const SteadyClock clock;
  const OwnedFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  Workers workers(Workers::ByHand{}, wake.get());
  ExtentStore extents(io, workers, std::move(set), clock);
  Commits commits(extents, workers, clock);
  const std::function<void()> turn = [&] {
    io.reap();
    while (workers.run_next()) {
    }
    workers.reap();
  };
  auto records = commits.load([&turn] {
    turn();
    return Status::ok();
  });
  if (!records.is_ok()) {
    out.status = records.status();
    return out;
  }
  Reader reader(extents, turn);
  const std::vector<LoadedSnapshot> snapshots = commits.take_loaded_snapshots();
  for (const LoadedSnapshot& snapshot : snapshots) {
    if (!snapshot.damage.is_ok()) {
      out.lost_snapshots.push_back(snapshot.entry.name);
      continue;
    }
    for (const ExtentRecord& extent : all_extents(*snapshot.record)) {
      out.status = extents.reserve(extent, ExtentHolder::snapshot);
      if (!out.status.is_ok()) return out;
    }
    // It is what its job is.
    if (is_load_name(snapshot.entry.name)) continue;
    out.state.push_back(read_job(reader, *snapshot.record));
    out.state.back().name = snapshot_state_name(snapshot.record->name, snapshot.entry.name);
  }
  for (const JobRecord& record : records.value()) {
    const JobRecord* const before = before_load(record, snapshots);
    if (record.undurable_since == 0) {
      if (out.status = reserve_all(extents, record); !out.status.is_ok()) return out;
    }
    if (before != nullptr) {
      out.state.push_back(read_job(reader, *before));
    } else if (record.undurable_since != 0) {
      out.state.push_back(read_left(reader, record, snapshots));
    } else {
      out.state.push_back(read_job(reader, record));
    }
  }
  sort_by_name(out.state);
  return out;
}

Recovered recover(std::span<const std::byte> image, const Geometry& geometry) {
  auto set = volumes_of(image, geometry);
  if (!set.is_ok()) return {.status = set.status(), .sequence = 0, .state = {}};
  ImageQueue io(image, geometry.device_bytes);
  return recover(io, std::move(set).value());
}

}  // namespace memd::powercut
