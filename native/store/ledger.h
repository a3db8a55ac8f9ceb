// What the next daemon must know to go on with a job whose memory outlived this one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "ring/shared_memory.h"
#include "store/catalogue.h"

namespace memd {

struct LedgerLayout;

/// One memfd a job, `ledger.<job id>`, mapped by daemons only. Each fact is written down at the
/// moment it becomes true, so that a kill between any two instructions leaves what a reader can
/// use: words change with one release store, records of any length have two places that take turns,
/// each with a sequence number and a checksum. Owned by its Job; the server thread writes; nothing
/// blocks. An adopted ledger is validated as if a bug had written it.
class Ledger {
 public:
  static Result<std::unique_ptr<Ledger>> create(uint64_t job_id);
  /// What another daemon left. Refused: another version, another job, one that was given up.
  static Result<std::unique_ptr<Ledger>> adopt(OwnedFd fd, uint64_t job_id);

  int fd() const { return memory_.fd(); }

  /// The job as of a commit in memory, where it is newer than the catalogue on disk. `base` says on
  /// which catalogue it builds: Commits::catalogue_tag() of the job. The place of the last record
  /// stays valid until this one is whole.
  Status write_record(const JobRecord& record, uint64_t base);
  /// The last one that was written in full, if it builds on `base`.
  std::optional<JobRecord> read_record(uint64_t base) const;

 private:
  explicit Ledger(SharedMemory memory);

  SharedMemory memory_;
  LedgerLayout* layout_;
};

}  // namespace memd
