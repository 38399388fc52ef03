// A row's columns in pieces: kPiece contiguous columns that a thread loads and stores in as few instructions as
// possible. Neighboring threads have neighboring pieces.
//
// A piece stays as loaded until an element is used: widened at once, 16-bit elements would take twice the registers,
// and half as many bytes would be in flight.
#pragma once

#include "cuda/loop/group.cuh"
#include "cuda/loop/hinted.cuh"

namespace ark::loop {

#if defined(__CUDACC__)

template <class T, int kPiece>
struct RawPiece {
  static constexpr int kBytes = kPiece * static_cast<int>(sizeof(T)), kEach = least(kBytes, 16);
  static_assert(kEach % 4 == 0 && kBytes % kEach == 0);
  struct alignas(kEach) Load {
    uint32 words[kEach / 4];
  };
  Load loads[kBytes / kEach];

  ARK_LOOP uint32& word(int i) { return loads[i / (kEach / 4)].words[i % (kEach / 4)]; }
  ARK_LOOP uint32 word(int i) const { return loads[i / (kEach / 4)].words[i % (kEach / 4)]; }

  // An element as number.
  ARK_LOOP auto operator[](int i) const {
    if constexpr (sizeof(T) == 8) {
      return widen(bits_as<T>(word(2 * i) | static_cast<uint64>(word(2 * i + 1)) << 32));
    } else if constexpr (sizeof(T) == 4) {
      return widen(bits_as<T>(word(i)));
    } else if constexpr (sizeof(T) == 2) {
      return widen(bits_as<T>(static_cast<uint16>(word(i / 2) >> i % 2 * 16)));
    } else if constexpr (kSame<T, bool>) {  // any byte but 0 is true
      return (word(i / 4) & 0xffu << i % 4 * 8) != 0;
    } else {
      return widen(bits_as<T>(static_cast<uint8_t>(word(i / 4) >> i % 4 * 8)));
    }
  }

  // Sets an element of 16 bits to a number that T has. An even one clears the next.
  ARK_LOOP void set(int i, float x) {
    const auto bits = static_cast<uint32>(narrow(x, T{}).bits);
    word(i / 2) = i % 2 == 0 ? bits : word(i / 2) | bits << 16;
  }

  template <bool kAligned, class Element>
  ARK_LOOP void load(const Element* from) {
    if constexpr (kAligned) {
      ARK_UNROLL for (int i = 0; i < kBytes / kEach; ++i) loads[i] =
          load_bytes<Load>(from + i * (kEach / static_cast<int>(sizeof(T))));
    } else if constexpr (sizeof(T) >= 4) {
      constexpr int kWords = sizeof(T) / 4;
      ARK_UNROLL for (int i = 0; i < kPiece; ++i) {
        const auto one = load_bytes<Together<uint32, kWords>>(from + i);
        ARK_UNROLL for (int w = 0; w < kWords; ++w) word(i * kWords + w) = one.at[w];
      }
    } else {  // the words around them, shifted
      constexpr int kPerWord = 4 / sizeof(T), kWords = kPiece / kPerWord;
      asm volatile("" : "+l"(from));  // no register keeps an address across rows
      const auto before = static_cast<uint32>(bits_as<uint64>(from) & 3);
      const Element* const words = from - before / static_cast<uint32>(sizeof(T));
      uint32 low = load_bytes<uint32>(words);
      ARK_UNROLL for (int i = 0; i < kWords; ++i) {
        uint32 high = low;  // a word without an element is not read
        if (i + 1 < kWords || before != 0) high = load_bytes<uint32>(words + (i + 1) * kPerWord);
        word(i) = __funnelshift_r(low, high, before * 8);
        low = high;
      }
    }
  }
};

// Makes a row's next pass widen its elements anew: otherwise the compiler would keep all of them in registers.
template <class T, int kPiece, int kTurns>
ARK_LOOP void widen_anew(RawPiece<T, kPiece> (&pieces)[kTurns]) {
  ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn)
      ARK_UNROLL for (int i = 0; i < RawPiece<T, kPiece>::kBytes / 4;
                      ++i) asm volatile("" : "+r"(pieces[turn].word(i)));
}

// Pieces of split results: an element is the in-order sum of kParts.
template <int kPiece, int kParts>
struct RawPieceOfParts {
  RawPiece<float, kPiece> parts[kParts];

  ARK_LOOP float operator[](int i) const {
    float sum = parts[0][i];
    ARK_UNROLL for (int part = 1; part < kParts; ++part) sum += parts[part][i];
    return sum;
  }
  template <bool kAligned, class Element>
  ARK_LOOP void load(const Element* from, int64_t apart) {
    ARK_UNROLL for (int part = 0; part < kParts; ++part) parts[part].template load<kAligned>(from + part * apart);
  }
};

// Stores numbers as kPiece contiguous elements.
template <bool kAligned, int kPiece, class Element, class V>
ARK_LOOP void store_piece(Element* to, const V (&from)[kPiece]) {
  using T = Plain<Element>;
  if constexpr (!kAligned) {
    ARK_UNROLL for (int i = 0; i < kPiece; ++i) store_one(to + i, from[i]);
  } else {
    using P = RawPiece<T, kPiece>;
    P piece;
    if constexpr (kSame<T, bf16> || kSame<T, f16>) {
      ARK_UNROLL for (int i = 0; i < kPiece; i += 2) piece.word(i / 2) = pack_two(from[i], from[i + 1], T{});
    } else if constexpr (sizeof(T) >= 4) {
      constexpr int kWords = sizeof(T) / 4;
      ARK_UNROLL for (int i = 0; i < kPiece; ++i) {
        const auto one = __builtin_bit_cast(Together<uint32, kWords>, narrow(from[i], T{}));
        ARK_UNROLL for (int w = 0; w < kWords; ++w) piece.word(i * kWords + w) = one.at[w];
      }
    } else {
      static_assert(sizeof(T) == 1);
      ARK_UNROLL for (int i = 0; i < kPiece; ++i) {
        const uint32 one = __builtin_bit_cast(uint8_t, narrow(from[i], T{}));
        piece.word(i / 4) = i % 4 == 0 ? one : piece.word(i / 4) | one << i % 4 * 8;
      }
    }
    ARK_UNROLL for (int i = 0; i < P::kBytes / P::kEach; ++i)
        store_whole(to + i * (P::kEach / static_cast<int>(sizeof(T))), piece.loads[i]);
  }
}

// The columns of a piece, numbered.
template <int kPiece, class Body>
ARK_LOOP void for_piece(int64_t first, Body body) {
  ARK_UNROLL for (int at = 0; at < kPiece; ++at) body(first + at, at);
}

// A Group's pieces of a row of kColumns; a thread's are numbered.
template <class Group, int kPiece, int kColumns>
struct PiecesOfRow {
  static constexpr int kPieces = kColumns / kPiece, kTurns = (kPieces + Group::kSize - 1) / Group::kSize;
  static_assert(kColumns % kPiece == 0);
  // Whether each thread has a piece in this turn.
  static ARK_LOOP constexpr bool whole(int turn) { return (turn + 1) * Group::kSize <= kPieces; }
  static ARK_LOOP int number(int turn) { return Group::rank() + turn * Group::kSize; }
};

// Loads a row's pieces: load(first column, turn). A thread without a piece loads the last one, so that no branch
// separates the loads.
template <class Group, int kPiece, int kColumns, class Load>
ARK_LOOP void load_turn(int turn, Load load) {
  using P = PiecesOfRow<Group, kPiece, kColumns>;
  const int piece = P::whole(turn) ? P::number(turn) : least(P::number(turn), P::kPieces - 1);
  load(int64_t{piece} * kPiece, turn);
}
template <class Group, int kPiece, int kColumns, class Load>
ARK_LOOP void load_pieces(Load load) {
  constexpr int kTurns = PiecesOfRow<Group, kPiece, kColumns>::kTurns;
  ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) load_turn<Group, kPiece, kColumns>(turn, load);
}

template <class Group, int kPiece, int kColumns, class Body>
ARK_LOOP void body_turn(int turn, Body body) {
  using P = PiecesOfRow<Group, kPiece, kColumns>;
  if (P::whole(turn) || P::number(turn) < P::kPieces) body(int64_t{P::number(turn)} * kPiece, turn);
}
template <class Group, int kPiece, int kColumns, class Body>
ARK_LOOP void for_pieces(Body body) {
  constexpr int kTurns = PiecesOfRow<Group, kPiece, kColumns>::kTurns;
  ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) body_turn<Group, kPiece, kColumns>(turn, body);
}
// The same with loads of a turn's own, issued kTurnsAhead turns before: after a store, since the compiler cannot know
// that none of them sees it, they would wait.
inline constexpr int kTurnsAhead = 2;
template <class Group, int kPiece, int kColumns, class Load, class Body>
ARK_LOOP void for_pieces(Load load, Body body) {
  constexpr int kTurns = PiecesOfRow<Group, kPiece, kColumns>::kTurns;
  ARK_UNROLL for (int turn = 0; turn < least(kTurnsAhead, kTurns); ++turn)
      load_turn<Group, kPiece, kColumns>(turn, load);
  ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
    if (turn + kTurnsAhead < kTurns) load_turn<Group, kPiece, kColumns>(turn + kTurnsAhead, load);
    body_turn<Group, kPiece, kColumns>(turn, body);
  }
}

// A thread's pieces first + thread(), first + thread() + kThreads, ... of a block of kTurns * kThreads pieces, of which
// those before `past` exist. For loads: a thread without a piece takes the last one.
template <int kTurns, class Load>
ARK_LOOP void load_turns(int64_t first, int64_t past, Load load) {
  ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn)
      load(least<int64_t>(first + thread() + turn * kThreads, past - 1), turn);
}

#endif

}  // namespace ark::loop
