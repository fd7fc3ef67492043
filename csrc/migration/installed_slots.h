// Which slots hold each expert of each layer now.
#pragma once

#include <vector>

#include "migration/spec.h"

namespace equipoise {

class InstalledSlots {
 public:
    // Throws std::invalid_argument if an expert is proposed that its layer does not hold.
    explicit InstalledSlots(const MigrationSpec& spec);

    // Returns the slots that a move should read from, ascending: those on its own rank; if there
    // are none, those on its own node; else all.
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
