// What a migration starts from: two placements, the ranks, and their staging buffers.
#pragma once

#include "common/span.h"

namespace equipoise {

// Slot s of a layer is on rank s / (slots / ranks); each node has ranks / nodes consecutive ranks.
// Arrays belong to the caller.
struct MigrationSpec {
    std::int32_t layers, experts, slots, ranks, nodes;
    const std::int32_t* installed;  // [layers, slots]
    const std::int32_t* proposed;   // [layers, slots]
    Ids order;                      // the layers that may change, each once
    std::int32_t staging;           // staging buffers of a rank
    std::int32_t message_slots;     // most slots of a message

    std::int32_t per_rank() const { return slots / ranks; }
    std::int32_t rank_of(std::int32_t slot) const { return slot / per_rank(); }
    std::int32_t per_node() const { return slots / nodes; }
    Ids before(std::int32_t layer) const { return row(installed, layer); }
    Ids after(std::int32_t layer) const { return row(proposed, layer); }

 private:
    Ids row(const std::int32_t* of, std::int32_t layer) const {
        const auto width = static_cast<std::size_t>(slots);
        return {of + layer * width, width};
    }
};

// Fills `slot` of `layer` with `expert`, read from the slot `source` of the same layer: a source is
// never overwritten early, because a layer's slots change only with its own commit.
struct SlotMove {
    std::int32_t layer, slot, expert, source;
    std::int32_t chunk;
    std::int32_t round;    // of its chunk; kLocal if source and slot are on one rank
    std::int32_t staging;  // the buffer that the weights wait in until the commit
};

constexpr std::int32_t kLocal = -1;

}  // namespace equipoise
