// Tests SHA-256 with the vectors of FIPS 180-4 (NIST's examples) and around every block boundary.
#include "util/sha256.hpp"

#include <gtest/gtest.h>

#include <string>

namespace ark::jit {
namespace {

std::string hash(const std::string& text) {
  return sha256_hex({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
}

TEST(Sha256, KnownVectors) {
  EXPECT_EQ(hash(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hash("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
                 "mnopqrstnopqrstu"),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(hash(std::string(1'000'000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesMakeTheSameAsTheWhole) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
  for (size_t length = 0; length <= text.size(); ++length) {
    const std::string whole = text.substr(0, length);
    for (const size_t piece : {size_t{1}, size_t{13}, size_t{63}, size_t{64}, size_t{65}}) {
      Sha256 pieces;
      for (size_t at = 0; at < length; at += piece) pieces.update(whole.data() + at, std::min(piece, length - at));
      ASSERT_EQ(pieces.hex_digest(), hash(whole)) << length << " bytes in pieces of " << piece;
    }
  }
}

TEST(Sha256, FieldsCannotRunIntoOneAnother) {
  auto of = [](const char* a, const char* b) {
    Sha256 fields;
    fields.field(a);
    fields.field(b);
    return fields.hex_digest();
  };
  EXPECT_NE(of("ab", "c"), of("a", "bc"));
  EXPECT_NE(of("", "a"), of("a", ""));
}

}  // namespace
}  // namespace ark::jit
