// CHECK: our own bugs. Prints the condition and both values as the last line of the log, then
// aborts; never used on what a client or a disk sent.
#pragma once

#include <array>
#include <cstddef>
#include <ostream>
#include <streambuf>
#include <string>
#include <string_view>

namespace memd::internal {

/// Text that is cut where its room ends. It takes no memory: there may be none when a check fails.
template <size_t Bytes>
class FixedText : private std::streambuf {
 public:
  FixedText() : stream_(this) { setp(room_.data(), room_.data() + room_.size()); }

  std::ostream& stream() { return stream_; }
  std::string_view view() const { return {pbase(), static_cast<size_t>(pptr() - pbase())}; }

 private:
  std::array<char, Bytes> room_;
  std::ostream stream_;
};

using CheckedValues = FixedText<512>;

/// check_format.h says how the line is written.
[[noreturn]] void check_failed(const char* file,
                               int line,
                               std::string_view condition,
                               std::string_view values);

template <typename A, typename B>
[[noreturn]] void check_failed(
    const char* file, int line, std::string_view condition, const A& a, const B& b) {
  CheckedValues values;
  values.stream() << "(" << a << " against " << b << ")";
  check_failed(file, line, condition, values.view());
}

}  // namespace memd::internal

#define MEMD_CHECK(condition)                                                             \
  do {                                                                                    \
    if (!(condition)) ::memd::internal::check_failed(__FILE__, __LINE__, #condition, ""); \
  } while (false)

#define MEMD_CHECK_OP(a, op, b)                                                                \
  do {                                                                                         \
    const auto& check_a = (a);                                                                 \
    const auto& check_b = (b);                                                                 \
    if (!(check_a op check_b))                                                                 \
      ::memd::internal::check_failed(__FILE__, __LINE__, #a " " #op " " #b, check_a, check_b); \
  } while (false)

#define MEMD_CHECK_EQ(a, b) MEMD_CHECK_OP(a, ==, b)
#define MEMD_CHECK_NE(a, b) MEMD_CHECK_OP(a, !=, b)
#define MEMD_CHECK_LE(a, b) MEMD_CHECK_OP(a, <=, b)
#define MEMD_CHECK_LT(a, b) MEMD_CHECK_OP(a, <, b)
#define MEMD_CHECK_GE(a, b) MEMD_CHECK_OP(a, >=, b)
#define MEMD_CHECK_GT(a, b) MEMD_CHECK_OP(a, >, b)
