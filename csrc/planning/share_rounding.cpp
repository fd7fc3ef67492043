#include "planning/share_rounding.h"

#include <algorithm>

namespace equipoise {
namespace {

// The unit of an expert's shares, 1 / 65536 of its load, is coarse if it is more than this part of
// the mean load of a rank.
constexpr std::int64_t kCoarseDivisor = 4096;

}  // namespace

ShareRounding::ShareRounding(LayerState& state)
    : state_(state),
      even_shares_(state.shape().slots),
      coarse_shares_(state.shape().slots),
      single_load_(state.shape().ranks),
      rank_load_(state.shape().ranks) {}

bool ShareRounding::fix_coarse() {
    bool found = false;
    for (std::int32_t e : state_.replicated_experts()) {
        const std::int64_t tokens = state_.load_of(e) / kShareOne;
        if (tokens <= state_.mean() / kCoarseDivisor) continue;
        round_flows_of(e, {coarse_shares_.data(), coarse_shares_.size()});
        for (std::int32_t slot : state_.replicas(e))
            state_.fix_flow(slot, tokens * coarse_shares_[slot]);
        found = true;
    }
    return found;
}

std::int64_t ShareRounding::round(Span<std::int32_t> shares) {
    state_.sum_single_replicas(single_load_);
    std::fill(shares.begin(), shares.end(), kShareOne);
    std::int64_t found = round_flows(shares);
    if (const std::int64_t even = share_evenly({even_shares_.data(), even_shares_.size()});
        found > even)
        found = share_evenly(shares);
    const std::int64_t mean = state_.mean();
    if (found <= mean) return 0;
    const auto over = static_cast<__int128>(found - mean) * kShareOne;
    return static_cast<std::int64_t>((over + mean - 1) / mean);
}

std::int64_t ShareRounding::round_flows(Span<std::int32_t> shares) {
    for (std::int32_t e : state_.replicated_experts())
        if (state_.load_of(e) > 0)
            round_flows_of(e, shares);
        else
            share_evenly_of(e, shares);
    return peak(shares);
}

std::int64_t ShareRounding::share_evenly(Span<std::int32_t> shares) {
    for (std::int32_t e : state_.replicated_experts()) share_evenly_of(e, shares);
    return peak(shares);
}

// All remainders are of divisions by the same number, so they compare as they are. Negated, so that
// an ascending sort puts the largest first and breaks ties by the lower slot.
void ShareRounding::round_flows_of(std::int32_t expert, Span<std::int32_t> shares) {
    const std::int64_t tokens = state_.load_of(expert) / kShareOne;
    std::int32_t missing = kShareOne;
    remainders_.clear();
    for (std::int32_t slot : state_.replicas(expert)) {
        shares[slot] = static_cast<std::int32_t>(state_.flow(slot) / tokens);
        missing -= shares[slot];
        remainders_.push_back({-(state_.flow(slot) % tokens), slot});
    }
    std::sort(remainders_.begin(), remainders_.end());
    for (std::int32_t i = 0; i < missing; ++i) ++shares[remainders_[i].second];
}

void ShareRounding::share_evenly_of(std::int32_t expert, Span<std::int32_t> shares) const {
    const Ids slots = state_.replicas(expert);
    const auto copies = static_cast<std::int32_t>(slots.size);
    for (std::int32_t i = 0; i < copies; ++i)
        shares[slots[i]] = kShareOne / copies + (i < kShareOne % copies ? 1 : 0);
}

// Returns the height of the fullest rank with these shares.
std::int64_t ShareRounding::peak(Span<std::int32_t> shares) {
    rank_load_ = single_load_;
    for (std::int32_t e : state_.replicated_experts())
        for (std::int32_t slot : state_.replicas(e))
            rank_load_[state_.rank_of(slot)] += state_.load_of(e) / kShareOne * shares[slot];
    std::int64_t height = 0;
    for (std::int32_t r = 0; r < state_.shape().ranks; ++r)
        height = std::max(height, state_.height_of(rank_load_[r], state_.capacity(r)));
    return height;
}

}  // namespace equipoise
