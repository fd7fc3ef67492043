// The migration plan: how the weights of a rebalance travel. Every rank makes the same plan from
// the same integers, so nothing of it is sent. docs/design/migration.md says more.
#pragma once

#include <vector>

#include "migration/spec.h"

namespace equipoise {

struct MigrationPlan {
    // By chunk, receiving rank, round (local moves first), layer, slot.
    std::vector<SlotMove> moves;
    // [chunks * ranks + 1]: where the moves to a rank in a chunk begin. `arrivals` in Python.
    std::vector<std::int32_t> receive_start;

    // Indices of moves between ranks, by chunk, sending rank, round, layer, slot. `departures` in
    // Python.
    std::vector<std::int32_t> sends;
    // [chunks * ranks + 1]: where those from a rank in a chunk begin. `leaving` in Python.
    std::vector<std::int32_t> send_start;

    std::vector<std::int32_t> chunk_start;       // [chunks + 1]: where each begins in spec.order
    std::vector<std::int32_t> rounds_per_chunk;  // [chunks]
};

// 1. Layers are grouped into chunks (layer_chunks.h).
// 2. Every slot that changes becomes a move, with a source (source_choice.h).
// 3. The moves of a chunk between two ranks, by layer and slot, are cut into messages of at most
//    `message_slots` slots, and messages get rounds (edge_colouring.h).
// 4. A chunk with an even number fills the buffers of a rank from the first on, one with an odd
//    number up to the last. At most two chunks are in flight, an even one and an odd one, and they
//    overlap exactly if they do not fit side by side.
//
// Throws std::invalid_argument if `order` lacks a layer that changes or has one twice, if an expert
// is proposed that its layer does not hold, and if a layer does not fit the staging buffers.
MigrationPlan make_migration_plan(const MigrationSpec& spec);

}  // namespace equipoise
