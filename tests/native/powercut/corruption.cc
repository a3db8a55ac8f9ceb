#include "powercut/corruption.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "powercut/image.h"
#include "powercut/read_all.h"
#include "powercut/volumes.h"
#include "store/format/catalogue.h"

namespace memd::powercut {
namespace {

struct Range {
  uint64_t begin_bytes = 0;  // in the image
  uint64_t length_bytes = 0;
};

class Corrupter {
 public:
  Corrupter(const Recording& recording, const CorruptOptions& options)
      : recording_(recording),
        options_(options),
        random_(options.seed * 7'919 + recording.seed),
        image_(recording.image()) {
    find_ranges();
    const Recovered whole = recover(image_.bytes(), recording.geometry);
    MEMD_CHECK(whole.status.is_ok());
    sequence_ = whole.sequence;
    MEMD_CHECK_EQ(digest(whole.state), digest(recording.last_state()));
  }

  CorruptResult run() {
    while (result_.count < options_.count) {
      image_.begin();
      damaged_.clear();
      misdirected_ = false;
      const std::string what = damage();
      check(what);
      image_.undo();
      ++result_.count;
      if (options_.progress && result_.count % 1'024 == 0) options_.progress(result_.count);
    }
    return std::move(result_);
  }

 private:
  // ---- What lies where --------------------------------------------------------------------------

  void find_ranges() {
    const Geometry& geometry = recording_.geometry;
    auto set = volumes_of(image_.bytes(), geometry);
    MEMD_CHECK(set.is_ok());
    for (uint16_t device = 0; device < geometry.device_count; ++device) {
      for (const uint64_t sequence : {0, 1}) {
        for (const uint64_t offset : superblock_pair_offsets(sequence, geometry.device_bytes)) {
          superblocks_.push_back({device * geometry.device_bytes + offset, kSuperblockBytes});
        }
      }
      // Only the lead volume's are ever written again.
      const uint64_t newest = device == 0 ? set.value().superblock.sequence : 0;
      std::array<Range, 2> pair;
      for (size_t copy = 0; copy < 2; ++copy) {
        pair[copy] = {device * geometry.device_bytes +
                          superblock_pair_offsets(newest, geometry.device_bytes)[copy],
                      kSuperblockBytes};
      }
      newest_pairs_.push_back(pair);
    }
    const Superblock& superblock = set.value().superblock;
    root_.push_back(range_of(superblock.root));
    const auto root = decode_root(bytes_of({superblock.root}, superblock.root_bytes));
    MEMD_CHECK(root.is_ok());
    for (const RootEntry& entry : root.value().jobs) {
      const auto job = decode_job(bytes_of(entry.catalogue, entry.catalogue_bytes));
      MEMD_CHECK(job.is_ok());
      for (const ExtentRecord& extent : entry.catalogue) catalogues_.push_back(range_of(extent));
      for (const ShardRecord& shard : job.value().shards) {
        for (const ExtentRecord& extent : shard.extents) state_.push_back(range_of(extent));
      }
      for (const BucketRecord& bucket : job.value().buckets) {
        for (const TileRecord& tile : bucket.tiles) {
          if (tile.parameter.exists()) state_.push_back(range_of(tile.parameter));
          if (tile.rest.exists()) state_.push_back(range_of(tile.rest));
        }
      }
    }
  }
  Range range_of(const ExtentRecord& extent) const {
    return {extent.address.device * recording_.geometry.device_bytes + extent.address.offset_bytes,
            extent.length_bytes};
  }
  std::vector<std::byte> bytes_of(const std::vector<ExtentRecord>& extents, uint64_t length) const {
    std::vector<std::byte> bytes;
    for (const ExtentRecord& extent : extents) {
      const Range range = range_of(extent);
      const auto part = image_.bytes().subspan(range.begin_bytes, range.length_bytes);
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    bytes.resize(length);
    return bytes;
  }

  // ---- One damage -------------------------------------------------------------------------------

  Range random_range() {
    static const std::vector<Range> anywhere{};
    const std::array<const std::vector<Range>*, 5> areas{
        &superblocks_, &root_, &catalogues_, &state_, &anywhere};
    const auto& area = *areas[random_() % areas.size()];
    if (!area.empty()) return area[random_() % area.size()];
    const uint64_t blocks = recording_.geometry.image_bytes() / kBlockBytes;
    // Of volumes that are almost empty, what was ever used.
    const RecordedWrite& write = recording_.writes[random_() % recording_.writes.size()];
    const uint64_t block =
        random_() % 2 == 0 ? random_() % blocks : write.begin_bytes / kBlockBytes;
    return {block * kBlockBytes, kBlockBytes};
  }
  uint64_t random_block() {
    const Range range = random_range();
    return range.begin_bytes + random_() % (range.length_bytes / kBlockBytes) * kBlockBytes;
  }

  std::vector<std::byte> copy(uint64_t begin_bytes, uint64_t length_bytes) const {
    const auto bytes = image_.bytes().subspan(begin_bytes, length_bytes);
    return {bytes.begin(), bytes.end()};
  }
  void put(uint64_t begin_bytes, const std::vector<std::byte>& bytes) {
    const auto old = image_.bytes().subspan(begin_bytes, bytes.size());
    if (std::equal(old.begin(), old.end(), bytes.begin())) return;
    damaged_.push_back({begin_bytes, bytes.size()});
    for (uint64_t at = 0; at < bytes.size(); at += kSectorBytes) {
      image_.put((begin_bytes + at) / kSectorBytes, bytes.data() + at);
    }
  }

  std::string damage() {
    switch (random_() % 5) {
      case 0:
        return flip_bits();
      case 1:
        return swap_extents();
      case 2: {
        const uint64_t block = random_block();
        put(block, std::vector<std::byte>(kBlockBytes));
        return concat("the block at ", block, " zeroed");
      }
      case 3: {
        const uint64_t from = random_block();
        const uint64_t to = random_block();
        put(to, copy(from, kBlockBytes));
        misdirected_ = true;
        return concat("the block at ", from, " written to ", to);
      }
      default: {
        const uint64_t block = random_block();
        auto bytes = copy(block, kBlockBytes);
        const uint64_t sector = random_() % (kBlockBytes / kSectorBytes);
        for (uint64_t i = 0; i < kSectorBytes; ++i) {
          bytes[sector * kSectorBytes + i] = static_cast<std::byte>(random_());
        }
        put(block, bytes);
        return concat("sector ", sector, " of the block at ", block, " filled with noise");
      }
    }
  }
  std::string flip_bits() {
    const uint64_t count = 1 + random_() % 3;
    std::string text = "bits flipped:";
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t block = random_block();
      const uint64_t bit = random_() % (kBlockBytes * 8);
      auto bytes = copy(block, kBlockBytes);
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      put(block, bytes);
      text += concat(" ", bit % 8, " of byte ", block + bit / 8);
    }
    return text;
  }
  std::string swap_extents() {
    std::vector<Range> all = state_;
    all.insert(all.end(), catalogues_.begin(), catalogues_.end());
    all.insert(all.end(), root_.begin(), root_.end());
    const Range a = all[random_() % all.size()];
    std::erase_if(all, [&](const Range& b) {
      return b.length_bytes != a.length_bytes || b.begin_bytes == a.begin_bytes;
    });
    if (all.empty()) return flip_bits();
    const Range b = all[random_() % all.size()];
    const auto a_bytes = copy(a.begin_bytes, a.length_bytes);
    put(a.begin_bytes, copy(b.begin_bytes, b.length_bytes));
    put(b.begin_bytes, a_bytes);
    return concat("extents at ", a.begin_bytes, " and ", b.begin_bytes, " swapped");
  }

  // ---- What may be found ------------------------------------------------------------------------

  bool is_damaged(const Range& range) const {
    return std::any_of(damaged_.begin(), damaged_.end(), [&](const Range& damage) {
      return damage.begin_bytes < range.begin_bytes + range.length_bytes &&
             range.begin_bytes < damage.begin_bytes + damage.length_bytes;
    });
  }
  bool is_damaged(const std::vector<Range>& ranges) const {
    return std::any_of(
        ranges.begin(), ranges.end(), [this](const Range& range) { return is_damaged(range); });
  }
  bool newest_pair_is_damaged(size_t device) const {
    return is_damaged(newest_pairs_[device][0]) && is_damaged(newest_pairs_[device][1]);
  }

  void check(const std::string& what) {
    bool superblocks_damaged = false;
    for (size_t device = 0; device < newest_pairs_.size(); ++device) {
      superblocks_damaged |= newest_pair_is_damaged(device);
    }
    // Another volume's superblock at the same offset is intact in itself: the set is refused.
    superblocks_damaged |= misdirected_ && is_damaged(superblocks_);
    const bool index_damaged = superblocks_damaged || is_damaged(root_) || is_damaged(catalogues_);
    const Recovered found = recover(image_.bytes(), recording_.geometry);
    if (!found.status.is_ok()) {
      ++result_.refused_count;
      const std::string& message = found.status.message();
      if (!index_damaged) return violated(what, "not opened: " + message);
      const bool names = message.find("volume ") != std::string::npos &&
                         (message.find("superblock") != std::string::npos ||
                          message.find("another set") != std::string::npos ||
                          message.find("root") != std::string::npos ||
                          message.find("catalogue of job ") != std::string::npos);
      if (!names) violated(what, "the error does not name what is lost: " + message);
      return;
    }
    if (found.sequence != sequence_) {
      if (!newest_pair_is_damaged(0)) return violated(what, "an older commit was opened");
      ++result_.previous_count;
      const bool is_history =
          std::any_of(recording_.states.begin(), recording_.states.end(), [&](const auto& state) {
            return wrong_bytes(state, found.state).empty();
          });
      if (!is_history) violated(what, "it is no commit that ever was");
      return;
    }
    if (const std::string text = wrong_bytes(recording_.last_state(), found.state); !text.empty()) {
      return violated(what, text);
    }
    bool any_lost = false;
    for (const JobState& job : found.state) {
      for (const ShardState& shard : job.shards) {
        if (shard.lost.is_ok()) continue;
        any_lost = true;
        const std::string& message = shard.lost.message();
        if (message.find(job.name) == std::string::npos ||
            message.find("volume ") == std::string::npos) {
          violated(what, "the error does not name what is lost: " + message);
        }
      }
    }
    if (any_lost && !is_damaged(state_)) violated(what, "a shard is lost for no reason");
    if (!any_lost && is_damaged(state_)) violated(what, "damaged state was taken for whole");
    ++(any_lost ? result_.lost_count : result_.whole_count);
    if (options_.read_all_every == 0 || result_.count % options_.read_all_every != 0) return;
    ++result_.read_all_count;
    const Status same = read_all_is(image_.bytes(), recording_.geometry, found.state);
    if (!same.is_ok()) violated(what, "read through leases: " + same.message());
  }

  /// What is wrong about that part of `found` which is not lost; empty where nothing is.
  static std::string wrong_bytes(const SetState& expected, const SetState& found) {
    SetState rest = found;
    for (size_t i = 0; i < std::min(expected.size(), found.size()); ++i) {
      const size_t count = std::min(expected[i].shards.size(), found[i].shards.size());
      for (size_t j = 0; j < count; ++j) {
        ShardState& shard = rest[i].shards[j];
        if (!shard.lost.is_ok() && shard.name == expected[i].shards[j].name) {
          shard = expected[i].shards[j];
        }
      }
    }
    return difference(expected, rest);
  }

  void violated(const std::string& damage, const std::string& what) {
    if (++result_.violation_count > kViolationsShown) return;
    result_.violations.push_back(concat("seed ",
                                        recording_.seed,
                                        ", image ",
                                        result_.count,
                                        " of random seed ",
                                        options_.seed,
                                        ", ",
                                        damage,
                                        ": ",
                                        what));
  }

  const Recording& recording_;
  const CorruptOptions& options_;
  std::mt19937_64 random_;
  Image image_;
  uint64_t sequence_ = 0;
  std::vector<Range> superblocks_, root_, catalogues_, state_;
  std::vector<std::array<Range, 2>> newest_pairs_;  // by device
  std::vector<Range> damaged_;
  bool misdirected_ = false;
  CorruptResult result_;
};

}  // namespace

CorruptResult corrupt(const Recording& recording, const CorruptOptions& options) {
  return Corrupter(recording, options).run();
}

}  // namespace memd::powercut
