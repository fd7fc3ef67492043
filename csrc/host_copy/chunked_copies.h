// A list of copies between places of host memory, cut into chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace equipoise {

// Bytes of a cache line: two threads never write to one, so cuts are where a destination's begin.
constexpr std::uintptr_t kCacheLine = 64;

// `bytes` from `source` to `destination`, as addresses.
struct Copy {
    std::uintptr_t source, destination, bytes;
};

// [begin, end) of addresses.
struct Extent {
    std::uintptr_t begin, end;
};

class Transfer {
 public:
    // Raises std::invalid_argument with one line if an extent passes the end of memory, or if what
    // is written is written twice or read. Chunks are of at most `chunk` bytes, a positive multiple
    // of kCacheLine.
    Transfer(const std::vector<Copy>& copies, std::uintptr_t chunk);

    // Whether they must not run at the same time: one writes what the other reads or writes.
    bool clashes_with(const Transfer& other) const;

    const std::vector<Copy>& chunks() const { return chunks_; }

 private:
    void cut(const Copy& copy, std::uintptr_t chunk);

    // By address; what is read is merged.
    std::vector<Extent> reads_, writes_;
    std::vector<Copy> chunks_;
};

}  // namespace equipoise
