#include "planning/replica_counts.h"

#include <algorithm>

namespace equipoise {
namespace {

struct Item {
    std::int64_t load;
    std::int32_t copies, expert;
};

// Order of the heap. Loads per replica are compared by cross multiplication: divisions round, and
// ties would come out differently. 128 bits, because a load of 2^46 times replicas exceeds 64.
struct ServedLater {
    bool operator()(const Item& a, const Item& b) const {
        const auto left = static_cast<__int128>(a.load) * b.copies;
        const auto right = static_cast<__int128>(b.load) * a.copies;
        return left != right ? left < right : a.expert < b.expert;
    }
};

// Without load every comparison is a tie, and the heap would give all spare slots to the largest
// id.
std::vector<std::int32_t> evenly(std::size_t experts, std::size_t slots) {
    std::vector<std::int32_t> copies(experts, static_cast<std::int32_t>(slots / experts));
    for (std::size_t e = 0; e < slots % experts; ++e) ++copies[e];
    return copies;
}

}  // namespace

std::vector<std::int32_t> count_replicas(Counts load, std::size_t slots, ReplicaRange range) {
    if (std::all_of(load.begin(), load.end(), [](auto n) { return n == 0; }))
        return evenly(load.size, slots);
    std::vector<std::int32_t> copies(load.size, range.low);
    std::vector<Item> heap(load.size);
    for (std::size_t e = 0; e < load.size; ++e)
        heap[e] = {load[e], range.low, static_cast<std::int32_t>(e)};
    std::make_heap(heap.begin(), heap.end(), ServedLater{});
    for (std::size_t spare = slots - load.size * range.low; spare > 0; --spare) {
        std::pop_heap(heap.begin(), heap.end(), ServedLater{});
        Item& item = heap.back();
        copies[item.expert] = ++item.copies;
        if (item.copies < range.high)
            std::push_heap(heap.begin(), heap.end(), ServedLater{});
        else
            heap.pop_back();  // has as many as it may: leaves the heap
    }
    return copies;
}

}  // namespace equipoise
