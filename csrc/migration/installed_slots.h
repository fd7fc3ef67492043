// Where each expert of each layer is installed.
#pragma once

#include <vector>

#include "migration/spec.h"

namespace equipoise {

class InstalledSlots {
 public:
    // Throws std::invalid_argument where an expert is proposed that a layer does not hold.
    explicit InstalledSlots(const MigrationSpec& spec);

    // The slots that a move may read from, ascending: those of its own rank; where there is none,
    // those of its own node; otherwise all.
    Ids sources_for(const SlotMove& move) const;

    const MigrationSpec& spec() const { return spec_; }

 private:
    Ids of(std::int32_t layer, std::int32_t expert) const;
    void require_held(std::int32_t layer) const;

    const MigrationSpec& spec_;
    std::vector<std::int32_t> start_;  // [layers, experts + 1]
    std::vector<std::int32_t> slots_;  // [layers, slots], by expert, then ascending
};

}  // namespace equipoise
