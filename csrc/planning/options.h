// What a plan is to reach, and what its copies may cost.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/span.h"

namespace equipoise {

// How load is divided among the replicas of an expert: so that ranks are level, or in equal parts,
// for engines that know no shares.
enum class Split { kLevel, kEven };

// All but the last two are in 1 / 65536, so that every rank computes with the same integers.
struct PlanOptions {
    std::int32_t target;      // the fullest rank may be so far above the mean
    std::int32_t slack;       // a rank's experts with one replica stay so far below the mean
    std::int32_t hysteresis;  // a replica goes to another expert if that is so much hotter
    std::int32_t node_cost;   // cost of a copy from another node, of one within the node
    std::int32_t sigma;       // standard deviations that count as load of a rank
    Split split;
    std::int32_t headroom;    // swaps of a changed layer for the room of its shares
};

// Returns `parts` / 65536 of a mean, below 2^61: callers add twice the fraction to a mean below
// 2^62, and that has to fit into 64 bits. The bound cuts only targets of many times the mean.
inline std::int64_t fraction_of(std::int64_t mean, std::int32_t parts) {
    constexpr __int128 kLargest = (std::int64_t{1} << 61) - 1;
    return static_cast<std::int64_t>(
        std::min(static_cast<__int128>(mean) * parts / kShareOne, kLargest));
}

}  // namespace equipoise
