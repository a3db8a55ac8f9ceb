// CHECK: our own bugs. Prints the condition and both values, then aborts; never used on what a
// client or a disk sent.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace memd::internal {

[[noreturn]] inline void check_failed(const char* file,
                                      int line,
                                      const char* condition,
                                      const std::string& values) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s %s\n", file, line, condition, values.c_str());
  std::fflush(stderr);
  std::abort();
}

template <typename A, typename B>
std::string both_values(const A& a, const B& b) {
  std::ostringstream out;
  out << "(" << a << " against " << b << ")";
  return out.str();
}

}  // namespace memd::internal

#define MEMD_CHECK(condition)                                                             \
  do {                                                                                    \
    if (!(condition)) ::memd::internal::check_failed(__FILE__, __LINE__, #condition, ""); \
  } while (false)

#define MEMD_CHECK_OP(a, op, b)                                                                    \
  do {                                                                                             \
    const auto& check_a = (a);                                                                     \
    const auto& check_b = (b);                                                                     \
    if (!(check_a op check_b))                                                                     \
      ::memd::internal::check_failed(                                                              \
          __FILE__, __LINE__, #a " " #op " " #b, ::memd::internal::both_values(check_a, check_b)); \
  } while (false)

#define MEMD_CHECK_EQ(a, b) MEMD_CHECK_OP(a, ==, b)
#define MEMD_CHECK_NE(a, b) MEMD_CHECK_OP(a, !=, b)
#define MEMD_CHECK_LE(a, b) MEMD_CHECK_OP(a, <=, b)
#define MEMD_CHECK_LT(a, b) MEMD_CHECK_OP(a, <, b)
#define MEMD_CHECK_GE(a, b) MEMD_CHECK_OP(a, >=, b)
#define MEMD_CHECK_GT(a, b) MEMD_CHECK_OP(a, >, b)
