// What an incremental plan is to reach.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/span.h"

namespace equipoise {

// How load is divided among the copies of an expert.
enum class Split { kLevel, kEven };

// How far to go. Imbalances are in 1 / 65536 of the mean.
struct PlanOptions {
    std::int32_t target;      // the peak may be so far above the mean
    std::int32_t slack;       // a rank's experts with one copy stay so far below it
    std::int32_t hysteresis;  // a copy changes hands for an expert so much hotter, in 1 / 65536
    std::int32_t node_cost;   // what a copy from another node costs, in 1 / 65536 of one within it
    std::int32_t sigma;       // deviations that a rank's load counts with, in 1 / 65536
    Split split;              // even: for engines that know no shares
};

// So many parts of 65536 of a mean; at most 2^61, so that a mean below 2^62 and twice the part fit
// into 64 bits. Only a target of many means is cut by that.
inline std::int64_t fraction_of(std::int64_t mean, std::int32_t parts) {
    constexpr __int128 kLargest = (std::int64_t{1} << 61) - 1;
    return static_cast<std::int64_t>(
        std::min(static_cast<__int128>(mean) * parts / kShareOne, kLargest));
}

}  // namespace equipoise
