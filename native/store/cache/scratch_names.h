// Names of blobs that outlive no session.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>

namespace memd {

/// A blob whose name begins so is scratch: what autograd has saved between a forward and its
/// backward. No commit writes it or names its extents, it spills as gradients do, and it ends with
/// its session, whose id comes next: "@scratch/7/...". The name alone says so, and the next daemon
/// reads it too.
inline constexpr std::string_view kScratchPrefix = "@scratch/";

inline bool is_scratch_name(std::string_view name) { return name.starts_with(kScratchPrefix); }

/// The session that a scratch blob belongs to; nothing where the name has none.
inline std::optional<uint64_t> scratch_session(std::string_view name) {
  if (!is_scratch_name(name)) return std::nullopt;
  const std::string_view rest = name.substr(kScratchPrefix.size());
  const char* const last = rest.data() + rest.size();
  uint64_t session_id = 0;
  const auto [end, failure] = std::from_chars(rest.data(), last, session_id);
  if (failure != std::errc{} || end == last || *end != '/') return std::nullopt;
  return session_id;
}

}  // namespace memd
