#include "store/snapshot/job_replacement.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/free_on_worker.h"

namespace memd {
namespace {

// Each some 100 ns.
constexpr size_t kExtentsATurn = 64;
constexpr const char* kPhase = "exchanges extents";
constexpr size_t kAll = std::numeric_limits<size_t>::max();

std::vector<ExtentRecord> sorted(std::vector<ExtentRecord> extents) {
  std::ranges::sort(extents);
  return extents;
}

/// Those at places that `others` do not name. Both are sorted.
std::vector<ExtentRecord> without(const std::vector<ExtentRecord>& extents,
                                  const std::vector<ExtentRecord>& others) {
  std::vector<ExtentRecord> left;
  std::ranges::set_difference(extents,
                              others,
                              std::back_inserter(left),
                              {},
                              &ExtentRecord::address,
                              &ExtentRecord::address);
  return left;
}

}  // namespace

struct JobReplacement::Exchange {
  Job& job;
  std::unique_ptr<Job> fresh;
  std::function<void()> done{};
  // Extents that are left to exchange, from the back.
  std::vector<ExtentRecord> to_hold{};
  std::vector<ExtentRecord> to_release{};
};

void JobReplacement::compare(Exchange& exchange) {
  const std::vector<ExtentRecord> before = sorted(exchange.job.extents());
  const std::vector<ExtentRecord> after = sorted(exchange.fresh->extents());
  exchange.to_hold = without(after, before);
  exchange.to_release = without(before, after);
}

bool JobReplacement::hold(Exchange& exchange, size_t count) const {
  std::vector<ExtentRecord>& left = exchange.to_hold;
  for (; count > 0 && !left.empty(); --count, left.pop_back())
    MEMD_CHECK(parts_.extents.reserve(left.back()).is_ok());
  return left.empty();
}

bool JobReplacement::release(Exchange& exchange, size_t count) const {
  std::vector<ExtentRecord>& left = exchange.to_release;
  for (; count > 0 && !left.empty(); --count, left.pop_back()) parts_.extents.release(left.back());
  return left.empty();
}

Job& JobReplacement::put(Exchange& exchange) const {
  Job& job = exchange.job;
  Job& fresh = *exchange.fresh;
  job.state().early().forget_all();
  // Set since the record was written.
  if (fresh.admission().weight() != job.admission().weight())
    fresh.admission().set_weight(job.admission().weight());
  job.kept().free_all();
  fresh.cache().counters() = job.cache().counters();
  fresh.cache().sessions().count_on(job.cache().sessions());
  const uint64_t job_id = job.job_id();
  const uint64_t tag = parts_.commits.catalogue_tag(job_id);
  const Status kept =
      fresh.kept().take_over(job.kept(), parts_.keepsakes, parts_.pool.segment_bytes(), tag);
  const Status room = fresh.admission().reserve_host(fresh.shards().declared());
  for (const Status& status : {kept, room}) {
    if (!status.is_ok()) fresh.progress().stop(status);  // it goes on being refused too
  }
  // Which extents it shares with a load's is not looked for: that one is about to be dropped.
  SnapshotSpace snapshots = job.space().snapshots();
  snapshots.load_shared_bytes = 0;
  fresh.admission().add_snapshots(snapshots);
  fresh.progress().set_loading(job.progress().is_loading());
  operations_.connect(fresh);
  const uint64_t record_bytes = job.shards().declared().memory_bytes();
  free_on_worker(parts_.workers, JobId{job_id}, record_bytes, parts_.jobs.take(job_id));
  return parts_.jobs.put(std::move(exchange.fresh));
}

void JobReplacement::replace(Job& job, std::unique_ptr<Job> fresh) const {
  Exchange exchange{.job = job, .fresh = std::move(fresh)};
  compare(exchange);
  hold(exchange, kAll);
  put(exchange);
  release(exchange, kAll);
}

// ---- Over turns ---------------------------------------------------------------------------------

void JobReplacement::go_back(Job& job,
                             std::unique_ptr<Job> fresh,
                             std::function<void()> done) const {
  job.operations().set_phase(kPhase);
  const auto exchange = std::make_shared<Exchange>(
      Exchange{.job = job, .fresh = std::move(fresh), .done = std::move(done)});
  parts_.workers.submit(
      {.job = JobId{job.job_id()},
       .bytes = job.shards().declared().memory_bytes(),
       .kind = WorkKind::bytes},
      [exchange] { compare(*exchange); },
      [self = *this, exchange] { self.hold_over_turns(exchange); });
}

void JobReplacement::hold_over_turns(const ExchangePointer& exchange) const {
  if (hold(*exchange, kExtentsATurn)) return put_over_turns(exchange);
  exchange->job.conditions().go_on([self = *this, exchange] { self.hold_over_turns(exchange); });
}

void JobReplacement::put_over_turns(const ExchangePointer& exchange) const {
  const Status gone = error(
      StatusCode::unavailable, "job ", exchange->job.name(), " goes back to a snapshot; try again");
  const std::vector<Operations::Start> waiting = exchange->job.operations().take_waiting();
  // The operation that runs ends with its job, and goes on as one of the fresh job.
  Job& fresh = put(*exchange);
  fresh.set_ending("is being restored");
  operations_.enqueue(fresh, "restore", [self = *this, exchange, &fresh](const Status& turn) {
    MEMD_CHECK(turn.is_ok());  // nothing runs yet
    fresh.operations().set_phase(kPhase);
    self.release_over_turns(exchange, fresh);
  });
  for (const Operations::Start& start : waiting) start(gone);
}

void JobReplacement::release_over_turns(const ExchangePointer& exchange, Job& fresh) const {
  if (!release(*exchange, kExtentsATurn)) {
    return fresh.conditions().go_on(
        [self = *this, exchange, &fresh] { self.release_over_turns(exchange, fresh); });
  }
  const uint64_t job_id = fresh.job_id();
  fresh.set_ending(nullptr);
  exchange->done();
  operations_.end(job_id);
}

}  // namespace memd
