#include "planning/share_rounding.h"

#include <algorithm>

namespace equipoise {
namespace {

// A share's unit is coarse when it is more than this part of the mean of a rank.
constexpr std::int64_t kCoarse = 4096;

}  // namespace

Rounding::Rounding(Board& board)
    : board_(board),
      even_(board.shape().slots),
      coarse_(board.shape().slots),
      single_(board.shape().ranks),
      full_(board.shape().ranks) {}

bool Rounding::fix_coarse() {
    bool found = false;
    for (std::int32_t e : board_.plural()) {
        const std::int64_t tokens = board_.load_of(e) / kShareOne;
        if (tokens <= board_.mean() / kCoarse) continue;
        round_flows_of(e, {coarse_.data(), coarse_.size()});
        for (std::int32_t slot : board_.copies(e)) board_.fix(slot, tokens * coarse_[slot]);
        found = true;
    }
    return found;
}

std::int64_t Rounding::round(Span<std::int32_t> shares) {
    board_.add_singles(single_);
    std::fill(shares.begin(), shares.end(), kShareOne);
    std::int64_t found = round_flows(shares);
    if (const std::int64_t even = share_evenly({even_.data(), even_.size()}); found > even)
        found = share_evenly(shares);
    const std::int64_t mean = board_.mean();
    if (found <= mean) return 0;
    const auto over = static_cast<__int128>(found - mean) * kShareOne;
    return static_cast<std::int64_t>((over + mean - 1) / mean);
}

std::int64_t Rounding::round_flows(Span<std::int32_t> shares) {
    for (std::int32_t e : board_.plural())
        if (board_.load_of(e) > 0)
            round_flows_of(e, shares);
        else
            share_evenly_of(e, shares);
    return peak(shares);
}

std::int64_t Rounding::share_evenly(Span<std::int32_t> shares) {
    for (std::int32_t e : board_.plural()) share_evenly_of(e, shares);
    return peak(shares);
}

// The rests are of one division, so they compare as they are.
void Rounding::round_flows_of(std::int32_t expert, Span<std::int32_t> shares) {
    const std::int64_t tokens = board_.load_of(expert) / kShareOne;
    std::int32_t missing = kShareOne;
    rests_.clear();
    for (std::int32_t slot : board_.copies(expert)) {
        shares[slot] = static_cast<std::int32_t>(board_.flow(slot) / tokens);
        missing -= shares[slot];
        rests_.push_back({-(board_.flow(slot) % tokens), slot});
    }
    std::sort(rests_.begin(), rests_.end());
    for (std::int32_t i = 0; i < missing; ++i) ++shares[rests_[i].second];
}

void Rounding::share_evenly_of(std::int32_t expert, Span<std::int32_t> shares) const {
    const Ids slots = board_.copies(expert);
    const auto copies = static_cast<std::int32_t>(slots.size);
    for (std::int32_t i = 0; i < copies; ++i)
        shares[slots[i]] = kShareOne / copies + (i < kShareOne % copies ? 1 : 0);
}

// Of the fullest rank, relative to its capacity.
std::int64_t Rounding::peak(Span<std::int32_t> shares) {
    full_ = single_;
    for (std::int32_t e : board_.plural())
        for (std::int32_t slot : board_.copies(e))
            full_[board_.rank_of(slot)] += board_.load_of(e) / kShareOne * shares[slot];
    std::int64_t height = 0;
    for (std::int32_t r = 0; r < board_.shape().ranks; ++r)
        height = std::max(height, board_.height(full_[r], board_.capacity(r)));
    return height;
}

}  // namespace equipoise
