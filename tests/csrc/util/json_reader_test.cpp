// Tests members that are there, are missing or have another type, and text that is no JSON object.
#include "util/json_reader.hpp"

#include <gtest/gtest.h>

#include <string>

#include "util/json_writer.hpp"

namespace ark {
namespace {

TEST(JsonReader, ReadsWhatTheWriterWrote) {
  JsonWriter json;
  json.open('{').field("name", "a \"b\"\n").field("count", int64_t{-3}).key("rate").real(2.5e-4);
  json.key("list").open('[').number(1).close(']').flag("set", true).close('}');
  const auto object = JsonObject::parse(json.take() + "\n");
  ASSERT_TRUE(object);
  EXPECT_EQ(object->text("name"), "a \"b\"\n");
  EXPECT_EQ(object->number("count"), -3.0);
  EXPECT_EQ(object->number("rate"), 2.5e-4);
  for (const char* other : {"list", "set", "missing", ""}) {
    EXPECT_FALSE(object->text(other)) << other;
    EXPECT_FALSE(object->number(other)) << other;
  }
  EXPECT_FALSE(object->text("count"));
  EXPECT_FALSE(object->number("name"));
}

TEST(JsonReader, TakesNothingButOneWholeObject) {
  const std::string whole = R"({"key":"value","nested":{"key":"other"},"number":12})";
  ASSERT_TRUE(JsonObject::parse(whole));
  EXPECT_EQ(JsonObject::parse(whole)->text("key"), "value");
  for (size_t bytes = 0; bytes < whole.size(); ++bytes)
    EXPECT_FALSE(JsonObject::parse(whole.substr(0, bytes))) << bytes;
  for (const char* wrong : {"[]", "3", "null", "\"text\"", "{} {}", "{'key':1}", "{\"key\":nan}", "{\"\xff\":1}"})
    EXPECT_FALSE(JsonObject::parse(wrong)) << wrong;
}

}  // namespace
}  // namespace ark
