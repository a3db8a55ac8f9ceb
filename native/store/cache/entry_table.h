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
      if ((*this)[id] != nullptr) destroy(id);
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
    Chunk& chunk = chunk_of(shape.id);
    chunk.used |= bit_of(shape.id);
    return std::construct_at(chunk.at(shape.id), shape);
  }
  void remove(uint32_t id) {
    MEMD_CHECK((*this)[id] != nullptr);
    destroy(id);
    free_ids_.push_back(id);
  }

  /// nullptr where there is none with that id.
  Entry* operator[](size_t id) const {
    if (id >= end_) return nullptr;
    Chunk& chunk = chunk_of(id);
    return (chunk.used & bit_of(id)) != 0 ? chunk.at(id) : nullptr;
  }
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
  struct Chunk {
    uint32_t used = 0;  // a bit each
    alignas(Entry) std::array<std::byte, kChunkEntries * sizeof(Entry)> bytes;
    Entry* at(size_t id) {
      return reinterpret_cast<Entry*>(bytes.data() + (id % kChunkEntries) * sizeof(Entry));
    }
  };

  static uint32_t bit_of(size_t id) { return uint32_t{1} << (id % kChunkEntries); }
  Chunk& chunk_of(size_t id) const { return *chunks_[id / kChunkEntries]; }
  uint32_t next_id() const { return free_ids_.empty() ? end_ : free_ids_.back(); }
  void destroy(uint32_t id) {
    Chunk& chunk = chunk_of(id);
    std::destroy_at(chunk.at(id));
    chunk.used &= ~bit_of(id);
  }

  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<uint32_t> free_ids_;
  uint32_t end_ = 0;
};

}  // namespace memd
