// One direction between two ranks: a ring of bytes, and the announcement of messages.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>

#include "types.h"

namespace npusim::hccl {

constexpr size_t kRing = 64 << 10;

// Lies in memory that two processes share and begins as zeros. Each field has one writer, so a
// process that dies at any moment leaves it consistent.
struct Lane {
  // Written by the sending end:
  alignas(64) std::atomic<uint64_t> offered;  // messages it has announced
  std::atomic<uint64_t> written;              // bytes it has ever put in
  Descriptor offers[2];                       // of the last two messages
  // Written by the receiving end:
  alignas(64) std::atomic<uint64_t> wanted;
  std::atomic<uint64_t> taken;  // bytes it has ever taken out
  Descriptor wants[2];
  alignas(64) uint8_t ring[kRing];

  size_t waiting() const {
    return written.load(std::memory_order_acquire) - taken.load(std::memory_order_acquire);
  }
  size_t room() const { return kRing - waiting(); }

  // Puts in as much as there is room for; returns how much.
  size_t put(const uint8_t* from, size_t bytes) {
    const uint64_t start = written.load(std::memory_order_relaxed);
    const size_t fits = std::min(bytes, room());
    const size_t first = std::min(fits, kRing - start % kRing);
    memcpy(ring + start % kRing, from, first);
    memcpy(ring, from + first, fits - first);
    written.store(start + fits, std::memory_order_release);
    return fits;
  }

  // Takes out at most so much; returns how much.
  size_t take(uint8_t* to, size_t bytes) {
    const uint64_t start = taken.load(std::memory_order_relaxed);
    const size_t there = std::min(bytes, waiting());
    const size_t first = std::min(there, kRing - start % kRing);
    memcpy(to, ring + start % kRing, first);
    memcpy(to + first, ring, there - first);
    taken.store(start + there, std::memory_order_release);
    return there;
  }
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters are shared by processes");

}  // namespace npusim::hccl
