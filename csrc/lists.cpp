#include "lists.h"

#include <algorithm>
#include <vector>

namespace equipoise {
namespace {

struct Part {
    std::int64_t rest;  // of share * width by one whole
    std::int32_t entries;
    std::int32_t slot;
};

// How often each slot of a run stands in a list of `width`.
void apportion(Ids run, Ids shares, std::int64_t width, std::vector<Part>& parts) {
    std::int64_t missing = width;
    parts.clear();
    for (std::int32_t slot : run) {
        const std::int64_t exact = shares[slot] * width;
        const auto whole = static_cast<std::int32_t>(exact / kShareOne);
        parts.push_back({exact % kShareOne, whole, slot});
        missing -= whole;
    }
    std::stable_sort(parts.begin(), parts.end(),
                     [](const Part& a, const Part& b) { return a.rest > b.rest; });
    for (std::int64_t i = 0; i < missing; ++i) ++parts[i].entries;
    std::sort(parts.begin(), parts.end(),
              [](const Part& a, const Part& b) { return a.slot < b.slot; });
}

}  // namespace

void fill_lists(Ids start, Ids slots, Ids shares, Ids order, Span<std::int32_t> lists) {
    const auto width = static_cast<std::int64_t>(order.size);
    std::vector<Part> parts;
    std::vector<std::int32_t> line(order.size);
    for (std::size_t e = 0; e + 1 < start.size; ++e) {
        const Ids run{slots.data + start[e], static_cast<std::size_t>(start[e + 1] - start[e])};
        std::int32_t* list = lists.data + e * order.size;
        if (run.size == 1) {
            std::fill(list, list + width, run[0]);
            continue;
        }
        apportion(run, shares, width, parts);
        auto end = line.begin();
        for (const Part& part : parts) end = std::fill_n(end, part.entries, part.slot);
        for (std::int64_t j = 0; j < width; ++j) list[j] = line[order[j]];
    }
}

bool is_order(Ids order) {
    std::vector<bool> seen(order.size, false);
    for (std::int32_t place : order) {
        const auto at = static_cast<std::size_t>(place);
        if (place < 0 || at >= order.size || seen[at]) return false;
        seen[at] = true;
    }
    return true;
}

}  // namespace equipoise
