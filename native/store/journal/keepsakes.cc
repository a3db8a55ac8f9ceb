#include "store/journal/keepsakes.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace memd {
namespace {

constexpr std::string_view kLedgerPrefix = "ledger.";
constexpr std::string_view kTablePrefix = "table.";
constexpr std::string_view kTilesPrefix = "tiles.";
constexpr std::string_view kSessionPrefix = "session.";
constexpr std::string_view kDoorbellPrefix = "doorbell.";

/// The number behind `prefix`, or nothing.
std::optional<uint64_t> id_of(const std::string& name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  uint64_t id = 0;
  const char* const end = name.data() + name.size();
  const auto [stopped, failure] = std::from_chars(name.data() + prefix.size(), end, id);
  if (failure != std::errc() || stopped != end) return std::nullopt;
  return id;
}

}  // namespace

void Keepsakes::keep(const std::string& name, int fd) {
  if (keeper_ != nullptr) keeper_->keep(name, fd);
}

void Keepsakes::forget(const std::string& name) {
  if (keeper_ != nullptr) keeper_->forget(name);
}

void Keepsakes::keep_job(uint64_t job_id, int table_fd, int ledger_fd) {
  keep(concat(kTablePrefix, job_id), table_fd);
  keep(concat(kLedgerPrefix, job_id), ledger_fd);
}

void Keepsakes::keep_tiles(uint64_t job_id, int fd) { keep(concat(kTilesPrefix, job_id), fd); }
void Keepsakes::forget_ledger(uint64_t job_id) { forget(concat(kLedgerPrefix, job_id)); }
void Keepsakes::forget_table(uint64_t job_id) { forget(concat(kTablePrefix, job_id)); }
void Keepsakes::forget_tiles(uint64_t job_id) { forget(concat(kTilesPrefix, job_id)); }

void Keepsakes::keep_session(uint64_t session_id, int session_fd, int doorbell_fd) {
  keep(concat(kSessionPrefix, session_id), session_fd);
  keep(concat(kDoorbellPrefix, session_id), doorbell_fd);
}

void Keepsakes::forget_session(uint64_t session_id) {
  forget(concat(kSessionPrefix, session_id));
  forget(concat(kDoorbellPrefix, session_id));
}

std::optional<OwnedFd> Inheritance::take(const std::string& name) {
  if (all_ == nullptr) return std::nullopt;
  for (KeptDescriptor& each : *all_) {
    if (each.name == name && each.fd.is_open()) return std::move(each.fd);
  }
  return std::nullopt;
}

std::optional<Inheritance::Ledger> Inheritance::take_ledger() {
  if (all_ == nullptr) return std::nullopt;
  for (KeptDescriptor& each : *all_) {
    const auto job_id = id_of(each.name, kLedgerPrefix);
    if (job_id && each.fd.is_open()) return Ledger{.job_id = *job_id, .fd = std::move(each.fd)};
  }
  return std::nullopt;
}

std::optional<OwnedFd> Inheritance::take_table(uint64_t job_id) {
  return take(concat(kTablePrefix, job_id));
}

std::optional<OwnedFd> Inheritance::take_tiles(uint64_t job_id) {
  return take(concat(kTilesPrefix, job_id));
}

std::optional<Inheritance::Session> Inheritance::take_session(uint64_t session_id) {
  auto memory = take(concat(kSessionPrefix, session_id));
  auto doorbell = take(concat(kDoorbellPrefix, session_id));
  if (!memory || !doorbell) return std::nullopt;
  return Session{.memory = std::move(*memory), .doorbell = std::move(*doorbell)};
}

uint64_t Inheritance::session_id_max() const {
  uint64_t id_max = 0;
  if (all_ == nullptr) return id_max;
  for (const KeptDescriptor& each : *all_) {
    id_max = std::max(id_max, id_of(each.name, kSessionPrefix).value_or(0));
  }
  return id_max;
}

}  // namespace memd
