#include "base/check.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <iomanip>
#include <utility>

#include "base/check_format.h"

namespace memd {
namespace {

std::atomic<CheckFormat> format_of_process{CheckFormat::plain};

/// A longer value is cut, so that the line has room for all of them, escaped.
constexpr size_t kValueBytesMax = 512;
constexpr size_t kFieldCount = 7;
using Line = internal::FixedText<kFieldCount * (6 * kValueBytesMax + 32)>;

using Field = std::pair<std::string_view, std::string_view>;

bool is_printable(char c) { return c >= ' ' && c <= '~'; }

/// Writes a string of JSON. Source text is ASCII; what is not would have to be UTF-8.
void add_quoted(std::ostream& out, std::string_view value) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  out << '"';
  for (const char c : value.substr(0, kValueBytesMax)) {
    if (c == '"' || c == '\\') {
      out << '\\' << c;
    } else if (is_printable(c)) {
      out << c;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      out << "\\u00" << kDigits[byte / 16] << kDigits[byte % 16];
    }
  }
  out << '"';
}

/// Quoted where memd/log.py quotes.
void add_text(std::ostream& out, std::string_view value) {
  const bool is_plain = !value.empty() && std::all_of(value.begin(), value.end(), [](char c) {
    return is_printable(c) && c != ' ' && c != '"' && c != '=';
  });
  if (is_plain) {
    out << value.substr(0, kValueBytesMax);
  } else {
    add_quoted(out, value);
  }
}

void add_time(std::ostream& out) {
  using namespace std::chrono;
  const auto now = time_point_cast<milliseconds>(system_clock::now());
  const auto midnight = floor<days>(now);
  const year_month_day date(midnight);
  const hh_mm_ss time(now - midnight);
  const auto two = [&out](auto number) { out << std::setw(2) << number; };
  out << std::setfill('0') << static_cast<int>(date.year()) << '-';
  two(static_cast<unsigned>(date.month()));
  out << '-';
  two(static_cast<unsigned>(date.day()));
  out << 'T';
  two(time.hours().count());
  out << ':';
  two(time.minutes().count());
  out << ':';
  two(time.seconds().count());
  out << '.' << std::setw(3) << time.subseconds().count() << "+00:00";
}

void add_fields(std::ostream& out, CheckFormat format, const Field (&fields)[kFieldCount]) {
  const bool is_json = format == CheckFormat::json;
  if (is_json) out << '{';
  if (format == CheckFormat::journal) out << "<2>";
  const char* between = "";
  for (const auto& [name, value] : fields) {
    out << between;
    if (is_json) {
      add_quoted(out, name);
      out << ": ";
      add_quoted(out, value);
    } else {
      out << name << '=';
      add_text(out, value);
    }
    between = is_json ? ", " : " ";
  }
  if (is_json) out << '}';
}

/// At once, so that lines of other threads stay whole.
void write_line(std::string_view line) {
  while (!line.empty()) {
    const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    line.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace

void set_check_format(CheckFormat format) { format_of_process = format; }

namespace internal {

void check_failed(const char* file, int line, std::string_view condition, std::string_view values) {
  Line out;
  const CheckFormat format = format_of_process;
  if (format == CheckFormat::plain) {
    out.stream() << file << ':' << line << ": CHECK failed: " << condition << ' ' << values;
  } else {
    FixedText<64> time;
    add_time(time.stream());
    FixedText<kValueBytesMax> place;
    place.stream() << file << ':' << line;
    add_fields(out.stream(),
               format,
               {{"time", time.view()},
                {"level", "critical"},
                {"event", "ended by a check that failed, which is a bug"},
                {"logger", "memd_native"},
                {"check", condition},
                {"values", values},
                {"place", place.view()}});
  }
  out.stream() << '\n';
  write_line(out.view());
  std::abort();
}

}  // namespace internal
}  // namespace memd
