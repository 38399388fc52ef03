// Reads and writes the fixed-size messages of the bootstrap: little-endian fields at fixed offsets.
//
// The writer pads with zeros to the message's size. The reader never reads past the end, and finish() requires that the
// rest is zero. So every byte of a message has a meaning or is checked.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "util/error.hpp"

namespace ark::wire {

[[noreturn]] inline void reject(const char* message, const std::string& why) {
  throw Error(ErrorKind::invalid_argument, std::string(message) + " rejected: " + why);
}

class Writer {
 public:
  explicit Writer(size_t total) : bytes_(total, 0) {}

  template <typename Unsigned>
  void number(Unsigned value) {
    for (size_t i = 0; i < sizeof(Unsigned); ++i) bytes_.at(at_++) = static_cast<uint8_t>(uint64_t{value} >> (8 * i));
  }

  void raw(std::span<const uint8_t> data) {
    for (uint8_t byte : data) bytes_.at(at_++) = byte;
  }

  // The length, then `room` bytes padded with zeros. Longer text is truncated.
  void text(const std::string& value, size_t room) {
    const size_t length = std::min(value.size(), room);
    number(static_cast<uint32_t>(length));
    for (size_t i = 0; i < length; ++i) bytes_.at(at_ + i) = static_cast<uint8_t>(value[i]);
    at_ += room;
  }

  std::vector<uint8_t> take() { return std::move(bytes_); }

 private:
  std::vector<uint8_t> bytes_;
  size_t at_ = 0;
};

class Reader {
 public:
  Reader(const char* message, std::span<const uint8_t> bytes, size_t expected) : message_(message), bytes_(bytes) {
    if (bytes.size() != expected)
      reject(message, std::to_string(bytes.size()) + " bytes where " + std::to_string(expected) + " belong");
  }

  template <typename Unsigned>
  Unsigned number() {
    need(sizeof(Unsigned));
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(Unsigned); ++i) value |= uint64_t{bytes_[at_++]} << (8 * i);
    return static_cast<Unsigned>(value);
  }

  template <typename Unsigned>
  void constant(const char* field, Unsigned expected) {
    const Unsigned seen = number<Unsigned>();
    if (seen != expected)
      reject(message_, std::string(field) + " is " + std::to_string(seen) + ", not " + std::to_string(expected));
  }

  template <size_t kBytes>
  std::array<uint8_t, kBytes> raw() {
    need(kBytes);
    std::array<uint8_t, kBytes> data;
    std::copy_n(bytes_.begin() + at_, kBytes, data.begin());
    at_ += kBytes;
    return data;
  }

  // Printable ASCII only, because the text appears in messages and socket names.
  std::string text(const char* field, size_t room) {
    const uint32_t length = number<uint32_t>();
    if (length > room)
      reject(message_, std::string(field) + " claims " + std::to_string(length) + " bytes of " + std::to_string(room));
    need(room);
    std::string value(bytes_.begin() + at_, bytes_.begin() + at_ + length);
    for (char c : value)
      if (c < ' ' || c > '~') reject(message_, std::string(field) + " holds an unprintable byte");
    zeros(field, at_ + length, at_ + room);
    at_ += room;
    return value;
  }

  void finish() { zeros("padding", at_, bytes_.size()); }

 private:
  void need(size_t count) const {
    if (bytes_.size() - at_ < count) reject(message_, "truncated");
  }
  void zeros(const char* field, size_t from, size_t to) const {
    for (size_t i = from; i < to; ++i)
      if (bytes_[i] != 0) reject(message_, std::string(field) + " is not zero at byte " + std::to_string(i));
  }

  const char* message_;
  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
};

}  // namespace ark::wire
