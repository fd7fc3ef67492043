#include "planning/expert_swaps.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace equipoise {
namespace {

// So many of the least full ranks are looked at, and of those inside.
constexpr std::size_t kLeast = 16, kMost = 8;

}  // namespace

Swaps::Swaps(const Board& board, const Rules& rules)
    : board_(board),
      rules_(rules),
      order_(rules.shape.ranks),
      slots_(rules.shape.ranks) {}

Swap Swaps::best(const Field& field, std::int64_t more_than) {
    const std::size_t least = std::min(kLeast + field.inside.size(), order_.size());
    sort_ranks(least, field.mean);
    const std::size_t most = std::min(kMost, field.inside.size());
    for (std::size_t i = 0; i < most; ++i) sort_slots(field.inside[i]);
    Swap best{more_than, -1, -1};
    for (std::size_t o = 0; o < least; ++o) {
        if (!field.open[order_[o]] || room(order_[o], field) <= best.gain) continue;
        sort_slots(order_[o]);
        for (std::size_t i = 0; i < most; ++i) look(field.inside[i], order_[o], field, best);
    }
    return best;
}

void Swaps::sort_ranks(std::size_t count, std::int64_t mean) {
    const auto over = [&](std::int32_t rank) {
        return board_.full(rank) - board_.share(mean, rank);
    };
    std::iota(order_.begin(), order_.end(), 0);
    std::partial_sort(order_.begin(), order_.begin() + count, order_.end(), [&](auto a, auto b) {
        const std::int64_t x = over(a), y = over(b);
        return x != y ? x < y : a < b;
    });
}

// A copy of several is not worth a swap: its load goes where there is room.
void Swaps::sort_slots(std::int32_t rank) {
    auto& slots = slots_[rank];
    slots.clear();
    const std::int32_t first = rank * rules_.shape.per_rank();
    for (std::int32_t s = first; s < first + rules_.shape.per_rank(); ++s)
        if (board_.copies(board_.expert_at(s)).size == 1 && board_.may_change(s)) slots.push_back(s);
    std::sort(slots.begin(), slots.end(), [&](auto a, auto b) {
        return board_.flow(a) != board_.flow(b) ? board_.flow(a) < board_.flow(b) : a < b;
    });
}

// What is to leave the ranks inside and has room on that one: no swap with it gains more.
std::int64_t Swaps::room(std::int32_t outside, const Field& field) const {
    // Of what a rank holds of experts with several copies the others can relieve it.
    return std::min(field.excess, board_.share(field.mean, outside) - field.single[outside]);
}

// The pair whose difference is nearest to what there is room for.
void Swaps::look(std::int32_t inside, std::int32_t outside, const Field& field, Swap& best) const {
    const std::int64_t wanted = room(outside, field);
    const auto& light = slots_[outside];
    std::size_t l = 0;
    for (const std::int32_t heavy : slots_[inside]) {
        const auto differs = [&](std::size_t at) {
            return board_.flow(heavy) - board_.flow(light[at]);
        };
        while (l + 1 < light.size() && differs(l + 1) >= wanted) ++l;
        for (std::size_t at = l; at < std::min(l + 2, light.size()); ++at) {
            const std::int64_t gain = wanted - std::abs(wanted - differs(at));
            if (differs(at) > 0 && gain > best.gain) best = {gain, heavy, light[at]};
        }
    }
}

}  // namespace equipoise
