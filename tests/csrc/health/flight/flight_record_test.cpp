// Tests the flight record's ring: what it keeps and truncates, what survives wrap-around, and threads. It runs plain
// and under ThreadSanitizer, AddressSanitizer and UBSanitizer.
#include "health/flight/flight_record.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "flight_record_support.hpp"

namespace ark {
namespace {

using namespace test;

TEST(FlightSizes, KeepsShapesAndFoldsWhatDoesNotFit) {
  FlightSizes sizes;
  const int64_t deep[] = {2, 3, 4, 5, 6, 7};
  sizes.add(deep, 2);
  EXPECT_FALSE(sizes.truncated());
  sizes.add(deep, 6);
  EXPECT_TRUE(sizes.truncated());
  EXPECT_EQ(sizes.dims(0), 2);
  EXPECT_EQ(sizes.dims(1), 4);
  EXPECT_EQ(sizes.size(1, 2), 4);
  EXPECT_EQ(sizes.size(1, 3), 5 * 6 * 7);  // the number of elements is still the tensor's
}

TEST(FlightSizes, CountsTensorsBeyondTheFourth) {
  FlightSizes sizes;
  for (int64_t tensor = 0; tensor < 6; ++tensor) sizes.add(tensor);
  sizes.add(nullptr, 0);  // a scalar
  EXPECT_EQ(sizes.stored(), 4);
  EXPECT_EQ(sizes.total(), 7u);
  EXPECT_TRUE(sizes.truncated());
  const FlightSizes copy = sizes;
  EXPECT_EQ(copy.size(3, 0), 3);
  EXPECT_EQ(copy.total(), 7u);
}

TEST(FlightRecord, FollowsAnOperationThroughItsStates) {
  FlightRecord record(8);
  const uint32_t group = record.register_group("0", "default_pg", 1, 4, {});
  const uint64_t id = record.scheduled(entry_of(group, 1));
  EXPECT_EQ(id, 1u);
  EXPECT_EQ(record.snapshot()[0].state, FlightState::scheduled);
  record.started(id);
  EXPECT_EQ(record.snapshot()[0].state, FlightState::started);
  record.completed(id);
  const FlightEntry done = record.snapshot()[0];
  EXPECT_EQ(done.state, FlightState::completed);
  EXPECT_LE(done.created_ns, done.started_ns);
  EXPECT_LE(done.started_ns, done.ended_ns);
  EXPECT_GT(done.created_ns, 0);
  record.failed(id, "too late");  // the final state of an operation does not change
  record.started(id);
  EXPECT_EQ(record.snapshot()[0].state, FlightState::completed);
  const uint64_t lost = record.scheduled(entry_of(group, 2));
  record.failed(lost, "a peer is gone");
  record.completed(lost);
  EXPECT_EQ(record.snapshot()[1].state, FlightState::failed);
}

TEST(FlightRecord, AnOperationMayStartAtOnce) {
  FlightRecord record(8);
  FlightEntry entry = entry_of(record.register_group("0", "", 0, 2, {}), 1);
  entry.state = FlightState::started;
  record.scheduled(entry);
  const FlightEntry kept = record.snapshot()[0];
  EXPECT_EQ(kept.state, FlightState::started);
  EXPECT_EQ(kept.started_ns, kept.created_ns);
  EXPECT_TRUE(contains(record.to_json(), "\"last_started\":1"));
}

TEST(FlightRecord, TimesOfADevice) {
  FlightRecord record(8);
  const uint32_t group = record.register_group("0", "default_pg", 1, 4, {});
  const uint64_t timed = record.scheduled(entry_of(group, 1)), untimed = record.scheduled(entry_of(group, 2)),
                 early = record.scheduled(entry_of(group, 3)), hung = record.scheduled(entry_of(group, 4));
  const int64_t from = record.snapshot()[0].created_ns + 1'000'000'000;
  record.started_on_device(timed, from);
  EXPECT_EQ(record.snapshot()[0].state, FlightState::started);
  record.completed_on_device(timed, from, from + 5000);
  FlightEntry entry = record.snapshot()[0];
  EXPECT_EQ(entry.started_ns, from);
  EXPECT_EQ(entry.ended_ns, from + 5000);
  record.completed_on_device(untimed, 0, 0);
  entry = record.snapshot()[1];
  EXPECT_EQ(entry.state, FlightState::completed);
  EXPECT_EQ(entry.started_ns, 0) << "nobody knows";
  EXPECT_GE(entry.ended_ns, entry.created_ns);
  // Clocks may differ a little: the result must not precede the issue, and the duration must be kept.
  const int64_t issued = record.snapshot()[2].created_ns;
  record.completed_on_device(early, issued - 3000, issued + 2000);
  entry = record.snapshot()[2];
  EXPECT_EQ(entry.started_ns, issued);
  EXPECT_EQ(entry.ended_ns, issued + 5000);
  record.started_on_device(hung, from);
  record.failed(hung, "the device gave up");
  record.completed_on_device(hung, from, from + 1);
  EXPECT_EQ(record.snapshot()[3].state, FlightState::failed);
}

TEST(FlightRecord, KeepsTheLastOperationsOnly) {
  FlightRecord record(8);
  const uint32_t group = record.register_group("0", "", 0, 2, {});
  std::vector<uint64_t> ids;
  for (uint64_t sequence = 1; sequence <= 20; ++sequence) ids.push_back(record.scheduled(entry_of(group, sequence)));
  const auto entries = record.snapshot();
  ASSERT_EQ(entries.size(), 8u);
  for (size_t index = 0; index < entries.size(); ++index) {
    EXPECT_EQ(entries[index].sequence, 13 + index);
    EXPECT_EQ(entries[index].inputs.size(0, 0), static_cast<int64_t>(13 + index));
  }
  record.failed(ids[3], "overwritten long ago");  // slot 4 now holds number 20
  for (const auto& entry : record.snapshot()) EXPECT_EQ(entry.state, FlightState::scheduled);
  EXPECT_EQ(record.last_id(), 20u);
}

TEST(FlightRecord, ProgressSurvivesWrapAround) {
  FlightRecord record(2);
  const uint32_t quiet = record.register_group("quiet", "", 0, 2, {});
  const uint32_t busy = record.register_group("busy", "", 0, 2, {});
  record.completed(record.scheduled(entry_of(quiet, 41)));
  for (uint64_t sequence = 1; sequence <= 10; ++sequence) record.scheduled(entry_of(busy, sequence));
  const std::string json = record.to_json();
  EXPECT_TRUE(contains(json, "{\"last_scheduled\":41,\"last_started\":0,\"last_completed\":41}")) << json;
  EXPECT_TRUE(contains(json, "{\"last_scheduled\":10,\"last_started\":0,\"last_completed\":0}")) << json;
}

TEST(FlightRecord, CapacityZeroIsOff) {
  FlightRecord record(0);
  EXPECT_FALSE(record.enabled());
  EXPECT_EQ(record.scheduled(entry_of(record.register_group("0", "", 0, 2, {}), 1)), 0u);
  record.started(0);
  record.completed(0);
  record.failed(0, "nothing");
  EXPECT_TRUE(record.snapshot().empty());
  EXPECT_TRUE(JsonReader::valid(record.to_json()));
}

TEST(FlightRecord, ResizeRoundsUpAndStartsAfresh) {
  FlightRecord record(8);
  const uint32_t group = record.register_group("0", "", 0, 2, {});
  record.scheduled(entry_of(group, 1));
  record.resize(8);
  EXPECT_EQ(record.snapshot().size(), 1u);  // the same capacity changes nothing
  record.resize(9);
  EXPECT_EQ(record.capacity(), 16u);
  EXPECT_TRUE(record.snapshot().empty());
  EXPECT_EQ(record.scheduled(entry_of(group, 2)), 2u);  // ids are never reused
  record.resize(0);
  EXPECT_EQ(record.capacity(), 0u);
}

TEST(FlightRecord, ErrorsAreCutBetweenCharacters) {
  FlightRecord record(8);
  const uint32_t group = record.register_group("0", "", 0, 2, {});
  const uint64_t id = record.scheduled(entry_of(group, 1));
  std::string text(FlightRecord::kErrorBytes - 2, 'x');
  text += "\xC3\xA9";  // its second byte does not fit
  record.failed(id, text + "more");
  std::vector<std::string> errors;
  record.snapshot(&errors);
  EXPECT_EQ(errors[0], std::string(FlightRecord::kErrorBytes - 2, 'x'));
  // The next entry in the slot starts without the text.
  for (uint64_t sequence = 2; sequence <= 9; ++sequence) record.scheduled(entry_of(group, sequence));
  record.snapshot(&errors);
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

TEST(FlightRecord, RetiredGroupsAreReusedOnceTheirEntriesAreGone) {
  FlightRecord record(4);
  const uint32_t old = record.register_group("old", "", 0, 2, {});
  record.scheduled(entry_of(old, 7));
  record.retire_group(old);
  const uint32_t other = record.register_group("other", "", 0, 2, {});
  EXPECT_NE(other, old);  // an entry still refers to `old`
  EXPECT_TRUE(contains(record.to_json(), "\"retired\":true"));
  for (uint64_t sequence = 1; sequence <= 8; ++sequence) record.scheduled(entry_of(other, sequence));
  EXPECT_EQ(record.register_group("new", "", 0, 2, {}), old);
  EXPECT_FALSE(contains(record.to_json(), "\"last_scheduled\":7"));
}

TEST(FlightRecord, ManyGroupsKeepTheirAddresses) {
  FlightRecord record(16);
  std::vector<uint32_t> groups;
  for (int index = 0; index < 1000; ++index) {
    groups.push_back(record.register_group(std::to_string(index), "", 0, 2, {}));
    record.scheduled(entry_of(groups[static_cast<size_t>(index) / 2], 100 + static_cast<uint64_t>(index)));
  }
  EXPECT_EQ(groups.back(), 1000u);
  EXPECT_TRUE(contains(record.to_json(),
                       "\"name\":\"499\",\"description\":\"\",\"rank\":0,\"size\":2,\"global_ranks\":"
                       "[0,1],\"retired\":false,\"collective\":{\"last_scheduled\":1099"));
}

// Several groups and threads write, wrap and read one small ring. A reader must see complete entries: all fields of an
// entry come from one number. Writers continue until the reader has looked often enough.
TEST(FlightRecordThreads, EntriesAreNeverTorn) {
  constexpr int kWriters = 4;
  constexpr int kLooks = 20;
  FlightRecord record(16);
  std::atomic<int> looks{0};
  std::atomic<uint64_t> written{0};
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&, writer] {
      const uint32_t group = record.register_group(std::to_string(writer), "", 0, kWriters, {});
      uint64_t operation = 0;
      while (looks.load() < kLooks || operation < 100) {
        const uint64_t id = record.scheduled(entry_of(group, ++operation));
        record.started(id);
        operation % 3 ? record.completed(id) : record.failed(id, std::to_string(operation));
      }
      written.fetch_add(operation);
      record.retire_group(group);
    });
  }
  while (looks.load() < kLooks) {
    std::vector<std::string> errors;
    const auto entries = record.snapshot(&errors);
    for (size_t index = 0; index < entries.size(); ++index) {
      const FlightEntry& entry = entries[index];
      EXPECT_EQ(entry.inputs.size(0, 0), static_cast<int64_t>(entry.sequence));
      EXPECT_EQ(entry.outputs.size(0, 0), static_cast<int64_t>(entry.sequence));
      const bool failed = entry.state == FlightState::failed;
      EXPECT_EQ(errors[index], failed ? std::to_string(entry.sequence) : "");
    }
    EXPECT_TRUE(JsonReader::valid(record.to_json()));
    if (entries.size() == 16) looks.fetch_add(1);
  }
  for (auto& writer : writers) writer.join();
  EXPECT_EQ(record.last_id(), written.load());
  EXPECT_EQ(record.snapshot().size(), 16u);
}

TEST(FlightRecordThreads, ResizeBesideWriters) {
  FlightRecord record(8);
  const uint32_t group = record.register_group("0", "", 0, 2, {});
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t operation = 1; !stop.load(); ++operation)
      record.completed(record.scheduled(entry_of(group, operation)));
  });
  for (size_t round = 0; round < 50; ++round) {
    record.resize(round % 3 == 0 ? 0 : size_t{4} << (round % 5));
    std::this_thread::yield();
  }
  stop.store(true);
  writer.join();
  record.resize(32);
  record.resize(64);
  record.scheduled(entry_of(group, 1));
  EXPECT_EQ(record.snapshot().size(), 1u);
}

}  // namespace
}  // namespace ark
