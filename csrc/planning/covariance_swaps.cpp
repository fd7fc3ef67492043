#include "planning/covariance_swaps.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace equipoise {
namespace {

// Deviations of a rank are below 2^26, so that the squares of 256 windows sum to 2^60 at most. The
// number of windows is bounded in bindings/bind_planning.cpp.
constexpr std::int64_t kMaxDeviation = std::int64_t{1} << 26;
// Bounds the time of a layer: each swap compares the slots of a rank with all others.
constexpr std::int32_t kMaxSwaps = 256;

// Returns the square root, rounded down. The double is a first guess only, corrected by integers,
// so that the result does not depend on the rounding of the processor.
std::int64_t integer_root(std::int64_t square) {
    if (square < 1) return 0;
    auto found = static_cast<std::int64_t>(std::sqrt(static_cast<double>(square)));
    while (found * found > square) --found;
    while ((found + 1) * (found + 1) <= square) ++found;
    return found;
}

std::int64_t shifted(std::int64_t value, std::int32_t right) {
    return right >= 0 ? value >> right : value * (std::int64_t{1} << -right);
}

}  // namespace

CovarianceSwaps::CovarianceSwaps(LayerState& state, const RankTopology& topology,
                                 const PlanOptions& options, const LoadWindows& windows)
    : state_(state), topology_(topology), options_(options), windows_(windows) {
    if (!enabled()) return;
    expert_deviation_.resize(topology.shape.experts * windows.count);
    slot_deviation_.resize(topology.shape.slots * windows.count);
    rank_deviation_.resize(topology.shape.ranks * windows.count);
    squares_.resize(topology.shape.ranks);
    risk_.resize(topology.shape.ranks);
    order_.resize(topology.shape.ranks);
}

std::int64_t CovarianceSwaps::run(std::int64_t layer, std::int64_t gain, std::int64_t copies) {
    if (!enabled() || state_.mean() == 0) return 0;
    reset(layer);
    std::int64_t moved = 0;
    for (std::int32_t i = 0; i < kMaxSwaps && moved + 2 <= copies && swap_once(gain >> shift_); ++i)
        moved += 2;
    return moved;
}

std::int64_t CovarianceSwaps::highest_risk(std::int64_t layer) {
    reset(layer);
    std::int64_t most = 0;
    for (std::int32_t r = 0; r < topology_.shape.ranks; ++r)
        most = std::max(most, risk_of(r, 0, squares_[r]));
    // Up to 100 deviations (sigma) of a load near 2^62 do not fit into 64 bits.
    const auto exact = static_cast<__int128>(most) << shift_;
    return static_cast<std::int64_t>(std::min<__int128>(exact, kMaxLoad));
}

// Makes the best swap of the riskiest rank that has one. Returns false if no rank has.
bool CovarianceSwaps::swap_once(std::int64_t gain) {
    for (std::int32_t r = 0; r < topology_.shape.ranks; ++r) risk_[r] = risk_of(r, 0, squares_[r]);
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [&](auto a, auto b) { return less_risky(b, a); });
    for (std::int32_t rank : order_) {
        const Candidate found = best_swap(rank);
        if (found.slot < 0 || found.risk + gain >= risk_[rank]) continue;
        apply_swap(found.slot, found.other);
        return true;
    }
    return false;
}

void CovarianceSwaps::reset(std::int64_t layer) {
    const std::int64_t count = windows_.count;
    const std::int64_t most = kMaxDeviation / topology_.shape.per_rank();
    shift_ = state_.square_shift();
    for (std::int32_t e = 0; e < topology_.shape.experts; ++e) {
        const std::int64_t total = state_.load_of(e) / kShareOne;
        for (std::int64_t w = 0; w < count; ++w) {
            // Times the number of windows, as the load is the sum of all: no division. Clamped, so
            // that the slots of a rank sum to less than kMaxDeviation.
            const std::int64_t deviation = count * windows_.rows(w, layer, e) - total;
            expert_deviation_[e * count + w] =
                std::clamp(shifted(deviation, shift_ - 16), -most, most);
        }
    }
    std::fill(rank_deviation_.begin(), rank_deviation_.end(), 0);
    for (std::int32_t s = 0; s < topology_.shape.slots; ++s) set_slot_deviation(s);
    for (std::int32_t r = 0; r < topology_.shape.ranks; ++r) squares_[r] = squares(r);
}

// A replica deviates as its expert does, times its share.
void CovarianceSwaps::set_slot_deviation(std::int32_t slot) {
    const std::int32_t expert = state_.expert_at(slot);
    const std::int64_t load = state_.load_of(expert), count = windows_.count;
    const auto share = load == 0 ? 0
                                 : static_cast<std::int64_t>(
                                       static_cast<__int128>(state_.flow(slot)) * kShareOne / load);
    std::int64_t* sum = &rank_deviation_[state_.rank_of(slot) * count];
    for (std::int64_t w = 0; w < count; ++w) {
        slot_deviation_[slot * count + w] =
            expert_deviation_[expert * count + w] * share / kShareOne;
        sum[w] += slot_deviation_[slot * count + w];
    }
}

CovarianceSwaps::Candidate CovarianceSwaps::best_swap(std::int32_t rank) const {
    Candidate best{risk_[rank], -1, -1};
    const std::int32_t first = rank * topology_.shape.per_rank();
    for (std::int32_t s = first; s < first + topology_.shape.per_rank(); ++s) {
        if (!movable(s)) continue;
        for (std::int32_t t = 0; t < topology_.shape.slots; ++t)
            if (less_risky(state_.rank_of(t), rank) && movable(t)) consider(s, t, best);
    }
    return best;
}

// Looks at one pair. The squares of a rank a that gives s and gets t follow from those it has:
// |a - s + t|^2 = |a|^2 + 2 a (t - s) + |t - s|^2, so one pass over the windows serves both ranks.
void CovarianceSwaps::consider(std::int32_t slot, std::int32_t other, Candidate& best) const {
    const std::int32_t here = state_.rank_of(slot), there = state_.rank_of(other);
    const std::int64_t heavier = state_.flow(other) - state_.flow(slot);
    // The load alone may be too much: most pairs end here, without a look at the windows.
    if (risk_of(here, heavier, 0) >= best.risk || risk_of(there, -heavier, 0) >= best.risk) return;
    const std::int64_t *s = deviation_of_slot(slot), *t = deviation_of_slot(other);
    const std::int64_t *a = deviation_of_rank(here), *b = deviation_of_rank(there);
    std::int64_t change = 0, ours = 0, theirs = 0;
    for (std::int64_t w = 0; w < windows_.count; ++w) {
        const std::int64_t d = t[w] - s[w];
        change += d * d;
        ours += a[w] * d;
        theirs += b[w] * d;
    }
    // may_swap is asked last: it searches the replicas of both experts.
    const std::int64_t x = risk_of(here, heavier, squares_[here] + 2 * ours + change);
    if (x >= best.risk) return;
    const std::int64_t y = risk_of(there, -heavier, squares_[there] - 2 * theirs + change);
    if (std::max(x, y) < best.risk && topology_.may_swap(state_, slot, other))
        best = {std::max(x, y), slot, other};
}

void CovarianceSwaps::apply_swap(std::int32_t a, std::int32_t b) {
    for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
        std::int64_t* sum = &rank_deviation_[state_.rank_of(from) * windows_.count];
        for (std::int64_t w = 0; w < windows_.count; ++w)
            sum[w] += deviation_of_slot(to)[w] - deviation_of_slot(from)[w];
    }
    std::swap_ranges(&slot_deviation_[a * windows_.count],
                     &slot_deviation_[a * windows_.count] + windows_.count,
                     &slot_deviation_[b * windows_.count]);
    // Summed anew: that is one pass over the windows for each of two ranks.
    for (std::int32_t rank : {state_.rank_of(a), state_.rank_of(b)}) squares_[rank] = squares(rank);
    state_.swap(a, b);
}

// The risk of a rank with `extra_load` more, whose deviations have these squares; relative to its
// capacity, and shifted by `shift_`.
std::int64_t CovarianceSwaps::risk_of(std::int32_t rank, std::int64_t extra_load,
                                      std::int64_t squares) const {
    const std::int64_t deviation = integer_root(squares / (windows_.count - 1));
    const std::int64_t load = (state_.rank_load(rank) + extra_load) >> shift_;
    return state_.height_of(load + deviation * options_.sigma / kShareOne, state_.capacity(rank));
}

std::int64_t CovarianceSwaps::dot(const std::int64_t* a, const std::int64_t* b) const {
    std::int64_t sum = 0;
    for (std::int64_t w = 0; w < windows_.count; ++w) sum += a[w] * b[w];
    return sum;
}

bool CovarianceSwaps::movable(std::int32_t slot) const {
    if (!state_.may_change(slot)) return false;
    return options_.split == Split::kEven || state_.replicas(state_.expert_at(slot)).size == 1;
}

}  // namespace equipoise
