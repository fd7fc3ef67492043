// Rounds the flows of a layer to shares.
#pragma once

#include <utility>
#include <vector>

#include "planning/layer_state.h"

namespace equipoise {

class ShareRounding {
 public:
    explicit ShareRounding(LayerState& state);

    // Rounds and fixes the flows of very large experts, of which 1 / 65536 is a lot for a rank.
    // Returns whether there were any: levelling again then lets the other experts make up for the
    // rounding.
    bool fix_coarse();

    // Writes shares by slot: flows rounded to 1 / 65536 of each expert by largest remainder, ties
    // to the lower slot; even shares for an expert without load. If rounding leaves the fullest
    // rank above that of even shares, even shares are the result: shares never make a layer worse.
    // Returns peak / mean
    // - 1 of the ranks' heights, in 1 / 65536, rounded up, so that 0 means level.
    std::int64_t round(Span<std::int32_t> shares);

 private:
    std::int64_t round_flows(Span<std::int32_t> shares);
    std::int64_t share_evenly(Span<std::int32_t> shares);
    void round_flows_of(std::int32_t expert, Span<std::int32_t> shares);
    void share_evenly_of(std::int32_t expert, Span<std::int32_t> shares) const;
    std::int64_t peak(Span<std::int32_t> shares);

    LayerState& state_;
    std::vector<std::pair<std::int64_t, std::int32_t>> remainders_;
    std::vector<std::int32_t> even_shares_, coarse_shares_;
    std::vector<std::int64_t> single_load_,
        rank_load_;  // by rank: experts with one replica, and all
};

}  // namespace equipoise
