// Tests copy engines and their watching thread while users' copies block all callers of the driver (fake_driver.hpp).
// The waits must end, and the error must give the reason.
#include <sys/socket.h>

#include "collectives/cuda/copy_engine_group.hpp"
#include "util/unique_fd.hpp"

namespace ark {
namespace {

using std::chrono::milliseconds;
using test::Collective;
using test::Group;

// One rank's health and watch. Its peers exist but are silent. Its log calls the driver, as a group does that looks at
// its events.
class Watcher {
 public:
  Watcher(Group& group, int rank, milliseconds limit) : blocks_(group.ranks_) {
    std::vector<ControlBlock*> control;
    std::vector<UniqueFd> connections(group.ranks_);
    for (int r = 0; r < group.ranks_; ++r) {
      control.push_back(&blocks_[r]);
      int pair[2];
      if (r == rank || ::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) continue;
      connections[r] = UniqueFd(pair[0]);
      ends_.emplace_back(pair[1]);
    }
    health_ = std::make_unique<GroupHealth>(rank, control, std::make_unique<PeerMonitor>(rank, std::move(connections)));
    watch_ = std::make_unique<DeviceWatch>(*health_, &status_, [&group, rank, this](const Error&) {
      driver().stream_query(group.streams_[rank]);
      logged_ = true;
    });
    CopyEngine& engine = *group.engines_[rank];
    watch_->watch_engine(
        &group.status_[rank], [&engine] { engine.release_all(); }, [&engine] { return engine.diagnose(); });
    watch_->engine_used(limit);
  }
  ~Watcher() { watch_->forget_engine(); }

  std::string failure() {
    try {
      watch_->check({"all_reduce", 7, Clock::time_point::max(), milliseconds(0)});
    } catch (const Error& error) {
      return error.what();
    }
    return "none";
  }
  bool logged() const { return logged_; }

 private:
  std::vector<ControlBlock> blocks_;
  std::vector<UniqueFd> ends_;
  device::GroupStatus status_{};
  std::atomic<bool> logged_{false};
  std::unique_ptr<GroupHealth> health_;
  std::unique_ptr<DeviceWatch> watch_;
};

class WatchedEngineTest : public testing::Test {
 protected:
  void SetUp() override { test::g_patience = std::chrono::seconds(20); }
  void TearDown() override {
    test::g_garbage = false;
    test::g_patience = std::chrono::seconds(60);
  }

  // The users of all ranks copy their results. Returns the error of each.
  std::vector<std::string> copy_results(Group& group, const std::vector<int>& ranks, milliseconds limit) {
    std::atomic<bool> copying{false};
    std::vector<std::thread> users;
    for (int r : ranks)
      users.emplace_back([&group, &copying, r] { test::copy_to_pageable(group.streams_[r], copying); });
    test::wait_until("a copy", [&] { return copying.load(); });
    std::vector<std::unique_ptr<Watcher>> watchers;
    for (int r : ranks) watchers.push_back(std::make_unique<Watcher>(group, r, limit));
    for (std::thread& user : users) user.join();
    std::vector<std::string> failures;
    for (const auto& watcher : watchers) {
      failures.push_back(watcher->failure());
      test::wait_until("the log", [&] { return watcher->logged(); });
    }
    return failures;
  }
};

// Rank 1 of three never calls.
TEST_F(WatchedEngineTest, WhoseUserCopiesIsLetGoWhenARankIsMissing) {
  test::g_garbage = true;
  Group group(3, 5, false);
  for (int i = 0; i < 6; ++i) group.prepare({Collective::all_reduce, 30'000, true, 0, 7, false});
  for (int r : {0, 2})
    for (size_t i = 0; i < group.steps_.size(); ++i) group.issue(r, group.steps_[i], group.tensors_[i]);
  for (const std::string& failure : copy_results(group, {0, 2}, milliseconds(300)))
    EXPECT_NE(failure.find("waited for rank 1"), std::string::npos) << failure;
}

// Outputs that do not belong together are reported long before the timeout.
TEST_F(WatchedEngineTest, WhoseUserCopiesIsToldOfAnotherPlace) {
  test::g_garbage = true;
  Group group(2, 5, true);
  group.prepare({Collective::all_gather, 5'000, false, 0, 7, true});
  group.prepare({Collective::all_gather, 5'000, false, 0, 8, true});
  for (int r : {0, 1}) group.issue(r, group.steps_[r], group.tensors_[r]);
  const std::vector<std::string> failures = copy_results(group, {0, 1}, std::chrono::hours(1));
  EXPECT_NE(failures[0].find("rank 1 passed another place"), std::string::npos) << failures[0];
  EXPECT_NE(failures[1].find("rank 0 passed another place"), std::string::npos) << failures[1];
}

}  // namespace
}  // namespace ark
