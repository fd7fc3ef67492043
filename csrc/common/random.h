// Random numbers that are the same on every machine: a hashed counter. The generators of <random>
// are fixed by the standard, but its distributions are not.
#pragma once

#include <cmath>

#include "common/hash.h"

namespace equipoise {

class CounterRng {
 public:
    explicit CounterRng(std::uint64_t seed) : state_(mix64(seed + kStep64)) {}

    std::uint64_t next() { return mix64(state_ += kStep64); }

    // In [0, sides). The bias is at most sides / 2^64, so no draw has to be repeated.
    std::size_t below(std::size_t sides) {
        return static_cast<std::size_t>((static_cast<unsigned __int128>(next()) * sides) >> 64);
    }

    // In [0, 1): the upper 53 bits, as many as a double holds exactly.
    double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

    // Standard normal (Box and Muller, 1958). 1 - uniform() is never 0, whose logarithm is
    // infinite.
    double normal() {
        const double radius = std::sqrt(-2 * std::log(1 - uniform()));
        return radius * std::cos(6.283185307179586 * uniform());
    }

 private:
    std::uint64_t state_;
};

}  // namespace equipoise
