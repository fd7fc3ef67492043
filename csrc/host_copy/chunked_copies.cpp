#include "host_copy/chunked_copies.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace equipoise {
namespace {

using AddressRanges = std::vector<AddressRange>;

AddressRange address_range(std::uintptr_t begin, std::uintptr_t bytes, const char* name,
                           std::size_t number) {
    // Compared without an addition, which would wrap.
    if (begin == 0 || bytes > UINTPTR_MAX - begin)
        throw std::invalid_argument("copy " + std::to_string(number) + ": its " + name +
                                    " is not in memory");
    return {begin, begin + bytes};
}

void sort_by_address(AddressRanges& ranges) {
    std::sort(ranges.begin(), ranges.end(),
              [](const AddressRange& a, const AddressRange& b) { return a.begin < b.begin; });
}

void merge(AddressRanges& sorted) {
    std::size_t last = 0;
    for (std::size_t i = 1; i < sorted.size(); ++i) {
        if (sorted[i].begin <= sorted[last].end)
            sorted[last].end = std::max(sorted[last].end, sorted[i].end);
        else
            sorted[++last] = sorted[i];
    }
    if (!sorted.empty()) sorted.resize(last + 1);
}

bool any_overlap(const AddressRanges& sorted) {
    for (std::size_t i = 1; i < sorted.size(); ++i)
        if (sorted[i].begin < sorted[i - 1].end) return true;
    return false;
}

// Whether a range of one list overlaps a range of the other. The ranges within a list are sorted
// and apart, so one pass over both is enough.
bool overlap(const AddressRanges& a, const AddressRanges& b) {
    for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
        if (a[i].end <= b[j].begin)
            ++i;
        else if (b[j].end <= a[i].begin)
            ++j;
        else
            return true;
    }
    return false;
}

}  // namespace

ChunkedCopies::ChunkedCopies(const std::vector<MemoryCopy>& copies, std::uintptr_t chunk) {
    for (std::size_t i = 0; i < copies.size(); ++i) {
        const MemoryCopy& copy = copies[i];
        if (copy.bytes == 0) continue;
        reads_.push_back(address_range(copy.source, copy.bytes, "source", i));
        writes_.push_back(address_range(copy.destination, copy.bytes, "destination", i));
    }
    sort_by_address(reads_);
    sort_by_address(writes_);
    merge(reads_);
    if (any_overlap(writes_)) throw std::invalid_argument("two destinations overlap");
    if (overlap(reads_, writes_)) throw std::invalid_argument("a destination overlaps a source");
    for (const MemoryCopy& copy : copies) cut(copy, chunk);
}

bool ChunkedCopies::clashes_with(const ChunkedCopies& other) const {
    return overlap(writes_, other.writes_) || overlap(writes_, other.reads_) ||
           overlap(reads_, other.writes_);
}

void ChunkedCopies::cut(const MemoryCopy& copy, std::uintptr_t chunk) {
    for (std::uintptr_t done = 0; done < copy.bytes;) {
        // The first chunk of a destination that begins inside a cache line is shorter.
        const std::uintptr_t inside = (copy.destination + done) % kCacheLine;
        const std::uintptr_t bytes = std::min(copy.bytes - done, chunk - inside);
        chunks_.push_back({copy.source + done, copy.destination + done, bytes});
        done += bytes;
    }
}

}  // namespace equipoise
