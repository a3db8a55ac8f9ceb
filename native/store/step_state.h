// A step or sync that a job's queue of operations has, from its request to its answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "store/shard_store.h"

namespace memd {

struct StepState {
  Job* job = nullptr;
  StepRequest request;  // empty groups: a sync
  StepDone done;
  std::optional<size_t> place;      // in the job's ledger
  std::vector<StepDone> also_done;  // the same step, asked for again
  std::shared_ptr<StepReport> report = std::make_shared<StepReport>();
  uint64_t started_ns = 0;
  bool is_step = false;
  bool is_redo = false;  // closed in the daemon before
  /// shard id → its group, for the shards of this step.
  std::unordered_map<uint32_t, size_t> group_of;
  std::set<uint32_t> buckets;
  std::vector<uint32_t> update_order;  // the same ones
  /// What the step reads and replaces: nobody fetches, writes or evicts it before the step ended,
  /// or, of a parameter whose update is published, nobody writes it.
  std::vector<Entry*> held;
  bool is_undoing = false;
  bool is_over = false;    // committed, or undone
  bool in_memory = false;  // a step that is committed in memory, and on disk as well where to_disk
  bool to_disk = true;
  bool updating = false;
  bool swapped = false;
  /// What was made of its buckets before it was closed, from begin_updates() on.
  std::map<uint32_t, std::shared_ptr<SpeculativeBucket>> early;
  bool is_counted = false;               // in Job::committed_step, while the commit is under way
  std::vector<bool> buffer_was_written;  // of each staged buffer's target

  void answer(const Status& status) const {
    done(status, *report);
    for (const StepDone& also : also_done) also(status, *report);
  }
};

}  // namespace memd
