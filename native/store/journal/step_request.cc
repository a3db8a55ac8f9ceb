#include "store/journal/step_request.h"

#include <bit>
#include <utility>

#include "store/format/encoding.h"
#include "store/journal/ledger_layout.h"

namespace memd {
namespace {

// One byte. A daemon that knew no amsgrad takes any other value than 0 for maximize; the layout in
// the ledger of such a job has a feature that it refuses.
constexpr uint8_t kMaximize = 1;
constexpr uint8_t kAmsgrad = 2;

/// Set in the number of ids where they follow in runs: the first of each, and how many.
constexpr uint32_t kRuns = uint32_t{1} << 31;
constexpr uint64_t kIdsMax = kStepBytesMax / sizeof(uint32_t);

template <typename Id>
void put_counted(FieldWriter& writer, const std::vector<Id>& ids) {
  writer.put(static_cast<uint32_t>(ids.size()));
  for (const Id id : ids) writer.put(id);
}

template <typename Id>
std::vector<Id> get_ids(FieldReader& reader, uint32_t count) {
  std::vector<Id> ids;
  for (uint32_t i = 0; i < count && !reader.overrun(); ++i) ids.push_back(reader.get<Id>());
  return ids;
}

/// The end of the run of ids that begins at `begin`, each one more than the one before it.
size_t run_end(const std::vector<uint32_t>& ids, size_t begin) {
  size_t end = begin + 1;
  while (end < ids.size() && ids[end] == uint64_t{ids[end - 1]} + 1) ++end;
  return end;
}

/// A model is updated as it was declared: its ids are a few runs.
void put_shards(FieldWriter& writer, const std::vector<uint32_t>& ids) {
  uint32_t run_count = 0;
  for (size_t begin = 0; begin < ids.size(); begin = run_end(ids, begin)) ++run_count;
  if (2 * uint64_t{run_count} >= ids.size()) return put_counted(writer, ids);
  writer.put(kRuns | run_count);
  for (size_t begin = 0; begin < ids.size();) {
    const size_t end = run_end(ids, begin);
    writer.put(ids[begin]);
    writer.put(static_cast<uint32_t>(end - begin));
    begin = end;
  }
}

Result<std::vector<uint32_t>> get_shards(FieldReader& reader) {
  const auto count = reader.get<uint32_t>();
  if ((count & kRuns) == 0) return get_ids<uint32_t>(reader, count);
  std::vector<uint32_t> ids;
  for (uint32_t run = 0; run < (count & ~kRuns) && !reader.overrun(); ++run) {
    const auto first = reader.get<uint32_t>();
    const auto length = reader.get<uint32_t>();
    if (ids.size() + length > kIdsMax || uint64_t{first} + length > uint64_t{1} << 32) {
      return damaged("a closed step has a run of ", length, " shards from ", first);
    }
    for (uint32_t i = 0; i < length; ++i) ids.push_back(first + i);
  }
  return ids;
}

}  // namespace

std::vector<std::byte> encode_step(const StepRequest& request) {
  static_assert(sizeof(StepRequest) == 96, "a field was added: write and read it here");
  std::vector<std::byte> out;
  FieldWriter writer(out);
  writer.put(request.session_id);
  writer.put(request.step);
  writer.put(request.call);
  writer.put(static_cast<uint32_t>(request.groups.size()));
  for (const StepGroup& group : request.groups) {
    // By name, so that a setting that is added does not compile before it is written and read here.
    const auto& [lr, beta1, beta2, eps, weight_decay, decoupled, maximize, amsgrad] =
        group.settings;
    for (const double value : {lr, beta1, beta2, eps, weight_decay}) {
      writer.put(std::bit_cast<uint64_t>(value));
    }
    writer.put(static_cast<uint8_t>(decoupled));
    writer.put(static_cast<uint8_t>((maximize ? kMaximize : 0) | (amsgrad ? kAmsgrad : 0)));
    put_shards(writer, group.shard_ids);
  }
  writer.put(static_cast<uint32_t>(request.staged_buffers.size()));
  for (const auto& [staged, buffer] : request.staged_buffers) {
    writer.put(staged);
    writer.put(buffer);
  }
  writer.put(static_cast<uint32_t>(request.summed.size()));
  for (const SummedGradients& sum : request.summed) {
    put_counted(writer, sum.session_ids);
    put_shards(writer, sum.shard_ids);
  }
  return out;
}

Result<StepRequest> decode_step(std::span<const std::byte> bytes) {
  FieldReader reader(bytes);
  StepRequest request;
  request.session_id = reader.get<uint64_t>();
  request.step = reader.get<uint64_t>();
  request.call = reader.get<uint64_t>();
  const auto group_count = reader.get<uint32_t>();
  for (uint32_t i = 0; i < group_count && !reader.overrun(); ++i) {
    StepGroup group;
    AdamSettings& settings = group.settings;
    for (double* value :
         {&settings.lr, &settings.beta1, &settings.beta2, &settings.eps, &settings.weight_decay}) {
      *value = std::bit_cast<double>(reader.get<uint64_t>());
    }
    settings.decoupled = reader.get<uint8_t>() != 0;
    const auto flags = reader.get<uint8_t>();
    settings.maximize = (flags & kMaximize) != 0;
    settings.amsgrad = (flags & kAmsgrad) != 0;
    auto shard_ids = get_shards(reader);
    if (!shard_ids.is_ok()) return shard_ids.status();
    group.shard_ids = std::move(shard_ids).value();
    request.groups.push_back(std::move(group));
  }
  const auto staged_count = reader.get<uint32_t>();
  for (uint32_t i = 0; i < staged_count && !reader.overrun(); ++i) {
    const auto staged = reader.get<uint32_t>();
    request.staged_buffers.emplace_back(staged, reader.get<uint32_t>());
  }
  const auto sum_count = reader.get<uint32_t>();
  for (uint32_t i = 0; i < sum_count && !reader.overrun(); ++i) {
    auto session_ids = get_ids<uint64_t>(reader, reader.get<uint32_t>());
    auto shard_ids = get_shards(reader);
    if (!shard_ids.is_ok()) return shard_ids.status();
    request.summed.push_back(
        {.session_ids = std::move(session_ids), .shard_ids = std::move(shard_ids).value()});
  }
  if (reader.overrun() || reader.remaining_bytes() != 0) return damaged("a closed step");
  return request;
}

}  // namespace memd
