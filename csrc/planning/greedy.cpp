#include "planning/greedy.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "planning/replica_counts.h"

namespace equipoise {
namespace {

struct Item {
    std::int64_t load;
    std::int64_t copies;
    std::int32_t expert;
};

// Positive if a has more load per replica than b, negative if less.
int compare(const Item& a, const Item& b) {
    const auto left = static_cast<__int128>(a.load) * b.copies;
    const auto right = static_cast<__int128>(b.load) * a.copies;
    return (left > right) - (left < right);
}

std::vector<Item> counted(Counts load, std::size_t slots) {
    const std::vector<std::int32_t> copies =
        count_replicas(load, slots, {1, static_cast<std::int32_t>(slots)});
    std::vector<Item> items(load.size);
    for (std::size_t e = 0; e < load.size; ++e)
        items[e] = {load[e], copies[e], static_cast<std::int32_t>(e)};
    return items;
}

void place(const std::vector<Item>& sorted, std::int64_t ranks, Span<std::int32_t> placement) {
    using Rank = std::pair<std::int64_t, std::int64_t>;  // load, rank: ties go to the lower rank
    std::priority_queue<Rank, std::vector<Rank>, std::greater<Rank>> heap;
    for (std::int64_t r = 0; r < ranks; ++r) heap.push({0, r});
    const std::int64_t per_rank = static_cast<std::int64_t>(placement.size) / ranks;
    std::vector<std::int64_t> used(ranks, 0);
    for (const Item& item : sorted) {
        const std::int64_t size = item.load * kShareOne / item.copies;
        for (std::int64_t c = 0; c < item.copies; ++c) {
            auto [load, rank] = heap.top();
            heap.pop();
            placement[rank * per_rank + used[rank]++] = item.expert;
            if (used[rank] < per_rank) heap.push({load + size, rank});
        }
    }
}

}  // namespace

void plan_greedy(Counts load, std::int64_t ranks, Span<std::int32_t> placement) {
    std::vector<Item> items = counted(load, placement.size);
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
        const int order = compare(a, b);
        return order != 0 ? order > 0 : a.expert < b.expert;
    });
    place(items, ranks, placement);
}

}  // namespace equipoise
