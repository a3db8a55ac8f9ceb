// Which tiles of a job's private state are in memory, and which of them have their only copy there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "arena/arena.h"
#include "store/state/tile_key.h"
#include "store/state/tile_words.h"

namespace memd {

/// How far an earlier daemon had updated one tile to a closed step: all of it, or the pieces before
/// `piece`.
struct MadeTile {
  uint64_t piece = 0;
  bool is_whole = false;
  std::optional<uint32_t> scratch;  // in TileWords
};

/// Value and rest of a tile lie in one piece of the private side. The unit is a tile. Owned by its
/// Job; the server thread calls everything; nothing blocks.
///
/// absent → cached (clean or dirty) → taken by a task → cached or absent. A task that works on a
/// tile has taken it out. A tile stays dirty while it is taken: only durability "every:k" and
/// "none" make dirty tiles, and a clean tile's bytes are on disk as well.
class PrivateTiles {
 public:
  bool contains(uint64_t key) const { return cached_.contains(key); }
  size_t count() const { return cached_.size(); }
  /// Offset in the private side.
  std::optional<uint64_t> offset_of(uint64_t key) const;
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (const auto& [key, offset_bytes] : cached_) visit(key, offset_bytes);
  }

  bool is_dirty(uint64_t key) const { return dirty_.contains(key); }
  bool has_dirty() const { return !dirty_.empty(); }
  /// Whether any of the tiles `tile_key(bucket, 0)` to `tile_count` is.
  bool has_dirty(uint32_t bucket, size_t tile_count) const;
  /// Tiles that became dirty so far.
  uint64_t dirtied_count() const { return dirtied_count_; }
  struct Dirty {
    uint64_t key = 0;
    uint64_t dirtied_before = 0;  // dirtied_count() when it became dirty
  };
  /// The first from `key` on; nothing where none is dirty there.
  std::optional<Dirty> next_dirty(uint64_t key) const;
  /// Which dirty tile to write back for room: one that an earlier daemon left half updated goes
  /// last. There is a dirty tile.
  uint64_t next_to_flush() const;

  /// Somebody waits until the dirty tiles of `which` are written, a bucket or all (~0). False:
  /// somebody has asked already.
  bool ask_flush(uint64_t which) { return flushes_asked_.insert(which).second; }
  void end_flush(uint64_t which) { flushes_asked_.erase(which); }

  /// Its place now belongs to the caller, until put().
  std::optional<uint64_t> take(uint64_t key);
  void put(uint64_t key, uint64_t offset_bytes);
  void set_dirty(uint64_t key) { dirty_.emplace(key, dirtied_count_++); }
  void set_clean(uint64_t key) { dirty_.erase(key); }

  /// Frees a clean tile's memory, if it is in memory.
  void drop(uint64_t key, Arena& side);
  /// One of them; false: every cached tile is dirty.
  bool drop_any_clean(Arena& side);
  void drop_clean(Arena& side);
  /// All, with what is in memory alone: at the job's end, or when the job returns to disk.
  void drop_all(Arena& side);

  // A closed step that an earlier daemon began.
  const MadeTile* made(uint64_t key) const;
  bool has_made() const { return !made_.empty(); }
  void set_made(uint64_t key, const MadeTile& made) { made_[key] = made; }
  /// The place of the piece that was being changed. The first call hands it to the caller.
  std::optional<uint32_t> take_made_scratch(uint64_t key);
  /// The step is made.
  void clear_made() { made_.clear(); }
  /// The first piece of a half updated tile that is still as before the step.
  std::optional<uint64_t> half_made_piece(uint64_t key) const;

  /// For the next daemon; nullptr: no descriptor is kept, or every commit went to disk so far.
  TileWords* words() const { return words_.get(); }
  void set_words(std::unique_ptr<TileWords> words) { words_ = std::move(words); }

 private:
  std::unordered_map<uint64_t, uint64_t> cached_;  // by key: offset in the private side
  std::map<uint64_t, uint64_t> dirty_;             // by key: Dirty::dirtied_before
  uint64_t dirtied_count_ = 0;
  std::unordered_map<uint64_t, MadeTile> made_;
  std::unordered_set<uint64_t> flushes_asked_;
  std::unique_ptr<TileWords> words_;
};

}  // namespace memd
