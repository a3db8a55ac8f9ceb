// Leases without a request, in every order of the steps of clients and daemon: the functions of
// ring/resident_lease.h themselves, over words whose every access is a step.
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "ring/resident_lease.h"
#include "schedules.h"

namespace memd {
namespace {

using schedules::block_until;
using schedules::effect;
using schedules::Explorer;
using schedules::local;
using schedules::Thread;
using schedules::Word;

constexpr uint32_t kClients = 2;
constexpr uint32_t kShards = 2;
constexpr uint32_t kCounters = 3;
constexpr uint32_t kPlaces = 3;  // of the arena, each for one slot
constexpr uint32_t kNone = ~0u;

struct SessionWords {
  std::array<Word<uint32_t>, kCounters> pins;
  Word<uint32_t> release_wanted;
  Word<uint32_t> requests_only;
  Word<uint64_t> resident_call;
  Word<uint32_t> in_group;
};

/// Of the values of shard 0: from before the step that a client follows, or from after it.
enum class Made : uint8_t { before, after };

/// Clients, one bit each.
using Clients = uint8_t;
constexpr Clients only(uint32_t client) { return static_cast<Clients>(1U << client); }

/// What lies at one offset of the arena.
struct Place {
  uint32_t shard = kNone;
  uint32_t version = 0;
  bool is_being_written = false;
};

/// What a client was told, and what lay there then.
struct Held {
  bool is_held = false;
  uint32_t shard = 0;
  ShardPlace place;
  uint32_t version = 0;
  /// The daemon gave the session up meanwhile: it has dropped the lease.
  bool is_dropped = false;
};

struct World {
  std::array<BasicShardRow<Word>, kShards> rows;
  std::array<SessionWords, kClients> sessions;
  std::array<Place, kPlaces> places;
  std::array<Held, kClients> held;
  std::array<bool, kClients> is_attached{true, true};
  /// Which step call each client's leases follow: never changed.
  std::array<uint64_t, kClients> after_call{};
  /// What the values of shard 0 are, by version of its places.
  std::array<Made, kPlaces> made{Made::before, Made::before, Made::before};
  /// The training group of the step that made them, and whether that is committed.
  std::array<Clients, kPlaces> made_for{};
  std::array<bool, kPlaces> is_committed{};
  bool doorbell = false;
  /// By counter: whose slot a daemon that takes over finds there.
  std::array<Word<uint32_t>, kCounters> ledger;
  std::vector<Thread> threads;

  void append_to(std::vector<uint64_t>& all) const {
    for (const auto& row : rows) {
      for (const auto* const word :
           {&row.word, &row.offset_bytes, &row.length_bytes, &row.generation}) {
        all.push_back(word->peek());
      }
    }
    for (const auto& session : sessions) {
      for (const auto& pins : session.pins) all.push_back(pins.peek());
      all.push_back(session.release_wanted.peek());
      all.push_back(session.requests_only.peek());
      all.push_back(session.resident_call.peek());
      all.push_back(session.in_group.peek());
    }
    for (const Place& place : places) {
      all.push_back(uint64_t{place.shard} << 32 | place.version << 1 |
                    uint32_t{place.is_being_written});
    }
    for (const Held& each : held) {
      all.push_back(each.is_held ? uint64_t{1} << 63 | uint64_t{each.is_dropped} << 62 |
                                       each.place.offset_bytes << 40 | each.place.pin << 16 |
                                       each.version << 8 | each.shard
                                 : 0);
    }
    for (const bool is : is_attached) all.push_back(is);
    all.push_back(doorbell);
    for (uint32_t place = 0; place < kPlaces; ++place) {
      all.push_back(static_cast<uint64_t>(made[place]) << 16 | uint64_t{made_for[place]} << 8 |
                    uint64_t{is_committed[place]});
    }
    for (const auto& word : ledger) all.push_back(word.peek());
  }

  std::string broken() const {
    for (uint32_t client = 0; client < kClients; ++client) {
      const Held& each = held[client];
      if (!each.is_held || each.is_dropped || threads[client].is_dead) continue;
      const Place& place = places[each.place.offset_bytes];
      const std::string who = "client " + std::to_string(client) + " holds ";
      if (place.shard != each.shard) return who + "a slot that is not the shard's any more";
      if (place.is_being_written) return who + "a slot that is being written";
      if (place.version != each.version) return who + "bytes that have changed";
      if (each.place.length_bytes != each.shard + 100) return who + "another shard's length";
      const Made is = made[each.place.offset_bytes];
      if (each.shard == 0 && after_call[client] != 0 && is == Made::before)
        return who + "what was there before the step that it follows";
      const bool is_uncommitted = is == Made::after && !is_committed[each.place.offset_bytes];
      if (each.shard == 0 && is_uncommitted &&
          (made_for[each.place.offset_bytes] & only(client)) == 0)
        return who + "what nobody has committed";
    }
    return "";
  }

  /// When nothing moves any more: who lives has given back what it had.
  std::string broken_at_end() const {
    for (uint32_t client = 0; client < kClients; ++client) {
      if (threads[client].is_dead) continue;
      for (const auto& pins : sessions[client].pins) {
        if (pins.peek() != 0) return "a pin is left";
      }
    }
    return "";
  }
};

// ---- Clients ------------------------------------------------------------------------------------

using Lease = std::optional<ShardPlace> (*)(World&, uint32_t client, uint32_t shard);

void give_back(World& world, uint32_t client, uint32_t pin) {
  SessionWords& words = world.sessions[client];
  unpin(words.pins[pin], kReaderPin, words.release_wanted, [&] {
    effect([&] { world.doorbell = true; });
  });
}

/// As ClientSession::lease_resident() does it, with these words and this call.
std::optional<ShardPlace> pin(World& world,
                              uint32_t client,
                              uint32_t shard,
                              const Word<uint32_t>& requests_only,
                              uint64_t after_call) {
  SessionWords& words = world.sessions[client];
  const PinWords<Word> pins{.counters = words.pins.data(),
                            .counter_count = kCounters,
                            .release_wanted = words.release_wanted,
                            .requests_only = requests_only,
                            .resident_call = words.resident_call,
                            .in_group = words.in_group,
                            .after_call = after_call};
  return pin_resident(
      world.rows[shard],
      pins,
      [](uint32_t) { return true; },
      [](uint32_t) {},
      [&] { effect([&] { world.doorbell = true; }); });
}

std::optional<ShardPlace> lease_rightly(World& world, uint32_t client, uint32_t shard) {
  return pin(world, client, shard, world.sessions[client].requests_only, world.after_call[client]);
}

bool is_everybodys(uint64_t word) { return row_visibility(word) == Visibility::everybody; }

ShardPlace place_in(const BasicShardRow<Word>& row, uint32_t pin) {
  return {.pin = pin,
          .offset_bytes = row.offset_bytes.load(),
          .length_bytes = row.length_bytes.load(),
          .generation = row.generation.load()};
}

std::optional<ShardPlace> pin_after_the_look(World& world, uint32_t client, uint32_t shard) {
  const auto& row = world.rows[shard];
  const uint64_t word = row.word.load();
  if (!is_everybodys(word)) return std::nullopt;
  const ShardPlace place = place_in(row, row_pin(word));
  if (row.word.load() != word) return std::nullopt;
  world.sessions[client].pins[place.pin].fetch_add(kReaderPin);
  return place;
}

std::optional<ShardPlace> never_look_again(World& world, uint32_t client, uint32_t shard) {
  const auto& row = world.rows[shard];
  const uint64_t word = row.word.load();
  if (!is_everybodys(word)) return std::nullopt;
  world.sessions[client].pins[row_pin(word)].fetch_add(kReaderPin);
  return place_in(row, row_pin(word));
}

/// The word is the same again, and the shard in another slot.
std::optional<ShardPlace> read_the_place_before_the_pin(World& world,
                                                        uint32_t client,
                                                        uint32_t shard) {
  const auto& row = world.rows[shard];
  const uint64_t word = row.word.load();
  if (!is_everybodys(word)) return std::nullopt;
  const ShardPlace place = place_in(row, row_pin(word));
  world.sessions[client].pins[place.pin].fetch_add(kReaderPin);
  if (row.word.load() == word) return place;
  give_back(world, client, place.pin);
  return std::nullopt;
}

/// The slot may be retired, and the row another slot's, between the second load and the place.
std::optional<ShardPlace> no_third_look(World& world, uint32_t client, uint32_t shard) {
  const auto& row = world.rows[shard];
  const uint64_t guess = row.word.load();
  if (!is_everybodys(guess)) return std::nullopt;
  const uint32_t pin = row_pin(guess);
  world.sessions[client].pins[pin].fetch_add(kReaderPin);
  const uint64_t word = row.word.load();
  if (is_everybodys(word) && row_pin(word) == pin) return place_in(row, pin);
  give_back(world, client, pin);
  return std::nullopt;
}

/// Looks at the membership at the start alone, or at the end alone.
std::optional<ShardPlace> look_at_the_group_once(World& world, uint32_t client, bool at_the_end) {
  SessionWords& words = world.sessions[client];
  const auto& row = world.rows[0];
  const auto is_member = [&] { return words.in_group.load() != 0; };
  const auto is_shown = [](uint64_t word) { return row_visibility(word) != Visibility::nobody; };
  if (!at_the_end && !is_member()) return std::nullopt;
  const uint64_t guess = row.word.load();
  if (!is_shown(guess)) return std::nullopt;
  const uint32_t pin = row_pin(guess);
  words.pins[pin].fetch_add(kReaderPin);
  const uint64_t word = row.word.load();
  if (is_shown(word) && row_pin(word) == pin) {
    const ShardPlace place = place_in(row, pin);
    if (row.word.load() == word && (!at_the_end || is_everybodys(word) || is_member()))
      return place;
  }
  give_back(world, client, pin);
  return std::nullopt;
}

std::optional<ShardPlace> look_at_the_group_at_the_start(World& world, uint32_t client, uint32_t) {
  return look_at_the_group_once(world, client, false);
}

std::optional<ShardPlace> look_at_the_group_at_the_end(World& world, uint32_t client, uint32_t) {
  return look_at_the_group_once(world, client, true);
}

std::optional<ShardPlace> no_look_at_the_call(World& world, uint32_t client, uint32_t shard) {
  return pin(world, client, shard, world.sessions[client].requests_only, 0);
}

/// Where the daemon ends the session it looks at its pins no more.
std::optional<ShardPlace> no_look_at_requests_only(World& world, uint32_t client, uint32_t shard) {
  return pin(world, client, shard, Word<uint32_t>(0), 0);
}

/// The step may be accepted between the last look at the row and this one.
std::optional<ShardPlace> look_at_the_call_at_the_end(World& world,
                                                      uint32_t client,
                                                      uint32_t shard) {
  const auto place = no_look_at_the_call(world, client, shard);
  if (!place || world.sessions[client].resident_call.load() >= world.after_call[client])
    return place;
  give_back(world, client, place->pin);
  return std::nullopt;
}

/// The step may fail between this look and the one at the row.
std::optional<ShardPlace> look_at_the_call_at_the_start(World& world,
                                                        uint32_t client,
                                                        uint32_t shard) {
  if (world.sessions[client].resident_call.load() < world.after_call[client]) return std::nullopt;
  return no_look_at_the_call(world, client, shard);
}

void release_without_a_look(World& world, uint32_t client, uint32_t pin) {
  world.sessions[client].pins[pin].fetch_sub(kReaderPin);
}

struct ClientProgram {
  Lease lease = lease_rightly;
  void (*release)(World&, uint32_t client, uint32_t pin) = give_back;
  std::array<uint32_t, 2> shards{0, 0};  // one after the other
  uint32_t rounds = 2;
};

/// Two sections a round: to lease, and to give back.
bool run_client(World& world, uint32_t section, uint32_t client, const ClientProgram& program) {
  const uint32_t shard = program.shards[section / 2 % 2];
  if (section % 2 == 0) {
    const auto place = program.lease(world, client, shard);
    effect([&] {
      if (!place) return;
      world.held[client] = {.is_held = true,
                            .shard = shard,
                            .place = *place,
                            .version = world.places[place->offset_bytes].version,
                            .is_dropped = false};
    });
    return true;
  }
  const uint64_t held =
      local([&] { return world.held[client].is_held ? world.held[client].place.pin + 1 : 0; });
  if (held != 0) {
    // It is given back by the step: from there on it is nobody's.
    effect([&] { world.held[client].is_held = false; });
    program.release(world, client, static_cast<uint32_t>(held - 1));
  }
  return section + 1 < 2 * program.rounds;
}

// ---- The daemon ---------------------------------------------------------------------------------

struct DaemonMistakes {
  bool looks_before_it_withdraws = false;
  bool wants_releases_after_it_looked = false;
  bool writes_without_a_withdrawal = false;
  bool copies_without_a_withdrawal = false;
  bool detaches_before_it_says_so = false;
  bool does_not_clear_the_table = false;
  bool frees_in_the_ledger_first = false;
  bool accounts_before_it_withdraws = false;
  bool publishes_before_it_takes_back = false;
  bool shows_everybody = false;
  bool does_not_leave = false;
  bool joins_before_it_withdraws = false;
};

struct Slot {
  uint32_t pin;
  uint32_t offset;
};

/// What the store does with one slot, over the functions that the store uses.
class Daemon {
 public:
  Daemon(World& world, const DaemonMistakes& has) : mistakes(has), world_(world) {}

  const DaemonMistakes& mistakes;

  void publish_shard(uint32_t shard,
                     Slot slot,
                     uint32_t generation,
                     Visibility visibility = Visibility::everybody) {
    publish(world_.rows[shard],
            {.pin = slot.pin,
             .offset_bytes = slot.offset,
             .length_bytes = shard + 100,
             .generation = generation},
            visibility);
  }
  void set_group(uint32_t client, bool in_group) {
    world_.sessions[client].in_group.store(in_group ? 1 : 0);
  }
  void account_for(uint64_t call) { world_.sessions[0].resident_call.store(call); }
  /// Shard 0, as a step of this group makes it.
  void make(Slot slot, Clients group = only(0)) {
    write(slot, [&](Place& place) {
      place.shard = 0;
      world_.made[slot.offset] = Made::after;
      world_.made_for[slot.offset] = group;
      world_.is_committed[slot.offset] = false;
    });
  }
  void commit(Slot slot) {
    block_until([] { return true; });
    effect([&] { world_.is_committed[slot.offset] = true; });
  }
  void withdraw_shard(uint32_t shard) { withdraw(world_.rows[shard]); }
  bool is_pinned(Slot slot) {
    for (uint32_t client = 0; client < kClients; ++client) {
      if (local([&] { return world_.is_attached[client]; }) == 0) continue;
      if (world_.sessions[client].pins[slot.pin].load() != 0) return true;
    }
    return false;
  }
  bool take_away(uint32_t shard, Slot slot, uint32_t generation) {
    const auto look = [&] { return is_pinned(slot); };
    if (mistakes.looks_before_it_withdraws) {
      if (look()) return false;
      withdraw_shard(shard);
      return true;
    }
    return take_slot_away(
        [&] { withdraw_shard(shard); }, look, [&] { publish_shard(shard, slot, generation); });
  }
  /// Until `done` says so; in between it sleeps, and is woken by a release or a death.
  template <typename Done>
  void wait_for_releases(const Done& done) {
    const auto want = [&](uint32_t wanted) {
      for (SessionWords& session : world_.sessions) session.release_wanted.store(wanted);
    };
    if (!mistakes.wants_releases_after_it_looked) want(1);
    while (!done()) {
      if (mistakes.wants_releases_after_it_looked) want(1);
      block_until([&] { return world_.doorbell || dead_client() != kNone; });
      effect([&] { world_.doorbell = false; });
      const auto dead = static_cast<uint32_t>(local([&] { return dead_client(); }));
      // Its pins count no more.
      if (dead != kNone) effect([&] { world_.is_attached[dead] = false; });
    }
    want(0);
  }
  void fill(uint32_t shard, Slot slot) {
    write(slot, [&](Place& place) { place.shard = shard; });
  }
  void change(Slot slot) {
    write(slot, [](Place&) {});
  }
  void note(Slot slot, uint32_t shard) { world_.ledger[slot.pin].store(shard + 1); }
  void note_free(Slot slot) { world_.ledger[slot.pin].store(0); }
  uint32_t noted(Slot slot) { return world_.ledger[slot.pin].load(); }

  /// A client that lives is given up, and what it holds with it.
  void detach(uint32_t client) {
    const auto say_so = [&] { world_.sessions[client].requests_only.store(1); };
    if (!mistakes.detaches_before_it_says_so) say_so();
    block_until([] { return true; });
    effect([&] {
      world_.is_attached[client] = false;
      world_.held[client].is_dropped = true;
    });
    if (mistakes.detaches_before_it_says_so) say_so();
  }

 private:
  /// Two steps: it is being written between them.
  template <typename Change>
  void write(Slot slot, const Change& change) {
    block_until([] { return true; });
    effect([&] {
      Place& place = world_.places[slot.offset];
      place.is_being_written = true;
      ++place.version;
      change(place);
    });
    block_until([] { return true; });
    effect([&] { world_.places[slot.offset].is_being_written = false; });
  }
  uint32_t dead_client() const {
    for (uint32_t client = 0; client < kClients; ++client) {
      if (world_.threads[client].is_dead && world_.is_attached[client]) return client;
    }
    return kNone;
  }

  World& world_;
};

// Shard 0 is in the first slot at the start.
constexpr Slot kFirst{.pin = 0, .offset = 0};
constexpr Slot kSecond{.pin = 1, .offset = 1};
constexpr Slot kThird{.pin = 2, .offset = 2};
// The counter of a slot that was freed and another place, and the other way round.
constexpr Slot kSamePin{.pin = 0, .offset = 1};
constexpr Slot kSamePlace{.pin = 2, .offset = 0};

using DaemonProgram = bool (*)(Daemon&, uint32_t section);

/// Evicts shard 0 once nobody has it, gives its slot to shard 1 and brings 0 up elsewhere.
bool evict_and_reuse(Daemon& daemon, uint32_t section) {
  switch (section) {
    case 0:
      daemon.wait_for_releases([&] { return daemon.take_away(0, kFirst, 1); });
      return true;
    case 1:
      daemon.fill(1, kFirst);
      daemon.publish_shard(1, kFirst, 1);
      return true;
    default:
      daemon.fill(0, kSecond);
      daemon.publish_shard(0, kSecond, 1);
      return false;
  }
}

/// Shard 0 comes back with the same word, in another place; its old one is given away.
bool come_back_with_the_same_word(Daemon& daemon, uint32_t section) {
  switch (section) {
    case 0:
      daemon.wait_for_releases([&] { return daemon.take_away(0, kFirst, 1); });
      return true;
    case 1:
      daemon.fill(0, kSamePin);
      daemon.publish_shard(0, kSamePin, 1);
      return true;
    default:
      daemon.fill(1, kSamePlace);
      daemon.publish_shard(1, kSamePlace, 1);
      return false;
  }
}

/// An update: in place where nobody has a lease, else elsewhere; what is retired is freed and used
/// again once it was given back.
bool update(Daemon& daemon, uint32_t section) {
  switch (section) {
    case 0:
      if (daemon.take_away(0, kFirst, 1)) {
        daemon.change(kFirst);
        daemon.publish_shard(0, kFirst, 2);
        return false;
      }
      daemon.withdraw_shard(0);
      daemon.fill(0, kSecond);
      daemon.publish_shard(0, kSecond, 2);
      return true;
    case 1:
      daemon.wait_for_releases([&] { return !daemon.is_pinned(kFirst); });
      return true;
    default:
      daemon.fill(1, kFirst);
      daemon.publish_shard(1, kFirst, 1);
      return false;
  }
}

/// An update goes elsewhere while the old slot is leased, and that place is evicted at once.
bool update_and_evict(Daemon& daemon, uint32_t section) {
  switch (section) {
    case 0:
      daemon.withdraw_shard(0);
      daemon.fill(0, kSecond);
      daemon.publish_shard(0, kSecond, 2);
      return true;
    case 1:
      daemon.wait_for_releases([&] { return daemon.take_away(0, kSecond, 2); });
      return true;
    default:
      daemon.fill(1, kSecond);
      daemon.publish_shard(1, kSecond, 1);
      return false;
  }
}

/// A writer is granted the slot that is there, or a copy, and gives it back.
bool grant_a_writer(Daemon& daemon, uint32_t) {
  if (!daemon.mistakes.writes_without_a_withdrawal) daemon.withdraw_shard(0);
  Slot slot = kFirst;
  if (daemon.is_pinned(kFirst)) {
    slot = kSecond;
    daemon.fill(0, kSecond);
  }
  daemon.change(slot);
  daemon.publish_shard(0, slot, 1);
  return false;
}

/// A writer waits while a worker copies the slot that others read, and has the copy; what was the
/// slot is freed and used again once it was given back.
bool copy_for_a_writer(Daemon& daemon, uint32_t section) {
  switch (section) {
    case 0:
      daemon.withdraw_shard(0);
      if (!daemon.is_pinned(kFirst)) {
        daemon.change(kFirst);
        daemon.publish_shard(0, kFirst, 1);
        return false;
      }
      daemon.publish_shard(0, kFirst, 1);
      // The worker's: clients lease the slot meanwhile.
      daemon.fill(0, kSecond);
      if (!daemon.mistakes.copies_without_a_withdrawal) daemon.withdraw_shard(0);
      return true;
    case 1:
      daemon.wait_for_releases([&] { return !daemon.is_pinned(kFirst); });
      daemon.fill(1, kFirst);
      return true;
    default:
      daemon.change(kSecond);
      daemon.publish_shard(0, kSecond, 1);
      return false;
  }
}

/// Ends the first client's session while it leases, and uses the slot of what it had.
bool detach_and_reuse(Daemon& daemon, uint32_t section) {
  switch (section) {
    case 0:
      daemon.detach(0);
      return true;
    case 1:
      daemon.wait_for_releases([&] { return daemon.take_away(0, kFirst, 1); });
      return true;
    default:
      daemon.fill(1, kFirst);
      daemon.publish_shard(1, kFirst, 1);
      return false;
  }
}

/// Evicts and reuses as a daemon with a ledger, which may die anywhere in it.
bool evict_with_a_ledger(Daemon& daemon, uint32_t section) {
  if (section == 0) {
    if (daemon.mistakes.frees_in_the_ledger_first) daemon.note_free(kFirst);
    if (!daemon.take_away(0, kFirst, 1)) return false;
    if (!daemon.mistakes.frees_in_the_ledger_first) daemon.note_free(kFirst);
    return true;
  }
  daemon.fill(1, kFirst);
  daemon.note(kFirst, 1);
  daemon.publish_shard(1, kFirst, 1);
  return false;
}

/// The next daemon, which knows what the ledger says and the pins: it evicts what it finds in the
/// slot, and uses it again. What it has not published it does not withdraw.
bool take_over(Daemon& daemon, uint32_t section) {
  if (section == 0) {
    if (!daemon.mistakes.does_not_clear_the_table) {
      for (uint32_t shard = 0; shard < kShards; ++shard) daemon.withdraw_shard(shard);
    }
    if (daemon.noted(kFirst) != 0 && daemon.is_pinned(kFirst)) {
      daemon.wait_for_releases([&] { return !daemon.is_pinned(kFirst); });
    }
    return true;
  }
  daemon.fill(1, kFirst);
  daemon.note(kFirst, 1);
  daemon.publish_shard(1, kFirst, 1);
  return false;
}

/// A step of the first client, whose leases follow it: what it makes is its own until the commit.
void accept_and_publish(Daemon& daemon) {
  if (daemon.mistakes.accounts_before_it_withdraws) daemon.account_for(1);
  daemon.withdraw_shard(0);
  if (!daemon.mistakes.accounts_before_it_withdraws) daemon.account_for(1);
  daemon.make(kSecond);
  daemon.publish_shard(
      0, kSecond, 2, daemon.mistakes.shows_everybody ? Visibility::everybody : Visibility::group);
}

bool step_and_commit(Daemon& daemon, uint32_t section) {
  if (section == 0) {
    accept_and_publish(daemon);
    return true;
  }
  daemon.commit(kSecond);
  daemon.withdraw_shard(0);
  daemon.publish_shard(0, kSecond, 2);
  return false;
}

void fail(Daemon& daemon, Slot slot) {
  if (!daemon.mistakes.publishes_before_it_takes_back) daemon.account_for(0);
  daemon.withdraw_shard(0);
  if (slot.pin != kFirst.pin) daemon.fill(0, slot);
  daemon.publish_shard(0, slot, 1);
  if (daemon.mistakes.publishes_before_it_takes_back) daemon.account_for(0);
}

/// It fails: what was there before is everybody's again, and who follows it has to ask. The bytes
/// come from the disk, into another slot: what was retired never comes back.
bool step_and_fail(Daemon& daemon, uint32_t section) {
  if (section == 0) {
    accept_and_publish(daemon);
    return true;
  }
  fail(daemon, kThird);
  return false;
}

/// It fails before it has updated anything.
bool accept_and_fail(Daemon& daemon, uint32_t section) {
  if (section == 0) {
    daemon.withdraw_shard(0);
    daemon.account_for(1);
    return true;
  }
  fail(daemon, kFirst);
  return false;
}

/// The turn of the second client's step has come: it is the group from here on.
void change_group(Daemon& daemon) {
  if (!daemon.mistakes.does_not_leave) daemon.set_group(0, false);
  daemon.set_group(1, true);
}

void step_of_the_second(Daemon& daemon) {
  daemon.withdraw_shard(0);
  daemon.make(kThird, only(1));
  daemon.publish_shard(0, kThird, 3, Visibility::group);
}

/// A step of the first client is committed, and one of the second follows.
bool commit_and_change_group(Daemon& daemon, uint32_t section) {
  switch (section) {
    case 0:
      daemon.withdraw_shard(0);
      daemon.make(kSecond);
      daemon.publish_shard(0, kSecond, 2, Visibility::group);
      return true;
    case 1:
      daemon.commit(kSecond);
      daemon.withdraw_shard(0);
      daemon.publish_shard(0, kSecond, 2);
      return true;
    case 2:
      change_group(daemon);
      step_of_the_second(daemon);
      return true;
    default:
      daemon.commit(kThird);
      daemon.withdraw_shard(0);
      daemon.publish_shard(0, kThird, 3);
      return false;
  }
}

/// A step of the first client fails, and one of the second follows. What the first has made is
/// never committed.
bool fail_and_change_group(Daemon& daemon, uint32_t section) {
  if (section == 0) {
    daemon.withdraw_shard(0);
    daemon.make(kSecond);
    daemon.publish_shard(0, kSecond, 2, Visibility::group);
    return true;
  }
  if (daemon.mistakes.joins_before_it_withdraws) change_group(daemon);
  daemon.withdraw_shard(0);
  if (!daemon.mistakes.joins_before_it_withdraws) change_group(daemon);
  step_of_the_second(daemon);
  return false;
}

/// A step of the second client, who is the group from here on, updates in place what nobody leases:
/// the row names the same counter as before.
bool change_group_and_update_in_place(Daemon& daemon, uint32_t) {
  change_group(daemon);
  const Slot slot = daemon.take_away(0, kFirst, 1) ? kFirst : kSecond;
  daemon.withdraw_shard(0);
  daemon.make(slot, only(1));
  daemon.publish_shard(0, slot, 2, Visibility::group);
  return false;
}

/// The group ends while a step runs: its session leaves, and the other one is no member yet.
bool leave_and_join(Daemon& daemon, uint32_t section) {
  switch (section) {
    case 0:
      daemon.withdraw_shard(0);
      daemon.make(kSecond);
      daemon.publish_shard(0, kSecond, 2, Visibility::group);
      return true;
    case 1:
      daemon.detach(0);
      daemon.set_group(0, false);
      daemon.withdraw_shard(0);
      return true;
    default:
      daemon.set_group(1, true);
      step_of_the_second(daemon);
      return false;
  }
}

bool show_a_step(Daemon& daemon, uint32_t) {
  daemon.withdraw_shard(0);
  daemon.make(kSecond);
  daemon.publish_shard(0, kSecond, 2, Visibility::group);
  return false;
}

/// The next daemon drops what was not committed, and the first step that it makes is the second
/// client's.
bool take_over_and_step(Daemon& daemon, uint32_t section) {
  if (section == 0) {
    daemon.set_group(0, false);
    for (uint32_t shard = 0; shard < kShards; ++shard) daemon.withdraw_shard(shard);
    return true;
  }
  daemon.set_group(1, true);
  step_of_the_second(daemon);
  return false;
}

// ---- All orders ---------------------------------------------------------------------------------

struct Scenario {
  std::array<ClientProgram, kClients> clients{};
  DaemonProgram daemon = evict_and_reuse;
  DaemonProgram next_daemon = nullptr;
  DaemonMistakes mistakes{};
  bool clients_die = true;
  bool follows_a_step = false;  // the first client
};

struct Outcome {
  std::optional<std::string> fault;
  size_t states = 0;
  size_t ends = 0;
};

Outcome explore(const Scenario& scenario) {
  Explorer<World>::Program program;
  for (uint32_t client = 0; client < kClients; ++client) {
    program.threads.push_back([&scenario, client](World& world, uint32_t section) {
      return run_client(world, section, client, scenario.clients[client]);
    });
    program.may_die.push_back(scenario.clients_die);
  }
  program.threads.push_back([&scenario](World& world, uint32_t section) {
    Daemon daemon(world, scenario.mistakes);
    return scenario.daemon(daemon, section);
  });
  program.may_die.push_back(scenario.next_daemon != nullptr);
  if (scenario.next_daemon != nullptr) {
    program.threads.push_back([&scenario](World& world, uint32_t section) {
      if (section == 0) {
        block_until(
            [&] { return world.threads[kClients].is_dead || world.threads[kClients].is_done; });
        return local([&] { return world.threads[kClients].is_dead; }) != 0;
      }
      Daemon daemon(world, scenario.mistakes);
      return scenario.next_daemon(daemon, section - 1);
    });
    program.may_die.push_back(false);
  }
  World world;
  world.threads.resize(program.threads.size());
  world.places[kFirst.offset].shard = 0;
  world.after_call[0] = scenario.follows_a_step ? 1 : 0;
  world.sessions[0].in_group.set(1);
  world.ledger[kFirst.pin].set(1);
  world.rows[0].word.set(row_word(Visibility::everybody, 1, kFirst.pin));
  world.rows[0].offset_bytes.set(kFirst.offset);
  world.rows[0].length_bytes.set(100);
  world.rows[0].generation.set(1);
  Explorer<World> explorer(std::move(program));
  Outcome outcome{.fault = explorer.explore(world)};
  outcome.states = explorer.state_count();
  outcome.ends = explorer.end_count();
  return outcome;
}

/// Each of the daemon's programs beside two clients.
class EveryOrder : public testing::TestWithParam<DaemonProgram> {};

TEST_P(EveryOrder, no_lease_is_of_a_slot_that_is_freed_reused_or_written) {
  const Outcome outcome = explore({.daemon = GetParam()});
  EXPECT_EQ(outcome.fault, std::nullopt) << *outcome.fault;
  EXPECT_GT(outcome.states, 10'000U);
  EXPECT_GT(outcome.ends, 1U);
}

INSTANTIATE_TEST_SUITE_P(ResidentLeaseModel,
                         EveryOrder,
                         testing::Values(evict_and_reuse,
                                         come_back_with_the_same_word,
                                         update,
                                         update_and_evict,
                                         grant_a_writer,
                                         copy_for_a_writer,
                                         detach_and_reuse));

TEST(ResidentLeaseModel, clients_of_both_shards_are_right_while_these_change_places) {
  for (const DaemonProgram daemon : {evict_and_reuse, come_back_with_the_same_word}) {
    Scenario scenario{.daemon = daemon, .clients_die = false};
    scenario.clients[0].shards = {0, 1};
    scenario.clients[1].shards = {1, 0};
    const Outcome outcome = explore(scenario);
    EXPECT_EQ(outcome.fault, std::nullopt) << *outcome.fault;
  }
}

TEST(ResidentLeaseModel, who_follows_a_step_leases_what_it_made_and_nobody_else_does) {
  for (const DaemonProgram daemon : {step_and_commit, step_and_fail, accept_and_fail}) {
    const Outcome outcome = explore({.daemon = daemon, .follows_a_step = true});
    EXPECT_EQ(outcome.fault, std::nullopt) << *outcome.fault;
    EXPECT_GT(outcome.states, 5'000U);
  }
}

TEST(ResidentLeaseModel, a_group_that_changes_shows_no_value_to_who_is_not_in_the_steps_group) {
  for (const DaemonProgram daemon : {commit_and_change_group,
                                     fail_and_change_group,
                                     change_group_and_update_in_place,
                                     leave_and_join}) {
    const Outcome outcome = explore({.daemon = daemon});
    EXPECT_EQ(outcome.fault, std::nullopt) << *outcome.fault;
    EXPECT_GT(outcome.states, 10'000U);
  }
}

TEST(ResidentLeaseModel, a_daemon_that_takes_over_shows_no_value_to_another_group) {
  Scenario scenario{.daemon = show_a_step, .next_daemon = take_over_and_step};
  scenario.clients[0].rounds = 1;
  const Outcome outcome = explore(scenario);
  EXPECT_EQ(outcome.fault, std::nullopt) << *outcome.fault;
  EXPECT_GT(outcome.states, 10'000U);
}

TEST(ResidentLeaseModel, a_daemon_that_takes_over_frees_nothing_that_is_leased) {
  Scenario scenario{.daemon = evict_with_a_ledger, .next_daemon = take_over};
  scenario.clients[0].rounds = 1;
  scenario.clients[1].rounds = 1;
  const Outcome outcome = explore(scenario);
  EXPECT_EQ(outcome.fault, std::nullopt) << *outcome.fault;
  EXPECT_GT(outcome.states, 10'000U);
}

// ---- What would be wrong is found ---------------------------------------------------------------

struct Mistake {
  const char* name;
  Scenario scenario;
  const char* fault;
};

Scenario with_lease(Lease lease, DaemonProgram daemon) {
  Scenario scenario{.daemon = daemon, .clients_die = false};
  scenario.clients[0] = {.lease = lease, .rounds = 1};
  scenario.clients[1] = {.rounds = 1};
  return scenario;
}

Scenario with_mistakes(const DaemonMistakes& mistakes,
                       DaemonProgram daemon,
                       DaemonProgram next_daemon = nullptr) {
  Scenario scenario{
      .daemon = daemon, .next_daemon = next_daemon, .mistakes = mistakes, .clients_die = false};
  scenario.clients[0].rounds = 1;
  scenario.clients[1].rounds = 1;
  return scenario;
}

Scenario with_release(void (*release)(World&, uint32_t, uint32_t)) {
  Scenario scenario = with_mistakes({}, evict_and_reuse);
  scenario.clients[0].release = release;
  return scenario;
}

Scenario with_step(const DaemonMistakes& mistakes,
                   DaemonProgram daemon,
                   Lease lease = lease_rightly) {
  Scenario scenario = with_mistakes(mistakes, daemon);
  scenario.clients[0].lease = lease;
  scenario.follows_a_step = true;
  return scenario;
}

/// `lease` is the client's that must not see the other's value.
Scenario with_group(const DaemonMistakes& mistakes,
                    DaemonProgram daemon,
                    uint32_t client = 0,
                    Lease lease = lease_rightly) {
  Scenario scenario = with_mistakes(mistakes, daemon);
  scenario.clients[client].lease = lease;
  return scenario;
}

class EveryMistake : public testing::TestWithParam<Mistake> {};

TEST_P(EveryMistake, is_found_in_some_order) {
  const Outcome outcome = explore(GetParam().scenario);
  ASSERT_TRUE(outcome.fault.has_value()) << outcome.states << " states and nothing found";
  EXPECT_NE(outcome.fault->find(GetParam().fault), std::string::npos) << *outcome.fault;
}

INSTANTIATE_TEST_SUITE_P(
    ResidentLeaseModel,
    EveryMistake,
    testing::Values(
        Mistake{"pins_after_the_look",
                with_lease(pin_after_the_look, evict_and_reuse),
                "not the shard's any more"},
        Mistake{"never_looks_again",
                with_lease(never_look_again, evict_and_reuse),
                "not the shard's any more"},
        Mistake{"reads_the_place_before_the_pin",
                with_lease(read_the_place_before_the_pin, come_back_with_the_same_word),
                "not the shard's any more"},
        Mistake{"does_not_look_a_third_time",
                with_lease(no_third_look, update_and_evict),
                "not the shard's any more"},
        Mistake{"leases_without_a_session",
                with_lease(no_look_at_requests_only, detach_and_reuse),
                "not the shard's any more"},
        Mistake{"releases_without_a_look", with_release(release_without_a_look), "waits for ever"},
        Mistake{"looks_before_it_withdraws",
                with_mistakes({.looks_before_it_withdraws = true}, evict_and_reuse),
                "client"},
        Mistake{"wants_releases_after_it_looked",
                with_mistakes({.wants_releases_after_it_looked = true}, evict_and_reuse),
                "waits for ever"},
        Mistake{"copies_without_a_withdrawal",
                with_mistakes({.copies_without_a_withdrawal = true}, copy_for_a_writer),
                "not the shard's any more"},
        Mistake{"writes_without_a_withdrawal",
                with_mistakes({.writes_without_a_withdrawal = true}, grant_a_writer),
                "being written"},
        Mistake{"detaches_before_it_says_so",
                with_mistakes({.detaches_before_it_says_so = true}, detach_and_reuse),
                "client 0"},
        Mistake{"does_not_clear_the_table",
                with_mistakes({.does_not_clear_the_table = true}, evict_with_a_ledger, take_over),
                "client"},
        Mistake{"frees_in_the_ledger_first",
                with_mistakes({.frees_in_the_ledger_first = true}, evict_with_a_ledger, take_over),
                "client"},
        Mistake{"accounts_before_it_withdraws",
                with_step({.accounts_before_it_withdraws = true}, step_and_commit),
                "before the step"},
        Mistake{"publishes_before_it_takes_back",
                with_step({.publishes_before_it_takes_back = true}, step_and_fail),
                "before the step"},
        Mistake{"shows_everybody_what_is_not_committed",
                with_step({.shows_everybody = true}, step_and_fail),
                "nobody has committed"},
        Mistake{"does_not_leave_the_group",
                with_group({.does_not_leave = true}, commit_and_change_group),
                "client 0 holds what nobody has committed"},
        Mistake{"joins_the_group_before_it_withdraws",
                with_group({.joins_before_it_withdraws = true}, fail_and_change_group),
                "client 1 holds what nobody has committed"},
        Mistake{"looks_at_the_group_at_the_start_alone",
                with_group({}, commit_and_change_group, 0, look_at_the_group_at_the_start),
                "client 0 holds what nobody has committed"},
        Mistake{"looks_at_the_group_at_the_end_alone",
                with_group({}, fail_and_change_group, 1, look_at_the_group_at_the_end),
                "client 1 holds what nobody has committed"},
        Mistake{"looks_at_the_call_at_the_end_alone",
                with_step({}, step_and_commit, look_at_the_call_at_the_end),
                "before the step"},
        Mistake{"looks_at_the_call_at_the_start_alone",
                with_step({}, step_and_fail, look_at_the_call_at_the_start),
                "before the step"}),
    [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace memd
