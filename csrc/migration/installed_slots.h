// Where each expert of each layer is installed.
#pragma once

#include <vector>

#include "migration/spec.h"

namespace equipoise {

class Holders {
 public:
    // Throws std::invalid_argument where an expert is proposed that a layer does not hold.
    explicit Holders(const Cargo& cargo);

    // The slots that a move may read from, ascending: those of its own rank; where there is none,
    // those of its own node; otherwise all.
    Ids choices(const Move& move) const;

    const Cargo& cargo() const { return cargo_; }

 private:
    Ids of(std::int32_t layer, std::int32_t expert) const;
    void require_held(std::int32_t layer) const;

    const Cargo& cargo_;
    std::vector<std::int32_t> start_;  // [layers, experts + 1]
    std::vector<std::int32_t> slots_;  // [layers, slots], by expert, then ascending
};

}  // namespace equipoise
