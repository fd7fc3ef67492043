#include "planning/expert_swaps.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace equipoise {
namespace {

// How many of the least loaded ranks are looked at, and of those inside: all pairs of hundreds of
// ranks are too many, and the least loaded ranks have most of the room.
constexpr std::size_t kMaxReceivers = 16, kMaxGivers = 8;

}  // namespace

ExpertSwaps::ExpertSwaps(const LayerState& state, const RankTopology& topology)
    : state_(state),
      topology_(topology),
      order_(topology.shape.ranks),
      slots_(topology.shape.ranks) {}

ExpertSwap ExpertSwaps::best(const SwapSearch& search, std::int64_t more_than) {
    const std::size_t receivers = std::min(kMaxReceivers + search.inside.size(), order_.size());
    sort_ranks(receivers, search.mean);
    const std::size_t givers = std::min(kMaxGivers, search.inside.size());
    for (std::size_t i = 0; i < givers; ++i) sort_slots(search.inside[i]);
    ExpertSwap best{more_than, -1, -1};
    for (std::size_t o = 0; o < receivers; ++o) {
        if (!search.open[order_[o]] || room(order_[o], search) <= best.gain) continue;
        sort_slots(order_[o]);
        for (std::size_t i = 0; i < givers; ++i)
            consider(search.inside[i], order_[o], search, best);
    }
    return best;
}

void ExpertSwaps::sort_ranks(std::size_t count, std::int64_t mean) {
    const auto over = [&](std::int32_t rank) {
        return state_.rank_load(rank) - state_.load_at(mean, rank);
    };
    std::iota(order_.begin(), order_.end(), 0);
    std::partial_sort(order_.begin(), order_.begin() + count, order_.end(), [&](auto a, auto b) {
        const std::int64_t x = over(a), y = over(b);
        return x != y ? x < y : a < b;
    });
}

// Slots of experts with one replica only: of the others shares move the load, without a copy.
void ExpertSwaps::sort_slots(std::int32_t rank) {
    auto& slots = slots_[rank];
    slots.clear();
    const std::int32_t first = rank * topology_.shape.per_rank();
    for (std::int32_t s = first; s < first + topology_.shape.per_rank(); ++s)
        if (state_.replicas(state_.expert_at(s)).size == 1 && state_.may_change(s))
            slots.push_back(s);
    std::sort(slots.begin(), slots.end(), [&](auto a, auto b) {
        return state_.flow(a) != state_.flow(b) ? state_.flow(a) < state_.flow(b) : a < b;
    });
}

// The excess that a rank has room for. No swap with it gains more, which skips most ranks.
std::int64_t ExpertSwaps::room(std::int32_t outside, const SwapSearch& search) const {
    // Only experts with one replica count: shares can move the load of the others to other ranks.
    return std::min(search.excess, state_.load_at(search.mean, outside) - search.single[outside]);
}

// Finds the pair of slots whose difference is nearest to what there is room for. Both lists ascend,
// so as the heavy slot grows the light one that fits best moves up only: one pass over both.
void ExpertSwaps::consider(std::int32_t inside, std::int32_t outside, const SwapSearch& search,
                           ExpertSwap& best) const {
    const std::int64_t wanted = room(outside, search);
    const auto& light = slots_[outside];
    std::size_t l = 0;
    for (const std::int32_t heavy : slots_[inside]) {
        const auto differs = [&](std::size_t at) {
            return state_.flow(heavy) - state_.flow(light[at]);
        };
        while (l + 1 < light.size() && differs(l + 1) >= wanted) ++l;
        for (std::size_t at = l; at < std::min(l + 2, light.size()); ++at) {
            const std::int64_t gain = wanted - std::abs(wanted - differs(at));
            if (differs(at) > 0 && gain > best.gain) best = {gain, heavy, light[at]};
        }
    }
}

}  // namespace equipoise
