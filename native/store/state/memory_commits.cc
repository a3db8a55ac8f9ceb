#include "store/state/memory_commits.h"

#include <memory>
#include <span>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"

namespace memd {

void MemoryCommits::commit(uint64_t base, std::function<void()> done) {
  MEMD_CHECK(done_ == nullptr);
  if (!parts_.ledger.is_open() || parts_.tiles.words() == nullptr) return done();
  base_ = base;
  done_ = std::move(done);
  parts_.snapshot.begin(false);
  parts_.ledger.begin_commit();
}

void MemoryCommits::advance(size_t bytes_max) {
  parts_.snapshot.write(bytes_max);
  if (parts_.snapshot.is_writing()) return;
  std::vector<std::byte> record = parts_.snapshot.take();
  parts_.snapshot.end();
  write(std::move(record));
}

void MemoryCommits::write(std::vector<std::byte> record) {
  const size_t bytes = record.size() + JobEncoder::kSealBytes;
  const auto place = parts_.ledger.open_record(bytes);
  if (!place.is_ok()) {
    // The next daemon would go on from an older step: it starts the job from disk.
    parts_.ledger.give_up();
    return finish();
  }
  struct Write {
    std::vector<std::byte> record;
    const std::span<std::byte> into;
    uint64_t checksum = 0;
  };
  const auto write =
      std::make_shared<Write>(Write{.record = std::move(record), .into = place.value()});
  // Hashed twice and copied once.
  parts_.workers.submit(
      {.job = JobId{parts_.job_id}, .bytes = 4 * bytes, .kind = WorkKind::bytes},
      [write] {
        JobEncoder::seal(write->record);
        copy_bytes(write->into.data(), write->record.data(), write->record.size());
        write->checksum = hash_record(write->record);
        write->record = {};
      },
      [this, write] {
        // The commit.
        parts_.ledger.publish_record(write->into.size(), write->checksum, base_);
        finish();
      });
}

void MemoryCommits::finish() {
  const auto done = std::exchange(done_, nullptr);
  done();
}

}  // namespace memd
