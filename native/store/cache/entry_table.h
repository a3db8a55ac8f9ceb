// All entries of a job, by id.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

#include "base/check.h"
#include "store/cache/entry.h"

namespace memd {

/// Owns them. An entry stays where it is, and keeps its id, until it is removed; then the id is
/// given again. They lie kChunkEntries together: each on the heap by itself, with a pointer to it,
/// takes 32 bytes more. Owned by the Job, on its thread.
class EntryTable {
 public:
  EntryTable() = default;
  EntryTable(const EntryTable&) = delete;
  EntryTable& operator=(const EntryTable&) = delete;
  ~EntryTable() {
    for (uint32_t id = 0; id < end_; ++id) {
      if ((*this)[id] != nullptr) chunk_of(id).remove(id);
    }
  }

  /// `shape.id` is the table's to say.
  Entry* add(Entry::Shape shape) {
    shape.id = next_id();
    if (shape.id == end_) {
      if (end_ == chunks_.size() * kChunkEntries) chunks_.push_back(std::make_unique<Chunk>());
      ++end_;
    } else {
      free_ids_.pop_back();
    }
    return chunk_of(shape.id).add(shape);
  }
  void remove(uint32_t id) {
    MEMD_CHECK((*this)[id] != nullptr);
    chunk_of(id).remove(id);
    free_ids_.push_back(id);
  }

  /// nullptr where there is none with that id.
  Entry* operator[](size_t id) const { return id < end_ ? chunk_of(id).find(id) : nullptr; }
  /// Ids are below.
  size_t size() const { return end_; }

  /// Visits all ids below size(): nullptr if there is no such entry.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Entry*;
    using difference_type = ptrdiff_t;
    using pointer = Entry* const*;
    using reference = Entry*;

    Iterator(const EntryTable& table, size_t id) : table_(&table), id_(id) {}
    Entry* operator*() const { return (*table_)[id_]; }
    Iterator& operator++() {
      ++id_;
      return *this;
    }
    bool operator==(const Iterator& other) const { return id_ == other.id_; }

   private:
    const EntryTable* table_;
    size_t id_;
  };
  Iterator begin() const { return {*this, 0}; }
  Iterator end() const { return {*this, end_}; }

 private:
  // A job of one shard has one chunk, of 2 KiB.
  static constexpr size_t kChunkEntries = 32;
  /// By their ids; the table knows which of them are there when it is destroyed.
  class Chunk {
   public:
    Entry* add(const Entry::Shape& shape) {
      used_ |= bit_of(shape.id);
      return std::construct_at(at(shape.id), shape);
    }
    void remove(size_t id) {
      std::destroy_at(at(id));
      used_ &= ~bit_of(id);
    }
    Entry* find(size_t id) { return (used_ & bit_of(id)) != 0 ? at(id) : nullptr; }

   private:
    static uint32_t bit_of(size_t id) { return uint32_t{1} << (id % kChunkEntries); }
    Entry* at(size_t id) {
      return reinterpret_cast<Entry*>(bytes_.data() + (id % kChunkEntries) * sizeof(Entry));
    }

    uint32_t used_ = 0;  // a bit each
    alignas(Entry) std::array<std::byte, kChunkEntries * sizeof(Entry)> bytes_;
  };

  Chunk& chunk_of(size_t id) const { return *chunks_[id / kChunkEntries]; }
  uint32_t next_id() const { return free_ids_.empty() ? end_ : free_ids_.back(); }

  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<uint32_t> free_ids_;
  uint32_t end_ = 0;
};

}  // namespace memd
