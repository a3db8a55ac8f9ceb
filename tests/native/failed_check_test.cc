// The line of a check that fails: plain, or as the daemon's log has it.
#include <gtest/gtest.h>

#include <string>

#include "base/check.h"
#include "base/check_format.h"

namespace memd {
namespace {

constexpr const char* kTime =
    "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{3}[+]00:00";

/// In the process of a death test alone.
void fail_as(CheckFormat format, const std::string& value) {
  set_check_format(format);
  MEMD_CHECK_EQ(value, std::string("c"));
}

TEST(FailedCheckTest, without_a_log_of_ours_the_line_is_plain) {
  EXPECT_DEATH(MEMD_CHECK_EQ(1, 2),
               "failed_check_test.cc:[0-9]+: CHECK failed: 1 == 2 [(]1 against 2[)]\n$");
  EXPECT_DEATH(MEMD_CHECK(1 > 2), "CHECK failed: 1 > 2");
}

TEST(FailedCheckTest, as_text_it_has_names_and_values) {
  const std::string line = std::string("^time=") + kTime +
                           " level=critical event=\"ended by a check that failed, which is a bug\" "
                           "logger=memd_native check=\"value == std::string[(].\"c.\"[)]\" "
                           "values=\"[(]a against c[)]\" place=[^ ]*failed_check_test.cc:[0-9]+\n$";
  EXPECT_DEATH(fail_as(CheckFormat::text, "a"), line);
}

TEST(FailedCheckTest, for_the_journal_its_priority_is_in_front) {
  EXPECT_DEATH(fail_as(CheckFormat::journal, "a"), "^<2>time=2");
}

TEST(FailedCheckTest, as_json_it_is_one_object_whatever_the_values_are) {
  const std::string head = std::string("^[{]\"time\": \"") + kTime +
                           "\", \"level\": \"critical\", \"event\": \"ended by a check that "
                           "failed, which is a bug\", \"logger\": \"memd_native\", \"check\": "
                           "\"value == std::string[(].\"c.\"[)]\", \"values\": \"";
  const std::string tail = "\", \"place\": \"[^\"]*failed_check_test.cc:[0-9]+\"[}]\n$";
  EXPECT_DEATH(fail_as(CheckFormat::json, "a\n\"\\\xff"),
               head + "[(]a.u000a.\"...u00ff against c[)]" + tail);
  // 512 characters of the values, each escaped to six.
  EXPECT_DEATH(fail_as(CheckFormat::json, std::string(10000, '\n')), head + "[(](.u000a)*" + tail);
}

}  // namespace
}  // namespace memd
