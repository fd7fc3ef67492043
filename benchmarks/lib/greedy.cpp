// The greedy plan, kept as the baseline of benchmarks/planner.py: see README.md. Not to be improved.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

namespace {

template <typename T>
struct Span {
    T* data;
    std::size_t size;

    T& operator[](std::size_t i) const { return data[i]; }
    T* begin() const { return data; }
    T* end() const { return data + size; }
};

using Counts = Span<const std::int64_t>;
constexpr std::int32_t kShareOne = 1 << 16;

struct Item {
    std::int64_t load;
    std::int64_t copies;
    std::int32_t expert;
};

// Positive when a's load per copy is larger, negative when smaller.
int compare(const Item& a, const Item& b) {
    const auto left = static_cast<__int128>(a.load) * b.copies;
    const auto right = static_cast<__int128>(b.load) * a.copies;
    return (left > right) - (left < right);
}

struct ServedLater {
    bool operator()(const Item& a, const Item& b) const {
        const int order = compare(a, b);
        return order != 0 ? order < 0 : a.expert < b.expert;
    }
};

std::vector<Item> one_copy_each(Counts load) {
    std::vector<Item> items(load.size);
    for (std::size_t e = 0; e < load.size; ++e) items[e] = {load[e], 1, static_cast<int>(e)};
    return items;
}

void replicate_evenly(std::vector<Item>& items, std::size_t slots) {
    for (std::size_t e = 0; e < items.size(); ++e)
        items[e].copies = static_cast<std::int64_t>(slots / items.size()) +
                          (e < slots % items.size() ? 1 : 0);
}

void replicate_heaviest(std::vector<Item>& items, std::size_t slots) {
    std::priority_queue<Item, std::vector<Item>, ServedLater> heap(ServedLater{}, items);
    for (std::size_t spare = slots - items.size(); spare > 0; --spare) {
        Item item = heap.top();
        heap.pop();
        items[item.expert].copies = ++item.copies;
        heap.push(item);
    }
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

void plan_layer(Counts load, std::int64_t ranks, Span<std::int32_t> placement) {
    std::vector<Item> items = one_copy_each(load);
    const bool idle = std::all_of(load.begin(), load.end(), [](auto n) { return n == 0; });
    if (idle)
        replicate_evenly(items, placement.size);
    else
        replicate_heaviest(items, placement.size);
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
        const int order = compare(a, b);
        return order != 0 ? order > 0 : a.expert < b.expert;
    });
    place(items, ranks, placement);
}

}  // namespace

extern "C" void plan_greedy(const std::int64_t* load, std::int64_t layers, std::int64_t experts,
                            std::int64_t slots, std::int64_t ranks, std::int32_t* placement) {
    for (std::int64_t l = 0; l < layers; ++l)
        plan_layer({load + l * experts, static_cast<std::size_t>(experts)}, ranks,
                   {placement + l * slots, static_cast<std::size_t>(slots)});
}
