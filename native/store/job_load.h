// The start of a store: jobs from disk, and from the memory that outlived the daemon before.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "store/format/catalogue.h"
#include "store/host_memory.h"
#include "store/job/job_operations.h"
#include "store/job/store_parts.h"
#include "store/job_admissions.h"
#include "store/journal/job_ledger.h"
#include "store/journal/keepsakes.h"
#include "store/recovery/remembered_job.h"
#include "store/space/snapshots.h"

namespace memd {

/// One start. Owns what the daemon before left and no job has taken yet. Made and run by the
/// ShardStore before it serves anybody; the only place where the server thread may block.
class JobLoad {
 public:
  struct Parts {
    const StoreParts& store;
    HostMemory& memory;
    JobOperations& operations;
    JobAdmissions& admissions;
    Snapshots& snapshots;
    /// One sentence for each thing that could not be taken over, with the reason.
    std::vector<std::string>& notes;
  };

  JobLoad(const Parts& parts, KeptDescriptors* kept)
      : parts_(parts), store_(parts.store), kept_(kept) {}
  JobLoad(const JobLoad&) = delete;
  JobLoad& operator=(const JobLoad&) = delete;

  /// Once. `turn` as in Commits::load().
  Status run(const std::function<Status()>& turn);

 private:
  struct ToRedo {
    Job* job;
    ClosedStep step;
  };

  Status reserve_extents(const JobRecord& record);
  /// Those of which the catalogue is damaged are listed, and keep nothing.
  Status take_snapshots();
  /// Ledgers that can be read.
  void take_ledgers();
  /// From memory, where its ledger is there and memory is whole, or else from disk.
  Status load(const JobRecord& record);
  /// A load into it was not complete. Its session may come back.
  void go_on_loading(Job& job, const Snapshot& before);
  /// The job as the daemon before had it, or why it starts from disk.
  Result<std::unique_ptr<Job>> adopt(RememberedJob& remembered);
  void forget_rest();

  const Parts parts_;
  const StoreParts& store_;
  Inheritance kept_;
  std::map<uint64_t, JobLedger> ledgers_;  // that no job has taken
  /// The ledger of some job cannot be read, so nobody knows which segments are its own.
  bool some_claims_unknown_ = false;
  std::vector<ToRedo> to_redo_;
};

}  // namespace memd
