// When a job's commits reach the disk.
#pragma once

#include <charconv>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "base/status.h"

namespace memd {

/// "step": every commit is on disk. "every:k": commits are in memory, and every k-th on disk as
/// well. "none": only a sync is on disk, and between two syncs the disk holds no step at all.
/// Stored as one number: 0 is "step", k is "every:k", the largest is "none".
class Durability {
 public:
  static constexpr uint32_t kStep = 0;
  static constexpr uint32_t kEveryMax = uint32_t{1} << 31;
  static constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

  Durability() = default;
  static bool is_code(uint32_t code) { return code <= kEveryMax || code == kNone; }
  /// `code` is_code().
  static Durability of_code(uint32_t code) { return Durability(code); }
  static Result<Durability> parse(std::string_view text) {
    if (text == "step") return Durability(kStep);
    if (text == "none") return Durability(kNone);
    constexpr std::string_view prefix = "every:";
    if (text.starts_with(prefix)) {
      const std::string_view digits = text.substr(prefix.size());
      uint32_t count = 0;
      const auto [end, failure] =
          std::from_chars(digits.data(), digits.data() + digits.size(), count);
      const bool whole = failure == std::errc() && end == digits.data() + digits.size();
      if (whole && count >= 1 && count <= kEveryMax && digits.front() != '0') {
        return Durability(count);
      }
    }
    return error(StatusCode::invalid_argument,
                 "durability is \"step\", \"every:k\" with k from 1 to ",
                 kEveryMax,
                 ", or \"none\": '",
                 text,
                 "'");
  }

  uint32_t code() const { return code_; }
  /// Tiles are updated in place and stay in memory; otherwise every step can be undone.
  bool is_in_memory() const { return code_ != kStep; }
  bool is_none() const { return code_ == kNone; }
  /// Whether the commit that makes it `step_count` steps since the last one on disk goes there too.
  bool is_due(uint64_t step_count) const { return !is_none() && step_count >= code_; }
  std::string text() const {
    if (code_ == kStep) return "step";
    return is_none() ? "none" : "every:" + std::to_string(code_);
  }

  bool operator==(const Durability&) const = default;

 private:
  explicit Durability(uint32_t code) : code_(code) {}
  uint32_t code_ = kStep;
};

}  // namespace memd
