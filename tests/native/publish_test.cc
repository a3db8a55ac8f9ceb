// Parameters whose update is made while the step that makes it still runs.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>

#include "store_fixture.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::DiskQueue;
using testing::Heart;
using testing::Held;
using testing::kDiskBytes;
using testing::kFloorSegments;
using testing::kQuotaBytes;
using testing::numbers;
using testing::parameter;
using testing::pattern;
using testing::Twin;

constexpr uint64_t kFirst = kTileElements;  // a bucket of its own
constexpr uint64_t kSecond = 3 * kTileElements;

/// Two parameters after one step, and a second step that is held up where it reads the state of
/// `second`.
class PublishTest : public ::testing::Test {
 protected:
  void make(uint64_t arena_segments) {
    heart_ = std::make_unique<Heart>(disk_, 2 * kFloorSegments + 24);
    session_ = heart_->attach(heart_->open("job", arena_segments));
    ids_ = heart_->declare(session_, {parameter("first", kFirst), parameter("second", kSecond)});
    twins_ = {Twin::fp32(numbers(kFirst, 1)), Twin::fp32(numbers(kSecond, 2))};
    for (int i : {0, 1}) heart_->write(session_, ids_[i], twins_[i].theta);
    put_gradients(10);
    ASSERT_TRUE(heart_->step(request(1)).first.is_ok());
    step_twins(10);
    for (int i : {0, 1}) old_.push_back(twins_[i].theta);
    job().tiles().drop_all(job().memory()->private_side());
    put_gradients(20);
    step_twins(20);
  }
  void put_gradients(uint32_t seed) {
    heart_->write(session_, ids_[0], numbers(kFirst, seed), Part::gradient);
    heart_->write(session_, ids_[1], numbers(kSecond, seed + 1), Part::gradient);
  }
  void step_twins(uint32_t seed) {
    twins_[0].step(settings_, numbers(kFirst, seed));
    twins_[1].step(settings_, numbers(kSecond, seed + 1));
  }
  StepRequest request(uint64_t call) const {
    return {.session_id = session_,
            .groups = {{.settings = settings_, .shard_ids = {ids_[0], ids_[1]}}},
            .staged_buffers = {},
            .step = step_number_,
            .call = call};
  }
  Job& job() { return heart_->job(session_); }
  TrainingGroup& group() { return job().cache().group(); }
  std::shared_ptr<std::optional<Held>> ask(uint32_t index,
                                           uint64_t after_call,
                                           LeaseMode mode = LeaseMode::read,
                                           Part part = Part::value) {
    return heart_->ask({.session_id = session_,
                        .shard_id = ids_[index],
                        .part = part,
                        .mode = mode,
                        .timeout_ns = 60'000'000'000,
                        .for_service = false,
                        .prefetch = false,
                        .after_call = after_call});
  }
  /// The second step, until `first` is updated and the state of `second` cannot be read.
  void begin_step(uint64_t call) {
    heart_->faults().add_fault(
        {.kind = MemoryFaultKind::stall,
         .io_kind = IoKind::read,
         .offset_bytes = job().shards().bucket(1).rest[2].extent().address.offset_bytes});
    done_.reset();
    heart_->store().operations().step(
        request(call), [this](const Status& status, const StepReport&) { done_ = status; });
    ASSERT_TRUE(heart_->until([&] {
      return job().shards().bucket(0).value->is_uncommitted() &&
             heart_->faults().fault_hit_count() > 0;
    }));
    ASSERT_FALSE(done_.has_value());
  }
  /// What is held up goes on, and its tile finds no room on the disk.
  void fail_step() {
    job().space().set_quota_bytes(job().space().used_bytes());
    heart_->faults().clear_faults();
    heart_->faults().release_stalled(
        job().shards().bucket(1).rest[2].extent().address.offset_bytes);
  }
  void expect_values(uint32_t index, const std::vector<float>& values) {
    const Held held = heart_->lease(session_, ids_[index]);
    ASSERT_TRUE(held.is_ok()) << held.status.message();
    EXPECT_TRUE(std::equal(values.begin(), values.end(), held.as<float>().begin()));
    heart_->release(held);
  }

  /// As a client leases without a request; the pin is given back at once.
  std::optional<ShardPlace> look(uint64_t session_id, uint32_t index, uint64_t after_call) {
    const auto& sessions = job().cache().sessions();
    const auto found = std::find_if(sessions.begin(), sessions.end(), [&](const auto& session) {
      return session->session_id == session_id;
    });
    const ServerRing& ring = (*found)->ring;
    const auto memory = SharedMemory::map(OwnedFd(dup(ring.session_fd())), sizeof(SessionLayout));
    auto& layout = *reinterpret_cast<SessionLayout*>(memory.value().data());
    const auto& rows =
        reinterpret_cast<const TableLayout*>(job().cache().table().memory().data())->rows;
    const PinWords<std::atomic> words{.counters = layout.pins,
                                      .counter_count = kPinCount,
                                      .release_wanted = layout.header.release_wanted,
                                      .requests_only = layout.header.requests_only,
                                      .resident_call = layout.header.resident_call,
                                      .in_group = layout.header.in_group,
                                      .after_call = after_call};
    const auto ring_nobody = [] {};
    const auto place = pin_resident(
        rows[ids_[index]], words, [](uint32_t) { return true; }, [](uint32_t) {}, ring_nobody);
    if (place)
      unpin(layout.pins[place->pin], kReaderPin, layout.header.release_wanted, ring_nobody);
    return place;
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  std::unique_ptr<Heart> heart_;
  uint64_t session_ = 0;
  std::vector<uint32_t> ids_;
  std::vector<Twin> twins_;
  std::vector<std::vector<float>> old_;  // after the first step
  std::optional<Status> done_;
  uint64_t step_number_ = 0;  // of the steps to come; 0: whichever it is
  const AdamSettings settings_{.lr = 1e-2};
};

TEST_F(PublishTest, the_steps_session_goes_on_with_what_is_updated_and_nobody_else_does) {
  make(24);
  const uint64_t other = heart_->attach(job().job_id());
  begin_step(2);
  const auto mine = ask(0, 2);
  ASSERT_TRUE(mine->has_value()) << "its update is made";
  ASSERT_TRUE((*mine)->is_ok()) << (*mine)->status.message();
  EXPECT_TRUE(
      std::equal(twins_[0].theta.begin(), twins_[0].theta.end(), (*mine)->as<float>().begin()));
  EXPECT_EQ((*mine)->grant.generation, 2u);
  EXPECT_EQ(job().progress().committed_step(), 1u);
  EXPECT_EQ(job().shards()[ids_[0]].generation, 1u) << "the commit counts it";
  const auto second = ask(1, 2);
  const auto others = heart_->ask(other, ids_[0]);
  const auto for_service = heart_->ask({.session_id = session_,
                                        .shard_id = ids_[0],
                                        .part = Part::value,
                                        .mode = LeaseMode::read,
                                        .timeout_ns = 60'000'000'000,
                                        .for_service = true});
  const auto writer = ask(0, 2, LeaseMode::write);
  const auto gradient = ask(0, 2, LeaseMode::overwrite, Part::gradient);
  const auto in_vain = heart_->ask({.session_id = session_,
                                    .shard_id = ids_[1],
                                    .part = Part::value,
                                    .mode = LeaseMode::read,
                                    .timeout_ns = 500'000,
                                    .after_call = 2});
  heart_->turns();
  for (const auto& waiting : {second, others, for_service, writer, gradient}) {
    EXPECT_FALSE(waiting->has_value());
  }
  heart_->clock.advance(1'000'000);
  heart_->turns(5);
  const auto wait_ns = job().cache().waiters().counters_until_now().lease_wait_reason_ns;
  EXPECT_EQ(wait_ns[static_cast<size_t>(LeaseWait::update)], 2'000'000u) << "second, and in vain";
  EXPECT_EQ(wait_ns[static_cast<size_t>(LeaseWait::step)], 3'000'000u) << "others and writers";
  EXPECT_EQ(wait_ns[static_cast<size_t>(LeaseWait::gradient)], 1'000'000u);
  ASSERT_TRUE(in_vain->has_value());
  EXPECT_EQ((*in_vain)->status.code(), StatusCode::deadline);
  EXPECT_EQ((*in_vain)->grant.wait_ns, 1'000'000u) << "who waited in vain is told for what, too";
  EXPECT_EQ((*in_vain)->grant.wait_reason, LeaseWait::update);
  heart_->release(**mine);
  heart_->faults().clear_faults();
  heart_->faults().release_stalled();
  ASSERT_TRUE(heart_->until([&] {
    return done_ && second->has_value() && others->has_value() && for_service->has_value() &&
           gradient->has_value();
  }));
  EXPECT_TRUE(done_->is_ok()) << done_->message();
  for (const auto& reader : {others, for_service}) {
    ASSERT_TRUE((*reader)->is_ok()) << (*reader)->status.message();
    EXPECT_TRUE(
        std::equal(twins_[0].theta.begin(), twins_[0].theta.end(), (*reader)->as<float>().begin()));
    EXPECT_EQ((*reader)->grant.generation, 2u);
  }
  EXPECT_EQ((*second)->grant.wait_reason, LeaseWait::update);
  EXPECT_EQ((*second)->grant.wait_ns, 1'000'000u);
  EXPECT_EQ((*gradient)->grant.wait_reason, LeaseWait::gradient);
  EXPECT_EQ((*mine)->grant.wait_ns, 0u);
  heart_->release(**second);
  heart_->release(**others);
  heart_->store().release_service_lease(job().job_id(), (*for_service)->grant, false);
  heart_->release(**gradient);
  ASSERT_TRUE(heart_->until([&] { return writer->has_value(); }));
  heart_->release(**writer);
  for (int i : {0, 1}) expect_values(i, twins_[i].theta);
}

TEST_F(PublishTest, what_a_step_has_updated_its_session_leases_without_a_request) {
  make(24);
  const uint64_t other = heart_->attach(job().job_id());
  EXPECT_FALSE(look(session_, 0, 2)) << "the step has not come";
  EXPECT_EQ(look(session_, 0, 0)->generation, 1u);
  begin_step(2);
  ASSERT_TRUE(look(session_, 0, 2));
  EXPECT_EQ(look(session_, 0, 2)->generation, 2u);
  EXPECT_EQ(look(session_, 0, 2)->offset_bytes,
            job().shards().bucket(0).value->slot()->offset_bytes);
  EXPECT_FALSE(look(session_, 0, 3)) << "a step that has not come";
  EXPECT_FALSE(look(session_, 1, 2)) << "not updated yet";
  EXPECT_FALSE(look(other, 0, 0)) << "not committed";
  const uint64_t late = heart_->attach(job().job_id());
  EXPECT_FALSE(look(late, 0, 0)) << "not committed";
  // A writer that waits for the commit keeps the session from nothing.
  const auto writer = ask(0, 2, LeaseMode::write);
  heart_->turns();
  EXPECT_TRUE(look(session_, 0, 2));
  heart_->faults().clear_faults();
  heart_->faults().release_stalled();
  ASSERT_TRUE(heart_->until([&] { return done_ && writer->has_value(); }));
  ASSERT_TRUE(done_->is_ok()) << done_->message();
  heart_->release(**writer);
  expect_values(0, twins_[0].theta);
  for (const uint64_t session : {session_, other, late}) {
    ASSERT_TRUE(look(session, 0, 0));
    EXPECT_EQ(look(session, 0, 0)->generation, 2u);
  }
}

TEST_F(PublishTest, what_failed_is_leased_by_request_alone_until_the_next_step) {
  make(24);
  begin_step(2);
  ASSERT_TRUE(look(session_, 0, 2));
  fail_step();
  ASSERT_TRUE(heart_->until([&] { return done_.has_value(); }));
  ASSERT_FALSE(done_->is_ok());
  job().space().set_quota_bytes(kQuotaBytes);
  for (int i : {0, 1}) expect_values(i, old_[i]);
  for (int i : {0, 1}) {
    EXPECT_FALSE(look(session_, i, 2)) << "a request says why it failed";
    ASSERT_TRUE(look(session_, i, 0));
    EXPECT_EQ(look(session_, i, 0)->generation, 1u);
  }
  ASSERT_TRUE(heart_->step(request(3)).first.is_ok());
  for (int i : {0, 1}) {
    expect_values(i, twins_[i].theta);
    EXPECT_EQ(look(session_, i, 3)->generation, 2u);
  }
}

TEST_F(PublishTest, the_next_session_does_not_inherit_what_an_ended_one_has_not_committed) {
  make(24);
  const uint64_t member = heart_->attach(job().job_id());
  ASSERT_TRUE(group().join(member).is_ok());
  begin_step(2);
  EXPECT_EQ(look(member, 0, 0)->generation, 2u);
  Job& its = job();
  const uint64_t job_id = its.job_id();
  ASSERT_TRUE(heart_->store().detach(std::exchange(session_, member)).is_ok());
  EXPECT_FALSE(look(member, 0, 0)) << "it is nobody's until the commit";
  session_ = heart_->attach(job_id);
  ASSERT_TRUE(group().join(session_).is_ok());
  EXPECT_FALSE(look(session_, 0, 0));
  fail_step();
  ASSERT_TRUE(heart_->until([&] { return done_.has_value(); }));
  ASSERT_FALSE(done_->is_ok());
  its.space().set_quota_bytes(kQuotaBytes);
  for (int i : {0, 1}) expect_values(i, old_[i]);
}

TEST_F(PublishTest, a_member_of_the_group_sees_what_its_step_has_made_and_joins_before_that_alone) {
  make(24);
  const uint64_t member = heart_->attach(job().job_id());
  const uint64_t late = heart_->attach(job().job_id());
  ASSERT_TRUE(group().join(member).is_ok());
  begin_step(2);
  EXPECT_EQ(group().join(late).code(), StatusCode::unavailable);
  for (const uint64_t session : {session_, member}) EXPECT_EQ(look(session, 0, 0)->generation, 2u);
  EXPECT_FALSE(look(late, 0, 0)) << "not committed";
  const auto by_request = heart_->ask(member, ids_[0]);
  ASSERT_TRUE(by_request->has_value() && (*by_request)->is_ok());
  EXPECT_EQ((*by_request)->grant.generation, 2u);
  heart_->release(**by_request);
  // Another session's step may not take the place of a group.
  StepRequest alone{.session_id = late, .groups = {}, .staged_buffers = {}};
  const Status refused = heart_->step(alone).first;
  EXPECT_EQ(refused.code(), StatusCode::invalid_argument);
  EXPECT_NE(refused.message().find("none of the 2 that train this job"), std::string::npos)
      << refused.message();
  heart_->faults().clear_faults();
  heart_->faults().release_stalled();
  ASSERT_TRUE(heart_->until([&] { return done_.has_value(); }));
  EXPECT_TRUE(done_->is_ok()) << done_->message();
  EXPECT_TRUE(group().join(late).is_ok());
  EXPECT_EQ(group().size(), 3U);
}

TEST_F(PublishTest, another_sessions_step_waits_for_its_turn_and_is_then_the_group) {
  make(24);
  const uint64_t other = heart_->attach(job().job_id());
  const uint32_t id = heart_->declare(other, {parameter("third", kFirst)}).front();
  heart_->write(other, id, numbers(kFirst, 7));
  heart_->write(other, id, numbers(kFirst, 8), Part::gradient);
  begin_step(2);
  std::optional<Status> others;
  heart_->store().operations().step(
      {.session_id = other,
       .groups = {{.settings = settings_, .shard_ids = {id}}},
       .staged_buffers = {},
       .call = 1},
      [&](const Status& status, const StepReport&) { others = status; });
  heart_->turns();
  EXPECT_FALSE(others.has_value());
  EXPECT_EQ(look(session_, 0, 2)->generation, 2u) << "its step has the turn";
  EXPECT_FALSE(look(other, 0, 0)) << "not committed";
  EXPECT_TRUE(group().contains(session_));
  EXPECT_FALSE(group().contains(other));

  // Its second step is held up in turn, once it has made the first of its buckets.
  ids_.push_back(id);
  bool was_shown = false;
  heart_->io().before_submit = [&](const DiskQueue::Operation& operation) {
    if (!done_ || operation.kind != IoKind::write ||
        !job().shards().bucket(2).value->is_uncommitted())
      return;
    was_shown = true;
    EXPECT_EQ(look(other, 2, 1)->generation, 1u);
    EXPECT_FALSE(look(session_, 2, 0)) << "it has left the group";
  };
  heart_->faults().clear_faults();
  heart_->faults().release_stalled();
  ASSERT_TRUE(heart_->until([&] { return done_ && others; }));
  heart_->io().before_submit = {};
  EXPECT_TRUE(was_shown);
  EXPECT_TRUE(done_->is_ok()) << done_->message();
  EXPECT_TRUE(others->is_ok()) << others->message();
  EXPECT_TRUE(group().contains(other));
  EXPECT_FALSE(group().contains(session_));
  for (int i : {0, 1}) expect_values(i, twins_[i].theta);
  for (const uint64_t session : {session_, other}) EXPECT_EQ(look(session, 2, 0)->generation, 1u);
}

TEST_F(PublishTest, once_a_step_is_closed_the_values_before_it_are_leased_by_request_alone) {
  make(24);
  for (const uint32_t index : {0, 1}) ASSERT_TRUE(look(session_, index, 0)) << index;
  heart_->store().operations().step(
      request(2), [this](const Status& status, const StepReport&) { done_ = status; });
  // Nothing of it has begun, and its session leases as after it.
  for (const uint32_t index : {0, 1}) EXPECT_FALSE(look(session_, index, 2)) << index;
  ASSERT_TRUE(heart_->until([&] { return done_.has_value(); }));
  ASSERT_TRUE(done_->is_ok()) << done_->message();
  for (const uint32_t index : {0, 1}) expect_values(index, twins_[index].theta);
}

TEST_F(PublishTest, a_step_that_is_refused_leaves_the_table_as_it_was) {
  make(24);
  StepRequest wrong = request(2);
  wrong.step = 7;  // accepted, and refused when its turn has come
  EXPECT_EQ(heart_->step(wrong).first.code(), StatusCode::fenced);
  for (int i : {0, 1}) {
    EXPECT_FALSE(look(session_, i, 2));
    ASSERT_TRUE(look(session_, i, 0));
    EXPECT_EQ(look(session_, i, 0)->generation, 1u);
  }
}

TEST_F(PublishTest, a_step_that_is_asked_for_again_is_followed_by_that_call_too) {
  make(24);
  step_number_ = 2;
  begin_step(2);
  EXPECT_FALSE(look(session_, 0, 5));
  std::optional<Status> again;
  heart_->store().operations().step(
      request(5), [&again](const Status& status, const StepReport&) { again = status; });
  EXPECT_TRUE(look(session_, 0, 5));
  EXPECT_FALSE(look(session_, 1, 5));
  heart_->faults().clear_faults();
  heart_->faults().release_stalled();
  ASSERT_TRUE(heart_->until([&] { return done_ && again; }));
  EXPECT_TRUE(again->is_ok()) << again->message();
  heart_->store().operations().step(
      request(6), [&again](const Status& status, const StepReport&) { again = status; });
  EXPECT_TRUE(again->is_ok()) << "it is made: " << again->message();
  expect_values(0, twins_[0].theta);
  EXPECT_EQ(look(session_, 0, 6)->generation, 2u);
}

TEST_F(PublishTest, a_lease_that_overtakes_its_step_waits_for_it) {
  make(24);
  const auto early = ask(0, 2);
  const auto unrelated = ask(1, 0);
  heart_->turns();
  EXPECT_FALSE(early->has_value());
  ASSERT_TRUE(unrelated->has_value()) << "it follows nothing";
  heart_->release(**unrelated);
  ASSERT_TRUE(heart_->step(request(2)).first.is_ok());
  ASSERT_TRUE(heart_->until([&] { return early->has_value(); }));
  ASSERT_TRUE((*early)->is_ok()) << (*early)->status.message();
  EXPECT_TRUE(
      std::equal(twins_[0].theta.begin(), twins_[0].theta.end(), (*early)->as<float>().begin()));
  heart_->release(**early);
}

TEST_F(PublishTest, a_lease_after_a_step_that_is_refused_says_so) {
  make(24);
  const auto early = ask(0, 2);
  StepRequest wrong = request(2);
  wrong.groups[0].shard_ids.push_back(77);
  EXPECT_EQ(heart_->step(wrong).first.code(), StatusCode::not_found);
  ASSERT_TRUE(heart_->until([&] { return early->has_value(); }));
  EXPECT_EQ((*early)->status.code(), StatusCode::not_found);
  EXPECT_NE((*early)->status.message().find("the step before it was not made"), std::string::npos)
      << (*early)->status.message();
  const auto late = ask(0, 2, LeaseMode::overwrite, Part::gradient);
  ASSERT_TRUE(late->has_value());
  EXPECT_FALSE((*late)->is_ok()) << "its gradient is the refused step's";
  ASSERT_TRUE(heart_->step(request(3)).first.is_ok());
  for (int i : {0, 1}) expect_values(i, twins_[i].theta);
}

TEST_F(PublishTest, what_a_failed_step_has_published_is_taken_back) {
  make(24);
  begin_step(2);
  const auto seen = ask(0, 2);
  ASSERT_TRUE(seen->has_value() && (*seen)->is_ok());
  const auto waiting = ask(1, 2);
  fail_step();
  ASSERT_TRUE(heart_->until([&] { return done_ && waiting->has_value(); }));
  EXPECT_FALSE(done_->is_ok());
  EXPECT_EQ((*waiting)->status.code(), done_->code());
  EXPECT_EQ(job().progress().committed_step(), 1u);
  EXPECT_TRUE(
      std::equal(twins_[0].theta.begin(), twins_[0].theta.end(), (*seen)->as<float>().begin()))
      << "a live view is never written";
  heart_->release(**seen);
  job().space().set_quota_bytes(kQuotaBytes);
  for (int i : {0, 1}) expect_values(i, old_[i]);
  const auto again = ask(0, 2);
  ASSERT_TRUE(again->has_value());
  EXPECT_FALSE((*again)->is_ok());
  ASSERT_TRUE(heart_->step(request(3)).first.is_ok()) << "its gradients are as they were";
  for (int i : {0, 1}) expect_values(i, twins_[i].theta);
  EXPECT_TRUE(job().lost().names().empty());
}

TEST_F(PublishTest, what_was_published_and_evicted_comes_back_from_where_no_catalogue_leads) {
  make(24);
  begin_step(2);
  Entry& first = *job().shards().bucket(0).value;
  const ExtentRecord extent = first.replicas()[0].extent();
  ASSERT_TRUE(extent.exists());
  job().cache().residencies().move(first, Residency::clean, Residency::absent);
  job().cache().slots().free(first.take_slot());
  heart_->faults().add_fault({.kind = MemoryFaultKind::stall,
                              .io_kind = IoKind::read,
                              .offset_bytes = extent.address.offset_bytes});
  const uint64_t hits = heart_->faults().fault_hit_count();
  const auto reader = ask(0, 2);
  ASSERT_TRUE(heart_->until([&] { return heart_->faults().fault_hit_count() == hits + 1; }));
  // The step fails while the fetch is under way: nothing is undone below it.
  fail_step();
  heart_->turns();
  EXPECT_FALSE(done_.has_value());
  EXPECT_EQ(first.replicas()[0].extent().address.offset_bytes, extent.address.offset_bytes);
  heart_->faults().release_stalled();
  ASSERT_TRUE(heart_->until([&] { return done_ && reader->has_value(); }));
  EXPECT_FALSE(done_->is_ok());
  if ((*reader)->is_ok()) heart_->release(**reader);
  job().space().set_quota_bytes(kQuotaBytes);
  EXPECT_TRUE(job().lost().names().empty());
  for (int i : {0, 1}) expect_values(i, old_[i]);
  ASSERT_TRUE(heart_->step(request(3)).first.is_ok());
  for (int i : {0, 1}) expect_values(i, twins_[i].theta);
}

}  // namespace
}  // namespace memd
