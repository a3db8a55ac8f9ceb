#include "powercut/explorer.h"

#include <algorithm>
#include <optional>
#include <random>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "powercut/image.h"
#include "powercut/read_all.h"
#include "store/format/volume.h"

namespace memd::powercut {
namespace {

constexpr size_t kExhaustiveWritesMax = 12;
constexpr uint64_t kCutsPerPosition = 24;
constexpr int kTearsPerWrite = 4;

/// One way to lose power: which writes reached the medium, in this order, and which sectors of one.
struct Cut {
  std::vector<uint64_t> writes;
  std::optional<size_t> torn;   // index into `writes`
  std::vector<bool> torn_kept;  // by sector
};

class Explorer {
 public:
  Explorer(const Recording& recording, const ExploreOptions& options)
      : recording_(recording),
        options_(options),
        random_(options.seed * 7'919 + recording.seed),
        image_(recording.formatted) {
    for (const RecordedWrite& write : recording.writes) {
      MEMD_CHECK_EQ(write.begin_bytes % kSectorBytes, 0u);
      MEMD_CHECK_EQ(write.bytes.size() % kSectorBytes, 0u);
      std::vector<uint64_t> hashes;
      for (uint64_t i = 0; i < write.bytes.size() / kSectorBytes; ++i) {
        hashes.push_back(sector_hash(write.begin_bytes / kSectorBytes + i, sector(write, i)));
      }
      hashes_.push_back(std::move(hashes));
    }
    for (const SetState& state : recording.states) digests_.push_back(digest(state));
  }

  ExploreResult run() {
    walk([this](const Event& event) {
      if (acceptance().operation <= options_.exhaustive_operations) visit_all(event);
    });
    result_.exhaustive_count = result_.state_count;
    // Rounds over all positions, until there are enough states or hardly any is new.
    for (uint64_t before = ~uint64_t{0};
         result_.state_count < options_.state_count && result_.state_count != before;) {
      before = result_.state_count;
      image_ = Image(recording_.formatted);
      walk([this](const Event&) {
        for (uint64_t i = 0; i < kCutsPerPosition; ++i) {
          if (result_.state_count < options_.state_count) visit(random_cut());
        }
      });
    }
    return std::move(result_);
  }

 private:
  std::span<const std::byte> sector(const RecordedWrite& write, uint64_t index) const {
    return std::span(write.bytes).subspan(index * kSectorBytes, kSectorBytes);
  }
  size_t sector_count(uint64_t write) const { return hashes_[write].size(); }

  /// Replays the events; `visit_position` runs after each of them.
  void walk(const std::function<void(const Event&)>& visit_position) {
    pending_.clear();
    completed_.assign(recording_.writes.size(), false);
    covered_.assign(recording_.sync_devices.size(), {});
    overlap_ = false;
    acceptance_ = 0;
    for (position_ = 0; position_ < recording_.events.size(); ++position_) {
      const Event& event = recording_.events[position_];
      replay(event);
      visit_position(event);
    }
  }

  void replay(const Event& event) {
    switch (event.kind) {
      case EventKind::write_submitted:
        for (const uint64_t other : pending_) overlap_ |= overlap(event.index, other);
        pending_.push_back(event.index);
        break;
      case EventKind::write_completed:
        completed_[event.index] = true;
        break;
      case EventKind::sync_submitted:
        for (const uint64_t write : pending_) {
          if (completed_[write] && device_of(write) == recording_.sync_devices[event.index]) {
            covered_[event.index].push_back(write);
          }
        }
        break;
      case EventKind::sync_completed:
        for (const uint64_t write : covered_[event.index]) {
          if (std::erase(pending_, write) > 0)
            put({.writes = {write}, .torn = {}, .torn_kept = {}});
        }
        break;
      case EventKind::write_dropped:
        std::erase(pending_, event.index);
        break;
      case EventKind::acceptance:
        acceptance_ = event.index;
        break;
    }
  }

  const Acceptance& acceptance() const { return recording_.acceptances[acceptance_]; }

  uint64_t device_of(uint64_t write) const {
    return recording_.writes[write].begin_bytes / recording_.geometry.device_bytes;
  }
  /// Only what was in flight at once may reach the medium in either order.
  bool overlap(uint64_t a, uint64_t b) const {
    const RecordedWrite& x = recording_.writes[a];
    const RecordedWrite& y = recording_.writes[b];
    return !completed_[b] && x.begin_bytes < y.begin_bytes + y.bytes.size() &&
           y.begin_bytes < x.begin_bytes + x.bytes.size();
  }

  void put(const Cut& cut) {
    for (size_t i = 0; i < cut.writes.size(); ++i) {
      const RecordedWrite& write = recording_.writes[cut.writes[i]];
      const auto& hashes = hashes_[cut.writes[i]];
      const uint64_t first = write.begin_bytes / kSectorBytes;
      for (uint64_t s = 0; s < hashes.size(); ++s) {
        if (cut.torn == i && !cut.torn_kept[s]) continue;
        image_.put(first + s, sector(write, s).data(), hashes[s]);
      }
    }
  }

  std::vector<bool> random_tear(size_t sectors) {
    std::vector<bool> kept(sectors);
    const uint64_t shape = random_() % 3;
    const size_t edge = sectors > 1 ? 1 + random_() % (sectors - 1) : 0;
    for (size_t s = 0; s < sectors; ++s) {
      kept[s] = shape == 0 ? s < edge : shape == 1 ? s >= edge : random_() % 2 == 0;
    }
    return kept;
  }

  /// Every subset of the pending writes, whole, and with each of its writes torn in some ways; of
  /// superblocks in every way. What only repeats the position before is left out.
  void visit_all(const Event& event) {
    if (event.kind == EventKind::write_completed || event.kind == EventKind::sync_submitted ||
        event.kind == EventKind::write_dropped) {
      return;
    }
    const bool added = event.kind == EventKind::write_submitted;
    const size_t count = pending_.size();
    if (count > kExhaustiveWritesMax) {
      result_.violation_count += 1;
      result_.violations.push_back(concat("seed ",
                                          recording_.seed,
                                          ": operation ",
                                          acceptance().operation,
                                          " has ",
                                          count,
                                          " writes at once, too many to visit every subset"));
      return;
    }
    for (uint64_t subset = 0; subset < uint64_t{1} << count; ++subset) {
      if (added && (subset >> (count - 1)) == 0) continue;
      Cut cut;
      for (size_t i = 0; i < count; ++i) {
        if ((subset >> i & 1) != 0) cut.writes.push_back(pending_[i]);
      }
      visit(cut);
      for (size_t i = 0; i < cut.writes.size(); ++i) {
        cut.torn = i;
        const size_t sectors = sector_count(cut.writes[i]);
        if (is_superblock(cut.writes[i])) {
          for (uint64_t mask = 1; mask + 1 < uint64_t{1} << sectors; ++mask) {
            cut.torn_kept.assign(sectors, false);
            for (size_t s = 0; s < sectors; ++s) cut.torn_kept[s] = (mask >> s & 1) != 0;
            visit(cut);
          }
        } else {
          for (int tear = 0; tear < kTearsPerWrite; ++tear) {
            cut.torn_kept = random_tear(sectors);
            visit(cut);
          }
        }
      }
    }
  }

  bool is_superblock(uint64_t write) const {
    const uint64_t at = recording_.writes[write].begin_bytes % recording_.geometry.device_bytes;
    for (const uint64_t sequence : {0, 1}) {
      for (const uint64_t offset :
           superblock_pair_offsets(sequence, recording_.geometry.device_bytes)) {
        if (at == offset) return true;
      }
    }
    return false;
  }

  Cut random_cut() {
    // Almost all, almost none, or any part of them: the ends are where mistakes show.
    static constexpr uint64_t kKeptOf8[] = {1, 4, 7};
    const uint64_t kept_of_8 = kKeptOf8[random_() % 3];
    Cut cut;
    for (const uint64_t write : pending_) {
      if (random_() % 8 < kept_of_8) cut.writes.push_back(write);
    }
    if (overlap_) std::shuffle(cut.writes.begin(), cut.writes.end(), random_);
    if (!cut.writes.empty() && random_() % 4 != 0) {
      cut.torn = random_() % cut.writes.size();
      cut.torn_kept = random_tear(sector_count(cut.writes[*cut.torn]));
    }
    return cut;
  }

  void visit(const Cut& cut) {
    image_.begin();
    put(cut);
    // The same bytes are another case where something else is accepted.
    const uint64_t key = image_.key() ^ (acceptance_ << 48);
    if (seen_.insert(key).second) {
      ++result_.state_count;
      result_.torn_count += cut.torn.has_value();
      check(cut);
      if (options_.progress && result_.state_count % 1'024 == 0) {
        options_.progress(result_.state_count);
      }
    }
    image_.undo();
  }

  void check(const Cut& cut) {
    Recovered found = recover(image_.bytes(), recording_.geometry);
    if (!found.status.is_ok()) return violated(cut, "cannot be opened: " + found.status.message());
    for (const JobState& job : found.state) {
      for (const ShardState& shard : job.shards) {
        if (shard.lost.is_ok()) continue;
        return violated(cut,
                        concat("shard ", job.name, "/", shard.name, ": ", shard.lost.message()));
      }
    }
    if (!found.lost_snapshots.empty()) {
      return violated(cut, "lost is snapshot " + found.lost_snapshots.front());
    }
    const uint64_t got = digest(found.state);
    const auto& accepted = acceptance().states;
    const auto which = std::find_if(
        accepted.begin(), accepted.end(), [&](uint64_t state) { return digests_[state] == got; });
    if (which == accepted.end()) return violated(cut, differences(found.state));
    ++(which == accepted.begin() ? result_.before_count : result_.after_count);
    if (options_.read_all_every == 0 || result_.state_count % options_.read_all_every != 0) return;
    ++result_.read_all_count;
    const bool goes_back = recording_.has_host_tier || recording_.has_loads;
    const Status same = read_all_is(image_.bytes(), recording_.geometry, found.state, goes_back);
    if (!same.is_ok()) violated(cut, "read through leases: " + same.message());
  }

  std::string differences(const SetState& found) const {
    for (size_t i = 0; i < digests_.size(); ++i) {
      if (digest(found) == digests_[i]) return concat("it is state ", i);
    }
    std::string text = "it is no state that ever was";
    for (const uint64_t state : acceptance().states) {
      text += concat("; against state ", state, ": ", difference(recording_.states[state], found));
    }
    return text;
  }
  std::string accepted_states() const {
    std::string text;
    for (const uint64_t state : acceptance().states)
      text += concat(text.empty() ? "" : ", ", state);
    return text;
  }

  void violated(const Cut& cut, const std::string& what) {
    if (++result_.violation_count > kViolationsShown) return;
    std::string text = concat("seed ",
                              recording_.seed,
                              ", after event ",
                              position_,
                              " of ",
                              recording_.events.size(),
                              ", operation ",
                              acceptance().operation,
                              ", accepted are the states ",
                              accepted_states(),
                              ": ",
                              what,
                              "\n  unflushed writes (in the image of all volumes):");
    for (const uint64_t write : pending_) {
      const auto kept = std::find(cut.writes.begin(), cut.writes.end(), write);
      const RecordedWrite& record = recording_.writes[write];
      text += concat("\n    write ",
                     write,
                     ": ",
                     record.bytes.size(),
                     " bytes at ",
                     record.begin_bytes,
                     kept == cut.writes.end() ? " lost" : " kept");
      if (cut.torn && kept == cut.writes.begin() + static_cast<ptrdiff_t>(*cut.torn)) {
        text += ", torn: ";
        for (const bool sector_kept : cut.torn_kept) text += sector_kept ? '1' : '0';
      }
    }
    result_.violations.push_back(std::move(text));
  }

  const Recording& recording_;
  const ExploreOptions& options_;
  std::mt19937_64 random_;
  Image image_;
  std::vector<std::vector<uint64_t>> hashes_;  // of each write's sectors
  std::vector<uint64_t> digests_;
  std::unordered_set<uint64_t> seen_;
  ExploreResult result_;

  // Of the position:
  size_t position_ = 0;
  std::vector<uint64_t> pending_;  // submitted and not durable for certain, oldest first
  std::vector<bool> completed_;
  std::vector<std::vector<uint64_t>> covered_;  // by each sync
  bool overlap_ = false;
  uint64_t acceptance_ = 0;
};

}  // namespace

ExploreResult explore(const Recording& recording, const ExploreOptions& options) {
  return Explorer(recording, options).run();
}

}  // namespace memd::powercut
