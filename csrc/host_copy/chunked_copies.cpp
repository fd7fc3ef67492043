#include "host_copy/chunked_copies.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace equipoise {
namespace {

using Extents = std::vector<Extent>;

Extent extent(std::uintptr_t begin, std::uintptr_t bytes, const char* name, std::size_t number) {
    if (begin == 0 || bytes > UINTPTR_MAX - begin)
        throw std::invalid_argument("copy " + std::to_string(number) + ": its " + name +
                                    " is not in memory");
    return {begin, begin + bytes};
}

void sort(Extents& extents) {
    std::sort(extents.begin(), extents.end(),
              [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
}

void merge(Extents& sorted) {
    std::size_t last = 0;
    for (std::size_t i = 1; i < sorted.size(); ++i) {
        if (sorted[i].begin <= sorted[last].end)
            sorted[last].end = std::max(sorted[last].end, sorted[i].end);
        else
            sorted[++last] = sorted[i];
    }
    if (!sorted.empty()) sorted.resize(last + 1);
}

bool doubled(const Extents& sorted) {
    for (std::size_t i = 1; i < sorted.size(); ++i)
        if (sorted[i].begin < sorted[i - 1].end) return true;
    return false;
}

// Of lists whose own extents are apart.
bool touch(const Extents& a, const Extents& b) {
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

Transfer::Transfer(const std::vector<Copy>& copies, std::uintptr_t chunk) {
    for (std::size_t i = 0; i < copies.size(); ++i) {
        const Copy& copy = copies[i];
        if (copy.bytes == 0) continue;
        reads_.push_back(extent(copy.source, copy.bytes, "source", i));
        writes_.push_back(extent(copy.destination, copy.bytes, "destination", i));
    }
    sort(reads_);
    sort(writes_);
    merge(reads_);
    if (doubled(writes_)) throw std::invalid_argument("two destinations overlap");
    if (touch(reads_, writes_)) throw std::invalid_argument("a destination overlaps a source");
    for (const Copy& copy : copies) cut(copy, chunk);
}

bool Transfer::clashes_with(const Transfer& other) const {
    return touch(writes_, other.writes_) || touch(writes_, other.reads_) ||
           touch(reads_, other.writes_);
}

void Transfer::cut(const Copy& copy, std::uintptr_t chunk) {
    for (std::uintptr_t done = 0; done < copy.bytes;) {
        const std::uintptr_t inside = (copy.destination + done) % kCacheLine;
        const std::uintptr_t bytes = std::min(copy.bytes - done, chunk - inside);
        chunks_.push_back({copy.source + done, copy.destination + done, bytes});
        done += bytes;
    }
}

}  // namespace equipoise
