// Runs small programs of several threads in every order of their steps.
//
// A step is one access to a Word, and what follows it up to the next one. Orders that lead to the
// same state are followed once: a thread is deterministic, so that where it stands, and with which
// local variables, is said by what its accesses returned. To make a step its section is run from
// the start, with what was returned before; there are no stacks to copy.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace memd::schedules {

/// Leaves a thread's program at its next step.
struct Suspended {};
/// The step can't be made yet: somebody else has to go first.
struct Blocked {};

/// One step of one thread: what its section's accesses returned before, and then one more.
class Step {
 public:
  explicit Step(std::vector<uint64_t>& results) : results_(results), known_(results.size()) {}

  template <typename Access>
  uint64_t access(const Access& access) {
    if (next_ < results_.size()) return results_[next_++];
    if (is_made_) throw Suspended{};
    is_made_ = true;
    results_.push_back(access());
    ++next_;
    return results_.back();
  }
  /// What the thread reads of what only it changes, or of what it saw in the same step: no step of
  /// its own, and remembered.
  template <typename Read>
  uint64_t local(const Read& read) {
    if (next_ == results_.size()) results_.push_back(read());
    return results_[next_++];
  }
  /// Whether the program is beyond what was done in earlier steps.
  bool is_new() const { return next_ >= known_ && (is_made_ || known_ == 0); }

  static inline Step* current = nullptr;

 private:
  std::vector<uint64_t>& results_;
  size_t known_;
  size_t next_ = 0;
  bool is_made_ = false;
};

/// Has the interface of std::atomic, as far as the protocol uses it.
template <typename T>
class Word {
 public:
  Word() = default;
  explicit Word(T value) : value_(value) {}
  T load() const {
    return static_cast<T>(Step::current->access([&] { return uint64_t{value_}; }));
  }
  void store(T value) {
    Step::current->access([&] { return uint64_t{value_ = value}; });
  }
  T fetch_add(T value) {
    return static_cast<T>(Step::current->access([&] {
      const T before = value_;
      value_ = static_cast<T>(value_ + value);
      return uint64_t{before};
    }));
  }
  T fetch_sub(T value) {
    return static_cast<T>(Step::current->access([&] {
      const T before = value_;
      value_ = static_cast<T>(value_ - value);
      return uint64_t{before};
    }));
  }
  /// For who looks at the state from outside.
  T peek() const { return value_; }
  void set(T value) { value_ = value; }

 private:
  T value_{};
};

/// What a thread does to its own, unshared part of the state, once.
template <typename Effect>
void effect(const Effect& change) {
  if (Step::current->is_new()) change();
}

template <typename Read>
uint64_t local(const Read& read) {
  return Step::current->local([&] { return static_cast<uint64_t>(read()); });
}

/// A step that waits until `holds`, which only looks.
template <typename Holds>
void block_until(const Holds& holds) {
  Step::current->access([&] {
    if (!holds()) throw Blocked{};
    return uint64_t{1};
  });
}

struct Thread {
  uint32_t section = 0;
  std::vector<uint64_t> results;  // of the section's accesses so far
  bool is_done = false;
  bool is_dead = false;
};

/// All orders of one program. `World` is copied for every step; it has `threads`,
/// `append_to(bytes)` with all else that its future depends on, and `broken()`: what must never be
/// true, or "".
template <typename World>
class Explorer {
 public:
  /// One section of a thread; false: it was the last one.
  using Section = std::function<bool(World&, uint32_t section)>;

  struct Program {
    std::vector<Section> threads;
    /// Threads that may die at any moment.
    std::vector<bool> may_die;
  };

  explicit Explorer(Program program) : program_(std::move(program)) {}

  /// What is wrong in some order, with that order; nothing where all are right.
  std::optional<std::string> explore(const World& world) {
    states_.clear();
    path_.clear();
    fault_.reset();
    visit(world);
    return fault_;
  }
  size_t state_count() const { return states_.size(); }
  size_t end_count() const { return end_count_; }

 private:
  bool step(World& world, size_t index) {
    Thread& thread = world.threads[index];
    if (thread.is_done || thread.is_dead) return false;
    Step step(thread.results);
    Step::current = &step;
    bool goes_on = true;
    bool ended = true;
    try {
      goes_on = program_.threads[index](world, thread.section);
    } catch (const Suspended&) {
      ended = false;
    } catch (const Blocked&) {
      return false;
    }
    if (!ended) return true;
    // What is local to a section ends with it.
    thread.results.clear();
    ++thread.section;
    thread.is_done = !goes_on;
    return true;
  }

  void visit(const World& world) {
    bool any = false;
    for (size_t index = 0; index < world.threads.size() && !fault_; ++index) {
      World next = world;
      if (!step(next, index)) continue;
      any = true;
      follow(next, concat_step(index, ""));
      if (fault_ || !program_.may_die[index]) continue;
      World without = world;
      without.threads[index].is_dead = true;
      follow(without, concat_step(index, " dies"));
    }
    if (any || fault_) return;
    ++end_count_;
    for (size_t index = 0; index < world.threads.size(); ++index) {
      const Thread& thread = world.threads[index];
      if (!thread.is_done && !thread.is_dead) fail(concat_step(index, " waits for ever"));
    }
    if (const std::string what = world.broken_at_end(); !what.empty()) fail(what);
  }

  static std::string concat_step(size_t index, const std::string& what) {
    return std::to_string(index) + what;
  }

  void follow(const World& next, std::string name) {
    path_.push_back(std::move(name));
    if (const std::string what = next.broken(); !what.empty()) {
      fail(what);
    } else if (states_.insert(digest(next)).second) {
      visit(next);
    }
    path_.pop_back();
  }

  void fail(const std::string& what) {
    if (fault_) return;
    std::string text = what + "; steps of threads:";
    for (const std::string& each : path_) text += " " + each;
    fault_ = std::move(text);
  }

  struct Digest {
    uint64_t a;
    uint64_t b;
    bool operator==(const Digest&) const = default;
  };
  struct DigestHash {
    size_t operator()(const Digest& digest) const { return digest.a; }
  };

  /// Of 128 bits: of some millions of states no two have the same.
  static Digest digest(const World& world) {
    std::vector<uint64_t> all;
    world.append_to(all);
    for (const Thread& thread : world.threads) {
      all.push_back(thread.section << 2 | uint32_t{thread.is_done} << 1 | uint32_t{thread.is_dead});
      all.push_back(thread.is_dead ? 0 : thread.results.size());
      if (!thread.is_dead) all.insert(all.end(), thread.results.begin(), thread.results.end());
    }
    Digest out{0x9e3779b97f4a7c15, 0xc2b2ae3d27d4eb4f};
    for (const uint64_t each : all) {
      out.a = (out.a ^ each) * 0xff51afd7ed558ccd;
      out.a ^= out.a >> 32;
      out.b = (out.b + each) * 0xc4ceb9fe1a85ec53;
      out.b ^= out.b >> 29;
    }
    return out;
  }

  Program program_;
  std::unordered_set<Digest, DigestHash> states_;
  std::vector<std::string> path_;
  std::optional<std::string> fault_;
  size_t end_count_ = 0;
};

}  // namespace memd::schedules
