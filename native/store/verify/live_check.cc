#include "store/verify/live_check.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <utility>

#include "base/check.h"

namespace memd {
namespace {

// Findings that nobody fetched: a volume that is all damage is not gathered in memory.
constexpr size_t kFindingsWaiting = 256;
// The caller that began a check asks some ten times a second.
constexpr uint64_t kForgottenNs = 30ull * 1'000'000'000;
constexpr uint64_t kQuietIntervalNs = 1'000'000;

}  // namespace

LiveCheck::LiveCheck(const VerificationParts& parts, const Commits& commits, const Clock& clock)
    : parts_(parts),
      commits_(commits),
      clock_(clock),
      walk_(parts.places),
      block_(uint64_t{kSuperblockBytes}) {
  lanes_.reserve(kLanes);
  for (size_t i = 0; i < kLanes; ++i) lanes_.emplace_back(parts);
}

Result<uint64_t> LiveCheck::begin(LiveCheckRequest request) {
  const uint64_t now_ns = clock_.now_ns();
  if (running_ != 0 && now_ns - asked_ns_ < kForgottenNs) {
    return error(StatusCode::already_exists,
                 "a check runs since ",
                 (now_ns - started_ns_) / 1'000'000'000,
                 " s; wait for its end, or interrupt it");
  }
  forget();
  running_ = id_next_++;
  failed_ = Status::ok();
  started_ns_ = now_ns;
  asked_ns_ = now_ns;
  bytes_ = 0;
  bytes_all_ = 0;
  volumes_.clear();
  copy_ = 0;
  waits_for_quiet_ = false;
  newest_ = {};
  for (const uint64_t job_id : parts_.places.jobs().ids()) {
    if (!request.whole && !request.job_ids.contains(job_id)) continue;
    bytes_all_ += parts_.places.state_bytes(job_id);
    for (const ExtentRecord& extent : commits_.catalogue(job_id)) bytes_all_ += extent.length_bytes;
    for (const Snapshot* const each : parts_.places.snapshots(job_id)) {
      for (const ExtentRecord& extent : each->entry.job.catalogue)
        bytes_all_ += extent.length_bytes;
    }
  }
  if (request.whole) {
    for (const ExtentRecord& extent : commits_.catalogue(0)) bytes_all_ += extent.length_bytes;
    walk_.begin();
  } else {
    walk_.begin(request.job_ids);
  }
  pass_ = parts_.extents.begin_verification();
  request_ = std::move(request);
  return running_;
}

Result<LiveCheckProgress> LiveCheck::progress(uint64_t check_id) {
  if (check_id != running_) {
    return error(StatusCode::not_found, "check ", check_id, " was ended; begin another one");
  }
  if (!failed_.is_ok()) {
    const Status why = failed_;
    forget();
    return why;
  }
  asked_ns_ = clock_.now_ns();
  LiveCheckProgress out{.bytes = bytes_,
                        // Jobs grow and go while it runs.
                        .bytes_all = std::max(bytes_, bytes_all_),
                        .findings = std::exchange(findings_, {}),
                        .report = std::nullopt};
  if (is_done()) {
    out.report = report();
    forget();
  }
  return out;
}

void LiveCheck::end(uint64_t check_id) {
  if (check_id == running_) forget();
}

void LiveCheck::give_up() {
  if (running_ != 0) fail(error(StatusCode::unavailable, "the daemon is stopping"));
}

void LiveCheck::forget() {
  running_ = 0;
  waiting_.reset();
  findings_.clear();
  counted_.clear();
  for (Verification& lane : lanes_) {
    if (!lane.is_running()) lane.free_memory();
  }
}

void LiveCheck::fail(const Status& status) {
  if (failed_.is_ok()) failed_ = status;
}

bool LiveCheck::advance() {
  if (running_ == 0 || !failed_.is_ok() || findings_.size() >= kFindingsWaiting) return false;
  const bool more = read_extents();
  return read_superblocks() || more;
}

uint64_t LiveCheck::next_ns() const {
  return running_ != 0 && waits_for_quiet_ ? clock_.now_ns() + kQuietIntervalNs : 0;
}

bool LiveCheck::is_idle() const {
  return !reading_block_ && std::none_of(lanes_.begin(), lanes_.end(), [](const auto& lane) {
    return lane.is_running();
  });
}

bool LiveCheck::read_extents() {
  bool more = false;
  for (Verification& lane : lanes_) {
    if (has_walked()) return false;
    if (lane.is_running()) continue;
    const auto found = next_found();
    // There may be more after the places of this turn, which nothing lies at.
    if (!found) return !walk_.at_end();
    if (parts_.extents.is_whole(found->extent, pass_)) {
      count(*found, false);
      more = true;
      continue;
    }
    if (is_being_read(found->extent)) {
      waiting_ = found->place;
      return false;
    }
    lane.begin(*found,
               pass_,
               [this, check_id = running_, found = *found](Verdict verdict, const Status& status) {
                 told(check_id, found, verdict, status);
               });
  }
  return more && !has_walked();
}

std::optional<ExtentWalk::Found> LiveCheck::next_found() {
  if (const auto place = std::exchange(waiting_, std::nullopt)) {
    // Its job may have gone on meanwhile, or away.
    if (const auto extent = parts_.places.find(*place)) {
      return ExtentWalk::Found{.place = *place, .extent = *extent};
    }
  }
  return walk_.next();
}

bool LiveCheck::is_being_read(const ExtentRecord& extent) const {
  return std::any_of(lanes_.begin(), lanes_.end(), [&](const Verification& lane) {
    return lane.is_running() && lane.extent() == extent;
  });
}

void LiveCheck::count(const ExtentWalk::Found& found, bool is_read) {
  const uint64_t bytes = found.extent.length_bytes;
  if (is_read) {
    bytes_ += bytes;
  } else {
    bytes_all_ -= std::min(bytes_all_, bytes);
  }
  if (found.place.kind == ExtentPlace::Kind::catalogue) return;
  Counted& counted = counted_[{found.place.job_id, found.place.snapshot_id}];
  ++counted.extents;
  counted.bytes += bytes;
}

void LiveCheck::told(uint64_t check_id,
                     const ExtentWalk::Found& found,
                     Verdict verdict,
                     const Status& status) {
  if (check_id != running_) return;
  count(found, true);
  if (verdict != Verdict::whole && verdict != Verdict::released) {
    add_finding(found, verdict, status);
  }
}

void LiveCheck::add_finding(const ExtentWalk::Found& found, Verdict verdict, const Status& status) {
  const ExtentRecord& extent = found.extent;
  // Bytes that can't be read are no clean bill, whatever they are.
  CheckFinding finding{.is_lost = verdict == Verdict::lost || verdict == Verdict::unread,
                       .path = parts_.extents.path(extent.address.device),
                       .offset_bytes = extent.address.offset_bytes,
                       .length_bytes = extent.length_bytes,
                       .job = {},
                       .snapshot = parts_.places.snapshot_name(found.place),
                       .shards = parts_.places.shards(found.place),
                       .part = parts_.places.part(found.place),
                       .reason = status.error_number() == 0
                                     ? "its bytes are not those that were written (read twice)"
                                     : status.message()};
  if (verdict == Verdict::damaged) {
    finding.reason += found.place.kind == ExtentPlace::Kind::catalogue
                          ? "; it is written anew from memory"
                          : "; newer bytes take its place with the next commit";
  }
  if (const auto job = parts_.places.jobs().verified(found.place.job_id)) finding.job = job->name;
  findings_.push_back(std::move(finding));
}

bool LiveCheck::read_superblocks() {
  if (!request_.whole || reading_block_ || volumes_.size() == parts_.extents.device_count()) {
    return false;
  }
  if (waits_for_quiet_ && !commits_.is_idle()) return false;
  waits_for_quiet_ = false;
  reading_block_ = true;
  was_quiet_ = commits_.is_idle();
  sequence_ = parts_.extents.superblock().sequence;
  const auto device = static_cast<uint16_t>(volumes_.size());
  const uint64_t offset_bytes =
      superblock_pair_offsets(copy_ / 2, parts_.extents.device_bytes(device))[copy_ % 2];
  parts_.extents.io().submit({.kind = IoKind::read,
                              .priority = IoPriority::scrub,
                              .device = device,
                              .offset_bytes = offset_bytes,
                              .data = block_.span(),
                              .complete = [this, check_id = running_](const Status& status) {
                                superblock_read(check_id, status);
                              }});
  return true;
}

void LiveCheck::superblock_read(uint64_t check_id, const Status& status) {
  reading_block_ = false;
  if (check_id != running_) return;
  const auto device = static_cast<uint16_t>(volumes_.size());
  const uint64_t offset_bytes =
      superblock_pair_offsets(copy_ / 2, parts_.extents.device_bytes(device))[copy_ % 2];
  SuperblockCopy& copy = copies_.at(copy_);
  copy = {.offset_bytes = offset_bytes, .state = CopyState::damaged, .reason = status.message()};
  if (status.is_ok()) {
    const auto inspected = inspect_copy(block_.span(), offset_bytes, copy_ / 2);
    if (!inspected.is_ok()) return fail(inspected.status());
    copy = inspected.value().copy;
    const auto& superblock = inspected.value().superblock;
    if (superblock && superblock->sequence >= newest_.sequence) newest_ = *superblock;
  }
  const bool no_commit_since =
      commits_.is_idle() && sequence_ == parts_.extents.superblock().sequence;
  if (copy.state != CopyState::valid && !(was_quiet_ && no_commit_since)) {
    waits_for_quiet_ = true;  // perhaps half written
    return;
  }
  if (++copy_ == copies_.size()) volume_done();
}

void LiveCheck::volume_done() {
  const auto device = static_cast<uint16_t>(volumes_.size());
  if (device == 0) newest_ = parts_.extents.superblock();
  const std::string& path = parts_.extents.path(device);
  judge_unwritten(copies_, newest_);
  volumes_.push_back({.directory = std::filesystem::path(path).parent_path().string(),
                      .path = path,
                      .bytes = parts_.extents.device_bytes(device),
                      .holder = concat("process ", ::getpid()),
                      .superblock = newest_,
                      .copies = copies_});
  for (CheckFinding& finding : superblock_findings(path, copies_, newest_.sequence)) {
    findings_.push_back(std::move(finding));
  }
  copy_ = 0;
  newest_ = {};
}

bool LiveCheck::is_done() const {
  const bool superblocks_done = !request_.whole || volumes_.size() == parts_.extents.device_count();
  return superblocks_done && has_walked() && is_idle();
}

LiveCheck::Counted LiveCheck::counted(uint64_t job_id, uint64_t snapshot_id) const {
  const auto found = counted_.find({job_id, snapshot_id});
  return found == counted_.end() ? Counted{} : found->second;
}

std::vector<CheckedSnapshot> LiveCheck::checked_snapshots(uint64_t job_id) const {
  std::vector<CheckedSnapshot> checked;
  for (const Snapshot* const each : parts_.places.snapshots(job_id)) {
    const Counted what = counted(job_id, each->id);
    checked.push_back({.name = each->entry.name,
                       .step = each->entry.step,
                       .is_lost = each->is_catalogue_lost,
                       .extent_count = what.extents,
                       .bytes = what.bytes,
                       .lost_shards = {each->lost_shards.begin(), each->lost_shards.end()}});
  }
  return checked;
}

CheckReport LiveCheck::report() const {
  CheckReport report;
  report.volumes = volumes_;
  report.bytes = bytes_;
  report.seconds = static_cast<double>(clock_.now_ns() - started_ns_) * 1e-9;
  for (const uint64_t job_id : parts_.places.jobs().ids()) {
    const auto job = parts_.places.jobs().verified(job_id);
    if (!job || (!request_.whole && !request_.job_ids.contains(job_id))) continue;
    const Counted what = counted(job_id, 0);
    report.jobs.push_back({.job_id = job_id,
                           .name = job->name,
                           .step = job->progress.durable_step(),
                           .shard_count = static_cast<uint32_t>(job->shards.count()),
                           .extent_count = what.extents,
                           .bytes = what.bytes,
                           .lost_shards = job->lost.names(),
                           .snapshots = checked_snapshots(job_id)});
  }
  std::sort(report.jobs.begin(), report.jobs.end(), [](const auto& a, const auto& b) {
    return a.job_id < b.job_id;
  });
  return report;
}

std::optional<Activity> LiveCheck::activity() const {
  if (running_ == 0) return std::nullopt;
  std::string waits_on;
  if (waits_for_quiet_) waits_on = "a moment without a commit";
  if (findings_.size() >= kFindingsWaiting) waits_on = "its client to take findings";
  return Activity{.kind = "check",
                  .what = concat(bytes_, " of ", std::max(bytes_, bytes_all_), " bytes"),
                  .waits_on = std::move(waits_on),
                  .age_ns = clock_.now_ns() - started_ns_};
}

}  // namespace memd
