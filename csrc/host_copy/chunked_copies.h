// A list of copies of host memory, checked and cut into chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace equipoise {

// Bytes of a cache line. Chunks end where a cache line of the destination does, so that two threads
// never write to the same line.
constexpr std::uintptr_t kCacheLine = 64;

// Addresses and bytes of one copy.
struct MemoryCopy {
    std::uintptr_t source, destination, bytes;
};

// Addresses in [begin, end).
struct AddressRange {
    std::uintptr_t begin, end;
};

class ChunkedCopies {
 public:
    // Throws std::invalid_argument if a range passes the end of memory, or if a destination
    // overlaps another destination or a source: chunks are copied in any order, on several threads.
    // A chunk has at most `chunk` bytes, a positive multiple of kCacheLine.
    ChunkedCopies(const std::vector<MemoryCopy>& copies, std::uintptr_t chunk);

    // Whether the two must not run at the same time: one writes what the other reads or writes.
    bool clashes_with(const ChunkedCopies& other) const;

    const std::vector<MemoryCopy>& chunks() const { return chunks_; }

 private:
    void cut(const MemoryCopy& copy, std::uintptr_t chunk);

    // By address. Reads are merged, since sources may overlap; writes do not overlap.
    std::vector<AddressRange> reads_, writes_;
    std::vector<MemoryCopy> chunks_;
};

}  // namespace equipoise
