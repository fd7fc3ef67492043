#include "rounding.h"

#include <algorithm>

namespace equipoise {
namespace {

void share_evenly(Ids slots, Span<std::int32_t> shares) {
    if (slots.size == 1) {
        shares[slots[0]] = kShareOne;
        return;
    }
    const auto copies = static_cast<std::int32_t>(slots.size);
    for (std::int32_t i = 0; i < copies; ++i)
        shares[slots[i]] = kShareOne / copies + (i < kShareOne % copies ? 1 : 0);
}

}  // namespace

Rounding::Rounding(const Board& board)
    : board_(board), even_(board.shape().slots), full_(board.shape().ranks) {}

std::int64_t Rounding::round(Span<std::int32_t> shares) {
    const Span<std::int32_t> even{even_.data(), even_.size()};
    for (std::int32_t e = 0; e < board_.shape().experts; ++e) share_evenly(board_.copies(e), even);
    std::copy(even.begin(), even.end(), shares.begin());
    for (std::int32_t e = 0; e < board_.shape().experts; ++e)
        if (board_.copies(e).size > 1 && board_.load_of(e) > 0) round_flows(e, shares);
    const std::int64_t evenly = peak({even.data, even.size});
    std::int64_t found = peak({shares.data, shares.size});
    if (found > evenly) {
        std::copy(even.begin(), even.end(), shares.begin());
        found = evenly;
    }
    const std::int64_t mean = board_.mean();
    if (found <= mean) return 0;
    const auto over = static_cast<__int128>(found - mean) * kShareOne;
    return static_cast<std::int64_t>((over + mean - 1) / mean);
}

// The rests are of one division, so they compare as they are.
void Rounding::round_flows(std::int32_t expert, Span<std::int32_t> shares) {
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

// Of the fullest rank, relative to its capacity.
std::int64_t Rounding::peak(Ids shares) {
    std::fill(full_.begin(), full_.end(), 0);
    for (std::int32_t s = 0; s < board_.shape().slots; ++s)
        full_[board_.rank_of(s)] += board_.load_of(board_.expert_at(s)) / kShareOne * shares[s];
    std::int64_t height = 0;
    for (std::int32_t r = 0; r < board_.shape().ranks; ++r)
        height = std::max(height, board_.height(full_[r], board_.capacity(r)));
    return height;
}

}  // namespace equipoise
