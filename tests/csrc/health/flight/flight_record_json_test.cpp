// Tests the flight record's JSON and its file: valid for any names, complete, private, and written once per failure.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <thread>

#include "flight_record_support.hpp"

namespace ark {
namespace {

using namespace test;

TEST(FlightRecordJson, PointToPointHasItsOwnProgress) {
  FlightRecord record(8);
  FlightEntry entry = entry_of(record.register_group("0", "", 0, 2, {}), 0, "send");
  entry.is_p2p = true;
  entry.p2p_sequence = 3;
  entry.peer = 1;
  entry.tag = 9;
  record.completed(record.scheduled(entry));
  const std::string json = record.to_json();
  EXPECT_TRUE(contains(json, "\"collective\":{\"last_scheduled\":0")) << json;
  EXPECT_TRUE(contains(json, "\"p2p\":{\"last_scheduled\":3")) << json;
  EXPECT_TRUE(contains(json, "\"peer\":1,\"tag\":9")) << json;
}

TEST(FlightRecordJson, OddCharactersStayValidJson) {
  FlightRecord record(8);
  const std::string odd = std::string("quote\" back\\ tab\t nul") + '\0' + " bad\xFF\xC0\x80 cut\xE2\x82 \xE2\x82\xAC";
  const uint32_t group = record.register_group(odd, odd, 0, 2, {});
  record.failed(record.scheduled(entry_of(group, 1)), odd);
  FlightFailure failure;
  failure.error = odd;
  failure.operation = odd;
  failure.frame = odd;
  failure.peers = {{0, 1, 2, -1, false, 2, odd}, {1, 0, 0, 0, true, 0, ""}};
  record.note(failure);
  const std::string json = record.to_json();
  EXPECT_TRUE(JsonReader::valid(json)) << json;
  EXPECT_TRUE(contains(json, "quote\\\" back\\\\ tab\\u0009 nul\\u0000 bad\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD cut"))
      << json;
  EXPECT_TRUE(contains(json, " \xE2\x82\xAC\"")) << json;
  EXPECT_FALSE(contains(json, "\xFF"));
  EXPECT_FALSE(JsonReader::valid(json + "]"));  // checks that the reader can reject
  EXPECT_FALSE(JsonReader::valid(json.substr(0, json.size() - 1)));
}

TEST(FlightRecordJson, NoControlCharacterIsLeft) {
  for (int code = 0; code < 0x20; ++code) {
    FlightRecord record(2);
    record.register_group(std::string("a") + static_cast<char>(code) + "b", "", 0, 2, {});
    EXPECT_TRUE(JsonReader::valid(record.to_json())) << "code " << code;
  }
}

TEST(FlightRecordJson, GroupsGetTheirNamesLater) {
  FlightRecord record(8);
  const uint32_t group = record.register_group("", "", 0, 2, {});
  record.describe_group(group, "0", "default_pg");
  record.describe_group(group + 1, "nobody", "");
  EXPECT_TRUE(contains(record.to_json(), "\"name\":\"0\",\"description\":\"default_pg\""));
}

TEST(FlightRecordJson, NamesTypesAndAbsences) {
  FlightRecord record(8);
  const uint32_t group = record.register_group("g", "tensor parallel", 1, 2, {4, 6});
  record.scheduled(entry_of(group, 1));
  FlightEntry barrier;
  barrier.group = group;
  barrier.sequence = 2;
  barrier.operation = "barrier";
  record.scheduled(barrier);
  const std::string json = record.to_json();
  EXPECT_TRUE(contains(json, "\"global_rank\":6,\"world_size\":2")) << json;  // from the group
  EXPECT_TRUE(contains(json, "\"global_ranks\":[4,6]")) << json;
  EXPECT_TRUE(contains(json, "\"dtype\":\"float32\",\"output_dtype\":\"float32\",\"reduce_op\":\"SUM\"")) << json;
  EXPECT_TRUE(contains(json, "\"dtype\":null,\"output_dtype\":null,\"reduce_op\":null")) << json;
  EXPECT_TRUE(contains(json, "\"time_ended_ns\":null,\"duration_ns\":null,\"error\":null")) << json;
}

TEST(FlightRecordJson, DumpsOneWholePrivateFile) {
  Folder folder;
  FlightRecord record(8);
  const uint32_t group = record.register_group("0", "", 0, 2, {});
  record.failed(record.scheduled(entry_of(group, 1)), "rank 1 ended");
  FlightFailure failure;
  failure.key = 42;
  failure.group = group;
  failure.has_group = true;
  failure.error = "rank 1 ended";
  failure.peer = 1;
  failure.peers = {{1, 5, 4, -1, true, 5, "all_reduce"}};
  const std::string path = flight_dump_path(folder / "flight_", 3);
  EXPECT_TRUE(path.ends_with("/flight_3.json"));
  EXPECT_TRUE(record.dump(path, failure));
  EXPECT_EQ(folder.names(), std::vector<std::string>{"flight_3.json"});  // no temporary file is left
  struct stat status;
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  const std::string json = contents(path);
  EXPECT_TRUE(JsonReader::valid(json)) << json;
  EXPECT_TRUE(contains(json,
                       "\"peers\":[{\"rank\":1,\"last_enqueued\":5,\"last_started\":5,\"last_completed\":4,"
                       "\"waiting_on\":null,\"operation\":\"all_reduce\",\"lost\":true}]"))
      << json;

  ::unlink(path.c_str());
  EXPECT_TRUE(record.dump(path, failure));  // another thread reports the same failure
  EXPECT_TRUE(folder.names().empty());
  failure.key = 43;
  EXPECT_TRUE(record.dump(path, failure));
  EXPECT_TRUE(contains(contents(path), "\"failures\":[{")) << contents(path);
  EXPECT_TRUE(record.dump(path));  // on demand: overwrites
}

TEST(FlightRecordJson, DumpToNowhereReportsAndLeavesNothing) {
  Folder folder;
  FlightRecord record(8);
  EXPECT_FALSE(record.dump(folder / "missing/flight_0.json"));
  FlightFailure failure;
  failure.error = "why";
  EXPECT_FALSE(record.dump(folder / "missing/flight_0.json", failure));
  EXPECT_TRUE(contains(record.to_json(), "\"error\":\"why\""));  // still known for a later dump
  EXPECT_TRUE(folder.names().empty());
}

TEST(FlightRecordJson, FirstFailuresAreKept) {
  FlightRecord record(8);
  for (uint64_t index = 0; index < 20; ++index) {
    FlightFailure failure;
    failure.key = 1 + index / 2;  // each is reported twice
    failure.error = "failure " + std::to_string(index);
    record.note(failure);
  }
  const std::string json = record.to_json();
  EXPECT_TRUE(contains(json, "failure 0"));
  EXPECT_FALSE(contains(json, "failure 1\""));
  EXPECT_TRUE(contains(json, "failure 14"));
  EXPECT_FALSE(contains(json, "failure 16"));
}

TEST(FlightRecordJson, OneFailureOneDump) {
  Folder folder;
  FlightRecord record(8);
  const std::string path = folder / "flight_0.json";
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&record, &path] {
      FlightFailure failure;
      failure.key = 7;
      failure.error = "seen by all";
      EXPECT_TRUE(record.dump(path, failure));
    });
  }
  for (auto& thread : threads) thread.join();
  const std::string json = contents(path);
  EXPECT_EQ(folder.names().size(), 1u);
  EXPECT_EQ(json.find("seen by all"), json.rfind("seen by all"));
}

}  // namespace
}  // namespace ark
