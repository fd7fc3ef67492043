#include "planning/headroom_swaps.h"

namespace equipoise {
namespace {

// A rank has room enough if it has to give away no more than this part of what it can give.
constexpr std::int64_t kRoomDivisor = 8;

}  // namespace

HeadroomSwaps::HeadroomSwaps(LayerState& state, const RankTopology& topology,
                             const PlanOptions& options)
    : state_(state), topology_(topology), options_(options) {}

std::int64_t HeadroomSwaps::run(std::int64_t copies) {
    state_.split_evenly();
    for (std::int32_t swap = 0; swap < options_.headroom && copies >= 2; ++swap, copies -= 2) {
        const std::int32_t rank = fullest();
        if (excess(rank) <= shared_load(rank) / kRoomDivisor || !swap_best(rank)) break;
    }
    return copies;
}

std::int32_t HeadroomSwaps::fullest() const {
    std::int32_t found = 0;
    for (std::int32_t rank = 1; rank < topology_.shape.ranks; ++rank)
        if (excess(rank) > excess(found)) found = rank;
    return found;
}

std::int64_t HeadroomSwaps::excess(std::int32_t rank) const {
    return state_.rank_load(rank) - state_.load_at(state_.mean(), rank);
}

// What a rank has of experts with several replicas.
std::int64_t HeadroomSwaps::shared_load(std::int32_t rank) const {
    std::int64_t load = 0;
    const std::int32_t first = rank * topology_.shape.per_rank();
    for (std::int32_t s = first; s < first + topology_.shape.per_rank(); ++s)
        if (state_.replicas(state_.expert_at(s)).size > 1) load += state_.flow(s);
    return load;
}

// Slots of [first, last) whose experts have no other replica.
void HeadroomSwaps::find_movable(std::int32_t first, std::int32_t last,
                                 std::vector<std::int32_t>& slots) {
    slots.clear();
    for (std::int32_t s = first; s < last; ++s)
        if (state_.replicas(state_.expert_at(s)).size == 1 && state_.may_change(s))
            slots.push_back(s);
}

bool HeadroomSwaps::swap_best(std::int32_t rank) {
    const std::int32_t per_rank = topology_.shape.per_rank();
    find_movable(rank * per_rank, (rank + 1) * per_rank, here_);
    find_movable(0, topology_.shape.slots, everywhere_);
    const std::int64_t over = excess(rank);
    __int128 best = 0;
    std::int32_t from = -1, to = -1;
    for (const std::int32_t other : everywhere_) {
        if (state_.rank_of(other) == rank) continue;
        const std::int64_t gap = over - excess(state_.rank_of(other));
        for (const std::int32_t heavy : here_) {
            const std::int64_t moved = state_.flow(heavy) - state_.flow(other);
            // Half of what the sum of the two squares falls by; below zero if the ranks would trade
            // places.
            __int128 gain = static_cast<__int128>(moved) * (gap - moved);
            if (topology_.node_of(state_.rank_of(other)) != topology_.node_of(rank))
                gain = gain / options_.node_cost * kShareOne;
            if (moved <= 0 || gain <= best) continue;
            best = gain;
            from = heavy;
            to = other;
        }
    }
    if (from < 0) return false;
    state_.swap(from, to);
    return true;
}

}  // namespace equipoise
