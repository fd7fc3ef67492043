// How the weights of an epoch travel: lots, sources, rounds and staging buffers.
#pragma once

#include <vector>

#include "migration/spec.h"

namespace equipoise {

struct MigrationPlan {
    // By lot, rank that they end on, round (local ones first), layer, slot.
    std::vector<SlotMove> moves;
    std::vector<std::int32_t>
        receive_start;  // [lots * ranks + 1]: where those of a lot and rank begin

    // Moves between ranks, by lot, rank that they leave, round, layer, slot.
    std::vector<std::int32_t> sends;
    std::vector<std::int32_t> send_start;  // [lots * ranks + 1]: likewise

    std::vector<std::int32_t> chunk_start;  // [lots + 1]: where they begin in the order of layers
    std::vector<std::int32_t> rounds_per_chunk;  // [lots]
};

// Lots: csrc/migration/layer_chunks.h. Sources: csrc/migration/source_choice.h. Rounds:
// csrc/migration/edge_colouring.h; a blob has the moves between two ranks by layer and slot, at
// most `parcel` of them. Buffers: an even lot fills a rank's buffers from the first on, an odd one
// up to the last. So two neighbours overlap exactly where they do not fit beside each other. Throws
// std::invalid_argument where `order` lacks a layer that changes or has one twice, where an expert
// is proposed that nobody holds, and where a layer does not fit the staging buffers.
MigrationPlan make_migration_plan(const MigrationSpec& spec);

}  // namespace equipoise
