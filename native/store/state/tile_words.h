// For the next daemon: the state of each tile whose newest bytes no catalogue names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/dtype.h"
#include "base/owned_fd.h"
#include "base/status.h"
#include "ring/shared_memory.h"
#include "store/format/extent_record.h"

namespace memd {

struct TileWordsLayout;

/// 12 KiB of state: with the copies of two pieces it stays in the first-level cache. A multiple of
/// what one vector instruction takes, so that pieces cost no remainders.
inline constexpr uint64_t kPieceBytes = 12 * 1024;
/// As many bytes are fewer elements in a tile with maxima.
constexpr uint64_t piece_elements(bool keeps_maxima) {
  return kPieceBytes / (keeps_maxima ? 16 : 12);
}
static_assert(piece_elements(false) % 64 == 0 && piece_elements(true) % 64 == 0);

struct TileState {
  uint64_t step = 0;  // whose bytes they are
  /// Offset in the private side, which alone has the bytes; without it the extents have them. For
  /// tier host: offset in the host side.
  std::optional<uint64_t> private_offset_bytes;
  /// Length of its place in the host side; 0: the tile is not of tier host.
  uint64_t host_bytes = 0;
  ExtentRecord value;
  ExtentRecord rest;
};

/// The arrays of a tile, in private memory.
struct TileArrays {
  DType dtype = DType::unspecified;
  uint64_t elements = 0;
  bool keeps_maxima = false;
  std::byte* value = nullptr;
  std::byte* rest = nullptr;
};

struct KeptTile {
  uint64_t key = 0;  // tile_key()
  TileState state;
  /// Its update to the next step was under way: pieces before this one are done. The scratch
  /// place has this one's bytes of before; without a place it was not begun.
  struct Update {
    uint64_t piece = 0;
    std::optional<uint32_t> scratch;
  };
  std::optional<Update> update;
};

/// One memfd a job, `tiles.<job id>`, mapped by daemons only. A tile's record has two places for
/// its state and one word that says which of them holds, so that one store moves the tile from N to
/// N + 1. While a tile is updated whose only copy is in memory, the word names the piece that is
/// worked on and where its bytes of before are. Owned by its Job. The server thread calls
/// everything; the worker that updates a tile calls publish() and begin_piece() for its record,
/// which nobody else touches meanwhile. Nothing blocks.
class TileWords {
 public:
  static Result<std::unique_ptr<TileWords>> create(uint64_t job_id);
  /// Takes what another daemon left. Refused: another version, another job.
  static Result<std::unique_ptr<TileWords>> adopt(OwnedFd fd, uint64_t job_id);

  int fd() const { return memory_.fd(); }

  /// The tile's record; nothing where there is room for no more.
  std::optional<uint32_t> record_of(uint64_t key);
  /// `base`: the catalogue on disk that the state builds on, JobLedger::base(); a state of tier
  /// host builds on none, and stays true whatever is committed. `piece_next`: the tile is on disk
  /// in the middle of an update to the next step, which has done the pieces before it.
  void publish(uint32_t record,
               const TileState& state,
               uint64_t base,
               std::optional<uint64_t> piece_next = std::nullopt);

  /// The step of what was published last.
  uint64_t step_of(uint32_t record) const;

  /// A place for one piece; nothing where all are in use.
  std::optional<uint32_t> take_scratch();
  void give_back_scratch(uint32_t scratch) { scratch_in_use_[scratch] = false; }
  /// Copies the piece there; then the record says so. The piece may be changed from here on.
  void begin_piece(uint32_t record, const TileArrays& tile, uint64_t piece, uint32_t scratch);
  /// The piece as it was before, if it was begun.
  void restore_piece(const TileArrays& tile, const KeptTile::Update& update) const;

  /// All that stands on the catalogue `base`, checked: numbers that are no value of their type are
  /// refused. Where bytes overlap is found when they are taken.
  Result<std::vector<KeptTile>> read(uint64_t base);

 private:
  explicit TileWords(SharedMemory memory);
  std::byte* scratch_at(uint32_t scratch, uint64_t piece) const;

  SharedMemory memory_;
  TileWordsLayout* layout_;
  std::unordered_map<uint64_t, uint32_t> record_of_;
  std::vector<bool> scratch_in_use_;
};

}  // namespace memd
