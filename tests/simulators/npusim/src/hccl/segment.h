// The memory that the ranks of one communicator share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "lane.h"
#include "pause.h"
#include "types.h"

namespace npusim::hccl {

constexpr int kMostRanks = 32;

// What a rank says about one collective: also the bytes to and from every rank, for counts may
// differ.
struct Post {
  Descriptor what;
  uint64_t to[kMostRanks];
  uint64_t from[kMostRanks];
};

// Written by its rank only.
struct alignas(64) Seat {
  std::atomic<uint32_t> taken;
  std::atomic<int32_t> process;
  std::atomic<int32_t> device;
  std::atomic<uint64_t> posted;  // collectives that this rank has begun
  // Links that this rank has asked for: for kinds of collectives, in the order of their first use;
  // to, from and in batches with a rank.
  std::atomic<uint32_t> kinds;
  Kind first_uses[kKinds];
  std::atomic<uint8_t> to[kMostRanks];
  std::atomic<uint8_t> from[kMostRanks];
  std::atomic<uint8_t> batch[kMostRanks];
  Post posts[2];  // of the last two collectives
};

enum class Phase : uint32_t { kJoining = 0, kComplete = 1, kAbandoned = 2 };

struct Header {
  uint64_t token;                // who opens it must know it
  std::atomic<uint32_t> ranks;   // 0 until the first rank has come
  std::atomic<uint32_t> phase;   // a Phase
  Seat seats[kMostRanks];
};

// The text that a root hands to the other ranks (4108 bytes in the C interface).
struct RootInfo {
  char magic[16];
  uint64_t token;
  int32_t process;
  int32_t file;   // of the process's board
  int32_t entry;  // in it
};

// A mapping. The memory has no name anywhere: the root's open file, found through /proc, is the
// only way to it, so nothing is left behind however the processes end.
class Segment {
 public:
  // Says where one will be. The root's process makes it when it opens it, and keeps its file open
  // until `forget`.
  static RootInfo create();
  static void forget(const RootInfo& info);
  // Maps the one of `info`, for so many ranks; waits for the root to make it.
  // Throws Refusal.
  static std::unique_ptr<Segment> open(const RootInfo& info, int ranks,
                                       const Patience& patience);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int ranks() const { return ranks_; }
  Header& header() const { return *static_cast<Header*>(memory_); }
  Seat& seat(int rank) const { return header().seats[rank]; }
  Lane& lane(int from, int to) const;

 private:
  Segment(void* memory, int ranks) : memory_(memory), ranks_(ranks) {}

  void* memory_;
  int ranks_;
};

}  // namespace npusim::hccl
