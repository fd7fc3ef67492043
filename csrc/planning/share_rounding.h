// From what flows to what is written down.
#pragma once

#include <utility>
#include <vector>

#include "planning/layer_state.h"

namespace equipoise {

class ShareRounding {
 public:
    explicit ShareRounding(LayerState& state);

    // Where a 65536th of an expert is much on the scale of a rank, its flows are rounded at once
    // and stay as they are; whether there were such. The others can make up for it when they are
    // levelled again.
    bool fix_coarse();

    // Shares by slot: the flows rounded to 1 / 65536 of each expert by largest remainder, ties to
    // the lower slot; even shares for an expert without load. Should the rounding leave the fullest
    // rank above that of even shares, the even shares are the answer. Returns the peak over the
    // mean - 1 of the ranks, relative to their capacities, in 1 / 65536, rounded up.
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
    std::vector<std::int64_t> single_load_, rank_load_;  // by rank: experts with one copy, and all
};

}  // namespace equipoise
