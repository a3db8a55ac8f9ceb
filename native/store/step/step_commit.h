// How one step or sync becomes the job's: in memory, on disk, or both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "base/join.h"
#include "store/journal/step_request.h"
#include "store/state/step_report.h"
#include "store/step/staged_buffers.h"
#include "store/step/step_parts.h"
#include "store/step/step_shards.h"

namespace memd {

/// Owns where the step is committed, the generations that it counts, and whether the job counts it.
/// A step in memory may be due on disk as well: it is made then, whatever becomes of the disk.
/// Owned by its Step, which alone calls it, and which each `done` keeps alive; on the server
/// thread; nothing blocks.
class StepCommit {
 public:
  enum class Sync : uint8_t {
    plain,      // tier host stays in memory: what the disk has is no step then
    all_tiers,  // for a snapshot
  };

  /// A step's `sync` is plain.
  StepCommit(const StepParts& parts,
             const StepRequest& request,
             const StepShards& shards,
             StagedBuffers& staged,
             bool is_step,
             Sync sync)
      : parts_(parts),
        request_(request),
        shards_(shards),
        staged_(staged),
        is_step_(is_step),
        sync_(sync) {}
  StepCommit(const StepCommit&) = delete;
  StepCommit& operator=(const StepCommit&) = delete;

  /// The step's turn has come. The job's durability says where it is committed.
  void begin();
  bool is_in_memory() const { return is_in_memory_; }
  bool is_on_disk() const { return is_on_disk_; }
  /// From here on extents of the last commit are overwritten, and the disk says so before.
  void declare_undurable(const Done& done) const;

  /// False where a sync has found nothing to write down.
  bool is_needed(const StepReport& report) const;
  /// The commit. `place`: the step's in the job's ledger. Where it fails, the job counts step N and
  /// its generations as before.
  void make(std::optional<size_t> place, const std::shared_ptr<StepReport>& report, Done done);
  /// The commit on disk of what is committed in memory. A failure is the job's to tell, and not
  /// `done`'s: the next commit is due on disk as well.
  void mirror(const std::shared_ptr<StepReport>& report, Done done);
  /// In the job's committed step, while the commit is under way.
  bool is_counted() const { return is_counted_; }

 private:
  using CatalogueDone = std::function<void(const Status&, double commit_seconds)>;

  void count(std::optional<size_t> place);
  /// `failed_count`: failed_commit_count() before the commit.
  void take_back(uint64_t failed_count);
  void count_generations() const;
  void take_back_generations() const;
  void make_in_memory(Done done);
  void make_on_disk(const std::shared_ptr<StepReport>& report, Done done);
  void write_to_disk(const std::shared_ptr<StepReport>& report, Done done);
  /// JobRecord's, of a catalogue that names no step.
  uint64_t undurable_since_or_now() const;
  /// `undurable_since`: as JobRecord's. Where it fails, that is as before.
  void commit_catalogue(uint64_t undurable_since, CatalogueDone done) const;
  void note_failed_mirror(const Status& why) const;

  const StepParts& parts_;
  const StepRequest& request_;
  const StepShards& shards_;
  StagedBuffers& staged_;
  const bool is_step_;
  const Sync sync_;
  bool is_in_memory_ = false;
  bool is_on_disk_ = true;
  bool is_counted_ = false;
};

}  // namespace memd
