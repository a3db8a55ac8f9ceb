// Private views of an arena, on mappings of a memfd of our own.
#include "ring/read_views.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>

#include "base/units.h"
#include "no_memory.h"

namespace memd {
namespace {

constexpr uint64_t kSegment = 1_MiB;
constexpr uint64_t kPage = 4_KiB;

/// Each way in which the kernel is asked for written pages, with small views and without.
class ReadViewsTest : public testing::TestWithParam<std::tuple<PageLook, uint64_t>> {
 protected:
  ReadViewsTest() : segment_(memfd_create("segment", MFD_CLOEXEC)) {
    EXPECT_EQ(ftruncate(segment_.get(), kSegment), 0);
    void* shared = mmap(nullptr, kSegment, PROT_READ | PROT_WRITE, MAP_SHARED, segment_.get(), 0);
    EXPECT_NE(shared, MAP_FAILED);
    arena_ = static_cast<std::byte*>(shared);
    std::memset(arena_, 1, kSegment);
    map();
  }
  ~ReadViewsTest() override { munmap(arena_, kSegment); }
  static WrittenPages look() { return WrittenPages(std::get<0>(GetParam())); }
  static uint64_t small_bytes() { return std::get<1>(GetParam()); }
  static void write(std::byte* at, int value) { *at = static_cast<std::byte>(value); }
  static int read(const std::byte* at) { return static_cast<int>(*at); }
  void map() {
    views_ = ReadViews::reserve(arena_, kSegment, look(), small_bytes()).value();
    EXPECT_TRUE(views_->map_segment(0, kSegment, segment_).is_ok());
  }

  OwnedFd segment_;
  std::byte* arena_ = nullptr;
  std::unique_ptr<ReadViews> views_;
};

TEST_P(ReadViewsTest, a_view_shows_the_arena_and_a_write_stays_in_it) {
  std::byte* view = views_->begin(0, 64 * kPage);
  EXPECT_EQ(read(view + 5 * kPage), 1);
  write(arena_ + 5 * kPage, 2);
  EXPECT_EQ(read(view + 5 * kPage), 2);
  EXPECT_FALSE(views_->is_written(view, 64 * kPage));
  write(view + 5 * kPage + 7, 9);
  EXPECT_EQ(read(arena_ + 5 * kPage + 7), 1);
  EXPECT_TRUE(views_->is_written(view, 64 * kPage));
  EXPECT_FALSE(views_->end_unless_written(view, 64 * kPage));
  EXPECT_EQ(read(view + 5 * kPage + 7), 9) << "it lives on";
  views_->end(view, 64 * kPage);
}

TEST_P(ReadViewsTest, the_place_of_a_part_of_a_living_view_is_that_of_its_bytes_in_the_arena) {
  std::byte* large = views_->begin(8 * kPage, 4 * kPage);
  std::byte* small = views_->begin(20 * kPage + 64, 128);
  EXPECT_EQ(views_->place(large, 4 * kPage), 8 * kPage);
  EXPECT_EQ(views_->place(large + 5, kPage), 8 * kPage + 5);
  EXPECT_EQ(views_->place(small, 128), 20 * kPage + 64);
  EXPECT_EQ(views_->place(small + 28, 100), 20 * kPage + 92);
  EXPECT_EQ(views_->place(arena_ + 7, 9), 7u);
  EXPECT_EQ(views_->place(large + 1, 4 * kPage), std::nullopt) << "beyond its end";
  EXPECT_EQ(views_->place(small + 29, 100), std::nullopt);
  EXPECT_EQ(views_->place(arena_ + kSegment - 1, 2), std::nullopt);
  const std::byte elsewhere{};
  EXPECT_EQ(views_->place(&elsewhere, 1), std::nullopt);
  std::byte* hidden = views_->begin(8 * kPage, 4 * kPage);
  write(large, 9);
  std::byte* own = views_->begin(8 * kPage, 4 * kPage);
  EXPECT_NE(own, large) << "its bytes are hidden there";
  EXPECT_EQ(views_->place(own, 4 * kPage), 8 * kPage);
  views_->end(own, 4 * kPage);
  views_->end(hidden, 4 * kPage);
  views_->end(large, 4 * kPage);
  views_->end(small, 128);
  if (large != hidden) return;
  EXPECT_EQ(views_->place(large, 1), std::nullopt) << "it lives no more";
}

TEST_P(ReadViewsTest, the_next_view_of_the_place_shows_what_the_arena_has_by_then) {
  std::byte* view = views_->begin(kPage, 2 * kPage);
  write(view, 9);
  write(view + 2 * kPage - 1, 9);
  views_->end(view, 2 * kPage);
  std::memset(arena_, 3, kSegment);
  view = views_->begin(kPage, 2 * kPage);
  EXPECT_EQ(std::memcmp(view, arena_ + kPage, 2 * kPage), 0);
  EXPECT_TRUE(views_->end_unless_written(view, 2 * kPage));
}

TEST_P(ReadViewsTest, bytes_that_were_written_as_they_were_end_as_if_untouched) {
  std::byte* view = views_->begin(0, kPage);
  write(view, 1);
  EXPECT_TRUE(views_->end_unless_written(view, kPage));
  write(arena_, 4);
  view = views_->begin(0, kPage);
  EXPECT_EQ(read(view), 4) << "a page of ours hides the arena's";
  EXPECT_TRUE(views_->end_unless_written(view, kPage));
}

TEST_P(ReadViewsTest, of_two_views_on_a_page_only_the_written_one_is_written) {
  std::byte* first = views_->begin(0, 128);
  std::byte* second = views_->begin(128, 2 * kPage);
  write(first + 5, 9);
  EXPECT_TRUE(views_->is_written(first, 128));
  EXPECT_TRUE(views_->end_unless_written(second, 2 * kPage));
  EXPECT_EQ(read(first + 5), 9) << "its page is not the other's to drop";
  EXPECT_FALSE(views_->end_unless_written(first, 128));
  views_->end(first, 128);
  std::memset(arena_, 6, kSegment);
  first = views_->begin(0, 128);
  EXPECT_EQ(read(first + 5), 6);
  EXPECT_TRUE(views_->end_unless_written(first, 128));
}

TEST_P(ReadViewsTest, the_last_view_of_a_page_drops_it) {
  std::byte* first = views_->begin(0, 128);
  std::byte* second = views_->begin(128, 64);
  write(first, 9);
  views_->end(first, 128);
  EXPECT_TRUE(views_->end_unless_written(second, 64));
  write(arena_, 5);
  first = views_->begin(0, 128);
  EXPECT_EQ(read(first), 5);
  EXPECT_TRUE(views_->end_unless_written(first, 128));
}

TEST_P(ReadViewsTest, a_page_that_another_view_wrote_hides_no_later_bytes) {
  std::byte* first = views_->begin(0, 128);
  write(first, 9);         // a copy of the page
  write(arena_ + 128, 7);  // and then somebody changes the bytes beside them
  write(arena_ + kPage, 8);
  std::byte* second = views_->begin(128, 2 * kPage);
  EXPECT_EQ(read(second), 7);
  EXPECT_EQ(read(second + kPage - 128), 8);
  EXPECT_FALSE(views_->is_written(second, 2 * kPage));
  write(second, 3);
  EXPECT_TRUE(views_->is_written(second, 2 * kPage));
  EXPECT_FALSE(views_->end_unless_written(second, 2 * kPage));
  write(second, 7);
  EXPECT_TRUE(views_->end_unless_written(second, 2 * kPage));
  EXPECT_EQ(read(first), 9);
  views_->end(first, 128);
}

TEST_P(ReadViewsTest, the_page_at_the_end_of_a_view_hides_nothing_either) {
  std::byte* last = views_->begin(kPage + 64, 64);
  write(last, 9);
  write(arena_ + kPage, 7);
  std::byte* first = views_->begin(0, kPage + 64);
  EXPECT_EQ(read(first + kPage), 7);
  EXPECT_TRUE(views_->end_unless_written(first, kPage + 64));
  views_->end(last, 64);
}

TEST_P(ReadViewsTest, a_view_of_what_another_wrote_shows_the_arena) {
  std::byte* written = views_->begin(0, 2 * kPage);
  write(written + kPage, 9);
  std::byte* view = views_->begin(0, 2 * kPage);
  EXPECT_NE(view, written);
  EXPECT_EQ(read(view + kPage), 1);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(view) % kViewAlignmentBytes, 0U);
  EXPECT_TRUE(views_->end_unless_written(view, 2 * kPage));
  views_->end(written, 2 * kPage);
}

TEST_P(ReadViewsTest, equal_views_of_which_one_has_ended_are_one_place_still) {
  std::byte* first = views_->begin(64, 128);
  std::byte* second = views_->begin(64, 128);
  ASSERT_EQ(first, second);
  EXPECT_TRUE(views_->end_unless_written(first, 128));
  std::byte* third = views_->begin(64, 128);
  EXPECT_EQ(third, second);
  std::byte* longer = views_->begin(64, 192);
  EXPECT_NE(longer, second) << "another shard's, whose end differs";
  EXPECT_TRUE(views_->end_unless_written(longer, 192));
  EXPECT_TRUE(views_->end_unless_written(third, 128));
  write(second, 9);
  std::byte* apart = views_->begin(64, 128);
  EXPECT_EQ(read(apart), 1);
  EXPECT_TRUE(views_->end_unless_written(apart, 128));
  EXPECT_FALSE(views_->end_unless_written(second, 128));
  views_->end(second, 128);
  write(arena_ + 64, 4);
  first = views_->begin(64, 128);
  EXPECT_EQ(read(first), 4);
  EXPECT_TRUE(views_->end_unless_written(first, 128));
}

TEST_P(ReadViewsTest, equal_views_are_one_place_until_the_last_has_ended) {
  std::byte* first = views_->begin(0, kPage);
  std::byte* second = views_->begin(0, kPage);
  EXPECT_EQ(first, second);
  write(first, 9);
  views_->end(second, kPage);
  EXPECT_EQ(read(first), 9);
  EXPECT_FALSE(views_->end_unless_written(first, kPage));
  views_->end(first, kPage);
  first = views_->begin(0, kPage);
  EXPECT_EQ(read(first), 1);
  EXPECT_TRUE(views_->end_unless_written(first, kPage));
}

TEST_P(ReadViewsTest, what_memd_shows_is_no_write_and_what_comes_after_it_is) {
  std::byte* view = views_->begin(0, 2 * kPage);
  write(view + kPage, 5);
  std::byte* own = views_->begin(0, 2 * kPage);
  ASSERT_NE(own, view);
  std::memset(own, 5, 2 * kPage);
  for (std::byte* each : {view, own}) {
    EXPECT_TRUE(views_->is_written(each, 2 * kPage));
    views_->note_shown(each, 2 * kPage);
    EXPECT_FALSE(views_->is_written(each, 2 * kPage));
    const int shown = read(each + kPage);
    write(each + kPage, 1);
    EXPECT_TRUE(views_->is_written(each, 2 * kPage)) << "also with the arena's bytes";
    EXPECT_FALSE(views_->end_unless_written(each, 2 * kPage));
    write(each + kPage, shown);
    EXPECT_TRUE(views_->end_unless_written(each, 2 * kPage));
  }
  view = views_->begin(0, 2 * kPage);
  EXPECT_EQ(read(view + kPage), 1) << "the arena's, of which nothing is noted";
  write(view, 5);
  EXPECT_TRUE(views_->is_written(view, 2 * kPage));
  views_->end(view, 2 * kPage);
}

TEST_P(ReadViewsTest, without_memory_for_a_view_of_its_own_there_is_none) {
  if (!NoMemory::is_possible()) GTEST_SKIP() << "a sanitizer needs memory";
  std::byte* written = views_->begin(0, kSegment);
  write(written, 9);
  {
    const NoMemory none;
    EXPECT_EQ(views_->begin(0, kSegment), nullptr);
  }
  std::byte* view = views_->begin(0, kSegment);
  ASSERT_NE(view, nullptr);
  EXPECT_EQ(read(view), 1);
  EXPECT_TRUE(views_->end_unless_written(view, kSegment));
  views_->end(written, kSegment);
  view = views_->begin(0, kSegment);
  EXPECT_EQ(read(view), 1);
  EXPECT_TRUE(views_->end_unless_written(view, kSegment));
}

TEST_P(ReadViewsTest, views_stay_private_when_segments_of_huge_pages_follow) {
  const OwnedFd huge(memfd_create("huge", MFD_CLOEXEC | MFD_HUGETLB));
  if (!huge.is_open()) GTEST_SKIP() << "no huge pages: " << std::strerror(errno);
  void* reserved = mmap(nullptr, 4 * kSegment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(reserved, MAP_FAILED);
  auto* arena = static_cast<std::byte*>(reserved);
  for (const int place : {0, 2}) {
    void* mapped = mmap(arena + place * kSegment,
                        kSegment,
                        PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED,
                        segment_.get(),
                        0);
    ASSERT_NE(mapped, MAP_FAILED);
  }
  views_ = ReadViews::reserve(arena, 4 * kSegment, look(), small_bytes()).value();
  ASSERT_TRUE(views_->map_segment(0, kSegment, segment_).is_ok());
  std::byte* view = views_->begin(0, kPage);
  write(view, 9);
  EXPECT_TRUE(views_->is_private());
  ASSERT_TRUE(views_->map_segment(kSegment, kSegment, huge).is_ok());
  ASSERT_TRUE(views_->map_segment(2 * kSegment, kSegment, segment_).is_ok());
  ASSERT_TRUE(views_->map_segment(3 * kSegment, kSegment, huge).is_ok());
  EXPECT_FALSE(views_->is_private());
  EXPECT_TRUE(views_->is_written(view, kPage));
  EXPECT_FALSE(views_->end_unless_written(view, kPage));
  views_->end(view, kPage);
  for (const uint64_t offset : {uint64_t{0}, 2 * kSegment}) {
    view = views_->begin(offset, kSegment);
    EXPECT_NE(view, arena + offset);
    EXPECT_EQ(read(view), 1);
    EXPECT_TRUE(views_->end_unless_written(view, kSegment));
  }
  for (const uint64_t offset : {kSegment - kPage, kSegment, 2 * kSegment - kPage, 3 * kSegment}) {
    view = views_->begin(offset, kPage + 64);
    EXPECT_EQ(view, arena + offset);
    EXPECT_TRUE(views_->end_unless_written(view, kPage + 64));
  }
  views_.reset();
  munmap(reserved, 4 * kSegment);
}

INSTANTIATE_TEST_SUITE_P(
    each_look,
    ReadViewsTest,
    testing::Combine(testing::Values(PageLook::scan, PageLook::table, PageLook::nothing),
                     testing::Values(uint64_t{0}, ReadViews::kSmallBytes)));

/// Runs `test` in a child, whose memory alone is locked. It maps a segment itself: the page table
/// that is asked is that of the process that has opened it.
void in_child(const std::function<void()>& test) {
  const pid_t child = fork();
  if (child == 0) {
    test();
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_P(ReadViewsTest, a_segment_that_is_mapped_when_all_memory_is_locked_shows_the_arena) {
  in_child([&] {
    ASSERT_EQ(mlockall(MCL_FUTURE), 0) << errno;
    map();
    write(arena_ + 5 * kPage, 2);
    std::byte* view = views_->begin(0, 64 * kPage);
    EXPECT_EQ(read(view + 5 * kPage), 2);
    write(arena_ + 6 * kPage, 3);
    EXPECT_EQ(read(view + 6 * kPage), 3);
    write(view + 7 * kPage, 9);
    EXPECT_TRUE(views_->is_written(view, 64 * kPage));
    views_->end(view, 64 * kPage);
    view = views_->begin(0, 64 * kPage);
    EXPECT_EQ(read(view + 7 * kPage), 1);
    EXPECT_TRUE(views_->end_unless_written(view, 64 * kPage));
  });
}

TEST_P(ReadViewsTest, views_that_begin_after_all_memory_was_locked_show_the_arena) {
  in_child([&] {
    map();
    std::byte* before = views_->begin(8 * kPage + 64, 64);
    write(before, 9);
    ASSERT_EQ(mlockall(MCL_CURRENT), 0) << errno;
    std::memset(arena_, 2, 8 * kPage);
    std::memset(arena_ + 9 * kPage, 2, 8 * kPage);
    std::byte* view = views_->begin(0, 8 * kPage);
    EXPECT_EQ(read(view + 5 * kPage), 2);
    EXPECT_TRUE(views_->end_unless_written(view, 8 * kPage));
    view = views_->begin(9 * kPage, 8 * kPage);
    EXPECT_EQ(read(view + 5 * kPage), 2);
    EXPECT_TRUE(views_->end_unless_written(view, 8 * kPage));
    EXPECT_EQ(read(before), 9);
    EXPECT_FALSE(views_->end_unless_written(before, 64));
    views_->end(before, 64);
    ASSERT_EQ(mlockall(MCL_CURRENT), 0) << errno;
    write(arena_, 3);
    view = views_->begin(0, kPage);
    EXPECT_EQ(read(view), 3) << "and again";
    EXPECT_TRUE(views_->end_unless_written(view, kPage));
  });
}

TEST_P(ReadViewsTest, a_view_ends_after_all_memory_was_locked) {
  in_child([&] {
    map();
    std::byte* view = views_->begin(0, 2 * kPage);
    write(view, 9);
    ASSERT_EQ(mlockall(MCL_CURRENT), 0) << errno;
    views_->end(view, 2 * kPage);
    write(arena_, 2);
    write(arena_ + kPage, 2);
    view = views_->begin(0, 2 * kPage);
    EXPECT_EQ(read(view), 2);
    EXPECT_EQ(read(view + kPage), 2);
    EXPECT_TRUE(views_->end_unless_written(view, 2 * kPage));
  });
}

TEST(WrittenPagesTest, only_written_pages_are_named) {
  WrittenPages asked;
  if (asked.look() == PageLook::nothing) GTEST_SKIP() << "no page table of ours in /proc";
  const OwnedFd file(memfd_create("file", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(file.get(), 64 * kPage), 0);
  void* mapped = mmap(nullptr, 64 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE, file.get(), 0);
  auto* pages = static_cast<std::byte*>(mapped);
  for (const int i : {3, 4, 9, 63}) std::memset(pages + i * kPage, 1, 1);
  for (const PageLook look : {asked.look(), PageLook::table}) {
    const auto found = WrittenPages(look).find(pages + 100, 64 * kPage - 200);
    ASSERT_EQ(found.size(), 3U);
    EXPECT_EQ(found[0].data(), pages + 3 * kPage);
    EXPECT_EQ(found[0].size(), 2 * kPage);
    EXPECT_EQ(found[1].data(), pages + 9 * kPage);
    EXPECT_EQ(found[2].data(), pages + 63 * kPage);
    EXPECT_TRUE(WrittenPages(look).find(pages + 5 * kPage, 4 * kPage).empty());
  }
  // More ranges than one question is answered with.
  for (int i = 0; i < 64; i += 2) std::memset(pages + i * kPage, 1, 1);
  EXPECT_EQ(asked.find(pages, 64 * kPage).size(), 30U);
  munmap(mapped, 64 * kPage);
}

}  // namespace
}  // namespace memd
