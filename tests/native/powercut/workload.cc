#include "powercut/workload.h"

#include <algorithm>
#include <iterator>
#include <random>
#include <utility>

namespace memd::powercut {
namespace {

using testing::bytes_shard;
using testing::halves;
using testing::numbers;
using testing::parameter;
using testing::pattern;
using testing::Twin;

constexpr uint64_t kBufferBytes = 700;
constexpr uint64_t kNotesBytes = 9'000;
constexpr uint64_t kExtraBytes = 5'000;
constexpr uint64_t kOtherBytes = 6'000;
constexpr size_t kSnapshotsMax = 2;
constexpr size_t kHostSnapshotsMax = 3;
const AdamSettings kSettings{.lr = 1e-2};

template <typename T>
std::vector<std::byte> copied(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

/// Its value, moments and number of updates.
void put_loaded(Twin& twin, uint32_t seed) {
  const uint64_t count = twin.m.size();
  if (!twin.theta.empty()) twin.theta = numbers(count, seed);
  const std::vector<uint16_t> before = twin.half;
  if (!twin.half.empty()) twin.half = halves(count, seed);
  // An element whose bits a write leaves alone keeps its remainder.
  for (size_t i = 0; i < before.size(); ++i) {
    if (before[i] != twin.half[i]) twin.remainder[i] = 0;
  }
  twin.m = numbers(count, seed + 1);
  twin.v = std::vector<float>(count, 0.25F);
  twin.t = 3 + seed % 5;
}

ShardState bytes_state(const std::string& name, ShardKind kind, const std::vector<uint8_t>& bytes) {
  const uint64_t size = kind == ShardKind::buffer ? kBufferBytes : bytes.size();
  ShardState state;
  state.name = name;
  state.kind = kind;
  state.dtype = DType::uint8;
  state.shape = {size};
  state.written = !bytes.empty();
  state.value = copied(bytes);
  return state;
}

}  // namespace

/// What an operation does, in this order, before its step or sync.
struct Workload::Operation {
  uint32_t seed = 0;
  bool creates = false;
  bool writes_parameter = false;  // "a", as a user does outside of a step
  bool puts_buffer = false;
  bool stages_buffer = false;
  bool puts_notes = false;
  bool toggles_extra = false;
  bool toggles_other = false;    // and nothing else
  std::string makes_snapshot{};  // and nothing else
  std::string drops_snapshot{};  // and nothing else
  std::string goes_back_to{};    // and nothing else
  bool loads = false;            // and nothing else
  bool breaks_off = false;       // one before it
  bool syncs_other = false;      // beside the step, begun so many turns later
  uint64_t turns_later = 0;
  std::vector<std::string> stepped{};
  // Where updates begin early:
  bool expects_other_settings = false;
  bool rewrites_gradient = false;     // of the first of them, once it was final
  uint64_t turns_after_gradient = 0;  // each
};

Workload::Workload(uint64_t seed, const WorkloadOptions& options) : seed_(seed), options_(options) {
  std::mt19937_64 random(seed);
  for (const char* name : {"a", "b"}) {
    specs_[name] = parameter(name, 200 + random() % 700);
  }
  for (const char* name : {"c", "d"}) {
    specs_[name] = parameter(name, 200 + random() % 700, DType::bfloat16);
  }
  if (!options.host) return;
  for (const char* name : {"a", "c"}) specs_[name].tier = Tier::host;
}

Workload::Operation Workload::next() const {
  std::mt19937_64 random(seed_ * 1'000'003 + operation_count_ + 1);
  Operation out;
  out.seed = static_cast<uint32_t>(random());
  if (operation_count_ == 0) {
    out.creates = true;
    return out;
  }
  if (options_.snapshots && operation_count_ > 2 && random() % 3 == 0) {
    const uint64_t what = random() % 4;
    const size_t snapshots_max = options_.host ? kHostSnapshotsMax : kSnapshotsMax;
    const auto any = [&] {
      const auto at = static_cast<ptrdiff_t>(random() % snapshots_.size());
      return std::next(snapshots_.begin(), at)->first;
    };
    if (snapshots_.empty() || (what < 2 && snapshots_.size() < snapshots_max)) {
      out.makes_snapshot = concat("s", operation_count_);
    } else if (what % 2 == 0) {
      out.drops_snapshot = any();
    } else {
      out.goes_back_to = any();
    }
    return out;
  }
  if (options_.loads && operation_count_ > 1 && random() % 3 == 0) {
    out.loads = true;
    out.breaks_off = random() % 2 == 0;
    return out;
  }
  const uint64_t kind = operation_count_ <= 2 ? 0 : random() % 10;
  if (kind <= 6) {
    out.stepped = {"a", "b", "c", "d"};
    if (kind == 6) out.stepped = {"a", "c"};
    out.stages_buffer = random() % 2 == 0;
    out.puts_buffer = !out.stages_buffer && random() % 2 == 0;
    out.puts_notes = random() % 3 == 0;
    out.syncs_other = options_.beside && !other_.empty() && random() % 2 == 0;
    out.turns_later = random() % 16;
    out.expects_other_settings = random() % 8 == 0;
    out.rewrites_gradient = random() % 4 == 0;
    out.turns_after_gradient = random() % 24;
  } else if (kind == 7) {
    out.puts_notes = true;
    out.writes_parameter = random() % 2 == 0;
  } else if (kind == 8) {
    out.toggles_extra = true;
  } else {
    out.toggles_other = true;
  }
  return out;
}

void Workload::apply(const Operation& operation) {
  const uint32_t seed = operation.seed;
  const uint64_t step_before = step_;
  const auto byte_seed = [seed](uint32_t index) { return static_cast<uint8_t>(seed + index * 7); };
  ++operation_count_;
  if (operation.toggles_other) {
    other_ = other_.empty() ? pattern(kOtherBytes, byte_seed(0)) : std::vector<uint8_t>{};
  }
  if (operation.syncs_other) other_ = pattern(kOtherBytes, byte_seed(6));
  if (operation.creates) {
    uint32_t index = 0;
    for (const auto& [name, spec] : specs_) {
      const uint64_t count = spec.shape[0];
      twins_[name] = spec.dtype == DType::bfloat16 ? Twin::bf16(halves(count, seed + index))
                                                   : Twin::fp32(numbers(count, seed + index));
      ++index;
    }
    bytes_["mean"] = pattern(kBufferBytes, byte_seed(1));
    bytes_["mean.staged"] = {};
    bytes_["notes"] = pattern(kNotesBytes, byte_seed(2));
  }
  if (operation.writes_parameter) {
    twins_["a"].theta = numbers(specs_["a"].shape[0], seed);
  }
  if (operation.loads) {
    for (auto& [name, twin] : twins_) put_loaded(twin, seed + static_cast<uint32_t>(name[0]));
    bytes_["notes"] = pattern(kNotesBytes, byte_seed(4));
    bytes_["mean"] = pattern(kBufferBytes, byte_seed(3));
  }
  if (operation.puts_buffer || operation.stages_buffer) {
    bytes_["mean"] = pattern(kBufferBytes, byte_seed(3));
  }
  if (operation.puts_notes) bytes_["notes"] = pattern(kNotesBytes, byte_seed(4));
  if (operation.toggles_extra && bytes_.erase("extra") == 0) {
    bytes_["extra"] = pattern(kExtraBytes, byte_seed(5));
  }
  for (const std::string& name : operation.stepped) {
    const ShardSpec& spec = specs_[name];
    const uint32_t gradient_seed = seed + static_cast<uint32_t>(name[0]);
    spec.dtype == DType::bfloat16
        ? twins_[name].step(kSettings, halves(spec.shape[0], gradient_seed))
        : twins_[name].step(kSettings, numbers(spec.shape[0], gradient_seed));
  }
  if (!operation.stepped.empty()) ++step_;
  if (!operation.makes_snapshot.empty()) {
    Kept kept{.state = train_state(),
              .twins = twins_,
              .bytes = bytes_,
              .step = step_,
              .order = operation_count_};
    kept.state.name = snapshot_state_name("train", operation.makes_snapshot);
    snapshots_[operation.makes_snapshot] = std::move(kept);
    stood_on_.push_back(operation.makes_snapshot);
  }
  if (!operation.drops_snapshot.empty()) {
    snapshots_.erase(operation.drops_snapshot);
    std::erase(stood_on_, operation.drops_snapshot);
  }
  if (!operation.goes_back_to.empty()) {
    const Kept& kept = snapshots_.at(operation.goes_back_to);
    twins_ = kept.twins;
    bytes_ = kept.bytes;
    step_ = kept.step;
    const auto found = std::ranges::find(stood_on_, operation.goes_back_to);
    std::rotate(stood_on_.begin(), std::next(found), stood_on_.end());
  }
  if (!operation.makes_snapshot.empty() || !operation.goes_back_to.empty() || operation.loads) {
    undurable_since_ = 0;
  } else if (options_.host && undurable_since_ == 0 && !operation.toggles_other &&
             operation.drops_snapshot.empty()) {
    undurable_since_ = step_before + 1;
  }
  expect();
}

void Workload::expect() {
  expected_.clear();
  expected_.push_back(train_left());
  for (const auto& [name, kept] : snapshots_) expected_.push_back(kept.state);
  if (!other_.empty()) {
    expected_.push_back(
        {.name = "other", .step = 0, .shards = {bytes_state("blob", ShardKind::blob, other_)}});
  }
  sort_by_name(expected_);
}

const Workload::Kept* Workload::last_kept() const {
  const Kept* last = nullptr;
  for (const std::string& name : stood_on_) {
    const Kept& kept = snapshots_.at(name);
    if (kept.step < undurable_since_) last = &kept;
  }
  return last;
}

JobState Workload::train_left() const {
  if (undurable_since_ == 0) return train_state();
  const Kept* const last = last_kept();
  JobState left = last == nullptr ? JobState{} : last->state;
  left.name = "train";
  return left;
}

bool Workload::leaves_older_snapshot() const {
  const Kept* const last = last_kept();
  return last != nullptr && std::ranges::any_of(snapshots_, [&](const auto& each) {
           return each.second.step < undurable_since_ && each.second.order > last->order;
         });
}

std::optional<SetState> Workload::next_between() const {
  const Operation operation = next();
  const bool begins_with_sync =
      !operation.makes_snapshot.empty() || !operation.goes_back_to.empty() || operation.loads;
  if (!options_.host || !begins_with_sync) return {};
  Workload synced = *this;
  synced.undurable_since_ = 0;
  synced.expect();
  return synced.expected_;
}

JobState Workload::train_state() const {
  JobState job{.name = "train", .step = step_, .shards = {}};
  for (const auto& [name, spec] : specs_) {
    const Twin& twin = twins_.at(name);
    ShardState state;
    state.name = name;
    state.kind = spec.kind;
    state.dtype = spec.dtype;
    state.shape = spec.shape;
    state.generation = twin.t;
    state.written = true;
    state.value = spec.dtype == DType::bfloat16 ? copied(twin.half) : copied(twin.theta);
    state.exp_avg = copied(twin.m);
    state.exp_avg_sq = copied(twin.v);
    state.remainder = copied(twin.remainder);
    job.shards.push_back(std::move(state));
  }
  for (const auto& [name, bytes] : bytes_) {
    const bool is_buffer = name.starts_with("mean");
    job.shards.push_back(bytes_state(name, is_buffer ? ShardKind::buffer : ShardKind::blob, bytes));
  }
  return job;
}

void Workload::skip() { apply(next()); }

std::optional<Workload::Halves> Workload::next_halves() const {
  const Operation operation = next();
  if (!operation.syncs_other) return {};
  Workload after = *this;
  after.apply(operation);
  Halves out{.stepped = after.expected_, .synced = expected_};
  // "other" comes before "train" and its snapshots.
  out.stepped[0] = expected_[0];
  out.synced[0] = after.expected_[0];
  return out;
}

Status Workload::run(Runner& runner, const Watch& watch) {
  const Operation operation = next();
  Workload after = *this;
  after.apply(operation);
  if (Status status = after.perform(operation, runner, watch); !status.is_ok()) return status;
  apply(operation);
  return Status::ok();
}

Status Workload::perform(const Operation& operation, Runner& runner, const Watch& watch) const {
  if (operation.toggles_other) {
    if (other_.empty()) return runner.drop("other");
    const auto session = runner.attach("other");
    if (!session.is_ok()) return session.status();
    Status status = runner.declare(session.value(), {bytes_shard("blob", kOtherBytes)});
    if (status.is_ok()) status = runner.write(session.value(), "blob", copied(other_));
    return status.is_ok() ? runner.sync(session.value()) : status;
  }
  if (!operation.makes_snapshot.empty()) {
    return runner.make_snapshot("train", operation.makes_snapshot, watch.written);
  }
  if (!operation.drops_snapshot.empty()) {
    return runner.drop_snapshot("train", operation.drops_snapshot);
  }
  if (!operation.goes_back_to.empty())
    return runner.restore("train", operation.goes_back_to, watch.written);
  auto attached = runner.attach("train");
  if (!attached.is_ok()) return attached.status();
  if (operation.loads) {
    const std::string name = concat("load/20261126T", 100'000 + operation_count_, "Z-0123456789a");
    if (operation.breaks_off) {
      if (Status status = load(runner, attached.value(), name + "0", watch); !status.is_ok())
        return status;
      runner.break_off(attached.value());
      attached = runner.attach("train");
      if (!attached.is_ok()) return attached.status();
    }
    const Status status = load(runner, attached.value(), name + "1", watch);
    return status.is_ok() ? runner.end_load(attached.value(), name + "1") : status;
  }
  const uint64_t session = attached.value();
  const auto put = [&](const std::string& name, const std::string& as) {
    return runner.write(session, as, copied(bytes_.at(name)));
  };
  Status status;
  if (operation.creates) {
    std::vector<ShardSpec> specs{bytes_shard("mean", kBufferBytes, ShardKind::buffer),
                                 bytes_shard("mean.staged", kBufferBytes, ShardKind::buffer),
                                 bytes_shard("notes", kNotesBytes)};
    for (const auto& [name, spec] : specs_) specs.push_back(spec);
    status = runner.declare(session, specs);
    for (const auto& [name, spec] : specs_) {
      const Twin& twin = twins_.at(name);
      if (!status.is_ok()) break;
      status = runner.write(
          session, name, spec.dtype == DType::bfloat16 ? copied(twin.half) : copied(twin.theta));
    }
    if (status.is_ok()) status = put("mean", "mean");
    if (status.is_ok()) status = put("notes", "notes");
  }
  if (status.is_ok() && operation.writes_parameter) {
    status = runner.write(session, "a", copied(twins_.at("a").theta));
  }
  if (status.is_ok() && operation.puts_buffer) status = put("mean", "mean");
  if (status.is_ok() && operation.stages_buffer) status = put("mean", "mean.staged");
  if (status.is_ok() && operation.puts_notes) status = put("notes", "notes");
  if (status.is_ok() && operation.toggles_extra) {
    if (bytes_.contains("extra")) {
      status = runner.declare(session, {bytes_shard("extra", kExtraBytes)});
      if (status.is_ok()) status = put("extra", "extra");
    } else {
      status = runner.remove(session, "extra");
    }
  }
  if (!status.is_ok()) return status;
  if (operation.stepped.empty()) return runner.sync(session);

  StepRequest request;
  request.session_id = session;
  request.groups = {{.settings = kSettings, .shard_ids = {}}};
  status = make_gradients(operation, request, runner);
  if (!status.is_ok()) return status;
  if (operation.stages_buffer) {
    request.staged_buffers = {
        {runner.shard_id(session, "mean.staged"), runner.shard_id(session, "mean")}};
  }
  if (!operation.syncs_other) return runner.step(std::move(request));
  const auto other = runner.attach("other");
  if (!other.is_ok()) return other.status();
  status = runner.write(other.value(), "blob", copied(other_));
  if (!status.is_ok()) return status;
  return runner.step_beside_sync(
      std::move(request), other.value(), operation.turns_later, watch.stepped, watch.synced);
}

Status Workload::load(Runner& runner,
                      uint64_t session,
                      const std::string& name,
                      const Watch& watch) const {
  Status status = runner.make_snapshot("train", name, watch.written, session);
  size_t put_count = 0;
  for (const auto& [parameter, twin] : twins_) {
    if (!status.is_ok()) return status;
    status = runner.write(
        session, parameter, twin.theta.empty() ? copied(twin.half) : copied(twin.theta));
    if (status.is_ok() && ++put_count == 2) status = runner.sync(session);
  }
  for (const auto& [parameter, twin] : twins_) {
    if (status.is_ok()) status = runner.write_moments(session, parameter, twin);
  }
  for (const char* const blob : {"notes", "mean"}) {
    if (status.is_ok()) status = runner.write(session, blob, copied(bytes_.at(blob)));
  }
  return status;
}

// What is made early is there some turns later, in part or whole: whoever cuts the power finds
// writes of a step that nobody has closed.
Status Workload::make_gradients(const Operation& operation,
                                StepRequest& request,
                                Runner& runner) const {
  const uint64_t session = request.session_id;
  for (const std::string& name : operation.stepped) {
    request.groups[0].shard_ids.push_back(runner.shard_id(session, name));
  }
  if (options_.early) {
    std::vector<StepGroup> groups = request.groups;
    if (operation.expects_other_settings) groups[0].settings.lr *= 2;
    const Status status = runner.expect_step(session, groups);
    if (!status.is_ok()) return status;
  }
  const auto write_gradient = [&](const std::string& name, uint32_t seed) {
    const ShardSpec& spec = specs_.at(name);
    return runner.write(session,
                        name,
                        spec.dtype == DType::bfloat16 ? copied(halves(spec.shape[0], seed))
                                                      : copied(numbers(spec.shape[0], seed)),
                        Part::gradient);
  };
  for (const std::string& name : operation.stepped) {
    const uint32_t seed = operation.seed + static_cast<uint32_t>(name[0]);
    const bool is_rewritten =
        options_.early && operation.rewrites_gradient && name == operation.stepped.front();
    Status status = write_gradient(name, is_rewritten ? seed + 1 : seed);
    if (!status.is_ok()) return status;
    if (options_.early) runner.gradient_is_final(session, name, operation.turns_after_gradient);
  }
  if (!options_.early || !operation.rewrites_gradient) return Status::ok();
  const std::string& first = operation.stepped.front();
  return write_gradient(first, operation.seed + static_cast<uint32_t>(first[0]));
}

}  // namespace memd::powercut
