#include "store/state/tile_words.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <span>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "base/memory_orders.h"
#include "base/units.h"
#include "store/format/tile_rest.h"

namespace memd {
namespace {

constexpr uint64_t kTileWordsMagic = 0x3130'7474'646d'656d;  // "memdtt01"
constexpr uint32_t kTileWordsVersion = 1;
// Sparse: pages that nobody touched cost nothing.
constexpr uint32_t kRecordsMax = 1u << 21;
// Each of two halves, which take turns. A job has at most 8 tiles in flight.
constexpr uint32_t kScratchCount = 16;

// A word: used, updating, which place; the piece and the scratch place of an update.
constexpr uint64_t kUsed = uint64_t{1} << 63;
constexpr uint64_t kUpdating = uint64_t{1} << 62;
constexpr uint64_t kPlace = 1;

// The base of a state of tier host: no catalogue makes it old.
constexpr uint64_t kAnyBase = ~uint64_t{0};
constexpr int kScratchShift = 8;
constexpr int kPieceShift = 16;

}  // namespace

struct ExtentWords {
  uint64_t offset_bytes;
  uint64_t checksum;
  uint64_t device_and_length;  // device << 32 | length
};

struct StateWords {
  uint64_t base;
  uint64_t step;
  uint64_t
      private_place;  // offset + 1 (of tier host: + blocks of its length + 1); 0: not in memory
  ExtentWords value;
  ExtentWords rest;
  uint64_t key;
  uint64_t checksum;  // of all before it
};

struct RecordWords {
  std::atomic<uint64_t> word;  // 0: none
  uint64_t reserved;
  StateWords states[2];
};
static_assert(sizeof(RecordWords) == 192);

namespace {

ExtentWords words_of(const ExtentRecord& extent) {
  return {.offset_bytes = extent.address.offset_bytes,
          .checksum = extent.checksum,
          .device_and_length = uint64_t{extent.address.device} << 32 | extent.length_bytes};
}

ExtentRecord extent_of(const ExtentWords& words) {
  return {.address = {.device = static_cast<uint16_t>(words.device_and_length >> 32),
                      .offset_bytes = words.offset_bytes},
          .length_bytes = static_cast<uint32_t>(words.device_and_length),
          .checksum = words.checksum};
}

// Offsets are whole blocks, and a tile has fewer blocks than a block has bytes.
static_assert(kTileElements * 16 / kBlockBytes + 1 < kBlockBytes);

uint64_t place_of(const TileState& state) {
  if (!state.private_offset_bytes) return 0;
  return *state.private_offset_bytes + state.host_bytes / kBlockBytes + 1;
}

uint64_t checksum_of(const StateWords& words) {
  const auto bytes = std::as_bytes(std::span(&words, 1));
  return hash_record(bytes.first(offsetof(StateWords, checksum)));
}

template <typename... Parts>
Status damaged(const Parts&... parts) {
  return error(StatusCode::integrity, "what is said of tiles is damaged: ", parts...);
}

struct Array {
  std::byte* first = nullptr;  // of the piece
  uint64_t bytes = 0;
};

/// The piece's part of the parameter, of both moments, of a bf16 parameter's remainder, and of the
/// maxima.
std::array<Array, 5> arrays_of(const TileArrays& tile, uint64_t piece) {
  const uint64_t elements_max = piece_elements(tile.keeps_maxima);
  const uint64_t first = piece * elements_max;
  const uint64_t count = std::min(elements_max, tile.elements - first);
  const bool halves = tile.dtype == DType::bfloat16;
  const uint64_t value_size = halves ? 2 : 4;
  return {Array{tile.value + first * value_size, count * value_size},
          Array{tile.rest + first * 4, count * 4},
          Array{tile.rest + (tile.elements + first) * 4, count * 4},
          Array{tile.rest + tile.elements * 8 + first * 2, halves ? count * 2 : 0},
          Array{tile.rest + maxima_offset_bytes(tile.dtype, tile.elements) + first * 4,
                tile.keeps_maxima ? count * 4 : 0}};
}

}  // namespace

struct TileWordsLayout {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;
  uint64_t job_id;
  std::atomic<uint64_t> record_end;  // nothing was ever written at or beyond it
  alignas(4096) RecordWords records[kRecordsMax];
  alignas(4096) std::byte scratch[kScratchCount][2][kPieceBytes];
};

TileWords::TileWords(SharedMemory memory)
    : memory_(std::move(memory)),
      layout_(reinterpret_cast<TileWordsLayout*>(memory_.data())),
      scratch_in_use_(kScratchCount) {}

Result<std::unique_ptr<TileWords>> TileWords::create(uint64_t job_id) {
  auto memory = SharedMemory::create("memd-tiles", sizeof(TileWordsLayout));
  if (!memory.is_ok()) return memory.status();
  std::unique_ptr<TileWords> words(new TileWords(std::move(memory).value()));
  words->layout_->magic = kTileWordsMagic;
  words->layout_->version = kTileWordsVersion;
  words->layout_->job_id = job_id;
  return words;
}

Result<std::unique_ptr<TileWords>> TileWords::adopt(OwnedFd fd, uint64_t job_id) {
  auto memory = SharedMemory::adopt("words of tiles", std::move(fd), sizeof(TileWordsLayout));
  if (!memory.is_ok()) return memory.status();
  std::unique_ptr<TileWords> words(new TileWords(std::move(memory).value()));
  const TileWordsLayout& layout = *words->layout_;
  if (layout.magic != kTileWordsMagic || layout.version != kTileWordsVersion) {
    return error(StatusCode::not_yet,
                 "what is said of the tiles of job ",
                 job_id,
                 " is of another version: ",
                 layout.version,
                 ", here ",
                 kTileWordsVersion);
  }
  if (layout.job_id != job_id) return damaged("job ", job_id, " is named ", layout.job_id);
  return words;
}

std::optional<uint32_t> TileWords::record_of(uint64_t key) {
  if (const auto known = record_of_.find(key); known != record_of_.end()) return known->second;
  const uint64_t record = layout_->record_end.load(std::memory_order_relaxed);
  if (record >= kRecordsMax) return std::nullopt;
  for (StateWords& state : layout_->records[record].states) state.key = key;
  layout_->record_end.store(record + 1, kRelease);
  record_of_[key] = static_cast<uint32_t>(record);
  return static_cast<uint32_t>(record);
}

void TileWords::publish(uint32_t record,
                        const TileState& state,
                        uint64_t base,
                        std::optional<uint64_t> piece_next) {
  RecordWords& words = layout_->records[record];
  const uint64_t before = words.word.load(std::memory_order_relaxed);
  const uint64_t place = before == 0 ? 0 : (before & kPlace) ^ 1;
  StateWords& into = words.states[place];
  into.base = state.host_bytes != 0 ? kAnyBase : base;
  into.step = state.step;
  into.private_place = place_of(state);
  into.value = words_of(state.value);
  into.rest = words_of(state.rest);
  into.checksum = checksum_of(into);
  MEMD_FAILPOINT("ledger.tile_not_marked");
  const uint64_t update = piece_next ? kUpdating | *piece_next << kPieceShift : 0;
  words.word.store(kUsed | update | place, kRelease);
  MEMD_FAILPOINT("ledger.tile_marked");
}

uint64_t TileWords::step_of(uint32_t record) const {
  const RecordWords& words = layout_->records[record];
  return words.states[words.word.load(std::memory_order_relaxed) & kPlace].step;
}

std::optional<uint32_t> TileWords::take_scratch() {
  const auto free = std::find(scratch_in_use_.begin(), scratch_in_use_.end(), false);
  if (free == scratch_in_use_.end()) return std::nullopt;
  *free = true;
  return static_cast<uint32_t>(free - scratch_in_use_.begin());
}

std::byte* TileWords::scratch_at(uint32_t scratch, uint64_t piece) const {
  // The other half holds the piece before, which the record names until it names this one.
  return layout_->scratch[scratch][piece % 2];
}

void TileWords::begin_piece(uint32_t record,
                            const TileArrays& tile,
                            uint64_t piece,
                            uint32_t scratch) {
  RecordWords& words = layout_->records[record];
  const uint64_t place = words.word.load(std::memory_order_relaxed) & kPlace;
  std::byte* into = scratch_at(scratch, piece);
  if (!MEMD_PLANTED("update.no_pre_image")) {
    for (const Array& array : arrays_of(tile, piece)) {
      copy_bytes(into, array.first, array.bytes);
      into += array.bytes;
    }
  }
  MEMD_FAILPOINT("ledger.pre_image_taken");
  words.word.store(
      kUsed | kUpdating | place | piece << kPieceShift | uint64_t{scratch} << kScratchShift,
      kRelease);
  // The update's stores stay behind that one.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void TileWords::restore_piece(const TileArrays& tile, const KeptTile::Update& update) const {
  if (!update.scratch) return;
  const std::byte* from = scratch_at(*update.scratch, update.piece);
  for (const Array& array : arrays_of(tile, update.piece)) {
    copy_bytes(array.first, from, array.bytes);
    from += array.bytes;
  }
}

Result<std::vector<KeptTile>> TileWords::read(uint64_t base) {
  const uint64_t end = layout_->record_end.load(kAcquire);
  if (end > kRecordsMax) return damaged("records: ", end);
  std::vector<KeptTile> tiles;
  for (uint32_t record = 0; record < end; ++record) {
    const RecordWords& words = layout_->records[record];
    const uint64_t word = words.word.load(kAcquire);
    const StateWords& state = words.states[word & kPlace];
    // Begun, and nothing was ever said in it.
    if (word == 0) {
      record_of_[state.key] = record;
      continue;
    }
    if ((word & kUsed) == 0 || checksum_of(state) != state.checksum) return damaged("a checksum");
    if (!record_of_.emplace(state.key, record).second) return damaged("a tile has two records");
    // The catalogue on disk is newer.
    if (state.base != base && state.base != kAnyBase) continue;
    KeptTile tile{.key = state.key,
                  .state = {.step = state.step,
                            .private_offset_bytes = std::nullopt,
                            .value = extent_of(state.value),
                            .rest = extent_of(state.rest)},
                  .update = std::nullopt};
    if (state.private_place != 0) {
      const uint64_t rest = (state.private_place - 1) % kBlockBytes;
      tile.state.private_offset_bytes = state.private_place - 1 - rest;
      tile.state.host_bytes = rest * kBlockBytes;
    }
    if ((word & kUpdating) != 0) {
      const uint64_t scratch = word >> kScratchShift & 0xff;
      const uint64_t piece = (word & ~kUsed & ~kUpdating) >> kPieceShift;
      // The most that a tile has; which it has is known where its bucket is.
      constexpr uint64_t kPiecesMax = divide_up(kTileElements, piece_elements(true));
      if (scratch >= kScratchCount || piece >= kPiecesMax) return damaged("an update");
      tile.update = {.piece = piece, .scratch = std::nullopt};
      // One that is on disk was written out between two pieces.
      if (state.private_place != 0) {
        if (scratch_in_use_[scratch]) return damaged("two updates in one place");
        // Until its tile is whole again.
        scratch_in_use_[scratch] = true;
        tile.update->scratch = static_cast<uint32_t>(scratch);
      }
    }
    tiles.push_back(tile);
  }
  return tiles;
}

}  // namespace memd
