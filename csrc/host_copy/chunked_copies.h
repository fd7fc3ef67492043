// A list of copies between places of host memory, cut into chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace equipoise {

// Bytes of a cache line: two threads never write to one, so cuts are where a destination's begin.
constexpr std::uintptr_t kCacheLine = 64;

// `bytes` from `source` to `destination`, as addresses.
struct MemoryCopy {
    std::uintptr_t source, destination, bytes;
};

// [begin, end) of addresses.
struct AddressRange {
    std::uintptr_t begin, end;
};

class ChunkedCopies {
 public:
    // Raises std::invalid_argument with one line if an extent passes the end of memory, or if what
    // is written is written twice or read. Chunks are of at most `chunk` bytes, a positive multiple
    // of kCacheLine.
    ChunkedCopies(const std::vector<MemoryCopy>& copies, std::uintptr_t chunk);

    // Whether they must not run at the same time: one writes what the other reads or writes.
    bool clashes_with(const ChunkedCopies& other) const;

    const std::vector<MemoryCopy>& chunks() const { return chunks_; }

 private:
    void cut(const MemoryCopy& copy, std::uintptr_t chunk);

    // By address; what is read is merged.
    std::vector<AddressRange> reads_, writes_;
    std::vector<MemoryCopy> chunks_;
};

}  // namespace equipoise
