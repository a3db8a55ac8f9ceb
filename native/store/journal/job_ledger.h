// The ledger of one job, which comes and goes with the job's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "store/format/catalogue.h"
#include "store/journal/job_layout.h"
#include "store/journal/ledger_contents.h"

namespace memd {

class Ledger;

/// Owns the Ledger, whose docstrings hold for the methods of the same names, and shows it to
/// nobody. There is none where nobody keeps descriptors, or before the job has memory: then nothing
/// is told, and what only a ledger can answer must not be asked. The job's owners refer to the one
/// of their job, where ledgers come and go; what is moved from has none. Of a job whose memory
/// outlived its daemon the recovery has one until the job takes it. The server thread calls
/// everything; nothing blocks.
class JobLedger {
 public:
  JobLedger();
  JobLedger(JobLedger&& other) noexcept;
  JobLedger& operator=(JobLedger&& other) noexcept;
  ~JobLedger();

  /// A new one, which says nothing yet.
  Status create(uint64_t job_id, uint64_t segment_bytes);
  /// Takes what another daemon left. Refused: another version, another job, or claims that nobody
  /// can read.
  static Result<JobLedger> adopt(OwnedFd fd, uint64_t job_id);
  bool is_open() const { return ledger_ != nullptr; }
  void close();
  /// For the keeper of descriptors; there is one.
  int fd() const;
  /// No daemon goes on with what is in memory.
  void give_up();

  // Memory.
  void note_tile_words();
  Status claim(uint64_t segment_id, Side side, uint32_t index);
  void note_slot(const SlotRecord& slot);

  // Shards. There is a ledger where the layout is told.
  Status write_layout(const JobRecord& record, const std::vector<uint32_t>& shard_ids);
  bool change_layout(const LayoutChange& change);
  bool change_facts(const LayoutFacts& facts);
  void note_shard(uint32_t shard_id, bool written, Contributors contributors);
  void note_generation(uint32_t shard_id, uint64_t generation);
  void reset_shard(uint32_t shard_id);

  // Extents.
  void note_loose(const LooseKey& key, const ExtentRecord& extent);
  /// The tag of the catalogue on disk; there is a ledger.
  uint64_t base() const;

  // Commits, on disk or in memory.
  void begin_commit();
  /// One on disk: the catalogue `tag` names what was told of extents.
  void committed_on_disk(uint64_t tag);
  /// Forgets extents that the last one on disk made old, `count_max` at most; true where none is
  /// left. The next one is on disk only after that.
  bool forget_old_extents(size_t count_max);
  /// The record of one in memory; there is a ledger.
  Result<std::span<std::byte>> open_record(size_t bytes);
  void publish_record(size_t bytes, uint64_t checksum, uint64_t base);

  // Sessions, and what they are given.
  Status note_session(const SessionRecord& session);
  void forget_session(uint64_t session_id);
  void note_seat(size_t seat, const SeatRecord& record);
  void begin_grant(const GrantRecord& grant);
  void end_grant();

  // Steps.
  /// Nothing, where there is no ledger that could have a place for it.
  Result<std::optional<size_t>> close_step(const StepRequest& request);
  void note_committing(size_t place, uint64_t number);
  void forget_step(size_t place);

  // The next daemon reads; there is a ledger.
  bool is_given_up() const;
  bool has_tile_words() const;
  Result<std::vector<SegmentClaim>> claims() const;
  Result<LedgerContents> read(uint64_t base);
  Result<std::optional<JobRecord>> read_record(uint64_t base) const;
  uint32_t given_ids_end(uint32_t from) const;

  /// 0 where there is none.
  uint64_t record_bytes_written() const;

 private:
  explicit JobLedger(std::unique_ptr<Ledger> ledger);
  Ledger& get() const;

  std::unique_ptr<Ledger> ledger_;
};

}  // namespace memd
